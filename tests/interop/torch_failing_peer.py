"""Worlds of forked ranks that train with DistributedDataParallel, in which one rank misbehaves.

    python torch_failing_peer.py < trials > outcomes

Each line of the input is a trial, JSON with `way` (a name of WAYS), `mode` (one of MODES) and
`size`. Each line of the output says how its ranks ended: a list with, for each rank, `code` (as
in subprocess.Popen.returncode) and, for a survivor, `error` (the class), `text`, `typed` (the
class that the group names), and `saved`: could a checkpoint be written afterwards?

The ranks are forks of one process that has imported torch, which takes seconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cydist.interop.torch  # noqa: F401

torch.set_num_threads(1)
DEADLINE = 30.0  # seconds for a trial
TIMEOUT = 1.0  # of the group, in seconds
STEPS = 3  # the victim misbehaves in the last one


def raises(rank: int) -> None:
    raise ValueError("this rank's own mistake")


def exits(rank: int) -> None:
    os._exit(3)


def is_killed(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends_early(rank: int) -> None:
    dist.destroy_process_group()
    os._exit(0)


def hangs(rank: int) -> None:
    signal.pause()


def calls_another(rank: int) -> None:
    dist.barrier()


WAYS: dict[str, Callable[[int], None]] = {
    "raise": raises,
    "exit": exits,
    "kill": is_killed,
    "fewer-steps": ends_early,
    "hang": hangs,
    "barrier": calls_another,
}


def with_hook(net: DistributedDataParallel) -> None:
    net.register_comm_hook(None, default_hooks.allreduce_hook)


def with_builtin_hook(net: DistributedDataParallel) -> None:
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


MODES: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "plain": ({}, lambda net: None),
    "unused": ({"find_unused_parameters": True}, lambda net: None),
    "static-graph": ({"static_graph": True}, lambda net: None),
    "python-hook": ({}, with_hook),
    "builtin-hook": ({}, with_builtin_hook),
}


def train(rank: int, size: int, way: str, mode: str, folder: Path) -> None:
    """Train until the victim, the last rank, misbehaves."""
    dist.init_process_group(
        "cydist", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    options, hook = MODES[mode]
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **options)
    hook(net)
    for step in range(STEPS):
        if rank == size - 1 and step == STEPS - 1:
            WAYS[way](rank)
        net(torch.ones(2, 8)).sum().backward()


def run_rank(rank: int, trial: dict[str, Any], folder: Path) -> None:
    """One rank: what it saw goes to a file, as a program's own `except` would write it."""
    group = None
    try:
        train(rank, trial["size"], trial["way"], trial["mode"], folder)
        seen = {"error": "", "text": ""}
    except BaseException as error:
        seen = {"error": type(error).__name__, "text": str(error)}
        group = dist.group.WORLD
    checkpoint = folder / f"checkpoint.{rank}"
    torch.save({"weights": torch.ones(3)}, checkpoint)
    typed = getattr(getattr(group, "host", None), "error", None)
    saved = bool(torch.load(checkpoint)["weights"].sum() == 3)
    seen |= {"typed": type(typed).__name__, "saved": saved}
    (folder / f"saw.{rank}").write_text(json.dumps(seen))


def outcome(trial: dict[str, Any]) -> list[dict[str, Any]]:
    """Fork the ranks, wait for them until the deadline, and collect what they saw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = {}
        for rank in range(trial["size"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_rank(rank, trial, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            ranks[rank] = pid
        codes = ended(ranks, victim=trial["size"] - 1 if trial["way"] == "hang" else None)
        found = []
        for rank in ranks:
            saw = folder / f"saw.{rank}"
            seen = json.loads(saw.read_text()) if saw.exists() else {}
            found.append({"code": codes[rank], **seen})
        return found


def ended(ranks: dict[int, int], victim: int | None) -> dict[int, int]:
    """How each rank ended; the victim that hangs, and who is left at the deadline, are killed."""
    watched = {rank: os.pidfd_open(pid) for rank, pid in ranks.items()}
    waiting = {fd for rank, fd in watched.items() if rank != victim}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], DEADLINE)
        if not ready:
            break
        waiting -= set(ready)
    codes = {}
    for rank, fd in watched.items():
        if rank == victim or fd in waiting:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1])
        os.close(fd)
    return codes


for line in sys.stdin:
    print(json.dumps(outcome(json.loads(line))), flush=True)

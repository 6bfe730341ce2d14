"""Worlds of forked ranks that train as torch offers it, in which one rank misbehaves.

    python torch_failing_peer.py < trials > outcomes

Each line of the input is a trial, JSON with `way` (a name of WAYS), `mode` (one of MODES), `size`,
and `timeout` (of the group, in seconds). Each line of the output says how its ranks ended: a list
with, for each rank, `code` (as in subprocess.Popen.returncode) and, for a survivor, `error` (the
class), `text`, `typed` (the class that the group names), and `saved`: could a checkpoint be written
afterwards?

The ranks are forks of one process that has imported torch, which takes seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import cydist.interop.torch  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
DEADLINE = 90.0  # seconds for a trial, on cores that other work shares
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


Step = Callable[[], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def backward_of(net: nn.Module) -> Step:
    return lambda: net(torch.ones(2, 8)).sum().backward()


def plain() -> Step:
    return backward_of(DistributedDataParallel(layers()))


def unused() -> Step:
    return backward_of(DistributedDataParallel(layers(), find_unused_parameters=True))


def static_graph() -> Step:
    return backward_of(DistributedDataParallel(layers(), static_graph=True))


def with_hook(state: object, hook: Callable[..., Any]) -> Step:
    net = DistributedDataParallel(layers())
    net.register_comm_hook(state, hook)
    return backward_of(net)


def python_hook() -> Step:
    return with_hook(None, default_hooks.allreduce_hook)


def fp16_hook() -> Step:
    return with_hook(None, default_hooks.fp16_compress_hook)


def powersgd_hook() -> Step:
    state = power.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    return with_hook(state, power.powerSGD_hook)


def builtin_hook() -> Step:
    net = DistributedDataParallel(layers())
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return backward_of(net)


def fsdp2() -> Step:
    net = layers()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    return backward_of(net)


def zero() -> Step:
    net = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)

    def step() -> None:
        backward_of(net.module)()  # so that the optimizer's call is the one that fails
        optimizer.step()

    return step


def zero_overlapped() -> Step:
    net = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=True
    )
    net.register_comm_hook(
        None,
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, net, optimizer),
    )

    return backward_of(net)


def pipeline() -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2 * size, loss_fn=nn.functional.mse_loss)
    args = (torch.ones(2 * size, 8),) if rank == 0 else ()
    target = {"target": torch.zeros(2 * size, 8)} if rank == size - 1 else {}
    return lambda: schedule.step(*args, **target)


def async_save() -> Step:
    state = {"weights": torch.full((4,), float(dist.get_rank())), "model": layers().state_dict()}
    return lambda: dcp.async_save(state, checkpoint_id=FOLDER[0] / "saved").result()


MODES: tuple[Callable[[], Step], ...] = (
    plain, unused, static_graph, python_hook, fp16_hook, powersgd_hook, builtin_hook, fsdp2, zero,
    zero_overlapped, pipeline, async_save,
)  # fmt: skip
FOLDER: list[Path] = []  # the trial's


def train(rank: int, size: int, way: str, mode: str, timeout: float, folder: Path) -> None:
    """Train until the victim, the last rank, misbehaves."""
    dist.init_process_group(
        "cydist", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    [make] = [each for each in MODES if each.__name__ == mode]
    step = make()
    for number in range(STEPS):
        if rank == size - 1 and number == STEPS - 1:
            WAYS[way](rank)
        step()


def run_rank(rank: int, trial: dict[str, Any], folder: Path) -> None:
    """One rank: what it saw goes to a file, as a program's own `except` would write it."""
    group = None
    faulthandler.enable()  # a rank that is aborted at the deadline prints its stacks
    FOLDER.append(folder)
    try:
        train(rank, **trial, folder=folder)
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
    folder = Path(tempfile.mkdtemp())
    ranks = {}
    for rank in range(trial["size"]):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, trial, folder)
            sys.exit()  # with all that a process does at its end
        ranks[rank] = pid
    codes = ended(ranks, victim=trial["size"] - 1 if trial["way"] == "hang" else None)
    found = []
    for rank in ranks:
        saw = folder / f"saw.{rank}"
        seen = json.loads(saw.read_text()) if saw.exists() else {}
        found.append({"code": codes[rank], **seen})
    shutil.rmtree(folder)
    return found


def ended(ranks: dict[int, int], victim: int | None) -> dict[int, int]:
    """How each rank ended. The victim that hangs is killed; who is left at the deadline prints its
    stacks and is aborted."""
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
            signal.pidfd_send_signal(fd, signal.SIGKILL if rank == victim else signal.SIGABRT)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1])
        os.close(fd)
    return codes


def serve() -> None:
    """Run the trials of the input."""
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()

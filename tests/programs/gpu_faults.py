"""One rank of a step of scripts/test-gpu about what goes wrong: `gpu_faults.py STEP`.

hang        one call that rank 1 never makes, and what the main thread may do meanwhile
groups      two groups hang at once
graphdeath  rank 1 ends, and rank 0 replays a graph
exit        no destroy_process_group at the end
exithung    the same, with a call under way that no rank answers
atexit      destroy_process_group in a function of atexit

Prints a line of JSON for each check, with "ok", and goes on after one that fails. STANDIN as in
gpu.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gpu_arrays  # noqa: E402
from gpu_arrays import Cupy, check, give_stacks_in_time, say, share_a_gpu, stand_in  # noqa: E402

import cydist as dist  # noqa: E402

SHORT, LONGEST = 3.0, 40.0  # seconds of a call that hangs; that its group may take to fail
LAUNCHES = 3000  # more than CUDA queues
cupy: Any = None


def ones(count: int = 3) -> Any:
    return cupy.ones(count, "float32")


def until_failed(group: Any, start: float) -> BaseException | None:
    while group.error is None and time.monotonic() - start < LONGEST:
        time.sleep(0.01)
        if group.failures.watch.oldest is None:
            group.failures.watch.poll()
    found: BaseException | None = group.error
    return found


def hangs(what: str, body: Callable[[Any], None], *, warm: bool = True) -> None:
    """Rank 0 runs `body`, whose call rank 1 never makes."""
    with check(f"hang: {what}"):
        group: Any = dist.new_group(range(SIZE))
        if warm:
            dist.all_reduce(ones(), group=group)
            dist.barrier(group)
        start, raised = time.monotonic(), ""
        if RANK == 0:
            try:
                body(group)
            except dist.DistError as error:
                raised = type(error).__name__
        blocked = time.monotonic() - start
        failed = until_failed(group, start)
        seconds = time.monotonic() - start
        say(
            f"hang: {what}", failed is not None and seconds < LONGEST, failed=type(failed).__name__,
            seconds=round(seconds, 2), blocked=round(blocked, 2), raised=raised,
        )  # fmt: skip
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group(group)
    dist.monitored_barrier(timeout=LONGEST)


def hang() -> None:
    y = ones()
    y += 1  # its kernel is there

    def plain(group: Any) -> None:
        dist.all_reduce(ones(), group=group, timeout=SHORT)

    def flood(group: Any) -> None:
        plain(group)
        for _ in range(LAUNCHES):  # the launch blocks
            y.__iadd__(1)

    def free(group: Any) -> None:
        big = cupy.empty(1 << 24, "u1")
        plain(group)
        del big
        cupy.get_default_memory_pool().free_all_blocks()  # cudaFree waits for the device

    def waits(group: Any) -> None:
        plain(group)
        cupy.cuda.runtime.deviceSynchronize()

    def dropped(group: Any) -> None:
        for _ in range(300):  # only the watchdog holds their events
            dist.all_reduce(ones(), group=group, async_op=True, timeout=SHORT)
        gc.collect()
        for _ in range(LAUNCHES):
            y.__iadd__(1)

    def of_torch(group: Any) -> None:
        torch = importlib.import_module("torch")
        big = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
        dist.all_reduce(torch.ones(3, device="cuda"), group=group, timeout=SHORT)
        del big
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    hangs("first call of a group", plain, warm=False)
    hangs("plain", plain)
    hangs("deviceSynchronize", waits)
    hangs("launch queue full", flood)
    hangs("cudaFree", free)
    hangs("dropped works", dropped)
    if "STANDIN" not in os.environ:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
            hangs("torch's empty_cache", of_torch)


def groups() -> None:
    """The first one's end must not wait for the second's deadline."""
    with check("two groups"):
        first, second = (dist.new_group(range(SIZE)) for _ in range(2))
        for each in (first, second):
            dist.all_reduce(ones(), group=each)
            dist.barrier(each)
        start = time.monotonic()
        if RANK == 0:
            for each, limit in ((first, SHORT), (second, 20.0)):
                with cupy.cuda.Stream(non_blocking=True):
                    dist.all_reduce(ones(), group=each, timeout=limit)
        failed = until_failed(first, start)
        seconds = round(time.monotonic() - start, 2)
        say("two groups: the first fails", failed is not None, seconds=seconds)
        begun = time.monotonic()
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group(first)
        seconds = time.monotonic() - begun
        say("two groups: the first is destroyed", seconds < 12, seconds=round(seconds, 2))
        dist.abort(second)
        say("two groups: both are over", True, seconds=round(time.monotonic() - start, 2))
    dist.monitored_barrier(timeout=LONGEST)


def graph_death() -> None:
    """Nothing but a graph's replays is under way when the other rank ends."""
    x = ones(1000)
    dist.all_reduce(x)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        dist.all_reduce(x)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    dist.monitored_barrier()
    if RANK == SIZE - 1:
        say("graphdeath", True)
        os._exit(0)
    time.sleep(1)
    start, group = time.monotonic(), dist.group.WORLD
    graph.launch(stream)
    while group.error is None and time.monotonic() - start < LONGEST:  # no other thread polls
        time.sleep(0.05)
    say("a replay whose peer ended is found", group.error is not None,
        failed=type(group.error).__name__, seconds=round(time.monotonic() - start, 2))  # fmt: skip
    start = time.monotonic()
    stream.synchronize()
    say("the replay is ended", True, seconds=round(time.monotonic() - start, 2))
    sys.stdout.flush()
    os._exit(bool(gpu_arrays.failed))


def forbid_threads() -> None:
    """Start none once the interpreter ends, as CPython 3.12 and later."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    atexit.register(setattr, threading.Thread, "start", refuse)  # what comes last runs first


def leave() -> None:
    forbid_threads()
    dist.all_reduce(ones())
    dist.barrier()
    say("about to exit", True)
    sys.exit(0)


def leave_hung() -> None:
    forbid_threads()
    dist.all_reduce(ones())
    dist.barrier()
    if RANK == 0:
        dist.all_reduce(ones(), timeout=60.0)
    say("about to exit", True)
    sys.exit(0)


def destroy_at_exit() -> None:
    atexit.register(say, "after the destroy", True)
    atexit.register(dist.destroy_process_group)
    leave()


STEPS = {
    "hang": hang, "groups": groups, "graphdeath": graph_death, "exit": leave,
    "exithung": leave_hung, "atexit": destroy_at_exit,
}  # fmt: skip


if __name__ == "__main__":
    share_a_gpu()
    stand_in()
    give_stacks_in_time()
    cupy = Cupy().cupy
    dist.init_process_group("nccl", timeout=60.0)
    STEPS[sys.argv[1]]()
    dist.destroy_process_group()
    sys.exit(bool(gpu_arrays.failed))

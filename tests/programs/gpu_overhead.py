"""The step "overhead" of scripts/test-gpu: what a small all_reduce costs the host, beside others.

The ways take turns, in rounds. With one rank nothing travels, so that calls can follow each other;
ranks that share a GPU wait for each other's time on it, and make few calls at a time.
"""

from __future__ import annotations

import atexit
import importlib
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cydist as dist

Ways = dict[str, Callable[[], Any]]
LIMIT = 60.0  # seconds that the other libraries may take to begin


def told(value: Any) -> Any:
    """What rank 0 says."""
    said = [value]
    dist.broadcast_object_list(said, 0)
    return said[0]


def free_port() -> int:
    """A port of rank 0's that nobody uses, for all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(told(free.getsockname()[1]))


def waited(x: Any) -> None:
    """An asynchronous call of cydist's, which the current stream waits for."""
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()


def by_cydist(x: Any) -> Ways:
    return {"cydist": lambda: dist.all_reduce(x), "cydist async": lambda: waited(x)}


def by_nccl(x: Any) -> Ways:
    """cupy's binding alone: nothing can cost less from Python."""
    cupy = importlib.import_module("cupy")
    nccl = importlib.import_module("cupy.cuda.nccl")
    unique_id = told(nccl.get_unique_id() if dist.get_rank() == 0 else None)
    comm = nccl.NcclCommunicator(dist.get_world_size(), unique_id, dist.get_rank())
    atexit.register(comm.abort)
    address, stream = x.data.ptr, cupy.cuda.get_current_stream().ptr
    return {"raw": lambda: comm.allReduce(address, address, 1, 7, 0, stream)}


def by_cupyx(x: Any) -> Ways:
    cupyx = importlib.import_module("cupyx.distributed")
    comm = cupyx.init_process_group(
        dist.get_world_size(), dist.get_rank(), host="127.0.0.1", port=free_port()
    )
    atexit.register(comm.stop)
    return {"cupyx": lambda: comm.all_reduce(x, x)}


def by_torch(x: Any) -> Ways:
    """By torch, and by cydist on torch's tensors."""
    torch = importlib.import_module("torch")
    c10d = importlib.import_module("torch.distributed")
    port, rank, size = free_port(), dist.get_rank(), dist.get_world_size()
    y = torch.ones(1, device="cuda")
    store = c10d.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=LIMIT))
    c10d.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
    )
    atexit.register(c10d.destroy_process_group)
    return {
        "torch": lambda: c10d.all_reduce(y),
        "torch async": lambda: c10d.all_reduce(y, async_op=True).wait(),
        "cydist on torch": lambda: dist.all_reduce(y),
        "cydist on torch async": lambda: waited(y),
    }


def everybodys(make: Callable[[Any], Ways], x: Any) -> tuple[Ways, str]:
    """The ways of one library, if all ranks have it; else none, and what the first says is
    missing."""
    found: Ways = {}
    failed = ""
    try:
        found = make(x)
    except Exception as error:
        failed = repr(error)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, failed)
    failed = next((text for text in said if text), "")
    return ({} if failed else found), failed


def overhead() -> dict[str, Any]:
    """Host microseconds of an all_reduce of 4 bytes: medians of rounds that take turns. cupy only;
    what else is here runs beside it, or is said to have failed."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.Stream(non_blocking=True).use()
    x = cupy.ones(1, "float32")
    ways: Ways = {}
    said: dict[str, Any] = {}
    for make in (by_nccl, by_cydist, by_cupyx, by_torch):
        more, failed = everybodys(make, x)
        ways |= more
        if failed:
            said[f"{make.__name__}_failed"] = failed
    rounds, calls = (7, 1000) if dist.get_world_size() == 1 else (6, 40)
    for way, times in measured(ways, rounds, calls, cupy.cuda.runtime.deviceSynchronize).items():
        said[f"{way}_us"] = round(statistics.median(times[1:]), 2)  # the first warms up
    return said


def measured(
    ways: Ways, rounds: int, calls: int, synchronize: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds of a call, by way and round."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            synchronize()
            dist.monitored_barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            found[way].append((time.perf_counter() - start) / calls * 1e6)
            synchronize()
    return found

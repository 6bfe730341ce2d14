"""The step "overhead" of scripts/test-gpu: what a small all_reduce costs the host, beside others.

The ways take turns, in rounds. With one rank nothing travels, so that calls can follow each other;
ranks that share a GPU wait for each other's time on it, and make few calls at a time. A library
that is missing, raises or does not come back is said to have failed, and the others go on.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cydist as dist

Ways = dict[str, Callable[[], Any]]
LIMIT = 20.0  # seconds that a library may take to begin
LIMITS: dict[str, float] = json.loads(os.environ.get("OVERHEAD_LIMITS", "{}"))  # of some of them
ROUNDS, CALLS = ((7, 1000), (6, 40))  # of one rank, and of more: rounds, calls
if "STANDIN" in os.environ:
    ROUNDS, CALLS = (3, 20), (3, 5)


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


def by_cydist(x: Any, given: Any) -> Ways:
    return {"cydist": lambda: dist.all_reduce(x), "cydist async": lambda: waited(x)}


def by_nccl(x: Any, unique_id: Any) -> Ways:
    """cupy's binding alone: nothing can cost less from Python."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    comm = nccl.NcclCommunicator(dist.get_world_size(), unique_id, dist.get_rank())
    atexit.register(comm.abort)
    address, stream = x.data.ptr, importlib.import_module("cupy").cuda.get_current_stream().ptr
    return {"raw": lambda: comm.allReduce(address, address, 1, 7, 0, stream)}


def by_cupyx(x: Any, port: int) -> Ways:
    cupyx = importlib.import_module("cupyx.distributed")
    comm = cupyx.init_process_group(
        dist.get_world_size(), dist.get_rank(), host="127.0.0.1", port=port
    )
    atexit.register(comm.stop)
    return {"cupyx": lambda: comm.all_reduce(x, x)}


def by_cydist_on_torch(x: Any, given: Any) -> Ways:
    """On torch's tensors."""
    y = importlib.import_module("torch").ones(1, device="cuda")
    return {
        "cydist on torch": lambda: dist.all_reduce(y), "cydist on torch async": lambda: waited(y),
    }  # fmt: skip


def by_torch(x: Any, port: int) -> Ways:
    torch = importlib.import_module("torch")
    c10d = importlib.import_module("torch.distributed")
    rank, size = dist.get_rank(), dist.get_world_size()
    y = torch.ones(1, device="cuda")
    limit = timedelta(seconds=LIMIT)
    store = c10d.TCPStore("127.0.0.1", port, size, rank == 0, limit)
    c10d.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit)
    atexit.register(c10d.destroy_process_group)
    return {
        "torch": lambda: c10d.all_reduce(y),
        "torch async": lambda: c10d.all_reduce(y, async_op=True).wait(),
    }


def unique_id() -> Any:
    """Rank 0's, by which all join."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    return told(nccl.get_unique_id() if dist.get_rank() == 0 else None)


def within(seconds: float, task: Callable[[], None], stream: Any) -> str:
    """What a task of another library says that goes wrong, "" for nothing. On a thread, which
    works on this one's GPU and stream: it may never come back."""
    failed = [f"not over after {seconds:.0f} s"]
    device = importlib.import_module("cupy").cuda.Device()

    def run() -> None:
        try:
            device.use()
            with stream:
                task()
            failed[0] = ""
        except Exception as error:
            failed[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return failed[0]


def of_all_ranks(
    make: Callable[[Any, Any], Ways], x: Any, given: Any, stream: Any
) -> tuple[Ways, str]:
    """The ways of one library, if all ranks have it and its calls work; else none, and what the
    first says is missing."""
    found: Ways = {}

    def begin() -> None:
        found.update(make(x, given))

    def call() -> None:
        for way in found.values():
            way()
        importlib.import_module("cupy").cuda.runtime.deviceSynchronize()

    limit = LIMITS.get(make.__name__, LIMIT)
    failed = first_failure(within(limit, begin, stream))
    failed = failed or first_failure(within(limit, call, stream))
    return ({} if failed else found), failed


def first_failure(own: str) -> str:
    """Of all ranks."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, own)
    return next((text for text in said if text), "")


def overhead() -> dict[str, Any]:
    """Host microseconds of an all_reduce of 4 bytes: medians of rounds that take turns. cupy only;
    what else is here runs beside it, or is said to have failed."""
    cupy = importlib.import_module("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    x = cupy.ones(1, "float32")
    rounds, calls = ROUNDS if dist.get_world_size() == 1 else CALLS
    synchronize = cupy.cuda.runtime.deviceSynchronize
    ways: Ways = {}
    said: dict[str, Any] = {}
    plan: list[tuple[Callable[[Any, Any], Ways], Callable[[], Any]]] = [
        (by_nccl, unique_id), (by_cydist, lambda: None), (by_cydist_on_torch, lambda: None),
        (by_cupyx, free_port), (by_torch, free_port),
    ]  # fmt: skip
    for make, prepare in plan:
        if make is by_cupyx:  # said at once: what comes may hang, on a GPU as well
            said["alone"] = medians(measured(ways, rounds, calls, synchronize))
            print(json.dumps({"rank": dist.get_rank(), **said}), flush=True)
        more, failed = of_all_ranks(make, x, prepare(), stream)
        ways |= more
        if failed:
            said[f"{make.__name__}_failed"] = failed
    return {**said, **medians(measured(ways, rounds, calls, synchronize))}


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Of each way, in microseconds, and how much that is over cupy's binding alone."""
    found = {way: statistics.median(each[1:]) for way, each in times.items()}  # the first warms up
    said = {f"{way}_us": round(each, 2) for way, each in found.items()}
    if (raw := found.get("raw")) is not None:
        over = {way: each - raw for way, each in found.items() if way != "raw"}
        said |= {f"{way}_over_raw_us": round(each, 2) for way, each in over.items()}
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

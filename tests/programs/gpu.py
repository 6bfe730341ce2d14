"""One rank of a step of scripts/test-gpu: `gpu.py STEP`, started by cydistrun.

Ranks may share one GPU: each says that it is a host of its own, and NCCL then talks over sockets
on the loopback interface. With STANDIN=libnccl.so.2 the step runs without a GPU, over the stand-in
of tests/nccl, as far as that goes.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARED = {
    "NCCL_HOSTID": f"cydist-{os.environ.get('MASTER_PORT')}-{RANK}",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from NCCL 2.30 on
    "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "NCCL_TUNER_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_MAX_CTAS": "2",
    "CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN",
}  # fmt: skip
for name, value in SHARED.items():  # before anything reads them
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402

import cydist as dist  # noqa: E402
from cydist.testing import oracle  # noqa: E402

SIZES = (0, 1, 1000)
LIMIT = 60.0  # seconds a call may take, several ranks on one GPU included


class Cupy:
    """Arrays of cupy on the current GPU."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(
            int(os.environ.get("LOCAL_RANK", 0)) % cupy.cuda.runtime.getDeviceCount()
        ).use()

    def array(self, values: Any) -> Any:
        return self.cupy.asarray(values)

    def get(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def takes(self, dtype: np.dtype) -> bool:
        return not dtype.name.startswith(("float8", "bfloat16"))

    def versions(self) -> dict[str, Any]:
        from cupy.cuda import nccl

        runtime = self.cupy.cuda.runtime
        return {
            "cupy": self.cupy.__version__, "nccl": nccl.get_version(),
            "driver": runtime.driverGetVersion(),
            "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        }  # fmt: skip


class Standin:
    """Arrays of the threads that stand for GPUs."""

    def __init__(self, path: str) -> None:
        import thread_gpu

        from cydist import devices
        from cydist.backends.nccl import gpu

        threading.current_thread().name = f"rank {RANK}"
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.gpus = thread_gpu.Gpus()
        devices.use(self.gpus)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        run = library.standin_run
        self.callback = kind(
            lambda stream, task: self.gpus.enqueue(stream, lambda: run(ctypes.c_void_p(task)))
        )
        library.standin_use_streams(self.callback)
        here = thread_gpu.Gpu(self.gpus)
        gpu.current = lambda: here  # type: ignore[assignment]

    def array(self, values: Any) -> Any:
        return self.gpus.array(values)

    def get(self, array: Any) -> np.ndarray:
        return array.get()

    def takes(self, dtype: np.dtype) -> bool:
        return True

    def versions(self) -> dict[str, Any]:
        return {"nccl": "stand-in"}


arrays: Any = None


def check(expected: Any, found: Any, what: Any) -> None:
    assert oracle.same_bits(np.asarray(expected), arrays.get(found)), (what, expected, found)


def values(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    if dtype.name.startswith("float8"):
        return ((np.arange(count) + rank) % 2).astype(dtype)
    return oracle.contribution(rank, count, dtype)


# Steps. Each returns what is to be printed.


def correctness() -> dict[str, Any]:
    """Every reduction of every dtype, every way to move, blocking and asynchronous."""
    calls = 0
    kinds = [dtype for dtype in oracle.DTYPES.values() if arrays.takes(dtype)]
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        for dtype in kinds:
            if not oracle.makes_sense(op, dtype):
                continue
            for count in SIZES:
                given = [values(r, count, dtype) for r in range(SIZE)]
                x = arrays.array(given[RANK])
                work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=calls % 2 == 1)
                if work is not None:
                    work.wait()
                check(oracle.reduced(op, given), x, (op, dtype, count))
                calls += 1
    for dtype in kinds:
        calls += moves(dtype)
    x = arrays.array(np.arange(12.0).reshape(3, 4) * (RANK + 1))
    dist.all_reduce(x[:, ::2])
    check(np.arange(12.0).reshape(3, 4)[:, ::2] * (SIZE * (SIZE + 1) // 2), x[:, ::2], "strided")
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, RANK)
    assert gathered == [*range(SIZE)]
    dist.barrier()
    return {"calls": calls + 3}


def moves(dtype: np.dtype) -> int:
    counts = [(3 * r + 1) % 4 for r in range(SIZE)]
    blocks = [values(r, counts[r], dtype) for r in range(SIZE)]
    x = arrays.array(values(RANK, 1000, dtype))
    dist.broadcast(x, SIZE - 1)
    check(values(SIZE - 1, 1000, dtype), x, "broadcast")
    outputs = [arrays.array(np.zeros(n, dtype)) for n in counts]
    dist.all_gather(outputs, arrays.array(blocks[RANK]))
    for block, output in zip(blocks, outputs, strict=True):
        check(block, output, "all_gather")
    whole = arrays.array(np.zeros(5 * SIZE, dtype))
    dist.all_gather_into_tensor(whole, arrays.array(values(RANK, 5, dtype)))
    check(np.concatenate([values(r, 5, dtype) for r in range(SIZE)]), whole, "into")
    back = arrays.array(np.zeros(counts[RANK], dtype))
    dist.scatter(back, outputs if RANK == 0 else None, 0)
    check(blocks[RANK], back, "scatter")
    into = [arrays.array(np.zeros(n, dtype)) for n in counts] if RANK == 0 else None
    dist.gather(back, into, 0)
    for block, output in zip(blocks, into or (), strict=False):
        check(block, output, "gather")
    if oracle.makes_sense("SUM", dtype):
        part = arrays.array(np.zeros(counts[RANK], dtype))
        dist.reduce_scatter(part, [arrays.array(values(RANK, n, dtype)) for n in counts])
        given = [values(r, counts[RANK], dtype) for r in range(SIZE)]
        check(oracle.reduced("SUM", given), part, "reduce_scatter")
    taken = [arrays.array(np.zeros(r + RANK, dtype)) for r in range(SIZE)]
    dist.all_to_all(taken, [arrays.array(values(RANK, r + RANK, dtype)) for r in range(SIZE)])
    for r, output in enumerate(taken):
        check(values(r, r + RANK, dtype), output, "all_to_all")
    near, far = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    if SIZE > 1:
        y = arrays.array(np.zeros(7, dtype))
        ops = [
            dist.P2POp(dist.isend, arrays.array(values(RANK, 7, dtype)), near),
            dist.P2POp(dist.irecv, y, far),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        check(values(far, 7, dtype), y, "batch")
    return 8


def streams() -> dict[str, Any]:
    """Order behind a long kernel, arrays that are dropped, capture and replay. cupy only."""
    cupy = arrays.cupy
    slow = cupy.random.random((4096, 4096), dtype="float32")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.zeros(1 << 20, "float32")
        for _ in range(5):
            slow = slow @ slow * cupy.float32(1e-4)
        x += 1
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 1
        stream.synchronize()
        assert float(y.min()) == float(y.max()) == SIZE
    for _ in range(50):
        x = cupy.ones(1 << 18, "float32")
        work = dist.all_reduce(x, async_op=True)
        kept = x.data.ptr
        del x
        other = cupy.zeros(1 << 18, "float32")
        assert other.data.ptr != kept or work.is_completed()
        work.synchronize()
    x = cupy.ones(1000, "float32")
    y = cupy.zeros(1000, "float32")
    dist.all_reduce(x)  # connections are made outside of captures
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        y += 1
        dist.all_reduce(y)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        expected = 0.0
        for _ in range(3):
            expected = (expected + 1) * SIZE
        assert float(y[0]) == expected, (float(y[0]), expected)
    dist.barrier()
    return {"captured": True}


def ended(group: Any) -> tuple[BaseException, float]:
    """What a group fails on, and after how many seconds."""
    start = time.monotonic()
    while group._failed is None:
        assert time.monotonic() - start < LIMIT, "the group does not fail"
        time.sleep(0.01)
        if group._watch.oldest is None:
            group._watch.tick()
    return group._failed, time.monotonic() - start


def faults() -> dict[str, Any]:
    """Different calls, a late rank, a dead one: each a typed error, and soon."""
    found = {}
    group: Any = dist.new_group(range(SIZE))
    dist.all_reduce(arrays.array(np.ones(3)), group=group)
    dist.all_reduce(arrays.array(np.ones(3 + RANK % 2)), group=group)
    error, seconds = ended(group)
    assert isinstance(error, dist.MismatchError), error
    found["mismatch_s"] = round(seconds, 2)
    dist.destroy_process_group(group)
    group = dist.new_group(range(SIZE))
    dist.all_reduce(arrays.array(np.ones(3)), group=group)
    dist.barrier(group)
    if RANK == 0:
        dist.all_reduce(arrays.array(np.ones(3)), group=group, timeout=1.0)
    error, seconds = ended(group)
    assert isinstance(error, dist.DistTimeoutError), error
    found["timeout_s"] = round(seconds, 2)
    dist.destroy_process_group(group)
    group = dist.group.WORLD
    dist.barrier()
    if RANK == SIZE - 1:
        print(json.dumps({"rank": RANK, **found}), flush=True)
        os._exit(0)
    dist.all_reduce(arrays.array(np.ones(3)))
    error, seconds = ended(group)
    assert isinstance(error, dist.DistError), error
    found["death_s"] = round(seconds, 2)
    found["death"] = type(error).__name__
    return found


def by_cupyx(x: Any) -> dict[str, Callable[[], Any]]:
    """An all_reduce by cupyx.distributed."""
    import cupyx.distributed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    comm = cupyx.distributed.init_process_group(1, 0, port=port)
    atexit.register(comm.stop)
    return {"cupyx": lambda: comm.all_reduce(x, x)}


def by_torch(x: Any) -> dict[str, Callable[[], Any]]:
    """An all_reduce by torch, and by cydist on torch's tensors."""
    import torch
    import torch.distributed as c10d

    y = torch.ones(1, device="cuda")
    c10d.init_process_group("nccl", store=c10d.HashStore(), rank=0, world_size=1)
    atexit.register(c10d.destroy_process_group)
    return {
        "torch": lambda: c10d.all_reduce(y),
        "torch async": lambda: c10d.all_reduce(y, async_op=True).wait(),
        "cydist on torch": lambda: dist.all_reduce(y),
    }


def overhead() -> dict[str, Any]:
    """Host microseconds of a small all_reduce: medians of rounds that take turns. cupy only; what
    else is here runs beside it, or is said to have failed."""
    from cupy.cuda import nccl

    cupy = arrays.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    raw = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x = cupy.ones(1, "float32")
    address = x.data.ptr

    def waited() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    ways: dict[str, Callable[[], Any]] = {
        "raw": lambda: raw.allReduce(address, address, 1, 7, 0, stream.ptr),
        "cydist": lambda: dist.all_reduce(x),
        "cydist async": waited,
    }
    said = {}
    for more in (by_cupyx, by_torch):
        try:
            ways |= more(x)
        except Exception as error:
            said[f"{more.__name__}_failed"] = repr(error)
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(7):
        for way, call in ways.items():
            cupy.cuda.runtime.deviceSynchronize()
            start = time.perf_counter()
            for _ in range(1000):
                call()
            took = time.perf_counter() - start
            cupy.cuda.runtime.deviceSynchronize()
            if turn:
                rounds[way].append(took * 1e3)
    raw.destroy()
    return {
        **said,
        **{f"{way}_us": round(statistics.median(each), 2) for way, each in rounds.items()},
    }


STEPS = {"correctness": correctness, "streams": streams, "faults": faults, "overhead": overhead}


def main() -> None:
    global arrays
    standin = os.environ.get("STANDIN")
    arrays = Standin(standin) if standin else Cupy()
    dist.init_process_group("nccl", timeout=LIMIT)
    start = time.monotonic()
    said = STEPS[sys.argv[1]]()
    if sys.argv[1] != "faults":
        dist.destroy_process_group()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"rank": RANK, **said, "seconds": seconds, **arrays.versions()}), flush=True)


main()

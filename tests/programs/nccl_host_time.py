"""What a call of backend "nccl" costs the host, without a GPU: `cydistrun -n RANKS THIS.py`.

CUDA and NCCL do nothing here: what is left is Python's, cydist's and cupy's. Prints, of each call,
microseconds over cupy.cuda.nccl's own call of the same kind: median and least of rounds in which
the ways take turns. On a GPU the events that cydist records and waits for come on top.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "support"))
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUNDS, CALLS, COUNT = 30, 500, 12
STREAM = 77
NOTHING = """
int none(void) { return 0; }
int one(void) { return 1; }
"""
BELOW_PYTHON = {"getDeviceCount": "one", "getDevice": "none"}  # what cupy's modules call directly


def built(source: Path, folder: str, name: str) -> Any:
    """A library out of C, loaded."""
    path = f"{folder}/{name}"
    command = ["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}", str(source)]
    subprocess.run([*command, "-o", path, "-lm", "-lpthread", "-lrt"], check=True, timeout=60)
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def replace_cuda(library: Any) -> None:
    """cupy's CUDA runtime does nothing from now on, for its other modules and for Python."""
    runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
    name_of, new = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_New
    name_of.argtypes, name_of.restype = [ctypes.py_object], ctypes.c_char_p
    new.argtypes, new.restype = [ctypes.c_void_p] * 3, ctypes.py_object
    for name, does in BELOW_PYTHON.items():
        signature = ctypes.create_string_buffer(name_of(runtime.__pyx_capi__[name]))
        kept.append(signature)
        function = ctypes.cast(getattr(library, does), ctypes.c_void_p)
        runtime.__pyx_capi__[name] = new(function, ctypes.addressof(signature), None)
    # Functions that are compiled, as cupy's are, take any arguments of their kind and say 0.
    zero = 0
    for name in ("eventCreateWithFlags", "eventDestroy", "streamCreateWithFlags", "setDevice"):
        setattr(runtime, name, int)
    for name in ("eventRecord", "streamWaitEvent"):
        setattr(runtime, name, max)
    for name in ("eventQuery", "streamIsCapturing"):
        setattr(runtime, name, zero.__mul__)
    runtime.getDevice, runtime.getDeviceCount = zero.__int__, (1).__int__


def tensor(folder: str) -> Any:
    """One of torch's, which are on the GPU from now on; None without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    import fake_torch_tensors

    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch._C._cuda_getCurrentRawStream = {0: STREAM}.__getitem__
    fake_torch_tensors.shown_on_gpus(folder)(0)
    return torch.ones(COUNT)


kept: list[Any] = []  # what C reads for as long as the process lives


def ways(x: Any, other: Any, y: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: a call of cydist's, and cupy's own of the same kind."""
    import cydist as dist

    nccl = importlib.import_module("cupy.cuda.nccl")
    said = [nccl.get_unique_id() if RANK == 0 else None]
    dist.broadcast_object_list(said, 0)
    comm = nccl.NcclCommunicator(SIZE, said[0], RANK)
    kept.append(comm)
    small, large = x.data.ptr, other.data.ptr
    f4 = nccl.NCCL_FLOAT32
    part = other[: COUNT // SIZE]

    def waited(work: Any) -> None:
        work.wait()

    def reduce() -> None:
        comm.allReduce(small, small, COUNT, f4, nccl.NCCL_SUM, STREAM)

    def exchange() -> None:
        nccl.groupStart()
        for rank in range(SIZE):
            comm.send(small, COUNT // SIZE, f4, rank, STREAM)
            comm.recv(large, COUNT // SIZE, f4, rank, STREAM)
        nccl.groupEnd()

    found: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce": (lambda: dist.all_reduce(x), reduce),
        "all_reduce async": (lambda: waited(dist.all_reduce(x, async_op=True)), reduce),
        "broadcast": (
            lambda: dist.broadcast(x, 0),
            lambda: comm.broadcast(small, small, COUNT, f4, 0, STREAM),
        ),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(x, part),
            lambda: comm.allGather(large, small, COUNT // SIZE, f4, STREAM),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(part, x),
            lambda: comm.reduceScatter(small, large, COUNT // SIZE, f4, nccl.NCCL_SUM, STREAM),
        ),
        "all_to_all_single": (lambda: dist.all_to_all_single(other, x), exchange),
    }
    if y is not None:
        found |= {
            "all_reduce of torch's": (lambda: dist.all_reduce(y), reduce),
            "all_reduce of torch's async": (
                lambda: waited(dist.all_reduce(y, async_op=True)), reduce,
            ),
        }  # fmt: skip
    if SIZE > 1:
        peer = 1 - RANK
        move, start = (dist.send, dist.isend) if RANK == 0 else (dist.recv, dist.irecv)

        def sent() -> None:
            comm.send(small, COUNT, f4, peer, STREAM)

        found["send"] = (lambda: move(x, peer), sent)
        found["isend"] = (lambda: waited(start(x, peer)), sent)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        standin = built(TESTS / "backends/nccl/fake_nccl.c", folder, "libnccl.so.2")
        source = Path(folder, "nothing.c")
        source.write_text(NOTHING, encoding="ascii")
        replace_cuda(built(source, folder, "nothing.so"))
        y = tensor(folder)
    warnings.simplefilter("ignore")  # that there is no CUDA
    import fake_cupy
    from gpu_overhead import measured

    import cydist as dist
    from cydist.backends.nccl import cuda

    cupy = fake_cupy.cupy
    cupy.cuda.is_available = lambda: True
    cuda.CupyGpu.identity = lambda self, version: f"nothing/{RANK}"  # type: ignore[method-assign]
    cuda.CupyGpu.capability = lambda self: 90  # type: ignore[method-assign]
    dist.init_process_group("nccl", timeout=60)
    arrays = [fake_cupy.on_gpu(np.ones(COUNT, np.float32)) for _ in range(2)]
    with cupy.cuda.stream._BaseStream(STREAM, 0):
        chosen = ways(*arrays, y)
        standin.standin_do_nothing()
        both = {f"{name}{way}": pair[i] for name, pair in chosen.items()
                for i, way in enumerate(("", " raw"))}  # fmt: skip
        times = measured(both, ROUNDS, CALLS, lambda: None)
    if RANK == 0:
        for name in chosen:
            own, raw = (times[f"{name}{way}"][3:] for way in ("", " raw"))  # the first warm up
            over = {
                kind.__name__: round(kind(own) - kind(raw), 2) for kind in (statistics.median, min)
            }
            print(json.dumps({"call": name, "ranks": SIZE, "raw": round(min(raw), 2), **over}))
    dist.destroy_process_group()


main()

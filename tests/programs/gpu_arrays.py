"""Arrays for the steps of scripts/test-gpu: cupy's, torch's, and those of a stand-in for a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np


class Cupy:
    """Arrays of cupy on the current GPU."""

    name = "cupy"

    def __init__(self) -> None:
        cupy = self.cupy = importlib.import_module("cupy")
        local = int(os.environ.get("LOCAL_RANK", 0))
        cupy.cuda.Device(local % cupy.cuda.runtime.getDeviceCount()).use()

    def array(self, values: Any) -> Any:
        # By its bytes: cupy copies no floats of 8 bits, and needs kernels for none of this.
        given = np.ascontiguousarray(values)
        raw = self.cupy.asarray(np.frombuffer(given.tobytes() or b"\0", "u1"))
        return self.cupy.ndarray(np.shape(values), given.dtype, raw.data)

    def get(self, array: Any) -> np.ndarray:
        if not array.flags.c_contiguous or not array.size:
            return self.cupy.asnumpy(array)
        raw = self.cupy.asnumpy(self.cupy.ndarray(array.nbytes, "u1", array.data))
        return raw.view(array.dtype).reshape(array.shape)

    def reduces(self, dtype: np.dtype) -> bool:
        """Does this GPU's NCCL reduce it?"""
        from cupy.cuda import nccl

        modern = nccl.get_version() >= 22400 and int(self.cupy.cuda.Device().compute_capability)
        return not dtype.name.startswith("float8") or modern >= 90

    def versions(self) -> dict[str, Any]:
        from cupy.cuda import nccl

        runtime = self.cupy.cuda.runtime
        return {
            "cupy": self.cupy.__version__, "nccl": nccl.get_version(),
            "driver": runtime.driverGetVersion(),
            "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        }  # fmt: skip


class Torch:
    """Tensors of torch on the GPU that is current for cupy."""

    name = "torch"
    device = "cuda"

    def __init__(self) -> None:
        torch = self.torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ImportError("this torch has no GPU to work on")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())

    def array(self, values: Any) -> Any:
        torch, given = self.torch, np.ascontiguousarray(values)
        dtype = getattr(torch, given.dtype.name)
        if not given.size:  # torch gives no other dtype to a tensor of no bytes
            return torch.empty(np.shape(values), dtype=dtype, device=self.device)
        raw = torch.from_numpy(np.frombuffer(given.tobytes(), "u1").copy()).to(self.device)
        return raw.view(dtype).reshape(np.shape(values))

    def get(self, array: Any) -> np.ndarray:
        import ml_dtypes

        name = str(array.dtype).removeprefix("torch.")
        kind = np.dtype(getattr(ml_dtypes, name, None) or name)
        if not array.numel():
            return np.empty(tuple(array.shape), kind)
        raw = array.contiguous().reshape(-1).view(self.torch.uint8)
        return np.frombuffer(raw.cpu().numpy().tobytes(), kind).reshape(tuple(array.shape))

    def reduces(self, dtype: np.dtype) -> bool:
        return not dtype.name.startswith("float8")


class Standin:
    """Arrays of the threads that stand for GPUs."""

    name = "standin"

    def __init__(self, path: str) -> None:
        import thread_gpu

        from cydist import devices
        from cydist.backends.nccl import gpu

        threading.current_thread().name = f"rank {os.environ['RANK']}"
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.gpus = thread_gpu.Gpus()
        devices.use(self.gpus)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        run = library.standin_run
        self.callback = kind(
            lambda stream, task: self.gpus.enqueue(stream, lambda: run(ctypes.c_void_p(task)))
        )
        library.standin_use_streams(self.callback)
        self.library = library
        here = thread_gpu.Gpu(self.gpus)
        gpu.current = lambda: here

    def run_at_once(self) -> None:
        """NCCL's calls are over when they return, for arrays that the CPU works on."""
        self.library.standin_use_streams(None)

    def array(self, values: Any) -> Any:
        return self.gpus.array(values)

    def get(self, array: Any) -> np.ndarray:
        found: np.ndarray = array.get()
        return found

    def reduces(self, dtype: np.dtype) -> bool:
        return True

    def versions(self) -> dict[str, Any]:
        return {"nccl": "stand-in"}


class StandinTensors:
    """torch's tensors beside those."""

    name = "torch"

    def __init__(self, standin: Standin) -> None:
        import gpu_tensors

        with tempfile.TemporaryDirectory() as folder:
            tensors = gpu_tensors.Tensors(standin.gpus, gpu_tensors.shown_on_gpus(folder))
        tensors.use()
        tensors.tensors_on(int(os.environ["RANK"]))
        self.torch, self.array, self.get = tensors.torch, tensors.array, tensors.get

    def reduces(self, dtype: np.dtype) -> bool:
        return True


def all_kinds(standin: str | None) -> Iterator[Any]:
    """The kinds of arrays that there are here; the first is whose versions are told."""
    first = Standin(standin) if standin else Cupy()
    yield first
    # no torch, or one without a GPU
    with contextlib.suppress(ImportError):
        yield StandinTensors(first) if isinstance(first, Standin) else Torch()

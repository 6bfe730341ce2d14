"""Backend "nccl" without a GPU: cupy's real binding, over a stand-in for libnccl in host memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import fake_cuda
import fake_gpu_threaded
import fake_torch_tensors
import pytest

from cydist import asarray

LOG_BYTES = 1 << 20


class Standin:
    """The stand-in, which is loaded in NCCL's place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib: Any = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.lib.standin_log.restype = ctypes.c_size_t
        self._callback: Any = None

    def log(self) -> list[str]:
        """The calls since the last time: rank and call; -1 for no rank's."""
        into = ctypes.create_string_buffer(LOG_BYTES)
        size = self.lib.standin_log(into, ctypes.c_size_t(LOG_BYTES))
        return into.raw[:size].decode().splitlines()

    def use_streams(self, gpus: fake_gpu_threaded.Gpus | None) -> None:
        """Calls run on these streams; None: at once."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        run = self.lib.standin_run

        def enqueue(stream: int, task: int) -> int:
            assert gpus is not None
            gpus.enqueue(stream, lambda: run(ctypes.c_void_p(task)))
            return 0

        self._callback = None if gpus is None else kind(enqueue)
        self.lib.standin_use_streams(self._callback)


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """Built, loaded, and taken by cupy for NCCL."""
    path = fake_cuda.built(fake_cuda.NCCL, "fake_nccl.c", tmp_path_factory.mktemp("nccl"))
    loaded = Standin(path)
    if not hasattr(ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD), "standin_log"):
        pytest.fail("another NCCL is loaded, by torch perhaps: run tests/backends/nccl alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA
        pytest.importorskip("cupy")
    found = sys.modules.get("cupy.cuda.nccl")
    if found is not None and not found.available:
        del sys.modules["cupy.cuda.nccl"]  # a test before has let it look, in vain
    return loaded


@pytest.fixture(scope="session")
def standins(standin: Standin) -> Path:
    """The folder of all stand-ins, for programs that run over them (STANDIN)."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and (Path(torch.origin or "").parent / "lib/libtorch_cuda.so").exists():
        pytest.skip("the stand-in replaces torch.cuda's classes, as only torch's CPU build allows")
    folder = standin.path.parent
    fake_cuda.built(fake_cuda.CUDA, "fake_cuda.c", folder)
    fake_cuda.built(fake_cuda.TENSORS, "fake_tensors.c", folder)
    return folder


@pytest.fixture(scope="session")
def tensors_on(
    standin: Standin, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], int] | None:
    """Says on which GPU torch's tensors are; None without torch. Made before any thread of a group
    runs: the first that looks at an array when torch is there learns what shows tensors."""
    if importlib.util.find_spec("torch") is None:
        return None
    return fake_torch_tensors.shown_on_gpus(tmp_path_factory.mktemp("tensors"))


@pytest.fixture(scope="session")
def gpus(
    standin: Standin, tensors_on: Callable[[int], int] | None
) -> Generator[fake_gpu_threaded.Gpus, None, None]:
    """A GPU for every rank that is a thread, with streams that NCCL's calls run on."""
    from cydist.backends.nccl import cuda
    from cydist.devices import array_libraries

    library = fake_gpu_threaded.Gpus()
    array_libraries.register(library)
    standin.use_streams(library)
    patch = pytest.MonkeyPatch()
    patch.setattr(cuda, "current", lambda: fake_gpu_threaded.Gpu(library))
    yield library
    patch.undo()
    standin.use_streams(None)
    array_libraries._others.discard(library.name)
    del array_libraries._libraries[library.name]


@pytest.fixture(scope="session")
def loaded_tensors(
    gpus: fake_gpu_threaded.Gpus, tensors_on: Callable[[int], int] | None
) -> fake_torch_tensors.Tensors:
    """torch, whose tensors are shown to cydist as GPUs'."""
    if tensors_on is None:
        pytest.skip("torch is not installed")
    loaded = fake_torch_tensors.Tensors(gpus, tensors_on)
    with loaded.here():
        if asarray(loaded.array([1.0])).device != "cuda":
            pytest.fail("a test before has shown tensors to cydist: run tests/backends/nccl alone")
    return loaded


@pytest.fixture
def tensors(
    loaded_tensors: fake_torch_tensors.Tensors, monkeypatch: pytest.MonkeyPatch
) -> fake_torch_tensors.Tensors:
    """torch's tensors on the same GPUs, whose current streams are others."""
    from cydist.devices import array_libraries

    monkeypatch.setattr(array_libraries, "_libraries", dict(array_libraries._libraries))
    loaded_tensors.use()
    return loaded_tensors


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest, gpus: Any) -> Any:
    """Whose arrays a test takes."""
    return gpus if request.param == "cupy" else request.getfixturevalue("tensors")


class GpuJobs:
    """Jobs on backend "nccl", kept between tests."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def get(self, size: int) -> Any:
        """A job of so many ranks, in good health."""
        from cydist.testing import ThreadJob

        job = self._kept.get(size)
        if job is None or job.broken:
            job = self._kept[size] = ThreadJob(size, "nccl")
        return job

    def close(self) -> None:
        """End them."""
        for job in self._kept.values():
            job.close()


@pytest.fixture(scope="session")
def gpu_jobs(gpus: fake_gpu_threaded.Gpus) -> Generator[GpuJobs, None, None]:
    """Jobs whose ranks have a GPU each."""
    kept = GpuJobs()
    yield kept
    kept.close()

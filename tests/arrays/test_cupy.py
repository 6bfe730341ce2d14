"""cupy's own arrays, whose buffer refuses: everything that can be had without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import cupy, on_gpu
from fake_gpu_delayed import LateArray, LateDevice, install

import cydist as dist
from cydist._native import asarray
from cydist.devices import array_libraries
from cydist.testing import run_threads

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "every other": lambda x: x[::2, 1::2],
    "backwards": lambda x: x[::-1, ::-1],
    "0-d": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_layouts(view: Callable[[Any], Any]) -> None:
    """Shape, strides, address and device are cupy's, though its buffer raises TypeError."""
    memory = np.arange(24, dtype="f4").reshape(4, 6)
    array = view(on_gpu(memory, 3))
    with pytest.raises(TypeError):
        memoryview(array)
    found = asarray(array)
    assert (found.device, found.device_index, found.writable) == ("cuda", 3, True)
    assert (found.shape, found.strides) == (array.shape, array.strides)
    assert found.owner is array
    assert not found.size or found.address == array.data.ptr


@pytest.mark.parametrize(
    "dtype",
    [
        *"?bBhHiIqQefdFD", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)  # fmt: skip
def test_dtypes(dtype: Any) -> None:
    """Each by the name that numpy gives it."""
    found = asarray(on_gpu(np.zeros(3, dtype)))
    assert (found.dtype_name, found.itemsize) == (np.dtype(dtype).name, np.dtype(dtype).itemsize)
    assert found.dtype != 0


def test_what_shows_cuda_memory_is_no_buffer() -> None:
    """Managed memory has a buffer that does not raise, and is a GPU's all the same."""

    class Managed(bytearray):
        __cuda_array_interface__: ClassVar = {
            "version": 3, "shape": (2,), "typestr": "<f4", "data": (4096, False),
        }  # fmt: skip

    found = asarray(Managed(8))
    assert (found.device, found.address, found.dtype_name) == ("cuda", 4096, "float32")


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, None])
def test_an_array_of_the_cpu_may_be_of_such_a_class(error: type[Exception] | None) -> None:
    """jax's property raises for what is on the CPU: its buffer is taken then, time and again."""

    class Either(bytearray):
        on_gpu = False

        @property
        def __cuda_array_interface__(self) -> Any:
            if self.on_gpu:
                return {"version": 3, "shape": (2,), "typestr": "<f4", "data": (4096, False)}
            if error is not None:
                raise error("it is on the CPU")
            return None

    for _ in range(2):
        found = asarray(Either(8))
        assert (found.device, found.shape) == ("cpu", (8,))
    other = Either(8)
    other.on_gpu = True
    assert asarray(other).device == "cuda"


def test_numpys_arrays_of_memory_that_both_sides_reach_are_the_cpus() -> None:
    """numba's mapped and managed arrays are numpy's, and show CUDA's interface."""

    class Mapped(np.ndarray):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"version": 3, "shape": self.shape, "typestr": "<f8", "data": (4096, False)}

    memory = np.zeros(3)
    found = asarray(memory.view(Mapped))
    assert (found.device, found.address) == ("cpu", memory.ctypes.data)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", ["u1", "f2", "c16"])
def test_views_for_copies(view: Callable[[Any], Any], dtype: str) -> None:
    """What cupy packs from and unpacks to is the array's memory, in words of its elements."""
    memory = np.arange(24, dtype="u1").astype(dtype).reshape(4, 6)
    given = view(on_gpu(memory, 2))
    found = array_libraries.Cupy()._view(asarray(given))
    assert (type(found), found.device.id) == (cupy.ndarray, 2)
    assert (found.shape, found.strides) == (given.shape, given.strides)
    assert not found.size or found.data.ptr == given.data.ptr
    assert found.itemsize == given.itemsize


def test_every_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on tcp stages them, strided ones too; only the copies are a stand-in's."""
    device = install(monkeypatch, "eager", 1 << 10)
    monkeypatch.setattr(
        LateDevice, "owns", lambda device, owner: isinstance(owner, cupy.ndarray | LateArray)
    )

    def body(rank: int) -> tuple[float, float]:
        memory = np.full((200, 3), rank + 1.0)
        array = on_gpu(memory)
        dist.all_reduce(array)
        dist.all_reduce(array[:, 1])
        device.synchronize(device.current_stream(0))
        return float(memory[7, 0]), float(memory[199, 1])

    assert run_threads(body, 2, "tcp") == [(3.0, 6.0)] * 2


def test_a_cpu_job_imports_no_cupy() -> None:
    """`import cydist` and a call on numpy's arrays leave it alone."""
    program = (
        "import sys, numpy, cydist; from cydist.testing import run_threads; "
        "run_threads(lambda rank: cydist.all_reduce(numpy.ones(3)), 2, 'tcp'); "
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

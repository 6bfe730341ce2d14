"""Arrays in memory that is not the CPU's: a rank that manages that memory allocates and copies."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from cydist import _native
from cydist._native import asarray, empty
from cydist.devices import array_libraries


class OnDevice:
    """Host memory that claims to be on CUDA device 3."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x
        self.__cuda_array_interface__ = {**x.__array_interface__, "strides": x.strides}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


class Manager:
    """Manages such memory, by numpy."""

    def allocate(self, nbytes: int, like: _native.Array) -> _native.Array:
        return asarray(OnDevice(np.empty(nbytes, np.uint8)))

    def copy(self, into: _native.Array, source: _native.Array) -> None:
        np.copyto(view(into), view(source).reshape(into.shape))


def view(array: _native.Array) -> np.ndarray:
    """The memory of an Array, as numpy sees it."""
    holder: Any = type("Holder", (), {})()
    holder.__array_interface__ = {
        "version": 3, "shape": array.shape, "strides": array.strides,
        "typestr": np.dtype(array.dtype_name).str, "data": (array.address, False),
    }  # fmt: skip
    return np.asarray(holder)


@pytest.fixture(autouse=True)
def managed() -> Generator[None, None, None]:
    """The memory of CUDA devices has a manager while the test runs."""
    _native.use_memory("cuda", Manager())
    yield
    _native.use_memory("cuda", array_libraries)


def test_packing_asks_the_manager() -> None:
    """dense() of a strided array is a copy on the same device, in C order."""
    x = np.arange(12, dtype="f4").reshape(3, 4)
    dense = asarray(OnDevice(x.T)).dense()
    assert (dense.device, dense.device_index, dense.shape) == ("cuda", 3, (4, 3))
    assert dense.contiguous
    np.testing.assert_array_equal(view(dense), x.T)


def test_unpacking_asks_the_manager() -> None:
    """take() writes the elements where the strides say."""
    x, y = np.zeros((3, 4), "i2"), np.arange(12, dtype="i2").reshape(4, 3)
    asarray(OnDevice(x.T)).copy_from(asarray(OnDevice(y)))
    np.testing.assert_array_equal(x.T, y)


def test_new_memory_is_on_the_device_of_its_model() -> None:
    """empty(n, like) and empty_like() lie on the device of `like`."""
    like = asarray(OnDevice(np.zeros((2, 2), "f8")))
    for new in (empty(5, like), like.empty_like()):
        assert (new.device, new.device_index, new.dtype_name) == ("cuda", 3, "float64")
        assert new.writable
        assert isinstance(new.owner, OnDevice)


def test_devices_are_not_mixed() -> None:
    """An array takes nothing from memory of another device."""
    on_device, on_host = asarray(OnDevice(np.zeros(3))), asarray(np.zeros(3))
    for into, source in ((on_device, on_host), (on_host, on_device)):
        with pytest.raises(ValueError, match="cannot take what is on"):
            into.copy_from(source)


def test_without_a_manager_memory_is_not_made() -> None:
    """ValueError that says where the memory would be."""
    _native.use_memory("cuda", None)
    with pytest.raises(ValueError, match="cuda:3, not the CPU"):
        asarray(OnDevice(np.zeros(3))).empty_like()

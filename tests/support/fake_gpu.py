"""GPUs for tests, in host memory: their arrays, and what all kinds of them have in common."""

from __future__ import annotations

import ctypes
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cydist import asarray
from cydist._native import Array
from cydist.devices import array_libraries

if TYPE_CHECKING:
    from typing import Self

POISON = 0xA5


class DeviceArray:
    """Memory of GPU `index`, whose library is `lib`, with the interface of CUDA arrays."""

    def __init__(self, lib: HostMemory, memory: np.ndarray, index: int) -> None:
        self.lib = lib
        self.memory = memory
        self.index = index
        self.whole: Self | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3, "shape": self.memory.shape, "typestr": self.memory.dtype.str,
            "strides": self.memory.strides, "data": (self.memory.ctypes.data, False),
        }  # fmt: skip

    @property
    def dtype(self) -> np.dtype:
        """numpy's, which knows the names of what has no typestr."""
        return self.memory.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __getitem__(self, key: Any) -> Self:
        return self.view(self.memory[key])

    def view(self, memory: np.ndarray) -> Self:
        """Another view of the memory."""
        made = type(self)(self.lib, memory, self.index)
        made.whole = self
        return made

    def get(self) -> np.ndarray:
        """What is in it when the current stream has come so far."""
        self.lib.synchronize(self.lib.current_stream(self.index))
        return self.memory.copy()


class HostMemory(array_libraries.ArrayLibrary):
    """An array library whose streams do what `enqueue` is given, some time.

    Attributes:
        kind: Of its arrays.
        first_stream: The number of device 0's default stream; the others' follow.
    """

    kind: Any
    first_stream: int

    def __init__(self) -> None:
        self._local = threading.local()
        self.capturing = False
        self.error: Exception | None = None  # what the device says from now on

    @abstractmethod
    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Something to do for a stream."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Come back when a stream has done what it was given."""

    def array_on(self, index: int, values: Any) -> Any:
        """Values on a device, written by its current stream."""
        given = np.array(values, copy=True, order="C")
        made = self.made_on(index, given.nbytes)
        memory = made.memory[: given.nbytes].view(given.dtype).reshape(given.shape)
        self.enqueue(self.current_stream(index), lambda: np.copyto(memory, given))
        return made.view(memory)

    def made_on(self, index: int, nbytes: int) -> Any:
        """Memory that, once given up, is used again by its stream, as pools of GPUs do."""
        memory = np.full(max(nbytes, 1), POISON, np.uint8)
        made = self.kind(self, memory, index)
        stream = self.current_stream(index)
        weakref.finalize(made, self.enqueue, stream, lambda: memory.fill(POISON))
        return made

    def current_stream(self, device: int) -> int:
        stream: int = getattr(self._local, str(device), self.first_stream + device)
        return stream

    @contextmanager
    def on_stream(self, device: int, stream: int) -> Iterator[None]:
        before = self.current_stream(device)
        setattr(self._local, str(device), stream)
        try:
            yield
        finally:
            setattr(self._local, str(device), before)

    def is_capturing(self, device: int) -> bool:
        return self.capturing

    def allocate(self, device: int, nbytes: int) -> Array:
        return asarray(self.made_on(device, nbytes))

    def copy(self, into: Array, source: Array) -> None:
        self.enqueue(self.current_stream(into.device_index), copying(into, source))


def copying(into: Array, source: Array) -> Callable[[], None]:
    """What copies between two arrays of which one may be strided."""
    target, given = strided(into), strided(source)
    if into.contiguous:
        target = target.reshape(given.shape)
    else:
        given = given.reshape(target.shape)
    return lambda: np.copyto(target, given)


def strided(array: Array) -> np.ndarray:
    """The memory of an Array as numpy sees it, its elements as words or bytes."""
    shape, strides, word = array_libraries.as_words(array)
    start, end = array.extent
    memory = (ctypes.c_ubyte * (end - start)).from_address(start)
    return np.ndarray(shape, f"V{word}", memory, array.address - start, strides)

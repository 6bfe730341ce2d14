"""GPUs for tests, in host memory: streams are threads, NCCL is the stand-in of tests/nccl.

Each thread that is called "rank N" has GPU N. What is enqueued runs when its stream comes to it,
so whoever forgets to wait reads old bytes as soon as a test holds a stream back (`hold`).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
from device_array import DeviceArray

from cydist import asarray, devices
from cydist._native import Array

POISON = 0xA5
DEADLINE = 30.0  # seconds that a test waits for a stream
FIRST = 1000  # default streams are FIRST + device


class Stream:
    """A thread, and what it has to do."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def start(self) -> None:
        """Do what comes from now on, and what came."""
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self.queue.get()
            work()
            del work


class Event:
    """A place on a stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()


class GpuArray(DeviceArray):
    """Memory of one of Gpus."""


class Gpus(devices.ArrayLibrary):
    """The library of `GpuArray`."""

    name = "threads"

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(5000)
        self._local = threading.local()
        self.capturing = False
        self.error: Exception | None = None  # what the device says from now on

    def array(self, values: Any) -> GpuArray:
        """Values on this thread's GPU, written by its current stream."""
        given = np.array(values, copy=True, order="C")
        made = self._made(here(), given.nbytes)
        memory = made.memory[: given.nbytes].view(given.dtype).reshape(given.shape)
        self.enqueue(self.current_stream(here()), lambda: np.copyto(memory, given))
        return made.view(memory)

    def _made(self, index: int, nbytes: int) -> GpuArray:
        """Memory that its stream uses for something else as soon as it is given up."""
        memory = np.full(max(nbytes, 1), POISON, np.uint8)
        made = GpuArray(self, memory, index)
        stream = self.current_stream(index)
        weakref.finalize(made, self.enqueue, stream, lambda: memory.fill(POISON))
        return made

    # The timeline.

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Something to do for a stream.

        Takes no lock: the collector, which gives memory up, may come in the middle of it.
        """
        line = self._streams.get(stream)
        if line is None:
            made = Stream()
            line = self._streams.setdefault(stream, made)
            if line is made:
                line.start()
        line.queue.put(work)

    def hold(self, stream: int | None = None) -> threading.Event:
        """A stream does nothing more until the result is set."""
        gate = threading.Event()
        chosen = self.current_stream(here()) if stream is None else stream
        self.enqueue(chosen, lambda: gate.wait(DEADLINE))
        return gate

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has come so far."""
        event = Event()
        self.record(event, 0, stream)
        if not event.reached.wait(DEADLINE):
            raise TimeoutError(f"stream {stream} is not over after {DEADLINE} s")

    # What cydist asks.

    def owns(self, owner: object) -> bool:
        return isinstance(owner, GpuArray)

    def current_stream(self, device: int) -> int:
        stream: int = getattr(self._local, str(device), FIRST + device)
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
        return asarray(self._made(device, nbytes))

    def copy(self, into: Array, source: Array) -> None:
        target, given = strided(into), strided(source)
        if into.contiguous:
            target = target.reshape(given.shape)
        else:
            given = given.reshape(target.shape)
        self.enqueue(self.current_stream(into.device_index), lambda: np.copyto(target, given))

    def pinned(self, nbytes: int) -> Array:
        return asarray(np.empty(nbytes, np.uint8))

    def stream(self, device: int) -> int:
        return next(self._numbers)

    def event(self, device: int) -> Event:
        return Event()

    def record(self, event: Event, device: int, stream: int) -> None:
        reached = event.reached = threading.Event()
        self.enqueue(stream, reached.set)

    def wait(self, device: int, stream: int, event: Event) -> None:
        reached = event.reached
        self.enqueue(stream, lambda: reached.wait(DEADLINE))

    def is_over(self, event: Event) -> bool:
        if self.error is not None:
            raise self.error
        return event.reached.is_set()

    def move(self, into: Array, source: Array, device: int, stream: int) -> None:
        raise NotImplementedError


class Functions:
    """numpy's functions, which run when the current stream comes to them."""

    def __init__(self, library: Gpus, index: int) -> None:
        self._library = library
        self._index = index

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)

        def later(*arguments: Any, **options: Any) -> None:
            stream = self._library.current_stream(self._index)
            self._library.enqueue(stream, lambda: function(*arguments, **options))

        return later


class Gpu:
    """The GPU of this thread, for the backend."""

    def __init__(self, library: Gpus, capability: int = 90) -> None:
        self.index = here()
        self.lib = library
        self.functions = Functions(library, self.index)
        self._capability = capability
        self.high_priority: list[bool] = []

    def use(self) -> None:
        pass

    def stream(self, high_priority: bool) -> int:
        self.high_priority.append(high_priority)
        return self.lib.stream(self.index)

    def current_streams(self) -> list[int]:
        return [self.lib.current_stream(self.index)]

    def view(self, address: int, count: int, dtype: str) -> np.ndarray:
        kind = np.dtype(dtype)
        memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
        return np.frombuffer(memory, kind)

    def identity(self) -> str:
        return f"threads/{self.index}"

    def capability(self) -> int:
        return self._capability


def here() -> int:
    """The GPU of this thread: that of its rank."""
    name = threading.current_thread().name
    return int(name.removeprefix("rank ")) if name.startswith("rank ") else 0


def strided(array: Array) -> np.ndarray:
    """The memory of an Array as numpy sees it, its elements as words or bytes."""
    shape, strides, word = devices.words(array)
    start, end = array.extent
    memory = (ctypes.c_ubyte * (end - start)).from_address(start)
    return np.ndarray(shape, f"V{word}", memory, array.address - start, strides)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)

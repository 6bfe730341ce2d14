"""GPUs for tests, in host memory: streams are threads, NCCL is the stand-in of tests/backends/nccl.

Each thread that is called "rank N" has GPU N, but while another one is made current. What is
enqueued runs when its stream comes to it, so a rank that forgets to wait reads old bytes as soon as
a test holds a stream back (`hold`).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
from fake_cupy import cupy, pointer
from fake_gpu import HostMemory

from cydist import asarray
from cydist._native import Array
from cydist.devices import array_libraries

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


class GpuArray(cupy.ndarray):
    """Memory of GPU `index`, as an array of cupy's, which is what users pass."""

    lib: Gpus
    memory: np.ndarray
    index: int
    whole: GpuArray | None

    def __new__(cls, lib: Gpus, memory: np.ndarray, index: int) -> GpuArray:
        place = pointer(memory, index)
        made: GpuArray = super().__new__(cls, memory.shape, memory.dtype, place, memory.strides)
        made.lib, made.memory, made.index, made.whole = lib, memory, index, None
        return made

    def __getitem__(self, key: Any) -> GpuArray:
        return self.view(self.memory[key])

    def view(self, memory: np.ndarray) -> GpuArray:
        """Another view of the memory."""
        made = GpuArray(self.lib, memory, self.index)
        made.whole = self
        return made

    def get(self) -> np.ndarray:
        """What is in it when the current stream has come so far."""
        self.lib.synchronize(self.lib.current_stream(self.index))
        return self.memory.copy()


class Gpus(HostMemory):
    """The library of `GpuArray`."""

    name = "threads"
    arrays_like_cupy = True
    kind = GpuArray
    first_stream = FIRST

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, Stream] = {}
        self.waits: list[int] = []  # streams that were made to wait
        self.captured: set[int] = set()  # streams, into graphs; `capturing` is all of them
        self.capture = 1  # the number of the graph
        self.dropped: list[int] = []  # streams that were given up
        self._numbers = itertools.count(5000)

    def array(self, values: Any) -> GpuArray:
        """Values on this thread's GPU, written by its current stream."""
        made: GpuArray = self.array_on(here(), values)
        return made

    @contextmanager
    def on_stream(self, device: int, stream: int) -> Iterator[None]:
        before = here()
        _current.gpu = device
        try:
            with super().on_stream(device, stream):
                yield
        finally:
            _current.gpu = before

    @contextmanager
    def here(self) -> Iterator[None]:
        """Arrays that this thread passes are on its GPU."""
        yield

    def get(self, array: Any) -> np.ndarray:
        """What is in an array when the current stream has come so far."""
        found: np.ndarray = array.get()
        return found

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

    def computes_bfloat16(self) -> bool:
        return array_libraries.Cupy.computes_bfloat16(self)  # type: ignore[arg-type]

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
        self.waits.append(stream)
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

    def __init__(self, library: Gpus) -> None:
        self.index = here()
        self.lib = library
        self.functions = Functions(library, self.index)
        self.high_priority: list[bool] = []
        self.users: set[str] = set()  # threads of ours that made it their device

    def use(self) -> None:
        pass

    def adopt(self) -> None:
        self.users.add(threading.current_thread().name)

    def stream(self, high_priority: bool) -> int:
        self.high_priority.append(high_priority)
        return self.lib.stream(self.index)

    def current_streams(self) -> list[int]:
        found = [self.lib.current_stream(self.index)]
        if (
            torch := array_libraries._libraries.get("torch")
        ) is not None:  # tests/support/fake_torch_tensors.py
            found.append(torch.current_stream(self.index))
        return found

    def is_captured(self, stream: int) -> bool:
        return self.lib.capturing or stream in self.lib.captured

    def capture(self, stream: int) -> int:
        return self.lib.capture

    def drop_stream(self, stream: int) -> None:
        self.lib.dropped.append(stream)

    def view(self, address: int, count: int, dtype: str) -> np.ndarray:
        kind = np.dtype(dtype)
        memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
        return np.frombuffer(memory, kind)

    def identity(self, version: int) -> str:
        return f"threads/{self.index}"

    def capability(self) -> int:
        return 90


_current = threading.local()


def here() -> int:
    """The GPU of this thread: the one that was made current, or that of its rank."""
    if (gpu := getattr(_current, "gpu", None)) is not None:
        return int(gpu)
    name = threading.current_thread().name
    return int(name.removeprefix("rank ")) if name.startswith("rank ") else 0


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)

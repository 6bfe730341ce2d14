"""A GPU for tests, in host memory, on which everything happens as late as it may.

Copies wait in their stream until something that is waited for needs them: an event that is asked
for, another stream's wait, a read. So a rank that forgets to wait for an event finds old bytes,
every time. `order` may be "late"; "eager": everything at once; or a number that seeds which of the
possible orders is taken.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_gpu import POISON, DeviceArray, HostMemory, copying

from cydist import asarray
from cydist._native import Array
from cydist.backends.host import pinned_pipeline, staging_group, staging_p2p
from cydist.devices import array_libraries


class Stream:
    """What is enqueued, and how much of it has been done."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.running = False


class Event:
    """The place in a stream where it was recorded last."""

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self.asked = False


class Pinned:
    """Host memory that the device copies from and to."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, POISON, np.uint8)
        self.__array_interface__ = self.memory.__array_interface__


class LateArray(DeviceArray):
    """Memory of a LateDevice."""


class LateDevice(HostMemory):
    """The library of `LateArray`. Devices with different numbers do not know of each other."""

    name = "late"
    kind = LateArray
    first_stream = 10

    def __init__(self, order: str | int = "late") -> None:
        super().__init__()
        self.order = order
        self._chance = random.Random(order if isinstance(order, int) else 0)
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._made = 1000
        self.stuck = False  # nothing on it gets done any more
        self.pinned_bytes = 0
        self.most_pinned_bytes = 0
        self.moved: list[tuple[str, int]] = []

    # Arrays.

    def array(self, values: Any, index: int = 0) -> LateArray:
        """Values on the device, written by its current stream, late."""
        made: LateArray = self.array_on(index, values)
        return made

    def fill(self, array: LateArray, values: Any) -> None:
        """Work of the user's on the current stream."""
        given = np.array(values)
        self.enqueue(self.current_stream(array.index), lambda: np.copyto(array.memory, given))

    def read_later(self, array: LateArray) -> Callable[[], np.ndarray]:
        """Enqueue a copy on the current stream; call the result for what it found."""
        found = np.empty_like(array.memory)
        stream = self.current_stream(array.index)
        self.enqueue(stream, lambda: np.copyto(found, array.memory))

        def result() -> np.ndarray:
            self.synchronize(stream)
            return found

        return result

    # The timeline.

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        with self._lock:
            self._streams.setdefault(stream, Stream()).queue.append(work)
            if any(line.running for line in self._streams.values()):
                return  # the collector came here in the middle of a copy
            if self.order == "eager":
                self._run(stream, len(self._streams[stream].queue))
            elif self.order != "late" and not self.stuck:
                for _ in range(self._chance.randrange(4)):
                    some = self._chance.choice(list(self._streams))
                    self._run(some, self._streams[some].done + 1)

    def _run(self, stream: int, until: int) -> None:
        line = self._streams.setdefault(stream, Stream())
        while line.done < min(until, len(line.queue)) and not self.stuck:
            assert not line.running, f"stream {stream} waits for itself"
            line.running = True
            try:
                line.queue[line.done]()
            finally:
                line.running = False
            line.queue[line.done] = _nothing
            line.done += 1

    def synchronize(self, stream: int) -> None:
        """Do all that is on a stream now."""
        with self._lock:
            self._run(stream, len(self._streams.setdefault(stream, Stream()).queue))

    # What cydist asks.

    def owns(self, owner: object) -> bool:
        return isinstance(owner, LateArray) and owner.lib is self

    def copy(self, into: Array, source: Array) -> None:
        work = _checked(copying(into, source), into, source)
        self.enqueue(self.current_stream(into.device_index), work)

    def pinned(self, nbytes: int) -> Array:
        made = Pinned(nbytes)
        with self._lock:
            self.pinned_bytes += nbytes
            self.most_pinned_bytes = max(self.most_pinned_bytes, self.pinned_bytes)
        weakref.finalize(made, self._freed, nbytes)
        return asarray(made)

    def _freed(self, nbytes: int) -> None:
        with self._lock:
            self.pinned_bytes -= nbytes

    def stream(self, device: int) -> int:
        with self._lock:
            self._made += 1
            return self._made

    def event(self, device: int) -> Event:
        return Event()

    def record(self, event: Event, device: int, stream: int) -> None:
        with self._lock:
            queue = self._streams.setdefault(stream, Stream()).queue
            event.place = (stream, len(queue))
            event.asked = False

    def wait(self, device: int, stream: int, event: Event) -> None:
        if event.place is not None:
            place = event.place
            self.enqueue(stream, lambda: self._run(*place))

    def is_over(self, event: Event) -> bool:
        with self._lock:
            if self.error is not None:
                raise self.error
            assert event.place is not None, "an event that was not recorded"
            stream, until = event.place
            if event.asked:
                self._run(stream, until)
            event.asked = True
            return self._streams[stream].done >= until

    def move(self, into: Array, source: Array, device: int, stream: int) -> None:
        assert into.nbytes == source.nbytes
        assert into.contiguous
        assert source.contiguous
        self.moved.append(("out" if source.device == "cuda" else "in", into.nbytes))

        to, given, nbytes = into.address, source.address, into.nbytes
        work = _checked(lambda: ctypes.memmove(to, given, nbytes), into, source)
        self.enqueue(stream, work)


def install(patch: pytest.MonkeyPatch, order: str | int, slot_bytes: int) -> LateDevice:
    """The only GPU that cydist knows from now on, with slots of so many bytes."""
    made = LateDevice(order)
    patch.setattr(array_libraries, "_libraries", {"cupy": None, "torch": None})
    patch.setattr(array_libraries, "_others", set())
    patch.setattr(staging_group, "SLOT_BYTES", slot_bytes)
    patch.setattr(staging_p2p, "STAGED_BYTES", slot_bytes)
    patch.setattr(pinned_pipeline, "SMALLEST_BYTES", 1)
    patch.setattr(pinned_pipeline, "_idle", {})
    patch.setattr(pinned_pipeline, "_lingering", [])
    array_libraries.register(made)
    return made


def _nothing() -> None:
    """What is done needs its memory no more."""


def _checked(work: Callable[[], object], *arrays: Array) -> Callable[[], None]:
    """The work, which keeps no pinned memory alive, as on a GPU, and says if it has gone."""
    memory = [getattr(array.owner, "memory", array.owner) for array in arrays]
    pinned = [weakref.ref(array.owner) for array in arrays if isinstance(array.owner, Pinned)]

    def checked() -> None:
        assert all(each() is not None for each in pinned), "pinned memory freed before its copy"
        assert memory
        work()

    return checked

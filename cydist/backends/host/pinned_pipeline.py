"""Stage GPU memory through pinned CPU memory, with copies that overlap the network.

A pipeline has a few slots of pinned memory. A call's data are cut into chunks: while one is on the
network, the next is copied from the device into another slot, and the previous one is copied back.
Three rules keep the order. A slot is `filled` before the network accesses it. It is `emptied`
before it is filled again. The first copy waits for the caller's streams, and the caller's streams
wait for the last copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import _native
from cydist.errors import DistTimeoutError

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.devices.array_libraries import ArrayLibrary
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

SMALLEST_BYTES = 1 << 16  # of a slot
SPIN = 200  # polls of an event before the first sleep, some hundred microseconds
SLEEP_SECONDS = 5e-5


class Chunk(NamedTuple):
    """The data that one slot carries at a time.

    Attributes:
        nbytes: Bytes of the slot that it uses.
        outs: Device memory to copy into the slot, each with its offset in the slot.
        ins: Device memory to copy to from the slot at the end, each with its offset.
        exchange: Runs the network's part on the slot's bytes.
    """

    nbytes: int
    outs: Sequence[tuple[int, Array]]
    ins: Sequence[tuple[int, Array]]
    exchange: Callable[[Array], None]


@dataclass
class StagedCall:
    """The call that a pipeline serves, for deadlines and errors.

    Attributes:
        deadline: On time.monotonic().
        message: The one that it waits for; None: it waits for none.
    """

    group: ProcessGroup
    name: str
    deadline: float
    message: Work | None = None

    def wait(self, message: Work) -> None:
        """Wait for a message, which has the group's deadline unless the call has none."""
        self.message = message  # first: see `unbind`
        if self.deadline == math.inf:
            message.due(None)
        try:
            message.wait()
        finally:
            self.message = None  # it keeps pinned memory alive

    def unbind(self) -> None:
        """Leave the deadline to the thread that waits for the call."""
        self.deadline = math.inf
        message = self.message
        if message is not None:
            message.due(None)


class PinnedSlot:
    """A slot of pinned memory."""

    def __init__(self, filled: Any, emptied: Any) -> None:
        self.filled = filled
        self.emptied = emptied
        self.memory = _native.empty(0)


class PinnedPipeline:
    """Slots and two streams of one device, for one call at a time.

    Args:
        library: Copies between host and device.
        device: Its number.
        slots: Number of slots; each grows as needed, to at most `slot_bytes`.
    """

    def __init__(self, library: ArrayLibrary, device: int, slots: int, slot_bytes: int) -> None:
        reclaim()
        self.lib = library
        self.device = device
        self.slot_bytes = slot_bytes
        try:
            self.out, self.into = _idle.setdefault((library.name, device), []).pop()
        except IndexError:
            self.out, self.into = library.stream(device), library.stream(device)
        self._events: list[Any] = []  # for reuse
        self._slots = [PinnedSlot(self._recorded(), self._recorded()) for _ in range(slots)]
        self._next = 0

    def _recorded(self) -> Any:
        event = self.lib.event(self.device)
        self.lib.record(event, self.device, self.into)
        return event

    # Before and after a call.

    def record(self, streams: Sequence[int]) -> list[Any]:
        """Record events that are over when the streams' present work is."""
        events = [self._new_event() for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            self.lib.record(event, self.device, stream)
        return events

    def _new_event(self) -> Any:
        try:
            return self._events.pop()  # shared by calls on several threads
        except IndexError:
            return self.lib.event(self.device)

    def wait_for_streams(self, events: list[Any]) -> None:
        """Make all copies from now on wait for these events."""
        for event in events:
            self.lib.wait(self.device, self.out, event)
            self.lib.wait(self.device, self.into, event)
        self._events += events

    def make_streams_wait(self, streams: Sequence[int]) -> None:
        """Make these streams wait until the copies to the device are done."""
        (event,) = self.record([self.into])
        for stream in streams:
            self.lib.wait(self.device, stream, event)
        self._events.append(event)

    def finish(self, call: StagedCall) -> None:
        """Wait until the copies to the device are over."""
        (event,) = self.record([self.into])
        self._await(event, call)
        self._events.append(event)

    # The call.

    def run(self, chunks: Sequence[Chunk], call: StagedCall) -> None:
        """Carry the chunks, whose exchanges run one after the other on this thread.

        On return the last copies to the device are enqueued. Raises an exchange's exception,
        DistTimeoutError if the device is not done at the deadline, GroupFailedError if the group
        fails meanwhile. After an exception the pipeline has new slots, and the old ones stay
        allocated until no copy accesses them.
        """
        loaded: list[PinnedSlot] = []
        try:
            for i, chunk in enumerate(chunks):
                for each in chunks[len(loaded) : i + len(self._slots)]:
                    loaded.append(self.copy_in(each, call))
                self._await(loaded[i].filled, call)
                chunk.exchange(loaded[i].memory)
                self.copy_out(chunk, loaded[i])
        except BaseException:
            self.replace_slots(chunks)
            raise

    def copy_in(self, chunk: Chunk, call: StagedCall) -> PinnedSlot:
        """Enqueue the copies from the device; they are complete when `filled` is over."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.memory.nbytes < chunk.nbytes:
            self._await(slot.emptied, call)
            room = min(1 << (chunk.nbytes - 1).bit_length(), self.slot_bytes)
            slot.memory = self.lib.pinned(max(room, chunk.nbytes, SMALLEST_BYTES))
        # Also without copies from the device: the network may write into the slot.
        self.lib.wait(self.device, self.out, slot.emptied)
        for start, array in chunk.outs:
            if array.nbytes:
                self.lib.move(slot_view(slot.memory, start, array), array, self.device, self.out)
        self.lib.record(slot.filled, self.device, self.out)
        return slot

    def copy_out(self, chunk: Chunk, slot: PinnedSlot) -> None:
        """Enqueue the copies to the device."""
        for start, array in chunk.ins:
            if array.nbytes:
                self.lib.move(array, slot_view(slot.memory, start, array), self.device, self.into)
        self.lib.record(slot.emptied, self.device, self.into)

    def _await(self, event: Any, call: StagedCall) -> None:
        """Wait for an event, and check the deadline and the group meanwhile: a GPU may hang."""
        looks = 0
        while not self.lib.is_over(event):
            looks += 1
            if looks < SPIN:
                continue
            call.group.check_usable(call.name)
            if time.monotonic() > call.deadline:
                raise DistTimeoutError(
                    f"{call.name} on {call.group.title}: timeout: device "
                    f"{self.device} has not come to the call's copies: what was enqueued there "
                    "before has not ended",
                    op=call.name,
                    group=call.group.group_name,
                    ranks=(call.group.ranks[call.group.rank()],),
                )
            time.sleep(SLEEP_SECONDS)

    # Freeing slots.

    def replace_slots(self, arrays: object = None) -> None:
        """Replace the slots. The old ones, and `arrays`, stay allocated while copies may access
        them."""
        old, self._slots = self._slots, []
        try:
            events = [self._new_event(), self._new_event()]
            for event, stream in zip(events, (self.out, self.into), strict=True):
                self.lib.record(event, self.device, stream)
            _lingering.append((self.lib, events, [old, arrays]))
            self._slots = [PinnedSlot(self._recorded(), self._recorded()) for _ in old]
        except Exception:
            # The device has failed and takes no more calls; it may still be copying.
            _lingering.append((self.lib, [], [old, arrays]))
        reclaim()

    def close(self) -> None:
        """Free the slots, now or when no copy accesses them any more."""
        self.replace_slots()
        self._slots = []
        _idle[self.lib.name, self.device].append((self.out, self.into))


_idle: dict[tuple[str, int], list[tuple[int, int]]] = {}  # streams of closed pipelines
_lingering: list[tuple[ArrayLibrary, list[Any], object]] = []


def reclaim() -> None:
    """Free abandoned slots that no copy accesses any more."""
    for each in tuple(_lingering):
        library, events, _ = each
        try:
            over = bool(events) and all(library.is_over(event) for event in events)
        except Exception:
            over = False
        if over:
            with suppress(ValueError):  # another thread was faster
                _lingering.remove(each)


def slot_view(memory: Array, start: int, like: Array) -> Array:
    """Return a view of a slot from `start` on, with the size and dtype of `like`."""
    if start:
        memory = memory.split([start, memory.size - start])[1]
    return memory.typed(like)

"""A group's own stream, and the order between it and the callers' streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cydist.devices import array_libraries
from cydist.errors import UnsupportedError

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.watchdog import InFlight
    from cydist.devices.array_libraries import ArrayLibrary
    from cydist.groups.process_group import ProcessGroup


class GroupStreams:
    """The streams of one group's calls.

    Args:
        group: The group, for messages.

    Attributes:
        own: The group's own stream, for asynchronous calls.
    """

    def __init__(self, group: ProcessGroup, gpu: Gpu, high_priority: bool) -> None:
        self._group = group
        self._gpu = gpu
        self.own = gpu.stream(high_priority)

    def drop(self) -> None:
        """Release the group's own stream."""
        self._gpu.drop_stream(self.own)

    def check_own(self, name: str) -> None:
        """Raise UnsupportedError if a call from outside of a capture would use a captured
        stream."""
        if self._gpu.is_captured(self.own):
            raise UnsupportedError(
                f"{name}: a CUDA graph that is being captured has a call of "
                f"{self._group.title}, and this one comes from outside of it, which would "
                "end the capture: make it on the stream that is captured, or when the capture has "
                "ended",
                op=name, group=self._group.group_name,
            )  # fmt: skip

    def captured_of(self, streams: list[int]) -> tuple[list[int], bool]:
        """Return the captured streams if there are any, else all, and whether they are captured. A
        captured call must not use other streams, or CUDA ends the capture."""
        if len(streams) == 1:
            return streams, self._gpu.is_captured(streams[0])
        captured = [stream for stream in streams if self._gpu.is_captured(stream)]
        return captured or streams, bool(captured)

    @contextmanager
    def made_current(self, array: Array | None, stream: int) -> Iterator[None]:
        """Make the call's stream current for the array's library, which unpacks strided results on
        it."""
        library = self._gpu.lib if array is None else array_libraries.library_of(array)
        with library.on_stream(self._gpu.index, stream):
            yield

    def order_after(self, stream: int, current: Sequence[int]) -> None:
        """Make later work on `stream` wait for the present work of those streams."""
        library, index = self._gpu.lib, self._gpu.index
        for each in current:
            event = library.event(index)
            library.record(event, index, each)
            library.wait(index, stream, event)

    def _current(self, library: ArrayLibrary | None) -> list[int]:
        """Return the current stream of the library of a call's arrays; without arrays, those of all
        libraries."""
        if library is None:
            return self._gpu.current_streams()
        return [library.current_stream(self._gpu.index)]

    def make_wait(self, flight: InFlight, library: ArrayLibrary | None) -> list[int]:
        """Make the current streams wait for a call, and return them."""
        self._gpu.use()
        streams, capturing = self.captured_of(self._current(library))
        wrong = ""  # CUDA refuses these, and ends the capture
        if flight.captured:
            streams = [s for s in streams if capturing and self._gpu.capture(s) == flight.capture]
            if not streams:
                wrong = "outside of the CUDA graph that the call is part of: wait in its capture"
        elif capturing and not self.is_over(flight):
            wrong = (
                "while a CUDA graph is captured, for a call that is not part of the graph and "
                "still runs: wait before the capture begins"
            )
        if wrong:
            raise UnsupportedError(
                f"{flight.call.name}: wait() {wrong}",
                op=flight.call.name, group=self._group.group_name,
            )  # fmt: skip
        if flight.captured or not (capturing or flight.over):
            for stream in streams:
                self._gpu.lib.wait(self._gpu.index, stream, flight.event)
        return streams

    def is_over(self, flight: InFlight) -> bool:
        """Return whether the call's stream has passed it. Raises the device's error."""
        if flight.over or flight.event is None:
            return flight.over
        return self._gpu.lib.is_over(flight.event)

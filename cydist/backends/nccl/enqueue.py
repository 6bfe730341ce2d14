"""Enqueue the calls of backend "nccl" on streams, and wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from cydist.backends.nccl.failure import FailureMixin
from cydist.backends.nccl.watchdog import InFlight, StreamCall
from cydist.backends.nccl.work import StreamWork
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array, CallRecord
    from cydist.devices.array_libraries import ArrayLibrary


class EnqueueMixin(FailureMixin):
    """The part of NcclGroup that enqueues calls on streams.

    Attributes:
        _stream: The group's own, for asynchronous calls.
        _captured: Memory that CUDA graphs still use.
    """

    _stream: int
    _captured: list[object]
    _blocking_wait: bool
    # Of the call that is being enqueued.
    _flight: InFlight | None
    _stream_now: int
    _capturing: bool

    def _checked(self, name: str, arrays: Sequence[Array]) -> None:
        for array in arrays:
            if array.device_index != self.gpu.index:
                raise ValueError(
                    f"{name}: the array is on GPU {array.device_index}, and group "
                    f"{self.group_name!r} was made on GPU {self.gpu.index}, which was current then"
                )

    def execute(
        self,
        name: str,
        body: Callable[[CallRecord], None],
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        result: object = None,
        array: Array | None = None,
    ) -> Work | None:
        """Enqueue one collective. Calls run in the order in which they are issued.

        A blocking call returns when it is on the current stream, like all other GPU work of the
        caller. Raises errors that are known by then.
        """
        deadline = self.deadline(timeout)
        if array is not None:
            self._checked(name, [array])
        with self._lock:
            self.check_usable(name)
            self.gpu.use()
            call = StreamCall(name, 0, deadline)  # it gets its number once its streams are known
            if async_op or array is None or self._blocking_wait:
                work = self._start_work(call, array, async_op or array is None, body, result)
            else:
                stream, own = array_libraries.stream_and_capture(array)
                flight, capturing = self._enqueue(call, array, [stream], stream, body, result)
                flight.reusable = not capturing
                if own and not capturing:
                    # Later work of this stream runs after the call, so the library may reuse the
                    # memory.
                    flight.keep = None
                return None
        if async_op:
            return work
        work.wait()
        return None

    def _start_work(
        self,
        call: StreamCall,
        array: Array | None,
        on_own: bool,
        body: Callable[[CallRecord], None],
        result: object,
    ) -> StreamWork:
        """Enqueue a call, and return its Work."""
        library = None if array is None else array_libraries.known_library_of(array)
        current = (
            self.gpu.current_streams() if array is None else [array_libraries.stream_of(array)]
        )
        stream = self._stream if on_own else current[0]
        flight, capturing = self._enqueue(call, array, current, stream, body, result)
        blocking = not capturing and (array is None or self._blocking_wait)
        return StreamWork(self, flight, result, current, library, blocking)

    def _enqueue(
        self,
        call: StreamCall,
        array: Array | None,
        current: list[int],
        stream: int,
        body: Callable[[CallRecord], None],
        result: object,
    ) -> tuple[InFlight, bool]:
        """Enqueue a call; return its record, and whether it is captured.

        Args:
            current: The streams that it waits for.
            stream: The stream that it is on: the group's, or the only one of those.
        """
        current, capturing = self._captured_of(current)
        on_own = stream == self._stream
        if on_own and not capturing:
            self._check_own_stream(call.name)
        self._capturing = capturing
        flight = InFlight(call, (body, array, result), stream)
        self._stream_now, self._flight = stream, flight
        try:  # a signal handler may raise anywhere: then no thread must wait for this call
            if not capturing:
                self._watch.add(flight)
            self.call_queue.number(call)
            if on_own:
                self._order_after(stream, current)
                with self._current(array, stream):
                    body(call)
            else:
                body(call)
            self._record(flight, stream, capturing)
        except UnsupportedError:
            self._watch.discard(flight)
            if not call.agreed:  # no other rank knows of it, so the next call takes its number
                self.call_queue.take_back(call)
            raise
        except BaseException as error:
            self._watch.discard(flight)
            self.on_refused(call, error)
            raise
        finally:
            call.over = True
            self._flight = None
        return flight, capturing

    def _check_own_stream(self, name: str) -> None:
        if self.gpu.is_captured(self._stream):
            raise UnsupportedError(
                f"{name}: a CUDA graph that is being captured has a call of group "
                f"{self.group_name!r}, and this one comes from outside of it, which would end the "
                "capture: make it on the stream that is captured, or when the capture has ended",
                op=name, group=self.group_name,
            )  # fmt: skip

    @contextmanager
    def _current(self, array: Array | None, stream: int) -> Iterator[None]:
        """Make the call's stream current for the array's library, which unpacks strided results on
        it."""
        library = self.gpu.lib if array is None else array_libraries.library_of(array)
        with library.on_stream(self.gpu.index, stream):
            yield

    def _record(self, flight: InFlight, stream: int, capturing: bool) -> None:
        library = self.gpu.lib
        spare = None if capturing else self._watch.spare_event()
        event = spare or library.event(self.gpu.index)
        library.record(event, self.gpu.index, stream)
        flight.event = event
        if capturing:
            flight.captured = flight.over = True
            flight.capture = self.gpu.capture(stream)
            self._captured.append((event, flight.keep))

    def _order_after(self, stream: int, current: Sequence[int]) -> None:
        """Make later work on `stream` wait for the present work of those streams."""
        library, index = self.gpu.lib, self.gpu.index
        for each in current:
            event = library.event(index)
            library.record(event, index, each)
            library.wait(index, stream, event)

    def _captured_of(self, streams: list[int]) -> tuple[list[int], bool]:
        """Return the captured streams if there are any, else all, and whether they are captured. A
        captured call must not use other streams, or CUDA ends the capture."""
        if len(streams) == 1:
            return streams, self.gpu.is_captured(streams[0])
        captured = [stream for stream in streams if self.gpu.is_captured(stream)]
        return captured or streams, bool(captured)

    def _current_streams(self, library: ArrayLibrary | None) -> list[int]:
        """Return the current stream of the library of a call's arrays; without arrays, those of all
        libraries."""
        if library is None:
            return self.gpu.current_streams()
        return [library.current_stream(self.gpu.index)]

    def make_streams_wait(self, flight: InFlight, library: ArrayLibrary | None) -> list[int]:
        """Make the current streams wait for a call, and return them."""
        self.gpu.use()
        streams, capturing = self._captured_of(self._current_streams(library))
        wrong = ""  # CUDA refuses these, and ends the capture
        if flight.captured:
            streams = [s for s in streams if capturing and self.gpu.capture(s) == flight.capture]
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
                op=flight.call.name, group=self.group_name,
            )  # fmt: skip
        if flight.captured or not (capturing or flight.over):
            for stream in streams:
                self.gpu.lib.wait(self.gpu.index, stream, flight.event)
        return streams

    def is_over(self, flight: InFlight) -> bool:
        if flight.over or flight.event is None:
            return flight.over
        return self.gpu.lib.is_over(flight.event)

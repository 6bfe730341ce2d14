"""Enqueue the calls of backend "nccl" on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cydist import config
from cydist._native import fast_nccl
from cydist.backends.nccl.reductions import at_once
from cydist.backends.nccl.watchdog import InFlight, StreamCall
from cydist.backends.nccl.work import StreamWork
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError

if TYPE_CHECKING:
    from cydist._native import Array, CallRecord
    from cydist.backends.nccl.binding import Communicator
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.failure import FailureHandler
    from cydist.backends.nccl.plan_runner import PlannedCall, Runner
    from cydist.backends.nccl.streams import GroupStreams
    from cydist.groups.process_group import ProcessGroup


class StreamEnqueuer:
    """Enqueues the calls of one group, on the general path.

    Its methods are called under the group's lock.

    Attributes:
        blocking_wait: Whether calls block until the GPU has passed them, as NCCL_BLOCKING_WAIT
            asks.
        captured: Scratch memory that CUDA graphs still use. Their arrays are the program's to keep.
        capturing: Whether the call that is being enqueued is captured into a CUDA graph.
    """

    def __init__(
        self,
        group: ProcessGroup,
        gpu: Gpu,
        streams: GroupStreams,
        failures: FailureHandler,
        runner: Runner,
    ) -> None:
        self._call_queue = group.call_queue
        self._gpu = gpu
        self._streams = streams
        self._watch = failures.watch
        self._on_refused = failures.on_refused
        self._runner = runner
        self._new_work = partial(StreamWork, streams, failures, group)
        self.blocking_wait = config.NCCL_BLOCKING_WAIT.is_on()
        self.captured: list[object] = []
        self.capturing = False
        self._flight: InFlight | None = None  # of the call that is being enqueued
        self._stream = 0  # the same
        self._scratch: list[object] = []  # the same

    def start_work(
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
            self._gpu.current_streams() if array is None else [array_libraries.stream_of(array)]
        )
        stream = self._streams.own if on_own else current[0]
        flight, capturing = self.enqueue(call, array, current, stream, body, result)
        blocking = not capturing and (array is None or self.blocking_wait)
        return self._new_work(flight, result, current, library, blocking)

    def enqueue(
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
        current, capturing = self._streams.captured_of(current)
        on_own = stream == self._streams.own
        if on_own and not capturing:
            self._streams.check_own(call.name)
        self.capturing = capturing
        flight = InFlight(call, (body, array, result), stream)
        self._stream, self._flight, self._scratch = stream, flight, []
        try:  # a signal handler may raise anywhere: then no thread must wait for this call
            if not capturing:
                self._watch.add(flight)
            self._call_queue.number(call)
            if on_own:
                self._streams.order_after(stream, current)
                with self._streams.made_current(array, stream):
                    body(call)
            else:
                body(call)
            self._record(flight, stream, capturing)
        except UnsupportedError:
            self._watch.discard(flight)
            if not call.agreed:  # no other rank knows of it, so the next call takes its number
                self._call_queue.take_back(call)
            raise
        except BaseException as error:
            self._watch.discard(flight)
            self._on_refused(call, error)
            raise
        finally:
            call.over = True
            self._flight, self._scratch = None, []
        return flight, capturing

    def _record(self, flight: InFlight, stream: int, capturing: bool) -> None:
        library, index = self._gpu.lib, self._gpu.index
        spare = None if capturing else self._watch.spare_event()
        event = spare or library.event(index)
        library.record(event, index, stream)
        flight.event = event
        if capturing:
            flight.captured = flight.over = True
            flight.capture = self._gpu.capture(stream)
            flight.keep = None
            if not self._gpu.lib.keeps_captured_memory:
                self.captured += self._scratch
            self.captured += array_libraries.take_captured_memory()
            self._watch.add_captured(flight.call.name)

    def run(self, items: Sequence[PlannedCall]) -> None:
        """Run plans on the stream of the call that is being enqueued, or was last."""
        scratch = self._runner.run(items, self._stream)
        if scratch and self._flight is not None:
            self._flight.keep = (self._flight.keep, scratch)
            self._scratch += scratch

    def message_work(
        self, call: StreamCall, array: Array, packed: Array, source: int | None
    ) -> StreamWork:
        """Return the Work of a message, which `start_messages` enqueues.

        Args:
            packed: The array, or its contiguous copy, which is what moves.
            source: The sender's global rank, of a receive.
        """
        flight = InFlight(call, (array, packed), self._streams.own)
        library = array_libraries.known_library_of(array)
        streams = [array_libraries.stream_of(array)]
        blocking = self.blocking_wait and not self._streams.captured_of(streams)[1]
        return self._new_work(flight, [array.owner], streams, library, blocking, source)

    def start_messages(self, messages: Sequence[tuple[PlannedCall, StreamWork]]) -> None:
        """Enqueue messages together, on the group's own stream."""
        own = self._streams.own
        self._gpu.use()
        flights = [work.flight for _, work in messages]
        streams = sorted({stream for _, work in messages for stream in work.streams})
        streams, capturing = self._streams.captured_of(streams)
        if not capturing:
            self._streams.check_own(flights[0].call.name)
        try:
            for flight in flights:
                if not capturing:
                    self._watch.add(flight)
            self._streams.order_after(own, streams)
            self._stream = own
            self.run([item for item, _ in messages])
            kept: list[Any] = [flight.keep for flight in flights]
            for into, packed in kept:
                if packed is not into:  # on the group's stream, after the receive
                    with self._streams.made_current(into, own):
                        into.copy_from(packed)
            for flight in flights:
                self._record(flight, own, capturing)
        except BaseException as error:
            for flight in flights:
                self._watch.discard(flight)
            self._on_refused(flights[0].call, error)
            raise


def fast_enqueuer(
    group: ProcessGroup, comm: Communicator, streams: GroupStreams, failures: FailureHandler
) -> fast_nccl.Enqueuer:
    """Create the fast-path enqueuer of a group."""
    return fast_nccl.Enqueuer(
        group, comm, failures.watch, comm.calls, streams.own, array_libraries.loaded_torch,
        partial(at_once, single_rank=group.size() == 1), StreamCall, InFlight,
        partial(StreamWork, streams, failures),
    )  # fmt: skip

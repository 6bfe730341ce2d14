"""The watchdog: a thread that watches every call until it has ended.

A call on a stream cannot raise. So the watchdog checks its event, NCCL's asynchronous error, its
deadline, and whether the neighbours make the same call. Any error fails the group.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cydist._native import CallRecord
from cydist.backends.nccl.call_check import CallCheck, CallsDiffer
from cydist.errors import DistError

PERIOD = 0.1  # seconds


class StreamCall(CallRecord):
    """A call on a stream."""

    __slots__ = ()


class InFlight:
    """One call, from its start until the stream has passed it.

    Attributes:
        stream: Its stream.
        event: After it on its stream; None: the calling thread is still in the call.
        keep: Objects that must stay alive until then.
        over: It has succeeded.
        captured: It is part of a CUDA graph: its event is not queried, and only streams that are
            captured with it may wait for it.
        capture: The number of that capture, if it is known.
    """

    __slots__ = ("call", "capture", "captured", "event", "keep", "over", "reusable", "stream")

    def __init__(self, call: StreamCall, keep: object, stream: int) -> None:
        self.call = call
        self.stream = stream
        self.event: Any = None
        self.keep: object = keep
        self.over = False
        self.captured = False
        self.capture: int | None = None
        self.reusable = False


class WatchedGroup(Protocol):
    """A group, from the watchdog's view."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread to poll this group, until it polls another one."""

    def is_over(self, flight: InFlight) -> bool:
        """Return whether the stream has passed the event. Raises the device's error."""

    def async_error(self) -> str:
        """Return NCCL's asynchronous error; "" for none."""

    def control_error(self) -> DistError | None:
        """Return the failure that another rank reported; None if there is none."""

    def on_control_error(self, error: DistError) -> None:
        """Fail because another rank reported a failure."""

    def on_timeout(self, call: StreamCall) -> None:
        """Fail because the call's deadline has passed."""

    def on_device_error(self, call: StreamCall, why: BaseException | str) -> None:
        """Fail because the device or NCCL reported an error."""

    def on_mismatch(self, found: CallsDiffer) -> None:
        """Fail because the ranks are in different calls."""

    def on_lost_peer(self, call: StreamCall, error: BaseException) -> None:
        """Fail because the previous rank is lost, or has failed."""


class GroupWatch:
    """The calls of one group that are under way.

    Args:
        call_check: None in a group of one rank.
    """

    def __init__(
        self,
        group: WatchedGroup,
        call_check: CallCheck | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self.call_check = call_check
        self._clock = clock
        self._flights: deque[InFlight] = deque()
        self._spare: deque[Any] = deque()
        self.ended = False
        self._lock = threading.Lock()  # guards polling
        self._seen_lost = False

    def add(self, flight: InFlight) -> None:
        """Watch the call from now on."""
        self._flights.append(flight)
        WATCHDOG.wake()

    def discard(self, flight: InFlight) -> None:
        """Drop a call that was refused before it had any effect."""
        with contextlib.suppress(ValueError):
            self._flights.remove(flight)

    def spare_event(self) -> Any:
        """Return the event of a completed call for reuse; None if there is none."""
        return self._spare.popleft() if self._spare else None

    @property
    def oldest(self) -> StreamCall | None:
        """Return the first call that is not known to be over."""
        return self._flights[0].call if self._flights else None

    @property
    def in_flight(self) -> bool:
        """Return whether any call is in flight."""
        return not self.ended and bool(
            self._flights or (self.call_check is not None and self.call_check.pending)
        )

    def prepare_thread(self) -> None:
        """Prepare the watchdog's thread to poll, even if the device cannot be used."""
        if not self.ended:
            with contextlib.suppress(Exception):
                self._group.prepare_thread()

    def poll(self) -> None:
        """Poll once."""
        fail = None
        with self._lock:
            if not self.ended:
                fail = self._find_failure()
                self.ended = fail is not None
        if fail is not None:
            fail()

    def _find_failure(self) -> Callable[[], None] | None:
        """Return a function that fails the group; None while no failure is known."""
        group = self._group
        try:
            self._complete()
        except Exception as raised:
            call, found = self._flights[0].call, raised
            return lambda: group.on_device_error(call, found)
        if (told := group.control_error()) is not None:
            error = told
            return lambda: group.on_control_error(error)
        if self.call_check is not None:
            try:
                self.call_check.poll()
            except CallsDiffer as differ:
                difference = differ
                return lambda: group.on_mismatch(difference)
        if not self._flights:
            return None
        call = self._flights[0].call
        if text := group.async_error():
            return lambda: group.on_device_error(call, text)
        if self.call_check is not None and (lost := self.call_check.lost) is not None:
            # A failed rank reports the error before it leaves; that may arrive by the next poll.
            if self._seen_lost:
                return lambda: group.on_lost_peer(call, lost)
            self._seen_lost = True
        # A later call may be due before the first.
        first = min((flight.call for flight in tuple(self._flights)), key=lambda c: c.deadline)
        return (lambda: group.on_timeout(first)) if self._clock() > first.deadline else None

    def _complete(self) -> None:
        by_stream: dict[int, list[InFlight]] = {}
        for flight in tuple(self._flights):
            if flight.event is None:
                break
            if not flight.over:
                by_stream.setdefault(flight.stream, []).append(flight)
        for flights in by_stream.values():
            # A stream passes its calls in order, and querying each costs more.
            reached = bisect_left(flights, True, key=lambda each: not self._group.is_over(each))
            for flight in flights[:reached]:
                flight.over = True
                flight.keep = None
        while self._flights and self._flights[0].over:
            flight = self._flights.popleft()
            if flight.reusable:
                self._spare.append(flight.event)

    def stop(self) -> None:
        """Stop watching a failed group."""
        self.ended = True

    def take_over(self) -> bool:
        """Let this thread poll from now on instead of the watchdog; return False if another one
        already does."""
        with self._lock:
            first, self.ended = not self.ended, True
        return first

    def end_group(self, seconds: float) -> None:
        """End the watch with the group, and notify the next rank, from this thread alone."""
        self.take_over()
        if self.call_check is not None:
            self.call_check.send_goodbye(seconds)


class Watchdog:
    """The watchdog thread. It sleeps while no call is under way. A forked child has none until its
    first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._work = threading.Event()
        self._pid = 0

    def add(self, watch: GroupWatch) -> None:
        """Add a group to watch."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._watches = weakref.WeakSet()
                self._work = threading.Event()
                threading.Thread(target=self._run, name="cydist-nccl-watch", daemon=True).start()
            self._watches.add(watch)

    def wake(self) -> None:
        """Wake the thread, because there is a call to watch."""
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        while True:
            self._work.wait()
            time.sleep(PERIOD)
            self._work.clear()
            with self._lock:
                watches = list(self._watches)
            for watch in watches:
                with contextlib.suppress(Exception):  # the group has failed, as its calls will find
                    watch.prepare_thread()
                    watch.poll()
                if watch.in_flight:
                    self._work.set()
            del watches


WATCHDOG = Watchdog()

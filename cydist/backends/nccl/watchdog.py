"""The watchdog: two threads that watch every call until it has ended.

A call on a stream cannot raise. So the watchdog checks its event, NCCL's asynchronous error, its
deadline, and whether the neighbours make the same call. Any error fails the group.

A query of CUDA may block behind the call that hangs. So one thread queries events, and another one,
which calls nothing of CUDA, looks at everything else and fails the group. A thread that makes many
calls queries events too: between two looks of the watchdog there would be thousands.
"""

from __future__ import annotations

import contextlib
import math
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
CAPTURED_PERIOD = 1.0  # the same, of groups whose calls are all in CUDA graphs
CROWDED = 64  # calls under way from which a thread that makes more asks itself which are over
QUERY_SECONDS = 1.0  # most seconds that a look at the clock waits for queries of CUDA


class StreamCall(CallRecord):
    """A call on a stream."""

    __slots__ = ()


class InFlight:
    """One call, from its start until the stream has passed it.

    Attributes:
        stream: Its stream.
        event: After it on its stream; None: the calling thread is still in the call.
        keep: Objects that must stay alive until then. A thread of the program drops them, since
            freeing memory of the GPU may block.
        over: It has succeeded.
        captured: It is part of a CUDA graph: its event is not queried, and only streams that are
            captured with it may wait for it.
        capture: The number of that capture, if it is known.
        events: Takes the event back with the end of this record. Destroying it might block.
    """

    __slots__ = ("call", "capture", "captured", "event", "events", "keep", "over", "stream")

    def __init__(self, call: StreamCall, keep: object, stream: int) -> None:
        self.call = call
        self.stream = stream
        self.event: Any = None
        self.keep: object = keep
        self.over = False
        self.captured = False
        self.capture: int | None = None
        self.events: deque[Any] | None = None

    def __del__(self) -> None:
        if self.events is not None and self.event is not None and not self.captured:
            self.events.append(self.event)


class WatchedGroup(Protocol):
    """A group, from the watchdog's view."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread to query this group's events, until it queries another's."""

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

    Attributes:
        captured: Stands for the group's calls in CUDA graphs, which may run at any time; None: it
            has none.
        asked_since: When a thread asked CUDA what it has not answered yet; None: it has.
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
        self._dropped: deque[object] = deque()  # of calls that are over
        self._crowded = CROWDED
        self.captured: StreamCall | None = None
        self.asked_since: float | None = None
        self.ended = False
        self._lock = threading.Lock()  # guards looking for failures
        self._query_lock = threading.Lock()  # a thread queries CUDA
        self._device_error: tuple[StreamCall, BaseException] | None = None
        self._seen_lost = False

    def add(self, flight: InFlight) -> None:
        """Watch the call from now on."""
        if len(self._flights) >= self._crowded:
            # Events and records that are used again soon are still in the core's cache.
            self.query()
        flight.events = self._spare
        self._flights.append(flight)
        WATCHDOG.wake()
        if self._dropped:
            self.release()

    def add_captured(self, name: str) -> None:
        """Look after replays of a CUDA graph with a call of this name. Their deadlines are unknown,
        but not that a rank is lost."""
        if self.captured is None:
            self.captured = StreamCall(f"a CUDA graph's {name}", 0, math.inf)
            WATCHDOG.wake()

    def release(self) -> None:
        """Drop arrays of calls that are over, on the calling thread, one of the program's."""
        with contextlib.suppress(IndexError):
            while True:
                self._dropped.popleft()

    def discard(self, flight: InFlight) -> None:
        """Drop a call that was refused before it had any effect."""
        with contextlib.suppress(ValueError):
            self._flights.remove(flight)

    def spare_event(self) -> Any:
        """Return the event of a completed call for reuse; None if there is none."""
        try:
            return self._spare.popleft()
        except IndexError:
            return None

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
        """Prepare the watchdog's thread to query, even if the device cannot be used."""
        if not self.ended:
            with contextlib.suppress(Exception):
                self._group.prepare_thread()

    def poll(self) -> None:
        """Query CUDA, and look for failures, once."""
        self.query()
        self.look()

    def query(self) -> None:
        """Find out which calls are over. CUDA may block this thread behind a call that hangs."""
        if not self._query_lock.acquire(blocking=False):
            return  # another thread does
        self.asked_since = time.monotonic()
        try:
            if not self.ended:
                self._complete()
        except Exception as raised:
            if self._device_error is None and (call := self.oldest) is not None:
                self._device_error = call, raised
        finally:
            self.asked_since = None
            self._query_lock.release()

    def look(self) -> None:
        """Look for failures once, without a call of CUDA."""
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
        if self._device_error is not None:
            refused, found = self._device_error
            return lambda: group.on_device_error(refused, found)
        if (told := group.control_error()) is not None:
            error = told
            return lambda: group.on_control_error(error)
        if self.call_check is not None:
            try:
                self.call_check.poll()
            except CallsDiffer as differ:
                difference = differ
                return lambda: group.on_mismatch(difference)
        call = self.oldest or self.captured
        if call is None:
            return None
        if text := group.async_error():
            return lambda: group.on_device_error(call, text)
        if self.call_check is not None and (lost := self.call_check.lost) is not None:
            # A failed rank reports the error before it leaves; that may arrive by the next poll.
            if self._seen_lost:
                return lambda: group.on_lost_peer(call, lost)
            self._seen_lost = True
        # A later call may be due before the first.
        calls = (flight.call for flight in tuple(self._flights))
        first = min(calls, key=lambda each: each.deadline, default=call)
        return (lambda: group.on_timeout(first)) if self._clock() > first.deadline else None

    def _complete(self) -> None:
        by_stream: dict[int, list[InFlight]] = {}
        for flight in tuple(self._flights):
            if flight.event is None:
                break
            if not flight.over:
                by_stream.setdefault(flight.stream, []).append(flight)
        for flights in by_stream.values():
            # A stream passes its calls in order, and querying each costs more. This holds for a
            # number that CUDA gives again, too: CUDA frees a stream after its work.
            reached = bisect_left(flights, True, key=lambda each: not self._group.is_over(each))
            for flight in flights[:reached]:
                flight.over = True
                if flight.keep is not None:  # no name of this thread's: it must not be the last
                    self._dropped.append(flight.keep)
                    flight.keep = None
        while self._flights and self._flights[0].over:
            self._flights.popleft()
        self._crowded = 2 * len(self._flights) + CROWDED

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


class EventQueries:
    """The thread that queries CUDA for the watchdog, in rounds."""

    def __init__(self) -> None:
        self._watches: list[GroupWatch] = []
        self._wanted, self._over = threading.Event(), threading.Event()
        self._over.set()
        threading.Thread(target=self._run, name="cydist-nccl-query", daemon=True).start()

    def query(self, watches: list[GroupWatch]) -> None:
        """Query these groups' calls, and wait a while for the answers. If the last round still
        waits for CUDA, return at once."""
        if not self._over.is_set():
            return
        self._over.clear()
        self._watches = watches
        self._wanted.set()
        self._over.wait(QUERY_SECONDS)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            watches, self._watches = self._watches, []
            for watch in watches:
                with contextlib.suppress(Exception):
                    watch.prepare_thread()
                    watch.query()
            del watches
            with contextlib.suppress(NameError):
                del watch
            self._over.set()


class Watchdog:
    """The watchdog's threads. They sleep while no call is under way. A forked child has none until
    its first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._work = threading.Event()
        self._queries: EventQueries | None = None
        self._pid = 0

    @property
    def blocked_seconds(self) -> float:
        """Return for how long CUDA has not answered a query, the watchdog's or that of a thread
        that makes calls; 0.0 if it answers."""
        with self._lock:
            since = [watch.asked_since for watch in self._watches]
        longest = time.monotonic() - min((each for each in since if each), default=math.inf)
        return longest if longest >= QUERY_SECONDS else 0.0

    def add(self, watch: GroupWatch) -> None:
        """Add a group to watch."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._watches = weakref.WeakSet()
                self._work = threading.Event()
                self._queries = EventQueries()
                threading.Thread(
                    target=self._run, args=(self._queries,), name="cydist-nccl-watch", daemon=True
                ).start()
            self._watches.add(watch)

    def wake(self) -> None:
        """Wake the thread, because there is a call to watch."""
        if not self._work.is_set():
            self._work.set()

    def _run(self, queries: EventQueries) -> None:
        period = None
        while True:
            self._work.wait(period)
            time.sleep(PERIOD)
            self._work.clear()
            with self._lock:
                watches = list(self._watches)
            period = None
            queries.query([watch for watch in watches if watch.oldest is not None])
            for watch in watches:
                with contextlib.suppress(Exception):  # the group has failed, as its calls will find
                    watch.look()
                if watch.in_flight:
                    self._work.set()
                if watch.captured is not None and not watch.ended:
                    period = CAPTURED_PERIOD
            del watches
            with contextlib.suppress(NameError):
                del watch


WATCHDOG = Watchdog()

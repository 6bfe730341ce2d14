"""The Work of a call on a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cydist.errors import DistTimeoutError
from cydist.work import Work

if TYPE_CHECKING:
    from cydist.backends.nccl.failure import FailureHandler
    from cydist.backends.nccl.streams import GroupStreams
    from cydist.backends.nccl.watchdog import InFlight
    from cydist.devices.array_libraries import ArrayLibrary
    from cydist.groups.process_group import ProcessGroup

LONGEST_NAP = 0.001  # seconds


class StreamWork(Work):
    """A call that was enqueued.

    `wait` makes the caller's current stream wait and returns at once. With a timeout it blocks
    until the call is over, as `synchronize` does.

    Args:
        group_streams, failures: Parts of the group.
        streams: The streams that were current when it was enqueued.
        library: Of its arrays; `wait` makes that library's current stream wait; None: every
            library's.
        blocking: Whether `wait` must block until the GPU has passed the call (a barrier).
        source: The sender's global rank, of a receive.
    """

    def __init__(
        self,
        group_streams: GroupStreams,
        failures: FailureHandler,
        group: ProcessGroup,
        flight: InFlight,
        result: object,
        streams: list[int],
        library: ArrayLibrary | None,
        blocking: bool,
        source: int | None = None,
    ) -> None:
        super().__init__(result)
        self._source = source
        self._group_streams = group_streams
        self._failures = failures
        self._group = group
        self.flight = flight
        self.streams = streams
        self._library = library
        self._blocking = blocking

    def _wait(self, timeout: float | None) -> None:
        self._raise()
        if timeout is not None or self._blocking:
            self._block(timeout)
            self.flight.keep = None
        waiting = self._group_streams.make_wait(self.flight, self._library)
        self._failures.watch.release()
        # Memory that is freed now is reused only after the work that the streams wait for.
        if set(waiting) <= set(self.streams):
            self.flight.keep = None

    def synchronize(self) -> None:
        """Block the calling thread until the call is over."""
        self._raise()
        self._block(None)
        self.flight.keep = None
        self._failures.watch.release()

    def _on_thread(self, task: Callable[[], None]) -> None:
        """Complete a future when the GPU has passed the call."""

        def run() -> None:
            with contextlib.suppress(Exception):  # the queries below raise it again
                self._failures.prepare_thread()
            try:
                self._block(None)
            except Exception as error:  # `task` raises it: its wait() does not query the GPU
                if self._error is None:
                    self._error = error
            task()

        super()._on_thread(run)

    def _block(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        nap = 2e-5
        while not self._poll():  # the watchdog ends late calls
            if end is not None and time.monotonic() > end:
                raise DistTimeoutError(
                    f"{self.flight.call.name}: not complete after {timeout:.3g} s; it goes on, and "
                    "can be waited for again",
                    op=self.flight.call.name, group=self._group.group_name,
                )  # fmt: skip
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        self._raise()

    def _raise(self) -> None:
        if not self.flight.over and self._error is None:
            self._error = self._failures.failure(self.flight)
        if self._error is not None:
            raise self._error

    def _poll(self) -> bool:
        if self.flight.over or self._error is not None:
            return True
        self._group.check_process(self.flight.call.name)
        self._error = self._failures.failure(self.flight)
        return self._error is not None or self._group_streams.is_over(self.flight)

"""The Work of a call on the group's stream, and the fast-path enqueuer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cydist._native import fast_nccl
from cydist.backends.nccl.reductions import at_once
from cydist.backends.nccl.watchdog import InFlight, StreamCall
from cydist.devices.array_libraries import loaded_torch
from cydist.errors import DistTimeoutError
from cydist.work import Work

if TYPE_CHECKING:
    from cydist.backends.nccl.binding import Communicator
    from cydist.backends.nccl.enqueue import EnqueueMixin
    from cydist.backends.nccl.watchdog import GroupWatch
    from cydist.devices.array_libraries import ArrayLibrary

LONGEST_NAP = 0.001  # seconds


class StreamWork(Work):
    """A call that was enqueued.

    `wait` makes the caller's current stream wait and returns at once. With a timeout it blocks
    until the call is over, as `synchronize` does.

    Args:
        streams: The streams that were current when it was enqueued.
        library: Of its arrays; `wait` makes that library's current stream wait; None: every
            library's.
        blocking: Whether `wait` must block until the GPU has passed the call (a barrier).
        source: The sender's global rank, of a receive.
    """

    def __init__(
        self,
        group: EnqueueMixin,
        flight: InFlight,
        result: object,
        streams: list[int],
        library: ArrayLibrary | None,
        blocking: bool,
        source: int | None = None,
    ) -> None:
        super().__init__(result)
        self._source = source
        self._group = group
        self.flight = flight
        self.streams = streams
        self._library = library
        self._blocking = blocking

    def _wait(self, timeout: float | None) -> None:
        self._raise()
        if timeout is not None or self._blocking:
            self._block(timeout)
        waiting = self._group.make_streams_wait(self.flight, self._library)
        # Memory that is freed now is reused only after the work that the streams wait for.
        if set(waiting) <= set(self.streams):
            self.flight.keep = None

    def synchronize(self) -> None:
        """Block the calling thread until the call is over."""
        self._raise()
        self._block(None)

    def _on_thread(self, task: Callable[[], None]) -> None:
        """Complete a future when the GPU has passed the call."""

        def run() -> None:
            with contextlib.suppress(Exception):  # the queries below raise it again
                self._group.gpu.adopt()
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
            self._error = self._group.failure(self.flight)
        if self._error is not None:
            raise self._error

    def _poll(self) -> bool:
        if self.flight.over or self._error is not None:
            return True
        self._group.check_process(self.flight.call.name)
        self._error = self._group.failure(self.flight)
        return self._error is not None or self._group.is_over(self.flight)


def new_enqueuer(
    group: EnqueueMixin, comm: Communicator, watch: GroupWatch, lock: threading.RLock, stream: int
) -> fast_nccl.Enqueuer:
    """Create the fast-path enqueuer of a group."""
    return fast_nccl.Enqueuer(
        group, comm, watch, lock, stream, loaded_torch,
        partial(at_once, single_rank=group.size() == 1), StreamCall, InFlight, StreamWork,
    )  # fmt: skip

"""torch's Work around cydist's: the result of a group's call for torch, in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cydist.executor import COMPLETIONS
from cydist.work import Work

NO_TIMEOUT = timedelta(0)  # passed by C++ if its caller gave none


def future_of(tensors: Any) -> Any:
    """Return a torch Future for these tensors, in lists of any depth. A Future must know their GPUs
    beforehand."""
    devices = []
    several = [tensors]
    for each in several:
        if isinstance(each, list | tuple):
            several.extend(each)
        elif getattr(each, "is_cuda", False):
            devices.append(each.device)
    return torch.futures.Future(devices=list(dict.fromkeys(devices)))


def value_of(over: Any, tensors: Any, error: Callable[[], BaseException | None]) -> Any:
    """Return a torch Future that gets the tensors when `over` is complete, or the text of
    `error()`.

    A callback raises the error. `Future.set_exception` would give C++ the exception as the Future's
    value, where DDP's reducer looks for tensors and crashes.
    """

    def value(_: Any) -> Any:
        raised = error()
        if raised is not None:
            raise raised
        return tensors

    return over.then(value)


class DoneWork(dist.Work):
    """A call that was complete when it returned."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the call is complete, and the CPU has no streams."""

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True: an error would have been raised."""
        return True

    def exception(self) -> None:
        """Return None: an error would have been raised."""

    def result(self) -> Any:
        """Return the tensors that the call wrote."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a completed torch Future with the value `result`."""
        future = future_of(self._tensors)
        future.set_result(self._tensors)
        return future


# The result of every blocking call, which torch waits for and drops. Making one for each call would
# take as long as the call.
BLOCKING = DoneWork(None)


class PendingWork(dist.Work):
    """A call under way.

    A torch Future is made at the first request, and completed on a thread that may block: its
    callbacks may make further calls on the group and wait for them.
    """

    def __init__(
        self, work: Work, tensors: Any, group_rank: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._group_rank = group_rank
        self._future: Any = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the call is complete; return True. Raises the call's exception."""
        return self._work.wait(timeout if timeout > NO_TIMEOUT else None)

    def synchronize(self) -> None:
        """Block until the call is complete: the CPU has no streams."""
        self._work.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the call ended without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return what the call raised, if it has ended and did."""
        return self._work.exception()

    def result(self) -> Any:
        """Wait, then return the tensors that the call wrote."""
        self._work.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Wait for a receive, then return the sender's rank in the group."""
        source = self._work.source_rank()
        return source if self._group_rank is None else self._group_rank(source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch Future that gets `result`, or a RuntimeError with the text of the call's
        exception."""
        if self._future is None:
            over = future_of(self._tensors)
            raised: list[Exception] = []
            work = self._work
            # torch's C++ lets the GIL go while it destroys a call. So the thread that completes the
            # Future drops both inside COMPLETIONS, too.
            held = [(over, self)]

            def complete() -> None:
                future, call = held.pop()
                # Grad mode is per thread, and this may not be the caller's thread.
                with torch.no_grad():
                    future.set_result(call._tensors)

            def fill() -> None:
                try:
                    work.wait()
                except Exception as error:
                    raised.append(error)
                COMPLETIONS.run(complete)

            self._future = value_of(over, self._tensors, lambda: next(iter(raised), None))
            if COMPLETIONS.closed:
                fill()
            else:
                work._on_thread(fill)
        return self._future


class SeveralWorks(dist.Work):
    """Calls that were started one after the other and count as one."""

    def __init__(self, works: list[Any], tensors: Any) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until all are complete; return True. Raises the exception of the first failed
        call."""
        return all(work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        """Block until all are complete: the CPU has no streams."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return whether all calls have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all calls ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what the call raised, if it has ended and did."""
        found = (work.exception() for work in self._works)
        return next((error for error in found if error is not None), None)

    def result(self) -> Any:
        """Wait, then return the tensors that the calls wrote."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """Return a torch Future that gets `result`, or a RuntimeError with the text of a call's
        exception."""
        over = torch.futures.collect_all([work.get_future() for work in self._works])
        return value_of(over, self._tensors, self.exception)

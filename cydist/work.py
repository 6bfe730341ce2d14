"""Work: the handle of a call that was started and may not be finished."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from cydist.errors import DistTimeoutError, shorten
from cydist.waiting import LONGEST_TIMEOUT, countdown, run_on_thread, seconds, wait_for

if TYPE_CHECKING:
    from concurrent.futures import Future

    class CallFuture(Future[Any]):
        """The type of Work.get_future, for type checkers."""

        def wait(self) -> Any: ...
        def value(self) -> Any: ...
        def then(self, callback: Callable[[CallFuture], Any]) -> CallFuture: ...


@cache
def _future_class() -> type[CallFuture]:
    """Return the class of a call's future. Made at first use: its base is slow to import."""
    from concurrent.futures import Future, InvalidStateError

    class CallFuture(Future[Any]):
        """A concurrent.futures.Future that also has the methods of torch.futures.Future."""

        def wait(self) -> Any:
            """Wait for the result, and return it. Raises the call's exception."""
            return self.result()

        def value(self) -> Any:
            """Return the result of a completed call. Raises InvalidStateError before that, and the
            call's exception."""
            if not self.done():
                raise InvalidStateError("value: the call is still under way: use wait()")
            return self.result()

        def then(self, callback: Callable[[Any], Any]) -> CallFuture:
            """Return a future of `callback(self)`, which is called when this one is complete."""
            following = CallFuture()
            following.set_running_or_notify_cancel()

            def follow(done: Any) -> None:
                try:
                    following.set_result(callback(done))
                except BaseException as error:
                    following.set_exception(error)

            self.add_done_callback(follow)
            return following

    return CallFuture  # type: ignore[return-value]  # the one above, which needs no import


def _is_of_torch(result: object) -> bool:
    """Return whether a call's arrays are torch's tensors."""
    while isinstance(result, list | tuple) and result:
        result = result[0]
    return isinstance(result, sys.modules["torch"].Tensor)


class Work:
    """A call under way.

    Backends define subclasses: calls complete in different ways (a thread, a request, an event on a
    stream), but the user's view is the same. A subclass implements `_wait` and `_poll`. It sets
    `_error` to the call's exception and, for a receive, `_source` to the sender's global rank. This
    class keeps the deadline, if there is one (`due`). On a backend with streams `wait` orders the
    current stream after the call and returns at once; `synchronize` blocks until the call has run.

    Args:
        result: What the call writes, as the user passed it.

    Examples:
        >>> x = np.ones(3)
        >>> work = dist.all_reduce(x, async_op=True)
        >>> work.wait()
        True
        >>> x
        array([2., 2., 2.])
    """

    __module__ = "cydist"

    _due_at = math.inf  # on time.monotonic()
    _allowed: float | None = None  # the timeout that it came from, in seconds

    def __init__(self, result: object = None) -> None:
        self._result = result
        self._error: BaseException | None = None
        self._source: int | None = None

    def due(self, timeout: float | None) -> None:
        """Set the call's deadline.

        Meant for the caller that started it. A call past its deadline ends with DistTimeoutError as
        soon as a thread waits for it or polls it. A later `due` replaces the deadline; a thread
        that is already waiting keeps the longer one it started with.

        Args:
            timeout: Seconds from now; None: no deadline.
        """
        self._allowed = timeout
        if timeout is None:
            self._due_at = math.inf
        else:
            self._due_at = time.monotonic() + min(timeout, LONGEST_TIMEOUT)

    # Implemented by subclasses.

    def _wait(self, timeout: float | None) -> None:
        """Block until complete. Raises the call's exception, or DistTimeoutError after `timeout`
        seconds, and leaves the call under way then."""
        raise NotImplementedError

    def _poll(self) -> bool:
        """Return whether the call has ended, with or without an error, without blocking."""
        raise NotImplementedError

    def _expire(self, late: DistTimeoutError) -> None:
        """End a call that is not complete at its deadline. Optional.

        Args:
            late: The exception of `_wait`.
        """
        self._error = late

    # Called by users.

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until the call is complete; return True.

        Args:
            timeout: Seconds, or a timedelta. None: only the call's own deadline.

        Returns:
            True.

        Raises:
            DistTimeoutError: The timeout given here passed. The call is still under way: you can
                wait for it again.
            DistError: The call failed.
        """
        limit = seconds(timeout, "wait")
        end = math.inf if limit is None else time.monotonic() + limit
        try:
            while True:
                due = self._due_at
                first = end if end < due else due
                try:
                    self._wait(None if first == math.inf else max(0.0, first - time.monotonic()))
                    return True
                except DistTimeoutError as late:
                    if end < due or self._error is not None:
                        raise
                    if due == self._due_at:
                        self._expire(late)  # and `_wait` raises
        except Exception as error:
            shorten(error)
            raise

    def synchronize(self) -> None:
        """Block the calling thread until the call is complete, whatever the backend.

        Raises:
            DistError: The call failed.
        """
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current stream after the call, as `wait` does; torch's name.

        Raises:
            DistError: The call failed.
        """
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error, without waiting for it.

        A call past its deadline first queries the other ranks briefly, and ends.

        Returns:
            True or False.
        """
        if self._poll():
            return True
        if time.monotonic() >= self._due_at:
            with suppress(Exception):
                self.wait()  # it ends
        return self._error is not None

    def is_success(self) -> bool:
        """Return whether the call ended without an error.

        Returns:
            True or False.
        """
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the call's exception.

        Returns:
            The exception; None while the call is under way and after success.
        """
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """Wait, then return the arrays that the call wrote, as the user passed them.

        Returns:
            An array or a list of arrays; None for a call that writes none.

        Raises:
            DistError: The call failed.
        """
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Wait for a receive, then return the sender's global rank.

        Returns:
            The sender's global rank.

        Raises:
            DistError: The call failed.
        """
        self.wait()
        if self._source is None:
            raise ValueError("Work.source_rank: only receives have a source")
        return self._source

    def get_future(self) -> CallFuture:
        """Return a future of the call.

        Of a call on torch's tensors it is torch's own Future, as communication hooks of
        DistributedDataParallel return it. Its errors are RuntimeErrors with the exception's text.
        Else it is a concurrent.futures.Future that has torch's methods too: `wait()` returns the
        result, `value()` the result of a call that is complete, and `then(callback)` a future of
        `callback(future)`. A callback runs on the thread that completes the call, or at once if it
        is complete.

        Returns:
            A future that gets `result`, or the call's exception.
        """
        if "torch" in sys.modules and _is_of_torch(self._result):
            # By name, since the bridge to torch is built on this module.
            bridge: Any = importlib.import_module("cydist.interop.torch.work")
            pending: CallFuture = bridge.PendingWork(self, self._result).get_future()
            return pending
        return self._python_future()

    def _python_future(self) -> CallFuture:
        future = _future_class()()
        future.set_running_or_notify_cancel()

        def fill() -> None:
            try:
                self.wait()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        self._on_thread(fill)
        return future

    def _on_thread(self, task: Callable[[], None]) -> None:
        """Run `task`, which will wait for this call, on a thread that may block."""
        if self._poll():
            task()
        else:
            run_on_thread(task, "cydist-future")

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio

        return asyncio.wrap_future(self._python_future()).__await__()


class CombinedWork(Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work], result: object = None) -> None:
        super().__init__(result)
        self._works = works

    def _wait(self, timeout: float | None) -> None:
        left = countdown(timeout)
        for work in self._works:
            work.wait(left())

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def _poll(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._error = next((e for work in self._works if (e := work.exception())), None)
        return True


class EventWork(Work):
    """A call that another thread ends: for backends that use threads or callbacks.

    Args:
        what: Describes the call in a timeout's message: "recv from rank 3".
        timeout: Seconds that it may take from now; None: no limit.
        result: What the call writes, as the user passed it.

    Examples:
        >>> import threading
        >>> work = dist.EventWork("copy to disk", timeout=60)
        >>> threading.Thread(target=work.end).start()
        >>> work.wait()
        True
    """

    __module__ = "cydist"

    def __init__(self, what: str, timeout: float | None = None, result: object = None) -> None:
        super().__init__(result)
        self._what = what
        self._done = threading.Event()
        self._lock = threading.Lock()
        if timeout is not None:
            self.due(timeout)

    def end(self, error: BaseException | None = None, source: int | None = None) -> None:
        """End the call; only the first time counts.

        Args:
            error: The exception for the waiting thread; None: success.
            source: Of a successful receive: the sender's global rank.
        """
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._source = source
                self._done.set()

    def _wait(self, timeout: float | None) -> None:
        if not wait_for(self._done, timeout):
            raise DistTimeoutError(
                f"{self._what}: not complete after {timeout:.3g} s; it goes on, and can be "
                "waited for again",
                op=self._what.partition(" ")[0],
            )
        if self._error is not None:
            raise self._error

    def _expire(self, late: DistTimeoutError) -> None:
        given = "" if self._allowed is None else f" after {self._allowed:.3g} s"
        self.end(DistTimeoutError(f"{self._what}: timeout{given}", op=late.op))

    def _poll(self) -> bool:
        return self._done.is_set()


class FinishedWork(Work):
    """A Work whose completion has one more step, such as unpacking received data.

    `finish` runs once, on the first thread that sees the inner work complete.
    """

    def __init__(self, inner: Work, finish: Callable[[], None], result: object) -> None:
        super().__init__(result)
        self._inner = inner
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def due(self, timeout: float | None) -> None:
        self._inner.due(timeout)

    def _wait(self, timeout: float | None) -> None:
        self._inner.wait(timeout)
        self._keep_outcome()

    def _poll(self) -> bool:
        if not self._inner.is_completed():
            return False
        self._error = self._inner.exception()
        if self._error is None:
            self._keep_outcome()
        return True

    def _keep_outcome(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
        self._source = self._inner._source

"""Timeouts and deadlines, and how a service thread survives an error.

The system's waits (select, poll, epoll, a socket's timeout) count milliseconds in 32 bits, 24.8
days. Beyond that Python raises OverflowError, and a socket's timeout wraps around and ends early.
So a timeout becomes a deadline, and no single wait is longer than an hour: every waiting loop takes
its slice from `one_wait`, and checks its deadline afterwards.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Real
from types import TracebackType

DEFAULT_TIMEOUT = timedelta(minutes=30)  # of a group's calls and of its start
default_pg_timeout = DEFAULT_TIMEOUT  # torch's name, which users read
STORE_TIMEOUT = timedelta(seconds=300)  # of a store that a program creates

LONGEST_TIMEOUT = 1e9  # seconds, 31 years: as nanoseconds, deadlines still fit into 64 bits
LONGEST_WAIT = 3600.0  # seconds of one wait, which fit every system's clock

# Seconds until a wait of the job's start says what is missing, and until it says so again.
FIRST_NOTICE, NEXT_NOTICE = 3.0, 30.0

FIRST_REST, LONGEST_REST = 0.01, 0.1  # seconds of rest after a round that raised
MOST_IN_A_ROW = 100  # failing rounds in a row, about ten seconds, after which a thread ends


def duration(timeout: float | timedelta, call: str = "") -> float:
    """Return a caller's timeout in seconds. An infinite or nearly infinite one becomes
    LONGEST_TIMEOUT.

    Args:
        call: The call that received it, for messages.

    Raises TypeError if it is not a duration, ValueError if it is negative or NaN.
    """
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if type(limit) in (float, int) and 0 <= limit <= LONGEST_TIMEOUT:  # nearly all of them
        return float(limit)
    try:
        if not isinstance(limit, Real):
            raise TypeError
        least = min(limit, LONGEST_TIMEOUT)  # numpy's timedelta64 passes as a number, but not here
    except TypeError:
        where = f"{call}: " if call else ""
        raise TypeError(f"{where}timeout must be seconds or a timedelta, not {timeout!r}") from None
    if not limit >= 0:
        where = f"{call}: " if call else ""
        raise ValueError(f"{where}timeout must be 0 seconds or more, not {timeout!r}")
    return float(least)


def seconds(timeout: float | timedelta | None, call: str = "") -> float | None:
    """As `duration`, but None stays None: another timeout, or no limit."""
    return None if timeout is None else duration(timeout, call)


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """Return a function that gives the seconds left until `timeout` seconds from now; None: no
    limit."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(0.0, end - time.monotonic())


def one_wait(left: float) -> float:
    """Return how long one wait may last if `left` seconds are left."""
    return left if left < LONGEST_WAIT else LONGEST_WAIT


def wait_for(event: threading.Event, timeout: float | None) -> bool:
    """Wait until `event` is set, for at most `timeout` seconds (None: no limit); return whether it
    is set."""
    if timeout is None or timeout <= LONGEST_WAIT:
        return event.wait(timeout)
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        if event.wait(one_wait(left)):
            return True
    return event.is_set()


class WaitNotices:
    """Say what a long wait is for, after FIRST_NOTICE and then every NEXT_NOTICE seconds.

    Args:
        say: Prints a message; the default writes to stderr.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._print = say or _print
        self._began = time.monotonic()
        self._due = self._began + FIRST_NOTICE

    @property
    def left(self) -> float:
        """Return the seconds until the next notice."""
        return max(0.0, self._due - time.monotonic())

    def say_if_due(self, text: Callable[[float], str]) -> None:
        """Print `text` of the seconds waited so far, if it is time for that."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + NEXT_NOTICE
            with suppress(Exception):  # stderr may be closed, and the wait goes on without it
                self._print(f"{text(now - self._began)}\n")

    @contextmanager
    def meanwhile(self, text: Callable[[float], str]) -> Iterator[None]:
        """Say it from a thread, while the caller is in one wait that it cannot divide."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self.left):
                self.say_if_due(text)

        thread = threading.Thread(target=watch, daemon=True, name="cydist-notices")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def start_thread(target: Callable[[], object], name: str) -> bool:
    """Start a daemon thread. Return False if the interpreter ends: CPython 3.12 starts none."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):  # no thread can be had for another reason
            raise
        return False
    return True


def run_on_thread(task: Callable[[], object], name: str) -> None:
    """Run `task` on a new daemon thread, or on the calling one if the interpreter ends."""
    if not start_thread(task, name):
        task()


class LoopGuard:
    """The rounds of a service's loop, which goes on when a round raises.

    Args:
        name: Of the service, for messages: "thread cydist-store".
        say: Prints a message; the default writes to stderr.

    Use it as the context of each round. Pass the exception of a single event to `record`, so that
    the round's other events are served. Exceptions are of one kind if they have the same type and
    were raised in the same line. The first of each kind is printed. A rest follows, which grows
    while rounds keep raising. After MOST_IN_A_ROW failing rounds the next exception propagates: a
    service that no longer works must end, so that others notice.
    """

    def __init__(self, name: str, say: Callable[[str], object] | None = None) -> None:
        self._name = name
        self._print = say or _print
        self._reported: set[tuple[object, ...]] = set()
        self._noted = False
        self._raised = 0  # in a row
        self._rest = FIRST_REST

    def __enter__(self) -> None:
        self._noted = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Return True if the round raised and the thread goes on."""
        if error is None:
            self._raised = 0
            if not self._noted:
                self._rest = FIRST_REST
                return False
        else:
            if not isinstance(error, Exception) or self._raised >= MOST_IN_A_ROW:
                return False
            self._raised += 1
            self.report(error)
        time.sleep(self._rest)
        self._rest = min(2 * self._rest, LONGEST_REST)
        return True

    def record(self, error: Exception) -> None:
        """Record that one event of this round raised: a rest follows the round."""
        self._noted = True
        self.report(error)

    def report(self, error: Exception) -> None:
        """Print that the thread goes on after this exception, once for each kind."""
        with suppress(Exception):  # failing to print is no reason to end either
            kind = _kind_of(error)
            if kind in self._reported:
                return
            self._reported.add(kind)
            import traceback  # slow and rarely needed

            text = "".join(traceback.format_exception(error))
            self._print(
                f"cydist: {self._name} goes on after an exception; others like it are not shown\n"
                f"{text}"
            )


def _kind_of(error: BaseException) -> tuple[object, ...]:
    """Return an exception's type and the line that raised it."""
    place: tuple[object, ...] = ()
    trace = error.__traceback__
    while trace is not None:
        place, trace = (trace.tb_frame.f_code.co_filename, trace.tb_lineno), trace.tb_next
    return type(error), *place


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()

"""Threads for asynchronous calls, and the order in which a group's calls run.

A group with asynchronous calls outstanding borrows one thread; an idle group has none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from cydist._native import CallQueue, run_in_background
from cydist.errors import check_process
from cydist.waiting import wait_for
from cydist.work import EventWork

if TYPE_CHECKING:
    from queue import SimpleQueue

T = TypeVar("T")

# Waits for an event on a thread that moves the calls in the background on meanwhile: (event,
# seconds or None); is it set?
PollHook = Callable[[threading.Event, float | None], bool]

IDLE_SECONDS = 1.0  # how long a thread with nothing to do is kept for the next borrower
END_SECONDS = 1.0  # the longest that an interrupted caller waits for its call to end elsewhere


class Threads:
    """Daemon threads, made when none is idle and ended when idle for a while.

    Never a bound: two groups that wait for each other on other ranks must both run.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # A queue for each: among several readers of one, get() may forget its timeout.
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, on some thread."""
        if os.getpid() != self._pid:
            self.__init__()  # type: ignore[misc]  # a forked child has none of these threads
        with self._lock:
            if self._idle:
                thread = self._idle[-1]
                del self._idle[-1]
                thread.put(task)
                return
        from queue import SimpleQueue  # slow to import, and few programs need a thread

        tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, args=(task, tasks), name="cydist", daemon=True).start()

    def _serve(self, task: Callable[[], None], tasks: SimpleQueue[Callable[[], None]]) -> None:
        from queue import Empty

        run_in_background()
        while True:
            task()
            del task
            with self._lock:
                self._idle.append(tasks)
            try:
                task = tasks.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if tasks in self._idle:
                        self._idle.remove(tasks)
                        return
                # A caller has taken this thread, so a task is on its way.
                task = tasks.get()


THREADS = Threads()


class TaskWork(EventWork):
    """A call that runs on a borrowed thread.

    attend      how it is waited for, where it goes on only while somebody does; else None
    """

    def __init__(
        self, name: str, body: Callable[[], None], result: object, poll_hook: PollHook | None = None
    ) -> None:
        super().__init__(name, None, result)
        self._poll_hook = poll_hook
        self._pid = os.getpid()
        self._body: Callable[[], None] | None = body
        self._followers: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the call; keep what it raises for the waiting thread."""
        assert self._body is not None
        failed: BaseException | None = None
        try:
            self._body()
        except BaseException as error:
            failed = error
        self._body = None  # lets go of the arrays
        self.end(failed, self._source)

    def end(self, error: BaseException | None = None, source: int | None = None) -> None:
        super().end(error, source)
        with self._lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            THREADS.run(follower)

    def _wait(self, timeout: float | None) -> None:
        self._poll()  # a forked child would wait for ever
        if self._poll_hook is not None:
            self._poll_hook(self._done, timeout)
            timeout = 0.0
        super()._wait(timeout)

    def _poll(self) -> bool:
        if self._done.is_set():
            return True
        check_process(self._pid, self._what)
        return self._poll_hook is not None and self._poll_hook(self._done, 0.0)

    def wait_until(self, deadline: float) -> bool:
        """Wait until time.monotonic() is `deadline`, at most: has it run?"""
        limit = max(0.0, deadline - time.monotonic())
        return (self._poll_hook or wait_for)(self._done, limit)

    def _on_thread(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._poll_hook is None and not self._done.is_set():
                self._followers.append(task)
                return
        task()


class Serial:
    """Runs the calls of one group one after the other, in the order they were issued.

    A blocking call runs on the caller's thread when nothing is outstanding; else it takes
    its place in the queue and the caller waits.

    A signal handler may raise wherever Python calls something. What must stay together is
    therefore under a lock whose `with` comes first, with any call last.

    attend      how calls in the background are waited for; None: they need nobody
    """

    def __init__(self) -> None:
        self.poll_hook: PollHook | None = None
        self.call_queue = CallQueue()
        self._lock = threading.Lock()  # of the queue and the next
        self._served = False  # a thread is on its way to the queue, or at it

    def run(
        self,
        name: str,
        body: Callable[[], None],
        deadline: float,
        give_up: Callable[[BaseException], None],
    ) -> bool:
        """Run `body` in its turn; True when it has run. Raises what it raised.

        False: its turn had not come at the deadline (on time.monotonic()), and never will.
        When a signal handler raises while it runs on another thread, `give_up` must end it.
        """
        token = object()
        try:
            if self.call_queue.try_begin(token):
                body()
                return True
        finally:
            self.call_queue.end(token)
        return self._run_queued(name, body, deadline, give_up)

    def _run_queued(
        self,
        name: str,
        body: Callable[[], None],
        deadline: float,
        give_up: Callable[[BaseException], None],
    ) -> bool:
        work = self.start(name, body, None)
        try:
            if not work.wait_until(deadline) and self._withdraw(work):
                return False
            work.wait()  # once begun it keeps its deadline itself
        except BaseException as error:
            if not self._withdraw(work) and not work.is_completed():
                give_up(error)
                # Until it has ended it may write into the caller's arrays.
                work.wait_until(time.monotonic() + END_SECONDS)
            raise
        return True

    def _withdraw(self, work: TaskWork) -> bool:
        """Take a call out of the queue; False: it has begun."""
        with self._lock:
            return self.call_queue.withdraw(work)

    def start(self, name: str, body: Callable[[], None], result: object) -> TaskWork:
        """Queue `body` to run in its turn on a borrowed thread."""
        work = TaskWork(name, body, result, self.poll_hook)
        try:
            with self._lock:
                served, self._served = self._served, True
                self.call_queue.push(work)
            if not served:
                THREADS.run(self._drain)
        except BaseException:
            self._withdraw(work)
            self._served = False  # who knows; two threads at the queue do no harm
            raise
        return work

    def _drain(self) -> None:
        while self._more():
            with self.call_queue:  # first: of two threads at the queue none overtakes
                self._run_next()

    def _more(self) -> bool:
        """Return whether a call is queued. If not, the next one to be queued brings a thread
        along."""
        with self._lock:
            self._served = not self.call_queue.empty()
            return self._served

    def _run_next(self) -> None:
        with self._lock:
            work = self.call_queue.pop()
        if work is not None:
            work.run()
            self.call_queue.mark_run()

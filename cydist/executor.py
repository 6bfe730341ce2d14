"""Threads for asynchronous calls, and the order in which a group's calls run.

A group with asynchronous calls outstanding borrows one thread; an idle group has none.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cydist._native import CallQueue, run_in_background
from cydist.errors import check_process
from cydist.waiting import start_thread, wait_for
from cydist.work import EventWork

if TYPE_CHECKING:
    from queue import SimpleQueue

    from cydist._native import CallRecord

T = TypeVar("T")

# Waits for an event on a thread that meanwhile progresses the background calls. Takes the event and
# seconds or None, and returns whether the event is set.
PollHook = Callable[[threading.Event, float | None], bool]

IDLE_SECONDS = 1.0  # how long an idle thread is kept for the next borrower
END_SECONDS = 1.0  # how long an interrupted caller waits for its call to end elsewhere
EXIT_SECONDS = 10.0  # how long the end of the process waits for callbacks that have begun


class Threads:
    """Daemon threads: started when none is idle, ended after some idle time.

    Their number has no bound: two groups that wait for each other on other ranks must both run.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # One queue per thread: if several threads read one queue, get() may exceed its timeout.
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
        from queue import SimpleQueue  # slow to import, and rarely needed

        tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        tasks.put(task)  # no argument of the thread, which would keep it until the thread ends
        if not start_thread(partial(self._serve, tasks), "cydist"):
            task()

    def _serve(self, tasks: SimpleQueue[Callable[[], None]]) -> None:
        from queue import Empty

        run_in_background()
        task = tasks.get()
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
                # A caller has taken this thread, so a task will arrive.
                task = tasks.get()


THREADS = Threads()


class TaskWork(EventWork):
    """A call that runs on a borrowed thread.

    Args:
        body: The call. A receive returns its sender's global rank.
        poll_hook: Waits for the call, if it progresses only while a thread waits; else None.
        call: Records how long threads wait for it; None: that is not recorded.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], int | None],
        result: object,
        poll_hook: PollHook | None = None,
        call: CallRecord | None = None,
    ) -> None:
        super().__init__(name, None, result)
        self._call = call
        self._poll_hook = poll_hook
        self._pid = os.getpid()
        self._body: Callable[[], int | None] | None = body
        self._followers: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the call, and keep its exception for the waiting thread."""
        assert self._body is not None
        failed: BaseException | None = None
        source: int | None = None
        try:
            source = self._body()
        except BaseException as error:
            failed = error
        self._body = None  # releases the arrays
        self.end(failed, source)

    def end(self, error: BaseException | None = None, source: int | None = None) -> None:
        super().end(error, source)
        with self._lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            THREADS.run(follower)

    def _wait(self, timeout: float | None) -> None:
        if self._poll() or self._call is None:  # a forked child would wait forever
            self._wait_for_end(timeout)
            return
        since = self._call.clock()
        try:
            self._wait_for_end(timeout)
        finally:
            self._call.caller_waited(since)

    def _wait_for_end(self, timeout: float | None) -> None:
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
        """Wait until the call has run, or time.monotonic() is `deadline`; return whether it has
        run."""
        limit = max(0.0, deadline - time.monotonic())
        return (self._poll_hook or wait_for)(self._done, limit)

    def when_ended(self, task: Callable[[], None]) -> None:
        """Run `task` when the call has ended, on another thread unless it has ended already."""
        with self._lock:
            if not self._done.is_set():
                self._followers.append(task)
                return
        task()

    def _on_thread(self, task: Callable[[], None]) -> None:
        if self._poll_hook is None:
            self.when_ended(task)
        else:  # it ends only while a thread waits
            task()


class Serial:
    """Runs the calls of one group one at a time, in the order they were issued.

    A blocking call runs on the caller's thread if no call is outstanding
    (`CallQueue.run_call_now`); else it joins the queue and the caller waits.

    A signal handler may raise wherever Python makes a call. So code that must not be interrupted is
    under a lock, whose `with` comes first, and makes its calls last.

    Attributes:
        poll_hook: Waits for calls in the background; None: they progress without a waiting thread.
    """

    def __init__(self) -> None:
        self.poll_hook: PollHook | None = None
        self.call_queue = CallQueue()
        self._lock = threading.Lock()  # guards the queue and `_served`
        self._served = False  # whether a thread serves the queue, or will soon

    def run(
        self,
        name: str,
        body: Callable[[], None],
        deadline: float,
        give_up: Callable[[BaseException], None],
    ) -> bool:
        """Run `body` on another thread, after all calls that were issued before it; return True
        when it has run. Raises the exception of `body`.

        Returns False if its turn had not come at the deadline (on time.monotonic()); it then never
        runs. If a signal handler raises while it runs, `give_up` must end it.
        """
        work = self.start(name, body, None)
        try:
            if not work.wait_until(deadline) and self._withdraw(work):
                return False
            work.wait()  # once started, the call keeps its deadline itself
        except BaseException as error:
            if not self._withdraw(work) and not work.is_completed():
                give_up(error)
                # The call may write into the caller's arrays until it ends.
                work.wait_until(time.monotonic() + END_SECONDS)
            raise
        return True

    def _withdraw(self, work: TaskWork) -> bool:
        """Remove a call from the queue; return False if it has already started."""
        with self._lock:
            return self.call_queue.withdraw(work)

    def start(
        self, name: str, body: Callable[[], None], result: object, call: CallRecord | None = None
    ) -> TaskWork:
        """Queue `body` to run in its turn on a borrowed thread. The arguments are TaskWork's."""
        work = TaskWork(name, body, result, self.poll_hook, call)
        try:
            with self._lock:
                served, self._served = self._served, True
                self.call_queue.push(work)
            if not served:
                THREADS.run(self._drain)
        except BaseException:
            self._withdraw(work)
            self._served = False  # unknown whether it was; two threads at the queue do no harm
            raise
        return work

    def _drain(self) -> None:
        while self._more():
            with self.call_queue:  # first, so that of two threads at the queue none overtakes
                self._run_next()

    def _more(self) -> bool:
        """Return whether a call is queued. If not, the next queued call starts a thread."""
        with self._lock:
            self._served = not self.call_queue.empty()
            return self._served

    def _run_next(self) -> None:
        with self._lock:
            work = self.call_queue.pop()
        if work is not None:
            work.run()
            self.call_queue.mark_run()


class Completions:
    """The threads that complete Futures, and so are inside torch's C++.

    A daemon thread ends as soon as it wants the GIL of a Python that is ending. In torch's C++ that
    calls std::terminate, which ends the process by SIGABRT. So the process waits at its end for
    the threads that are inside, and lets no other daemon in.

    Attributes:
        closed: Whether the process is ending: Futures are completed by their callers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    def run(self, complete: Callable[[], None]) -> None:
        """Run `complete`. Never return if that would begin in a daemon thread after `close`."""
        with self._changed:
            if threading.current_thread().daemon:
                self._changed.wait_for(lambda: not self.closed)
            self._inside += 1
        try:
            complete()
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let no further daemon in, and wait for those inside."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: not self._inside, EXIT_SECONDS)


COMPLETIONS = Completions()
atexit.register(COMPLETIONS.close)
# A forked child has none of these threads.
os.register_at_fork(after_in_child=COMPLETIONS.__init__)  # type: ignore[misc]

"""Ranks for tests: a whole job inside one process, without a launcher.

    def body(rank):
        x = numpy.array([rank + 1.0])
        cydist.all_reduce(x)
        return x[0]

    assert run_threads(body, 3) == [6.0, 6.0, 6.0]

`Faults` delays and kills ranks. In pytest, the fixture `thread_job` makes such jobs.

Each rank is a thread with a world of its own: `cydist.get_rank()` and the default group are
the thread's.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, TypeVar

from cydist.api import process_groups
from cydist.errors import MismatchError
from cydist.stores import HashStore
from cydist.testing.faults import Faults, Killed, Weather
from cydist.waiting import duration

__all__ = ["Faults", "Killed", "ThreadJob", "Weather", "run_threads"]

T = TypeVar("T")
Ended = SimpleQueue[tuple[int, Any, BaseException | None]]  # a rank, and its result or exception
Task = tuple[Callable[[int], Any], Ended]
DEADLINE = 60.0  # default seconds that a body may take


class ThreadJob:
    """A job whose ranks are threads that wait for functions to run.

    Args:
        size: How many ranks.
        backend: "inproc", "tcp" or any other that takes CPU arrays.
        timeout: Of the default group, in seconds.
        faults: Delays and deaths of the ranks.
        weather: Deprecated: the former name of `faults`.

    Examples:
        >>> from cydist.testing import ThreadJob
        >>> with ThreadJob(2) as job:  # doctest: +SKIP
        ...     ranks = job.run(lambda rank: dist.get_rank())
        >>> ranks  # doctest: +SKIP
        [0, 1]
    """

    def __init__(
        self,
        size: int,
        backend: str = "inproc",
        timeout: float = DEADLINE,
        faults: Faults | None = None,
        *,
        weather: Faults | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"ThreadJob: size must be 1 rank or more, not {size}")
        if faults is not None and weather is not None:
            raise TypeError("ThreadJob: weather is the former name of faults: give one of them")
        faults = weather if faults is None else faults
        if unknown := sorted(set(faults.kill if faults else ()) - set(range(size))):
            raise ValueError(f"{faults} kills ranks {unknown}, and there are 0 to {size - 1}")
        self._faults = faults
        self.size = size
        self.backend = backend
        self.broken = False  # a body raised or is late: its ranks may be out of step
        self._store = HashStore()
        self._timeout = timeout
        self._closed = False
        self._tasks: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._rank, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def _rank(self, rank: int) -> None:
        process_groups.thread_is_rank()
        try:
            process_groups.init_process_group(
                self.backend,
                store=self._store,
                rank=rank,
                world_size=self.size,
                timeout=self._timeout,
            )
        except BaseException as error:
            self._stay_dead(rank, None, error)
            return
        if self._faults is not None:
            self._faults.on(rank).affect_this_thread()
        raised = False
        while (task := self._tasks[rank].get()) is not None:
            body, ended = task
            try:
                ended.put((rank, body(rank), None))
            except Killed as end:
                ended.put((rank, end, None))
                self._stay_dead(rank, end, None)
                return
            except BaseException as error:
                ended.put((rank, None, error))
                raised = True
            del task, body, ended
        if process_groups.is_initialized():  # the body may have left the job
            # A rank that raised has made other calls than the ranks that went on.
            with suppress(MismatchError) if raised else nullcontext():
                process_groups.destroy_process_group()

    def _stay_dead(self, rank: int, result: Any, error: BaseException | None) -> None:
        while (task := self._tasks[rank].get()) is not None:
            _, ended = task
            ended.put((rank, result, error))

    def run(self, body: Callable[[int], T], timeout: float = DEADLINE) -> list[T]:
        """Call `body(rank)` on every rank, and return the results by rank.

        Args:
            body: Called with the rank on each rank's thread.
            timeout: Seconds that the ranks may take. A rank that takes longer takes part in later
                runs once it has ended; its late result is dropped.

        Returns:
            The results by rank. That of a rank which Faults killed is its `Killed`, in this run and
            in later ones.

        Raises:
            TimeoutError: A rank did not end in time. Every thread's stack is printed.
            Exception: That of the lowest rank that raised, with a note of what the others raised.
        """
        if self._closed:
            raise RuntimeError("ThreadJob.run: the job was closed, and its ranks have ended")
        ended: Ended = SimpleQueue()  # not for ranks that are still in an earlier run
        for tasks in self._tasks:
            tasks.put((body, ended))
        try:
            return self._results(ended, timeout)
        except BaseException:
            self.broken = True
            raise

    def _results(self, ended: Ended, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        deadline = time.monotonic() + duration(timeout)
        while len(results) + len(errors) < self.size:
            left = deadline - time.monotonic()
            try:
                # Python handles a signal that comes just before a wait at the wait's end.
                rank, result, error = ended.get(timeout=max(0, min(left, 1)))
            except Empty:
                if left > 0:
                    continue
                if not errors:
                    _print_stacks()
                    missing = set(range(self.size)) - results.keys()
                    raise TimeoutError(
                        f"ranks {sorted(missing)} run for over {timeout} s"
                    ) from None
                break
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
                # The others may wait for this rank: give them a moment, not a minute.
                deadline = min(deadline, time.monotonic() + 5)
        if errors:
            first = errors.pop(min(errors))
            notes = getattr(first, "__notes__", [])  # an earlier run may have raised it
            for rank, other in errors.items():
                note = f"rank {rank} raised {type(other).__name__}: {other}"
                if note not in notes:
                    first.add_note(note)
            raise first
        return [results[rank] for rank in range(self.size)]

    def close(self, timeout: float = DEADLINE) -> None:
        """End the ranks.

        Args:
            timeout: Seconds to wait for each. A rank that runs longer is left to itself.
        """
        self._closed = True
        for tasks in self._tasks:
            tasks.put(None)
        if not self.broken:
            for thread in self._threads:
                thread.join(duration(timeout))

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _print_stacks() -> None:
    """Print every thread's stack, even if stderr is not a file, as in a notebook or under pytest
    --capture=sys."""
    with TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        print(file.read(), file=sys.stderr)


def run_threads(
    body: Callable[[int], T],
    size: int,
    backend: str = "inproc",
    timeout: float = DEADLINE,
    faults: Faults | None = None,
    *,
    weather: Faults | None = None,
) -> list[T]:
    """Run `body(rank)` on `size` ranks, each a thread, and return the results by rank.

    Args:
        body: Called with the rank, inside a job whose default group exists.
        size: How many ranks.
        backend: "inproc", "tcp" or any other that takes CPU arrays.
        timeout: Of the default group and of the whole run, in seconds.
        faults: Delays and deaths of the ranks.
        weather: Deprecated: the former name of `faults`.

    Returns:
        What `body` returned, by rank; for a rank that `faults` killed its `Killed`.

    Raises:
        TimeoutError: A rank does not end in time. Every thread's stack is printed.
        Exception: That of the lowest rank that raised, with a note of what the others raised.

    Examples:
        >>> from cydist.testing import run_threads
        >>> run_threads(lambda rank: rank * 10, 3)  # doctest: +SKIP
        [0, 10, 20]
    """
    with ThreadJob(size, backend, timeout, faults, weather=weather) as job:
        return job.run(body, timeout)

"""Start ranks as child processes of a Python program: `cydist.spawn`.

`import cydist` imports this, so multiprocessing is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import config
from cydist.errors import ProcessException, ProcessExitedException, ProcessRaisedException
from cydist.launch.causes import is_secondary_failure
from cydist.launch.environment import Ports, job_variables, new_ports, remove_stale, secret_pipe
from cydist.launch.processes import die_with, pretty_exit, pretty_signal
from cydist.net.secret import descriptor_text, new_secret
from cydist.waiting import countdown, duration, one_wait, seconds

if TYPE_CHECKING:
    from datetime import timedelta
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

GRACE_SECONDS = 5.0
# Short enough that a report fits into a pipe, so a child never waits for its parent to read it.
_TRACEBACK_BYTES = 16 << 10
_WHEN = struct.Struct("d")  # time.monotonic(), which all processes of a host share


class _SpawnedRank(NamedTuple):
    """A child's place in the job; sent through multiprocessing's own pipe."""

    rank: int
    size: int
    run_id: str
    port: int  # MASTER_PORT
    store_port: int
    secret: bytes
    ports: Ports | None  # for rank 0; other ranks close their inherited copy after a fork
    parent: int  # pid whose end makes the kernel end the child; 0: watch the parent instead


class ProcessContext:
    """The processes that `spawn` started: `processes`, `pids()`, `join()`."""

    def __init__(self, processes: Sequence[BaseProcess], reports: Sequence[Connection]) -> None:
        self.processes = list(processes)
        self.sentinels = {process.sentinel: rank for rank, process in enumerate(processes)}
        self._reports = list(reports)

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid or 0 for process in self.processes]

    def join(
        self,
        timeout: float | timedelta | None = None,
        grace_period: float | timedelta | None = None,
    ) -> bool:
        """Wait until a process ends; return True if all have ended, False if some still run.

        Args:
            timeout: Seconds or a timedelta after which to return False; None: no limit.
            grace_period: Seconds or a timedelta that the others have to end by themselves after a
                failure, then after SIGTERM, before SIGKILL; None: SIGTERM at once, then 5.

        When a process fails, the others are ended, and ProcessRaisedException (with its
        traceback) or ProcessExitedException names the rank that failed first.
        """
        from multiprocessing.connection import wait

        left = countdown(seconds(timeout, "join"))
        grace = None if grace_period is None else duration(grace_period, "join")
        if not self.sentinels:
            return True
        try:
            ready: list[Any] = []
            while not ready:
                limit = left()
                ready = wait(list(self.sentinels), None if limit is None else one_wait(limit))
                if limit is not None and not left():
                    break
        except BaseException:
            self._end_all(GRACE_SECONDS)
            raise
        for sentinel in ready:
            assert isinstance(sentinel, int)
            self.processes[self.sentinels.pop(sentinel)].join()
        if any(process.exitcode for process in self.processes):
            failure = self._first_failure(time.monotonic())
            if grace is not None:
                self._join_all(grace)
            self._end_all(GRACE_SECONDS if grace is None else grace)
            try:
                raise failure
            finally:
                del failure  # it refers to itself, and would keep descriptors open
        if not self.sentinels:
            self._close()
        return not self.sentinels

    def _first_failure(self, now: float) -> ProcessException:
        """Return the failure that caused the others: the first of those that do not blame another
        rank."""
        failures: list[tuple[bool, float, ProcessException]] = []
        for rank, process in enumerate(self.processes):
            pid, code = process.pid or 0, process.exitcode
            # A worker that raised has already reported it, even if its process has not ended yet.
            if (said := self._read(rank)) is not None:
                text = f"rank {rank} raised:\n\n{said[1]}"
                raised = ProcessRaisedException(text, rank, pid)
                failures.append((is_secondary_failure(said[1]), said[0], raised))
            elif code:
                name = pretty_signal(-code) if code < 0 else None
                text = f"rank {rank} failed: {pretty_exit(code)}"
                failures.append((False, now, ProcessExitedException(text, rank, pid, code, name)))
        return min(failures, key=lambda failure: failure[:2])[2]

    def _read(self, rank: int) -> tuple[float, str] | None:
        """Return when `rank` raised, and its traceback."""
        report = self._reports[rank]
        try:
            if report.closed or not report.poll():
                return None
            said = report.recv_bytes()
        except (EOFError, OSError):
            return None
        return _WHEN.unpack_from(said)[0], said[_WHEN.size :].decode(errors="replace")

    def _join_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            while process.is_alive() and (left := deadline - time.monotonic()) > 0:
                process.join(one_wait(left))

    def _end_all(self, grace: float) -> None:
        """Send SIGTERM, wait `grace` seconds, then send SIGKILL."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        self._join_all(grace)
        for process in self.processes:
            if process.is_alive():
                process.kill()
        self._join_all(GRACE_SECONDS)
        self.sentinels.clear()
        self._close()

    def _close(self) -> None:
        for report in self._reports:
            report.close()


def start_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run `spawn` under its older name."""
    return spawn(fn, args, nprocs, join, daemon, start_method)


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run `fn(rank, *args)` in `nprocs` processes that are the ranks of one job.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in each
    process, so `cydist.init_process_group()` needs no argument. The job has a secret and a port of
    its own. When a process fails, the others are ended and its error is raised here. No process
    outlives this one, even if this one is killed.

    Args:
        fn: A function at a module's top level, so that a new process can import it.
        args: Passed to `fn` after the rank.
        nprocs: How many processes, at least 1.
        join: Wait for all processes. False: return a ProcessContext at once.
        daemon: The processes end when this one exits, and cannot have children.
        start_method: "spawn", "forkserver", or "fork" (only before any group or thread exists).

    Returns:
        A ProcessContext, whose `join` waits, if `join` is False; else None.

    Raises:
        ProcessRaisedException: `fn` raised; the message has its traceback.
        ProcessExitedException: A process left with another exit code than 0, or was killed.

    Examples:
        >>> def train(rank, epochs):  # at the top level of a module
        ...     dist.init_process_group()
        >>> dist.spawn(train, args=(10,), nprocs=4)  # doctest: +SKIP
    """
    if nprocs < 1:
        raise ValueError(f"spawn: nprocs must be at least 1, got {nprocs}")
    import multiprocessing

    context = multiprocessing.get_context(start_method)
    secret, run_id = new_secret(), os.urandom(8).hex()
    direct = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    processes: list[BaseProcess] = []
    reports: list[Connection] = []
    with contextlib.closing(new_ports("127.0.0.1")) as ports:
        try:
            for rank in range(nprocs):
                placement = _SpawnedRank(
                    rank,
                    nprocs,
                    run_id,
                    ports.master,
                    ports.store.getsockname()[1],
                    secret,
                    ports if rank == 0 or start_method == "fork" else None,
                    os.getpid() if direct else 0,
                )
                ours, theirs = context.Pipe(duplex=False)
                reports.append(ours)
                with theirs:
                    process = context.Process(  # type: ignore[attr-defined]
                        target=_run, args=(placement, theirs, fn, args), daemon=daemon
                    )
                    process.start()
                processes.append(process)
        except BaseException:
            ProcessContext(processes, reports)._end_all(0.0)
            raise
    running = ProcessContext(processes, reports)
    if not join:
        return running
    while not running.join():
        pass
    return None


def _run(placement: _SpawnedRank, report: Connection, fn: Callable[..., object], args: Any) -> None:
    """In a child: become a rank, call `fn`, report an exception to the parent."""
    if placement.parent:
        die_with(placement.parent)
    else:
        threading.Thread(target=_follow_parent, daemon=True).start()
    _become(placement)
    try:
        fn(placement.rank, *args)
    except KeyboardInterrupt:
        # It came from the terminal, so the parent got it too and reports it.
        sys.exit(128 + signal.SIGINT)
    except Exception:
        text = traceback.format_exc().encode(errors="replace")[-_TRACEBACK_BYTES:]
        with contextlib.suppress(OSError):
            report.send_bytes(_WHEN.pack(time.monotonic()) + text)
        sys.exit(1)


def _become(placement: _SpawnedRank) -> None:
    """Set the variables that `env://` reads, and put secret and socket in their places."""
    rank, size = str(placement.rank), str(placement.size)
    remove_stale(os.environ)
    os.environ.update(
        job_variables("127.0.0.1", placement.port, placement.store_port, placement.run_id, 0)
    )
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ[config.SECRET_FD.names[0]] = descriptor_text(secret_pipe(placement.secret))
    if placement.ports is None:
        return
    if placement.rank > 0:
        placement.ports.close()
        return
    _, store, reserved = placement.ports
    os.environ[config.STORE_FD.names[0]] = str(store.detach())
    if reserved is not None:
        reserved.detach()  # stays open until this process ends


def _follow_parent() -> None:
    """End this process when its parent is gone."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

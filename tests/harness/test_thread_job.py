"""ThreadJob: what run gives, whatever became of earlier runs."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

import cydist as dist
from cydist.testing import Faults, Killed, ThreadJob, run_threads

Jobs = Callable[..., ThreadJob]
PATIENCE = 20.0  # seconds


def test_a_late_result_is_not_the_next_runs(thread_job: Jobs) -> None:
    """What a rank returns after its run's timeout is not taken for what it returns next."""
    job, go = thread_job(1), threading.Event()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] run for over 0 s"):
        job.run(lambda rank: go.wait(PATIENCE), timeout=0)
    go.set()
    assert job.run(lambda rank: "next") == ["next"]


def test_stacks_are_printed_where_stderr_is_no_file(
    thread_job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: the error is TimeoutError, and the stacks are there."""
    job, go, printed = thread_job(1), threading.Event(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", printed)
    with pytest.raises(TimeoutError):
        job.run(lambda rank: go.wait(PATIENCE), timeout=0)
    go.set()
    assert "(most recent call first)" in printed.getvalue()


def test_ctrl_c_waits_for_nobody() -> None:
    """An interrupt ends the job at once, though a rank still runs."""
    go, released = threading.Event(), SimpleQueue()

    def body(rank: int) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        released.put(go.wait(PATIENCE))

    with pytest.raises(KeyboardInterrupt):
        run_threads(body, 1)
    go.set()
    assert released.get(timeout=PATIENCE)


def test_ranks_that_never_came_say_so_again(thread_job: Jobs) -> None:
    """Every run raises what kept the ranks from making the default group."""
    job = thread_job(2, "nonesuch")
    for _ in range(2):
        with pytest.raises(ValueError, match="no backend is called 'nonesuch'"):
            job.run(lambda rank: rank)


@pytest.mark.parametrize("size", [0, -1])
def test_a_job_has_a_rank(size: int) -> None:
    """A size below 1 is refused, as the body would run nowhere."""
    with pytest.raises(ValueError, match=f"size must be 1 rank or more, not {size}"):
        run_threads(lambda rank: rank, size)


def test_a_closed_job_runs_nothing(thread_job: Jobs) -> None:
    """It raises, and does not wait for ranks that have ended."""
    job = thread_job(1)
    job.close()
    with pytest.raises(RuntimeError, match="the job was closed"):
        job.run(lambda rank: rank)


def test_a_rank_dies_in_a_call_on_objects() -> None:
    """Its result is Killed, though its groups are gone when the call ends."""

    def body(rank: int) -> None:
        with pytest.raises(dist.PeerFailedError):
            dist.all_gather_object([None, None], rank)

    _, end = run_threads(body, 2, faults=Faults(kill={1: 1}))
    assert isinstance(end, Killed)


def test_an_error_says_what_other_ranks_raised() -> None:
    """One rank's error may be the reason for that of another."""

    def body(rank: int) -> None:
        if rank:
            raise ValueError(f"of rank {rank}")

    with ThreadJob(3, "inproc") as job, pytest.raises(ValueError, match="of rank 1") as error:
        job.run(body)
    assert error.value.__notes__ == ["rank 2 raised ValueError: of rank 2"]

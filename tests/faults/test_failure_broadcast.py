"""Whatever fails a group on one rank is told to all its members, by the public calls.

Every wait here has a deadline of many seconds; a rank that was not told would fail by the
error that it gets ("timeout"), or by the test's own deadline.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

LONG = 50.0  # seconds for waits that end at once


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where ranks can be threads."""
    return str(request.param)


def error_of(call: Callable[[], Any]) -> dist.DistError:
    """What a call raises."""
    with pytest.raises(dist.DistError) as caught:
        call()
    return caught.value


def give_up_receiving() -> None:
    dist.recv(np.zeros(1), 2, timeout=0.2)


def give_up_sending() -> None:
    dist.send(np.zeros(1 << 17), 2, timeout=0.2)


def give_up_barrier() -> None:
    dist.monitored_barrier(timeout=0.2)


def give_up_in_the_queue() -> None:
    dist.all_reduce(np.zeros(1), async_op=True, timeout=LONG)
    dist.all_reduce(np.zeros(1), timeout=0.2)


def abort() -> None:
    dist.abort()
    dist.barrier()


FAILURES = {
    "recv": (give_up_receiving, dist.DistTimeoutError, "rank 0 gave up waiting for rank 2 in recv"),
    "send": (give_up_sending, dist.DistTimeoutError, "rank 0 gave up waiting for rank 2 in send"),
    "monitored_barrier": (
        give_up_barrier,
        dist.DistTimeoutError,
        "rank 0 gave up waiting for rank 1 in monitored_barrier #1",
    ),
    "queue": (give_up_in_the_queue, dist.DistTimeoutError, "rank 0 gave up waiting in all_reduce"),
    "abort": (abort, dist.GroupFailedError, "rank 0 aborted the group"),
}
FELLOWS: dict[str, Callable[[], Any]] = {
    "in-all_gather": lambda: dist.all_gather(
        [np.zeros(1) for _ in range(3)], np.zeros(1), timeout=LONG
    ),
    "in-recv": lambda: dist.recv(np.zeros(1), 2, timeout=LONG),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("fellow", FELLOWS)
def test_a_rank_that_waits_is_told(transport: str, failure: str, fellow: str) -> None:
    """Rank 1 waits for rank 2, which never comes, and learns from rank 0 that the group failed."""
    fail, error_class, text = FAILURES[failure]
    over = threading.Event()

    def body(rank: int) -> dist.DistError | None:
        if rank == 2:
            over.wait(LONG)
            return None
        if rank == 0:
            return error_of(fail)
        try:
            # Where rank 0 is in a collective, another one would be a mismatch.
            in_collective = failure in ("queue", "monitored_barrier")
            return error_of(FELLOWS["in-recv" if in_collective else fellow])
        finally:
            over.set()

    told = run_threads(body, 3, transport)[1]
    assert isinstance(told, error_class)
    assert text in str(told)


def send_again_and_again() -> None:
    """A send waits for nobody, and what it may run into is on its way to us."""
    for _ in range(10_000):
        dist.send(np.zeros(1), 0)


@pytest.mark.parametrize("call", [dist.barrier, send_again_and_again])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_computes_is_told_at_its_next_call(
    transport: str, failure: str, call: Callable[[], Any]
) -> None:
    """Ranks 1 and 2 do something else meanwhile."""
    fail, error_class, text = FAILURES[failure]
    failed = threading.Event()

    def body(rank: int) -> dist.DistError:
        dist.all_reduce(np.zeros(1))
        if rank == 0:
            try:
                return error_of(fail)
            finally:
                failed.set()
        assert failed.wait(LONG)
        return error_of(call)

    for told in run_threads(body, 3, transport)[1:]:
        assert isinstance(told, error_class)
        assert text.replace("#1", "#2") in str(told)


@pytest.mark.parametrize(
    ("call", "step", "named"),
    [
        pytest.param(
            lambda: dist.all_reduce_coalesced([np.zeros(1)], timeout=LONG),
            "cydist.api.packing.FlattenedList.copy_back",
            "all_reduce_coalesced #1",
            id="in-a-collective",
        ),
        pytest.param(
            lambda: dist.broadcast_object_list([1], 0, timeout=LONG),
            "cydist.api.objects._Encoded.check",
            "broadcast_object_list",
            id="between-two",
        ),
    ],
)
def test_an_interrupt_between_steps_is_told(
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[], Any],
    step: str,
    named: str,
) -> None:
    """Ctrl-C comes to rank 0 while nothing compiled runs."""
    inner = pkgutil.resolve_name(step)

    def interrupted(*args: Any) -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        inner(*args)

    monkeypatch.setattr(step, interrupted)

    def body(rank: int) -> str:
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                call()
            return ""

        def go_on() -> None:
            call()
            dist.barrier(timeout=LONG)

        return str(error_of(go_on))

    for text in run_threads(body, 3, transport)[1:]:
        assert f"rank 0 was interrupted in {named}" in text


def test_other_groups_are_not_told(transport: str) -> None:
    """A group of the same ranks goes on."""

    def body(rank: int) -> float:
        group = dist.new_group([0, 1])
        dist.barrier()
        if rank == 0:
            dist.abort(group)
        error_of(lambda: dist.barrier(group, timeout=LONG))
        total = np.ones(1)
        dist.all_reduce(total)
        return float(total[0])

    assert run_threads(body, 2, transport) == [2.0, 2.0]


def test_a_message_of_another_size_is_named_on_both_sides(transport: str) -> None:
    """The receiver at once, the sender, which has long returned, at its next call."""

    def body(rank: int) -> dist.DistError:
        if rank == 0:
            dist.send(np.zeros(3, "f4"), 1)
            return error_of(lambda: dist.recv(np.zeros(1), 1, timeout=LONG))
        return error_of(lambda: dist.recv(np.zeros(4, "f8"), 0))

    for error in run_threads(body, 2, transport):
        assert isinstance(error, dist.MismatchError)
        assert "3 float32 (12 bytes)" in str(error)
        assert "4 float64 (32 bytes)" in str(error)


def test_monitored_barrier_against_a_collective_is_a_mismatch(transport: str) -> None:
    """On every rank, with both calls."""

    def body(rank: int) -> dist.DistError:
        if rank == 2:
            return error_of(lambda: dist.all_reduce(np.zeros(4), timeout=LONG))
        return error_of(lambda: dist.monitored_barrier(timeout=LONG))

    for error in run_threads(body, 3, transport):
        assert isinstance(error, dist.MismatchError)
        assert "monitored_barrier #1" in str(error)
        assert "all_reduce #1 of 4 float64" in str(error)


def test_nothing_is_received_after_a_timeout(transport: str) -> None:
    """recv gave up: what arrives later does not touch the array."""
    late = threading.Event()

    def body(rank: int) -> float:
        x = np.zeros(1)
        if rank == 0:
            error_of(lambda: dist.recv(x, 1, timeout=0.1))
            late.set()
        else:
            assert late.wait(LONG)
            error_of(lambda: dist.send(np.ones(1), 0))
        return float(x[0])

    assert run_threads(body, 2, transport)[0] == 0.0

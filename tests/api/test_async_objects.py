"""Collectives of objects with async_op: a Work whose result is the list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

RANKS = 3
LIMIT = 20.0


@pytest.fixture(params=["inproc", "tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the default group."""
    name: str = request.param
    return name


def all_gather(rank: int, **how: Any) -> tuple[Any, Any]:
    into = [None] * RANKS
    return dist.all_gather_object(into, {"rank": rank}, **how), into


def broadcast(rank: int, **how: Any) -> tuple[Any, Any]:
    into = ["a", (1, 2)] if rank == 1 else [None, None]
    return dist.broadcast_object_list(into, 1, **how), into


def gather(rank: int, **how: Any) -> tuple[Any, Any]:
    into = [None] * RANKS if rank == 2 else None
    return dist.gather_object([rank], into, 2, **how), into


def scatter(rank: int, **how: Any) -> tuple[Any, Any]:
    into = [None]
    given = [f"for {to}" for to in range(RANKS)] if rank == 0 else None
    return dist.scatter_object_list(into, given, src=0, **how), into


CALLS = {call.__name__: call for call in (all_gather, broadcast, gather, scatter)}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, Any]]:
    """One of the calls: its Work, and the list that it fills."""
    return CALLS[request.param]


def test_results_are_those_of_the_blocking_call(
    backend: str, call: Callable[..., tuple[Any, Any]]
) -> None:
    """In the list, and as the Work's result and its future's."""

    def body(rank: int) -> None:
        none, expected = call(rank)
        work, into = call(rank, async_op=True)
        assert none is None
        assert isinstance(work, dist.Work)
        assert work.result() is into
        assert into == expected
        assert work.get_future().result(LIMIT) is into

    run_threads(body, RANKS, backend)


def test_other_calls_may_go_between(backend: str) -> None:
    """The group's own calls do not meet those under way, in whatever order the threads run."""

    def body(rank: int) -> None:
        works, x = [], np.ones(1000)
        for i in range(10):
            works.append(dist.all_gather_object(into := [None] * RANKS, (i, rank), async_op=True))
            dist.all_reduce(x)
            dist.all_gather_object(again := [None] * RANKS, rank)
            assert again == list(range(RANKS))
            works[-1].into = into
        for i, work in enumerate(works):
            assert work.result() == [(i, rank) for rank in range(RANKS)]
        assert (x == RANKS**10).all()

    run_threads(body, RANKS, backend)


def test_they_run_in_order_in_each_group(backend: str) -> None:
    """Groups do not wait for each other."""

    def body(rank: int) -> None:
        groups = [dist.new_group() for _ in range(2)]
        ordered = groups if rank else groups[::-1]
        works = {
            id(group): dist.all_gather_object(
                [None] * RANKS, groups.index(group), group, async_op=True
            )
            for group in ordered
        }
        for group in groups:
            work = works[id(group)]
            assert work is not None
            assert work.result() == [groups.index(group)] * RANKS

    run_threads(body, RANKS, backend)


def test_it_returns_before_the_others_call(backend: str) -> None:
    """Rank 0's call is under way until rank 1 makes it."""
    called = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            work, _ = all_gather(rank, async_op=True)
            assert not work.is_completed()
            called.set()
        else:
            assert called.wait(LIMIT)
            work, _ = all_gather(rank, async_op=True)
        work.wait()

    run_threads(body, RANKS, backend)


def test_an_object_that_cannot_be_sent(backend: str) -> None:
    """Each rank's wait raises, and calls go on."""

    def body(rank: int) -> str:
        given: object = threading.Lock() if rank == 1 else rank
        work = dist.all_gather_object([None] * RANKS, given, async_op=True)
        assert work is not None
        with pytest.raises(TypeError if rank == 1 else dist.DistBackendError) as caught:
            work.wait()
        work, into = all_gather(rank, async_op=True)
        work.wait()
        assert into[2] == {"rank": 2}
        return str(caught.value)

    told = run_threads(body, RANKS, backend)
    assert "rank 1 could not encode its object" in told[0]


def test_wrong_arguments_are_raised_by_wait(backend: str) -> None:
    def body(rank: int) -> None:
        work = dist.all_gather_object([None], rank, async_op=True)
        assert work is not None
        with pytest.raises(ValueError, match="object_list must be a list of 3 entries"):
            work.wait()

    run_threads(body, RANKS, backend)


def test_a_late_rank_is_named(backend: str) -> None:
    """By the Work's timeout, which counts from the call."""

    def body(rank: int) -> None:
        if rank == 0:
            return
        work = dist.broadcast_object_list([1], 0, async_op=True, timeout=0.2)
        assert work is not None
        with pytest.raises(dist.DistTimeoutError, match="rank 0"):
            work.wait()

    run_threads(body, 2, backend)


def test_not_on_a_destroyed_group(backend: str) -> None:
    def body(rank: int) -> None:
        group = dist.new_group()
        all_gather(rank, async_op=True, group=group)[0].wait()
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(dist.GroupDestroyedError):
            all_gather(rank, async_op=True, group=group)

    run_threads(body, RANKS, backend)


def test_not_for_others() -> None:
    """A rank outside the group gets None, after one warning."""

    def body(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 0:
            work = dist.all_gather_object([None], "x", group, async_op=True)
            assert work is not None
            assert work.result() == ["x"]
        else:
            with pytest.warns(UserWarning, match="not in does nothing"):
                assert dist.all_gather_object([None], "x", group, async_op=True) is None

    run_threads(body, 2)

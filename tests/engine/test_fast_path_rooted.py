"""The short way of calls that end on one rank, or begin there, and of scans."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist._native import fast_collectives
from cydist.testing import run_threads

SUM = dist.ReduceOp.SUM
RANKS = 3


def on_ranks(body: Callable[[int, Any], None], backend: str = "inproc") -> None:
    """Run body(rank, group) where the first calls, which choose algorithms, were made."""

    def with_group(rank: int) -> None:
        x = np.ones(1)
        many = [np.ones(1) for _ in range(RANKS)] if rank == 0 else None
        dist.reduce(x, 0)
        dist.gather(x, many)
        dist.scatter(x, many)
        dist.scan(x)
        dist.exscan(x)
        dist.barrier()
        body(rank, dist.group.WORLD)

    run_threads(with_group, RANKS, backend)


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where the bytes go."""
    return str(request.param)


def test_results_on_one_rank(transport: str) -> None:
    """What ends on one rank, or begins there, takes it as well, whichever that is."""

    def body(rank: int, group: Any) -> None:
        for root in range(RANKS):
            one = np.array([rank + 1.0])
            assert fast_collectives.reduce(one, root, SUM, group)
            assert one[0] == (6 if rank == root else rank + 1)
            many = [np.zeros(1) for _ in range(RANKS)] if rank == root else None
            assert fast_collectives.gather(np.array([rank + 1.0]), many, root, group)
            assert many is None or [block[0] for block in many] == [1, 2, 3]
            assert fast_collectives.scatter(one, many, root, group)
            assert one[0] == rank + 1

    on_ranks(body, transport)


def test_results_of_scans(transport: str) -> None:
    """Rank 0 keeps what it had in an exscan."""

    def body(rank: int, group: Any) -> None:
        one = np.array([rank + 1.0])
        assert fast_collectives.scan(one, SUM, group)
        assert one[0] == [1, 3, 6][rank]
        assert fast_collectives.exscan(one, SUM, group)
        assert one[0] == [1, 1, 4][rank]

    on_ranks(body, transport)


@pytest.mark.parametrize("count", [1, 7, 2040, 2041, 70000])
def test_lists_of_arrays_of_any_size(transport: str, count: int) -> None:
    """Blocks that differ in size, and those that no longer travel with their sizes."""

    def body(rank: int, group: Any) -> None:
        sizes = [count, 1, 2 * count]
        own = np.arange(float(sizes[rank])) + rank
        many = [np.zeros(size) for size in sizes] if rank == 1 else None
        assert fast_collectives.gather(own, many, 1, group)
        for peer in range(RANKS) if many is not None else ():
            assert (many[peer] == np.arange(float(sizes[peer])) + peer).all()
        back = np.zeros(sizes[rank])
        assert fast_collectives.scatter(back, many, 1, group)
        assert (back == own).all()

    on_ranks(body, transport)


def test_a_list_in_place() -> None:
    """The root's own array may be its entry of the list."""

    def body(rank: int, group: Any) -> None:
        whole = np.full(3, 9.0)
        many = [whole[r : r + 1] for r in range(RANKS)] if rank == 2 else None
        own = whole[2:] if rank == 2 else np.array([float(rank)])
        assert fast_collectives.gather(own, many, 2, group)
        assert rank != 2 or whole.tolist() == [0, 1, 9]
        assert fast_collectives.scatter(own, many, 2, group)
        assert own[0] == (9 if rank == 2 else rank)

    on_ranks(body)


def lists() -> dict[str, Any]:
    """What is no list of one plain array of two float64."""
    read_only = np.ones(2)
    read_only.flags.writeable = False
    return {
        "tuple": (np.ones(2),),
        "none": None,
        "too-long": [np.ones(2), np.ones(2)],
        "too-short": [],
        "other-dtype": [np.ones(2, "f4")],
        "other-size": [np.ones(3)],
        "empty": [np.ones(0)],
        "strided": [np.ones((2, 2))[:, 0]],
        "read-only": [read_only],
        "no-array": [1.0],
    }


@pytest.mark.parametrize("name", lists())
def test_lists_it_leaves(name: str) -> None:
    """The long way takes them, or says what is wrong; nothing has happened before."""

    def body(rank: int) -> None:
        group: Any = dist.group.WORLD
        own = np.ones(2)
        dist.gather(own, [np.ones(2)])
        assert fast_collectives.gather(own, [np.ones(2)], 0, group)
        seq = group.native.seq
        assert not fast_collectives.gather(own, lists()[name], 0, group)
        assert group.native.seq == seq

    run_threads(body, 1)


def test_lists_that_overlap_are_left() -> None:
    """Outputs share no memory with each other, nor with another rank's part of the input."""

    def body(rank: int, group: Any) -> None:
        whole = np.zeros(4)
        twice = [whole[:2], whole[1:3], whole[3:]]
        shifted = [np.zeros(2) if r == rank else whole[r : r + 2] for r in range(RANKS)]
        assert not fast_collectives.gather(np.ones(2), twice, rank, group)
        assert not fast_collectives.gather(whole[1:3], shifted, rank, group)
        assert not fast_collectives.scatter(whole[1:3], shifted, rank, group)
        assert not fast_collectives.gather(
            np.ones(1), [np.ones(1)] * RANKS, (rank + 1) % RANKS, group
        )
        dist.barrier(group)

    on_ranks(body)


def test_a_single_rank_takes_the_general_path(transport: str) -> None:
    """The ways are one call to the others: here the root's list is a tuple."""

    def body(rank: int, group: Any) -> None:
        for _turn in range(3):
            many = tuple(np.zeros(1) for _ in range(RANKS)) if rank == 0 else None
            assert fast_collectives.gather(np.ones(1), many, 0, group) == (rank != 0)
            if many is not None:
                dist.gather(np.ones(1), many, 0, group)
                assert [block[0] for block in many] == [1, 1, 1]

    on_ranks(body, transport)


@pytest.mark.parametrize("count", [2, 5000])
def test_sizes_of_a_list_that_differ_are_found(transport: str, count: int) -> None:
    """The root's entry is longer than what rank 1 gives; all learn of it."""

    def body(rank: int, group: Any) -> None:
        many = [np.zeros(count + (r == 1)) for r in range(RANKS)] if rank == 0 else None
        with pytest.raises((dist.MismatchError, dist.GroupFailedError)) as caught:  # noqa: PT012
            dist.gather(np.ones(count), many, 0, group)
            for _ in range(1000):
                dist.barrier(group)
        assert rank or isinstance(caught.value, dist.MismatchError)

    on_ranks(body, transport)


def test_a_list_that_changes_meanwhile(transport: str) -> None:
    """The arrays of a gather live until it is over, though its user has emptied the list."""
    roots: list[tuple[Any, list[Any], list[Any]]] = []

    def body(rank: int, group: Any) -> None:
        if rank == 0:
            many = [np.zeros(3) for _ in range(RANKS)]
            roots.append((group, many, [weakref.ref(each) for each in many]))
            dist.gather(np.ones(3), many, group=group)
            return
        if rank == 1:
            deadline = time.monotonic() + 20
            while not (roots and is_inside(roots[0][0], "gather")):
                assert time.monotonic() < deadline
            _, many, alive = roots[0]
            many.clear()
            gc.collect()
            assert all(each() is not None for each in alive)
        dist.gather(np.ones(3), group=group)

    on_ranks(body, transport)


def is_inside(group: Any, name: str) -> bool:
    """Is this rank in such a call, by the short way?"""
    call = group.last_call()
    return call is not None and call.name == name and not call.over

"""Over MPI too, calls are compared before they run, and searched for NaN, if the program asks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cydist as dist


@pytest.fixture
def detail() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that compares its calls."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level_from_env()
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def finite(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that looks for NaN and infinity."""
    monkeypatch.setenv("CYDIST_CHECK_NAN", "1")
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


def check_usable(group: dist.ProcessGroup, size: int) -> None:
    x = np.ones(100)
    dist.all_reduce(x, group=group)
    assert (x == size).all()


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_shapes_that_differ(detail, rank, size, async_op):
    """A MismatchError with both calls on every rank, before anything was sent."""
    if size < 2:
        return
    x = np.ones((2, 3) if rank == 1 else (3, 2))
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(x, group=detail, async_op=async_op)
    assert "all_reduce #1 of (2, 3) at " in str(caught.value)
    assert "all_reduce #1 of (3, 2) at " in str(caught.value)
    assert (x == 1).all()
    check_usable(detail, size)


def test_calls_that_differ(detail, rank, size):
    if size < 2:
        return
    x = np.ones(4)
    with pytest.raises(dist.MismatchError, match="Nothing was sent"):
        dist.barrier(detail) if rank == 1 else dist.broadcast(x, 0, detail)
    check_usable(detail, size)


def test_calls_that_agree(detail, rank, size):
    """They run: large ones, and descriptions that take a second round."""
    x = np.full(200_000, float(rank))
    dist.all_reduce(x, group=detail)
    assert (x == sum(range(size))).all()
    arrays = [np.full(i + 1, float(rank)) for i in range(100)]
    dist.all_reduce_coalesced(arrays, group=detail)
    assert all((array == sum(range(size))).all() for array in arrays)


def test_a_nan(finite, rank, size):
    """Every rank learns whose it is, and where."""
    x = np.ones(50, "f4")
    if rank == size - 1:
        x[7] = np.nan
    with pytest.raises(dist.NonFiniteError) as caught:
        dist.all_reduce(x, group=finite)
    assert f"rank {size - 1}'s input has nan at index" in str(caught.value)
    assert caught.value.ranks == (size - 1,)
    check_usable(finite, size)


def test_a_sum_that_overflows(finite, rank, size):
    """It is found in the output, on the ranks that have it."""
    if size < 2:
        return
    x = np.full(3, np.finfo("f8").max)
    with pytest.raises(dist.NonFiniteError, match="output has inf"):
        dist.all_reduce(x, group=finite)
    check_usable(finite, size)


def test_asynchronous_objects(rank, size):
    """Beside the group's other calls, in a group of their own."""
    x, lists = np.ones(10), []
    works = []
    for i in range(5):
        lists.append([None] * size)
        works.append(dist.all_gather_object(lists[-1], (i, rank), async_op=True))
        dist.all_reduce(x)
    for i, work in enumerate(works):
        assert work.result() == [(i, each) for each in range(size)]
    assert (x == size**5).all()

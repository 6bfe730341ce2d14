"""_coalescing_manager: the calls inside become one where they can, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.api.coalescing import CoalescingManager
from cydist.testing import run_threads

SIZES = (3, 1, 5)


@pytest.fixture(params=["inproc", "tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the default group."""
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["blocking", "async"])
def async_ops(request: pytest.FixtureRequest) -> bool:
    """Whether the calls may go on after the block."""
    value: bool = request.param
    return value


def all_reduce(rank: int) -> list[Any]:
    arrays = [np.arange(size) + rank for size in SIZES]
    for array in arrays:
        dist.all_reduce(array)
    return arrays


def all_gather(rank: int) -> list[Any]:
    outputs = [np.zeros(2 * size, np.int64) for size in SIZES]
    for output in outputs:
        dist.all_gather_into_tensor(output, np.arange(len(output) // 2) + 10 * rank)
    return outputs


def reduce_scatter(rank: int) -> list[Any]:
    outputs = [np.zeros(size, np.int64) for size in SIZES]
    for output in outputs:
        given = np.arange(2 * len(output)) * (rank + 1)
        dist.reduce_scatter_tensor(output, given, dist.ReduceOp.MAX)
    return outputs


CALLS = {call.__name__: call for call in (all_reduce, all_gather, reduce_scatter)}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[int], list[Any]]:
    """Makes several calls; the arrays that they fill."""
    return CALLS[request.param]


def test_results(backend: str, async_ops: bool, call: Callable[[int], list[Any]]) -> None:
    """Those of the calls alone; and one call is made of three."""

    def body(rank: int) -> None:
        expected = call(rank)
        before = calls_made()
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            arrays = call(rank)
            assert any((a != b).any() for a, b in zip(arrays, expected, strict=True))
        manager.wait()
        assert calls_made() - before == 1
        for array, right in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, right)

    run_threads(body, 2, backend)


def calls_made() -> int:
    """Return how many collectives the default group has run."""
    group = dist.group.WORLD
    assert group is not None
    call = group.last_call()
    assert call is not None
    return call.seq


def test_a_mixture(backend: str) -> None:
    """Dtypes, operations and calls: those in a row become one, and all results are right."""

    def body(rank: int) -> None:
        x, y, z = np.full(2, rank + 1), np.full(3, rank + 1.0), np.full(2, rank)
        top = np.full(1, rank)
        into = np.zeros(4, int)
        dist.barrier()
        before = calls_made()
        with dist._coalescing_manager() as manager:
            dist.all_reduce(x)
            dist.all_reduce(z)
            dist.all_reduce(y)
            dist.all_reduce(top, dist.ReduceOp.MAX)
            dist.all_gather_into_tensor(into, np.full(2, rank + 5))
        assert calls_made() - before == 4
        assert (x.tolist(), y.tolist(), z.tolist()) == ([3, 3], [3, 3, 3], [1, 1])
        assert (top.tolist(), into.tolist()) == ([1], [5, 5, 6, 6])
        assert manager.works == []

    run_threads(body, 2, backend)


def test_other_calls_are_made_at_once(backend: str) -> None:
    def body(rank: int) -> None:
        x, y = np.full(1, rank + 1), np.full(1, rank + 1)
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.broadcast(y, 1)
            assert (x[0], y[0]) == (rank + 1, 2)
        assert x == 3

    run_threads(body, 2, backend)


def test_another_groups_calls_are_not_collected(backend: str) -> None:
    def body(rank: int) -> None:
        other = dist.new_group()
        x, y = np.full(1, rank + 1), np.full(1, rank + 1)
        with dist._coalescing_manager(other):
            dist.all_reduce(x)
            dist.all_reduce(y, group=other)
            assert (x[0], y[0]) == (3, rank + 1)
        assert y == 3

    run_threads(body, 2, backend)


def test_the_works_of_calls_inside(backend: str) -> None:
    """They cannot be waited for inside the block, and can after it."""

    def body(rank: int) -> None:
        x = np.full(1, rank + 1)
        with dist._coalescing_manager(async_ops=True):
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            assert not work.is_completed()
            with pytest.raises(ValueError, match="starts when the block"):
                work.wait()
        assert work.wait()
        assert x == 3
        assert work.is_success()
        assert work.result()[0] is x

    run_threads(body, 2, backend)


def test_nothing_is_made_after_an_exception(backend: str) -> None:
    """The group goes on."""

    def body(rank: int) -> None:
        x = np.full(1, rank + 1)
        with suppress(KeyError), dist._coalescing_manager():
            dist.all_reduce(x)
            raise KeyError
        assert x == rank + 1
        dist.all_reduce(x)
        assert x == 3

    run_threads(body, 2, backend)


def test_not_in_itself() -> None:
    with_two = "is in such a block already"

    def body(rank: int) -> None:
        with dist._coalescing_manager():
            with pytest.raises(ValueError, match=with_two), dist._coalescing_manager():
                pass
            dist.all_reduce(x := np.full(1, rank + 1))
        assert x == 3

    run_threads(body, 2)


def test_without_calls(async_ops: bool) -> None:
    def body(rank: int) -> None:
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            assert isinstance(manager, CoalescingManager)
        manager.wait()

    run_threads(body, 1)


@pytest.mark.parametrize("async_op", [False, True])
def test_differences_are_found(backend: str, async_op: bool) -> None:
    """A size that differs in one of the calls is an error on every rank."""

    def body(rank: int) -> None:
        with pytest.raises(dist.MismatchError):
            different(rank)

    def different(rank: int) -> None:
        with dist._coalescing_manager(async_ops=async_op) as manager:
            dist.all_reduce(np.ones(2))
            dist.all_reduce(np.ones(2 + rank))
        manager.wait()

    run_threads(body, 2, backend)


def test_torchs_tensors(async_ops: bool) -> None:
    torch = pytest.importorskip("torch")

    def body(rank: int) -> None:
        tensors = [torch.full((2, 2), rank + 1.0), torch.full((3,), rank + 2.0)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert torch.equal(tensors[0], torch.full((2, 2), 3.0))
        assert torch.equal(tensors[1], torch.full((3,), 5.0))

    run_threads(body, 2)

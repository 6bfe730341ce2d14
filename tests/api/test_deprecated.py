"""The oldest calls, under their own names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_gpu_delayed import install

import cydist as dist
from cydist import deprecated
from cydist.groups import registry
from cydist.testing import run_threads


@pytest.fixture(params=["cpu", "torch", "gpus"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the array of an entry: of numpy, of torch, or on a GPU of the entry's own."""
    if request.param == "cpu":
        return lambda values, i: np.array(values)
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        return lambda values, i: torch.tensor(values)
    return install(monkeypatch, "late", 1 << 10).array


def read(array: Any) -> list[float]:
    """What is in it, when its stream has come so far."""
    found: list[float] = (array.get() if hasattr(array, "get") else array).tolist()
    return found


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_lists(on: Any, backend: str, entries: int, async_op: bool) -> None:
    """Entry i of rank r is the contribution of rank r * entries + i."""
    ranks, last = 2, entries - 1

    def body(rank: int) -> None:
        def lists(width: int = 1) -> list[Any]:
            return [on([1.0 + rank * entries + i] * width, i) for i in range(entries)]

        def over(work: Any) -> None:
            if async_op:
                work.wait()

        total = sum(range(1, ranks * entries + 1))
        xs = lists(300)
        over(deprecated.all_reduce_multigpu(xs, async_op=async_op))
        assert [read(x) for x in xs] == [[total] * 300] * entries
        xs = lists()
        over(deprecated.all_reduce_multigpu(xs, dist.ReduceOp.AVG, async_op=async_op))
        assert [read(x) for x in xs] == [[total / (ranks * entries)]] * entries
        xs, before = lists(), [read(x) for x in lists()]
        over(deprecated.reduce_multigpu(xs, 1, async_op=async_op, dst_tensor=last))
        expected = [*before[:last], [total]] if rank == 1 else before
        assert [read(x) for x in xs] == expected
        xs = lists()
        over(deprecated.broadcast_multigpu(xs, 1, async_op=async_op, src_tensor=last))
        assert [read(x) for x in xs] == [[ranks * entries]] * entries
        outs = [[on([0.0], i) for _ in range(ranks * entries)] for i in range(entries)]
        over(deprecated.all_gather_multigpu(outs, lists(), async_op=async_op))
        everything = [[1.0 + n] for n in range(ranks * entries)]
        assert [[read(x) for x in out] for out in outs] == [everything] * entries

    run_threads(body, ranks, backend)


def test_lists_of_different_lengths_are_a_mismatch() -> None:
    """On every rank, with the lengths; the group goes on."""

    def body(rank: int) -> None:
        xs = [np.ones(1) for _ in range(2 + rank)]
        with pytest.raises(dist.MismatchError, match=r"lists have \[2, 3\] entries"):
            deprecated.all_reduce_multigpu(xs)
        dist.all_reduce(xs[0])
        assert xs[0].tolist() == [2.0]

    run_threads(body, 2)


def test_wrong_lists_are_found_before_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU for two entries, different sizes or dtypes, no list; then the group works."""
    device = install(monkeypatch, "late", 1 << 10)

    def body(rank: int) -> None:
        x = np.ones(1)
        if rank == 0:
            with pytest.raises(ValueError, match="entries 0 and 1 are both on GPU 3"):
                deprecated.all_reduce_multigpu([device.array([1.0], 3), device.array([1.0], 3)])
            with pytest.raises(ValueError, match="entry 1 has 2 elements"):
                deprecated.all_reduce_multigpu([x, np.ones(2)])
            with pytest.raises(TypeError, match="entry 1 is float32 on cpu"):
                deprecated.all_reduce_multigpu([x, np.ones(1, "f4")])
            with pytest.raises(TypeError, match="tensor_list must be a list of arrays"):
                deprecated.all_reduce_multigpu(x)
            with pytest.raises(ValueError, match="there is no entry 1 in tensor_list"):
                deprecated.broadcast_multigpu([x], 0, src_tensor=1)
        dist.all_reduce(x)
        assert x.tolist() == [2.0]

    run_threads(body, 2)


def test_the_groups_of_entries_end_with_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once for each place of the entries, and closed by destroy_process_group."""
    made: list[Any] = []
    create = registry.create

    def kept(name: str, options: Any, pg_options: object) -> Any:
        group = create(name, options, pg_options)
        if "2 arrays a rank" in options.group_id:
            made.append(group)
        return group

    monkeypatch.setattr(registry, "create", kept)
    device = install(monkeypatch, "late", 1 << 10)

    def body(rank: int) -> None:
        group = dist.new_group([0, 1])
        for places in ((0, 1), (0, 1), (0, 1 + rank), (0, 1)):
            xs = [device.array([1.0], i) for i in places]
            deprecated.all_reduce_multigpu(xs, group=group)
            assert [x.get().tolist() for x in xs] == [[4.0], [4.0]]
        dist.destroy_process_group(group)

    run_threads(body, 2)
    assert len(made) == 2 * 2 * 2
    assert all(group.group_state.destroyed for group in made)

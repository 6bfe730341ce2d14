"""Several groups at once: new_subgroups, new_subgroups_by_enumeration, split_group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads


def sum_of_ranks(group: Any) -> int:
    x = np.array([dist.get_rank()])
    dist.all_reduce(x, group=group)
    return int(x[0])


@pytest.mark.parametrize(("size", "sums"), [(1, [0, 1, 2, 3]), (2, [1, 1, 5, 5]), (4, [6] * 4)])
def test_neighbours_are_a_group(size: int, sums: list[int]) -> None:
    """Each rank gets its own, and all of them in order."""

    def body(rank: int) -> int:
        mine, groups = dist.new_subgroups(size)
        assert len(groups) == 4 // size
        assert groups[rank // size] is mine
        return sum_of_ranks(mine)

    assert run_threads(body, 4) == sums


def test_neighbours_of_a_group() -> None:
    """A group of all ranks may be divided, in its own order."""

    def body(rank: int) -> int:
        odd_first = dist.new_group([3, 1, 2, 0], sort_ranks=False)
        mine, _ = dist.new_subgroups(2, odd_first)
        return sum_of_ranks(mine)

    assert run_threads(body, 4) == [2, 4, 2, 4]


def test_the_ranks_of_a_host_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a size, as the launcher counts them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_threads(lambda rank: sum_of_ranks(dist.new_subgroups()[0]), 4) == [1, 1, 5, 5]


def test_without_a_launcher_the_size_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says how many ranks the host has."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="give group_size"):
            dist.new_subgroups()

    run_threads(body, 2)


def test_lists_of_ranks_are_groups() -> None:
    """In the order of the lists; a rank in none of them gets no group."""

    def body(rank: int) -> int:
        mine, groups = dist.new_subgroups_by_enumeration([[2, 0], [3]])
        assert [dist.get_rank(each) for each in groups] == [
            [2, 0].index(rank) if rank in (0, 2) else -1, 0 if rank == 3 else -1
        ]  # fmt: skip
        if rank == 1:
            assert not mine
            return -1
        return sum_of_ranks(mine)

    assert run_threads(body, 4) == [2, -1, 2, 3]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[0], [0, 1]], "none of them in two"),
        ([[0], []], "each with a rank"),
        ([], "needs lists of ranks"),
        ([[5]], "not 5"),
    ],
    ids=["twice", "empty", "none", "unknown"],
)
def test_wrong_lists_are_refused_before_any_group(lists: list[list[int]], words: str) -> None:
    """The ranks can go on."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            dist.new_subgroups_by_enumeration(lists)
        assert dist.get_pg_count() == 1
        dist.barrier()

    run_threads(body, 2)


def test_a_size_that_does_not_divide_is_refused() -> None:
    """Before any group."""

    def body(rank: int) -> None:
        for size in (0, 2):
            with pytest.raises(
                ValueError, match=f"3 ranks cannot be divided into groups of {size}"
            ):
                dist.new_subgroups(size)

    run_threads(body, 3)


def test_a_group_of_some_ranks_is_not_divided_by_all() -> None:
    """On no rank, so that their later groups meet."""

    def body(rank: int) -> int:
        some = dist.new_group([0, 1])
        with pytest.raises(ValueError, match=r"all ranks of the world|not in the group"):
            dist.new_subgroups(1, some)
        return sum_of_ranks(dist.new_group())

    assert run_threads(body, 3) == [3, 3, 3]


def test_a_group_from_before_a_shrink_is_split() -> None:
    """By its own ranks, whatever the numbers of the world are now."""

    def body(rank: int) -> list[int]:
        if rank == 0:
            return []
        old = dist.new_group([1, 2, 3], use_local_synchronization=True)
        dist.shrink_group([0])
        part = dist.split_group(old, [[0, 2], [1]])
        assert part is not None
        x = np.array([rank])
        dist.all_reduce(x, group=part)
        return [int(x[0]), part.size()]

    assert run_threads(body, 4) == [[], [4, 2], [2, 1], [4, 2]]


def test_a_part_has_the_parents_timeout() -> None:
    """Unless it is given another; and its description."""

    def body(rank: int) -> None:
        pair = dist.new_group(timeout=7)
        first = dist.split_group(pair, [[0, 1]])
        second = dist.split_group(pair, [[0, 1]], timeout=9, group_desc="again")
        assert first is not None
        assert second is not None
        assert (first.timeout, second.timeout) == (7, 9)
        assert second.group_desc == "again"
        assert first.group_name != second.group_name
        assert (sum_of_ranks(first), sum_of_ranks(second)) == (1, 1)

    run_threads(body, 2)


@pytest.mark.parametrize("backend", ["inproc", "cpu:inproc", "INPROC"])
def test_a_part_may_name_the_parents_backend(backend: str) -> None:
    """Alone or for a device, as torch's split_group takes it."""

    def body(rank: int) -> int:
        part = dist.split_group(None, [[0, 1]], backend=backend)
        assert dist.get_backend(part) == "inproc"
        return sum_of_ranks(part)

    assert run_threads(body, 2) == [1, 1]


@pytest.mark.parametrize("backend", ["gloo", "cpu:tcp"])
def test_one_backend_has_two_names(backend: str) -> None:
    """A group of "tcp" is one of "gloo"."""

    def body(rank: int) -> int:
        return sum_of_ranks(dist.split_group(None, [[0, 1]], backend=backend))

    assert run_threads(body, 2, "tcp") == [1, 1]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("tcp", "which is 'inproc', not 'tcp' for arrays on cpu: make a group of 'tcp' with new_g"),
        ("no such", "no backend is called 'no such'"),
    ],
)
def test_a_part_has_no_other_backend(backend: str, words: str) -> None:
    """The group stays usable."""

    def body(rank: int) -> int:
        with pytest.raises(ValueError, match=words):
            dist.split_group(None, [[0, 1]], backend=backend)
        return sum_of_ranks(None)

    assert run_threads(body, 2) == [1, 1]


def test_a_backend_that_asks_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to call."""

    def body(rank: int) -> None:
        dist.group.WORLD.splits_without_peers = False  # type: ignore[union-attr]
        with pytest.raises(dist.UnsupportedError, match="new_subgroups_by_enumeration"):
            dist.split_group(None, [[0, 1]])
        dist.barrier()

    run_threads(body, 2)


def test_the_members_of_a_group_split_it() -> None:
    """By its own ranks, and without the other ranks of the world."""

    def body(rank: int) -> int:
        backwards = dist.new_group([3, 2, 1], sort_ranks=False)
        if rank == 0:
            with pytest.warns(UserWarning, match="this rank is not in"):
                assert dist.split_group(backwards, [[0]]) is None
            return -1
        part = dist.split_group(backwards, [[0, 1]])
        if rank == 1:
            assert part is None
            return -1
        assert part is not None
        assert part.ranks == (3, 2)
        return sum_of_ranks(part)

    assert run_threads(body, 4) == [-1, -1, 5, 5]


@pytest.mark.parametrize(
    ("parts", "words"),
    [(None, "needs lists"), ([], "needs lists"), ([[0], [0]], "no rank in two"), ([[2]], "not 2")],
    ids=["none", "no parts", "twice", "unknown"],
)
def test_wrong_parts_are_refused(parts: Any, words: str) -> None:
    """The group stays usable."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            dist.split_group(None, parts)
        dist.barrier()

    run_threads(body, 2)

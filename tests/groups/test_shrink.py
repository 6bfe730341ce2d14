"""shrink_group between threads: those who are left go on, and agree on who that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cydist as dist
from cydist.api.process_groups import NonMember
from cydist.testing import run_threads

LONG = 30.0  # seconds for what takes milliseconds
SHORT = 0.3  # a timeout that must pass

Body = Callable[[int], Any]


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """The backends that can shrink."""
    return str(request.param)


def total(value: float, group: Any = None) -> float:
    """The sum of every rank's value."""
    x = np.full(5, value)
    dist.all_reduce(x, group=group)
    assert (x == x[0]).all()
    return float(x[0])


def without(dead: set[int], body: Body) -> Body:
    """`body` on the ranks that are not dead; those that are, leave without a word."""

    def alone(rank: int) -> Any:
        dist.barrier()
        if rank in dead:
            dist.destroy_process_group()
            return None
        return body(rank)

    return alone


@pytest.mark.parametrize("dead", [{0}, {3}, {1, 2}, {0, 3}, {0, 1, 2}], ids=str)
def test_survivors_are_the_new_default_group(transport: str, dead: set[int]) -> None:
    """They find out who is dead, are numbered from 0, and reduce right."""

    def body(rank: int) -> Any:
        made = dist.shrink_group()
        assert dist.group.WORLD is made
        assert list(range(dist.get_world_size())) == dist.get_process_group_ranks(None)
        return dist.get_rank(), dist.get_world_size(), total(2.0**rank)

    left = [rank for rank in range(4) if rank not in dead]
    results = run_threads(without(dead, body), 4, transport)
    sum_of_all = sum(2.0**rank for rank in left)
    assert [results[r] for r in left] == [(i, len(left), sum_of_all) for i in range(len(left))]


def test_everything_works_on_the_new_default_group(transport: str) -> None:
    """Groups of it, objects, monitored_barrier, and messages by the new global ranks."""

    def body(rank: int) -> Any:
        dist.shrink_group()
        me = dist.get_rank()
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        trio = dist.new_group([2, 1, 0], sort_ranks=False)
        all_ranks: list[Any] = [None] * 3
        dist.all_gather_object(all_ranks, {"was": rank})
        dist.monitored_barrier(timeout=LONG)
        x = np.full(3, float(rank))
        dist.broadcast(x, src=2)
        got = np.zeros(1)
        work = dist.isend(np.array([float(me)]), (me + 1) % 3)
        source = dist.recv(got, None, timeout=LONG)
        assert work is not None
        work.wait(LONG)
        assert (source, got[0]) == ((me - 1) % 3, (me - 1) % 3)
        sums = total(me, pair) if me != 1 else None, total(me, trio)
        return all_ranks, x[0], sums, dist.get_rank(trio)

    results = run_threads(without({1}, body), 4, transport)
    was = [{"was": 0}, {"was": 2}, {"was": 3}]
    sums = [(2.0, 3.0), (None, 3.0), (2.0, 3.0)]
    assert [results[r] for r in (0, 2, 3)] == [(was, 3.0, sums[i], 2 - i) for i in range(3)]


def test_ranks_that_had_made_different_groups(transport: str) -> None:
    """new_group after a shrink does not depend on what each rank had done before it."""

    def body(rank: int) -> Any:
        if rank == 2:
            dist.new_group([1, 2])
            dist.new_group([2], use_local_synchronization=True)
        dist.shrink_group()
        local = dist.new_group([0, 1], use_local_synchronization=True)
        return total(rank, dist.new_group([0, 1])), total(rank, local)

    assert [None, (3.0, 3.0), (3.0, 3.0)] == run_threads(without({0}, body), 3, transport)


def test_lists_add_up(transport: str) -> None:
    """Ranks that exclude others, or nobody, agree on all that one of them excludes; who is
    excluded and calls is told, also when it comes late."""
    done = threading.Barrier(5)

    def body(rank: int) -> Any:
        result: Any = None
        if rank in (0, 1, 2):
            lists = {0: [3], 1: None, 2: [4]}
            dist.shrink_group(lists[rank], timeout=LONG)
            result = total(2.0**rank)
            done.wait(LONG)
        else:
            if rank == 4:
                done.wait(LONG)
            with pytest.raises(dist.DistBackendError, match="was excluded") as caught:
                dist.shrink_group(timeout=LONG)
            assert caught.value.ranks == (rank,)
            assert caught.value.op == "shrink_group"
            if rank == 3:
                done.wait(LONG)
        # None leaves before all are done: it would be taken for dead.
        ended.wait(LONG)
        return result

    ended = threading.Barrier(5)
    assert [7.0, 7.0, 7.0, None, None] == run_threads(body, 5, transport)


def test_who_excludes_itself_is_refused(transport: str) -> None:
    """Before any traffic, as an error of torch's kind; the group goes on."""

    def body(rank: int) -> Any:
        with pytest.raises(RuntimeError, match="only those call it that go on"):
            dist.shrink_group([rank])
        return total(1.0)

    assert [2.0, 2.0] == run_threads(body, 2, transport)


@pytest.mark.parametrize(
    ("ranks", "flags", "error", "says"),
    [
        ([], 0, ValueError, "empty"),
        ([1, 1], 0, ValueError, "twice"),
        ([0, 1, 2], 0, ValueError, "at least one must remain"),
        ([3], 0, ValueError, "ranks 0 to 2"),
        ([-1], 0, ValueError, "ranks 0 to 2"),
        (["1"], 0, TypeError, "list of ranks"),
        (1, 0, TypeError, "list of ranks"),
        ([1], 2, ValueError, "shrink_flags"),
        ([1], None, ValueError, "shrink_flags"),
    ],
)
def test_wrong_arguments(
    jobs: Any, transport: str, ranks: Any, flags: Any, error: type[Exception], says: str
) -> None:
    """They are found before anything happens: the group goes on."""

    def body(rank: int) -> Any:
        with pytest.raises(error, match=says):
            dist.shrink_group(ranks, shrink_flags=flags)
        return total(1.0)

    assert [3.0] * 3 == jobs.get(transport, 3).run(body)


def test_a_group_of_one_cannot_shrink(transport: str) -> None:
    """Somebody must remain."""

    def body(rank: int) -> Any:
        with pytest.raises(ValueError, match="has one rank"):
            dist.shrink_group()
        return total(1.0)

    assert [1.0] == run_threads(body, 1, transport)


def test_one_after_the_other_until_one_is_left(transport: str) -> None:
    """A shrunk group can be shrunk again, down to a single rank, which goes on working."""

    def body(rank: int) -> Any:
        sums = []
        for last in (3, 2, 1):
            if rank == last:
                dist.destroy_process_group()
                return sums
            dist.shrink_group(timeout=LONG)
            sums.append(total(2.0**rank))
        dist.barrier()
        assert dist.get_pg_count() == 1
        return sums

    expected = [[7.0, 3.0, 1.0], [7.0, 3.0], [7.0], []]
    assert expected == run_threads(body, 4, transport)


def test_other_groups_never_notice(transport: str) -> None:
    """A group without the dead rank works before, during and after, with the numbers that it
    was made with."""

    def body(rank: int) -> Any:
        survivors = dist.new_group([1, 2, 3])
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
            return None
        x = np.zeros(1)
        across = dist.irecv(x, 1 + rank % 3, survivors)
        sums = [total(rank, survivors)]
        dist.shrink_group(shrink_flags=dist.SHRINK_ABORT)
        sums.append(total(rank, survivors))
        dist.send(np.full(1, float(rank)), 1 + (rank + 1) % 3, survivors)
        assert across is not None
        across.wait(LONG)
        assert x[0] == 1 + rank % 3
        assert dist.get_process_group_ranks(survivors) == [1, 2, 3]
        return sums, dist.get_rank(survivors), dist.get_rank()

    results = run_threads(body, 4, transport)
    assert [None, *(([6.0, 6.0], r, r) for r in range(3))] == results


def test_a_subgroup(transport: str) -> None:
    """Its list names ranks of the group; the default group and its numbers stay."""

    def body(rank: int) -> Any:
        group = dist.new_group([1, 2, 3])
        if rank in (1, 3):
            made = dist.shrink_group([1], group)
            assert [1, 3] == dist.get_process_group_ranks(made)
            assert total(rank, made) == 4.0
            assert dist.get_pg_count() == 2
            dist.destroy_process_group(made)
            assert dist.get_pg_count() == 1
        return dist.get_rank(), total(1.0)

    assert [(rank, 4.0) for rank in range(4)] == run_threads(body, 4, transport)


def test_who_is_not_in_the_group_does_nothing() -> None:
    """It is warned, and gets what new_group gives it."""

    def body(rank: int) -> Any:
        with pytest.warns(UserWarning, match="does nothing"):
            made = dist.shrink_group([0], NonMember())
        assert made is dist.GroupMember.NON_GROUP_MEMBER

    run_threads(body, 1)


def test_calls_under_way_end_with_the_old_group(transport: str) -> None:
    """By GroupDestroyedError, as do all later ones."""

    def body(rank: int) -> Any:
        old = dist.new_group([0, 1, 2])
        if rank == 2:
            return
        receive = dist.irecv(np.zeros(1), 1 - rank, old)
        dist.shrink_group([2], old)
        assert receive is not None
        assert isinstance(receive.exception(), dist.GroupDestroyedError)
        with pytest.raises(dist.GroupDestroyedError):
            total(1.0, old)

    run_threads(body, 3, transport)


def test_abort_ends_calls_under_way_first(transport: str) -> None:
    """With SHRINK_ABORT they are over before anybody else has called shrink_group."""
    over = threading.Event()

    def body(rank: int) -> Any:
        if rank == 1:
            assert over.wait(LONG)
        else:
            receive = dist.irecv(np.zeros(1), 1)
            assert receive is not None
            receive.get_future().add_done_callback(lambda future: over.set())
        dist.shrink_group(shrink_flags=dist.SHRINK_ABORT, timeout=LONG)
        return total(1.0)

    assert [2.0, 2.0] == run_threads(body, 2, transport)


def test_who_does_not_come_is_named(transport: str) -> None:
    """A rank that neither calls nor dies is in the DistTimeoutError, not the others; calling
    again without it works, whether the group had failed or not."""
    together, all_late = threading.Barrier(3), threading.Barrier(3)
    ended = threading.Barrier(4)

    def body(rank: int) -> Any:
        result = None
        if rank != 2:
            together.wait(LONG)  # else one that starts late is named, too
            with pytest.raises(dist.DistTimeoutError, match="rank 2 neither called") as caught:
                dist.shrink_group(timeout=1.0)
            assert caught.value.ranks == (2,)
            all_late.wait(LONG)
            # One of them says it; for the others it is enough to come.
            dist.shrink_group([2] if rank == 0 else None, timeout=LONG)
            result = total(2.0**rank)
        ended.wait(LONG)
        return result

    assert [11.0, 11.0, None, 11.0] == run_threads(body, 4, transport)


def test_no_rank_is_dead(transport: str) -> None:
    """A group that failed for another reason is replaced by one of the same ranks."""

    def body(rank: int) -> Any:
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(3, "f4" if rank else "f8"))
        dist.shrink_group()
        return total(1.0), dist.get_rank()

    assert [(3.0, rank) for rank in range(3)] == run_threads(body, 3, transport)


def test_a_backend_that_cannot() -> None:
    """UnsupportedError names one that can, and nothing has happened."""

    def body(rank: int) -> Any:
        with pytest.raises(dist.UnsupportedError, match="use backend 'tcp'"):
            dist.shrink_group([1 - rank], shrink_flags=dist.SHRINK_ABORT)
        return total(1.0)

    assert [2.0, 2.0] == run_threads(body, 2, "derived")


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_ranks_die_at_any_time(data: st.DataObject) -> None:
    """Some are dead before, some leave while the others shrink: all who are left agree."""
    size = data.draw(st.integers(2, 5))
    order = data.draw(st.permutations(range(size)))
    dead = order[: data.draw(st.integers(0, size - 1))]
    before = set(dead[: data.draw(st.integers(0, len(dead)))])
    under_way = threading.Event()

    def body(rank: int) -> Any:
        dist.barrier()
        if rank in dead:
            if rank not in before:
                under_way.wait(LONG)
            dist.destroy_process_group()
            return None
        while True:
            under_way.set()
            try:
                dist.shrink_group(timeout=LONG)
                if dist.get_world_size() == size - len(dead):
                    return dist.get_rank(), total(2.0**rank)
                dist.barrier()
            except dist.PeerFailedError:
                continue
            except ValueError:
                assert dist.get_world_size() == 1
                return 0, total(2.0**rank)

    results = run_threads(body, size)
    left = sorted(order[len(dead) :])
    expected = sum(2.0**rank for rank in left)
    assert [results[r] for r in left] == [(i, expected) for i in range(len(left))]

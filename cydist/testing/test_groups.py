"""Groups of some ranks, and a group's own properties."""

# mypy: disable-error-code="union-attr, arg-type"

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.contract import Jobs


def test_queries_of_the_default_group(jobs: Jobs, backend: str) -> None:
    """Rank, size, members and backend."""

    def body(rank: int) -> Any:
        assert dist.group.WORLD.rank() == rank
        assert [0, 1, 2] == dist.get_process_group_ranks(None)
        assert backend == dist.get_backend()
        return dist.get_rank(), dist.get_world_size()

    assert [(0, 3), (1, 3), (2, 3)] == jobs.get(backend, 3).run(body)


def test_new_group_computes_among_its_members(jobs: Jobs, backend: str) -> None:
    """Members reduce; the others get NON_GROUP_MEMBER, warn once, and do nothing."""

    def body(rank: int) -> Any:
        group = dist.new_group([3, 1])
        x = np.array([10.0**rank])
        if rank in (1, 3):
            dist.all_reduce(x, group=group)
            assert dist.get_group_rank(group, 3) == 1
            assert dist.get_global_rank(group, 0) == 1
            result = x[0], dist.get_rank(group), dist.get_world_size(group)
            dist.destroy_process_group(group)
            with pytest.raises(dist.GroupDestroyedError):
                dist.all_reduce(x, group=group)
            return result
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert not group
        return x[0], dist.get_rank(group), dist.get_world_size(group)

    expected = [(1.0, -1, -1), (1010.0, 0, 2), (100.0, -1, -1), (1010.0, 1, 2)]
    assert expected == jobs.get(backend, 4).run(body)


def test_ranks_keep_their_order_when_asked(jobs: Jobs, backend: str) -> None:
    """sort_ranks=False numbers the members as they were listed."""

    def body(rank: int) -> Any:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        gathered = np.zeros(3)
        dist.all_gather_into_tensor(gathered, np.array([float(rank)]), group=group)
        return gathered.tolist()

    assert [[2.0, 0.0, 1.0]] * 3 == jobs.get(backend, 3).run(body)


def test_groups_do_not_wait_for_each_other(jobs: Jobs, backend: str) -> None:
    """A call outstanding on one group does not hold up another group of the same ranks."""

    def body(rank: int) -> Any:
        first, second = dist.new_group(), dist.new_group()
        late, early = np.ones(1), np.ones(1)
        if rank == 0:
            work = dist.all_reduce(late, group=first, async_op=True)
            dist.all_reduce(early, group=second)
        else:
            dist.all_reduce(early, group=second)
            work = dist.all_reduce(late, group=first, async_op=True)
        work.wait()
        return late[0], early[0]

    assert [(2.0, 2.0)] * 2 == jobs.get(backend, 2).run(body)

"""Groups of some ranks: made without a message, with a communicator at their first collective."""

import os

import numpy as np
import pytest

import cydist as dist
from cydist.backends.mpi import communicators


def test_halves(rank, size, spare):
    """Even and odd ranks reduce for themselves."""
    groups = [dist.new_group(list(range(start, size, 2)) or [0]) for start in (0, 1)]
    mine = np.array([float(rank)])
    if groups[rank % 2]:
        dist.all_reduce(mine, group=groups[rank % 2])
        members = range(rank % 2, size, 2)
        assert [sum(members)] == mine.tolist()
        assert list(members) == dist.get_process_group_ranks(groups[rank % 2])
        dist.destroy_process_group(groups[rank % 2])
    dist.barrier(spare)


def test_pairs_that_overlap(rank, size, spare):
    """A group for each neighbour in the ring; used in the order of the ring."""
    if size < 2:
        return
    pairs = [sorted({r, (r + 1) % size}) for r in range(size)]
    groups = [dist.new_group(pair) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            mine = np.array([rank], "f2")
            dist.all_reduce(mine, group=group)
            assert [sum(pair)] == mine.tolist()
    for group in groups:
        dist.destroy_process_group(group)
    dist.barrier(spare)


def test_ranks_in_the_given_order(rank, size):
    """Unsorted, the last rank of the world is rank 0 of the group."""
    order = list(range(size))[::-1]
    group = dist.new_group(order, sort_ranks=False)
    assert order.index(rank) == group.rank()
    everyone = [np.zeros(1, int) for _ in order]
    dist.all_gather(everyone, np.array([rank]), group)
    assert order == [int(each[0]) for each in everyone]
    mine = np.array([rank])
    dist.broadcast(mine, group=group, group_src=0)
    assert [size - 1] == mine.tolist()
    dist.destroy_process_group(group)


def test_messages_in_a_group_are_its_own(rank, size):
    """The same pair and tag in two groups are two streams."""
    one, two = dist.new_group(), dist.new_group()
    if size > 1 and rank == 0:
        dist.send(np.array([1]), 1, one)
        dist.send(np.array([2]), 1, two)
    if size > 1 and rank == 1:
        into = np.zeros(2, int)
        dist.recv(into[1:], 0, two)
        dist.recv(into[:1], 0, one)
        assert [1, 2] == into.tolist()
    for group in (one, two):
        dist.barrier(group)
        dist.destroy_process_group(group)


def test_groups_that_only_members_make_are_refused(rank, size, spare):
    """use_local_synchronization is not for "mpi"; a group of "tcp" may be made so."""
    members = range(size // 2, size)
    with pytest.raises(ValueError, match="every rank of the world"):
        dist.new_group(members, use_local_synchronization=True)
    dist.barrier(spare)


def test_ranks_of_a_host_share_memory(group, size):
    """Unless CYDIST_TRANSPORT says that MPI carries everything."""
    dist.barrier(group)
    shared = os.environ.get("CYDIST_TRANSPORT") != "mpi"
    assert (shared and size > 1) == group.windows
    assert (group.native.library_comm != 0) == (not shared and size > 1)


@pytest.mark.parametrize("number", [0, 1, communicators.CREATION_TAGS, 2**64 - 1])
def test_a_communicator_is_made_beside_all_messages(rank, size, number, monkeypatch):
    """Whatever the group's number, by which MPI tells apart those that it makes at one time."""
    group = dist.new_group(timeout=5)
    with monkeypatch.context() as patch:
        patch.setattr(group, "_comm_id", number)
        for _ in range(2):
            mine = np.full(20_000, rank)
            dist.all_reduce(mine, group=group)
            assert [sum(range(size))] * 20_000 == mine.tolist()
    dist.destroy_process_group(group)


def test_more_groups_than_communicators_use_messages(rank, size, monkeypatch):
    """What a group computes does not depend on whether it has a communicator."""
    monkeypatch.setattr(communicators, "COMMUNICATORS", 2 if rank else 3)
    groups = [dist.new_group() for _ in range(5)]
    for i, group in enumerate(groups):
        mine = np.full(1000, i + rank, "i4")
        dist.all_reduce(mine, group=group)
        assert [i * size + sum(range(size))] * 1000 == mine.tolist()
    with_one = [group.native.library_comm != 0 for group in groups]
    assert with_one == sorted(with_one, reverse=True)
    assert not with_one[-1]
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_that_failed_do_not_count(rank, size, spare, monkeypatch):
    """Among those that may have a communicator at a time. MPI does not get theirs back, and so
    there is a limit to these, too."""
    dist.barrier(spare)
    now = communicators.Communicators
    monkeypatch.setattr(communicators, "COMMUNICATORS", now.made + 1)
    monkeypatch.setattr(communicators, "WITH_FAILED", now.made + now.leaked + len(now.begun) + 4)
    found = []
    for _ in range(6):
        group = dist.new_group()
        dist.barrier(group)
        found.append(group.native.library_comm != 0)
        dist.barrier(spare)
        dist.abort(group)
        dist.destroy_process_group(group)
    with_own = 4 if size > 1 and not spare.windows else 0
    assert [True] * with_own + [False] * (6 - with_own) == found


def test_mpis_error_when_it_makes_no_communicator_is_raised():
    """From its own thread to the caller's."""
    from mpi4py import MPI

    def refuse():
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    with pytest.raises(MPI.Exception, match="truncated"):
        list(communicators.Communicators.create(MPI, refuse))


def test_those_that_are_left_go_on(rank, size):
    """shrink_group without the last rank, which lives, and calls something else."""
    group = dist.new_group()
    dist.barrier(group)
    if rank < size - 1:
        left = dist.shrink_group([size - 1], group)
        mine = np.array([rank])
        dist.all_reduce(mine, group=left)
        assert [sum(range(size - 1))] == mine.tolist()
        dist.destroy_process_group(left)
    dist.destroy_process_group(group)
    dist.barrier()


def test_many_groups(rank, size):
    """A hundred groups at once, half of them used, in opposite order."""
    groups = [dist.new_group() for _ in range(100)]
    for i, group in enumerate(reversed(groups[:50])):
        mine = np.array([i])
        dist.all_reduce(mine, group=group)
        assert [i * size] == mine.tolist()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_groups(rank, size):
    """At once: each computes, whether it got a communicator, windows, or neither."""
    groups = [dist.new_group() for _ in range(10_000)]
    mine = np.zeros(1, int)
    for i, group in enumerate(groups):
        mine[0] = i + rank
        dist.all_reduce(mine, group=group, timeout=60)
        assert [i * size + sum(range(size))] == mine.tolist()
    with_own = sum(group.windows or group.native.library_comm != 0 for group in groups)
    assert 0 < with_own < len(groups)
    for i in (0, 5_000, 9_999):
        mine[0] = rank
        dist.all_reduce(mine, group=groups[i])
        assert [sum(range(size))] == mine.tolist()
    for group in groups:
        dist.destroy_process_group(group)


def test_communicators_are_given_back(rank, size):
    """More groups, one after the other, than an MPI has communicators."""
    for _ in range(2500 // (size * size)):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)


def test_one_rank_is_a_group(rank):
    """Collectives of one rank alone, derived and not."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    mine = np.array([3.0, 4.0])
    dist.all_reduce(mine, dist.ReduceOp.AVG, groups[rank])
    dist.broadcast(mine, rank, groups[rank])
    into = np.zeros(2)
    dist.all_gather_into_tensor(into, mine, groups[rank])
    dist.barrier(groups[rank])
    assert [3.0, 4.0] == into.tolist()
    dist.destroy_process_group(groups[rank])


def test_tcp_beside_mpi(rank, size, spare, monkeypatch):
    """A group may be of another backend; both work at once."""
    monkeypatch.delenv("CYDIST_TRANSPORT", raising=False)
    over_tcp = dist.new_group(backend="tcp")
    one, two = np.ones(1000), np.ones(1000)
    work = dist.all_reduce(one, group=over_tcp, async_op=True)
    dist.all_reduce(two)
    work.wait()
    assert one.tolist() == two.tolist()
    assert ("tcp", "mpi") == (dist.get_backend(over_tcp), dist.get_backend())
    dist.barrier(spare)
    dist.destroy_process_group(over_tcp)


def test_another_backend_on_one_rank_is_refused(rank, size, spare):
    """At once, though the others meet nobody: they hear of it in a call on that group."""
    last = size - 1
    if size > 1 and rank == last:
        with pytest.raises(dist.RendezvousError, match=f"'mpi' on rank .*; 'tcp' on rank {last}"):
            dist.new_group(backend="tcp")
    elif size > 1:
        group = dist.new_group()
        with pytest.raises(dist.MismatchError, match="backend 'tcp' in place of 'mpi'"):
            dist.all_reduce(np.ones(4), group=group)
        dist.destroy_process_group(group)
    dist.barrier(spare)
    dist.destroy_process_group(dist.new_group())

"""Groups of some ranks: made without a message, with a communicator at their first collective."""

import numpy as np

import cydist as dist


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


def test_groups_that_only_members_make(rank, size):
    """use_local_synchronization: whoever is not in the group does not call."""
    members = range(size // 2, size)
    if rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
        mine = np.array([rank])
        dist.all_reduce(mine, group=group)
        assert [sum(members)] == mine.tolist()
        dist.destroy_process_group(group)


def test_many_groups(rank, size):
    """A hundred groups at once, half of them used, in opposite order."""
    groups = [dist.new_group() for _ in range(100)]
    for i, group in enumerate(reversed(groups[:50])):
        mine = np.array([i])
        dist.all_reduce(mine, group=group)
        assert [i * size] == mine.tolist()
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


def test_tcp_beside_mpi(rank, size, spare):
    """A group may be of another backend; both work at once."""
    over_tcp = dist.new_group(backend="tcp")
    one, two = np.ones(1000), np.ones(1000)
    work = dist.all_reduce(one, group=over_tcp, async_op=True)
    dist.all_reduce(two)
    work.wait()
    assert one.tolist() == two.tolist()
    assert ("tcp", "mpi") == (dist.get_backend(over_tcp), dist.get_backend())
    dist.barrier(spare)
    dist.destroy_process_group(over_tcp)

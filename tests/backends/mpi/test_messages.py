"""Messages over MPI: matched by sender and tag, in order, checked, beside other traffic."""

import re

import numpy as np
import pytest

import cydist as dist
from cydist._native import asarray

# With the header, behind it in one piece, and far above any MPI's eager limit.
COUNTS = {"nothing": 0, "inline": 10, "following": 5000, "large": 700_000}


@pytest.fixture(params=COUNTS.values(), ids=COUNTS)
def count(request):
    """How many doubles a message has."""
    return request.param


def test_send_and_recv(group, rank, count):
    """What rank 0 sends rank 1 receives; recv returns the sender."""
    data = np.arange(count, dtype="f8")
    if rank == 0:
        dist.send(data, 1, group)
    if rank == 1:
        into = np.zeros(count)
        assert dist.recv(into, 0, group) == 0
        assert data.tolist() == into.tolist()


def test_irecv_then_isend_around_the_ring(group, rank, size, count):
    """All post their receives first; nobody waits for anybody's turn."""
    into, data = np.zeros(count), np.full(count, float(rank))
    receiving = dist.irecv(into, (rank - 1) % size, group)
    sending = dist.isend(data, (rank + 1) % size, group)
    receiving.wait()
    sending.wait()
    assert receiving.is_success()
    assert sending.is_success()
    assert np.full(count, float((rank - 1) % size)).tolist() == into.tolist()


def test_tags_tell_messages_apart(group, rank):
    """A receive takes the message of its tag, whichever came first; tags have 31 bits."""
    tags = (0, 7, 2**31 - 1, 2**29, 2**29 + 7)
    if rank == 0:
        for tag in tags:
            dist.send(np.array([tag]), 1, group, tag)
    if rank == 1:
        for tag in reversed(tags):
            into = np.zeros(1, int)
            dist.recv(into, 0, group, tag)
            assert [tag] == into.tolist()


def test_messages_with_one_tag_keep_their_order(group, rank):
    """Small ones do not overtake large ones."""
    counts = [1, 500_000, 2, 300_000, 3]
    if rank == 0:
        works = [dist.isend(np.full(n, float(i)), 1, group) for i, n in enumerate(counts)]
        for work in works:
            work.wait()
    if rank == 1:
        into = [np.zeros(n) for n in counts]
        works = [dist.irecv(array, 0, group) for array in into]
        for work in reversed(works):
            work.wait()
        assert list(range(len(counts))) == [array[-1] for array in into]


def test_a_message_taken_late_is_itself(group, rank):
    """Six thousand others between the same ranks pass it meanwhile."""
    late, passing = np.arange(5000.0), np.zeros(4500)
    if rank == 0:
        sending = dist.isend(late, 1, group, 99)
        for i in range(6_000):
            passing[:] = i
            dist.send(passing, 1, group)
            if i % 500 == 0:  # rank 1 keeps up
                dist.recv(np.zeros(1), 1, group)
        sending.wait()
    if rank == 1:
        for i in range(6_000):
            dist.recv(passing, 0, group)
            assert [i] == np.unique(passing).tolist()
            if i % 500 == 0:
                dist.send(np.zeros(1), 0, group)
        into = np.zeros_like(late)
        dist.recv(into, 0, group, 99)
        assert late.tolist() == into.tolist()


def test_receive_from_anyone(group, rank, size, count):
    """Rank 0 hears every rank once, and who it was."""
    if rank > 0:
        dist.send(np.full(count, float(rank)), 0, group, tag=3)
        return
    heard = {}
    for _ in range(1, size):
        into = np.zeros(count)
        heard[dist.recv(into, None, group, tag=3)] = into
    assert {r: [float(r)] * count for r in range(1, size)} == {
        r: array.tolist() for r, array in heard.items()
    }


@pytest.fixture
def store(group, rank):
    """Through which the ranks talk without MPI."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=20) if rank == 0 else None
    port = [made.port if rank == 0 else 0]
    dist.broadcast_object_list(port, 0, group)
    return made or dist.TCPStore("127.0.0.1", port[0], timeout=20)


@pytest.mark.parametrize("count", [1, 1000], ids=["tiny", "inline"])
def test_sends_that_are_over_arrive(group, rank, store, count):
    """More than MPI takes at once, though the sender is not in MPI meanwhile: it waits elsewhere
    for who receives."""
    data = np.arange(800.0 * count).reshape(800, count)
    if rank == 0:
        works = [dist.isend(row, 1, group) for row in data]
        store.set("posted", "")
        for work in works:
            work.wait()
        store.wait(["received"])
    if rank == 1:
        store.wait(["posted"])
        into = np.zeros(count)
        for row in data:
            dist.recv(into, 0, group)
            assert row.tolist() == into.tolist()
        store.set("received", "")


def test_a_dropped_send_arrives(group, rank):
    """The handle of a send may go away; the message does not."""
    if rank == 0:
        dist.isend(np.arange(600_000.0), 1, group)
    if rank == 1:
        into = np.zeros(600_000)
        dist.recv(into, 0, group)
        assert np.arange(600_000.0).tolist() == into.tolist()
    dist.barrier(group)


def test_messages_pass_collectives(group, rank, size):
    """A receive posted before a collective completes after it, and during it."""
    into = np.zeros(500_000)
    receiving = dist.irecv(into, (rank - 1) % size, group)
    total = np.ones(1000)
    dist.all_reduce(total, group=group)
    sending = dist.isend(np.full(500_000, float(rank)), (rank + 1) % size, group)
    again = dist.all_reduce(total, group=group, async_op=True)
    receiving.wait()
    sending.wait()
    again.wait()
    assert (rank - 1) % size == into[-1]
    assert size**2 == total[0]


def test_strided_messages(group, rank):
    """Every second element on one side, a column on the other."""
    if rank == 0:
        dist.send(np.arange(20.0)[::2], 1, group)
    if rank == 1:
        into = np.full((10, 3), -1.0)
        dist.recv(into[:, 1], 0, group)
        assert np.arange(0.0, 20.0, 2).tolist() == into[:, 1].tolist()
        assert [-1.0] * 10 == into[:, 0].tolist()


# Arrays of more than a header carries, by which memory that is not theirs lies.
GAPS = {
    "bytes": lambda: np.full((40_000, 2), -1, "i1")[:, 0],
    "columns": lambda: np.full((5000, 3), -1.0)[:, 1],
    "rows": lambda: np.full((50, 400), -1.0)[:, :200],
    "boxes": lambda: np.full((20, 30, 40), -1.0)[2:18, 1:29, 8:24],
    "backward": lambda: np.full(5000, -1.0)[::-1],
    "upward": lambda: np.full((100, 100), -1.0)[::-1, :50],
    "transposed": lambda: np.full((100, 120), -1.0)[:, :50].T,
}
ENDS = {"both": (True, True), "sender": (True, False), "receiver": (False, True)}


@pytest.fixture(params=GAPS.values(), ids=GAPS)
def with_gaps(request):
    """Makes an array that has gaps, and a base which is -1 everywhere."""
    return request.param


def swapped(group, rank, size, sent, into):
    """Send to the next rank, and receive from the one before."""
    numbers = np.arange(sent.size).reshape(sent.shape) % 100
    sent[...] = numbers + rank
    receiving = dist.irecv(into, (rank - 1) % size, group)
    sending = dist.isend(sent, (rank + 1) % size, group)
    receiving.wait()
    sending.wait()
    return numbers.astype(sent.dtype) + (rank - 1) % size


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_messages_with_gaps(group, rank, size, with_gaps, ends):
    """On both sides or one; nothing is written beside the elements."""
    sent, into = (with_gaps() if gaps else with_gaps().copy() for gaps in ends)
    expected = with_gaps()
    expected[...] = swapped(group, rank, size, sent, into)
    assert np.array_equal(expected, into)
    if ends[1]:
        assert np.array_equal(expected.base, into.base)


def test_messages_with_gaps_from_anyone(group, rank, with_gaps):
    """Nobody knows who will send them, and by which way."""
    x = with_gaps()
    if rank == 0:
        x[...] = 7
        dist.send(x, 1, group)
    if rank == 1:
        assert dist.recv(x, None, group) == 0
        assert (x == 7).all()


def test_a_message_with_gaps_of_another_size_is_refused(group, rank, with_gaps):
    """MismatchError, and nothing is written."""
    x = with_gaps()
    if rank == 0:
        sent = dist.isend(np.zeros(x.size + 1, x.dtype), 1, group)
        with pytest.raises(dist.MismatchError, match="a message of"):
            dist.recv(np.zeros(1), 1, group)
        del sent
    if rank == 1:
        with pytest.raises(dist.MismatchError, match="a message of"):
            dist.recv(x, 0, group)
        assert (x.base == -1).all()


def test_batches(group, rank, size):
    """Many messages both ways at once."""
    out = [np.full(100, 10.0 * rank + peer) for peer in range(size)]
    into = [np.zeros(100) for _ in range(size)]
    peers = [peer for peer in range(size) if peer != rank]
    ops = [dist.P2POp(dist.isend, out[peer], peer, group) for peer in peers]
    ops += [dist.P2POp(dist.irecv, into[peer], peer, group) for peer in peers]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert [10.0 * peer + rank for peer in peers] == [into[peer][0] for peer in peers]


@pytest.mark.parametrize("sent", [np.zeros(4, "f4"), np.zeros(9, "i4"), np.zeros(9_000, "f4")],
                         ids=["count", "dtype", "large"])  # fmt: skip
def test_a_message_of_another_kind_is_refused(group, rank, sent):
    """The receiver gets an error that names both, and the group has failed on both sides."""
    if rank == 0:
        works = [dist.isend(sent, 1, group), dist.irecv(np.zeros(1), 1, group)]
        with pytest.raises(dist.MismatchError, match="a message of"):
            works[1].wait()
    elif rank == 1:
        with pytest.raises(dist.MismatchError) as caught:
            dist.recv(np.zeros(9, "f4"), 0, group)
        assert f"Rank 0: a message of {sent.size} {sent.dtype}" in str(caught.value)
        assert re.search(r"This rank \(\d\): a message of 9 float32", str(caught.value))
        assert caught.value.ranks == (0,)
    with pytest.raises(dist.DistError):
        dist.barrier(group)


@pytest.fixture
def small_pieces(group):
    """One call of MPI moves 64 KiB at most, and not 1 GiB."""
    messages = group._endpoint.messages
    before = messages.piece_bytes
    dist.barrier(group)
    messages.piece_bytes = 1 << 16
    dist.barrier(group)
    yield
    dist.barrier(group)
    messages.piece_bytes = before
    dist.barrier(group)


def test_long_messages_with_gaps_go_in_pieces(group, rank, size, small_pieces):
    """More than a call of MPI moves; the other side has none."""
    sent, into = np.zeros((50_001, 2))[:, 0], np.zeros(50_001)
    assert np.array_equal(swapped(group, rank, size, sent, into), into)
    assert np.array_equal(swapped(group, rank, size, into, sent), sent)


def test_what_one_call_of_mpi_cannot_move_goes_in_pieces(group, rank, size, small_pieces):
    """Messages, broadcasts, reductions, and blocks that our own algorithms then move."""
    data = np.arange(50_001.0)
    into = np.zeros_like(data)
    receiving = dist.irecv(into, (rank - 1) % size, group)
    dist.isend(data + rank, (rank + 1) % size, group).wait()
    receiving.wait()
    assert np.array_equal(data + (rank - 1) % size, into)
    dist.broadcast(into, 0, group)
    assert np.array_equal(data + size - 1, into)
    dist.all_reduce(into, group=group)
    assert np.array_equal((data + size - 1) * size, into)
    blocks = np.zeros((size, len(data)))
    dist.all_gather_into_tensor(blocks, data + rank, group)
    assert np.array_equal(data + np.arange(size)[:, None], blocks)


def test_a_receive_of_a_failed_group_is_over(group, rank, spare):
    """is_completed sees the failure, as wait does."""
    work = dist.irecv(np.zeros(3), 1 - min(rank, 1), group)
    dist.barrier(spare)
    dist.abort(group)
    assert work.is_completed()
    assert isinstance(work.exception(), dist.GroupFailedError)
    dist.barrier(spare)  # nobody leaves before all have looked


def test_the_users_own_traffic_is_not_disturbed(group, rank, size):
    """A receive from anyone with any tag on COMM_WORLD gets the user's message, not ours."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    into = np.zeros(3)
    request = world.Irecv(into, MPI.ANY_SOURCE, MPI.ANY_TAG)
    total = np.ones(3)
    dist.all_reduce(total, group=group)
    receiving = dist.irecv(np.zeros(3), None, group)
    dist.send(total, (rank + 1) % size, group)
    assert (rank - 1) % size == receiving.source_rank()
    assert not request.Test()
    gathered = world.allgather(rank)
    dist.barrier(group)
    world.Send(np.full(3, float(rank)), (rank + 1) % size, 0)
    request.Wait()
    assert list(range(size)) == gathered
    assert [(rank - 1) % size] * 3 == into.tolist()


@pytest.mark.parametrize("concurrent", [True, False])
def test_layouts_only_where_no_other_thread_is_in_mpi(group, monkeypatch, concurrent):
    """Where another thread may wait in MPI it is asked for no layout: arrays are packed."""
    monkeypatch.setattr(group._endpoint.threads, "concurrent", concurrent)
    array = asarray(np.ones((200, 2048))[:, :1024])
    dist.barrier(group)
    peer = 1 - min(group.rank(), 1)
    carried = group._endpoint.messages.takes_layout(peer, array.nbytes)
    assert group.accepts_strided(array, peer) == (concurrent and carried)

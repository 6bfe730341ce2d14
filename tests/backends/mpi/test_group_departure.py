"""A rank that leaves a group while it lives on in others is waited for no longer."""

from contextlib import suppress

import numpy as np
import pytest

import cydist as dist
from cydist.api.process_groups import current_world

CALLS = {
    "all_reduce": lambda group, last: dist.all_reduce(np.ones(4, "f4"), group=group),
    "16 bits": lambda group, last: dist.all_reduce(np.ones(4, "f2"), group=group),
    "long": lambda group, last: dist.all_reduce(np.ones(300_000), group=group),
    "broadcast": lambda group, last: dist.broadcast(np.ones(4), last, group),
    "barrier": lambda group, last: dist.barrier(group),
    "asynchronous": lambda group, last: dist.barrier(group, async_op=True).wait(),
    "recv": lambda group, last: dist.recv(np.ones(4), last, group),
    "irecv": lambda group, last: dist.irecv(np.ones(4), last, group).wait(),
}


@pytest.mark.parametrize("met", [True, False], ids=["after a call", "before any"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_who_left_is_not_waited_for(rank, size, spare, call, met):
    """The others get PeerFailedError, long before their deadline."""
    group = dist.new_group(timeout=600)
    last = size - 1
    if met:
        dist.barrier(group)
    if rank == last:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank != last:
        with pytest.raises(dist.PeerFailedError, match=rf"rank {last} .*was lost"):
            call(group, last)
        dist.destroy_process_group(group)
    dist.barrier(spare)


def test_a_long_message_to_who_left_is_over(rank, size, spare):
    """Received by nobody, or an error; its sender goes on."""
    group = dist.new_group(timeout=600)
    last = size - 1
    if rank == last:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank == 0:
        with suppress(dist.PeerFailedError):
            dist.send(np.ones(300_000), last, group)
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_a_short_message_to_who_left_is_over(rank, size, spare):
    """It is when it has been copied, whether or not anybody takes it, and fails nothing."""
    group = dist.new_group(timeout=600)
    last = size - 1
    if rank == last:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank != last:
        for tag in range(3):
            dist.send(np.ones(4), last, group, tag)
        dist.isend(np.ones(4), last, group).wait()
        group.check_usable("send")
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_a_receive_from_anyone_ends_when_all_others_have_left(rank, size, spare):
    """Not before: one of them may still send."""
    group = dist.new_group(timeout=600)
    x = np.zeros(4)
    if 0 < rank < size - 1:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank == 0:
        dist.recv(x, group=group)
        assert x[0] == 7
        with pytest.raises(dist.PeerFailedError):
            dist.recv(x, group=group)
    if rank == size - 1:
        dist.send(np.full(4, 7.0), 0, group)
    if rank != 0:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_what_a_rank_sent_before_it_left_arrives(rank, size, spare):
    """The error comes after it."""
    group = dist.new_group(timeout=600)
    last, x = size - 1, np.zeros(4)
    if rank == last:
        for tag in range(20):
            dist.send(np.full(4, float(tag)), 0, group, tag)
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank == 0:
        for tag in reversed(range(20)):
            dist.recv(x, last, group, tag)
            assert x[0] == tag
        with pytest.raises(dist.PeerFailedError, match="it has left the group"):
            dist.recv(x, last, group)
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_who_left_is_told_from_an_error_of_an_earlier_call(rank, spare, monkeypatch):
    """What MPI said of that one does not explain why nothing comes."""
    group = dist.new_group(timeout=600)
    monkeypatch.setattr(group._endpoint, "peer_error", lambda peer: "MPI: an earlier call's error")
    dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank == 1:
        with pytest.raises(dist.PeerFailedError, match="it has left the group"):
            dist.recv(np.ones(4), 0, group)
    if rank > 0:
        dist.destroy_process_group(group)
    dist.barrier(spare)


def test_who_shrank_a_group_is_not_waited_for(rank, size, spare):
    """A rank that was left out learns in its next call of the old group."""
    group = dist.new_group(timeout=600)
    last = size - 1
    dist.barrier(group)
    if rank != last:
        left = dist.shrink_group([last], group)
        dist.barrier(left)
        dist.destroy_process_group(left)
    dist.barrier(spare)
    if rank == last:
        with pytest.raises(dist.PeerFailedError):
            dist.all_reduce(np.ones(4), group=group)
        dist.destroy_process_group(group)
    dist.barrier(spare)


def test_who_was_left_out_does_not_reach_later_groups(rank, size, spare):
    """What it sent in its last call goes to none of the groups that the others make then."""
    group = dist.new_group(timeout=600)
    *stay, last = range(size)
    dist.barrier(group)
    if rank != last:
        dist.destroy_process_group(dist.shrink_group([last], group))
    dist.barrier(spare)
    if rank == last:
        with pytest.raises(dist.PeerFailedError):
            dist.all_reduce(np.ones(4), group=group)
        dist.destroy_process_group(group)
    dist.barrier(spare)
    later = dist.new_group(stay)
    if rank != last:
        x = np.ones(20_000)
        dist.all_reduce(x, group=later)
        assert (x == size - 1).all()
        dist.destroy_process_group(later)
    dist.barrier(spare)


def test_who_left_is_not_reported_again(rank, size, spare):
    """What it announced is the error, though it has left since: before that is believed, MPI's
    numbers may be explained by another rank."""
    group = dist.new_group(timeout=600)
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="announces 4611686018427387904 bytes"):
            dist.all_gather_object([None] * size, rank, group)
    else:
        sizes = np.empty((size, 1), np.int64)
        dist.all_gather(list(sizes), np.array([1 << 62]), group)
    dist.destroy_process_group(group)
    dist.barrier(spare)


def test_who_computes_is_asked_once_until_it_looks(rank, size, spare):
    """However many waits there are meanwhile, MPI keeps one question of each rank; and a rank that
    took one, and leaves the group later, is asked again."""
    group = dist.new_group(timeout=600)
    store = current_world().store.part(f"asked/{group.group_name}", range(size), "test")
    last = size - 1
    if rank == last:
        store.multi_get([f"waited/{each}" for each in range(last)])  # nothing moves meanwhile
    else:
        work = dist.irecv(np.ones(4), last, group)
        for _ in range(8):
            with pytest.raises(dist.DistTimeoutError):
                work.wait(0.1)
        assert group.windows or group.native.probes_sent == 1
        store.set(f"waited/{rank}", b"")
    dist.barrier(spare)
    if rank == last:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(dist.PeerFailedError, match="it has left the group"):
            work.wait(600)
        dist.destroy_process_group(group)
    dist.barrier(spare)


def test_who_left_is_noticed_while_another_computes(rank, size, spare):
    """Questions that the one has not taken yet keep nobody from asking the other."""
    if size < 3:
        return
    group = dist.new_group(timeout=600)
    store = current_world().store.part(f"noticed/{group.group_name}", range(size), "test")
    last = size - 1
    if rank == last:
        store.get("noticed")  # nothing moves meanwhile
    if rank == 0:
        dist.destroy_process_group(group)
        dist.recv(np.ones(1), 1, spare)
    if rank == 1:
        work = dist.irecv(np.ones(4), last, group)
        for _ in range(5):
            with pytest.raises(dist.DistTimeoutError):
                work.wait(0.1)
        with pytest.raises(dist.PeerFailedError, match=r"rank 0 .*it has left the group"):
            dist.recv(np.ones(4), 0, group)
        dist.send(np.ones(1), 0, spare)
        store.set("noticed", b"")
    dist.barrier(spare)
    dist.destroy_process_group(group)

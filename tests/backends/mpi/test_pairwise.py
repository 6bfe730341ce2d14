"""Long calls between two ranks, which over MPI alone are one message each way that no other one
compares: right, or an error that names both calls.
"""

import re
import signal
import threading
import time

import numpy as np
import pytest

import cydist as dist
from cydist import _native

CALLS = {
    "broadcast": lambda g, n=20_000: dist.broadcast(np.ones(n, "f4"), 0, g),
    "all_gather": lambda g, n=20_000: dist.all_gather_into_tensor(
        np.empty(2 * n, "f4"), np.ones(n, "f4"), g
    ),
    "all_to_all": lambda g, n=20_000: dist.all_to_all_single(
        np.empty(2 * n, "f4"), np.ones(2 * n, "f4"), group=g
    ),
}


@pytest.fixture
def pair(spare):
    """A group of both ranks."""
    group = dist.new_group(timeout=600)
    yield group
    dist.destroy_process_group(group)
    dist.barrier(spare)


@pytest.mark.parametrize("count", [1_001, 20_000, 700_000])
def test_long_calls_of_two_ranks_move_the_right_numbers(pair, rank, count):
    """From either root, in place, and to and from lists of arrays that lie apart; many at once."""
    block = np.arange(count) + rank
    both = [np.arange(count), np.arange(count) + 1]
    for root in (0, 1):
        x = block.copy()
        dist.broadcast(x, root, pair)
        assert np.array_equal(x, both[root])
    whole = np.zeros((2, count), int)
    dist.all_gather_into_tensor(whole, block, pair)
    assert np.array_equal(whole, both)
    whole[1 - rank] = 0
    dist.all_gather_into_tensor(whole, whole[rank], pair)
    assert np.array_equal(whole, both)
    apart = [np.zeros(count, int) for _ in range(2)]
    dist.all_gather(apart, block, pair)
    assert np.array_equal(apart, both)
    dist.all_to_all(apart, [block * 10, block * 100], pair)
    assert np.array_equal(apart, [each * (10, 100)[rank] for each in both])
    many = [np.full(count, float(i * (rank == i % 2))) for i in range(20)]
    for work in [dist.broadcast(x, i % 2, pair, async_op=True) for i, x in enumerate(many)]:
        work.wait()
    assert all((x == i).all() for i, x in enumerate(many))


ODD = {
    "dtype": lambda g: dist.broadcast(np.ones(20_000, "i4"), 0, g),
    "width": lambda g: dist.broadcast(np.ones(10_000, "f8"), 0, g),
    "shorter": lambda g: dist.broadcast(np.ones(19_999, "f4"), 0, g),
    "longer": lambda g: dist.broadcast(np.ones(700_000, "f4"), 0, g),
    "far-shorter": lambda g: dist.broadcast(np.ones(4, "f4"), 0, g),
    "two-roots": lambda g: dist.broadcast(np.ones(20_000, "f4"), 1, g),
    "a-short-root": lambda g: dist.broadcast(np.ones(4, "f4"), 1, g),
    "all_gather": lambda g: CALLS["all_gather"](g, 10_000),
    "all_to_all": lambda g: CALLS["all_to_all"](g, 5_000),
    "all_reduce": lambda g: dist.all_reduce(np.ones(20_000, "f4"), group=g),
    "a-short-all_reduce": lambda g: dist.all_reduce(np.ones(4, "f4"), group=g),
    "reduce": lambda g: dist.reduce(np.ones(4, "f4"), 0, group=g),
    "scan": lambda g: dist.scan(np.ones(4, "f4"), group=g),
    "barrier": dist.barrier,
}


@pytest.mark.parametrize("last", [False, True], ids=["then-a-barrier", "then-the-end"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("usual", CALLS)
def test_two_ranks_in_different_long_calls(pair, rank, usual, odd, last):
    """Both learn it, from the call itself or at the latest from what comes after it."""
    if pair.windows and last:
        return  # a root need not hear of it there: see cydist/testing/test_mismatches.py
    dist.barrier(pair)

    def both():
        odd(pair) if rank == 1 else CALLS[usual](pair)
        dist.destroy_process_group(pair) if last else dist.barrier(pair)

    with pytest.raises(dist.MismatchError) as caught:
        both()
    assert f"{usual} #" in str(caught.value)
    assert re.search("different calls|disagree about", str(caught.value))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("gone", [0, 1])
def test_who_left_is_not_waited_for_in_a_long_call(pair, rank, spare, gone, call):
    """Long before the deadline."""
    if pair.windows:
        return  # a root need not wait there
    dist.barrier(pair)
    if rank == gone:
        dist.destroy_process_group(pair)
    dist.barrier(spare)
    if rank == 1 - gone:
        with pytest.raises(dist.PeerFailedError, match=rf"rank {gone} .*was lost"):
            call(pair)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("gone", [0, 1])
def test_mpi_gets_no_array_for_who_is_known_to_have_left(pair, rank, spare, gone, call):
    """The call ends before it has begun."""
    dist.barrier(pair)
    if pair.windows:
        return
    if rank == gone:
        dist.destroy_process_group(pair)
    dist.barrier(spare)
    if rank == 1 - gone:
        asked = _native.irecv(pair.native, _native.asarray(bytearray(1)), gone, 7)
        assert asked.wait(int((time.monotonic() + 20) * 1e9))
        messages = pair._endpoint.messages
        before = messages.lingering
        with pytest.raises(dist.PeerFailedError, match="it has left the group"):
            call(pair)
        assert messages.lingering == before


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("late", [0, 1])
def test_a_long_call_that_is_late(pair, rank, spare, late, call):
    """It names the rank that did not come, whose next call says why."""
    if rank == 1 - late:
        with pytest.raises(dist.DistTimeoutError, match="waiting for rank") as caught:
            dist.broadcast(np.ones(20_000, "f4"), 0, pair, timeout=0.3)
        assert caught.value.ranks == (late,)
    dist.barrier(spare)
    if rank == late:
        with pytest.raises(dist.DistError, match="gave up waiting"):
            CALLS[call](pair)


def test_a_long_call_whose_other_rank_comes_late(pair, rank, spare):
    """It is asked what it does meanwhile, and all goes on."""
    if rank == 0:
        CALLS["all_to_all"](pair)
        dist.send(np.ones(1), 1, spare)
    else:
        over = dist.irecv(np.ones(1), 0, spare)
        with pytest.raises(dist.DistTimeoutError):
            over.wait(0.3)
        CALLS["all_to_all"](pair)
        over.wait()
    dist.barrier(pair)


def test_ctrl_c_ends_a_long_call(pair, rank, spare):
    """The other rank learns who was interrupted."""
    if rank == 0:
        main = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            CALLS["all_gather"](pair)
        timer.join()
    dist.barrier(spare)
    if rank == 1:
        with pytest.raises(dist.DistError, match=r"KeyboardInterrupt|was interrupted"):
            dist.barrier(pair)

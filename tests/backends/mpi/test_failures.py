"""What goes wrong over MPI is an error on every rank that names it: never a wrong number,
never a hang.
"""

import gc
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import cydist as dist
from cydist import _native
from cydist._native import CallRecord
from cydist.backends.host import chunking


def usual(group):
    """What all ranks but the odd one call."""
    dist.all_reduce(np.ones(4, "f4"), group=group)


# What the odd one calls instead; what the error says of it, and of the usual call.
ODD = {
    "dtype": (
        lambda g: dist.all_reduce(np.ones(4, "i4"), group=g),
        ("of int32", "of float32"),
    ),
    "count": (
        lambda g: dist.all_reduce(np.ones(5, "f4"), group=g),
        ("of 5 elements", "of 4 elements"),
    ),
    "operation": (
        lambda g: dist.all_reduce(np.ones(4, "f4"), dist.ReduceOp.MAX, g),
        ("op MAX", "op SUM"),
    ),
    "not-mpi's": (
        lambda g: dist.all_reduce(np.ones(4, "f2"), group=g),
        ("of float16", "of float32"),
    ),
    "collective": (
        lambda g: dist.broadcast(np.ones(4, "f4"), 0, g),
        ("of 4 float32, root 0", "of 4 float32, op SUM"),
    ),
    "barrier": (lambda g: dist.barrier(g), ("barrier #", "of 4 float32, op SUM")),
    "messages": (lambda g: dist.scan(np.ones(4, "f4"), group=g), ("scan #", "all_reduce #")),
}


@pytest.mark.parametrize(("odd", "texts"), ODD.values(), ids=ODD)
def test_a_different_call_is_a_mismatch_on_every_rank(group, rank, size, odd, texts):
    """The error names both calls; where MPI's own collective is over by then, the next call
    raises it."""

    def calls():
        (odd if rank == size - 1 else usual)(group)
        dist.barrier(group)

    with pytest.raises(dist.MismatchError) as caught:
        calls()
    message = str(caught.value)
    assert [text for text in texts if text not in message] == []
    assert caught.value.ranks


@pytest.mark.parametrize(("odd", "texts"), ODD.values(), ids=ODD)
def test_a_different_last_call_is_a_mismatch(rank, size, spare, odd, texts):
    """No call comes after it: the odd rank and the next one learn at the latest when they destroy
    the group, the others if they are still at it."""
    group = dist.new_group()
    dist.barrier(group)

    def calls():
        (odd if rank == size - 1 else usual)(group)
        dist.destroy_process_group(group)

    if rank in (0, size - 1):
        with pytest.raises(dist.MismatchError) as caught:
            calls()
        assert [text for text in texts if text not in str(caught.value)] == []
    else:
        with suppress(dist.MismatchError):
            calls()
    dist.destroy_process_group(group)
    dist.barrier(spare)


def source(root, count=4, dtype="f4"):
    """A broadcast from this rank."""
    return lambda group: dist.broadcast(np.ones(count, dtype), root, group)


# By the number of ranks: what the last one calls, and all others.
BROADCASTS = {
    "two-roots": lambda size: (source(size - 1), source(0)),
    "no-root": lambda size: (source(0), source(size - 1)),
    "count": lambda size: (source(0, 5), source(0)),
    "long-at-the-end": lambda size: (source(0, 50_000), source(0)),
    "short-at-the-end": lambda size: (source(0), source(0, 50_000)),
    "dtype": lambda size: (source(0, 4, "i4"), source(0)),
    "all_reduce": lambda size: (usual, source(0)),
    "all_reduce-by-the-others": lambda size: (source(0), usual),
}


@pytest.mark.parametrize("last", [False, True], ids=["then-a-barrier", "then-the-end"])
@pytest.mark.parametrize("calls", BROADCASTS.values(), ids=BROADCASTS)
def test_a_different_broadcast_is_a_mismatch(rank, size, spare, calls, last):
    """Over MPI alone, a rank that believes to be its source: on every rank if a call comes after
    it, else on those that hear of the odd one before they destroy the group."""
    if size > 2 and calls is BROADCASTS["short-at-the-end"]:
        return  # Open MPI's own broadcast ends the process then, see docs/guide/backends.md
    if spare.windows:
        return  # a root need not hear of it there: see cydist/testing/test_mismatches.py
    group = dist.new_group()
    dist.barrier(group)
    odd, others = calls(size)

    def both():
        (odd if rank == size - 1 else others)(group)
        dist.destroy_process_group(group) if last else dist.barrier(group)

    if last and rank not in (0, size - 1):
        with suppress(dist.MismatchError):
            both()
    else:
        with pytest.raises(dist.MismatchError, match="broadcast"):
            both()
    dist.destroy_process_group(group)
    dist.barrier(spare)


def test_a_group_ends_though_a_member_calls_nothing_more(rank, size, spare):
    """Who destroys a group does not wait long for those who have not made its last call."""
    group = dist.new_group()
    dist.barrier(group)
    x = np.full(3, float(rank == 0))
    if rank < size - 1:
        dist.broadcast(x, 0, group)
        dist.destroy_process_group(group)
    dist.barrier(spare)
    if rank == size - 1:
        dist.broadcast(x, 0, group)
        dist.destroy_process_group(group)
    assert [1.0] * 3 == x.tolist()


def test_numbers_that_come_late_wait_for_no_neighbour(rank, group, spare):
    """Not even for the one before, whose fingerprint each rank compares: it comes after that."""
    dist.barrier(group)
    x = np.full(3, float(rank == 0))
    if rank == 0:
        late = threading.Timer(0.2, dist.broadcast, (x, 0, group))
        late.start()
        late.join()
    elif rank != 1:
        dist.broadcast(x, 0, group)
    dist.barrier(spare)
    if rank == 1:
        dist.broadcast(x, 0, group)
    assert [1.0] * 3 == x.tolist()


def test_a_first_call_that_others_do_not_make(group, rank):
    """The error names no call that nobody made, though ranks may ask each other before it."""

    def calls():
        (dist.monitored_barrier if rank == 0 else usual)(group)
        dist.barrier(group)

    with pytest.raises(dist.MismatchError) as caught:
        calls()
    assert "monitored_barrier #1" in str(caught.value)
    assert "uint8" not in str(caught.value)
    assert "gaps" not in str(caught.value)


def test_a_late_first_call_says_how_long_it_had(group, rank, spare):
    """Not what was left when its ranks had asked each other."""
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match=r"timeout after 0\.5 s"):
            dist.broadcast(np.ones(4), 1, group, timeout=0.5)
    dist.barrier(spare)


def later(function, *arguments):
    """Call it on another thread, soon."""
    threading.Timer(0.2, function, arguments).start()


@pytest.mark.parametrize("way", ["timeout", "ctrl-c", "abort", "abort-elsewhere"])
def test_creation_of_a_communicator_can_be_given_up(rank, spare, way, request):
    """One rank is not there, though all have come: it failed in between."""
    dist.barrier(spare)  # some MPI makes one communicator at a time
    group, word = dist.new_group(), np.zeros(1)
    if rank == 0:
        limit, error, begin = {
            "timeout": (0.3, dist.DistTimeoutError, lambda: None),
            "ctrl-c": (60, KeyboardInterrupt, lambda: request.getfixturevalue("ctrl_c")),
            "abort": (60, dist.GroupFailedError, lambda: later(dist.abort, group)),
            "abort-elsewhere": (15, dist.GroupFailedError, lambda: dist.send(word, 1, spare)),
        }[way]

        def make(call):
            begin()
            group._create(call)

        with pytest.raises(error):
            group.execute("all_reduce", make, timeout=limit)
        with pytest.raises(dist.GroupFailedError):
            dist.barrier(group)
    elif rank == 1 and way == "abort-elsewhere":
        dist.recv(word, 0, spare)
        dist.abort(group)
    dist.barrier(spare)
    if rank:
        # Which MPI waits for, on rank 0; all have heard of the failure, or do meanwhile.
        with suppress(dist.DistError):
            group._create(CallRecord("all_reduce", 1, time.monotonic() + 20))
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_another_root_is_a_mismatch(group, rank):
    """Two ranks want to be the source of a broadcast."""

    def calls():
        dist.broadcast(np.ones(3), min(rank, 1), group)
        dist.barrier(group)

    with pytest.raises(dist.MismatchError, match=r"root \d.*root \d"):
        calls()


def test_only_the_group_of_a_mismatch_fails(group, rank, size):
    """It takes no more calls and says why; other groups go on."""

    def calls():
        dist.all_reduce(np.ones(3 + (rank == 0)), group=group)
        dist.barrier(group)

    with pytest.raises(dist.MismatchError):
        calls()
    with pytest.raises(dist.GroupFailedError, match="MismatchError"):
        dist.barrier(group)
    other = dist.new_group()
    total = np.ones(2)
    dist.all_reduce(total, group=other)
    assert [size] * 2 == total.tolist()
    dist.destroy_process_group(other)


def test_blocks_that_do_not_fit_fail_every_rank(group, rank, size):
    """One pair of an uneven exchange disagrees, and the others learn of it."""
    into = [np.zeros(2) for _ in range(size)]
    out = [np.zeros(2) for _ in range(size)]
    if rank == 0:
        out[1] = np.zeros(3)

    def exchange():
        dist.all_to_all(into, out, group)
        dist.barrier(group)  # for the ranks that could not see it in the exchange

    with pytest.raises(dist.DistError, match="24 bytes in this message"):
        exchange()


@pytest.mark.parametrize("call", [
    lambda g: dist.all_reduce(np.ones(4), group=g, timeout=0.3),
    lambda g: dist.barrier(g, timeout=0.3),
    lambda g: dist.gather(np.ones(4), list(np.ones((g.size(), 4))), 0, g, timeout=0.3),
], ids=["all_reduce", "barrier", "gather"])  # fmt: skip
@pytest.mark.parametrize("fresh", [True, False], ids=["first-call", "later-call"])
def test_a_timeout_names_who_is_missing(group, rank, size, call, fresh, spare):
    """Rank 0 waits for all others in vain; their next call on the group says so."""
    if not fresh:
        dist.barrier(group)
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError) as caught:
            call(group)
        assert "waiting for rank" in str(caught.value)
        assert set(caught.value.ranks) <= set(range(1, size))
        assert caught.value.ranks
    dist.barrier(spare)
    with pytest.raises(dist.DistError, match=r"waiting for rank|gave up waiting"):
        dist.barrier(group)


def test_a_timeout_says_what_late_ranks_do(group, rank, size, spare):
    """In which call they are, on which host, and their Python stacks."""
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.recv(np.zeros(3), 1, group, timeout=2)
        message = str(caught.value)
        assert f"rank 1 on {socket.gethostname()} is in no call of the group" in message
        assert "its last was barrier #" in message
        assert "dist.barrier(spare)" in message
    dist.barrier(spare)


def test_the_ranks_that_came_are_not_missing(group, rank, size, spare):
    """All but the last wait, and every error names that one: as the rank waited for, or below the
    first line as what those waited for wait for."""
    end = [time.monotonic() + 1]  # of all: who began later would hear only that another gave up
    dist.broadcast_object_list(end, 0, group)
    if rank < size - 1:
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.all_reduce(np.ones(4), group=group, timeout=end[0] - time.monotonic())
        assert f"rank {size - 1} " in str(caught.value)
    dist.barrier(spare)


def test_a_receive_that_is_late_fails_the_group(group, rank, spare):
    """recv has a deadline; the other ranks learn of it."""
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match="waiting for rank 1"):
            dist.recv(np.zeros(3), 1, group, timeout=0.2)
    dist.barrier(spare)
    with pytest.raises(dist.DistError, match=r"timeout|gave up waiting"):
        dist.barrier(group)


def test_a_wait_that_is_late_leaves_the_receive_under_way(group, rank):
    """The timeout of `wait` is not the call's: it can be waited for again."""
    if rank == 0:
        into = np.zeros(3)
        work = dist.irecv(into, 1, group)
        with pytest.raises(dist.DistTimeoutError):
            work.wait(0.1)
        dist.send(np.ones(1), 1, group)
        assert work.wait()
        assert [1.0] * 3 == into.tolist()
    if rank == 1:
        dist.recv(np.zeros(1), 0, group)
        dist.send(np.ones(3), 0, group)
    dist.barrier(group)


def test_abort_ends_the_calls_under_way(group, rank, spare):
    """On this rank and on the others."""
    work = dist.all_reduce(np.ones(4), group=group, async_op=True) if rank else None
    dist.barrier(spare)
    if rank == 0:
        dist.abort(group)
    else:
        with pytest.raises(dist.GroupFailedError, match="aborted"):
            work.wait()
    dist.barrier(spare)
    with pytest.raises(dist.GroupFailedError, match="aborted"):
        dist.barrier(group)


LONG = np.ones(3_000_000)  # made before the signal comes, which is on its way then

WAITS = {
    "all_reduce": lambda g: dist.all_reduce(np.ones(4), group=g),
    "all_reduce-of-ours": lambda g: dist.all_reduce(np.ones(4, "f2"), group=g),
    "long-all_reduce": lambda g: dist.all_reduce(np.ones(300_000), group=g),
    "barrier": lambda g: dist.barrier(g),
    "gather": lambda g: dist.gather(np.ones(4), list(np.ones((g.size(), 4))), 0, g),
    "monitored_barrier": lambda g: dist.monitored_barrier(g),
    "all_gather_object": lambda g: dist.all_gather_object([None] * g.size(), 1, g),
    "recv": lambda g: dist.recv(np.ones(4), 1, g),
    "recv-from-anyone": lambda g: dist.recv(np.ones(4), None, g),
    "long-send": lambda g: dist.send(LONG, 1, g),
}


@pytest.fixture
def ctrl_c():
    """SIGINT comes to the main thread soon."""
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait(rank, spare, call, request):
    """SIGINT raises KeyboardInterrupt in any call that waits, while the others, whose patience is
    that of `spare`, still wait for this rank; they learn who was interrupted."""
    group = dist.new_group(timeout=600)
    if rank == 0:
        request.getfixturevalue("ctrl_c")
        with pytest.raises(KeyboardInterrupt):
            call(group)
    dist.barrier(spare)
    # Windows show that the interrupted call was another one than this.
    words = "KeyboardInterrupt|was interrupted|different calls|disagree about"
    with pytest.raises(dist.DistError, match=words):
        dist.all_reduce(np.ones(4), group=group)
    dist.destroy_process_group(group)


STARTED = {
    "all_reduce": lambda g: dist.all_reduce(np.ones(4), group=g, async_op=True),
    "irecv": lambda g: dist.irecv(np.ones(4), 1, g),
    "isend": lambda g: dist.isend(np.ones(3_000_000), 1, g),
}


@pytest.mark.parametrize("start", STARTED.values(), ids=STARTED)
def test_ctrl_c_ends_the_wait_for_a_work(group, rank, spare, start, request):
    """What was started goes on without the wait."""
    if rank == 0:
        work = start(group)
        request.getfixturevalue("ctrl_c")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.is_completed()
    dist.barrier(spare)


def held(group):
    """What the group's link holds on to, since MPI may still use it: arrays' owners."""
    lists = [each for each in gc.get_referents(group._endpoint.link) if type(each) is list]
    calls = [each for pairs in lists for pair in pairs for each in pair if each is not None]
    arrays = [array for each in calls for array in (each if type(each) is list else [each])]
    return [getattr(array, "owner", array) for array in arrays]


@pytest.mark.parametrize("count", [1000, 300_000])
def test_what_mpi_may_still_use_stays_after_a_timeout(group, rank, spare, count):
    """The array of a collective of MPI's own that is late is held: MPI may write to it as long as
    it likes."""
    dist.barrier(group)
    if rank == 0:
        array = np.ones(count)
        with pytest.raises(dist.DistTimeoutError):
            dist.all_reduce(array, group=group, timeout=0.2)
        assert group.windows or any(each is array for each in held(group))
    dist.barrier(spare)


def test_what_a_piece_lies_in_stays_after_a_timeout(group, rank, spare, monkeypatch):
    """An array with gaps goes through memory of cydist's own; a later piece of it is late."""
    monkeypatch.setattr(chunking, "WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1 << 15)
    array = np.ones((20_000, 2))[:, 0]
    make, owners = _native.empty, []

    def noted(size, like):
        made = make(size, like)
        owners.append(made.owner)
        return made

    if rank == 0:
        monkeypatch.setattr(chunking._native, "empty", noted)
        with pytest.raises(dist.DistTimeoutError):
            dist.all_reduce(array, group=group, timeout=0.5)
        assert group.windows or any(each is owners[0] for each in held(group))
    else:
        call = CallRecord("all_reduce", group.next_seq(), time.monotonic() + 20)
        asked = _native.asarray(array)
        next(chunking.chunks(group, call, "all_reduce", asked, op=dist.ReduceOp.SUM))
        part = _native.asarray(np.ones((1 << 15) // 8))
        group.run_collective(
            call, "all_reduce", [part], [part], part.nbytes, op=dist.ReduceOp.SUM, count=part.size
        )
    dist.barrier(spare)


def test_destroyed_groups_say_so(rank, spare):
    """A call on a destroyed group is an error of its own."""
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(dist.GroupDestroyedError):
        dist.barrier(group)
    dist.barrier(spare)

"""Groups that end while something is under way on them."""

import contextlib
import gc
import threading
import time
from weakref import ref

import numpy as np
import pytest
from valid_calls import CALLS, OBJECT_CALLS

import cydist as dist
from cydist.api import process_groups
from cydist.testing import run_threads

TRANSPORTS = ["inproc", "tcp", "shm"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_ends_an_asynchronous_collective(transport):
    """Its Work raises GroupDestroyedError; the memory that it uses outlives it."""

    def body(rank):
        group = dist.new_group([0, 1])
        works = []
        if rank == 0:
            works = [dist.all_reduce(np.ones(1000), group=group, async_op=True)]
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()
        for work in works:
            with pytest.raises(dist.GroupDestroyedError):
                work.wait(30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_ends_a_receive(transport):
    """A receive that nobody answers is over, whether it is waited for or asked about."""

    def body(rank):
        group = dist.new_group([0, 1])
        waited, asked = (dist.irecv(np.zeros(3), 1 - rank, group) for _ in range(2))
        dist.barrier()
        dist.destroy_process_group(group)
        assert asked.is_completed()
        with pytest.raises(dist.GroupDestroyedError):
            waited.wait(30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort_ends_a_receive_that_nobody_waits_for(transport):
    """is_completed sees the end, and exception says why."""

    def body(rank):
        group = dist.new_group([0, 1])
        work = dist.irecv(np.zeros(3), 1 - rank, group)
        dist.abort(group)
        assert work.is_completed()
        assert isinstance(work.exception(), dist.GroupFailedError)

    run_threads(body, 2, transport)


def test_a_blocking_call_keeps_its_timeout_behind_an_asynchronous_one():
    """Its turn never comes: DistTimeoutError at its own timeout, and the group has failed."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            pending = dist.all_reduce(np.ones(3), group=group, async_op=True)
            with pytest.raises(dist.DistTimeoutError, match="issued before it"):
                dist.all_reduce(np.ones(3), group=group, timeout=0.1)
            with pytest.raises(dist.GroupFailedError):
                dist.barrier(group)
            dist.abort(group)
            with pytest.raises(dist.GroupFailedError):
                pending.wait(30)

    run_threads(body, 2)


def test_a_group_outlives_one_of_an_older_world_with_its_name():
    """Destroying a group of a world that has ended leaves the new world's alone."""

    def body(rank):
        old = dist.new_group([0])
        dist.destroy_process_group()
        dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
        new = dist.new_group([0])
        assert old.group_name == new.group_name
        dist.destroy_process_group(old)
        return dist.get_pg_count()

    assert [2] == run_threads(body, 1)


CALLS_WITHOUT_THE_LAST = {
    "all_reduce": lambda group: dist.all_reduce(np.ones(4), group=group),
    "derived": lambda group: dist.all_gather_object([None] * 3, 1, group=group),
    "recv": lambda group: dist.recv(np.ones(4), 2, group),
    "irecv": lambda group: dist.irecv(np.ones(4), 2, group).wait(),
    "send": lambda group: dist.send(np.ones(300_000), 2, group),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("call", CALLS_WITHOUT_THE_LAST.values(), ids=CALLS_WITHOUT_THE_LAST)
def test_who_left_a_group_is_not_waited_for(jobs, transport, call):
    """The others get PeerFailedError, though the rank lives on in its other groups."""

    def body(rank):
        group = dist.new_group([0, 1, 2])
        dist.barrier(group)
        if rank == 2:
            dist.destroy_process_group(group)
            dist.barrier()
        else:
            dist.barrier()
            with pytest.raises(dist.PeerFailedError, match=r"rank 2 .*was lost"):
                call(group)
        dist.barrier()

    jobs.get(transport, 3).run(body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_short_message_to_who_left_is_over(jobs, transport):
    """It is when it has been copied, whether or not anybody takes it, and fails nothing."""

    def body(rank):
        group = dist.new_group([0, 1, 2])
        if rank == 2:
            dist.destroy_process_group(group)
        dist.barrier()
        if rank == 0:
            for tag in range(3):
                dist.send(np.ones(4), 2, group, tag)
            dist.isend(np.ones(4), 2, group).wait()
            dist.send(np.full(4, 7.0), 1, group)
        if rank == 1:
            x = np.zeros(4)
            dist.recv(x, 0, group)
            assert x[0] == 7
        dist.barrier()

    jobs.get(transport, 3).run(body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receive_from_anyone_ends_when_all_others_have_left(jobs, transport):
    """Not before: one of them may still send."""

    def body(rank):
        group = dist.new_group([0, 1, 2])
        x = np.zeros(4)
        if rank == 1:
            dist.destroy_process_group(group)
        dist.barrier()
        if rank == 0:
            dist.recv(x, group=group)
            assert x[0] == 7
            with pytest.raises(dist.PeerFailedError):
                dist.recv(x, group=group)
        if rank == 2:
            dist.send(np.full(4, 7.0), 0, group)
            dist.destroy_process_group(group)
        dist.barrier()

    jobs.get(transport, 3).run(body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_rank_sent_before_it_left_arrives(jobs, transport):
    """Messages and calls in which it had done its part; the error comes after them."""

    def body(rank):
        group = dist.new_group([0, 1])
        x = np.zeros(4)
        if rank == 1:
            dist.broadcast(np.full(4, 5.0), 1, group)
            for tag in range(20):
                dist.send(np.full(4, float(tag)), 0, group, tag)
            dist.destroy_process_group(group)
        dist.barrier()
        if rank == 0:
            dist.broadcast(x, 1, group)
            assert x[0] == 5
            for tag in reversed(range(20)):
                dist.recv(x, 1, group, tag)
                assert x[0] == tag
            with pytest.raises(dist.PeerFailedError, match="it has left the group"):
                dist.recv(x, 1, group)
        dist.barrier()

    jobs.get(transport, 2).run(body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_shrank_a_group_is_not_waited_for(jobs, transport):
    """A rank that was left out learns in its next call of the old group."""

    def body(rank):
        group = dist.new_group([0, 1, 2])
        dist.barrier(group)
        if rank < 2:
            left = dist.shrink_group([2], group)
            dist.barrier(left)
        dist.barrier()
        if rank == 2:
            with pytest.raises(dist.PeerFailedError):
                dist.all_reduce(np.ones(4), group=group)
        dist.barrier()

    jobs.get(transport, 3).run(body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_twice(jobs, transport):
    """The second time does nothing."""

    def body(rank):
        group = dist.new_group([0, 1])
        for _ in range(2):
            dist.destroy_process_group(group)
        dist.barrier()

    jobs.get(transport, 2).run(body)


@pytest.mark.parametrize("call", [*CALLS, *OBJECT_CALLS, "barrier", "monitored_barrier"])
def test_use_after_destroy(jobs, call):
    """GroupDestroyedError, which names the group; the world still works."""

    def body(rank):
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        if rank == 0:
            arguments = {**CALLS, **OBJECT_CALLS}.get(call, dict)()
            with pytest.raises(dist.GroupDestroyedError, match=f"'{group.group_name}'"):
                getattr(dist, call)(group=group, **arguments)
        dist.barrier()

    jobs.get("inproc", 2).run(body)


def test_the_world_is_destroyed_once():
    """Afterwards there is none to destroy, or to use."""

    def body(rank):
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="init_process_group"):
            dist.destroy_process_group()
        with pytest.raises(ValueError, match="init_process_group"):
            dist.barrier()
        dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())

    run_threads(body, 1)


PENDING = {
    "queued collectives": lambda group: [
        dist.all_reduce(np.ones(3), group=group, async_op=True) for _ in range(3)
    ],
    "a long send": lambda group: [dist.isend(np.ones(300_000), 1, group)],
    "strided receives": lambda group: [dist.irecv(np.ones(8)[::2], 1, group) for _ in range(2)],
    "receives from anyone": lambda group: [dist.irecv(np.ones(8), None, group) for _ in range(2)],
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pending", PENDING)
def test_destroy_ends_whatever_is_under_way(jobs, transport, pending):
    """Every Work and every Future of it raises GroupDestroyedError."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 1:
            dist.barrier()  # leaving before rank 0 would end its calls, too
            dist.destroy_process_group(group)
            return
        works = PENDING[pending](group)
        futures = [work.get_future() for work in works]
        dist.destroy_process_group(group)
        for work, future in zip(works, futures, strict=True):
            with pytest.raises(dist.GroupDestroyedError):
                work.wait(30)
            assert isinstance(future.exception(30), dist.GroupDestroyedError)
        dist.barrier()

    jobs.get(transport, 2).run(body)


INSIDE = {
    "all_reduce": lambda group: dist.all_reduce(np.ones(3), group=group),
    "recv": lambda group: dist.recv(np.ones(3), 1, group),
    "monitored_barrier": lambda group: dist.monitored_barrier(group),
    "all_gather_object": lambda group: dist.all_gather_object([None] * 2, 1, group),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("call", INSIDE)
def test_destroy_ends_a_call_of_another_thread(jobs, transport, call):
    """Which raises GroupDestroyedError, whether it had begun or not."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            mine, errors, begun = process_groups.current_world(), [], threading.Event()

            def inside():
                process_groups._thread.world = mine
                begun.set()
                try:
                    INSIDE[call](group)
                except dist.DistError as error:
                    errors.append(error)

            thread = threading.Thread(target=inside, daemon=True)
            thread.start()
            assert begun.wait(30)
            dist.destroy_process_group(group)
            thread.join(30)
            assert [dist.GroupDestroyedError] == [type(error) for error in errors]
        dist.barrier()
        dist.destroy_process_group(group)

    jobs.get(transport, 2).run(body)


# Last calls: what rank 0 makes, and what the last rank makes in its place.
LAST_CALLS = {
    "root": (
        lambda group: dist.broadcast(np.zeros(3), 0, group),
        lambda group: dist.broadcast(np.zeros(3), 1, group),
        "root 0",
        "root 1",
    ),
    "another collective": (
        lambda group: dist.broadcast(np.zeros(3), 0, group),
        lambda group: dist.reduce(np.zeros(3), 0, group=group),
        "broadcast #2",
        "reduce #2",
    ),
    "a call more": (
        lambda group: dist.broadcast(np.zeros(3), 0, group),
        lambda group: None,
        "broadcast #2",
        "barrier #1",
    ),
}


def ended(group):
    """The MismatchError with which a group is destroyed; "": none."""
    try:
        dist.destroy_process_group(group)
    except dist.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("way", LAST_CALLS)
def test_ranks_that_differ_in_the_last_call_learn_of_it(transport, size, way):
    """In that call or as they destroy the group, from an error that names it."""
    usual, odd, ours, theirs = LAST_CALLS[way]

    def body(rank):
        group = dist.new_group(list(range(size)))
        dist.barrier(group)
        try:
            (odd if rank == size - 1 else usual)(group)
        except dist.MismatchError as error:
            return str(error)
        text = ended(group)
        assert "destroy" not in text
        return text

    texts = run_threads(body, size, transport)
    assert ours in texts[0]
    assert theirs in texts[0]
    if way != "a call more":  # who made none more may have left before
        assert all(ours in text and theirs in text for text in texts)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_made_no_call_of_the_group_differs_from_one_that_did(transport):
    """The latter learns of it."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            dist.broadcast(np.zeros(3), 0, group)
        text = ended(group)
        dist.barrier()
        return text

    text, other = run_threads(body, 2, transport)
    assert "This rank (0): broadcast #1 of 3 float64, root 0. Rank 1: it has left the group" in text
    assert not other


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_of_many_calls_that_no_rank_received_names_the_first_that_differs(transport):
    """A root hears nobody: the error is about the call in which ranks differ, not the last."""

    def body(rank):
        group = dist.new_group([0, 1])
        dist.barrier(group)
        try:
            for size in (3, 4, 5):
                dist.broadcast(np.zeros(size), int(rank == 1 and size == 4), group)
        except dist.MismatchError as error:
            return str(error)
        return ended(group)

    for text in run_threads(body, 2, transport):
        assert "broadcast #3, root 0" in text
        assert "broadcast #3, root 1" in text
        assert "#4" not in text.partition("\n")[0]  # its last calls follow


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_destroys_the_group_keeps_nobody(transport):
    """A broadcast's root waits for a moment, and leaves without an error."""

    def body(rank):
        group = dist.new_group([0, 1])
        dist.broadcast(np.zeros(3), 0, group)
        if rank == 0:
            dist.destroy_process_group(group)
        dist.barrier()

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_destroyed_in_another_order_do_not_wait_for_each_other_for_long(transport):
    """Each in the order of its own, after calls that nobody hears of."""

    def body(rank):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            dist.broadcast(np.zeros(3), 0, group)
        for group in groups[:: 1 - 2 * rank]:
            dist.destroy_process_group(group)
        dist.barrier()

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_on_its_way_is_not_replaced(transport):
    """A rank that destroys the group in `finally` keeps its own error."""

    def fails(group):
        try:
            raise ZeroDivisionError
        finally:
            dist.destroy_process_group(group)

    def body(rank):
        group = dist.new_group([0, 1])
        dist.barrier(group)
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                fails(group)
        else:
            dist.broadcast(np.zeros(3), 0, group)
            assert "broadcast #2" in ended(group)
        dist.barrier()

    run_threads(body, 2, transport)


class Local:
    """What a caller's frame holds."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("array", [np.ones(3), np.ones((2, 4))[:, ::2]], ids=["fast", "general"])
def test_a_failed_group_that_is_destroyed_keeps_no_frames(array, transport):
    """The frames of the failed call go, and the group too, without the garbage collector. With it
    they would stay for tens of jobs, each with its connections and arrays."""

    def failed_call(group, kept):
        local = Local()
        kept.append(ref(local))
        group.timeout = 0.001  # a timeout of the call's own would leave the fast path
        with contextlib.suppress(dist.DistTimeoutError):  # pytest.raises keeps frames itself
            dist.all_reduce(array.copy(), group=group)

    def body(rank):
        kept = []
        group = dist.new_group([0, 1])
        for _ in range(2):  # after which the fast path knows the algorithm
            dist.all_reduce(array.copy(), group=group)
        if rank == 0:
            failed_call(group, kept)
        dist.barrier()
        dist.destroy_process_group(group)
        assert rank == 1 or isinstance(group.error, dist.DistTimeoutError)
        kept.append(ref(group))
        del group
        dist.barrier()
        end = time.monotonic() + 30  # a thread that asked a peer may still be at it
        while any(each() for each in kept) and time.monotonic() < end:
            time.sleep(0.01)
        return [each() for each in kept]

    gc.disable()
    try:
        assert run_threads(body, 2, transport) == [[None, None], [None]]
    finally:
        gc.enable()

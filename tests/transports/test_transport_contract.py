"""What every transport with messages promises, and what inproc's windows promise."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transport_ranks import Ranks, done, eventually, run, soon, status_of, transports

from cydist import _native

SMALL, LARGE = 8, 600_000  # bytes: kept by the receiver, or offered to it


@pytest.fixture(params=transports())
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Makes the ranks of one transport; all of them leave at the end."""
    made = []

    def make(size: int = 2, **options: object) -> Ranks:
        made.append(Ranks(request.param, size, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(params=[0, SMALL, LARGE], ids=["empty", "small", "large"])
def nbytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    """Bytes that a shifted or mixed copy does not equal."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_received_before_sent(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """A receive that waits gets the message."""
    a, b = ranks().group()
    sent, got = pattern(nbytes), np.zeros(nbytes, np.uint8)
    receive = b.irecv(got, 0, 5)
    send = a.isend(sent, 1, 5)
    run(lambda: done(receive), lambda: done(send))
    assert got.tobytes() == sent.tobytes()


def test_sent_before_received(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """A message that nobody asked for yet is there when somebody does."""
    a, b = ranks().group()
    sent, got = pattern(nbytes), np.zeros(nbytes, np.uint8)
    send = a.isend(sent, 1, 5)
    if nbytes <= SMALL:
        done(send)
    run(lambda: done(send), lambda: done(b.irecv(got, 0, 5)))
    assert got.tobytes() == sent.tobytes()


def test_small_sends_need_no_receive(ranks: Callable[..., Ranks]) -> None:
    """A small send completes though nobody receives, so its memory can be used again."""
    a, b = ranks().group()
    buffer = np.zeros(1, np.int64)
    for value in range(50):
        buffer[0] = value
        done(a.isend(buffer, 1, 5))
    got = np.zeros(50, np.int64)
    for i in range(50):
        done(b.irecv(got[i : i + 1], 0, 5))
    assert got.tolist() == list(range(50))


@pytest.mark.parametrize("sizes", [[SMALL] * 3, [LARGE, SMALL, LARGE]], ids=["alike", "mixed"])
def test_order_per_pair_and_tag(ranks: Callable[..., Ranks], sizes: list[int]) -> None:
    """Messages of one tag arrive in the order they were sent, whatever their sizes."""
    a, b = ranks().group()
    sent = [pattern(size, seed) for seed, size in enumerate(sizes)]
    got = [np.zeros(size, np.uint8) for size in sizes]
    sends = [a.isend(array, 1, 5) for array in sent]
    receives = [b.irecv(array, 0, 5) for array in got]
    run(lambda: done(*sends), lambda: done(*receives))
    assert [array.tobytes() for array in got] == [array.tobytes() for array in sent]


def test_tags_are_independent(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """A message is received by its tag, though others of its sender wait before it."""
    a, b = ranks().group()
    sent = {tag: pattern(nbytes, tag) for tag in (1, 2, 3)}
    sends = [a.isend(sent[tag], 1, tag) for tag in (1, 2, 3)]
    got = {tag: np.zeros(nbytes, np.uint8) for tag in (3, 1, 2)}
    run(
        lambda: done(*sends),
        lambda: [done(b.irecv(got[tag], 0, tag)) for tag in (3, 1, 2)],
    )
    assert {tag: got[tag].tobytes() for tag in got} == {tag: sent[tag].tobytes() for tag in sent}


def test_any_source(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """A receive from anyone gets a message from each, and says from whom."""
    groups = ranks(3).group()
    sends = [groups[r].isend(pattern(nbytes, r), 2, 5) for r in (0, 1)]
    seen = {}

    def receive_two() -> None:
        for _ in range(2):
            got = np.zeros(nbytes, np.uint8)
            message = groups[2].irecv(got, -1, 5)
            done(message)
            seen[message.source] = got.tobytes()

    run(receive_two, lambda: done(*sends))
    assert seen == {r: pattern(nbytes, r).tobytes() for r in (0, 1)}


def test_source_is_the_group_rank(ranks: Callable[..., Ranks]) -> None:
    """In a subgroup the source is the rank there, not the link's number."""
    low, high = ranks(3).group(context=9, members=[2, 1])
    got = np.zeros(1)
    message = high.irecv(got, -1, 0)
    done(low.isend(np.ones(1), 1, 0), message)
    assert message.source == 0


def test_both_sides_receive_then_send(ranks: Callable[..., Ranks]) -> None:
    """irecv then isend of 8 MB on both sides completes: nobody waits for the other to read."""
    groups = ranks().group()
    data = [pattern(8_000_000, r) for r in (0, 1)]
    got = [np.zeros(8_000_000, np.uint8) for _ in (0, 1)]

    def exchange(me: int) -> None:
        receive = groups[me].irecv(got[me], 1 - me, 5)
        send = groups[me].isend(data[me], 1 - me, 5)
        done(send, receive)

    run(lambda: exchange(0), lambda: exchange(1))
    assert got[0].tobytes() == data[1].tobytes()
    assert got[1].tobytes() == data[0].tobytes()


def test_groups_do_not_wait_for_each_other(ranks: Callable[..., Ranks]) -> None:
    """Large messages that nobody receives in one group leave another group's way free."""
    world = ranks()
    blocked, free = world.group(context=1), world.group(context=2)
    stuck = [blocked[0].isend(pattern(LARGE, i), 1, 5) for i in range(20)]
    got = np.zeros(LARGE, np.uint8)
    send = free[0].isend(pattern(LARGE), 1, 5)
    run(lambda: done(send), lambda: done(free[1].irecv(got, 0, 5)))
    assert got.tobytes() == pattern(LARGE).tobytes()
    assert not any(message.test() for message in stuck)
    for message in stuck:
        message.cancel()


@pytest.mark.parametrize("first", ["send", "receive"])
def test_other_size_is_a_mismatch(ranks: Callable[..., Ranks], nbytes: int, first: str) -> None:
    """A message of another size ends the receive with both sizes; the send is complete."""
    a, b = ranks().group()
    got = np.zeros(nbytes + 1, np.uint8)
    if first == "send":
        send, receive = a.isend(pattern(nbytes), 1, 5), b.irecv(got, 0, 5)
    else:
        receive, send = b.irecv(got, 0, 5), a.isend(pattern(nbytes), 1, 5)
    run(lambda: send.wait(soon()), lambda: receive.wait(soon()))
    send.check()
    with pytest.raises(_native.CallError) as failed:
        receive.check()
    assert failed.value.status == "mismatch"
    assert f"({nbytes} bytes)" in failed.value.theirs
    assert f"({nbytes + 1} bytes)" in failed.value.ours
    assert not got.any()


def test_other_dtype_is_a_mismatch(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """A message of the same size and another dtype ends the receive as well."""
    a, b = ranks().group()
    send = a.isend(pattern(nbytes).view(np.float32), 1, 5)
    receive = b.irecv(np.zeros(nbytes // 4, np.int32), 0, 5)
    run(lambda: send.wait(soon()), lambda: receive.wait(soon()))
    with pytest.raises(_native.CallError, match="mismatch") as failed:
        receive.check()
    assert "float32" in failed.value.theirs


def test_a_mismatch_leaves_the_stream_whole(ranks: Callable[..., Ranks], nbytes: int) -> None:
    """What follows a mismatched message arrives as it should."""
    a, b = ranks().group()
    wrong = b.irecv(np.zeros(nbytes + 4, np.uint8), 0, 5)
    sends = [a.isend(pattern(nbytes), 1, 5), a.isend(pattern(SMALL), 1, 6)]
    got = np.zeros(SMALL, np.uint8)
    right = b.irecv(got, 0, 6)
    run(lambda: [m.wait(soon()) for m in sends], lambda: [wrong.wait(soon()), done(right)])
    assert status_of(wrong) == "mismatch"
    assert got.tobytes() == pattern(SMALL).tobytes()


def test_deadline(ranks: Callable[..., Ranks]) -> None:
    """A wait ends at its deadline, not before; the receive is still posted and can complete."""
    a, b = ranks().group()
    got = np.zeros(1)
    receive = b.irecv(got, 0, 5)
    started = time.monotonic()
    assert not receive.wait(soon(0.1))
    assert 0.1 <= time.monotonic() - started < 5
    run(lambda: done(a.isend(np.ones(1), 1, 5)), lambda: done(receive))
    assert got[0] == 1


def test_abort_ends_waits(ranks: Callable[..., Ranks]) -> None:
    """abort() ends a wait that would last; other groups of the link go on."""
    world = ranks()
    (_, b), (c, d) = world.group(context=1), world.group(context=2)
    receive = b.irecv(np.zeros(1), 0, 5)
    run(lambda: receive.wait(soon()), b.abort)
    assert status_of(receive) == "aborted"
    got = np.zeros(1)
    run(lambda: done(c.isend(np.ones(1), 1, 5)), lambda: done(d.irecv(got, 0, 5)))
    assert got[0] == 1


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "fresh"])
def test_cancelled_receive_is_not_matched(
    ranks: Callable[..., Ranks], nbytes: int, connected: bool
) -> None:
    """After cancel() the memory is the caller's, and the next receive gets the message."""
    a, b = ranks().group()
    if connected:
        run(lambda: done(a.isend(np.ones(1), 1, 0)), lambda: done(b.irecv(np.ones(1), 0, 0)))
    untouched, got = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    b.irecv(untouched, 0, 5).cancel()
    receive = b.irecv(got, 0, 5)
    run(lambda: done(a.isend(pattern(nbytes), 1, 5)), lambda: done(receive))
    assert not untouched.any()
    assert got.tobytes() == pattern(nbytes).tobytes()


def test_cancelled_large_send_is_not_received(ranks: Callable[..., Ranks]) -> None:
    """A large send that was withdrawn never arrives; the next one with its tag does."""
    a, b = ranks().group()
    first = a.isend(pattern(LARGE, 1), 1, 5)
    assert not first.test()
    first.cancel()
    got = np.zeros(LARGE, np.uint8)
    send = a.isend(pattern(LARGE, 2), 1, 5)
    run(lambda: done(send), lambda: done(b.irecv(got, 0, 5)))
    assert got.tobytes() == pattern(LARGE, 2).tobytes()


def test_leaving_ends_receives_of_others(ranks: Callable[..., Ranks]) -> None:
    """Who waits for a rank that leaves learns of it, and so does who asks later."""
    world = ranks(3)
    groups = world.group()
    run(lambda: done(groups[0].isend(np.ones(1), 1, 0)),
        lambda: done(groups[1].irecv(np.ones(1), 0, 0)))  # fmt: skip
    assert world.links[1].lost(0) == ""
    receive = groups[1].irecv(np.zeros(1), 0, 5)
    run(lambda: receive.wait(soon()), lambda: world.leave(0))
    assert status_of(receive) == "peer_lost"
    assert world.links[1].lost(0).endswith("left")
    later = groups[1].irecv(np.zeros(1), 0, 6)
    later.wait(soon())
    assert status_of(later) == "peer_lost"
    send = groups[1].isend(np.zeros(1), 0, 6)
    send.wait(soon())
    assert status_of(send) == "peer_lost"


def test_leaving_without_a_connection(ranks: Callable[..., Ranks]) -> None:
    """A rank that left before anybody spoke to it is missed as well."""
    world = ranks()
    groups = world.group()
    world.leave(0)
    receive = groups[1].irecv(np.zeros(1), 0, 5)
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"


def test_what_was_sent_before_leaving_arrives(ranks: Callable[..., Ranks]) -> None:
    """A small message is received though its sender has left meanwhile."""
    world = ranks()
    a, b = world.group()
    done(a.isend(np.full(1, 7.0), 1, 5))
    world.leave(0)
    got = np.zeros(1)
    done(b.irecv(got, 0, 5))
    assert got[0] == 7


def test_others_are_untouched_by_a_departed_rank(ranks: Callable[..., Ranks]) -> None:
    """The ranks that stay go on talking, to anyone who is left."""
    world = ranks(3)
    groups = world.group()
    world.leave(0)
    got = np.zeros(1)
    receive = groups[2].irecv(got, -1, 5)
    run(lambda: done(groups[1].isend(np.ones(1), 2, 5)), lambda: done(receive))
    assert got[0] == 1
    assert receive.source == 1


def test_own_leave_ends_own_requests(ranks: Callable[..., Ranks]) -> None:
    """A link that closes ends its own receives with "closed"."""
    world = ranks()
    _, b = world.group()
    receive = b.irecv(np.zeros(1), 0, 5)
    world.leave(1)
    receive.wait(soon())
    assert status_of(receive) == "closed"
    assert status_of(b.irecv(np.zeros(1), 0, 5)) == "closed"


def test_closing_a_group_drops_what_arrived(ranks: Callable[..., Ranks]) -> None:
    """A group that ends leaves nothing behind; large sends to it are told."""
    world = ranks()
    a, b = world.group()
    send = a.isend(pattern(LARGE), 1, 5)
    done(a.isend(np.ones(1), 1, 6))
    done(a.isend(np.ones(1), 1, 7))
    done(b.irecv(np.ones(1), 0, 7))
    b.close()
    send.wait(soon())
    assert status_of(send) == "peer_lost"
    assert world.pending(1) == (0, 0)


def test_closing_a_group_ends_what_it_has_under_way(ranks: Callable[..., Ranks]) -> None:
    """Sends and receives of a group that ends are "closed"; those of its peer are not touched."""
    a, b = ranks().group()
    large = pattern(LARGE)
    run(lambda: done(a.isend(np.ones(1), 1, 0)), lambda: done(b.irecv(np.ones(1), 0, 0)))
    send, receive = a.isend(large, 1, 5), a.irecv(np.zeros(1), 1, 6)
    other = b.irecv(np.zeros(1), 0, 7)
    a.close()
    assert [status_of(send), status_of(receive)] == ["closed", "closed"]
    assert not other.test()


def test_messages_may_outlive_their_group(ranks: Callable[..., Ranks]) -> None:
    """Dropping a message after its group was closed harms nobody."""
    world = ranks()
    a, b = world.group()
    messages = [a.isend(pattern(LARGE), 1, tag) for tag in range(5)]
    messages += [b.irecv(np.zeros(LARGE, np.uint8), 0, tag) for tag in range(3)]
    a.close()
    del messages
    b.close()
    got = np.zeros(1)
    c, d = world.group(context=2)
    run(lambda: done(c.isend(np.ones(1), 1, 0)), lambda: done(d.irecv(got, 0, 0)))
    assert got[0] == 1


def test_many_threads_of_one_rank(ranks: Callable[..., Ranks]) -> None:
    """Eight groups, each with a thread per rank, share a link without mixing or hanging."""
    world = ranks()
    pairs = [world.group(context=10 + i) for i in range(8)]
    sums = [0] * 8

    def ping(i: int) -> None:
        out, back = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for value in range(50):
            out[0] = value * 8 + i
            done(pairs[i][0].isend(out, 1, 1), pairs[i][0].irecv(back, 1, 2))
            sums[i] += int(back[0])

    def pong(i: int) -> None:
        got = np.zeros(1, np.int64)
        for _ in range(50):
            done(pairs[i][1].irecv(got, 0, 1))
            done(pairs[i][1].isend(got, 0, 2))

    run(*[lambda i=i: ping(i) for i in range(8)], *[lambda i=i: pong(i) for i in range(8)])
    assert sums == [sum(value * 8 + i for value in range(50)) for i in range(8)]


def test_progress_while_nobody_waits(ranks: Callable[..., Ranks]) -> None:
    """Posted messages complete while both ranks do something else."""
    a, b = ranks().group()
    got = np.zeros(4_000_000, np.uint8)
    receive = b.irecv(got, 0, 5)
    send = a.isend(pattern(4_000_000), 1, 5)
    # The source is set when a message has matched; reading it makes no progress.
    limit = time.monotonic() + 20
    while not np.array_equal(got[-64:], pattern(4_000_000)[-64:]):
        assert time.monotonic() < limit
        threading.Event().wait(0.001)
    done(send, receive)
    assert got.tobytes() == pattern(4_000_000).tobytes()


def test_progress_begins_again_after_a_pause(ranks: Callable[..., Ranks]) -> None:
    """Large messages move while nobody waits, however long nothing had been under way."""
    a, b = ranks().group()
    for pause in (0.0, 0.06, 0.13, 0.19, 0.24, 0.3):
        sent, got = pattern(LARGE), np.zeros(LARGE, np.uint8)
        messages = [b.irecv(got, 0, 5), a.isend(sent, 1, 5)]
        eventually(lambda messages=messages: all(message.over for message in messages))
        assert got.tobytes() == sent.tobytes()
        threading.Event().wait(pause)


def costs() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_ten_thousand_groups_cost_no_descriptor_and_no_thread(
    ranks: Callable[..., Ranks],
) -> None:
    """Groups share their link: 10,000 more need no descriptor, no thread, and still work."""
    world = ranks()
    world.group()
    before = costs()
    groups = [world.group(context=100 + i) for i in range(10_000)]
    after = costs()
    assert [a <= b for a, b in zip(after, before, strict=True)] == [True, True]
    got = np.zeros(1)
    a, b = groups[-1]
    run(lambda: done(a.isend(np.ones(1), 1, 5)), lambda: done(b.irecv(got, 0, 5)))
    assert got[0] == 1
    del groups
    gc.collect()

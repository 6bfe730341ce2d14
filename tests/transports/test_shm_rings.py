"""Messages through rings in shared memory: what differs from sockets, and what must not."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_ranks import DEADLINE, Group, Ranks, done, run, soon, status_of
from two_process_job import TwoProcessJob

import cydist as dist
from cydist import _native
from cydist.errors import PeerFailedError

RING = 1 << 18  # bytes of a ring's data
CELL = 1 << 19  # bytes of the cell behind it
PAGE = 4096
LOCK_AT = 40  # where the memory's table has its lock, behind its version and token


@pytest.fixture
def world() -> Iterator[Ranks]:
    """Two ranks that share memory."""
    with closing(Ranks("shm", 2)) as ranks:
        yield ranks


@pytest.fixture
def pair(world: Ranks) -> list[Group]:
    """Both ends of a group."""
    return world.group()


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    """Bytes that a shifted or mixed copy does not equal."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def sockets(world: Ranks) -> list[int]:
    """Connections that each rank has made."""
    return [connections.link.statistics()["made"] for connections in world.connections]


def receive(group: Group, peer: int, tag: int, nbytes: int) -> bytes:
    """A message, waited for."""
    got = np.zeros(nbytes, np.uint8)
    done(group.irecv(got, peer, tag))
    return got.tobytes()


# The memory


def test_the_first_message_takes_the_rings(world: Ranks) -> None:
    """Who never talks costs nothing; who talks takes one ring each way, once, and no socket."""
    a, b = world.group()
    memory = world.links[0].memory
    before = memory.used()
    done(a.isend(np.ones(1), 1, 0))
    taken = memory.used() - before
    assert 2 * (RING + CELL) < taken < 2 * (RING + CELL) + PAGE
    for _ in range(100):
        run(lambda: done(b.isend(pattern(8), 0, 1)), lambda: receive(a, 1, 1, 8))
    assert memory.used() - before == taken
    assert sockets(world) == [0, 0]


@contextmanager
def table_is_locked(memory: _native.SharedMemory) -> Iterator[None]:
    """As if a rank had been stopped while it changed the table of the memory."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(memory.fd, PAGE) as head:
        place = ctypes.c_char.from_buffer(head, LOCK_AT)
        assert libc.pthread_mutex_lock(ctypes.byref(place)) == 0
        try:
            yield
        finally:
            libc.pthread_mutex_unlock(ctypes.byref(place))
            del place


def test_a_first_message_waits_for_no_third_rank(world: Ranks, pair: list[Group]) -> None:
    """Who is stopped while it changes the table of the memory stops nobody's messages."""
    link = world.links[0]
    assert isinstance(link, _native.ShmLink)
    with ThreadPoolExecutor(2) as threads, table_is_locked(link.memory):
        sent = threads.submit(pair[0].isend, pattern(100), 1, 7)
        received = threads.submit(receive, pair[1], 0, 7, 100)
        waited_for = wait([sent, received], timeout=DEADLINE).not_done
    assert not waited_for
    assert received.result() == pattern(100).tobytes()
    assert sockets(world) == [0, 0]


def test_without_memory_messages_go_over_sockets() -> None:
    """When the memory is spent both ranks of a pair see it, a rank that sends first."""
    least = PAGE
    while True:
        try:
            ranks = Ranks("shm", 2, memory=least)
            break
        except ValueError:
            least += PAGE
    with closing(ranks):
        a, b = ranks.group()
        sent = pattern(300_000)
        send = a.isend(sent, 1, 5)
        got: list[bytes] = []
        run(lambda: done(send), lambda: got.append(receive(b, 0, 5, 300_000)))
        assert got == [sent.tobytes()]
        run(lambda: done(b.isend(sent[:9], 0, 6)), lambda: receive(a, 1, 6, 9))
        assert sum(sockets(ranks)) >= 1


@pytest.mark.parametrize(("pages", "near"), [(3, False), (30, True)], ids=["none", "small"])
def test_rings_are_large_enough_to_wait_for(pages: int, near: bool) -> None:
    """With little memory a pair has rings whose writer goes on when they were full, or none."""
    least = PAGE
    while True:
        try:
            ranks = Ranks("shm", 2, memory=least)
            break
        except ValueError:
            least += PAGE
    ranks.close()
    with closing(Ranks("shm", 2, memory=least + pages * PAGE)) as ranks:
        a, b = ranks.group()
        sent = [pattern(60_000, seed) for seed in range(20)]
        sends = [a.isend(array, 1, 5) for array in sent]
        got: list[bytes] = []
        run(
            lambda: done(*sends),
            lambda: got.extend(receive(b, 0, 5, 60_000) for _ in sent),
        )
        assert got == [array.tobytes() for array in sent]
        assert (sum(sockets(ranks)) == 0) is near


# Bytes


@given(st.lists(st.integers(0, 3 * RING), min_size=1, max_size=12), st.integers(0, 5))
def test_any_sizes_at_any_offset(sizes: list[int], offset: int) -> None:
    """Messages that wrap around, fill the ring, or are larger than it arrive as they were sent."""
    with closing(Ranks("shm", 2)) as ranks:
        a, b = ranks.group()
        for _ in range(offset):
            done(a.isend(pattern(50_001), 1, 0))
            receive(b, 0, 0, 50_001)
        sends = [a.isend(pattern(size, seed), 1, 5) for seed, size in enumerate(sizes)]

        def take() -> None:
            for seed, size in enumerate(sizes):
                assert receive(b, 0, 5, size) == pattern(size, seed).tobytes()

        run(lambda: done(*sends), take)


def test_a_full_ring_is_waited_for(pair: list[Group]) -> None:
    """Small sends that no ring holds are not complete until the receiver reads; then all arrive."""
    a, b = pair
    sent = [pattern(60_000, seed) for seed in range(20)]
    sends = [a.isend(array, 1, 5) for array in sent]
    assert not sends[-1].test()

    def take() -> None:
        for array in sent:
            assert receive(b, 0, 5, 60_000) == array.tobytes()

    run(lambda: done(*sends), take)


def test_frames_stay_whole_while_a_full_ring_is_read(pair: list[Group]) -> None:
    """Room that the reader makes while a header is written in part is for the rest of it: of many
    short messages through a full ring every one arrives."""
    a, b = pair
    turns, messages = 40, 2500
    sent = [np.full(128, number % 251, np.uint8) for number in range(messages)]

    def give() -> None:
        for turn in range(turns):
            done(*[a.isend(array, 1, turn) for array in sent])

    def take() -> None:
        got = np.zeros((messages, 128), np.uint8)
        for turn in range(turns):
            got.fill(255)
            done(*[b.irecv(row, 0, turn) for row in got])
            assert (got == np.array(sent)).all()

    run(give, take)


def test_large_and_small_both_ways(pair: list[Group]) -> None:
    """Many tags, large messages among small ones, both directions at once: each finds its place."""
    sizes = [8, 2_000_000, 0, 70_000, 65_536, 65_537, 1, 5_000_000, 16_384, 300_001]

    def body(me: int) -> None:
        got = [np.zeros(size, np.uint8) for size in sizes]
        receives = [pair[me].irecv(array, 1 - me, tag) for tag, array in enumerate(got)]
        sent = [pattern(size, 10 * me + tag) for tag, size in enumerate(sizes)]
        sends = [pair[me].isend(sent[tag], 1 - me, tag) for tag in reversed(range(len(sizes)))]
        done(*sends, *receives)
        for tag, size in enumerate(sizes):
            assert got[tag].tobytes() == pattern(size, 10 * (1 - me) + tag).tobytes()

    run(lambda: body(0), lambda: body(1))


def test_a_send_that_is_withdrawn_half_written(pair: list[Group]) -> None:
    """The stream stays whole: what follows arrives, the withdrawn message does not."""
    a, b = pair
    first = a.isend(pattern(60_000, 1), 1, 5)
    half = [a.isend(pattern(60_000, 2), 1, 6) for _ in range(10)]
    for message in half[1:]:
        message.cancel()
    last = a.isend(pattern(1000, 3), 1, 7)
    run(
        lambda: done(first, last),
        lambda: [receive(b, 0, 5, 60_000), receive(b, 0, 7, 1000)],
    )
    assert receive(b, 0, 6, 60_000) == pattern(60_000, 2).tobytes()


def test_threads_share_a_ring(pair: list[Group]) -> None:
    """Two threads on each side, each with a tag of its own, never mix their messages."""

    def side(me: int, tag: int) -> None:
        for turn in range(200):
            sent, got = np.full(500, turn + tag), np.zeros(500, int)
            receiving = pair[me].irecv(got, 1 - me, tag)
            done(pair[me].isend(sent, 1 - me, tag), receiving)
            assert (got == turn + tag).all()

    run(*[lambda me=me, tag=tag: side(me, tag) for me in (0, 1) for tag in (1000, 2000)])


# Sleeping and waking


def wake_each_other(world: Ranks, pair: list[Group]) -> None:
    """Send messages in turn, before, while and after their receiver falls asleep."""
    for connections in world.connections:
        connections.link.share_cores(1 << 20)  # never spin

    def side(me: int) -> None:
        value = np.zeros(1)
        for turn in range(300):
            if turn % 2 == me:
                until = time.monotonic() + 0.00001 * turn
                while time.monotonic() < until:
                    pass
                done(pair[me].isend(np.full(1, float(turn)), 1 - me, 3))
            else:
                done(pair[me].irecv(value, 1 - me, 3))
                assert value[0] == turn

    run(lambda: side(0), lambda: side(1))


def test_a_sleeping_rank_is_woken(world: Ranks, pair: list[Group]) -> None:
    """Whenever a message comes, it is heard."""
    wake_each_other(world, pair)


def test_waking_another_rank_opens_nothing(world: Ranks, pair: list[Group]) -> None:
    """The bells of two ranks are open once they have talked: a full table harms nobody later."""
    for sender in (0, 1):
        done(pair[sender].isend(pattern(8), 1 - sender, 3))
        receive(pair[1 - sender], sender, 3, 8)
    before = len(os.listdir("/proc/self/fd"))
    wake_each_other(world, pair)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_that_sleeps_until_there_is_room_is_woken(world: Ranks, pair: list[Group]) -> None:
    """A sender that sleeps because the ring is full goes on when the receiver begins to read."""
    a, b = pair
    asleep = threading.Event()

    def send() -> None:
        sends = [a.isend(pattern(60_000, seed), 1, 5) for seed in range(20)]
        assert not sends[-1].wait(soon(0.1))
        asleep.set()
        done(*sends)

    def take() -> None:
        assert asleep.wait(20)
        for seed in range(20):
            assert receive(b, 0, 5, 60_000) == pattern(60_000, seed).tobytes()

    run(send, take)


# The end


def test_what_was_written_before_leaving_arrives(world: Ranks, pair: list[Group]) -> None:
    """All that fitted into the ring is read after its writer has left; then the writer is gone."""
    a, b = pair
    done(*[a.isend(pattern(50_000, seed), 1, 5) for seed in range(4)])
    world.leave(0)
    for seed in range(4):
        assert receive(b, 0, 5, 50_000) == pattern(50_000, seed).tobytes()
    last = b.irecv(np.zeros(1), 0, 5)
    last.wait(soon())
    assert status_of(last) == "peer_lost"


def test_a_departed_rank_that_had_more_to_write_is_lost(world: Ranks, pair: list[Group]) -> None:
    """Half a message is never given to anybody."""
    a, b = pair
    sends = [a.isend(pattern(60_000, seed), 1, 5) for seed in range(20)]
    world.leave(0)
    assert status_of(sends[-1]) == "closed"
    ends = []
    for seed in range(20):
        got = np.zeros(60_000, np.uint8)
        message = b.irecv(got, 0, 5)
        message.wait(soon())
        ends.append(status_of(message))
        if ends[-1] == "ok":
            assert got.tobytes() == pattern(60_000, seed).tobytes()
    assert ends == sorted(ends)
    assert set(ends) == {"ok", "peer_lost"}


DIES = """
for value in range(5):
    dist.send(np.full(1000, value), 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_dead_rank_had_written_arrives(tmp_path: Path) -> None:
    """First its messages, then PeerFailedError."""
    with TwoProcessJob(tmp_path, DIES) as other:

        def body() -> list[int]:
            other.process.wait(30)
            x = np.zeros(1000, int)
            values = []
            for _ in range(5):
                assert dist.recv(x, 1) == 1
                values.append(int(x[0]))
            with pytest.raises(PeerFailedError, match="rank 1"):
                dist.recv(x, 1)
            return values

        assert other.rank_0(body) == [0, 1, 2, 3, 4]


def test_a_link_of_sockets_has_no_rings() -> None:
    """Ranks that share no memory connect, as ever."""
    with closing(Ranks("tcp", 2)) as ranks:
        a, b = ranks.group()
        assert isinstance(ranks.links[0], _native.TcpLink)
        run(lambda: done(a.isend(pattern(8), 1, 0)), lambda: receive(b, 0, 0, 8))
        assert sum(sockets(ranks)) >= 1

"""Messages in cells, which go to their receivers: what an answer reuses, and what is refused."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_ranks import Group, Ranks, done, run, soon, status_of

LEAST, MOST = 1024, 1 << 19  # bytes of a message in a cell
PORTION = 16384  # of it, which its receiver may copy before the next is there
RING = 1 << 18
MAGIC = struct.pack("=I", 0x05645943)
OUTBOUND, INBOUND = 1, 2  # how a header names a cell


@pytest.fixture
def world() -> Iterator[Ranks]:
    """Two ranks that share memory and have met."""
    with closing(Ranks("shm", 2)) as ranks:
        yield ranks


def pattern(nbytes: int, seed: int) -> np.ndarray:
    """Bytes of no other seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def pass_on(pair: list[Group], sender: int, nbytes: int, seed: int) -> None:
    """Send a message, and receive it."""
    got = np.zeros(nbytes, np.uint8)
    send = pair[sender].isend(pattern(nbytes, seed), 1 - sender, 5)
    run(lambda: done(send), lambda: done(pair[1 - sender].irecv(got, sender, 5)))
    assert got.tobytes() == pattern(nbytes, seed).tobytes()


def shared_bytes(world: Ranks) -> mmap.mmap:
    """The memory of both ranks, as far as they use it."""
    memory = world.links[0].memory
    return mmap.mmap(memory.fd, memory.used() + 4 * RING)


@pytest.mark.parametrize("nbytes", [LEAST, 9000, PORTION + 1, MOST], ids=str)
def test_an_answer_lies_where_the_question_was(world: Ranks, nbytes: int) -> None:
    """A rank writes into the memory that it has just read."""
    pair = world.group()
    places = []
    for turn in range(8):
        pass_on(pair, turn % 2, nbytes, turn)
        with closing(shared_bytes(world)) as memory:
            places.append(memory.find(pattern(nbytes, turn)[:64].tobytes()))
    assert places[0] > 0
    assert set(places) == {places[0]}


@pytest.mark.parametrize("nbytes", [LEAST - 1, MOST + 1], ids=str)
def test_other_sizes_use_no_cell(world: Ranks, nbytes: int) -> None:
    """Shorter messages go through the ring, and longer ones are announced."""
    pair = world.group()
    for turn in range(4):
        pass_on(pair, turn % 2, nbytes, turn)
    with closing(shared_bytes(world)) as memory:
        found = [memory.find(pattern(nbytes, turn)[:64].tobytes()) for turn in range(4)]
    assert (min(found) > 0) == (nbytes < LEAST)
    assert (max(found) > 0) == (nbytes < LEAST)


sizes = st.integers(0, 2 * MOST) | st.sampled_from(
    [LEAST - 1, LEAST, PORTION, PORTION + 1, 2 * PORTION, MOST - 1, MOST, MOST + 1]
)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), sizes, st.booleans()), max_size=20))
def test_any_messages_in_any_order(messages: list[tuple[int, int, bool]]) -> None:
    """Every message arrives as it was sent, whether its receiver reads at once or at the end."""
    with closing(Ranks("shm", 2)) as ranks:
        pair = ranks.group()
        open_ = []
        for tag, (sender, nbytes, at_once) in enumerate(messages):
            sent = pattern(nbytes, tag)
            send = pair[sender].isend(sent, 1 - sender, tag)
            if not at_once:
                open_.append((tag, sender, sent, send))
                continue
            got = np.zeros(nbytes, np.uint8)
            receive = pair[1 - sender].irecv(got, sender, tag)
            run(lambda send=send: done(send), lambda receive=receive: done(receive))
            assert got.tobytes() == sent.tobytes()
        for tag, sender, sent, send in open_:
            got = np.zeros(sent.size, np.uint8)
            receive = pair[1 - sender].irecv(got, sender, tag)
            run(lambda send=send: done(send), lambda receive=receive: done(receive))
            assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [(INBOUND, 2000), (OUTBOUND | INBOUND, 2000), (1 << 15, 2000), (OUTBOUND, 1 << 40)],
    ids=["not its own", "both", "unknown", "too long"],
)
def test_a_cell_that_no_rank_sends_ends_the_connection(
    world: Ranks, flags: int, nbytes: int
) -> None:
    """Nothing is read from there."""
    a, b = world.group()
    done(a.isend(pattern(2000, 1), 1, 5))
    with closing(shared_bytes(world)) as memory:
        header = memory.find(MAGIC)
        assert memory.find(MAGIC, header + 1) < 0
        assert struct.unpack_from("=H", memory, header + 6) == (OUTBOUND,)
        struct.pack_into("=H", memory, header + 6, flags)
        struct.pack_into("=Q", memory, header + 24, nbytes)
    got = np.zeros(2000, np.uint8)
    message = b.irecv(got, 0, 5)
    message.wait(soon())
    assert status_of(message) == "peer_lost"
    assert not got.any()

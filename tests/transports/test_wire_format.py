"""What goes over a socket between two ranks, with the peer in the test's hands."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transport_ranks import DEADLINE, Group, done, eventually, run, soon, status_of
from wire_peer import (
    CONTROL_TAG,
    CREDIT,
    CTS,
    DATA,
    EAGER,
    FAREWELL,
    GOODBYE,
    HEADER,
    KEYS,
    MAGIC,
    RTS,
    WITHDRAW,
    FrameSealer,
)

from cydist import _native

HELD = 150_000  # bytes of small messages that the peer may send ahead


def header(
    kind: int, *, tag: int = 0, nbytes: int = 0, magic: int = MAGIC, other: int = 0, lane: int = 0
) -> bytes:
    """One frame's header as the wire has it, of context 1."""
    return HEADER.pack(magic, kind, lane, 0, 1, tag, nbytes, 1, other, 0, bytes(40), 0)


@pytest.fixture
def pair() -> Iterator[tuple[_native.TcpLink, Peer]]:
    """A link whose peer, rank 1, is the other end of a socket in the test's hands."""
    link = _native.TcpLink(0, 2, 1, HELD)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    assert link.adopt(1, 0, ours.detach(), *KEYS)
    with theirs:
        yield link, Peer(theirs)
    link.close()


@pytest.fixture
def lanes() -> Iterator[Callable[[int], tuple[_native.TcpLink, dict[tuple[int, int], Any]]]]:
    """Makes a link of rank 0 in a world of so many ranks, with two lanes, whose other ends are in
    the test's hands: by rank and lane."""
    made: list[_native.TcpLink] = []
    with contextlib.ExitStack() as open_ends:

        def make(size: int) -> tuple[_native.TcpLink, dict[tuple[int, int], Any]]:
            link, ends = _native.TcpLink(0, size, 2, HELD), {}
            made.append(link)
            for peer, lane in itertools.product(range(1, size), range(2)):
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                assert link.adopt(peer, lane, ours.detach(), *KEYS)
                ends[peer, lane] = Peer(open_ends.enter_context(theirs))
            return link, ends

        yield make
        for link in made:
            link.close()


class Peer:
    """The other end of a connection, in the test's hands, which knows its keys."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.seal = FrameSealer()
        self.recv, self.close, self.fileno = sock.recv, sock.close, sock.fileno
        sock.settimeout(DEADLINE)

    def sendall(self, frames: bytes) -> None:
        self.sock.sendall(self.seal(frames))


class Trickle:
    """Carries bytes between two links, a few at a time."""

    def __init__(self, links: list[_native.TcpLink], step: int) -> None:
        self.ends = []
        for rank, link in enumerate(links):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            assert link.adopt(1 - rank, 0, ours.detach(), KEYS[rank], KEYS[1 - rank])
            self.ends.append(theirs)
        self.threads = [
            threading.Thread(target=self.make_parents, args=(self.ends[i], self.ends[1 - i], step))
            for i in (0, 1)
        ]
        for thread in self.threads:
            thread.start()

    def make_parents(self, source: socket.socket, target: socket.socket, step: int) -> None:
        try:
            while data := source.recv(step):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE)
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("step", [1, 7, 104, 105, 4096])
def test_frames_in_pieces(step: int) -> None:
    """However the stream is cut, every message arrives whole."""
    links = [_native.TcpLink(rank, 2) for rank in (0, 1)]
    trickle = Trickle(links, step)
    a, b = (Group(_native.Group(link, [0, 1], rank, 1)) for rank, link in enumerate(links))
    sizes = [0, 1, 103, 104, 105, 1000, *([70_000] if step > 1 else [])]
    sent = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    got = [np.zeros(n, np.uint8) for n in sizes]
    sends = [a.isend(array, 1, 0) for array in sent]
    run(lambda: done(*sends), lambda: done(*[b.irecv(array, 0, 0) for array in got]))
    assert [array.tobytes() for array in got] == [array.tobytes() for array in sent]
    for link in links:
        link.close()
    trickle.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * HEADER.size,
        header(EAGER, magic=MAGIC + (1 << 24)),
        header(EAGER, magic=MAGIC - (1 << 24)),
        header(EAGER, nbytes=1 << 60),
        header(DATA, other=12345, nbytes=10),
        header(99),
        header(0),
        HEADER.pack(MAGIC, EAGER, 3, 0, 1, 0, 0, 1, 0, 0, bytes(40), 0),
        HEADER.pack(MAGIC, EAGER, 0, 0, 1, 0, 0, 1, 0, 1 << 40, bytes(40), 0),
        header(GOODBYE) + header(EAGER),
        header(GOODBYE) * 2,
        (header(EAGER, nbytes=65536) + bytes(65536)) * 3,
    ],
    ids=[
        "noise", "later version", "earlier version", "huge", "data nobody asked for",
        "unknown kind", "kind zero", "other lane", "credit never given", "after goodbye",
        "goodbye twice", "more than we hold",
    ],
)  # fmt: skip
def test_broken_frames_lose_the_peer(pair: tuple[_native.TcpLink, Peer], frame: bytes) -> None:
    """Frames that no rank would send end the connection, and no memory is taken for them."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    receive = group.irecv(np.zeros(1), 1, 5)
    with contextlib.suppress(ConnectionError):
        peer.sendall(frame)
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert "it sent what no rank sends" in link.lost(1)
    assert link.statistics()["connections"] == 0
    assert link.statistics()["arrived"] * 65536 <= HELD


@pytest.mark.parametrize(
    "frame",
    [
        header(CTS, other=7),
        HEADER.pack(MAGIC, CTS, 0, 77, 0, 0, 0, 1, 0, 0, bytes(40), 0),
        header(WITHDRAW),
        header(CREDIT, nbytes=1 << 40),
        header(RTS, tag=99, nbytes=1 << 40) * 2 + header(WITHDRAW) * 3,
        HEADER.pack(MAGIC, EAGER, 0, 0, 2**64 - 1, 2**64 - 1, 3, 1, 0, 0, b"\xff" * 40, 0) + b"abc",
        HEADER.pack(MAGIC, RTS, 0, 65535, 2**64 - 1, 5, 2**64 - 1, 1, 0, 0, b"\xff" * 40, 0),
        HEADER.pack(MAGIC, FAREWELL, 0, 0, 0, 0, 0, 77, 0, 0, bytes(40), 0),
    ],
    ids=[
        "cts to nothing", "unknown cts", "withdrawal of nothing", "credit of bytes",
        "offers of one name", "message to no group", "offer to no group", "farewell to no group",
    ],
)  # fmt: skip
def test_idle_frames_change_nothing(pair: tuple[_native.TcpLink, Peer], frame: bytes) -> None:
    """Frames that nothing here waits for, as a withdrawn call leaves them, are let pass."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    got = np.zeros(3, np.uint8)
    receive = group.irecv(got, 1, 5)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 3, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(frame)
    peer.sendall(HEADER.pack(MAGIC, EAGER, 0, 0, 1, 5, 3, 0, 0, 0, fingerprint, 0) + b"abc")
    done(receive)
    assert got.tobytes() == b"abc"


@pytest.mark.parametrize("nbytes", [0, 11, 1 << 20, 1 << 63])
def test_data_that_does_not_fit_its_rts_loses_the_peer(
    pair: tuple[_native.TcpLink, Peer], nbytes: int
) -> None:
    """After an RTS of 10 bytes, more or an empty frame ends the connection; nothing is written."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    memory = np.zeros(100, np.uint8)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 10, 0, 3, 0, 0, -1, 0, 0, 0)
    receive = group.irecv(memory[:10], 1, 5)
    peer.sendall(HEADER.pack(MAGIC, RTS, 0, 0, 1, 5, 10, 9, 0, 0, fingerprint, 0))
    run(lambda: receive.wait(soon(0.05)))
    cts = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    peer.sendall(header(DATA, nbytes=nbytes, other=cts[8]) + b"x" * min(nbytes, 50))
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert not memory.any()


def test_goodbye_in_the_middle_of_a_message(pair: tuple[_native.TcpLink, Peer]) -> None:
    """A peer that says goodbye with half a message sent has left, and the receive ends."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 10, 0, 3, 0, 0, -1, 0, 0, 0)
    receive = group.irecv(np.zeros(10, np.uint8), 1, 5)
    peer.sendall(HEADER.pack(MAGIC, RTS, 0, 0, 1, 5, 10, 9, 0, 0, fingerprint, 0))
    run(lambda: receive.wait(soon(0.05)))
    cts = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    peer.sendall(header(DATA, nbytes=4, other=cts[8]) + b"abcd" + header(GOODBYE))
    peer.close()
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert link.lost(1) == "it closed its connections and left"


def test_an_rts_of_any_size_takes_no_memory(pair: tuple[_native.TcpLink, Peer]) -> None:
    """An RTS of 2**60 bytes is compared with the receive before any memory is taken."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    peer.sendall(header(RTS, tag=5, nbytes=1 << 60))
    receive = group.irecv(np.zeros(3, np.uint8), 1, 5)
    receive.wait(soon())
    assert status_of(receive) == "mismatch"
    cts = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    assert cts[1] == CTS


def test_vanished_peer(pair: tuple[_native.TcpLink, Peer]) -> None:
    """The end of a stream without a goodbye ends what is half received."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    send = group.isend(np.zeros(100_000), 1, 5)
    anyone = group.irecv(np.zeros(1), -1, 6)
    peer.sendall(header(EAGER, tag=7, nbytes=100) + bytes(50))
    peer.close()
    anyone.wait(soon())
    assert status_of(anyone) == "peer_lost"
    send.wait(soon())
    assert status_of(send) == "peer_lost"
    assert link.statistics()["arrived"] == 0
    assert link.statistics()["moving"] == 0


def test_cancelled_half_written_send_keeps_the_stream_whole(
    pair: tuple[_native.TcpLink, Peer],
) -> None:
    """A send withdrawn in the middle of a frame: the frame ends as it should, then a withdrawal."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    data = np.arange(8_000_000, dtype=np.uint8)
    send = group.isend(data, 1, 5)
    rts = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    assert (rts[1], rts[6]) == (RTS, data.nbytes)
    cts = HEADER.pack(MAGIC, CTS, 0, 0, 0, 0, 0, rts[7], 77, 0, bytes(40), 0)
    peer.sendall(cts)
    frame = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    assert (frame[1], frame[8]) == (DATA, 77)
    send.cancel()
    sent = data[: frame[6]].tobytes()
    data[:] = 0
    rest = b""
    while len(rest) < frame[6]:
        rest += peer.recv(frame[6] - len(rest))
    assert rest == sent
    withdrawal = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    assert (withdrawal[1], withdrawal[7]) == (5, rts[7])


@pytest.mark.parametrize("stage", ["offered", "half arrived"])
def test_cancelled_receive_discards_what_comes(
    pair: tuple[_native.TcpLink, Peer], stage: str
) -> None:
    """A receive withdrawn while its bytes come: the rest goes nowhere, what follows arrives."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    memory = np.zeros(1000, np.uint8)
    receive = group.irecv(memory, 1, 5)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1000, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(HEADER.pack(MAGIC, RTS, 0, 0, 1, 5, 1000, 9, 0, 0, fingerprint, 0))
    while True:
        receive.test()
        try:
            cts = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL | socket.MSG_DONTWAIT))
            break
        except BlockingIOError:
            continue
    assert cts[1] == CTS
    data = header(DATA, nbytes=1000, other=cts[8]) + b"x" * 1000
    if stage == "half arrived":
        peer.sendall(data[:500])
        eventually(lambda: bool(receive.test() or memory.any()))
        data = data[500:]
    receive.cancel()
    memory[:] = 0
    got = np.zeros(1, np.uint8)
    next_one = group.irecv(got, 1, 6)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(data + HEADER.pack(MAGIC, EAGER, 0, 0, 1, 6, 1, 0, 0, 0, fingerprint, 0) + b"y")
    done(next_one)
    assert got[0] == ord("y")
    assert not memory.any()


@pytest.mark.parametrize("nbytes", [3, 4096, 5000, 100_000])
@pytest.mark.parametrize("posted_after", [0, 1, 2000, 4999], ids=lambda n: f"posted after {n}")
def test_receive_posted_while_its_message_arrives(
    pair: tuple[_native.TcpLink, Peer], nbytes: int, posted_after: int
) -> None:
    """What has arrived is handed over, and the rest and the next message go to their places."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    body = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, nbytes, 0, 3, 0, 0, -1, 0, 0, 0)
    head = HEADER.pack(MAGIC, EAGER, 0, 0, 1, 5, nbytes, 0, 0, 0, fingerprint, 0)
    kept = min(posted_after, nbytes)
    peer.sendall(head + body[:kept].tobytes())
    anyone = group.irecv(np.zeros(1, np.uint8), 1, 7)
    eventually(lambda: anyone.test() or link.statistics()["arrived"] == 1)
    got = np.zeros(nbytes, np.uint8)
    receive = group.irecv(got, 1, 5)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1, 0, 3, 0, 0, -1, 0, 0, 0)
    after = HEADER.pack(MAGIC, EAGER, 0, 0, 1, 6, 1, 0, 0, 0, fingerprint, 0) + b"y"
    peer.sendall(body[kept:].tobytes() + after)
    done(receive)
    np.testing.assert_array_equal(got, body)
    last = np.zeros(1, np.uint8)
    done(group.irecv(last, 1, 6))
    assert last[0] == ord("y")
    anyone.cancel()


def test_receive_cancelled_while_its_kept_message_arrives(
    pair: tuple[_native.TcpLink, Peer],
) -> None:
    """A receive that took over a half arrived message is withdrawn: the rest goes nowhere."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1000, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(HEADER.pack(MAGIC, EAGER, 0, 0, 1, 5, 1000, 0, 0, 0, fingerprint, 0) + b"x" * 500)
    next_memory = np.zeros(1, np.uint8)
    next_one = group.irecv(next_memory, 1, 6)
    eventually(lambda: next_one.test() or link.statistics()["arrived"] == 1)
    memory = np.zeros(1000, np.uint8)
    receive = group.irecv(memory, 1, 5)
    receive.cancel()
    memory[:] = 0
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1, 0, 3, 0, 0, -1, 0, 0, 0)
    after = HEADER.pack(MAGIC, EAGER, 0, 0, 1, 6, 1, 0, 0, 0, fingerprint, 0) + b"y"
    peer.sendall(b"x" * 500 + after)
    done(next_one)
    assert next_memory[0] == ord("y")
    assert not memory.any()


def test_flood_of_small_messages_is_bounded() -> None:
    """Beyond the limit small messages wait for their receives; a later tag still gets through."""
    limit = 100_000
    links = [_native.TcpLink(rank, 2, 1, limit) for rank in (0, 1)]
    ours, theirs = socket.socketpair()
    for link, end, peer in ((links[0], ours, 1), (links[1], theirs, 0)):
        end.setblocking(False)
        assert link.adopt(peer, 0, end.detach(), KEYS[peer], KEYS[1 - peer])
    a, b = (Group(_native.Group(link, [0, 1], rank, 1)) for rank, link in enumerate(links))
    sends = [a.isend(np.full(1000, i, np.uint8), 1, 1) for i in range(200)]
    late = a.isend(np.full(1, 9.0), 1, 2)
    got = np.zeros(1)
    run(lambda: done(late), lambda: done(b.irecv(got, 0, 2)))
    assert got[0] == 9
    assert 0 < sum(message.test() for message in sends) <= limit // 1000
    many = [np.zeros(1000, np.uint8) for _ in sends]
    run(lambda: done(*sends), lambda: done(*[b.irecv(array, 0, 1) for array in many]))
    assert [int(array[0]) for array in many] == [i % 256 for i in range(200)]
    assert all((array == array[0]).all() for array in many)
    for link in links:
        link.close()


def test_refused_peer_is_lost_for_good() -> None:
    """A peer that was refused cannot be adopted later."""
    link = _native.TcpLink(0, 2)
    link.refuse(1, "no way")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not link.adopt(1, 0, ours.fileno(), *KEYS)
    assert link.lost(1) == "no way"
    link.close()


def test_second_connection_of_a_lane_is_not_taken(
    pair: tuple[_native.TcpLink, Peer],
) -> None:
    """A duplicate never displaces a live connection."""
    link, _ = pair
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not link.adopt(1, 0, ours.fileno(), *KEYS)
    assert link.lane_is_live(1, 0)


def test_what_comes_for_a_group_that_has_ended(pair: tuple[_native.TcpLink, Peer]) -> None:
    """A message is dropped, an RTS sent back, a control message answered by a departure notice."""
    link, peer = pair
    ended, other = (Group(_native.Group(link, [0, 1], 0, context)) for context in (1, 2))
    ended.native.close()
    receive = other.irecv(np.zeros(3, np.uint8), 1, 5)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 3, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(header(EAGER, tag=4, nbytes=3) + b"abc")
    peer.sendall(header(RTS, tag=4, nbytes=1 << 40))
    peer.sendall(header(EAGER, tag=CONTROL_TAG, nbytes=3) + b"abc")
    peer.sendall(header(RTS, tag=CONTROL_TAG, nbytes=3))
    peer.sendall(HEADER.pack(MAGIC, EAGER, 0, 0, 2, 5, 3, 0, 0, 0, fingerprint, 0) + b"abc")
    done(receive)
    assert link.statistics()["arrived"] == 0
    answers = [HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL)) for _ in range(4)]
    kinds, names = [cts[1] for cts in answers], [cts[7] for cts in answers]
    assert ([CTS, FAREWELL, CTS, FAREWELL], [1] * 4) == (kinds, names)


FAREWELLS = [
    HEADER.pack(MAGIC, FAREWELL, lane, 0, 0, 0, 0, 1, 0, 0, bytes(40), 0) for lane in (0, 1)
]
U8 = struct.pack("=QQBBBBiIIQ", 0, 1, 0, 3, 0, 0, -1, 0, 0, 0)  # of a message of one


@pytest.mark.parametrize("source", [1, -1], ids=["by name", "from anyone"])
def test_a_departure_notice_follows_the_messages_of_its_lane(lanes: Any, source: int) -> None:
    """What its rank sent by another lane may still be under way, and is waited for."""
    link, ends = lanes(2)
    group = Group(_native.Group(link, [0, 1], 0, 1))
    memory = np.zeros(1, np.uint8)
    receive, later = group.irecv(memory, source, 1), group.irecv(memory, source, 1)
    ends[1, 0].sendall(FAREWELLS[0])
    eventually(lambda: receive.test() or group.native.has_left(1))
    ends[1, 1].sendall(HEADER.pack(MAGIC, EAGER, 1, 0, 1, 1, 1, 1, 0, 0, U8, 0) + b"\7")
    ends[1, 1].sendall(FAREWELLS[1])
    done(receive)
    assert memory[0] == 7
    eventually(later.test)
    assert status_of(later) == "peer_lost"


@pytest.mark.parametrize("tag", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_every_lane_brings_its_departure_notice(lanes: Any, tag: int, first: int) -> None:
    """In any order, though nobody else is left."""
    link, ends = lanes(2)
    group = Group(_native.Group(link, [0, 1], 0, 1))
    receives = [group.irecv(np.zeros(1, np.uint8), source, tag) for source in (1, -1)]
    for lane in (first, 1 - first):
        ends[1, lane].sendall(FAREWELLS[lane])
        eventually(lambda: receives[0].test() or group.native.has_left(1))
    for receive in receives:
        eventually(receive.test)
        assert status_of(receive) == "peer_lost"


def test_who_departed_on_one_lane_is_queried_again(lanes: Any) -> None:
    """By who waits for anyone: the other lane may have been made since."""
    link, ends = lanes(3)
    group = Group(_native.Group(link, [0, 1, 2], 0, 1))
    receive = group.irecv(np.zeros(1, np.uint8), -1, 1)
    ends[1, 0].sendall(FAREWELLS[0])
    eventually(lambda: receive.test() or group.native.has_left(1))

    def cts() -> None:
        for peer in (1, 2):
            asked, _, _ = select.select([ends[peer, lane] for lane in (0, 1)], [], [], DEADLINE)
            assert asked, f"rank {peer} is not asked"
            for lane in (0, 1):
                ends[peer, lane].sendall(FAREWELLS[lane])

    run(lambda: receive.wait(soon()), cts)
    assert status_of(receive) == "peer_lost"


def test_a_departure_notice_has_a_bit_for_each_lane() -> None:
    """So there are no more lanes than bits."""
    _native.TcpLink(0, 2, 64).close()
    for lanes in (0, 65):
        with pytest.raises(ValueError, match="lanes"):
            _native.TcpLink(0, 2, lanes)


def test_a_departure_notice_after_a_probe_is_received(lanes: Any) -> None:
    """Which this rank, whose receive of notices it has filled, has not looked at yet."""
    link, ends = lanes(2)
    group = Group(_native.Group(link, [0, 1], 0, 1))
    receive = group.irecv(np.zeros(1, np.uint8), 1, 0)
    question = bytes([1]) + bytes(183)
    head = HEADER.pack(MAGIC, EAGER, 0, 0, 1, CONTROL_TAG, len(question), 0, 0, 0, bytes(40), 0)
    ends[1, 0].sendall(head + question + FAREWELLS[0])
    eventually(receive.test)
    assert status_of(receive) == "peer_lost"

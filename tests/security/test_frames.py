"""A third party between two ranks that lacks only the secret changes no frame unnoticed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from relayed_links import RelayedLinks
from siphash import siphash
from transport_ranks import DEADLINE, Group, eventually, soon, status_of
from wire_peer import (
    AUTH_BYTES,
    CONTROL_MESSAGE,
    CONTROL_TAG,
    CTS,
    DATA,
    EAGER,
    HEADER,
    KEYS,
    MAGIC,
    RTS,
    FrameSealer,
    frame,
)

from cydist import _native

FORGED = "it was tampered with"

Frames = list[bytes]


def test_the_tests_tags_are_siphash() -> None:
    """The first and the sixteenth test vector of the reference implementation."""
    key = bytes(range(16))
    assert siphash(key, b"") == 0x726FDB47DD0E0E31
    assert siphash(key, bytes(range(15))) == 0xA129CA6149BE45E5


class Relay(RelayedLinks):
    """Two connected links, and between them a relay that cuts what it carries into frames.

    Args:
        attack: What becomes of all frames that rank 0 has sent so far, the last one new: what is
            passed on now.
    """

    def __init__(self, attack: Callable[[Frames], bytes]) -> None:
        self._attack = attack
        super().__init__()

    def carry(self, sender: int, source: socket.socket, sink: socket.socket) -> None:
        if sender == 1:
            while part := source.recv(65536):
                sink.sendall(part)
            return
        seen: Frames = []
        while True:
            head = exactly(source, HEADER.size)
            fields = HEADER.unpack(head)
            seen.append(head + exactly(source, fields[6] if fields[1] in (EAGER, DATA) else 0))
            sink.sendall(self._attack(seen))


def exactly(source: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError at the end of the stream."""
    data = b""
    while len(data) < count:
        part = source.recv(count - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


@pytest.fixture
def relay() -> Iterator[Callable[[Callable[[Frames], bytes]], Relay]]:
    """Makes a relay by its attack."""
    made: list[Relay] = []

    def make(attack: Callable[[Frames], bytes]) -> Relay:
        made.append(Relay(attack))
        return made[-1]

    yield make
    for each in made:
        each.close()


def on_second(change: Callable[[Frames], bytes]) -> Callable[[Frames], bytes]:
    """An attack on the second frame alone."""
    return lambda seen: change(seen) if len(seen) == 2 else seen[-1]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def reflected(seen: Frames) -> bytes:
    """The frame that rank 1 would have sent with the same number, were the keys one."""
    body = seen[-1][: HEADER.size - AUTH_BYTES]
    tag = siphash(KEYS[1][:16], (1).to_bytes(8, "little") + body)
    return body + tag.to_bytes(8, "little") + seen[-1][HEADER.size :]


def elsewhere(seen: Frames) -> bytes:
    """The same frame, of another connection between the same ranks."""
    seal = FrameSealer(bytes(reversed(KEYS[0])))
    return [seal(each) for each in seen][-1]


ATTACKS: dict[str, Callable[[Frames], bytes]] = {
    "dropped": lambda seen: b"",
    "repeated": lambda seen: seen[-1] * 2,
    "an earlier one again": lambda seen: seen[0],
    "reflected": reflected,
    "from another connection": elsewhere,
    "its tag cut off": lambda seen: seen[-1][: HEADER.size - AUTH_BYTES] + seen[-1][HEADER.size :],
    "invented": lambda seen: frame(EAGER, nbytes=3) + b"abc",
    "of no length": lambda seen: seen[-1][:24] + bytes(8) + seen[-1][32 : HEADER.size],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_frames_are_what_was_sent_next(
    relay: Callable[[Callable[[Frames], bytes]], Relay], attack: Callable[[Frames], bytes]
) -> None:
    """Of four messages the second is attacked: the first arrives, and the receives after the attack
    end with the loss of the peer, not with other bytes."""
    between = relay(on_second(attack))
    sender, receiver = between.groups
    got = [np.zeros(3, np.uint8) for _ in range(4)]
    receives = [receiver.irecv(array, 0, 0) for array in got]
    for value in range(1, 5):
        sender.isend(np.full(3, value, np.uint8), 1, 0)
    for receive in receives:
        receive.wait(soon())
    statuses = [status_of(receive) for receive in receives]
    arrived = statuses.count("ok")
    assert statuses == ["ok"] * arrived + ["peer_lost"] * (4 - arrived)
    assert 1 <= arrived <= 2
    assert [array.tolist() for array in got[:arrived]] == [[n + 1] * 3 for n in range(arrived)]
    assert FORGED in between.links[1].lost(0)


@pytest.mark.parametrize("at", range(HEADER.size))
def test_every_byte_of_a_header_is_covered(at: int) -> None:
    """A header with a bit changed anywhere ends the connection, and its bytes arrive nowhere."""
    link = _native.TcpLink(0, 2)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        assert link.adopt(1, 0, ours.detach(), *KEYS)
        group = Group(_native.Group(link, [0, 1], 0, 1))
        memory = np.zeros(3, np.uint8)
        receive = group.irecv(memory, 1, 5)
        theirs.sendall(flipped(FrameSealer()(frame(EAGER, tag=5, nbytes=3) + b"abc"), at))
        receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert FORGED in link.lost(1)
    assert not memory.any()
    link.close()


@pytest.mark.parametrize("offered", [False, True], ids=["at once", "offered"])
@pytest.mark.parametrize("changed", [False, True], ids=["as sent", "changed"])
def test_bytes_of_control_messages_are_covered(offered: bool, changed: bool) -> None:
    """A control message whose bytes were changed is not delivered, also one that was offered
    first; its header is as it was sent."""
    link = _native.TcpLink(0, 2)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    said = bytes(range(CONTROL_MESSAGE.size))
    told = flipped(said, 50) if changed else said
    seal = FrameSealer()
    with theirs:
        assert link.adopt(1, 0, ours.detach(), *KEYS)
        group = Group(_native.Group(link, [0, 1], 0, 2))  # whose control messages are others
        memory = np.zeros(len(said), np.uint8)
        receive = group.irecv(memory, 1, 0)

        def send(kind: int, body: bytes, id: int = 0, other: int = 0) -> None:
            head = HEADER.pack(
                MAGIC, kind, 0, 0, 1, CONTROL_TAG, len(said), id, other, 0, bytes(40), 0
            )
            theirs.sendall(seal(head + body)[: HEADER.size] + (told if body else b""))

        if offered:
            send(RTS, b"", id=7, other=siphash(KEYS[1][16:], said))
        else:
            send(EAGER, said)
        taken = _native.Group(link, [0, 1], 0, 1)  # asks for them
        if offered:
            eventually(lambda: bool(receive.test()) or poll(theirs))
            answer = HEADER.unpack(theirs.recv(HEADER.size, socket.MSG_WAITALL))
            assert (answer[1], answer[7]) == (CTS, 7)
            send(DATA, said, other=answer[8])
        with contextlib.suppress(ConnectionError):  # the link may have hung up by now
            theirs.sendall(seal(frame(EAGER, tag=0, nbytes=len(said), context=2) + said))
        receive.wait(soon())
        assert status_of(receive) == ("peer_lost" if changed else "ok")
        assert (FORGED in link.lost(1)) is changed
        assert memory.any() is np.bool_(not changed)
        taken.close()
    link.close()


def poll(sock: socket.socket) -> bool:
    """Return whether there is something to read."""
    with contextlib.suppress(BlockingIOError):
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def test_keys_have_their_length() -> None:
    """A link takes no connection without keys for both directions."""
    link = _native.TcpLink(0, 2)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="keys of 31 and 32 bytes, not 32"):
        link.adopt(1, 0, ours.fileno(), bytes(31), bytes(32))
    link.close()


def test_what_a_link_sends_has_its_tags() -> None:
    """Written against the paper: number, header and key, for each frame in turn."""
    link = _native.TcpLink(0, 2)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        theirs.settimeout(DEADLINE)
        assert link.adopt(1, 0, ours.detach(), *KEYS)
        group = Group(_native.Group(link, [0, 1], 0, 1))
        for number in range(3):
            group.isend(np.zeros(5, np.uint8), 1, number)
            head = theirs.recv(HEADER.size + 5, socket.MSG_WAITALL)[: HEADER.size]
            assert HEADER.unpack(head)[0] == MAGIC
            covered = number.to_bytes(8, "little") + head[:-AUTH_BYTES]
            assert int.from_bytes(head[-AUTH_BYTES:], "little") == siphash(KEYS[0][:16], covered)
    link.close()

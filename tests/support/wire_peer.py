"""A rank whose only peer is the test: what it is told and what it says, frame by frame."""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np
from siphash import siphash
from transport_ranks import Group, soon

from cydist import _native

# A header: magic, kind, lane, flags, context, tag, nbytes, id, other, released; fingerprint; auth.
HEADER = struct.Struct("=IBBH6Q40sQ")
FINGERPRINT = struct.Struct("=QQBBBBiIIQ")
MAGIC = 0x05645943
EAGER, RTS, CTS, DATA, WITHDRAW, CREDIT, GOODBYE, FAREWELL = range(1, 9)
CONTROL_TAG = 2**64 - 1
CONTROL_MESSAGE = struct.Struct("=6i2Q40s40s64s")
AUTH_BYTES = 8  # at a header's end
# The keys of the two directions of a connection; its other side has them the other way round.
KEYS = (bytes(range(32)), bytes(range(100, 132)))
U8 = 3
HELD_LIMIT = 300_000


def frame(kind: int, *, tag: int = 0, nbytes: int = 0, context: int = 1, **more: int) -> bytes:
    """A header, right for a message of `nbytes` uint8."""
    fingerprint = FINGERPRINT.pack(0, nbytes, 0, U8, 0, 0, -1, 0, 0, 0)
    flags, id, other, released = (
        more.get(name, 0) for name in ("flags", "id", "other", "released")
    )
    return HEADER.pack(
        MAGIC, kind, 0, flags, context, tag, more.get("follow", nbytes), id, other, released,
        fingerprint, 0,
    )  # fmt: skip


class FrameSealer:
    """Gives the frames of a peer their tags, in whatever pieces they come.

    A stream of frames that no rank sends is cut into frames as its receiver will cut it.
    """

    def __init__(self, keys: bytes = KEYS[1]) -> None:
        self._keys = keys
        self._number = 0
        self._header = b""  # of the frame that begins
        self._sent = 0  # bytes of it
        self._payload = 0  # bytes of the last frame that are still to come

    def __call__(self, said: bytes) -> bytes:
        """Return what to send for `said`. Of a control message all bytes must be in it."""
        out = b""
        while said:
            if self._payload:
                out += said[: self._payload]
                taken = min(len(said), self._payload)
                self._payload -= taken
                said = said[taken:]
                continue
            missing = HEADER.size - len(self._header)
            self._header += said[:missing]
            said = said[missing:]
            if len(self._header) < HEADER.size:
                ready = self._header[:-AUTH_BYTES][: HEADER.size - AUTH_BYTES]
                out += ready[self._sent :]
                self._sent = max(self._sent, len(ready))
            else:
                out += self._sealed(said)[self._sent :]
                self._sent, self._header = 0, b""
        return out

    def _sealed(self, payload: bytes) -> bytes:
        """Return the header that is complete, with its tag."""
        fields = list(HEADER.unpack(self._header))
        kind, nbytes = fields[1], fields[6]
        if fields[5] == CONTROL_TAG and kind == EAGER and self._sent == 0:
            fields[8] = siphash(self._keys[16:], payload[:nbytes])
        covered = HEADER.pack(*fields)[:-AUTH_BYTES]
        tag = siphash(self._keys[:16], self._number.to_bytes(8, "little") + covered)
        self._number += 1
        self._payload = nbytes if kind in (EAGER, DATA) else 0
        return covered + tag.to_bytes(8, "little")


class Wire:
    """A link whose only peer is the test, and what went over it.

    Args:
        cipher: The link's; the peer's bytes are then for `put`.
    """

    def __init__(self, cipher: _native.CipherHandle | None = None) -> None:
        self.link = _native.TcpLink(0, 2, 1, HELD_LIMIT)
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        assert self.link.adopt(1, 0, ours.detach(), *KEYS, cipher)
        self.seal = FrameSealer()
        self.group = Group(_native.Group(self.link, [0, 1], 0, 1))
        # Of a group to which nothing that is said belongs.
        aside = Group(_native.Group(self.link, [0, 1], 0, 2**64 - 3))
        self.probe = aside.irecv(np.zeros(0, np.uint8), 1, 99)
        self.said = bytearray()
        self.heard = bytearray()
        self.answers: list[tuple[int, int]] = []  # what they are called here and there
        self.offers: list[int] = []

    def say(self, pieces: list[bytes]) -> None:
        """Send, as far as it is heard."""
        for piece in pieces:
            self.said += piece
            self.put(self.seal(piece))
            self.hear()

    def put(self, data: bytes) -> None:
        """Send bytes as they are, as far as they are heard."""
        left = memoryview(data)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while left:
                with contextlib.suppress(BlockingIOError):
                    left = left[self.peer.send(left, socket.MSG_DONTWAIT) :]
                self.go_on()

    def go_on(self) -> None:
        """Let the link go on, and take what it sends."""
        self.probe.test()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while part := self.peer.recv(1 << 20, socket.MSG_DONTWAIT):
                self.heard += part

    def hear(self) -> None:
        """Let the link go on, and read what it says."""
        self.go_on()
        while len(self.heard) >= HEADER.size:
            header = HEADER.unpack_from(self.heard)
            kind, nbytes = header[1], header[6]
            whole = HEADER.size + (nbytes if kind in (EAGER, DATA) else 0)
            if len(self.heard) < whole:
                return
            if kind == CTS and header[3] == 0:
                self.answers.append((header[7], header[8]))
            elif kind == RTS:
                self.offers.append(header[7])
            del self.heard[:whole]

    def close(self) -> None:
        """The peer is gone; everything ends, and nothing is left."""
        self.peer.close()
        assert self.probe.wait(soon())
        assert self.link.statistics()["connections"] == 0
        self.group.close()
        self.link.close()
        counts = self.link.statistics()
        assert (counts["posted"], counts["arrived"], counts["moving"]) == (0, 0, 0)

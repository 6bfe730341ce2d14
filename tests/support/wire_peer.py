"""A rank whose only peer is the test: what it is told and what it says, frame by frame."""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np
from transport_ranks import Group, soon

from cydist import _native

# A header: magic, kind, lane, flags, context, tag, nbytes, id, other, released; fingerprint.
HEADER = struct.Struct("=IBBH6Q40s")
FINGERPRINT = struct.Struct("=QQBBBBiIIQ")
MAGIC = 0x03645943
EAGER, RTS, CTS, DATA, WITHDRAW, CREDIT, GOODBYE, FAREWELL = range(1, 9)
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
        fingerprint,
    )  # fmt: skip


class Wire:
    """A link whose only peer is the test, and what went over it."""

    def __init__(self) -> None:
        self.link = _native.TcpLink(0, 2, 1, HELD_LIMIT)
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        assert self.link.adopt(1, 0, ours.detach())
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
            left = memoryview(piece)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while left:
                    with contextlib.suppress(BlockingIOError):
                        left = left[self.peer.send(left, socket.MSG_DONTWAIT) :]
                    self.hear()
            self.hear()

    def hear(self) -> None:
        """Let the link go on, and read what it says."""
        self.probe.test()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while part := self.peer.recv(1 << 20, socket.MSG_DONTWAIT):
                self.heard += part
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

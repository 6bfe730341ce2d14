"""One attempt to connect to a peer: its retries, its handshake and its socket options."""

from __future__ import annotations

import contextlib
import socket

from cydist.backends.host.addresses import SocketAddress
from cydist.net.acceptor import HandshakeSocket
from cydist.net.auth import ClientHandshake

CONNECT_TIMEOUT = 30.0  # seconds for one connection, all its attempts included
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between rounds of attempts

Key = tuple[int, int]  # peer, lane


class ConnectAttempt:
    """The attempt to connect to one lane of one peer, until it succeeds or is given up."""

    def __init__(self, key: Key, targets: list[SocketAddress], now: float) -> None:
        self.key = key
        self.targets = targets
        self.deadline = now + CONNECT_TIMEOUT
        self.next = 0  # of targets
        self.refusals = 0  # consecutive addresses that refused
        self.pause = FIRST_PAUSE
        self.resume: float | None = now  # when to try the next address; None: trying now
        self.last_error = "nothing was tried"
        self.connecting: HandshakeSocket | None = None
        self.connected = False

    @property
    def answered(self) -> bool:
        """Return whether this side has sent its proof, so that the peer may regard the connection
        as made."""
        handshake = None if self.connecting is None else self.connecting.handshake
        return isinstance(handshake, ClientHandshake) and handshake.answered

    @property
    def next_deadline(self) -> float:
        """Return the time at which the attempt must be served next."""
        if self.resume is not None:
            return min(self.resume, self.deadline)
        return (
            self.deadline
            if self.connecting is None
            else min(self.connecting.deadline, self.deadline)
        )


def set_options(sock: socket.socket) -> None:
    """Send small messages at once, and detect a vanished host within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Between ranks that all send on a quiet network, loss-based congestion control is faster.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

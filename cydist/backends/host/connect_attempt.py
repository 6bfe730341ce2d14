"""One attempt to connect to a peer: its retries, its handshake and its socket options."""

from __future__ import annotations

import contextlib
import socket

from cydist._native import silence_limit
from cydist.backends.host.addresses import SocketAddress
from cydist.net.acceptor import HandshakeSocket
from cydist.net.auth import ClientHandshake
from cydist.net.silence import peer_timeout, watch_idle

CONNECT_TIMEOUT = 30.0  # seconds until a peer's kernel accepts, all attempts included
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between rounds of attempts

Key = tuple[int, int]  # peer, lane


class ConnectAttempt:
    """The attempt to connect to one lane of one peer, until it succeeds or is given up.

    Args:
        since: When the link requested it: it may have taken a while to learn the address.
    """

    def __init__(
        self, key: Key, targets: list[SocketAddress], now: float, since: float | None = None
    ) -> None:
        self.key = key
        self.targets = targets
        self.deadline = now + CONNECT_TIMEOUT
        # When a host that gave no answer counts as gone.
        limit = silence_limit(peer_timeout())
        self.silent_until = max((now if since is None else since) + limit, now + limit / 2)
        self.heard = False  # the host has answered, if only with a refusal
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
        if self.connecting is not None and self.connected:
            return self.connecting.deadline
        times = [self.deadline]
        if not self.heard:
            times.append(self.silent_until)
        if self.resume is not None:
            times.append(self.resume)
        elif self.connecting is not None:
            times.append(self.connecting.deadline)
        return min(times)


def set_options(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that vanishes. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_idle(sock)
    # Inside a host nothing is lost, and control by losses costs least. Between hosts the network's
    # administrator has chosen. A connection that was reset has no peer, which the link finds out.
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

"""Accept connections, and authenticate them before anything else is read from them.

Any client may connect. A pending peer is sent 77 bytes and has auth.HANDSHAKE_TIMEOUT seconds; at
most the 197 bytes of its proof are held, and nothing is parsed before the proof. When all slots
are taken, or no descriptor is left, a new connection replaces the oldest pending peer, once that
one has had GRACE seconds. So a flood of unauthenticated clients delays a member by at most
len(flood) / MOST_PENDING_PEERS * GRACE seconds, and takes nothing else.

This module knows sockets and the handshake, and no store or transport.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Collection

from cydist import _native
from cydist.errors import AuthenticationError, DistError
from cydist.logs import Log
from cydist.net import auth
from cydist.net.auth import ClientHandshake, ServerHandshake

_log = Log("connections")

# At most at once, and no more than a quarter of this process's limit of descriptors.
MOST_PENDING_PEERS = 256
GRACE = 0.1  # seconds that every pending peer has, regardless of the number of others
BACKLOG = 4096  # connections that the kernel queues; a client beyond them waits a second

MOST_REFUSALS = 4  # addresses whose last refusal is kept

_ACCEPTS_AT_ONCE = 16
_HELLO_BYTES = 4096  # more than the first bytes of TLS's handshake that follow a client's answer
_PAUSE = 0.05  # seconds until the next attempt to get a descriptor
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def no_descriptor(error: Exception) -> bool:
    """Return whether this error says that the process, or its host, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def with_remedy(error: Exception) -> str:
    """Return the error's text, with a remedy if descriptors are short."""
    hint = ": close files, or raise the limit (ulimit -n)" if no_descriptor(error) else ""
    return f"{error}{hint}"


class HandshakeSocket:
    """A non-blocking socket in its handshake: reads whole messages, sends as much as fits.

    Args:
        deadline: On time.monotonic(); the owner enforces it.
    """

    __slots__ = ("_received", "deadline", "handshake", "sock", "unsent")

    def __init__(
        self, sock: socket.socket, handshake: ClientHandshake | ServerHandshake, deadline: float
    ) -> None:
        self.sock = sock
        self.handshake = handshake
        self.deadline = deadline
        self.unsent = b""
        self._received = b""

    def flush(self) -> None:
        """Send as much of `unsent` as the socket takes. Raises OSError."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            self.unsent = self.unsent[sent:]

    def receive(self) -> bool:
        """Read one message; return whether it was complete. No byte after it is read.

        Raises OSError, and the handshake's errors after the refusal was sent.
        """
        try:
            part = self.sock.recv(self.handshake.needs - len(self._received))
        except (BlockingIOError, InterruptedError):
            return False
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
        self._received += part
        self.handshake.check_beginning(self._received)
        if len(self._received) < self.handshake.needs:
            return False
        message, self._received = self._received, b""
        try:
            self.unsent += self.handshake.receive(message)
        except AuthenticationError:
            with contextlib.suppress(OSError):
                self.sock.send(self.handshake.refusal, socket.MSG_NOSIGNAL)
                # Unread bytes would turn the close into a reset, which may overtake the refusal.
                self.sock.recv(_HELLO_BYTES)
            raise
        return True


class PendingPeer(HandshakeSocket):
    """An accepted connection that has not proved yet that it knows the job's secret."""

    __slots__ = ()
    handshake: ServerHandshake


class Acceptor:
    """Listening sockets and their pending peers, served by the thread of a selector.

    Args:
        selector: For a key whose `data` is this acceptor, call `react` with its `fileobj`.
        secret, channel, job: The secret that a peer must prove to know, and the service that it
            must request.
        also: Further channels that it may request.
        on_refusal: Called when a peer is refused, with its address, the reason, and whether it
            knows the secret. Any client can cause the call for one that does not know it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: bytes,
        channel: bytes,
        job: str,
        also: Collection[bytes] = (),
        on_refusal: Callable[[str, str, bool], object] = lambda address, why, knows: None,
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._channel = channel
        self._job = job
        self._also = also
        self._on_refusal = on_refusal
        self._listeners: list[socket.socket] = []
        self._pending_peers: dict[socket.socket, PendingPeer] = {}  # oldest first
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = (
            MOST_PENDING_PEERS if limit < 0 else max(1, min(MOST_PENDING_PEERS, limit // 4))
        )
        # Why each address was refused, the latest last, for messages. Unauthenticated clients
        # cause them, so they are few.
        self.refusals: dict[str, str] = {}
        self._reopen: float | None = None  # when to listen again; None: listening
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on this bound socket, which the acceptor owns from now on."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        _native.replace_in_child(listener.fileno())
        self._selector.register(listener, selectors.EVENT_READ, self)

    def __len__(self) -> int:
        """Return the number of pending peers."""
        return len(self._pending_peers)

    def close(self) -> None:
        """Close the listeners and all pending peers.

        In a forked child close the selector first, since it shares the parent's.
        """
        for listener in self._listeners:
            _native.keep_in_child(listener.fileno())
            # A child forked before `listen` may hold a copy, which would keep the port. (In other
            # forked children /dev/null is in its place.)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for sock in [*self._listeners, *self._pending_peers]:
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            sock.close()
        self._listeners.clear()
        self._pending_peers.clear()
        self._reopen = None
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def react(self, fileobj: object) -> PendingPeer | None:
        """Accept connections, or read from a pending peer, as the selector reported.

        Returns a peer that has just authenticated itself, or None. Its socket is the caller's
        then, and `unsent` ends with this side's proof, which the peer waits for.
        """
        assert isinstance(fileobj, socket.socket)
        peer = self._pending_peers.get(fileobj)
        if peer is not None:
            return peer if self._authenticate(peer) else None
        if fileobj in self._listeners and self._reopen is None:
            self._accept(fileobj)
        return None

    @property
    def next_deadline(self) -> float | None:
        """Return the time at which `expire` must be called next; None: never."""
        oldest = next(iter(self._pending_peers.values()), None)
        times = [] if oldest is None else [oldest.deadline]
        return min([*times, *([] if self._reopen is None else [self._reopen])], default=None)

    def expire(self, now: float) -> None:
        """Close pending peers past their deadline, and listen again after a pause."""
        while (
            self._pending_peers
            and (oldest := next(iter(self._pending_peers.values()))).deadline <= now
        ):
            self._dismiss(oldest)
        if self._reopen is not None and self._reopen <= now:
            self._reopen = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, self)

    def evict_oldest(self) -> bool:
        """Close the oldest pending peer to free its descriptor; return whether there was one."""
        for peer in self._pending_peers.values():
            self._dismiss(peer)
            return True
        return False

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            full = len(self._pending_peers) >= self._most
            if full and not self._may_replace():
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return
                if not self._pending_peers:
                    self._reject(listener)
                    return
                if not self._may_replace():
                    return
                self.evict_oldest()
                continue
            if full:
                self.evict_oldest()
            self._start_handshake(sock)

    def _start_handshake(self, sock: socket.socket) -> None:
        there = auth.address_of(sock)
        try:
            endpoints = auth.endpoints_of(sock, accepted=True)
            handshake = ServerHandshake(
                self._secret, self._channel, self._job, there, self._also, endpoints
            )
            peer = PendingPeer(sock, handshake, time.monotonic() + auth.HANDSHAKE_TIMEOUT)
            peer.unsent = handshake.greeting
            sock.setblocking(False)
            peer.flush()
            self._selector.register(sock, selectors.EVENT_READ, self)
        except OSError:
            sock.close()
            return
        self._pending_peers[sock] = peer

    def _authenticate(self, peer: PendingPeer) -> bool:
        try:
            if not peer.receive():
                return False
            if not peer.handshake.done:
                peer.flush()
                return False
        except (OSError, DistError) as error:
            if isinstance(error, AuthenticationError):
                address = peer.handshake.there.rpartition(":")[0]
                self._keep_refusal(address, str(error))
                self._on_refusal(address, str(error), peer.handshake.knows)
            self._dismiss(peer)
            return False
        self._forget(peer)
        return True

    def _keep_refusal(self, address: str, why: str) -> None:
        _log.debug("refused a connection from %s: %s", address, why)
        self.refusals.pop(address, None)
        if len(self.refusals) == MOST_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        self.refusals[address] = why

    def _forget(self, peer: PendingPeer) -> None:
        del self._pending_peers[peer.sock]
        self._selector.unregister(peer.sock)

    def _dismiss(self, peer: PendingPeer) -> None:
        self._forget(peer)
        peer.sock.close()

    def _may_replace(self) -> bool:
        """Return whether the oldest pending peer has had GRACE; else stop accepting until then."""
        oldest = next(iter(self._pending_peers.values()))
        due = oldest.deadline - auth.HANDSHAKE_TIMEOUT + GRACE
        if due > time.monotonic():
            self._pause_until(due)
            return False
        return True

    def _reject(self, listener: socket.socket) -> None:
        """Refuse connections through the spare descriptor, as no other is left; then pause.

        Left in the backlog they would keep the listener ready, and this thread busy.
        """
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._spare >= 0:
                os.close(self._spare)
                self._spare = -1
            try:
                with listener.accept()[0] as sock:
                    sock.setblocking(False)
                    sock.send(auth.FULL, socket.MSG_NOSIGNAL)
                more = True
            except OSError:
                more = False
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            if not more:
                break
        self._pause_until(time.monotonic() + _PAUSE)

    def _pause_until(self, until: float) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._reopen = until

"""The door of a service: who has come in and has not proved yet that it belongs to the job.

Anybody may connect. A guest gets 77 bytes from us and auth.HANDSHAKE_TIMEOUT seconds, of its
own bytes at most the 197 of a proof are held, and nothing is parsed before the proof. Where
the room is full, or no descriptor is left, a newcomer takes the place of the guest that has
been here longest, once that has had GRACE seconds. So a crowd of strangers keeps a member
waiting for len(crowd) / MOST_GUESTS * GRACE seconds and no longer, and takes nothing else.

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

from cydist import _native
from cydist.errors import AuthenticationError, DistError
from cydist.net import auth
from cydist.net.auth import ClientHandshake, ServerHandshake

# At once; and no more than a quarter of the descriptors that this process may have.
MOST_GUESTS = 256
GRACE = 0.1  # seconds that every guest has, however many wait outside
BACKLOG = 4096  # connections that the kernel keeps for us; a newcomer beyond them waits a second

_ACCEPTS_IN_TURN = 16
_PAUSE = 0.05  # seconds until we look again whether there is a descriptor
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def no_descriptor(error: Exception) -> bool:
    """Does this say that a process, or its host, has no descriptor left?"""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def explained(error: Exception) -> str:
    """The error for people: with what to do, where descriptors are short."""
    hint = ": close files, or raise the limit (ulimit -n)" if no_descriptor(error) else ""
    return f"{error}{hint}"


class HandshakeSocket:
    """A socket in its handshake, without blocking: whole messages in, what fits out.

    deadline    on time.monotonic(), for its owner to look at
    """

    __slots__ = ("_received", "deadline", "shake", "sock", "unsent")

    def __init__(
        self, sock: socket.socket, shake: ClientHandshake | ServerHandshake, deadline: float
    ) -> None:
        self.sock = sock
        self.shake = shake
        self.deadline = deadline
        self.unsent = b""
        self._received = b""

    def flush(self) -> None:
        """Send what can be sent. Raises OSError."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            self.unsent = self.unsent[sent:]

    def hear(self) -> bool:
        """Read one message if it is there; was it? Never reads a byte beyond it.

        Raises OSError, and what the handshake raises; then the other side has been told why.
        """
        try:
            part = self.sock.recv(self.shake.needs - len(self._received))
        except (BlockingIOError, InterruptedError):
            return False
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
        self._received += part
        self.shake.check_beginning(self._received)
        if len(self._received) < self.shake.needs:
            return False
        message, self._received = self._received, b""
        try:
            self.unsent += self.shake.receive(message)
        except AuthenticationError:
            with contextlib.suppress(OSError):
                self.sock.send(self.shake.farewell, socket.MSG_NOSIGNAL)
            raise
        return True


class PendingPeer(HandshakeSocket):
    """Somebody who connected to us."""

    __slots__ = ()
    shake: ServerHandshake


class Acceptor:
    """Listening sockets and the guests behind them, served by the thread of a selector.

    selector    for a key of it whose `data` is this door, call `react` with its `fileobj`
    secret, channel, job    what guests must prove to know, and to have come for
    also                    a second channel that they may come for
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: bytes,
        channel: bytes,
        job: str,
        also: bytes = b"",
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._channel = channel
        self._job = job
        self._also = also
        self._listeners: list[socket.socket] = []
        self._guests: dict[socket.socket, PendingPeer] = {}  # who came first is first
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST_GUESTS if limit < 0 else max(1, min(MOST_GUESTS, limit // 4))
        self._reopen: float | None = None  # when to listen again; None: listening
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def listen(self, listener: socket.socket) -> None:
        """Let guests in by this bound socket, which is the door's from now on."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        _native.replace_in_child(listener.fileno())
        self._selector.register(listener, selectors.EVENT_READ, self)

    def __len__(self) -> int:
        """The number of guests."""
        return len(self._guests)

    def close(self) -> None:
        """Close the listeners, and hang up on all guests.

        In a forked child the selector must be closed before: it is one with the parent's.
        """
        for listener in self._listeners:
            _native.keep_in_child(listener.fileno())
            # A child that was forked before the door had it may hold a copy, which would keep the
            # port. (In a forked child /dev/null is in its place.)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for sock in [*self._listeners, *self._guests]:
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            sock.close()
        self._listeners.clear()
        self._guests.clear()
        self._reopen = None
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def react(self, fileobj: object) -> PendingPeer | None:
        """Somebody is at the door, or a guest has said something or left.

        Returns a guest that has just proved itself, and is none any more: its socket is the
        caller's, and `unsent` is our proof, which it waits for.
        """
        assert isinstance(fileobj, socket.socket)
        guest = self._guests.get(fileobj)
        if guest is not None:
            return guest if self._proves_itself(guest) else None
        if fileobj in self._listeners and self._reopen is None:
            self._accept(fileobj)
        return None

    @property
    def alarm(self) -> float | None:
        """When `look_at_clock` will have something to do."""
        oldest = next(iter(self._guests.values()), None)
        times = [] if oldest is None else [oldest.deadline]
        return min([*times, *([] if self._reopen is None else [self._reopen])], default=None)

    def look_at_clock(self, now: float) -> None:
        """Hang up on guests that had their time, and open again."""
        while self._guests and (oldest := next(iter(self._guests.values()))).deadline <= now:
            self._dismiss(oldest)
        if self._reopen is not None and self._reopen <= now:
            self._reopen = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, self)

    def make_room(self) -> bool:
        """Give up the oldest guest for something that needs its descriptor; was there one?"""
        for guest in self._guests.values():
            self._dismiss(guest)
            return True
        return False

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_IN_TURN):
            full = len(self._guests) >= self._most
            if full and not self._may_replace():
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return
                if not self._guests:
                    self._turn_away(listener)
                    return
                if not self._may_replace():
                    return
                self.make_room()
                continue
            if full:
                self.make_room()
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        there = auth.address_of(sock)
        try:
            endpoints = auth.endpoints_of(sock, accepted=True)
            shake = ServerHandshake(
                self._secret, self._channel, self._job, there, self._also, endpoints
            )
            guest = PendingPeer(sock, shake, time.monotonic() + auth.HANDSHAKE_TIMEOUT)
            guest.unsent = shake.greeting
            sock.setblocking(False)
            guest.flush()
            self._selector.register(sock, selectors.EVENT_READ, self)
        except OSError:
            sock.close()
            return
        self._guests[sock] = guest

    def _proves_itself(self, guest: PendingPeer) -> bool:
        try:
            if not guest.hear():
                return False
        except (OSError, DistError):
            self._dismiss(guest)
            return False
        self._part_with(guest)
        return True

    def _part_with(self, guest: PendingPeer) -> None:
        del self._guests[guest.sock]
        self._selector.unregister(guest.sock)

    def _dismiss(self, guest: PendingPeer) -> None:
        self._part_with(guest)
        guest.sock.close()

    def _may_replace(self) -> bool:
        """Has the oldest guest had its time? If not, close the door until then."""
        oldest = next(iter(self._guests.values()))
        due = oldest.deadline - auth.HANDSHAKE_TIMEOUT + GRACE
        if due > time.monotonic():
            self._rest(due)
            return False
        return True

    def _turn_away(self, listener: socket.socket) -> None:
        """No descriptor is left: on the spare one, tell newcomers so, and look again soon.

        Left waiting, they would keep the listener ready, and us busy.
        """
        for _ in range(_ACCEPTS_IN_TURN):
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
        self._rest(time.monotonic() + _PAUSE)

    def _rest(self, until: float) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._reopen = until

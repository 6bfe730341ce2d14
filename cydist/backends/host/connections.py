"""Listen, connect and authenticate: the sockets of a TcpLink.

A link asks for a connection when a message first needs it. One daemon thread listens, connects and
runs every handshake (cydist/net/auth.py) without blocking. It hands an authenticated socket to the
link and never reads it again.

Both ranks of a pair may connect at once. The lower rank's attempt wins: once that rank has sent its
proof it refuses the other attempt, and the higher rank drops its own when the proof arrives. So
exactly one connection per pair and lane survives.

An unauthenticated client costs one connection and nothing else, see cydist/net/acceptor.py.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from cydist import config
from cydist._native import TcpLink, failpoint
from cydist.backends.host import addresses, directory, peer_report, queries
from cydist.backends.host.addresses import Address, SocketAddress
from cydist.backends.host.connect_attempt import (
    CONNECT_TIMEOUT,
    LONGEST_PAUSE,
    ConnectAttempt,
    Key,
    set_options,
)
from cydist.backends.host.directory import Peers
from cydist.errors import AuthenticationError, DistError, DistNetworkError, RendezvousError
from cydist.logs import Log, follow, rank_of_thread
from cydist.net import auth
from cydist.net.acceptor import Acceptor, HandshakeSocket, PendingPeer, no_descriptor, with_remedy
from cydist.net.auth import ClientHandshake
from cydist.net.encryption import check_encryption
from cydist.net.interfaces import chosen_interfaces, family_of, interface_addresses
from cydist.net.silence import peer_timeout, watch_idle
from cydist.waiting import LONGEST_WAIT, LoopGuard, run_on_thread

_log = Log("connections")

CHANNEL = b"peer"
CLAIM = struct.Struct("<IIH")  # source, destination, lane
CANDIDATE_TIMEOUT = 5.0  # seconds for a TCP connection to one address
ASK_TIMEOUT = 3.0  # seconds for one directory to answer
REFUSALS = 3  # rounds in which every address refuses, until the peer counts as gone


class Connections:
    """The connections of one rank, and the link that uses them.

    Args:
        rank, size: Of this process, among those that exchange addresses.
        host: Where to listen unless CYDIST_SOCKET_IFNAME names interfaces: a name or a numeric
            address.
        job: Equal on all ranks, and different for other jobs with the same secret.
        secret: Of the job; None: the one that this process has.

    Attributes:
        report_of: Returns this rank's report on the group with a comm_id. Set later.

    Raises DistNetworkError when it cannot listen there.
    """

    def __init__(
        self, rank: int, size: int, *, host: str, job: str, secret: bytes | None = None
    ) -> None:
        self._rank = rank
        self._size = size
        self._job = job
        check_encryption()
        self._secret = auth.secret() if secret is None else secret
        self._peer_timeout = peer_timeout()
        names = chosen_interfaces()
        self._chosen = bool(names)
        places = [interface_addresses(name) for name in names] or [addresses.resolve_host(host)]
        self._lanes: list[list[SocketAddress]] = []
        self._peers: Peers | None = None
        self._attempts: dict[Key, ConnectAttempt] = {}
        self._wanted: list[Key] = []  # requested by the link, not tried yet
        # Requested, and the peer's address is not known yet; and when the link requested it.
        self._without_address: dict[Key, float] = {}
        # What a thread found that asks for addresses: why it has none, or "". None: no such thread.
        self._found: dict[int, str] | None = None
        self._asking = False
        self._stopping = False
        self._wanted_fd = -1
        self._thread: threading.Thread | None = None
        self.link = TcpLink(rank, size, len(places))
        self._selector = selectors.DefaultSelector()
        self.report_of: Callable[[int], peer_report.PeerReport] | None = None
        also = [directory.CHANNEL]
        if not config.INSECURE.is_on():
            also.append(peer_report.CHANNEL)
        self._acceptor = Acceptor(self._selector, self._secret, CHANNEL, job, also)
        self._logged_rank = rank_of_thread()
        self._wake, self._waker = socket.socketpair()
        try:
            for place in places:
                self._lanes.append(self._listen(place))
        except BaseException:
            self.close()
            raise
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._loop_guard = LoopGuard(f"thread cydist-connections-{rank}")
        self._thread = threading.Thread(
            target=self._serve, name=f"cydist-connections-{rank}", daemon=True
        )
        self._thread.start()
        _alive.add(self)

    def _listen(self, place: list[str]) -> list[SocketAddress]:
        """Listen on every address of one lane that can be bound."""
        endpoints: list[SocketAddress] = []
        failures = []
        for host in place:
            listener = None
            try:
                listener = socket.socket(family_of(host), socket.SOCK_STREAM)
                if listener.family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((host, 0))
                listener.listen()
            except OSError as error:
                failures.append(f"{host}: {error}")
                if listener is not None:
                    listener.close()
                continue
            self._acceptor.listen(listener)
            endpoints.append((host, listener.getsockname()[1]))
        if not endpoints:
            raise DistNetworkError(
                f"rank {self._rank} cannot listen on any of its addresses: {'; '.join(failures)}"
            )
        return endpoints

    def address(self) -> bytes:
        """Return this rank's address, which the other ranks pass to `connect`."""
        return Address(self._rank, addresses.this_host(), self._lanes).encode()

    def places(self) -> str:
        """Return where this rank listens, for logs."""
        names = chosen_interfaces() or [""] * len(self._lanes)
        return ", ".join(
            " ".join(map(addresses.host_port, lane)) + (f" ({name})" if name else "")
            for name, lane in zip(names, self._lanes, strict=False)
        )

    def connect(self, published: Sequence[bytes]) -> None:
        """Store every rank's address, in rank order, without connecting.

        Raises RendezvousError if they do not fit together.
        """
        if len(published) != self._size:
            raise RendezvousError(f"ranks: {self._size}, addresses: {len(published)}")
        self.know(directory.of_all(published))

    def know(self, peers: Peers) -> None:
        """Learn where the peers are, as far as this rank has to know, without connecting."""
        self.link.share_cores(len(peers.beside(self._rank)))
        self.link.know_hosts(peers.hosts, self._peer_timeout)
        # A copy, since the link closes its own while it is still watched here. A connection that
        # comes then may get the number.
        self._wanted_fd = os.dup(self.link.wanted_fd)
        self._selector.register(self._wanted_fd, selectors.EVENT_READ)
        self._peers = peers
        self._wake_thread()

    def connect_error(self, peer: int) -> str:
        """Return why there is no connection to `peer` yet, for messages; "" if none is being
        made."""
        tries = [attempt for key, attempt in list(self._attempts.items()) if key[0] == peer]
        return f"no connection to it yet: {tries[0].last_error}" if tries else ""

    def close(self) -> None:
        """Close the listeners, then the link, which sends departure notices. Idempotent."""
        self._stopping = True
        try:
            if self._thread is not None and self._thread is not threading.current_thread():
                self._wake_thread()
                self._thread.join()
        finally:  # a signal handler may raise in join
            self._close_sockets()
            self.link.close()
            self.report_of = None

    def host_of(self, peer: int) -> str:
        """Return the name of a rank's host; "" if no address from there is known."""
        return self._known_peers().host_of(peer)

    def ranks_beside(self, peer: int) -> list[int]:
        """Return all ranks on a rank's host."""
        return self._known_peers().beside(peer)

    def query(self, peer: int, comm_id: int, deadline: float) -> peer_report.PeerReport:
        """Query a peer's report on a group, and block until it answers.

        Raises OSError or DistError.
        """
        return peer_report.query(
            [place for lane in self._address_of(peer, deadline).lanes for place in lane],
            secret=self._secret,
            job=self._job,
            claim=peer_report.CLAIM.pack(self._rank, peer, comm_id),
            deadline=deadline,
        )

    def _known_peers(self) -> Peers:
        assert self._peers is not None, "it is called after `know`"
        return self._peers

    def _address_of(self, peer: int, deadline: float) -> Address:
        """Return a peer's address, and block until a directory answers if it is not known. Raises
        DistError."""

        def ask(of: Address, claim: bytes) -> bytes:
            return queries.ask(
                [place for lane in of.lanes for place in lane], channel=directory.CHANNEL,
                secret=self._secret, job=self._job, claim=claim,
                deadline=min(deadline, time.monotonic() + ASK_TIMEOUT),
            )  # fmt: skip

        return directory.lookup(peer, self._known_peers(), ask, self._rank, deadline)

    def pending_peers(self) -> int:
        """Return how many connections are not authenticated yet."""
        return len(self._acceptor)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _close_sockets(self) -> None:
        # The selector first: in a forked child, unregistering would reach into the parent's.
        self._selector.close()
        self._acceptor.close()
        for attempt in self._attempts.values():
            if attempt.connecting is not None:
                attempt.connecting.sock.close()
        self._attempts.clear()
        if self._wanted_fd >= 0:
            os.close(self._wanted_fd)
            self._wanted_fd = -1
        self._wake.close()
        self._waker.close()

    def _forget_in_child(self) -> None:
        """In a forked child, close its copies of the parent's descriptors."""
        self._thread = None
        self._close_sockets()
        self.link.close()

    # The thread.

    def _serve(self) -> None:
        follow(self._logged_rank)
        while not self._stopping:
            with self._loop_guard:
                self._round()

    def _round(self) -> None:
        now = time.monotonic()
        alarms = [
            now + LONGEST_WAIT,
            *(attempt.next_deadline for attempt in self._attempts.values()),
        ]
        if self._acceptor.next_deadline is not None:
            alarms.append(self._acceptor.next_deadline)
        unasked = self._without_address and not self._asking
        if (
            self._wanted or unasked or self._found is not None
        ):  # a round that raised did not reach it
            alarms.append(now)
        for key, _ in self._selector.select(max(0.0, min(alarms) - now)):
            if self._stopping:
                return
            try:
                self._react(key)
            except Exception as error:
                self._loop_guard.record(error)  # other ranks do not wait for that
        self._start_requested()
        self._expire(time.monotonic())

    def _react(self, key: selectors.SelectorKey) -> None:
        if key.data is self._acceptor:
            pending = self._acceptor.react(key.fileobj)
            if pending is not None:
                self._serve_member(pending)
        elif isinstance(key.data, ConnectAttempt):
            if self._attempts.get(key.data.key) is key.data and key.data.connecting is not None:
                self._advance(key.data)
        elif key.fileobj is self._wake:
            with contextlib.suppress(OSError):
                self._wake.recv(64)

    def _expire(self, now: float) -> None:
        self._acceptor.expire(now)
        for attempt in list(self._attempts.values()):
            if attempt.connected:
                # Its kernel has accepted. If its process is stopped, that says nothing of its end.
                continue
            if attempt.deadline <= now:
                self._give_up(attempt, f"{attempt.last_error} (for {CONNECT_TIMEOUT:g} s)")
            elif not attempt.heard and attempt.silent_until <= now:
                self._no_answer(attempt)
            elif attempt.resume is not None and attempt.resume <= now:
                self._try_next(attempt, now)
            elif attempt.connecting is not None and attempt.connecting.deadline <= now:
                self._failed(attempt, "no answer in time")

    # Incoming connections.

    def _serve_member(self, pending: PendingPeer) -> None:
        """Take a member's connection, or answer its question."""
        if pending.handshake.channel == CHANNEL:
            self._admit(pending)
        elif pending.handshake.channel == peer_report.CHANNEL:
            peer_report.answer(pending, self._rank, self.report_of)
        else:
            with pending.sock, contextlib.suppress(OSError):
                if self._peers is not None:
                    found = directory.answer(pending.handshake.claim, self._rank, self._peers)
                    queries.tell(pending, found)

    def _admit(self, peer: PendingPeer) -> None:
        """Hand an authenticated connection to the link, or close it."""
        failpoint("connect")
        sock, proof = peer.sock, peer.unsent
        lane = self._lane_of(peer.handshake.claim)
        if lane is None:
            sock.close()
            return
        try:
            # The proof is short. An empty socket that does not take it is broken.
            taken = sock.send(proof, socket.MSG_NOSIGNAL) == len(proof)
        except OSError:
            taken = False
        if not taken:
            sock.close()
        elif self._hand_over(lane, peer):
            own = self._attempts.get(lane)
            if own is not None:
                self._drop(own)

    def _lane_of(self, claim: bytes) -> Key | None:
        """Return the lane that a pending peer requests, if it may have it; else None."""
        if len(claim) != CLAIM.size:
            return None
        source, destination, lane = CLAIM.unpack(claim)
        if destination != self._rank or source == self._rank or source >= self._size:
            return None
        if lane >= len(self._lanes) or self.link.lane_is_live(source, lane):
            return None
        own = self._attempts.get((source, lane))
        if own is not None and self._rank < source and own.answered:
            return None
        return source, lane

    def _hand_over(self, lane: Key, connected: HandshakeSocket) -> bool:
        """Give the socket and its keys to the link. Returns False if the link did not want the
        socket; it is closed then."""
        sock = connected.sock
        try:
            set_options(sock)
            # Not a duplicate, since there may be no descriptor left for one.
            keys = connected.handshake.keys(b"frames")
            if self.link.adopt(*lane, sock.fileno(), *keys, connected.handshake.cipher):
                _log.debug(
                    "connected with rank %d of the link, interface %d: %s%s", *lane,
                    connected.handshake.there,
                    ", encrypted" if connected.handshake.cipher is not None else "",
                )  # fmt: skip
                sock.detach()
                return True
        except (OSError, MemoryError):
            pass
        sock.close()
        return False

    # Outgoing connections.

    def _start_requested(self) -> None:
        """Start the connections that the link requests, once the addresses are known."""
        peers = self._peers
        if peers is None:
            return
        self._take_found()
        self._wanted += self.link.wanted()  # the link does not request it again
        now = time.monotonic()
        while self._wanted:
            key = self._wanted[-1]
            peer, lane = key
            address = peers.known.get(peer)
            if address is None:
                self._without_address.setdefault(key, now)
            else:
                since = self._without_address.pop(key, now)
                if key not in self._attempts:
                    self._attempts[key] = ConnectAttempt(key, address.lanes[lane], now, since)
            del self._wanted[-1]
        if self._without_address and not self._asking:
            wanted = dict.fromkeys(peer for peer, _ in self._without_address)
            self._asking = True
            run_on_thread(partial(self._find, list(wanted)), name=f"cydist-addresses-{self._rank}")

    def _find(self, wanted: list[int]) -> None:
        """On a thread of its own, as it blocks: ask for the addresses of these ranks."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + CONNECT_TIMEOUT
        for peer in wanted:
            if self._stopping:
                return
            try:
                self._address_of(peer, deadline)
                found[peer] = ""
            except Exception as error:
                found[peer] = str(error)
        self._found = found
        self._wake_thread()

    def _take_found(self) -> None:
        """Go on with the peers whose addresses are known now, and give up those that have none."""
        found, self._found = self._found, None
        if found is None:
            return
        self._asking = False
        for peer, why in found.items():
            if why and not self.link.lane_is_live(peer, 0):
                self.link.refuse(peer, why)
        self._without_address = {
            key: since for key, since in self._without_address.items() if not found.get(key[0])
        }
        self._wanted += self._without_address

    def _try_next(self, attempt: ConnectAttempt, now: float) -> None:
        target = attempt.targets[attempt.next % len(attempt.targets)]
        attempt.next += 1
        attempt.resume = None
        attempt.connected = False
        try:
            sock = self._new_socket(family_of(target[0]))
        except OSError as error:
            self._failed(attempt, f"{addresses.host_port(target)}: {with_remedy(error)}")
            return
        claim = CLAIM.pack(self._rank, *attempt.key)
        there = f"rank {attempt.key[0]} at {addresses.host_port(target)}"
        handshake = ClientHandshake(self._secret, CHANNEL, self._job, claim, there)
        if attempt.next == 1:
            attempt.last_error = f"{there}: no answer"
        attempt.connecting = HandshakeSocket(sock, handshake, now + CANDIDATE_TIMEOUT)
        try:
            sock.setblocking(False)
            self._bind(sock, attempt.key[1])
            code = sock.connect_ex(target)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            self._selector.register(sock, selectors.EVENT_WRITE, attempt)
        except OSError as error:
            self._failed(attempt, f"{addresses.host_port(target)}: {error}")

    def _new_socket(self, family: socket.AddressFamily) -> socket.socket:
        """Return a socket. If no descriptor is left, close a pending peer for it."""
        while True:
            try:
                return socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                if not (no_descriptor(error) and self._acceptor.evict_oldest()):
                    raise

    def _bind(self, sock: socket.socket, lane: int) -> None:
        """Bind to the lane's own interface, if interfaces were chosen."""
        if self._chosen:
            for host, _ in self._lanes[lane]:
                if family_of(host) == sock.family:
                    sock.bind((host, 0))

    def _advance(self, attempt: ConnectAttempt) -> None:
        connecting = attempt.connecting
        assert connecting is not None
        assert isinstance(connecting.handshake, ClientHandshake)
        try:
            if not attempt.connected:
                code = connecting.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                connecting.handshake.endpoints = auth.endpoints_of(connecting.sock, accepted=False)
                watch_idle(connecting.sock)
                attempt.connected = attempt.heard = True
                attempt.last_error = f"{connecting.handshake.there} has not greeted this rank yet"
                failpoint("connect")
                attempt.refusals = 0
                # From here on the peer may regard the connection as made, or be stopped: wait as
                # long as its kernel lives.
                connecting.deadline = math.inf
                self._selector.modify(connecting.sock, selectors.EVENT_READ, attempt)
                return
            if not connecting.receive():
                return
            connecting.flush()
            if connecting.handshake.done:
                attempt.connecting = None
                self._selector.unregister(connecting.sock)
                self._hand_over(attempt.key, connecting)
                self._drop(attempt)
        except AuthenticationError as error:
            self._give_up(attempt, str(error))
        except (OSError, DistError) as error:
            self._failed(attempt, f"{connecting.handshake.there}: {with_remedy(error)}")

    def _failed(self, attempt: ConnectAttempt, why: str) -> None:
        """Go on to the next address after a failure, or rest after the last one."""
        attempt.last_error = why
        _log.debug("no connection to rank %d of the link so far: %s", attempt.key[0], why)
        refused = f"[Errno {errno.ECONNREFUSED}]" in why
        attempt.refusals = attempt.refusals + 1 if refused else 0
        attempt.heard = attempt.heard or refused
        self._hang_up(attempt)
        if self.link.lane_is_live(*attempt.key):
            self._drop(attempt)
            return
        if attempt.refusals >= REFUSALS * len(attempt.targets):
            self._give_up(attempt, why)
            return
        attempt.resume = time.monotonic()
        if attempt.next % len(attempt.targets) == 0:
            attempt.resume += attempt.pause
            attempt.pause = min(2 * attempt.pause, LONGEST_PAUSE)

    def _no_answer(self, attempt: ConnectAttempt) -> None:
        """Give up a peer whose host has said nothing, unless it answers another connection: then
        a firewall may let the peer connect to this rank."""
        if self.link.host_answers(attempt.key[0]):
            attempt.heard = True
            return
        self._drop(attempt)
        _log.debug("the host of rank %d of the link answers nothing: gone", attempt.key[0])
        self.link.vanish(attempt.key[0])

    def _hang_up(self, attempt: ConnectAttempt) -> None:
        attempt.connected = False
        if attempt.connecting is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(attempt.connecting.sock)
            attempt.connecting.sock.close()
            attempt.connecting = None

    def _drop(self, attempt: ConnectAttempt) -> None:
        self._hang_up(attempt)
        self._attempts.pop(attempt.key, None)

    def _give_up(self, attempt: ConnectAttempt, why: str) -> None:
        self._drop(attempt)
        if not self.link.lane_is_live(*attempt.key):
            _log.debug("gave up rank %d of the link: %s", attempt.key[0], why)
            self.link.refuse(attempt.key[0], f"no connection to rank {attempt.key[0]}: {why}")


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connections in list(_alive):
        connections._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)

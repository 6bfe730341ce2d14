"""TCPStore: a store served by one rank and used by all.

Every operation is acknowledged. A call takes its own connection from a pool, so a thread that waits
for a key never keeps another thread from setting it. Timeouts are measured on the monotonic clock.
A dead or stopped server causes an error at the timeout, not a hang.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cydist import config
from cydist._native import SilenceWatch
from cydist.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTimeoutError,
    PeerFailedError,
    QueueEmptyError,
    StoreTimeoutError,
    counted,
)
from cydist.net import auth
from cydist.net.acceptor import no_descriptor, with_remedy
from cydist.net.auth import ClientHandshake
from cydist.net.descriptors import make_room
from cydist.net.encryption import check_encryption
from cydist.net.interfaces import public_address, resolve, why_unreachable
from cydist.net.records import HEAD_BYTES, Records
from cydist.net.silence import peer_timeout, watch_idle
from cydist.stores.protocol import (
    CHANNEL,
    INTERNAL,
    MAX_FRAME_BYTES,
    Op,
    Reply,
    ReplyStatus,
    StoreRequest,
    decode_reply,
    encode_request,
)
from cydist.stores.store import Store, Timeout, Value, as_bytes, store_timeout
from cydist.waiting import STORE_TIMEOUT, WaitNotices, one_wait

if TYPE_CHECKING:
    from cydist.stores.server_refcount import ServerRefcount
    from cydist.stores.tcp_server import StoreServer

_GRACE = 0.3  # seconds by which the client's deadline follows the server's
_CLOSED_LIMIT = 2.0  # seconds of closed connections until the server counts as another service
_SECONDS_PER_USER = 0.01  # by which the server may be busy with each of the other users
_LINGER = 1.0  # seconds for which a server whose rank is done still serves the others
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
_SHORTEST_TRY = 1.0  # seconds that an attempt to connect has, if the deadline is later
_IDLE_CONNECTIONS = 8
_MOST_SHOWN = 16  # users that a message lists

_WORKERS = INTERNAL + b"workers"
_WORKER = INTERNAL + b"worker/%d"


class TCPStore(Store):
    """A store in the memory of one process, the master, which all others access over TCP.

    A master raises its soft limit of descriptors if that leaves no room for `world_size` users.

    Args:
        host_name: Where the master listens: a name, IPv4 or IPv6, and no other address. "" on the
            master: loopback and the address from which it reaches other hosts.
        port: 0 on the master: any free one, which `port` then returns.
        world_size: Number of users, including the master; None: not fixed.
        is_master: Serve the store from this process.
        timeout: Of the constructor, and the default of later calls.
        wait_for_workers: The master returns when `world_size` users have joined. After 3 s and then
            every 30 s it prints which processes have.
        multi_tenant: Masters of one process share one server for the same host and port.
        master_listen_fd: A socket bound to `port`, listening or not, on which to serve.
        use_libuv: Accepted and ignored.
        job: Separates jobs that share a secret; the same on all users.
        awaited: A launcher listens on the port until the master serves: wait for the master's first
            message until the timeout, not only for 2 s.

    Raises:
        TypeError: `world_size` or `is_master` is of another type, as if an argument were missing.
        DistNetworkError: The port is taken, or no descriptor is left for `world_size` users within
            the hard limit.
        AuthenticationError: The two sides do not share a secret.
        DistStoreError: Another service answers.
        StoreTimeoutError: None answers.

    Examples:
        >>> store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        >>> reader = dist.TCPStore("localhost", store.port)
        >>> store.set("epoch", "3")
        >>> reader.get("epoch")
        b'3'
    """

    __module__ = "cydist"

    authenticated = True

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        job: str = "",
        awaited: bool = False,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(is_master, bool) or isinstance(world_size, bool):
            raise TypeError(
                f"TCPStore: world_size={world_size!r} must be a number or None, and "
                f"is_master={is_master!r} True or False; they are the third and fourth argument"
            )
        if not 0 <= port <= 65535 or (port == 0 and not is_master):
            raise ValueError(f"port must be 1 to 65535, or 0 on the master, not {port}")
        if world_size is not None and world_size < 0:
            world_size = None
        deadline = time.monotonic() + self._timeout
        check_encryption()
        secret = auth.secret()
        refcount = None
        if is_master:
            if world_size is not None:
                # Each user that meets others here has a second connection, for its will.
                make_room(
                    2 * world_size, world_size, f"serving a store to {counted(world_size, 'user')}"
                )
            refcount = _serve(host_name, port, secret, job, multi_tenant, master_listen_fd)
            port = refcount.server.port
            host_name = host_name or public_address()
        crowd = _SECONDS_PER_USER * (world_size or 0)
        self._acquire(_Pool(host_name, port, secret, job, crowd), refcount)
        try:
            self._pool.release(self._pool.connect(deadline, patient=True, awaited=awaited))
            self._join(world_size, is_master and wait_for_workers, deadline)
        except BaseException:
            self.close()
            raise

    def _acquire(self, pool: _Pool, refcount: ServerRefcount | None) -> None:
        """Use these until this object is closed or collected."""
        self._pool = pool
        self._refcount = refcount
        self._letting_go = weakref.finalize(self, _release, pool, refcount, _LINGER)
        self._letting_go.atexit = False  # `_at_exit` does it

    @property
    def host(self) -> str:
        """Return the requested host.

        Returns:
            A name or an address.
        """
        return self._pool.host

    @property
    def libuvBackend(self) -> bool:
        """Return False: the server does not use libuv, which is a choice of torch's.

        Returns:
            False.
        """
        return False

    @property
    def port(self) -> int:
        """Return the port that the master listens on.

        Returns:
            The port, which is never 0.
        """
        return self._pool.port

    def _join(self, world_size: int | None, wait: bool, deadline: float) -> None:
        """Count this worker; on the master, wait until all workers are counted."""
        (count,) = self._request(StoreRequest(Op.ADD, (_WORKERS,), (b"1",), False, self._timeout))
        me = f"process {os.getpid()} on {socket.gethostname()}".encode()
        self._request(StoreRequest(Op.SET, (_WORKER % int(count),), (me,), False, self._timeout))
        if not wait or not world_size:
            return
        notices = WaitNotices()
        while True:
            left = max(0.0, deadline - time.monotonic())
            pause = min(left, notices.left)
            try:
                self._request(StoreRequest(Op.WAIT, (_WORKER % world_size,), (), True, pause))
                return
            except StoreTimeoutError as error:
                if pause == left or not error.answered:
                    raise StoreTimeoutError(
                        f"TCPStore on {self._pool.name}: timeout after {self._timeout:g} s: "
                        f"{self._joined(world_size)}",
                        answered=error.answered,
                    ) from None
            notices.say_if_due(
                lambda seconds: (
                    f"{_who()} has waited {seconds:.0f} s for the users of the TCPStore on "
                    f"{self._pool.name}: {self._joined(world_size)}"
                )
            )

    def _joined(self, world_size: int) -> str:
        """Return who has joined, for messages. Users of a store have no ranks."""
        (count,) = self._request(StoreRequest(Op.GET, (_WORKERS,), (), True, 1.0))
        shown = range(1, min(int(count), _MOST_SHOWN) + 1)
        names: Sequence[bytes] = ()
        with contextlib.suppress(StoreTimeoutError):  # one died before it wrote its name
            keys = tuple(_WORKER % each for each in shown)
            names = self._request(StoreRequest(Op.GET, keys, (), True, 1.0))
        listed = ", ".join(name.decode(errors="replace") for name in names)
        more = int(count) - len(shown)
        return (
            f"{int(count)} of {counted(world_size, 'user')} have joined ({listed}"
            f"{f' and {more} more' if more > 0 else ''}), and the store knows no ranks: with "
            "wait_for_workers=False it does not wait, and init_process_group names missing ranks"
        )

    def _request(self, request: StoreRequest, *, for_will: bool = False) -> Sequence[bytes]:
        request.check_sizes()
        deadline = time.monotonic() + request.limit
        connection = self._pool.acquire(deadline, for_will=for_will)
        try:
            reply = self._exchange(connection, request, deadline)
        except BaseException:
            # A late reply on this connection would be taken for the next call's answer.
            connection.close()
            raise
        self._pool.release(connection, for_will=for_will)
        if reply.status is ReplyStatus.OK:
            return reply.items
        if reply.status is ReplyStatus.TIMEOUT:
            count, *missing = reply.items
            where = f"TCPStore on {self._pool.name}"
            raise store_timeout(where, request.timeout, missing, int(count))
        error = QueueEmptyError if reply.status is ReplyStatus.QUEUE_EMPTY else DistStoreError
        raise error(b" ".join(reply.items).decode(errors="replace"))

    def _exchange(self, connection: _Connection, request: StoreRequest, deadline: float) -> Reply:
        left = max(0.0, deadline - request.patience - time.monotonic())
        try:
            connection.send(encode_request(request._replace(timeout=left)), deadline + _GRACE)
            reply = decode_reply(connection.receive(deadline + _GRACE))
        except AuthenticationError:  # an OSError, too
            self._pool.cut_off = True
            raise
        except TimeoutError:
            raise StoreTimeoutError(
                f"{request.op.name.lower()}: timeout: the store at {self._pool.name} did not "
                f"answer within {request.limit:g} s; its process is stopped, or its host cut off",
                answered=False,
            ) from None
        except OSError as error:
            self._pool.cut_off = True
            raise DistStoreError(
                f"{request.op.name.lower()}: lost the store at {self._pool.name} ({error}); "
                "the process that served it has probably ended",
                answered=False,
            ) from None
        self._pool.cut_off = reply.status is ReplyStatus.TAMPERED
        if self._pool.cut_off:
            raise AuthenticationError(
                f"{request.op.name.lower()}: the store at {self._pool.name} got another request "
                f"than this one: {b' '.join(reply.items).decode(errors='replace')}"
            )
        if not reply.answers(request):
            raise DistStoreError(
                f"{request.op.name.lower()}: the store at {self._pool.name} has no answer to that: "
                f"{reply.status.name} with {len(reply.items)} items"
            )
        return reply

    def reports_disconnects(self) -> bool:
        """Return True: the server sees each connection end."""
        return True

    def refusals(self) -> tuple[str, ...]:
        """Return why this process's server refused clients lately; empty on other users."""
        return () if self._refcount is None else self._refcount.server.refusals()

    def watch(
        self, key: str, known: bytes, keys: Sequence[str], timeout: Timeout, patience: float = 0.0
    ) -> bytes | list[bytes]:
        """Wait until all `keys` have a value, or `key` has another than `known`, as `Store.watch`
        does.

        A server that is stopped may take `patience` seconds more to answer.
        """
        value, *found = self._call(
            Op.WATCH, [key, *keys], [known], block=True, timeout=timeout, patience=patience
        )
        return found if len(found) == len(keys) else value

    def will(self, key: str, value: Value) -> None:
        """Let the server append `value` to `key` if this process ends without closing the store.

        It may be killed, call `os._exit`, raise an uncaught exception, or end normally. This takes
        one more connection.
        """
        request = StoreRequest(Op.WILL, (key.encode(),), (as_bytes(value),), False, self._timeout)
        self._request(request, for_will=True)
        self._pool.wills.append((key, value))

    def withdraw_will(self, key: str, value: Value) -> None:
        """Undo `will`; other wills of this object stay. Best effort."""
        ended, rest = self._pool.detach(key, value)
        try:
            with contextlib.suppress(DistStoreError):
                for each in rest:
                    self.will(*each)
        finally:
            for connection in ended:
                connection.disconnect()

    def num_keys(self) -> int:
        """Return the number of keys: one more than the user's, for the count of workers."""
        return super().num_keys() + 1

    def clone(self) -> TCPStore:
        """Return another object for the same server, with a timeout and connections of its own."""
        twin = TCPStore.__new__(TCPStore)
        Store.__init__(twin, self.timeout)
        if self._refcount is not None and not self._refcount.join():
            raise DistStoreError(f"this TCPStore on {self._pool.name} is closed")
        twin._acquire(self._pool.clone_handle(), self._refcount)
        return twin

    def close(self) -> None:
        """Close the connections, and the server at once when its last user in this process closes.

        Garbage collection and the end of the process do the same, but the server then still serves
        the connected ranks for a moment, since they may be about to finish. At the end of the
        process wills are carried out.
        """
        if self._letting_go.detach() is not None:
            _release(self._pool, self._refcount, 0.0)

    def release(self) -> None:
        """Close as garbage collection does, for objects that an exception, for example, keeps from
        being collected. The port is free on return."""
        self._letting_go()


def _release(pool: _Pool, refcount: ServerRefcount | None, linger: float) -> None:
    pool.close()
    if refcount is not None:
        refcount.leave(linger)


@atexit.register
def _at_exit() -> None:
    """Let servers finish. All stop here, whether or not garbage was collected before."""
    for pool in list(_pools):
        pool.close(ended=True)
    for server in list(_servers):
        server.stop(_LINGER)
        server.wait(_LINGER + 1)


_servers: Collection[StoreServer] = ()  # of this process, if it has served


def _serve(
    host: str, port: int, secret: bytes, job: str, multi_tenant: bool, fd: int | None
) -> ServerRefcount:
    from cydist.stores.server_refcount import serve, servers  # only one rank needs them

    global _servers
    _servers = servers
    return serve(host, port, secret, job, multi_tenant, fd)


class _Pool:
    """Authenticated connections to one server; each call has its own."""

    def __init__(self, host: str, port: int, secret: bytes, job: str, crowd: float = 0.0) -> None:
        self.host = host
        self.port = port
        self._secret = secret
        self._job = job
        # Seconds that the server may need for the others, if all come at once.
        self._crowd = crowd
        self._idle: list[_Connection] = []
        # Connections whose end, without a goodbye, tells the server that this process has ended.
        self._will_connections: list[_Connection] = []
        self.wills: list[tuple[str, Value]] = []  # wills on those connections
        self.cut_off = False  # the last request lost its connection
        self._lock = threading.Lock()
        self._closed = False
        _pools.add(self)

    @property
    def name(self) -> str:
        """Return host:port, for messages."""
        bare = self.host.strip("[]")
        return f"[{bare}]:{self.port}" if ":" in bare else f"{bare}:{self.port}"

    def clone_handle(self) -> _Pool:
        return _Pool(self.host, self.port, self._secret, self._job, self._crowd)

    def acquire(self, deadline: float, *, for_will: bool = False) -> _Connection:
        kept = self._will_connections if for_will else self._idle
        with self._lock:
            if self._closed:
                raise DistStoreError(f"this TCPStore on {self.name} is closed")
            if kept:
                return kept.pop()
        # The server has been reached before: if it is gone now, it stays gone.
        return self.connect(deadline, patient=False)

    def release(self, connection: _Connection, *, for_will: bool = False) -> None:
        with self._lock:
            if not self._closed and (for_will or len(self._idle) < _IDLE_CONNECTIONS):
                (self._will_connections if for_will else self._idle).append(connection)
                return
        connection.disconnect() if for_will else connection.close()

    def detach(self, key: str, value: Value) -> tuple[list[_Connection], list[tuple[str, Value]]]:
        """Remove the connections that carry this will, and return the other wills that they
        carry."""
        ended, rest = [], []
        with self._lock:
            if (key, value) in self.wills:
                self.wills.remove((key, value))
                (ended, self._will_connections), (rest, self.wills) = (
                    (self._will_connections, []),
                    (self.wills, []),
                )
        return ended, rest

    def close(self, *, ended: bool = False) -> None:
        """Close all connections; without a departure notice if the process has ended, or gives up
        because it lost a connection."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._will_connections:
                connection.close() if ended or self.cut_off else connection.disconnect()
            self._will_connections.clear()

    def abandon(self) -> None:
        """In a forked child, drop the connections, which the parent goes on using, and make new
        ones."""
        self._lock = threading.Lock()
        for connection in self._idle + self._will_connections:
            connection.close()
        self._idle, self._will_connections, self.wills = [], [], []

    def connect(self, deadline: float, *, patient: bool, awaited: bool = False) -> _Connection:
        """Return a new connection, authenticated.

        Args:
            patient: Keep trying until the deadline while no process listens there.
            awaited: Also while a process listens there, but does not serve yet.
        """
        started = time.monotonic()
        pause = _FIRST_PAUSE
        failure: Exception | None = None
        notices = WaitNotices()
        while True:
            try:
                limit = deadline if patient else min(deadline, started + peer_timeout())
                return self._connect_once(deadline, limit, awaited, notices if patient else None)
            except AuthenticationError:
                raise
            except DistTimeoutError as error:
                if awaited and time.monotonic() >= deadline:
                    raise self._missing(deadline - started, error) from None
                raise StoreTimeoutError(
                    f"{self.name} is not a cydist store, or the process that serves it is "
                    "stopped: it did not greet us in time",
                    answered=False,
                ) from None
            except PeerFailedError as error:
                # The server has too many unauthenticated clients, or is not a cydist store.
                failure = error
                if not awaited and time.monotonic() - started > _CLOSED_LIMIT + self._crowd:
                    raise DistStoreError(
                        f"{self.name} is not a cydist store, or has too many unauthenticated "
                        f"clients: {error}"
                    ) from None
            except DistNetworkError as error:
                raise DistStoreError(f"{self.name} is not a cydist store: {error}") from None
            except OSError as error:
                # An attempt that the deadline cut short does not hide the error of an earlier one.
                if failure is None or not isinstance(error, TimeoutError):
                    failure = error
                if not patient and not no_descriptor(error):
                    raise DistStoreError(
                        f"lost the store at {self.name} ({error}); the process that served it "
                        "has probably ended",
                        answered=False,
                    ) from None
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._missing(deadline - started, failure)
            notices.say_if_due(partial(self._notice, failure))
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _notice(self, failure: Exception, seconds: float) -> str:
        why = why_unreachable(self.host, failure)
        return f"{_who()} has waited {seconds:.0f} s for the store at {self.name}: {why}"

    def _missing(self, seconds: float, failure: Exception) -> StoreTimeoutError:
        why = with_remedy(failure) if no_descriptor(failure) else ""
        why = why or why_unreachable(self.host, failure)
        return StoreTimeoutError(
            f"no store at {self.name}: timeout after {seconds:.3g} s ({why}); is "
            "the master (rank 0) running, and does this address reach it?",
            answered=False,
        )

    def _connect_once(
        self, deadline: float, limit: float, awaited: bool, notices: WaitNotices | None
    ) -> _Connection:
        """Try every address of the host once, each until `limit`, and no longer than until the next
        notice is due."""
        failure: OSError = ConnectionError("the name has no address")
        until = limit
        if notices is not None:
            until = min(limit, time.monotonic() + max(_SHORTEST_TRY, notices.left))
        for family, kind, protocol, _, address in resolve(self.host, self.port, until):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(one_wait(max(0.001, until - time.monotonic())))
                sock.connect(address)
                watch_idle(sock)
                if awaited and notices is not None:
                    self._await_master(sock, deadline, notices)
                return _Connection(sock, self._authenticate(sock, deadline, awaited))
            except BaseException as error:
                sock.close()
                if isinstance(error, OSError) and not isinstance(error, DistError):
                    failure = error
                    continue
                raise
        raise failure

    def _await_master(self, sock: socket.socket, deadline: float, notices: WaitNotices) -> None:
        """Wait in the launcher's queue until the master speaks, at most until the deadline."""
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        while (left := deadline + _GRACE - time.monotonic()) > 0:
            if poller.poll(1000 * one_wait(min(left, notices.left))):
                return
            notices.say_if_due(
                lambda seconds: (
                    f"{_who()} has waited {seconds:.0f} s for rank 0, in whose place the launcher "
                    f"listens at {self.name}: rank 0 has not come to init_process_group"
                )
            )

    def _authenticate(self, sock: socket.socket, deadline: float, awaited: bool) -> ClientHandshake:
        if sock.getsockname() == sock.getpeername():
            # If no process listens on a port of the ephemeral range, a TCP socket can connect to
            # itself.
            raise ConnectionRefusedError("connected to itself")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return auth.authenticate_client(
            sock,
            channel=CHANNEL,
            job=self._job,
            secret=self._secret,
            deadline=deadline + _GRACE,
            patience=math.inf if awaited else auth.HANDSHAKE_TIMEOUT + self._crowd,
        )


def _who() -> str:
    """Return this process's name in notices: its rank may not be known yet."""
    return f"cydist: {socket.gethostname()} (process {os.getpid()})"


class _Connection:
    """One authenticated connection to the server, for one call at a time."""

    def __init__(self, sock: socket.socket, handshake: ClientHandshake) -> None:
        self._sock = sock
        self._records = Records(handshake, MAX_FRAME_BYTES)
        self._received = bytearray()  # of records, not taken yet
        self._silence = SilenceWatch(peer_timeout())

    def send(self, body: bytes, deadline: float) -> None:
        """Send one record; TimeoutError at the deadline, OSError when the server's host is gone."""
        unsent = memoryview(self._records.seal(body))
        while unsent:
            self._arm(deadline)
            try:
                unsent = unsent[self._sock.send(unsent) :]
            except TimeoutError as error:
                self._go_on_after(error)

    def receive(self, deadline: float) -> bytes:
        """Return the body of the next record.

        OSError at the end of the stream, TimeoutError at the deadline, AuthenticationError for
        what the server did not send.
        """
        size = self._records.open_head(self._exactly(HEAD_BYTES, deadline))
        return self._records.open_body(self._exactly(size, deadline))

    def _exactly(self, count: int, deadline: float) -> bytearray:
        while len(self._received) < count:
            self._arm(deadline)
            try:
                part = self._sock.recv(min(max(count - len(self._received), 1 << 10), 1 << 20))
            except TimeoutError as error:
                self._go_on_after(error)
                continue
            if not part:
                raise ConnectionResetError("the connection was closed")
            self._received += self._records.decrypt(part)
        data, self._received = self._received[:count], self._received[count:]
        return data

    def _arm(self, deadline: float) -> None:
        """Set the socket's timeout to the deadline, but at most to the next look at the server's
        host."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        if self._silence.look(self._sock.fileno())[1]:
            raise _silent_host()
        self._sock.settimeout(one_wait(min(remaining, self._silence.period)))

    @staticmethod
    def _go_on_after(error: TimeoutError) -> None:
        """Go on after one wait, as the deadline may be later; not after the kernel's ETIMEDOUT,
        which Python calls by the same name."""
        if error.errno is not None:
            raise _silent_host() from None

    def disconnect(self) -> None:
        """Close a connection that carries a will on purpose: withdraw the will, without waiting
        for an answer."""
        with contextlib.suppress(OSError):
            self._sock.setblocking(False)
            self._sock.send(self._records.seal(encode_request(StoreRequest(Op.WILL))))
        self.close()

    def close(self) -> None:
        self._sock.close()


def _silent_host() -> ConnectionAbortedError:
    return ConnectionAbortedError(
        f"its host has not answered for {peer_timeout():g} s ({config.PEER_TIMEOUT.names[0]})"
    )


_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.abandon()


os.register_at_fork(after_in_child=_after_fork)

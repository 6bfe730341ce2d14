"""The server behind TCPStore: one daemon thread for all connections.

A client must first prove that it belongs to the job (cydist/net/acceptor.py), and nothing that an
unauthenticated client sends is parsed. A member has one request outstanding per connection; one
that must wait is parked here without a thread, at the first key that it misses.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque

from cydist._native import SilenceWatch
from cydist.errors import AuthenticationError, DistStoreError, QueueEmptyError
from cydist.net.acceptor import Acceptor
from cydist.net.auth import ServerHandshake
from cydist.net.records import HEAD_BYTES, Records
from cydist.net.silence import peer_timeout, watch_idle
from cydist.stores.kv_table import ENTRY_BYTES, KeyOrQueue, KeyValueTable
from cydist.stores.protocol import (
    CHANNEL,
    MAX_FRAME_BYTES,
    MAX_TOTAL_BYTES,
    MAX_VALUE_BYTES,
    Op,
    Reply,
    ReplyStatus,
    StoreRequest,
    decode_request,
    encode_reply,
)
from cydist.waiting import LONGEST_WAIT, LoopGuard

# malloc keeps this much at hand; for longer reads it maps and unmaps memory every time.
_READ_BYTES = 64 * 1024


# Keys, and the value to append to each when the author has died.
Will = tuple[tuple[bytes, bytes], ...]


class _Connection:
    """One client, a member of the job."""

    def __init__(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        self.sock = sock
        self.records = Records(handshake, MAX_FRAME_BYTES)
        self.received = bytearray()
        self.missing = 0  # bytes after the head of the record that arrives; 0: no whole head yet
        self.unsent = memoryview(b"")
        self.parked: StoreRequest | None = None
        self.parked_at: tuple[KeyOrQueue, ...] = ()
        self.awaited = 0  # index of the key at which the request is parked
        self.will: Will = ()
        self.ticket = 0
        self.closing = False
        self.silence = SilenceWatch(peer_timeout())


# An alarm: time, order among equals, connection, and the connection's ticket when the alarm was set
# (stale if it has another now).
_Alarm = tuple[float, int, _Connection, int]


class StoreServer:
    """Serves a Table over listening sockets until `stop`.

    Args:
        listeners: Bound to one port; the server owns them from now on.
        secret: Of the job.
        job: Separates it from other jobs.
    """

    def __init__(self, listeners: list[socket.socket], secret: bytes, job: str) -> None:
        self.table = KeyValueTable(MAX_TOTAL_BYTES, MAX_VALUE_BYTES)
        self.port: int = listeners[0].getsockname()[1]
        self._connections: dict[_Connection, None] = {}
        self._parked: dict[KeyOrQueue, dict[_Connection, None]] = {}
        self._wills: deque[tuple[bytes, bytes]] = deque()  # wills of ended connections
        # A heap. Stale alarms stay in it until their time, or until there are too many.
        self._alarms: list[_Alarm] = []
        self._tickets = itertools.count(1)
        # Clients that were sent something which their hosts may not have acknowledged yet.
        self._owing: dict[_Connection, None] = {}
        self._next_look = math.inf
        self._period = SilenceWatch(peer_timeout()).period
        # Latest end of the server, on time.monotonic(); None: no end was requested.
        self._end: float | None = None
        self._released = threading.Event()
        self._waker, self._wakee = socket.socketpair()
        self._wakee.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._selector, secret, CHANNEL, job)
        for listener in listeners:
            self._acceptor.listen(listener)
        self._selector.register(self._wakee, selectors.EVENT_READ, None)
        # What members have asked for and been answered so far, with the records around it.
        self.requests = self.received_bytes = self.sent_bytes = 0
        self._loop_guard = LoopGuard("thread cydist-store")
        self._thread = threading.Thread(target=self._run, name="cydist-store", daemon=True)
        self._thread.start()
        servers.add(self)

    def stop(self, linger: float = 0.0) -> None:
        """Close the port now, and serve the connected members for `linger` more seconds, or until
        all have hung up. Returns when the port is free."""
        end = time.monotonic() + linger
        self._end = end if self._end is None else min(self._end, end)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._released.wait(5)

    def wait(self, timeout: float) -> None:
        """Wait until the server has ended."""
        self._thread.join(timeout)

    def pending_peers(self) -> int:
        """Return how many connections are not authenticated yet."""
        return len(self._acceptor)

    def refusals(self) -> tuple[str, ...]:
        """Return why clients were refused lately, one text for each address."""
        return tuple(self._acceptor.refusals.values())

    def abandon(self) -> None:
        """In a forked child, close the descriptors, which the parent goes on using."""
        for connection in list(self._connections):
            connection.sock.close()
        self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        self._acceptor.close()
        self._waker.close()
        self._wakee.close()

    def _run(self) -> None:
        try:
            while self._end is None:
                with self._loop_guard:
                    self._round()
            self._acceptor.close()
            self._released.set()
            while self._connections and time.monotonic() < self._end:
                with self._loop_guard:
                    self._round()
        finally:
            self._released.set()
            for connection in list(self._connections):
                self._close(connection)
            self._close_own()

    def _round(self) -> None:
        for key, events in self._selector.select(self._until_next()):
            if key.data is self._acceptor:
                try:
                    peer = self._acceptor.react(key.fileobj)
                except Exception as error:
                    self._loop_guard.record(error)  # no other client waits for that
                    continue
                if peer is not None:
                    self._admit(_Connection(peer.sock, peer.handshake), peer.unsent)
            elif key.data is None:
                with contextlib.suppress(OSError):
                    self._wakee.recv(64)
            elif key.data in self._connections:
                self._serve(key.data, events)
        now = time.monotonic()
        self._acceptor.expire(now)
        self._ring_alarms(now)
        self._look_for_silence(now)
        self._carry_out_wills()

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection in self._connections:
                self._read(connection)
        except Exception as error:
            self._drop(connection, error)

    def _drop(self, connection: _Connection, error: Exception) -> None:
        """Drop a connection on any error in it, so that the job's store goes on."""
        # Expected: it left, broke the protocol, or somebody changed what it sent.
        if isinstance(error, AuthenticationError):
            self._answer_tampered(connection, error)
        elif not isinstance(error, OSError | DistStoreError):
            self._loop_guard.report(error)
        self._close(connection)

    def _answer_tampered(self, connection: _Connection, error: AuthenticationError) -> None:
        """Tell a client why its connection ends, if it can still be told."""
        if connection.unsent:  # it is in the middle of another answer
            return
        with contextlib.suppress(OSError):  # also from a cipher that seals nothing more
            reply = encode_reply(Reply(ReplyStatus.TAMPERED, (str(error).encode(),)))
            connection.sock.send(connection.records.seal(reply))
            # Unread bytes would turn the close into a reset, which may overtake the answer.
            connection.sock.recv(_READ_BYTES)

    # Alarms

    def _alarm(self, when: float, connection: _Connection) -> None:
        heapq.heappush(self._alarms, (when, next(self._tickets), connection, connection.ticket))
        if len(self._alarms) > 64 + 4 * len(self._connections):
            self._alarms = [alarm for alarm in self._alarms if self._is_set(alarm)]
            heapq.heapify(self._alarms)

    def _is_set(self, alarm: _Alarm) -> bool:
        """Return whether this alarm is still set."""
        connection, ticket = alarm[2:]
        waits = connection.parked is not None and connection.ticket == ticket
        return waits and connection in self._connections

    def _until_next(self) -> float:
        times = [alarm[0] for alarm in self._alarms[:1]]
        times += [when for when in (self._acceptor.next_deadline, self._end) if when is not None]
        times.append(self._next_look)
        now = time.monotonic()
        if self._wills:  # a round that raised did not reach them
            times.append(now)
        return max(0.0, min([now + LONGEST_WAIT, *times]) - now)

    def _ring_alarms(self, now: float) -> None:
        while self._alarms and self._alarms[0][0] <= now:
            alarm = heapq.heappop(self._alarms)
            if self._is_set(alarm):
                self._answer_timeout(alarm[2])

    def _look_for_silence(self, now: float) -> None:
        """Drop clients whose hosts have vanished. Kernels look after idle connections alone."""
        if now < self._next_look:
            return
        for connection in list(self._owing):
            owing, silent = connection.silence.look(connection.sock.fileno())
            if silent:
                self._close(connection)
            elif not owing and not connection.unsent:
                del self._owing[connection]
        self._next_look = now + self._period if self._owing else math.inf

    # Members

    def _admit(self, connection: _Connection, proof: bytes) -> None:
        self._connections[connection] = None
        try:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_idle(connection.sock)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)
            self._send(connection, proof)
        except Exception as error:
            self._drop(connection, error)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close(connection)
            return
        self.received_bytes += len(data)
        connection.received += connection.records.decrypt(data)
        self._take_request(connection)

    def _take_request(self, connection: _Connection) -> None:
        """Run the request that has arrived, if it is complete and the last one is answered."""
        received, records = connection.received, connection.records
        if not connection.missing and len(received) >= HEAD_BYTES:
            connection.missing = records.open_head(received)
        whole = HEAD_BYTES + connection.missing
        if (connection.missing and len(received) > whole) or (connection.parked and received):
            # One request at a time: a client that sends more breaks the protocol.
            raise DistStoreError("a second request before the first was answered")
        if not connection.missing or len(received) < whole:
            return
        request = decode_request(records.open_body(received[HEAD_BYTES:]))
        self.requests += 1
        connection.received, connection.missing = bytearray(), 0
        connection.ticket, connection.awaited = next(self._tickets), 0
        if not self._try(connection, request):
            self._alarm(time.monotonic() + request.timeout, connection)

    def _try(self, connection: _Connection, request: StoreRequest) -> bool:
        """Run `request`, or park it at the first key or queue that it misses."""
        found = self.table.awaits(request, connection.awaited)
        if found is not None:
            key, connection.awaited = found
            watched = {(False, request.keys[0])} if request.op is Op.WATCH else set()
            connection.parked, connection.parked_at = request, tuple({key} | watched)
            for each in connection.parked_at:
                self._parked.setdefault(each, {})[connection] = None
            return False
        try:
            reply = Reply(ReplyStatus.OK, self.table.execute(request))
            if request.op is Op.WILL:
                connection.will = _with_more(connection.will, request)
        except QueueEmptyError as error:
            reply = Reply(ReplyStatus.QUEUE_EMPTY, (str(error).encode(),))
        except DistStoreError as error:
            reply = Reply(ReplyStatus.REFUSED, (str(error).encode(),))
        body = encode_reply(reply)
        if len(body) > MAX_FRAME_BYTES:
            why = f"a reply of {len(body)} bytes is too long: ask for fewer keys at a time"
            body = encode_reply(Reply(ReplyStatus.REFUSED, (why.encode(),)))
        self._send(connection, connection.records.seal(body))
        if reply.status is ReplyStatus.OK:
            self._wake(self.table.touched(request))
        return True

    def _wake(self, awaited: list[KeyOrQueue]) -> None:
        """Retry the requests parked for `awaited`, in the order of their arrival."""
        for key in awaited:
            for connection in list(self._parked.get(key, ())):
                request = connection.parked
                if request is not None:
                    self._unpark(connection)
                    with contextlib.suppress(KeyError):
                        self._retry(connection, request)

    def _retry(self, connection: _Connection, request: StoreRequest) -> None:
        try:
            self._try(connection, request)
        except Exception as error:
            self._drop(connection, error)

    def _unpark(self, connection: _Connection) -> None:
        for key in connection.parked_at:
            waiting = self._parked[key]
            del waiting[connection]
            if not waiting:
                del self._parked[key]
        connection.parked, connection.parked_at = None, ()

    def _answer_timeout(self, connection: _Connection) -> None:
        request = connection.parked
        if request is None:
            return
        self._unpark(connection)
        try:
            # The names are for a message: a few are enough, and the reply stays small.
            missing = self.table.missing(request)
            count = b"%d" % len(missing)
            body = encode_reply(Reply(ReplyStatus.TIMEOUT, (count, *missing[:64])))
            self._send(connection, connection.records.seal(body))
        except Exception as error:
            self._drop(connection, error)

    # Sending

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent = memoryview(data)
        self.sent_bytes += len(data)
        self._flush(connection)
        if self._period < math.inf and connection in self._connections:
            self._owing[connection] = None
            self._next_look = min(self._next_look, time.monotonic() + self._period)

    def _flush(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.sock.send(connection.unsent)
            except BlockingIOError:
                # While a reply is being sent, nothing more is read, which bounds the server's
                # memory.
                self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
                return
            connection.unsent = connection.unsent[sent:]
        connection.unsent = memoryview(b"")
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection, self) is self:
            return
        self._unpark(connection)
        self._owing.pop(connection, None)
        self._wills += connection.will
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _carry_out_wills(self) -> None:
        """Execute the wills of connections that ended. Waking waiters may end more connections."""
        while self._wills:
            key, value = self._wills.popleft()
            request = StoreRequest(Op.APPEND, (key,), (value,))
            with contextlib.suppress(DistStoreError):  # table full: ranks learn at their timeouts
                self.table.execute(request)
                self._wake(self.table.touched(request))


def _with_more(will: Will, request: StoreRequest) -> Will:
    """Return a will with the additions of `request`, which withdraws it if it has no keys. Raises
    DistStoreError if the will is too long."""
    pairs = tuple(zip(request.keys, request.values, strict=True))
    whole = will + pairs if pairs else ()
    if sum(ENTRY_BYTES + len(key) + len(value) for key, value in whole) > MAX_FRAME_BYTES:
        raise DistStoreError(f"a connection's will has at most {MAX_FRAME_BYTES} bytes")
    return whole


servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _after_fork() -> None:
    """Close ports and connections in a forked child, which has no server thread."""
    for server in list(servers):
        server.abandon()
    servers.clear()


os.register_at_fork(after_in_child=_after_fork)

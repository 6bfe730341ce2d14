"""Messages over one MPI communicator, matched by group, sender and tag.

Every message begins with a header of its own: the group, the tag, the dtype and the count.
So tags have all their 32 bits whatever MPI offers, groups need no communicator of their own
for messages, and a receive of another dtype or size is found. Small payloads travel with
the header; of others the header names the MPI tag that they follow under, and the receive
that takes the header receives them in place.

MPI moves a message only while somebody polls: every wait polls for all groups (`advance`).
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cydist._native import Array

HEADER_TAG = 0  # MPI's tag of all headers; payloads have the others
PAYLOAD_TAGS = 30_000  # MPI promises tags up to 32767
INLINE_BYTES = 2048  # what travels with its header; below every MPI's eager limit
PIECE_BYTES = 1 << 30  # one MPI call moves no more: counts are 32-bit integers in MPI 3
CROWD = 64  # operations under way above which those that nobody waits for are looked at
PROBES = 64  # headers that one poll takes at most

# Kinds of messages.
INLINE, FOLLOWS, FAILED, HERE, LEFT = range(5)

# group, tag, count, bytes, MPI tag of the payload, hash of the dtype's name, its code, kind, name
HEADER = struct.Struct("<QqQQIIhB16s")


class Header:
    """What comes first. Notices between groups (FAILED, HERE, LEFT) use `tag` as a number."""

    __slots__ = ("count", "dtype", "dtype_hash", "group", "kind", "name", "nbytes", "tag", "under")

    def __init__(self, data: bytes | bytearray) -> None:
        (
            self.group, self.tag, self.count, self.nbytes, self.under, self.dtype_hash,
            self.dtype, self.kind, name,
        ) = HEADER.unpack_from(data)  # fmt: skip
        self.name = name.rstrip(b"\0").decode("ascii", "replace")

    def fits(self, array: Array) -> bool:
        """Does this message hold what a receive into `array` expects?"""
        return (self.dtype, self.dtype_hash, self.count, self.nbytes) == (
            array.dtype, array.dtype_hash, array.size, array.nbytes,
        )  # fmt: skip


def header_of(array: Array, group: int, tag: int, kind: int, under: int) -> bytes:
    """The header of a message with the content of `array`."""
    return HEADER.pack(
        group, tag, array.size, array.nbytes, under, array.dtype_hash, array.dtype, kind,
        array.dtype_name.encode("ascii", "replace")[:16],
    )  # fmt: skip


class Operation:
    """A send or receive under way: MPI's requests, and the memory that they use."""

    def __init__(self, messages: Messages, peer: int | None, memory: object) -> None:
        self.peer = peer  # rank in the communicator; None: any
        self.mismatch: Header | None = None  # of what came in place of what was expected
        self.started = False  # a send, or a receive that has its header
        self._messages = messages
        self._memory = memory
        self._requests: list[Any] = []
        self._lock = threading.Lock()

    def begin(self, requests: Iterable[Any]) -> None:
        """MPI has begun to move it."""
        self._requests = list(requests)
        if self._requests:
            self._messages.hold(self)
        self.started = True

    def cancel(self) -> None:
        """Wait no more. What MPI has begun goes on, and its memory stays alive."""

    def test(self) -> bool:
        """Is it complete? Does not poll for headers: that is `Messages.advance`."""
        if not self.started or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._requests and self._messages.all_done(self._requests):
                self._requests = []
                self._memory = None
                self._messages.release(self)
            return not self._requests
        finally:
            self._lock.release()


class Receive(Operation):
    """A receive that was posted. `peer` is the sender once it is started."""

    def __init__(self, messages: Messages, key: tuple[int, int], peer: int | None, array: Array):
        super().__init__(messages, peer, array)
        self.key = key
        self.array = array

    def wants(self, source: int) -> bool:
        """May a message from `source` end here?"""
        return self.peer is None or self.peer == source

    def cancel(self) -> None:
        self._messages.withdraw(self)


Arrival = tuple[Header, bytes | bytearray, int]  # of a message that nobody waits for yet
# What a group does with a notice: (kind, source, number, text).
Listener = Callable[[int, int, int, str], None]


class Messages:
    """Messages between the members of one communicator, for all groups of them."""

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.comm = comm
        self._MPI = MPI
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._early: dict[int, list[Arrival]] = {}  # notices of groups to come
        self._ended: set[int] = set()
        self._first: int | None = None  # the first group here: all members are in it
        self._left: set[int] = set()  # members that have left it, and send nothing more
        self._litter = False  # is there a payload on its way that nobody will receive?
        self._closing = False
        self._status = MPI.Status()
        self._posted: dict[tuple[int, int], deque[Receive]] = {}
        self._arrived: dict[tuple[int, int], deque[Arrival]] = {}
        self._incoming: list[tuple[Any, bytearray, int]] = []  # headers, in the order they came
        self._active: set[Operation] = set()  # MPI uses their memory, waited for or not
        self._crowd = CROWD
        self._under = itertools.count()
        _live.append(self)

    def listen(self, group: int, listener: Listener) -> None:
        """Give the notices of a group to `listener`, on whichever thread polls; first those
        that came before this rank had made the group."""
        with self._lock:
            if self._first is None:
                self._first = group
            self._listeners[group] = listener
            early = self._early.pop(group, ())
        for notice in early:
            _tell(listener, notice)

    def forget(self, group: int) -> None:
        """The group has ended: drop what is posted, and what has arrived, for it."""
        with self._lock:
            self._listeners.pop(group, None)
            self._ended.add(group)
            for waiting in (self._posted, self._arrived):
                for key in [key for key in waiting if key[0] == group]:
                    for each in waiting.pop(key):
                        self._drop(each)

    def _drop(self, what: Receive | Arrival) -> None:
        if isinstance(what, tuple) and what[0].kind == FOLLOWS:
            self._litter = True

    @property
    def deserted(self) -> bool:
        """Has every other member left?"""
        size: int = self.comm.Get_size()
        return len(self._left) == size - 1

    def close(self) -> None:
        """No group of this process uses it any more.

        Polling goes on, where some other group polls, until all members have left: MPI may
        give the communicator's number to another one when it is freed, which must not find
        what is still on its way to this one.
        """
        self._closing = True
        self.advance()

    def _end(self) -> None:
        if self._MPI.Is_finalized() or self._litter:
            _live.remove(self)
            return
        self._reap()
        if self.deserted and not (self._incoming or self._active):
            _live.remove(self)
            self.comm.Free()

    # Sending.

    def send(self, group: int, peer: int, tag: int, array: Array) -> Operation:
        """Start sending `array` to rank `peer` of the communicator."""
        operation = Operation(self, peer, array)
        if array.nbytes <= INLINE_BYTES:
            first = header_of(array, group, tag, INLINE, 0) + bytes(memoryview(array))
            operation.begin([self._isend(first, peer, HEADER_TAG)])
            return operation
        under = 1 + next(self._under) % PAYLOAD_TAGS
        first = header_of(array, group, tag, FOLLOWS, under)
        operation.begin(
            [
                self._isend(first, peer, HEADER_TAG),
                *(self._isend(piece, peer, under) for piece in pieces(memoryview(array))),
            ]
        )
        return operation

    def notify(self, group: int, peers: Iterable[int], kind: int, number: int, text: str) -> None:
        """Tell other members of a group something that no receive waits for."""
        data = text.encode()[: INLINE_BYTES - 4]
        notice = HEADER.pack(group, number, 0, 0, 0, 0, 0, kind, b"") + data
        for peer in peers:
            self.keep([self._isend(notice, peer, HEADER_TAG)], notice)

    def _isend(self, data: Any, peer: int, tag: int) -> Any:
        return self.comm.Isend([data, self._MPI.BYTE], peer, tag)

    # Receiving.

    def receive(self, group: int, peer: int | None, tag: int, array: Array) -> Receive:
        """Start receiving into `array` from rank `peer` of the communicator; None: from any."""
        key = (group, tag)
        receive = Receive(self, key, peer, array)
        with self._lock:
            arrived = self._arrived.get(key, ())
            for arrival in arrived:
                if receive.wants(arrival[2]):
                    arrived.remove(arrival)  # type: ignore[union-attr]
                    self._match(receive, *arrival)
                    return receive
            self._posted.setdefault(key, deque()).append(receive)
        return receive

    def withdraw(self, receive: Receive) -> None:
        """Forget a posted receive."""
        with self._lock:
            posted = self._posted.get(receive.key)
            if posted is not None and receive in posted:
                posted.remove(receive)

    def withdraw_all(self, group: int) -> None:
        """Forget every receive that is posted for a group: it has failed, and what arrives
        late must not be written into arrays that are no longer waited for."""
        with self._lock:
            for key in [key for key in self._posted if key[0] == group]:
                del self._posted[key]

    def advance(self) -> None:
        """Take the headers that have come, and give each to its receive or to its group."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        notices: list[Arrival] = []
        try:
            for _ in range(PROBES):
                if not self._probe():
                    break
            if self._incoming:
                self._take(notices)
            if self._closing and self in _live:
                self._end()
        finally:
            self._lock.release()
        for notice in notices:
            listener = self._listener(notice)
            if listener is not None:
                _tell(listener, notice)

    def _listener(self, notice: Arrival) -> Listener | None:
        """Who takes the notice now; those of a group that is not made yet are kept."""
        group = notice[0].group
        with self._lock:
            listener = self._listeners.get(group)
            if listener is None and group not in self._ended:
                self._early.setdefault(group, []).append(notice)
            return listener

    def _probe(self) -> bool:
        """Start receiving one header, if one has come."""
        status = self._status
        message = self.comm.Improbe(self._MPI.ANY_SOURCE, HEADER_TAG, status)
        if message is None:
            return False
        data = bytearray(status.Get_count(self._MPI.BYTE))
        request = message.Irecv([data, self._MPI.BYTE])
        self._incoming.append((request, data, status.Get_source()))
        return True

    def _take(self, notices: list[Arrival]) -> None:
        """Match the headers that are here; those of one sender keep their order."""
        still: list[tuple[Any, bytearray, int]] = []
        blocked: set[int] = set()
        for request, data, source in self._incoming:
            if source in blocked or not request.Test():
                blocked.add(source)
                still.append((request, data, source))
                continue
            header = Header(data)
            if header.kind in (INLINE, FOLLOWS):
                self._deliver(header, data, source)
            else:
                if header.kind == LEFT and header.group == self._first:
                    self._left.add(source)
                notices.append((header, data, source))
        self._incoming = still

    def _deliver(self, header: Header, data: bytearray, source: int) -> None:
        key = (header.group, header.tag)
        posted = self._posted.get(key, ())
        for receive in posted:
            if receive.wants(source):
                posted.remove(receive)  # type: ignore[union-attr]
                self._match(receive, header, data, source)
                return
        if header.group in self._ended:
            self._drop((header, data, source))
        else:
            self._arrived.setdefault(key, deque()).append((header, data, source))

    def _match(
        self, receive: Receive, header: Header, data: bytes | bytearray, source: int
    ) -> None:
        receive.peer = source
        if not header.fits(receive.array):
            receive.mismatch = header
            if header.kind == FOLLOWS:
                # The sender could not end otherwise.
                scrap = bytearray(header.nbytes)
                self.keep(self._irecv(memoryview(scrap), source, header.under), scrap)
            receive.begin([])
        elif header.kind == INLINE:
            memoryview(receive.array)[:] = memoryview(data)[HEADER.size :]
            receive.begin([])
        else:
            receive.begin(self._irecv(memoryview(receive.array), source, header.under))

    def _irecv(self, memory: memoryview, source: int, under: int) -> list[Any]:
        return [self.comm.Irecv([piece, self._MPI.BYTE], source, under) for piece in pieces(memory)]

    # Requests.

    def all_done(self, requests: list[Any]) -> bool:
        """Has MPI completed all of these?"""
        if len(requests) == 1:
            done: bool = requests[0].Test()
        else:
            done = self._MPI.Request.Testall(requests)
        return done

    def keep(self, requests: list[Any], memory: object) -> None:
        """Nobody waits for these; their memory must live until MPI has done with it."""
        Operation(self, None, memory).begin(requests)

    def hold(self, operation: Operation) -> None:
        """Keep an operation alive until MPI has completed it."""
        self._active.add(operation)
        if len(self._active) > self._crowd:
            self._reap()
            self._crowd = CROWD + 2 * len(self._active)

    def release(self, operation: Operation) -> None:
        """MPI has completed it."""
        self._active.discard(operation)

    def _reap(self) -> None:
        for operation in tuple(self._active):
            operation.test()


def _tell(listener: Listener, notice: Arrival) -> None:
    header, data, source = notice
    text = bytes(data[HEADER.size :]).decode("utf-8", "replace")
    listener(header.kind, source, header.tag, text)


def pieces(memory: memoryview) -> list[memoryview]:
    """Memory cut into what one MPI call can move."""
    return [memory[start : start + PIECE_BYTES] for start in range(0, memory.nbytes, PIECE_BYTES)]


_live: list[Messages] = []


def advance() -> None:
    """Poll, for every communicator of this process."""
    for messages in tuple(_live):
        messages.advance()

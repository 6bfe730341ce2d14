"""Requests to a store and their replies, as data and as bytes.

A request means the same in memory, over a connection and in a FileStore's log; its layout
is fixed, nothing in it is code, and it is checked before memory is taken:

    request   operation u8, block u8, keys u32, values u32, timeout f64,
              then for each key and each value: length u32, bytes
    reply     status u8, items u32, then for each item: length u32, bytes

Little-endian; `length` counts what follows it. Numbers travel as ASCII decimals. Over a connection
each is one record (cydist/net/records.py), in a FileStore's log its length stands before it.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from cydist.errors import DistStoreError, counted
from cydist.waiting import LONGEST_TIMEOUT

MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
# Most bytes of one frame, and so of a connection's memory.
MAX_FRAME_BYTES = 16 * 1024 * 1024
# The channel of connections to a TCP store, in their handshake.
CHANNEL = b"store"
# Most bytes of everything in a TCP store, or in a file.
MAX_TOTAL_BYTES = 256 * 1024 * 1024

# cydist's own keys begin with a byte that UTF-8 never contains, so no user's key equals one.
INTERNAL = b"\xff"

LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<BBIId")
_REPLY = struct.Struct("<BI")


class Op(IntEnum):
    """The operations of a store, numbered as on the wire."""

    SET = 1
    GET = 2
    ADD = 3
    CHECK = 4
    WAIT = 5
    DELETE = 6
    NUM_KEYS = 7
    COMPARE_SET = 8
    APPEND = 9
    SET_ALL = 10
    QUEUE_PUSH = 11
    QUEUE_POP = 12
    QUEUE_LEN = 13
    LIST_KEYS = 14
    # Wait for all keys except the first, or until the first has a value other than the given one.
    WATCH = 15
    # When this connection ends, append each value to its key. Without keys: withdraw that.
    WILL = 16


class ReplyStatus(IntEnum):
    """The result of a request."""

    OK = 0
    TIMEOUT = 1  # items: the missing keys
    QUEUE_EMPTY = 2
    REFUSED = 3  # items: the reason
    TAMPERED = 4  # items: how the server knows that the request is not what was sent


# The operations that can wait for missing keys or queues.
BLOCKING = frozenset((Op.GET, Op.WAIT, Op.QUEUE_POP, Op.WATCH))

# The operations that change a store. A log needs no others.
MUTATING = frozenset(
    (
        Op.SET,
        Op.ADD,
        Op.DELETE,
        Op.COMPARE_SET,
        Op.APPEND,
        Op.SET_ALL,
        Op.QUEUE_PUSH,
        Op.QUEUE_POP,
    )
)


# Operations whose answer is a number; then those with another answer of one item.
_COUNTING = frozenset((Op.ADD, Op.CHECK, Op.DELETE, Op.NUM_KEYS, Op.QUEUE_LEN))
_ANSWERED = frozenset((Op.COMPARE_SET, Op.QUEUE_POP))


class StoreRequest(NamedTuple):
    """One request.

    Attributes:
        block: Wait for missing keys, at most `timeout` seconds.
        patience: Further seconds that the answer may take; not sent.
    """

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    block: bool = False
    timeout: float = 0.0
    patience: float = 0.0

    @property
    def limit(self) -> float:
        """Return the seconds until its sender gives up."""
        return self.timeout + self.patience

    def check_sizes(self) -> None:
        """Raise DistStoreError if the keys, the values or the whole request are too large for a TCP
        store."""
        for key in self.keys:
            if len(key) > MAX_KEY_BYTES:
                raise DistStoreError(
                    f"a key of {len(key)} bytes ({key[:32]!r}...): "
                    f"a TCPStore takes at most {MAX_KEY_BYTES}"
                )
        for value in self.values:
            if len(value) > MAX_VALUE_BYTES:
                raise DistStoreError(
                    f"a value of {len(value)} bytes for {self.keys[0]!r}: "
                    f"a TCPStore takes at most {MAX_VALUE_BYTES}"
                )
        items = self.keys + self.values
        whole = _REQUEST.size + sum(LENGTH.size + len(item) for item in items)
        if whole > MAX_FRAME_BYTES:
            raise DistStoreError(
                f"a request of {whole} bytes: a TCPStore takes at most {MAX_FRAME_BYTES} at a time"
            )


class Reply(NamedTuple):
    """The answer to one request."""

    status: ReplyStatus
    items: tuple[bytes, ...] = ()

    def answers(self, request: StoreRequest) -> bool:
        """Return whether this has the items of a reply to `request`, with numbers where they
        belong."""
        numbers = self.items[:1]
        if self.status is ReplyStatus.OK and request.op is Op.WATCH:
            return len(self.items) in (1, len(request.keys))
        if self.status is ReplyStatus.TIMEOUT:
            fits = len(self.items) >= 1
        elif self.status is not ReplyStatus.OK or request.op is Op.LIST_KEYS:
            return True
        elif request.op in _COUNTING:
            fits = len(self.items) == 1
        else:
            numbers = ()
            most = len(request.keys) if request.op is Op.GET else int(request.op in _ANSWERED)
            fits = len(self.items) == most
        return fits and all(map(is_number, numbers))


def is_number(text: bytes) -> bool:
    """Return whether this is an integer of at most 19 digits, with or without a sign."""
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    return digits.isdigit() and len(digits) <= 19


def encode_request(request: StoreRequest) -> bytes:
    """Return the bytes of a request."""
    head = _REQUEST.pack(
        request.op, request.block, len(request.keys), len(request.values), request.timeout
    )
    return _packed(head, request.keys + request.values)


def decode_request(body: bytes | memoryview) -> StoreRequest:
    """Return the request that `encode_request` was given.

    Raises DistStoreError for anything that `encode_request` cannot have made.
    """
    if len(body) < _REQUEST.size:
        raise DistStoreError(f"a request of {len(body)} bytes is too short")
    op, block, keys, values, timeout = _REQUEST.unpack_from(body)
    known = op in Op._value2member_map_ and block in (0, op in BLOCKING)
    if not known or not 0 <= timeout < float("inf"):
        raise DistStoreError(f"no such request: operation {op}, block {block}, timeout {timeout}")
    items = _items(memoryview(body)[_REQUEST.size :], keys + values)
    limit = min(timeout, LONGEST_TIMEOUT)
    return StoreRequest(Op(op), items[:keys], items[keys:], bool(block), limit)


def encode_reply(reply: Reply) -> bytes:
    """Return the bytes of a reply."""
    return _packed(_REPLY.pack(reply.status, len(reply.items)), reply.items)


def decode_reply(body: bytes | memoryview) -> Reply:
    """Return the reply that `encode_reply` was given; raises DistStoreError for anything else."""
    if len(body) < _REPLY.size:
        raise DistStoreError(f"a reply of {len(body)} bytes is too short")
    status, count = _REPLY.unpack_from(body)
    if status not in ReplyStatus._value2member_map_:
        raise DistStoreError(f"no such status: {status}")
    return Reply(ReplyStatus(status), _items(memoryview(body)[_REPLY.size :], count))


def _packed(head: bytes, items: tuple[bytes, ...]) -> bytes:
    parts = [head]
    for item in items:
        parts += (LENGTH.pack(len(item)), item)
    return b"".join(parts)


def _items(body: memoryview, count: int) -> tuple[bytes, ...]:
    """Return exactly `count` items that fill `body` exactly."""
    if count * LENGTH.size > len(body):
        raise DistStoreError(f"{count} items do not fit into {counted(len(body), 'byte')}")
    items = []
    start = 0
    for _ in range(count):
        if start + LENGTH.size > len(body):
            raise DistStoreError("an item's length is cut off")
        (size,) = LENGTH.unpack_from(body, start)
        start += LENGTH.size
        if size > len(body) - start:
            raise DistStoreError(f"an item of {counted(size, 'byte')} is cut off")
        items.append(bytes(body[start : start + size]))
        start += size
    if start != len(body):
        raise DistStoreError(f"{counted(len(body) - start, 'byte')} too many")
    return tuple(items)

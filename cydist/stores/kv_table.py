"""Keys, values and queues in memory: the meaning of every store's operations.

HashStore uses a table under a lock, the TCP server from its one thread, and FileStore replays its
log into one. A table never waits: `awaits` returns the key or queue that a request has to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cydist.errors import DistStoreError, QueueEmptyError, counted
from cydist.stores.protocol import INTERNAL, Op, StoreRequest, is_number

# An entry's overhead in bytes, so that many tiny keys cannot take unbounded memory.
ENTRY_BYTES = 128

_INT64 = range(-(2**63), 2**63)

# What a request may wait for: a key, or a queue. The two live in separate name spaces.
KeyOrQueue = tuple[bool, bytes]


class KeyValueTable:
    """A dictionary of bytes with counters and queues, and an account of its memory.

    Args:
        limit_bytes: Most bytes that it may hold; None: no limit.
        max_value_bytes: Most bytes of one value; None: no limit.
    """

    def __init__(self, limit_bytes: int | None = None, max_value_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.max_value_bytes = max_value_bytes
        self.used_bytes = 0
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}

    def awaits(self, request: StoreRequest, start: int = 0) -> tuple[KeyOrQueue, int] | None:
        """Return a key or queue that a blocking request has to wait for, and its index among those
        of the request; None: it can run.

        Args:
            start: Index at which to begin: the one that was missing before. Otherwise a request for
                N keys would look through all of them N times.

        Raises DistStoreError for a request with keys and values that its operation does not take.
        """
        _check_arity(request)
        if not request.block:
            return None
        if request.op is Op.QUEUE_POP:
            key = request.keys[0]
            return None if self._queues.get(key) else ((True, key), 0)
        at = self._missing_at(request, start)
        if at is None or self._changed_value(request):
            return None
        return (False, request.keys[at]), at

    def _missing_at(self, request: StoreRequest, start: int) -> int | None:
        keys, values = request.keys, self._values
        first = 1 if request.op is Op.WATCH else 0
        start = max(first, start)
        for part in (range(start, len(keys)), range(first, start)):  # a key may have been deleted
            for at in part:
                if keys[at] not in values:
                    return at
        return None

    def touched(self, request: StoreRequest) -> list[KeyOrQueue]:
        """Return the keys or queues at which waiting requests may go on after this one."""
        if request.op is Op.QUEUE_PUSH:
            return [(True, request.keys[0])]
        if request.op in (Op.SET, Op.ADD, Op.COMPARE_SET, Op.APPEND, Op.SET_ALL):
            return [(False, key) for key in request.keys]
        return []

    def missing(self, request: StoreRequest) -> tuple[bytes, ...]:
        """Return every key that a request still waits for."""
        if request.op is Op.QUEUE_POP:
            return request.keys
        return tuple(self._missing(request))

    def _missing(self, request: StoreRequest) -> Iterator[bytes]:
        keys = request.keys[1:] if request.op is Op.WATCH else request.keys
        return (key for key in keys if key not in self._values)

    def _changed_value(self, request: StoreRequest) -> tuple[bytes, ...]:
        """Return the value of the key that a request watches, if it differs from the known one."""
        if request.op is not Op.WATCH:
            return ()
        value = self._values.get(request.keys[0], b"")
        return () if value == request.values[0] else (value,)

    def execute(self, request: StoreRequest) -> tuple[bytes, ...]:
        """Run a request that does not have to wait.

        Raises DistStoreError, and changes nothing, if it cannot be done: a malformed request,
        a value that is no number, a full table; QueueEmptyError for an empty queue.
        """
        _check_arity(request)
        keys, values = request.keys, request.values
        match request.op:
            case Op.SET:
                self._put(keys[0], values[0])
            case Op.GET | Op.WAIT:
                return self._get(request)
            case Op.WATCH:
                return self._watched(request)
            case Op.ADD:
                return (self._add(keys[0], values[0]),)
            case Op.CHECK:
                return (b"%d" % all(key in self._values for key in keys),)
            case Op.DELETE:
                return (b"%d" % self._delete(keys[0]),)
            case Op.NUM_KEYS:
                return (b"%d" % len(self._user_keys()),)
            case Op.COMPARE_SET:
                return (self._compare_set(keys[0], values[0], values[1]),)
            case Op.APPEND:
                self._put(keys[0], self._values.get(keys[0], b"") + values[0])
            case Op.SET_ALL:
                self._put_all(keys, values)
            case Op.QUEUE_PUSH:
                self._account(ENTRY_BYTES + len(keys[0]) + len(values[0]))
                self._queues.setdefault(keys[0], deque()).append(values[0])
            case Op.QUEUE_POP:
                return (self._pop(keys[0]),)
            case Op.QUEUE_LEN:
                return (b"%d" % len(self._queues.get(keys[0], ())),)
            case Op.LIST_KEYS:
                return tuple(self._user_keys())
        return ()

    def requests(self) -> Iterator[StoreRequest]:
        """Yield requests that make an empty table equal to this one."""
        for key, value in self._values.items():
            yield StoreRequest(Op.SET, (key,), (value,))
        for key, queue in self._queues.items():
            for value in queue:
                yield StoreRequest(Op.QUEUE_PUSH, (key,), (value,))

    def _get(self, request: StoreRequest) -> tuple[bytes, ...]:
        try:
            found = tuple(self._values[key] for key in request.keys)
        except KeyError as error:
            raise DistStoreError(f"no key {error.args[0]!r}") from None
        return found if request.op is Op.GET else ()

    def _watched(self, request: StoreRequest) -> tuple[bytes, ...]:
        missing = self.missing(request)
        if not missing:
            value = self._values.get(request.keys[0], b"")
            return (value, *(self._values[key] for key in request.keys[1:]))
        news = self._changed_value(request)
        if not news:
            raise DistStoreError(f"no key {missing[0]!r}")
        return news

    def _user_keys(self) -> list[bytes]:
        return [key for key in self._values if not key.startswith(INTERNAL)]

    def _put(self, key: bytes, value: bytes) -> None:
        self._account(self._growth(key, value))
        self._values[key] = value

    def _put_all(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        if len(keys) != len(values):
            raise DistStoreError(f"{counted(len(keys), 'key')} but {counted(len(values), 'value')}")
        # A dictionary, so that a key that is named twice counts once.
        pairs = dict(zip(keys, values, strict=True))
        self._account(sum(self._growth(key, value) for key, value in pairs.items()))
        self._values.update(pairs)

    def _add(self, key: bytes, amount: bytes) -> bytes:
        total = _number(key, self._values.get(key, b"0")) + _number(key, amount)
        if total not in _INT64:
            raise DistStoreError(f"add: {key.decode(errors='replace')!r} does not fit 64 bits")
        value = b"%d" % total
        self._put(key, value)
        return value

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None:
            if expected:
                return expected
        elif current != expected:
            return current
        self._put(key, desired)
        return desired

    def _delete(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.used_bytes -= ENTRY_BYTES + len(key) + len(value)
        return True

    def _pop(self, key: bytes) -> bytes:
        queue = self._queues.get(key)
        if not queue:
            raise QueueEmptyError(f"queue {key.decode(errors='replace')!r} is empty")
        value = queue.popleft()
        self.used_bytes -= ENTRY_BYTES + len(key) + len(value)
        if not queue:
            del self._queues[key]
        return value

    def _growth(self, key: bytes, value: bytes) -> int:
        if self.max_value_bytes is not None and len(value) > self.max_value_bytes:
            raise DistStoreError(
                f"the value of {key[:32]!r} would have {len(value)} bytes, "
                f"more than {self.max_value_bytes}"
            )
        old = self._values.get(key)
        if old is None:
            return ENTRY_BYTES + len(key) + len(value)
        return len(value) - len(old)

    def _account(self, growth: int) -> None:
        used = self.used_bytes + growth
        if self.limit_bytes is not None and growth > 0 and used > self.limit_bytes:
            raise DistStoreError(
                f"the store is full: {self.used_bytes} of {self.limit_bytes} bytes are used, "
                f"{growth} more were asked for"
            )
        self.used_bytes = used


# Keys and values that each operation takes; -1: any number.
_ARITY = {
    Op.SET: (1, 1),
    Op.GET: (-1, 0),
    Op.ADD: (1, 1),
    Op.CHECK: (-1, 0),
    Op.WAIT: (-1, 0),
    Op.DELETE: (1, 0),
    Op.NUM_KEYS: (0, 0),
    Op.COMPARE_SET: (1, 2),
    Op.APPEND: (1, 1),
    Op.SET_ALL: (-1, -1),
    Op.QUEUE_PUSH: (1, 1),
    Op.QUEUE_POP: (1, 0),
    Op.QUEUE_LEN: (1, 0),
    Op.LIST_KEYS: (0, 0),
    Op.WATCH: (-1, 1),
    Op.WILL: (-1, -1),
}


def _check_arity(request: StoreRequest) -> None:
    keys, values = _ARITY[request.op]
    given = len(request.keys), len(request.values)
    watches_nothing = request.op is Op.WATCH and not request.keys
    if keys not in (-1, given[0]) or values not in (-1, given[1]) or watches_nothing:
        raise DistStoreError(
            f"{request.op.name} does not take {counted(given[0], 'key')} and "
            f"{counted(given[1], 'value')}"
        )


def _number(key: bytes, value: bytes) -> int:
    if not is_number(value):
        name, shown = key.decode(errors="replace"), value[:32].decode(errors="replace")
        raise DistStoreError(f"add: the value of {name!r} is not a number: {shown!r}")
    return int(value)

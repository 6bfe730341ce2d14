"""Store: the interface of every key-value store.

A store of cydist implements `_request`. A third party's store may instead override the public
methods that it supports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from cydist.errors import DistStoreError, StoreTimeoutError, counted
from cydist.stores.protocol import Op, StoreRequest
from cydist.waiting import STORE_TIMEOUT, duration

Value = str | bytes | bytearray | memoryview
Timeout = float | timedelta


def store_timeout(
    what: str, waited: float, keys: Sequence[bytes], count: int | None = None
) -> StoreTimeoutError:
    """Return the error of a wait that ended before its keys appeared.

    Args:
        count: Number of missing keys, if `keys` holds only some of them.
    """
    names = [key.decode(errors="replace") for key in keys[:8]]
    shown = ", ".join(repr(name) for name in names)
    others = (len(keys) if count is None else count) - len(names)
    more = f" and {others} more" if others else ""
    error = StoreTimeoutError(f"{what}: timeout after {waited:g} s waiting for {shown}{more}")
    error.keys = tuple(keys)
    return error


class Store:
    """A key-value store that all ranks of a job can reach.

    Keys are str; values go in as str or bytes and come out as bytes. Timeouts are seconds or
    timedelta. Every method may be called from any thread, and raises DistStoreError when the store
    cannot be reached or refuses.

    Args:
        timeout: How long `get`, `wait` and `queue_pop` wait by default; five minutes.

    Examples:
        >>> store = dist.HashStore()
        >>> store.set("epoch", "3")
        >>> store.get("epoch"), store.add("steps", 10), store.check(["loss"])
        (b'3', 10, False)
    """

    __module__ = "cydist"

    # Third parties need not call __init__.
    _timeout: float = STORE_TIMEOUT.total_seconds()

    def __init__(self, timeout: Timeout = STORE_TIMEOUT) -> None:
        self._timeout = duration(timeout)

    def _request(self, request: StoreRequest) -> Sequence[bytes]:
        """Run one request and return the items of its reply."""
        raise NotImplementedError(f"{type(self).__name__} does not implement {request.op.name}")

    def _call(
        self,
        op: Op,
        keys: Iterable[str] = (),
        values: Iterable[Value] = (),
        *,
        block: bool = False,
        timeout: Timeout | None = None,
        patience: float = 0.0,
    ) -> Sequence[bytes]:
        limit = self._timeout if timeout is None else duration(timeout)
        return self._request(
            StoreRequest(
                op, tuple(map(_key, keys)), tuple(map(as_bytes, values)), block, limit, patience
            )
        )

    def set(self, key: str, value: Value) -> None:
        """Set the value of `key`, replacing any present one.

        Args:
            key: The name.
            value: str, which is stored as UTF-8, or bytes.
        """
        self._call(Op.SET, [key], [value])

    def get(self, key: str) -> bytes:
        """Return the value of `key`, waiting until it has one.

        Args:
            key: The name.

        Returns:
            The value.

        Raises:
            StoreTimeoutError: There is none after the store's timeout; the message names the key.
        """
        return self._call(Op.GET, [key], block=True)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`, which starts at 0; return its new value.

        The value may have been set to a decimal number.

        Args:
            key: The name.
            amount: An integer, which may be negative.

        Returns:
            The new value.

        Raises:
            DistStoreError: The value is not a number, or the sum does not fit 64 bits. Nothing has
                changed.
        """
        return int(self._call(Op.ADD, [key], [str(int(amount))])[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` have a value now.

        Args:
            keys: Names.

        Returns:
            True or False.
        """
        return self._call(Op.CHECK, many(keys))[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` have a value.

        Args:
            keys: Names.
            timeout: Seconds or a timedelta; None takes the store's.

        Raises:
            StoreTimeoutError: Some have none after the timeout; the message names them.
        """
        self._call(Op.WAIT, many(keys), block=True, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        """Remove `key`.

        Args:
            key: The name.

        Returns:
            True if it existed.
        """
        return self._call(Op.DELETE, [key])[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys.

        TCPStore and FileStore count one key more than the user's: the key with which they count
        their workers. HashStore has no workers, and counts only the user's keys.

        Returns:
            The number.
        """
        return int(self._call(Op.NUM_KEYS)[0])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`.

        Args:
            key: The name.
            expected_value: Empty: the key is set if it has no value.
            desired_value: The new value.

        Returns:
            The value afterwards. For a key without a value, and an expected value that is not
            empty: that expected value; nothing is stored then.
        """
        return self._call(Op.COMPARE_SET, [key], [expected_value, desired_value])[0]

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` users of the store have called this with the same key.

        A key serves again once all have passed. It takes two kinds of keys of the store: `key`
        counts the calls, and `key/0`, `key/1` and so on mark the rounds that are complete.

        Args:
            key: The barrier's name.
            world_size: How many users.
            timeout: Seconds or a timedelta; None takes the store's.

        Raises:
            ValueError: `world_size` is below 1.
            StoreTimeoutError: Fewer have called after the timeout; the message says how many. Use
                another key from then on, since this call counts.
        """
        if world_size < 1:
            raise ValueError(f"barrier {key!r}: world_size must be 1 or more, not {world_size}")
        before, place = divmod(self.add(key, 1) - 1, world_size)
        complete = f"{key}/{before}"
        if place == world_size - 1:
            self.set(complete, "")
            return
        try:
            self.wait([complete], timeout)
        except StoreTimeoutError as error:
            here = self.add(key, 0) - before * world_size
            late = StoreTimeoutError(
                f"barrier {key!r}: {here} of {world_size} users have come: {error}"
            )
            late.keys = error.keys
            raise late from None

    def append(self, key: str, value: Value) -> None:
        """Add `value` to the end of `key`'s value, which may be missing.

        Args:
            key: The name.
            value: str or bytes.
        """
        self._call(Op.APPEND, [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, waiting until all have one.

        Args:
            keys: Names.

        Returns:
            The values, in the order of `keys`.

        Raises:
            StoreTimeoutError: Some have none after the store's timeout; the message names them.
        """
        return list(self._call(Op.GET, many(keys), block=True))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set each key to the value at the same index, all at once.

        Args:
            keys: Names.
            values: As many values.
        """
        if len(keys) != len(values):
            raise ValueError(f"{counted(len(keys), 'key')} but {counted(len(values), 'value')}")
        self._call(Op.SET_ALL, many(keys), values)

    def queue_push(self, key: str, value: Value) -> None:
        """Put `value` at the end of the queue `key`. Queues and keys have separate name spaces.

        Args:
            key: The queue's name.
            value: str or bytes.
        """
        self._call(Op.QUEUE_PUSH, [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue `key`.

        Args:
            key: The queue's name.
            block: Wait for a value, as `get` does. False: do not wait.

        Returns:
            The value.

        Raises:
            QueueEmptyError: The queue is empty and `block` is False.
            StoreTimeoutError: It is still empty after the store's timeout.
        """
        return self._call(Op.QUEUE_POP, [key], block=block)[0]

    def queue_len(self, key: str) -> int:
        """Return how many values the queue `key` holds.

        Args:
            key: The queue's name.

        Returns:
            The number; 0 if there is no such queue.
        """
        return int(self._call(Op.QUEUE_LEN, [key])[0])

    def list_keys(self) -> list[str]:
        """Return the user's keys, in no particular order.

        Returns:
            The keys. One that is not valid text is shown with backslashes.
        """
        return [key.decode(errors="backslashreplace") for key in self._call(Op.LIST_KEYS)]

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long this object waits by default.

        Args:
            timeout: Seconds or a timedelta.
        """
        self._timeout = duration(timeout)

    @property
    def timeout(self) -> timedelta:
        """Return this object's default timeout.

        Returns:
            A timedelta.
        """
        return timedelta(seconds=self._timeout)

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set exist, as they do in cydist's stores.

        Returns:
            True or False.
        """
        return True

    def clone(self) -> Store:
        """Return another object for the same data, with a timeout of its own.

        Returns:
            A store of the same kind.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cloned")

    def close(self) -> None:
        """Release this object's resources, such as connections. Some stores have none."""

    def release(self) -> None:
        """Close as garbage collection would, though an exception may still refer to the object.

        A server of this object may first finish the requests of others.
        """
        self.close()

    def refusals(self) -> tuple[str, ...]:
        """Return why the store's server in this process refused clients lately, for messages.

        Returns:
            A sentence for each.
        """
        return ()

    # A store may notice that a process has ended. Ranks that meet in such a store learn of a death
    # at once; in any other they wait until the timeout.

    in_process = False  # whether only threads of one process can reach it
    # Whether only processes that know the job's secret can write in it, also on the way to
    # it. The values that ranks write in any other store are signed (MembershipStore.sign).
    authenticated = False

    def reports_disconnects(self) -> bool:
        """Return whether the store notices the end of a process that uses it.

        If so, it implements `watch`, `will` and `withdraw_will`. The default is False.

        Returns:
            True or False.
        """
        return False

    def watch(
        self, key: str, known: bytes, keys: Sequence[str], timeout: Timeout, patience: float = 0.0
    ) -> bytes | list[bytes]:
        """Wait until all `keys` have a value, or the value of `key` is no longer `known`.

        Args:
            key: The name of a value that may change.
            known: Its value as this rank last saw it; b"": it had none.
            keys: Names of values to wait for.
            timeout: Seconds or a timedelta.
            patience: Further seconds that a stopped store may take to answer.

        Returns:
            The values of `keys`, in their order, if all have one; otherwise the new value of `key`.

        Raises:
            StoreTimeoutError: As `wait` raises it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement watch")

    def will(self, key: str, value: Value) -> None:
        """Let the store append `value` to `key` if this process ends without closing the store.

        Args:
            key: The name.
            value: str or bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement will")

    def withdraw_will(self, key: str, value: Value) -> None:
        """Undo one `will` of this object with the same key and value. Best effort.

        Args:
            key: The name.
            value: str or bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement withdraw_will")


def reports_disconnects(store: Any) -> bool:
    """Return whether a store of any library notices the end of a process; False if it does not
    define this."""
    says = getattr(store, "reports_disconnects", None)
    return says is not None and bool(says())


def many(keys: Sequence[str]) -> Sequence[str]:
    """Return a list of keys. Raises TypeError for a single str, whose letters would be taken for
    keys."""
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of str; one key alone is [{keys!r}]")
    return keys


def _key(key: str) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a key must be str, not {type(key).__name__}")
    return key.encode()


def as_bytes(value: Value) -> bytes:
    """Return a value as it is stored. Raises TypeError if it is neither str nor bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a value must be str or bytes, not {type(value).__name__}")


def returned_bytes(value: object) -> bytes:
    """Return a value that another library's store has returned. Raises DistStoreError for what
    holds no bytes."""
    try:
        return bytes(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        raise DistStoreError(
            f"the store returned a value of type {type(value).__name__}: its methods must return "
            "bytes"
        ) from None


def returned_number(value: object) -> int:
    """Return a number that another library's store has returned. Raises DistStoreError for what is
    none."""
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        raise DistStoreError(
            f"the store returned {type(value).__name__} in place of a number"
        ) from None

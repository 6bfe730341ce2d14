"""PrefixStore: a part of another store, under a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from cydist.stores.store import (
    Store,
    Timeout,
    Value,
    many,
    reports_disconnects,
    returned_bytes,
    returned_number,
)
from cydist.waiting import duration


class PrefixStore(Store):
    """Puts ``prefix/`` before every key of another store.

    Its timeout is the other store's, and so are its limits.

    Args:
        prefix: Without the slash.
        store: Any store with these methods, cydist's or another library's.

    Examples:
        >>> whole = dist.HashStore()
        >>> dist.PrefixStore("trial", whole).set("epoch", "3")
        >>> whole.get("trial/epoch")
        b'3'
    """

    __module__ = "cydist"

    def __init__(self, prefix: str, store: Any) -> None:
        if store is None:
            raise ValueError("PrefixStore: store must be a store, not None")
        self._prefix = f"{prefix}/"
        self._store = store

    @property
    def prefix(self) -> str:
        """Return the prefix of every key.

        Returns:
            The prefix, without the slash.
        """
        return self._prefix[:-1]

    @property
    def underlying_store(self) -> Any:
        """Return the store that holds the data.

        Returns:
            The store that this one was made with.
        """
        return self._store

    def _named(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in many(keys)]

    def set(self, key: str, value: Value) -> None:
        """Set the value of `key`, replacing any present one."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`, waiting until it has one."""
        return returned_bytes(self._store.get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`; return its new value."""
        return returned_number(self._store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` have a value now."""
        return bool(self._store.check(self._named(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` have a value."""
        if timeout is None:
            self._store.wait(self._named(keys))
        else:
            self._store.wait(self._named(keys), timedelta(seconds=duration(timeout)))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return True if it existed."""
        return bool(self._store.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        """Return the number of keys of the whole underlying store."""
        return returned_number(self._store.num_keys())

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`; return the value
        afterwards."""
        return returned_bytes(
            self._store.compare_set(self._prefix + key, expected_value, desired_value)
        )

    def append(self, key: str, value: Value) -> None:
        """Add `value` to the end of `key`'s value, which may be missing."""
        self._store.append(self._prefix + key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, in their order, waiting until all have one."""
        return [returned_bytes(value) for value in self._store.multi_get(self._named(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set each key to the value at the same index, all at once."""
        self._store.multi_set(self._named(keys), values)

    def queue_push(self, key: str, value: Value) -> None:
        """Put `value` at the end of the queue `key`."""
        self._store.queue_push(self._prefix + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue `key`."""
        return returned_bytes(self._store.queue_pop(self._prefix + key, block))

    def queue_len(self, key: str) -> int:
        """Return how many values the queue `key` holds."""
        return returned_number(self._store.queue_len(self._prefix + key))

    def list_keys(self) -> list[str]:
        """Return the keys below the prefix, without it."""
        cut = len(self._prefix)
        return [key[cut:] for key in self._store.list_keys() if key.startswith(self._prefix)]

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long the underlying object waits by default."""
        self._store.set_timeout(timedelta(seconds=duration(timeout)))

    @property
    def timeout(self) -> timedelta:
        """Return the underlying object's default timeout."""
        timeout: timedelta = self._store.timeout
        return timeout

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set exist."""
        return bool(self._store.has_extended_api())

    def reports_disconnects(self) -> bool:
        """Return whether the underlying store notices the end of a process."""
        return reports_disconnects(self._store)

    def watch(
        self, key: str, known: bytes, keys: Sequence[str], timeout: Timeout, patience: float = 0.0
    ) -> bytes | list[bytes]:
        """Wait until all `keys` have a value, or the value of `key` is no longer `known`."""
        found: bytes | list[bytes] = self._store.watch(
            self._prefix + key, known, self._named(keys), timeout, patience=patience
        )
        return found

    def will(self, key: str, value: Value) -> None:
        """Let the store append `value` to `key` if this process ends without closing the store."""
        self._store.will(self._prefix + key, value)

    def withdraw_will(self, key: str, value: Value) -> None:
        """Undo one `will` with the same key and value."""
        self._store.withdraw_will(self._prefix + key, value)

    def clone(self) -> PrefixStore:
        """Return another object for the same data, with a timeout of its own."""
        return PrefixStore(self.prefix, self._store.clone())

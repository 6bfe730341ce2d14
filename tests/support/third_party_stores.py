"""Stores as third parties write them: one around another store, and one with its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from cydist.stores import HashStore, Store, TCPStore
from cydist.stores.protocol import Op
from cydist.stores.store import Timeout, Value


class WrappedStore(Store):
    """Every method of its own, by those of a TCPStore; it knows no requests."""

    def __init__(self, inner: TCPStore) -> None:
        self._inner = inner
        self.closed = False

    def set(self, key: str, value: Value) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._inner.wait(keys, timeout)

    def append(self, key: str, value: Value) -> None:
        self._inner.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._inner.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._inner.multi_set(keys, values)

    def queue_push(self, key: str, value: Value) -> None:
        self._inner.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._inner.queue_pop(key, block)

    def set_timeout(self, timeout: Timeout) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout

    def reports_disconnects(self) -> bool:
        return True

    def watch(
        self, key: str, known: bytes, keys: Sequence[str], timeout: Timeout, patience: float = 0.0
    ) -> bytes | list[bytes]:
        return self._inner.watch(key, known, keys, timeout, patience)

    def will(self, key: str, value: Value) -> None:
        self._inner.will(key, value)

    def withdraw_will(self, key: str, value: Value) -> None:
        self._inner.withdraw_will(key, value)

    def clone(self) -> WrappedStore:
        return WrappedStore(self._inner.clone())

    def close(self) -> None:
        self.closed = True
        self._inner.close()


class LedgerStore(HashStore):
    """A store in memory that notices the end of a user by `end`."""

    def __init__(self, timeout: Timeout = 30) -> None:
        super().__init__(timeout)
        self._wills: list[tuple[str, Value]] = []

    def reports_disconnects(self) -> bool:
        return True

    def watch(
        self, key: str, known: bytes, keys: Sequence[str], timeout: Timeout, patience: float = 0.0
    ) -> bytes | list[bytes]:
        value, *found = self._call(Op.WATCH, [key, *keys], [known], block=True, timeout=timeout)
        return found if len(found) == len(keys) else value

    def will(self, key: str, value: Value) -> None:
        self._wills.append((key, value))

    def withdraw_will(self, key: str, value: Value) -> None:
        self._wills.remove((key, value))

    def clone(self) -> LedgerStore:
        twin = LedgerStore(self.timeout)
        twin._shared = self._shared
        return twin

    def end(self) -> None:
        """The user of this object has gone without a goodbye."""
        for key, value in self._wills:
            self.append(key, value)

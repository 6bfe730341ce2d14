"""HashStore: a store for the threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import MUTATING, StoreRequest
from cydist.stores.store import Store, Timeout, store_timeout
from cydist.waiting import STORE_TIMEOUT, one_wait


class _Shared:
    """The data that a HashStore and its clones share."""

    def __init__(self) -> None:
        self.table = KeyValueTable()
        self.changed = threading.Condition()


class HashStore(Store):
    """A store in this process's memory, for its threads and for tests.

    Args:
        timeout: Of later calls by default.

    Examples:
        >>> store = dist.HashStore(timeout=5)
        >>> store.set("epoch", "3")
        >>> store.get("epoch")
        b'3'
    """

    __module__ = "cydist"

    in_process = True

    def __init__(self, timeout: Timeout = STORE_TIMEOUT) -> None:
        super().__init__(timeout)
        self._shared = _Shared()

    def _request(self, request: StoreRequest) -> Sequence[bytes]:
        table, changed = self._shared.table, self._shared.changed
        deadline = time.monotonic() + request.timeout
        with changed:
            while table.awaits(request) is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise store_timeout("HashStore", request.timeout, table.missing(request))
                changed.wait(one_wait(remaining))
            items = table.execute(request)
            if request.op in MUTATING:
                changed.notify_all()
            return items

    def clone(self) -> HashStore:
        """Return another object for the same data, with a timeout of its own."""
        twin = HashStore(self.timeout)
        twin._shared = self._shared
        return twin

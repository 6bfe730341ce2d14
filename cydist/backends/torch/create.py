"""Make torch's groups without torch's init_process_group.

The ranks meet in cydist's store, which only processes with the job's secret can use. torch's
default group and its environment variables stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from cydist.backends.host.addresses import where_to_listen
from cydist.backends.torch.group import TorchGroup
from cydist.errors import UnsupportedError
from cydist.groups.registry import BackendOptions
from cydist.net.interfaces import chosen_interfaces
from cydist.stores import Store


def check(name: str) -> None:
    """Raise ValueError for a backend that this torch does not have, UnsupportedError for one that
    does not take CPU memory."""
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    usable = [each for each in known if dist.is_backend_available(each)]
    if name not in usable:
        raise ValueError(f"torch has no backend called {name!r} here; it has {', '.join(usable)}")
    devices = dist.Backend.backend_capability.get(name, ["cpu"])
    if "cpu" not in devices:
        raise UnsupportedError(
            f"backend 'torch:{name}' takes arrays on {', '.join(devices)}, and torch's backends "
            "serve CPU memory here; 'torch:gloo' does"
        )


def create(name: str, options: BackendOptions, pg_options: object = None) -> TorchGroup:
    """Make a group of torch's backend `name`. `pg_options` are torch's for that backend.

    Raises the errors of meeting in the store, and torch's RuntimeError.
    """
    store = TorchStore(options.store)
    made = TorchGroup(_make(name, options, pg_options, store), name, options)
    made.torch_store = store  # torch keeps only the C++ part, and would find no methods
    return made


def _make(name: str, options: BackendOptions, pg_options: Any, torch_store: TorchStore) -> Any:
    """Make torch's object: a Backend, or a ProcessGroup written in Python."""
    rank, size = options.group_rank, options.group_size
    store = dist.PrefixStore("torch", torch_store)
    timeout = timedelta(seconds=options.timeout)
    if name == dist.Backend.GLOO:
        return dist.ProcessGroupGloo(store, rank, size, pg_options or _for_gloo(options))
    if name == dist.Backend.MPI:
        return dist.ProcessGroupMPI.create(list(options.global_ranks_in_group))
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UnsupportedError(f"backend 'torch:{name}': cydist does not know how to make it")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    theirs = distributed_c10d._DistributedBackendOptions()
    theirs.store, theirs.group_rank, theirs.group_size = store, rank, size
    theirs.timeout, theirs.group_id = timeout, options.group_id
    theirs.global_ranks_in_group = list(options.global_ranks_in_group)
    return plugin.creator_fn(theirs, pg_options)


def _for_gloo(options: BackendOptions) -> Any:
    """Let gloo listen on cydist's address."""
    gloo = dist.ProcessGroupGloo
    made = gloo._Options()
    made._devices = [gloo.create_device(interface=name) for name in chosen_interfaces()] or [
        gloo.create_device(hostname=where_to_listen(options.store))
    ]
    made._threads = 2 * len(made._devices)
    made._timeout = timedelta(seconds=options.timeout)
    return made


class TorchStore(dist.Store):
    """A cydist store with torch's interface; C++ calls it too."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key

    def num_keys(self) -> int:
        return self._store.num_keys()

    getNumKeys = num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """Return how long `get` and `wait` wait by default."""
        return self._store.timeout

    def append(self, key: str, value: bytes) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

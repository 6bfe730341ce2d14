"""torch's default group over the ranks, links and memory of cydist's default group.

`cydist.init_process_group(torch=True)` makes it, and `cydist.destroy_process_group()` ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from cydist.groups.world import DEFAULT_GROUP, World
from cydist.interop.torch.bootstrap import NAME, SharedHost, register
from cydist.stores import PrefixStore
from cydist.stores.store import Store

PREFIX = "torch"  # of the keys of torch's store, and the name of the group


class TorchStore(dist.Store):
    """A cydist store with torch's interface. Its values are bytes.

    Methods without a docstring do what torch's methods of that name do.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """Return how long `get` and `wait` wait by default."""
        return self._store.timeout


def check_sharing(backend: str) -> None:
    """Raise ValueError, before ranks meet, if torch's default group cannot be made beside one of
    this backend."""
    if backend != "tcp":
        raise ValueError(
            f"init_process_group: torch=True needs backend 'tcp', not {backend!r}. Pass 'tcp', or "
            f"call torch.distributed.init_process_group yourself"
        )
    if dist.is_initialized():
        raise ValueError(
            "init_process_group: torch=True makes torch's default group, and there is one. Call "
            "torch.distributed.destroy_process_group() first, or leave torch=True out"
        )


def share(world: World) -> None:
    """Make torch's default group, which ends with the world. Every rank calls it."""
    default = world.groups[DEFAULT_GROUP]
    register()
    host = default.subgroup(range(world.size), PREFIX, world.timeout)
    assert host is not None  # backend tcp makes it without traffic
    store = TorchStore(PrefixStore(PREFIX, world.store))
    dist.init_process_group(
        NAME, store=store, rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=world.timeout), pg_options=SharedHost(host, store),
    )  # fmt: skip
    world.ends_with.append(partial(_unshare, dist.group.WORLD))


def _unshare(made: Any) -> None:
    """End torch's groups, unless the program has done so; it may have made others since."""
    if dist.group.WORLD is made:
        dist.destroy_process_group()

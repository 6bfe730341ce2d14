"""torch's default group over the ranks, links and memory of cydist's default group.

`cydist.init_process_group(torch=True)` makes it, and `cydist.destroy_process_group()` ends it.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from cydist.backends.torch.create import TorchStore
from cydist.group_names import DEFAULT_GROUP
from cydist.groups.world import World
from cydist.interop.torch.bootstrap import NAME, SharedHost, register
from cydist.stores import PrefixStore

PREFIX = "torch"  # of the keys in the store for torch, and the name of the group


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

"""Make a group from the store, the rank and the size that torch passes.

The ranks meet as they do under torchrun (cydist/rendezvous/shared_address.py): only an address is
taken from torch's store, and the process there proves that it knows the job's secret. Later groups
share the connections and the memory of the default group in torch, and cause no traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cydist.api.process_groups import apply_settings
from cydist.backends.host.addresses import where_to_listen
from cydist.group_names import DEFAULT_GROUP
from cydist.groups.process_group import ProcessGroup
from cydist.groups.world import World
from cydist.interop.torch.group import DEVICES, Group
from cydist.rendezvous.handlers import rendezvous_through
from cydist.stores import PrefixStore
from cydist.stores.membership_store import close_on_error
from cydist.tuning import file as tuning_file
from cydist.waiting import duration

NAME = "cydist"


@dataclass
class SharedHost:
    """Options of a default group whose ranks have met already.

    Attributes:
        host: The cydist group of all of them.
        store: torch's, below the prefixes of torch.
    """

    host: ProcessGroup
    store: dist.Store


def register() -> None:
    """Make "cydist" a backend of torch.distributed. Idempotent."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=[*DEVICES])


def create(options: Any, pg_options: object = None) -> Group:
    """Make a group at torch's request.

    Args:
        options: torch's DistributedBackendOptions: store, group_rank, group_size, timeout,
            group_id, global_ranks_in_group (empty for the default group).
        pg_options: A SharedHost, or anything else, which is ignored.

    Raises RendezvousError, AuthenticationError and PeerFailedError as cydist.init_process_group.
    """
    if isinstance(pg_options, SharedHost):
        made = Group(pg_options.host, options.group_id, options.store)
        made.kept = pg_options.store  # torch's C++ does not keep the Python part of a store
        return made
    timeout = duration(options.timeout)
    ranks = list(options.global_ranks_in_group)
    default = dist.group.WORLD
    if ranks and isinstance(default, Group):
        return default.part(ranks, options.group_id, timeout, options.store)
    rank, size = options.group_rank, options.group_size
    apply_settings()
    ranks_store, rank, size = rendezvous_through(
        PrefixStore(NAME, options.store),
        lambda deadline: where_to_listen(options.store, deadline),
        rank=rank, world_size=size, timeout=timeout, purpose=options.group_id,
    )  # fmt: skip
    with close_on_error(ranks_store):
        if not ranks:  # by the default group only, since they apply to the process
            with ranks_store.report_error(rank):
                tuning_file.share_from_rank_0(ranks_store, rank)
        world = World(ranks_store, rank, size, timeout, "tcp")
        host = world.make(range(size), DEFAULT_GROUP, "tcp", timeout, None)
    if ranks:
        host.ranks = tuple(ranks)
    return Group(host, options.group_id, options.store, world)

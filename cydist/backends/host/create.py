"""Make groups of the backends "tcp" (alias "gloo") and "inproc": their link, then the group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cydist import _native, config, recorder
from cydist.backends.host.endpoint import Endpoint, of_threads
from cydist.backends.host.group import HostGroup
from cydist.errors import RendezvousError

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.groups.registry import BackendOptions


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """Make a group of backend "tcp": meet in the store, connect when first needed."""
    return group_of_link(make_endpoint(options), options)


def make_endpoint(options: BackendOptions) -> Endpoint:
    """Make this process's end of a link between the ranks of a new group."""
    from cydist.backends.host.addresses import where_to_listen
    from cydist.backends.host.connections import Connections
    from cydist.backends.host.directory import exchange, name_of_links
    from cydist.backends.host.shm_setup import offer, share_memory

    store, rank, size = options.store, options.group_rank, options.group_size
    ranks = options.global_ranks_in_group or range(size)
    job = name_of_links(store, rank)
    connections = Connections(rank, size, host=where_to_listen(store), job=job)
    try:
        peers = exchange(store, rank, ranks, connections.address(), offer("tcp"))
        if peers is None:
            raise RendezvousError(
                f"rank {ranks[rank]} was told that a rank has no address, as all ranks of this "
                "backend have: the ranks use different versions of cydist, or "
                f"{config.INSECURE.names[0]}=1 lets another process write in their store"
            )
        connections.know(peers)
        link = share_memory(store, connections.link, peers.domains, ranks)
    except BaseException:
        connections.close()
        raise

    end_counts = recorder.add_link(connections.link, ranks)

    def close() -> None:
        link.close()
        connections.close()
        end_counts()

    return Endpoint(link, close, connections, peers.hosts)


def create_inproc(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """Make a group of backend "inproc", whose ranks are threads of this process."""
    if options.group_rank == 0:
        options.store.set("hub", os.urandom(16).hex())
    key = options.store.get("hub").decode()
    link = _native.InprocLink(_native.hub(key, options.group_size), options.group_rank)
    return group_of_link(of_threads(link, key), options)


def group_of_link(endpoint: Endpoint, options: BackendOptions) -> HostGroup:
    """Make the group whose ranks are exactly the link's peers."""
    return HostGroup(
        endpoint,
        options.group_rank,
        range(options.group_size),
        timeout=options.timeout,
        name=options.group_id,
        ranks=options.global_ranks_in_group,
    )

"""Let the ranks of a group of backend "mpi" meet in the job's store, before MPI starts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cydist.backends.host.addresses import this_host, where_to_listen
from cydist.backends.host.connections import Connections
from cydist.backends.host.directory import (
    decode_partition,
    encode_partition,
    exchange,
    name_of_links,
    partition_of,
)
from cydist.backends.host.shm_setup import transport
from cydist.backends.mpi.runtime import move_on
from cydist.errors import AuthenticationError, DistNetworkError, RendezvousError, counted
from cydist.rendezvous import launcher_env

if TYPE_CHECKING:
    from cydist.groups.registry import BackendOptions


def check_in_before_mpi(options: BackendOptions) -> None:
    """Let a rank that cannot join notify the others, because MPI's start waits for all of its ranks
    without a deadline."""
    ranks = options.global_ranks_in_group
    options.store.meet("joins", ranks[options.group_rank], ranks)


def reports_of(options: BackendOptions) -> Connections | None:
    """Make sockets through which ranks report their state to waiting ranks, since MPI makes no
    progress while a rank computes. Returns None on all ranks if one has none, or if the ranks'
    numbers of networks differ."""
    store, rank, size = options.store, options.group_rank, options.group_size
    if size == 1:
        return None
    job, made = name_of_links(store, rank), None
    try:
        made = Connections(rank, size, host=where_to_listen(store), job=job)
    except AuthenticationError:  # this rank's secret, which the user must mend
        raise
    except (DistNetworkError, OSError):
        pass
    try:
        address = b"" if made is None else made.address()
        peers = exchange(store, rank, options.global_ranks_in_group, address, b"")
        if made is not None and peers is not None:
            made.know(peers)
            return made
    except RendezvousError:
        pass
    except BaseException:
        if made is not None:
            made.close()
        raise
    if made is not None:
        made.close()
    return None


def domains_of(
    MPI: Any, comm: Any, options: BackendOptions, domain: bytes
) -> Sequence[int]:  # fmt: skip
    """Return for each rank the lowest rank with which it may share memory: the one that offers the
    same domain.

    Other ranks may still make the link's communicator `comm`. They may wait for messages that MPI
    has taken here, which it moves in calls alone.
    """
    ranks = options.global_ranks_in_group
    told = options.store.digest(
        "domains", ranks[options.group_rank], ranks, domain,
        lambda domains: encode_partition(partition_of(domains)), partial(move_on, MPI, comm),
    )  # fmt: skip
    return decode_partition(told, len(ranks))


def exchange_places(MPI: Any, options: BackendOptions) -> tuple[list[int], list[str], list[bool]]:
    """Return each group rank's rank in COMM_WORLD, its host's name, and whether its
    CYDIST_TRANSPORT is "mpi". All ranks have come when this returns."""
    world, store = MPI.COMM_WORLD, options.store
    rank, size = options.group_rank, options.group_size
    if size == 1:
        return [world.Get_rank()], [socket.gethostname()], [transport() == "mpi"]
    if world.Get_size() == 1 and launcher_env.under_mpi():
        launcher_env.check_mpi_agrees(0, 1)
    store.set(f"mpi/{rank}", f"{world.Get_rank()} {world.Get_size()} {transport()} {this_host()}")
    words = store.multi_get([f"mpi/{peer}" for peer in range(size)])
    said = [text.decode().split(maxsplit=3) for text in words]
    world_ranks, sizes = [int(each[0]) for each in said], [int(each[1]) for each in said]
    if all(count == 1 for count in sizes):
        raise RendezvousError(
            f"backend 'mpi': this job has {counted(size, 'rank')}, but MPI says in every process "
            "that it is rank 0 of 1: the ranks were not started by MPI's launcher (torchrun, "
            f"cydistrun and spawn are none). Start them as `mpirun -n {size} python script.py` "
            f"with the mpirun of {MPI.get_vendor()[0]}, or use backend 'tcp', which needs no MPI"
        )
    if len(set(world_ranks)) != size or len(set(sizes)) != 1:
        raise RendezvousError(
            f"backend 'mpi': the {size} ranks of this job are not {size} ranks of one MPI job. "
            f"By rank, their rank in MPI's COMM_WORLD is {world_ranks} and its size is {sizes}: "
            f"start all of them by one `mpirun -n {size}`, or use backend 'tcp'"
        )
    hosts = [each[3].partition("/")[0] for each in said]
    return world_ranks, hosts, [each[2] == "mpi" for each in said]

"""Make groups of backend "mpi": start MPI, and check that its ranks are the job's."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist.backends.host.shm_setup import offer, share_memory, transport_of
from cydist.backends.mpi.bootstrap import (
    check_in_before_mpi,
    domains_of,
    exchange_places,
    reports_of,
)
from cydist.backends.mpi.communicators import Communicators, of_some, payload_tags
from cydist.backends.mpi.datatypes import use_reductions
from cydist.backends.mpi.endpoint import MpiEndpoint, end_left_links, leave_with
from cydist.backends.mpi.group import MpiGroup
from cydist.backends.mpi.runtime import MpiThreads, load, start
from cydist.errors import DistBackendError, RendezvousError
from cydist.groups.process_group import ProcessGroup
from cydist.logs import Log
from cydist.rendezvous import launcher_env
from cydist.tuning import table as tuning_table

if TYPE_CHECKING:
    from cydist.groups.registry import BackendOptions

_log = Log("mpi")

# Most bytes of a broadcast between two ranks that is sent with the comparing message, by MPI's
# name. Open MPI first asks the receiver if a message with its header is longer than 4 KiB.
PAYLOAD_BYTES = {"MPICH": 4096}


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """Make a group of backend "mpi", whose ranks are ranks of MPI's COMM_WORLD, in any order.

    Raises UnsupportedError without mpi4py or MPI, RendezvousError when MPI's ranks are not
    the job's.
    """
    transport_of("mpi")
    MPI = load()
    check_in_before_mpi(options)
    start(MPI)
    _prepare(MPI)
    end_left_links()
    _log.debug(
        "%s, level of threads %d", MPI.Get_library_version()[:60].strip(), MPI.Query_thread()
    )
    world_ranks, hosts, by_mpi = exchange_places(MPI, options)
    comm = _communicator(MPI, world_ranks, options)
    messages = _native.MpiLink(
        options.group_rank,
        options.group_size,
        MPI._handleof(comm),
        MPI._handleof(MPI.BYTE),
        MPI.ANY_SOURCE,
        launcher_env.placement().local_size or 1,
        payload_tags(MPI),
        MpiThreads(MPI).callers,
    )
    store = options.store
    link: _native.Link = messages
    try:
        domains = domains_of(MPI, comm, options, offer("mpi"))
        link = share_memory(store, messages, domains, options.global_ranks_in_group, "mpi")
        reports = reports_of(options)
    except BaseException:  # the others wait for its end
        MpiEndpoint(MPI, comm, link, messages, hosts, by_mpi).share().release()
        raise
    return MpiGroup(
        MpiEndpoint(MPI, comm, link, messages, hosts, by_mpi, reports, domains),
        options.group_rank,
        range(options.group_size),
        timeout=options.timeout,
        name=options.group_id,
        ranks=options.global_ranks_in_group,
    )


def _communicator(MPI: Any, world_ranks: Sequence[int], options: BackendOptions) -> Any:
    """Make the link's communicator. Call it when all ranks have come.

    A collective of COMM_WORLD makes it. Under Open MPI the messages of `of_some` could be taken by
    a receive of the program from any source with any tag. A job of some of MPI's ranks has to use
    `of_some` nevertheless.
    """
    world, deadline = MPI.COMM_WORLD, time.monotonic() + options.timeout
    digest = hashlib.sha256(options.group_id.encode()).digest()
    make = partial(of_some, MPI, world, world_ranks, int.from_bytes(digest[:4], "little"))
    if len(world_ranks) == world.Get_size():
        make = partial(world.Split, 0, options.group_rank)
    if not MpiThreads(MPI).concurrent:
        made = make()
        made.Set_errhandler(MPI.ERRORS_RETURN)
        return made
    creation = Communicators.create(MPI, make)
    try:
        while (made := next(creation)) is None:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"backend 'mpi': timeout after {options.timeout:.3g} s: all ranks have come, "
                    "and MPI makes their communicator: one of them has failed since"
                )
    except MPI.Exception as error:
        words = " ".join(error.Get_error_string().split())
        raise DistBackendError(
            f"backend 'mpi': MPI makes no communicator of the job on rank {options.group_rank}: "
            f"{words}. If it has run out of them (MPICH has about 2,000 for a process), destroy "
            "groups that are no longer used"
        ) from error
    return made


@cache
def _prepare(MPI: Any) -> None:
    """Pass MPI's location and its usable reductions to the compiled part."""
    _native.load_mpi(MPI.__file__)
    name = MPI.get_vendor()[0]
    harmless = tuning_table.SAFE_IN_OPEN_MPI if name == "Open MPI" else sys.maxsize
    _native.use_library(int(MPI.IN_PLACE) % 2**64, PAYLOAD_BYTES.get(name, 2048), harmless)
    use_reductions(MPI)
    leave_with(MPI)

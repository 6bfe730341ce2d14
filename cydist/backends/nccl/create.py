"""Make groups of backend "nccl"."""

from __future__ import annotations

import atexit
import os
import time
from functools import cache
from typing import TYPE_CHECKING

from cydist.backends.nccl.binding import Binding, abort_all, load
from cydist.backends.nccl.bootstrap import (
    Exchange,
    HostExchange,
    StoreExchange,
    current_gpu,
    join,
)
from cydist.backends.nccl.group import NcclGroup
from cydist.backends.nccl.host_group import ControlGroup, ControlListener
from cydist.backends.nccl.options import high_priority

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.groups.registry import BackendOptions
    from cydist.stores import MembershipStore


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """Make a group of backend "nccl" on this thread's current GPU.

    Raises UnsupportedError, which names what is missing (cupy, NCCL, a GPU), before it waits for
    other ranks. Also raises as `bootstrap.join`.
    """
    from cydist.backends.host.create import make_endpoint

    priority = high_priority(pg_options)
    binding()
    current_gpu()
    store = options.store
    members = list(options.global_ranks_in_group)
    inner = store.part("host", members, f"making group {options.group_id!r}")
    host = ControlGroup(
        make_endpoint(options._replace(store=inner)), options.group_rank, range(options.group_size),
        timeout=options.timeout, name=options.group_id, ranks=members,
    )  # fmt: skip
    return make(host, store_exchange(store, host), store, priority)


def store_exchange(store: MembershipStore, host: ControlGroup) -> Exchange:
    """Return an exchange between the ranks of a host group: through a store, if only processes with
    the job's secret can read the unique id there."""
    if store.signs:
        return HostExchange(host)
    return StoreExchange(store, host.rank(), host.ranks, host.group_name)


def make(
    host: ControlGroup, exchange: Exchange, store: MembershipStore | None, priority: bool
) -> NcclGroup:
    """Make the GPU group of a host group. If that fails, the host group ends."""
    try:
        gpu = current_gpu()
        deadline = time.monotonic() + host.timeout
        # Before the ranks meet: the first one may fail before the last one has its group.
        control = ControlListener(host) if host.size() > 1 else None
        comm = join(binding(), gpu, exchange, host.rank(), host.ranks, host.group_name, deadline)
        return NcclGroup(binding(), comm, gpu, host, store, priority, control)
    except BaseException:
        host.destroy()
        raise


@cache
def binding() -> Binding:
    """Return NCCL's binding, loaded once."""
    found = load()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            abort_all()

    # Communicators that still exist at the interpreter's end are ended here, not by the garbage
    # collector.
    atexit.register(end)
    return found

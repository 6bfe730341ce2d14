"""Make groups of backend "nccl"."""

from __future__ import annotations

import atexit
import os
from functools import cache
from typing import TYPE_CHECKING

from cydist import config
from cydist.backends.nccl.binding import INSTALL, Binding, CupyNccl, end_all, version_text
from cydist.backends.nccl.bootstrap import current_gpu, store_exchange
from cydist.backends.nccl.cuda import through_torch
from cydist.backends.nccl.group import make
from cydist.backends.nccl.host_group import ControlGroup
from cydist.backends.nccl.options import high_priority
from cydist.devices.array_libraries import NCCL_MINIMUM
from cydist.errors import UnsupportedError
from cydist.group_names import group_title

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.groups.registry import BackendOptions


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """Make a group of backend "nccl" on this thread's current GPU.

    Raises UnsupportedError, which names what is missing (cupy, NCCL, a GPU), before it waits for
    other ranks. Also raises as `bootstrap.join`.
    """
    from cydist.backends.host.create import make_endpoint

    priority = high_priority(pg_options)
    loaded = binding()
    current_gpu()
    store = options.store
    members = list(options.global_ranks_in_group)
    inner = store.part("host", members, f"making {group_title(options.group_id)}")
    host = ControlGroup(
        make_endpoint(options._replace(store=inner)), options.group_rank, range(options.group_size),
        timeout=options.timeout, name=options.group_id, ranks=members,
    )  # fmt: skip
    return make(loaded, host, store_exchange(store, host), store, priority)


@cache
def binding() -> Binding:
    """Return NCCL's binding, loaded once."""
    found = load()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            end_all()

    # Communicators that still exist at the interpreter's end are ended here, not by the garbage
    # collector.
    atexit.register(end)
    return found


def load() -> Binding:
    """Return the binding that CYDIST_NCCL_BINDING names; by default cupy's, and without cupy
    torch's.

    Raises UnsupportedError if there is none, or NCCL is too old; ValueError for another setting.
    """
    wanted = config.NCCL_BINDING.get().strip().lower()
    binding: Binding
    if wanted == "nccl4py":
        from cydist.backends.nccl.nccl4py import Nccl4py

        binding = Nccl4py()
    elif through_torch():
        from cydist.backends.nccl.torch_nccl import TorchNccl

        binding = TorchNccl()
    elif wanted in ("", "cupy"):
        binding = CupyNccl()
    else:
        raise ValueError(f"CYDIST_NCCL_BINDING={wanted!r}: there are cupy, torch and nccl4py")
    if binding.version() < NCCL_MINIMUM:
        raise UnsupportedError(
            f"backend 'nccl' needs NCCL {version_text(NCCL_MINIMUM)} or later, and "
            f"{version_text(binding.version())} is loaded: {INSTALL}"
        )
    return binding

"""cydist: torch.distributed's API for numpy, torch and cupy arrays.

import cydist as dist
dist.init_process_group()
dist.all_reduce(array)

In the examples of docstrings `np` is numpy, `dist` is cydist, and `rank` is this rank's number in a
job of two ranks.
"""

import importlib
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import cydist.backends  # noqa: F401  it registers them
from cydist import errors as _errors
from cydist import recorder as recorder
from cydist._native import Array, asarray
from cydist.api.coalesced import (
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from cydist.api.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    exscan,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scan,
)
from cydist.api.monitored_barrier import monitored_barrier
from cydist.api.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from cydist.api.process_groups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    GroupMember,
    abort,
    destroy_process_group,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_initialized,
    new_group,
    shrink_group,
)
from cydist.api.rooted_collectives import broadcast, gather, reduce, scatter
from cydist.api.shared_arrays import empty_shared, is_shared
from cydist.config import __version__ as __version__
from cydist.errors import (
    AuthenticationError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTimeoutError,
    ForkedError,
    GroupDestroyedError,
    GroupFailedError,
    MismatchError,
    NonFiniteError,
    PeerFailedError,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    QueueEmptyError,
    RendezvousError,
    StoreTimeoutError,
    UnsupportedError,
)
from cydist.groups.hooks import CallInfo, HookHandle, add_hook
from cydist.groups.process_group import ProcessGroup
from cydist.groups.registry import (
    Backend,
    BackendConfig,
    get_default_backend_for_device,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    register_backend,
)
from cydist.logs import add_rank
from cydist.reduce_ops import ReduceOp, reduce_op, supports_complex
from cydist.rendezvous import rendezvous
from cydist.waiting import default_pg_timeout
from cydist.work import EventWork, Work

if TYPE_CHECKING:
    from cydist import device_mesh as device_mesh
    from cydist.api.coalescing import _coalescing_manager as _coalescing_manager
    from cydist.api.debugging import (
        DebugLevel,
        breakpoint,
        get_debug_level,
        set_debug_level,
        set_debug_level_from_env,
    )
    from cydist.api.device_mesh import DeviceMesh, init_device_mesh
    from cydist.api.local_rank import get_node_local_rank, is_torchelastic_launched
    from cydist.api.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from cydist.api.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
    from cydist.backends.nccl.options import ProcessGroupNCCL
    from cydist.groups.call_options import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )
    from cydist.launch.spawn import spawn
    from cydist.rendezvous.handlers import register_rendezvous_handler
    from cydist.stores import FileStore, HashStore, PrefixStore, Store, TCPStore

# Modules of names that many programs never use: imported at first use.
_LATER = {
    "cydist.backends.nccl.options": ("ProcessGroupNCCL",),
    "cydist.launch.spawn": ("spawn",),
    "cydist.rendezvous.handlers": ("register_rendezvous_handler",),
    "cydist.api.coalescing": ("_coalescing_manager",),
    "cydist.api.debugging": (
        "DebugLevel",
        "breakpoint",
        "get_debug_level",
        "set_debug_level",
        "set_debug_level_from_env",
    ),
    "cydist.api.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "cydist.api.local_rank": ("get_node_local_rank", "is_torchelastic_launched"),
    "cydist.api.subgroups": ("new_subgroups", "new_subgroups_by_enumeration", "split_group"),
    "cydist.api.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "cydist.groups.call_options": (
        "AllToAllOptions",
        "AllgatherOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "BarrierOptions",
        "BroadcastOptions",
        "GatherOptions",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
    ),
    "cydist.stores": ("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
}

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Array",
    "AuthenticationError",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "CallInfo",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "EventWork",
    "FileStore",
    "ForkedError",
    "GatherOptions",
    "GroupDestroyedError",
    "GroupFailedError",
    "GroupMember",
    "HashStore",
    "HookHandle",
    "MismatchError",
    "NonFiniteError",
    "P2POp",
    "PeerFailedError",
    "PrefixStore",
    "ProcessException",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessGroupNCCL",
    "ProcessRaisedException",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "RendezvousError",
    "ScatterOptions",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "UnsupportedError",
    "Work",
    "abort",
    "add_hook",
    "add_rank",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "asarray",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "empty_shared",
    "exscan",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_shared",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_backend",
    "register_rendezvous_handler",
    "rendezvous",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "spawn",
    "split_group",
    "supports_complex",
]


# torch's names.
_make_nccl_premul_sum = ReduceOp.PREMUL_SUM
_all_gather_base = all_gather_into_tensor
_reduce_scatter_base = reduce_scatter_tensor

# Former modules of operations: their old pickles still load.
sys.modules.setdefault("cydist.types", sys.modules["cydist.reduce_ops"])


def _name_as_users_do(found: object) -> None:
    """Let pickles and help() of a public function name `cydist`, since its module may move. Classes
    do this themselves."""
    found = getattr(found, "__func__", found)  # of a method
    while callable(found) and not isinstance(found, type):
        found.__module__ = __name__
        found = getattr(found, "__wrapped__", None)


# The modules whose public functions let other ranks wait, or wait for them. Their compiled
# functions shorten tracebacks themselves.
_CALLS = {
    f"cydist.api.{module}"
    for module in ("coalesced", "collectives", "monitored_barrier", "objects", "p2p",
                   "process_groups", "shared_arrays", "subgroups")
}  # fmt: skip


def _as_users_see(found: Any, module: str) -> Any:
    """Return what a name of a module is for users: functions that communicate shorten
    tracebacks."""
    communicates = isinstance(found, FunctionType) and module in _CALLS
    if communicates and not found.__name__.startswith(("get_", "is_")):
        found = _errors.leaves_cydist(found)
    _name_as_users_do(found)
    return found


for _name in __all__:
    if (_found := globals().get(_name)) is not None:
        globals()[_name] = _as_users_see(_found, getattr(_found, "__module__", ""))

if not TYPE_CHECKING:  # otherwise every name would seem to exist

    def __getattr__(name):
        if name == "device_mesh":
            return importlib.import_module("cydist.device_mesh")
        for module, names in _LATER.items():
            if name in names:
                found = _as_users_see(getattr(importlib.import_module(module), name), module)
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The interface to the compiled code: all Python above imports compiled names from here."""

# ruff: noqa: E402  the compiled modules are imported once a finder knows them

import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder

if sys.platform != "linux":
    raise ImportError(f"cydist works on Linux only for now, and this is {sys.platform!r}")

_file = PathFinder.find_spec(f"{__name__}.compiled", __path__)
if _file is None or _file.origin is None:
    raise ImportError(
        f"cydist's compiled part is not built ({__path__[0]} has no file for this Python): run "
        "`pip install -e .` in the source tree, or import from another directory to use an "
        "installed cydist"
    )


class _Modules:
    """Find every compiled module in the one file that holds them all."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith(f"{__name__}."):
            return None
        spec = ModuleSpec(name, ExtensionFileLoader(name, _file.origin), origin=_file.origin)
        spec.has_location = True
        return spec


# First in the list, so that files of older builds, one for each module, are ignored.
sys.meta_path.insert(0, _Modules)

from cydist._native import fast_collectives, fast_nccl, fast_p2p
from cydist._native.abi import (
    COLLECTIVE_NAMES,
    FLAG_BITS,
    MESSAGE_TAGS,
    PAGE_BYTES,
    Link,
    begin_counters_at,
)
from cydist._native.algorithm_table import NEED_BITS, TRAIT_BITS, algorithms, forget_choices
from cydist._native.array import Array, empty, of_one_kind, overlapping, totals, use_memory
from cydist._native.asarray import asarray
from cydist._native.call_errors import STATUS_NAMES, CallError
from cydist._native.call_queue import CallQueue, CallRecord
from cydist._native.cipher import CipherHandle, change_keys_after
from cydist._native.failpoints import arm as arm_failpoint
from cydist._native.failpoints import failpoint
from cydist._native.failpoints import holds as failpoint_holds
from cydist._native.fast_api import fast_path, use_operation
from cydist._native.fast_collectives import is_observed, is_profiling, observe_calls
from cydist._native.group import Group
from cydist._native.group_state import GroupState
from cydist._native.inproc import Hub, InprocLink, hub
from cydist._native.kernels import (
    DTYPES,
    ITEMSIZES,
    OPS,
    combine_all,
    flatten_buffers,
    prepare,
    supports,
    unflatten_buffers,
    use_isa,
    why_not,
)
from cydist._native.libmpi import load as load_mpi
from cydist._native.libmpi import run_in_background, runs_in_background
from cydist._native.mpi_collectives import use_library, use_reduction
from cydist._native.mpi_link import MpiLink
from cydist._native.openssl import load as load_openssl
from cydist._native.p2p import ANY_SOURCE, LARGEST_TAG, Message, irecv, isend
from cydist._native.recent_calls import (
    OTHER_NAMES,
    RECV_NAME,
    RUNNING,
    SEND_NAME,
    STATES,
    add_text,
    clock_now,
    open_ring,
    own_ring,
    read_ring,
    replace_text,
    set_stack_signal,
)
from cydist._native.shm_heap import Heap, HeapBuffer, cgroup_left
from cydist._native.shm_link import ShmLink
from cydist._native.shm_memory import SharedMemory
from cydist._native.shm_peers import LocalPeersHandle
from cydist._native.stream_fork import keep_in_child, replace_in_child
from cydist._native.stream_link import MessageLink, TcpLink
from cydist._native.stream_silence import (
    SilenceWatch,
    keepalive_times,
    longest_repetition_pause,
    silence_limit,
)
from cydist._native.strided_ranges import hash_of_sizes, pack_part, unpack_part
from cydist._native.tls import TlsHandshake

__all__ = [
    "ANY_SOURCE",
    "COLLECTIVE_NAMES",
    "DTYPES",
    "FLAG_BITS",
    "ITEMSIZES",
    "LARGEST_TAG",
    "MESSAGE_TAGS",
    "NEED_BITS",
    "OPS",
    "OTHER_NAMES",
    "RECV_NAME",
    "RUNNING",
    "SEND_NAME",
    "STATES",
    "STATUS_NAMES",
    "PAGE_BYTES",
    "TRAIT_BITS",
    "Array",
    "CallError",
    "Group",
    "GroupState",
    "Heap",
    "HeapBuffer",
    "Hub",
    "InprocLink",
    "Link",
    "Message",
    "MessageLink",
    "MpiLink",
    "LocalPeersHandle",
    "SharedMemory",
    "ShmLink",
    "SilenceWatch",
    "TcpLink",
    "TlsHandshake",
    "CallQueue",
    "CallRecord",
    "CipherHandle",
    "add_text",
    "algorithms",
    "arm_failpoint",
    "begin_counters_at",
    "asarray",
    "cgroup_left",
    "change_keys_after",
    "clock_now",
    "observe_calls",
    "combine_all",
    "empty",
    "failpoint",
    "failpoint_holds",
    "flatten_buffers",
    "forget_choices",
    "hash_of_sizes",
    "hub",
    "is_observed",
    "is_profiling",
    "irecv",
    "isend",
    "keep_in_child",
    "load_openssl",
    "keepalive_times",
    "load_mpi",
    "longest_repetition_pause",
    "of_one_kind",
    "open_ring",
    "overlapping",
    "own_ring",
    "pack_part",
    "prepare",
    "read_ring",
    "replace_in_child",
    "replace_text",
    "run_in_background",
    "runs_in_background",
    "set_stack_signal",
    "silence_limit",
    "fast_collectives",
    "fast_p2p",
    "fast_nccl",
    "fast_path",
    "supports",
    "totals",
    "unflatten_buffers",
    "unpack_part",
    "use_library",
    "use_isa",
    "use_memory",
    "use_operation",
    "use_reduction",
    "why_not",
]

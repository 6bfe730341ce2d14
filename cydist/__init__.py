"""cydist: torch.distributed's API for numpy, torch and cupy arrays.

    import cydist as dist
    dist.init_process_group()
    dist.all_reduce(array)
"""

from cydist._native import Array, asarray
from cydist.coalesced import (
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from cydist.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
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
    PeerFailedError,
    QueueEmptyError,
    RendezvousError,
    StoreTimeoutError,
    UnsupportedError,
)
from cydist.group import ProcessGroup
from cydist.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from cydist.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from cydist.registry import Backend, register_backend
from cydist.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from cydist.types import ReduceOp
from cydist.work import Work
from cydist.world import (
    GroupMember,
    abort,
    destroy_process_group,
    get_backend,
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
)

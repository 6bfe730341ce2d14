"""torch.distributed as its first documents describe it, under their names and with their defaults.

    import cydist.deprecated as dist

    dist.init_process_group("tcp", init_method="tcp://10.1.1.20:23456", rank=0, world_size=4)
    dist.all_reduce(array)

It makes the same groups as `cydist`, and programs may use both. What the documents define differs
from today's API in defaults and exceptions: a call before `init_process_group` raises
AssertionError, and `gather` and `scatter` take their lists by keyword. `cydist` has the other
calls.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cydist.api import collectives, p2p, process_groups, rooted_collectives
from cydist.api.multigpu import end_entry_groups
from cydist.api.process_groups import AnyGroup, group, usable_group
from cydist.deprecated import mode
from cydist.deprecated.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
)
from cydist.groups import registry
from cydist.groups.registry import is_available
from cydist.reduce_ops import Op, ReduceOp

if TYPE_CHECKING:
    from cydist.api.arguments import AnyArray
    from cydist.work import Work

__all__ = [
    "all_gather",
    "all_gather_multigpu",
    "all_reduce",
    "all_reduce_multigpu",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
    "destroy_process_group",
    "dist_backend",
    "gather",
    "get_rank",
    "get_world_size",
    "group",
    "init_master_worker",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "scatter",
    "send",
]

_INITIALIZED_PG, _INITIALIZED_MW = mode.INITIALIZED_PG, mode.INITIALIZED_MW


class dist_backend:
    """Numbers of the backends, under torch.distributed's first name for them.

    Attributes:
        UNDEFINED: There is no default group, or it has another backend.
        TCP: Of `init_process_group("tcp")`.
        MPI: Of `init_process_group("mpi")`.
        GLOO: Of `init_process_group("gloo")`.
        NCCL: Of `init_process_group("nccl")`.

    Examples:
        >>> from cydist import deprecated
        >>> deprecated.dist_backend.TCP
        0
    """

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3


class reduce_op:
    """The operations that the first documents know, for `op`. They are those of `cydist.ReduceOp`.

    Attributes:
        SUM: The sum.
        PRODUCT: The product.
        MAX: The greatest element.
        MIN: The least element.

    Examples:
        >>> from cydist import deprecated
        >>> x = np.array([rank])
        >>> deprecated.all_reduce(x, op=deprecated.reduce_op.MAX)
        >>> x
        array([1])
    """

    SUM = ReduceOp.SUM
    PRODUCT = ReduceOp.PRODUCT
    MAX = ReduceOp.MAX
    MIN = ReduceOp.MIN


class _DistributedRequest:
    """A message under way: the result of `isend` and `irecv`."""

    def __init__(self, request: Work) -> None:
        self.request = request

    def is_completed(self) -> bool:
        """Return whether the message has been transferred."""
        return self.request.is_completed()

    def wait(self) -> None:
        """Wait until the message has been transferred. Raises its error."""
        self.request.wait()


def is_initialized() -> bool:
    """Return whether there is a default group that takes collectives.

    Returns:
        False after `init_master_worker` as well.

    Examples:
        >>> from cydist import deprecated
        >>> deprecated.is_initialized()
        True
    """
    return mode.mode() == _INITIALIZED_PG


def init_process_group(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Join the job and make the default group. Blocks until all ranks have joined.

    Args:
        backend: "tcp", "gloo", "mpi", "nccl", or another that cydist has.
        init_method: "env://", "tcp://host:port", with a multicast address too, or "file:///path".
            With the latter two, ranks that give no rank get one.
        **kwargs: `world_size`, how many ranks there are; `rank`, this process's; `group_name`,
            which separates jobs that meet at one address or file.

    Raises:
        AssertionError: Another keyword is given.
        RuntimeError: The backend is unknown, or there is a default group already. Nothing was
            started; that group stays usable.
        DistError: The ranks did not meet, with RendezvousError for example.
    """
    _join(backend, init_method, kwargs)


def init_master_worker(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Join the job in the first documents' experimental mode of a master and its workers.

    The ranks meet, and `get_rank` and `get_world_size` work. As documented, collectives and
    messages raise AssertionError in this mode. It was for tensors on other ranks, which cydist has
    not: send arrays with `init_process_group` and `send`.

    Args:
        backend: As of `init_process_group`.
        init_method: As of `init_process_group`.
        **kwargs: As of `init_process_group`.

    Raises:
        AssertionError: Another keyword is given.
        RuntimeError: As of `init_process_group`.
        DistError: The ranks did not meet, with RendezvousError for example.
    """
    warnings.warn(
        "init_master_worker: master-worker mode is experimental, and cydist has no tensors on "
        "other ranks: only get_rank and get_world_size work. Use init_process_group",
        stacklevel=2,
    )
    _join(backend, init_method, kwargs)
    mode.master_worker.add(process_groups.current_world())


def _join(backend: str, init_method: str, kwargs: dict[str, Any]) -> None:
    world_size = kwargs.pop("world_size", -1)
    group_name = kwargs.pop("group_name", "")
    rank = kwargs.pop("rank", -1)
    assert len(kwargs) == 0, f"got unexpected keyword arguments: {','.join(kwargs)}"
    if mode.mode():
        raise RuntimeError("trying to initialize torch.distributed twice!")
    try:
        registry.parse(backend)
    except ValueError as error:
        raise RuntimeError(f"Invalid distributed backend name: {backend}: {error}") from None
    process_groups.init_process_group(
        backend, init_method, world_size=world_size, rank=rank, group_name=group_name
    )


def destroy_process_group() -> None:
    """Destroy all groups. `init_process_group` may be called again then.

    Raises:
        ValueError: There is none.
    """
    process_groups.destroy_process_group()


def get_rank() -> int:
    """Return this process's rank.

    Returns:
        0 to world size - 1.

    Raises:
        AssertionError: There is no default group.

    Examples:
        >>> from cydist import deprecated
        >>> assert deprecated.get_rank() == rank
    """
    mode.check_joined()
    return process_groups.get_rank()


def get_world_size() -> int:
    """Return how many ranks the job has.

    Returns:
        The number.

    Raises:
        AssertionError: There is no default group.

    Examples:
        >>> from cydist import deprecated
        >>> deprecated.get_world_size()
        2
    """
    mode.check_joined()
    return process_groups.get_world_size()


def isend(tensor: AnyArray, dst: int) -> _DistributedRequest:
    """Start sending an array.

    Args:
        tensor: (...). Leave it alone until `wait` has returned.
        dst: Global rank of the receiver.

    Returns:
        A request with `is_completed()` and `wait()`.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The group has failed.
    """
    mode.check_process_group()
    return _request(p2p.isend(tensor, dst))


def irecv(tensor: AnyArray, src: int) -> _DistributedRequest:
    """Start receiving an array.

    Args:
        tensor: (...), of the sender's size and dtype. Leave it alone until `wait` has returned.
        src: Global rank of the sender.

    Returns:
        A request with `is_completed()` and `wait()`.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was received; the group stays usable.
        DistError: The group has failed.
    """
    mode.check_process_group()
    return _request(p2p.irecv(tensor, src))


def send(tensor: AnyArray, dst: int) -> None:
    """Send an array. Blocks until it may be changed again.

    Args:
        tensor: (...).
        dst: Global rank of the receiver.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The call failed.
    """
    mode.check_process_group()
    p2p.send(tensor, dst)


def recv(tensor: AnyArray, src: int | None = None) -> int:
    """Receive an array.

    Args:
        tensor: (...), of the sender's size and dtype.
        src: Global rank of the sender; None: any rank.

    Returns:
        The sender's global rank.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was received; the group stays usable.
        DistError: The call failed.
    """
    mode.check_process_group()
    return p2p.recv(tensor, src)


def broadcast(tensor: AnyArray, src: int, group: AnyGroup = None) -> None:
    """Copy an array of one rank to all ranks.

    Args:
        tensor: (...), of the same size and dtype on every rank.
        src: Global rank of the source.
        group: Of `new_group`, or `group.WORLD`; None means that, too.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The call failed. The group has failed then.
    """
    mode.check_process_group()
    rooted_collectives.broadcast(tensor, src, group)


def all_reduce(tensor: AnyArray, op: Op = reduce_op.SUM, group: AnyGroup = None) -> None:
    """Reduce an array over all ranks, in place.

    Args:
        tensor: (...), of the same size and dtype on every rank.
        op: One of `reduce_op`, or of `cydist.ReduceOp`.
        group: Of `new_group`, or `group.WORLD`; None means that, too.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The call failed. The group has failed then.
    """
    mode.check_process_group()
    collectives.all_reduce(tensor, op, group)


def reduce(tensor: AnyArray, dst: int, op: Op = reduce_op.SUM, group: AnyGroup = None) -> None:
    """Reduce an array over all ranks into that of one rank.

    Args:
        tensor: (...), of the same size and dtype on every rank. It keeps its contents elsewhere.
        dst: Global rank of the receiver.
        op: One of `reduce_op`, or of `cydist.ReduceOp`.
        group: Of `new_group`, or `group.WORLD`; None means that, too.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The call failed. The group has failed then.
    """
    mode.check_process_group()
    rooted_collectives.reduce(tensor, dst, op, group)


def all_gather(tensor_list: Sequence[AnyArray], tensor: AnyArray, group: AnyGroup = None) -> None:
    """Send every rank's array to all ranks.

    Args:
        tensor_list: p arrays; entry r gets rank r's.
        tensor: (...), this rank's.
        group: Of `new_group`, or `group.WORLD`; None means that, too.

    Raises:
        AssertionError: There is no default group.
        ValueError: The arguments are wrong. Nothing was sent; the group stays usable.
        DistError: The call failed. The group has failed then.
    """
    mode.check_process_group()
    collectives.all_gather(tensor_list, tensor, group)


def gather(tensor: AnyArray, **kwargs: Any) -> None:
    """Send every rank's array to one rank.

    Args:
        tensor: (...), this rank's.
        **kwargs: `dst`, global rank of the receiver, by default this one: so every other rank must
            give it. `gather_list`, on the receiver p arrays, elsewhere none. `group`.

    Raises:
        AssertionError: There is no default group.
        RuntimeError: The receiver gives no list, another rank gives one, or a keyword is unknown.
            Nothing was sent; the group stays usable.
        ValueError: Other arguments are wrong, likewise.
        DistError: The call failed. The group has failed then.

    Examples:
        >>> from cydist import deprecated
        >>> x, parts = np.array([rank]), [np.zeros(1, int) for _ in range(2)]
        >>> deprecated.gather(x, gather_list=parts) if rank == 0 else deprecated.gather(x, dst=0)
        >>> assert rank == 1 or parts == [0, 1]
    """
    mode.check_process_group()
    my_rank = get_rank()
    dst = kwargs.pop("dst", my_rank)
    gather_list = kwargs.pop("gather_list", None)
    chosen = kwargs.pop("group", None)
    if kwargs:
        raise RuntimeError(f"got unexpected kwargs: {', '.join(kwargs)}")
    if dst == my_rank:
        if gather_list is None:
            raise RuntimeError("gather_list is a required argument in gather destination")
    elif gather_list:
        raise RuntimeError("non-empty gather_list can be given only to gather destination")
    else:
        gather_list = None
    rooted_collectives.gather(tensor, gather_list, dst, chosen)


def scatter(tensor: AnyArray, **kwargs: Any) -> None:
    """Send each rank one array of a rank's list.

    Args:
        tensor: (...), which gets this rank's.
        **kwargs: `src`, global rank of the sender, by default this one: so every other rank must
            give it. `scatter_list`, on the sender p arrays, elsewhere none. `group`.

    Raises:
        AssertionError: There is no default group.
        RuntimeError: The sender gives no list, another rank gives one, or a keyword is unknown.
            Nothing was sent; the group stays usable.
        ValueError: Other arguments are wrong, likewise.
        DistError: The call failed. The group has failed then.

    Examples:
        >>> from cydist import deprecated
        >>> x, parts = np.array([0]), [np.array([10]), np.array([11])]
        >>> deprecated.scatter(x, scatter_list=parts) if rank == 0 else deprecated.scatter(x, src=0)
        >>> assert x == 10 + rank
    """
    mode.check_process_group()
    my_rank = get_rank()
    src = kwargs.pop("src", my_rank)
    scatter_list = kwargs.pop("scatter_list", None)
    chosen = kwargs.pop("group", None)
    if kwargs:
        raise RuntimeError(f"got unexpected kwargs: {', '.join(kwargs)}")
    if src == my_rank:
        if scatter_list is None:
            raise RuntimeError("scatter_list is a required argument in scatter source")
    elif scatter_list:
        raise RuntimeError("non-empty can be given only to scatter source")
    else:
        scatter_list = None
    rooted_collectives.scatter(tensor, scatter_list, src, chosen)


def barrier(group: AnyGroup = None) -> None:
    """Wait until every rank of the group has made this call.

    Args:
        group: Of `new_group`, or `group.WORLD`; None means that, too.

    Raises:
        AssertionError: There is no default group.
        DistError: The call failed. The group has failed then.
    """
    mode.check_process_group()
    collectives.barrier(group)


def new_group(ranks: Sequence[int] | None = None) -> AnyGroup:
    """Make a group. Every rank of the job calls this, in the same order.

    Args:
        ranks: Global ranks of the members; None: all ranks.

    Returns:
        The group; on ranks outside it what `cydist.new_group` returns there.

    Raises:
        AssertionError: There is no default group.
        ValueError: The ranks are wrong. The default group stays usable.
        DistError: The members did not meet.
    """
    mode.check_process_group()
    return process_groups.new_group(ranks)


def _clear_group_cache(group: AnyGroup = None) -> None:
    """End the groups of entries that `*_multigpu` calls made for lists on this group. Every member
    calls this; the next such call makes new ones."""
    mode.check_process_group()
    if (chosen := usable_group(group, "_clear_group_cache")) is not None:
        end_entry_groups(chosen)


def _register_stream(stream: object) -> None:
    """Take a CUDA stream, as the first versions did. cydist needs no list of streams: a call
    follows the stream that is current when it is made.

    Raises RuntimeError without a default group, and TypeError for what is no stream.
    """
    if not mode.mode():
        raise RuntimeError("torch.distributed needs to be initialized first")
    if not (hasattr(stream, "cuda_stream") or hasattr(stream, "ptr")):
        raise TypeError(f"_register_stream needs a stream of torch or cupy, not {stream!r:.100}")


def _request(work: Work | None) -> _DistributedRequest:
    assert work is not None  # every rank is in the default group
    return _DistributedRequest(work)


if not TYPE_CHECKING:  # otherwise every name would seem to exist

    def __getattr__(name):
        if name == "_initialized":
            return mode.mode()
        if name == "_backend":
            backend = process_groups.get_backend() if mode.mode() else "undefined"
            return getattr(dist_backend, backend.upper(), dist_backend.UNDEFINED)
        if name == "launch":
            return importlib.import_module("cydist.deprecated.launch")
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: it has what torch.distributed's first "
            "documents have; the module cydist has the rest"
        )

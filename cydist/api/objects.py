"""Python objects instead of arrays: the *_object calls.

Plain values and arrays travel in cydist's codec. Everything else is pickled, unless
init_process_group got allow_pickle=False or connections are not authenticated. The collectives with
`async_op` run in order on a thread, in a second group of the same ranks, so that they do not meet
the group's other calls. An object that cannot be encoded raises on its own rank, and a DistError
that names the rank on all others. The group stays usable then, as it does after invalid bytes
(DistBackendError) and after pickle where it is not allowed (TypeError), or an object that its
sender did not send so (AuthenticationError, see object_tags.py). Sizes travel first: a rank that
announces more than this host has memory for fails the group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import BoundArguments, signature
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cydist import config
from cydist._native import cgroup_left
from cydist.api import object_codec
from cydist.api.arguments import root_rank
from cydist.api.collectives import all_gather
from cydist.api.dispatch import Timeout
from cydist.api.object_tags import TO_ALL, ObjectTags
from cydist.api.p2p import peer_rank, recv, send
from cydist.api.process_groups import (
    AnyGroup,
    as_rank_of,
    current_world,
    is_initialized,
    resolve_group,
    usable_group,
)
from cydist.api.rooted_collectives import broadcast, gather, scatter
from cydist.errors import DistBackendError
from cydist.executor import Serial
from cydist.group_names import GroupName, group_title
from cydist.groups.process_group import ProcessGroup
from cydist.waiting import seconds
from cydist.work import Work

P = ParamSpec("P")
T = TypeVar("T")

COMPANION = "objects"  # in the name of the group that carries asynchronous calls
MESSAGE = "send_object_list"  # what both sides of a message call it
_UNCHECKED_BYTES = 1 << 24  # of objects, for which no limit of a cgroup is read
FAILED = -1  # sent in position of a size by a rank that could not encode its object


def _pickle_allowed(group: ProcessGroup) -> bool:
    return current_world().allow_pickle and group.authenticated and not config.INSECURE.is_on()


def _as_host_group(group: AnyGroup, name: str, timeout: Timeout) -> ProcessGroup | None:
    """Return the group of CPU memory that carries this group's objects; None as in `usable_group`.
    Raises TypeError or ValueError for a wrong timeout."""
    chosen = usable_group(group, name)
    seconds(timeout, name)
    return None if chosen is None else chosen.as_host_group()


def _time_left(group: ProcessGroup, timeout: Timeout) -> Callable[[], float]:
    """Return a function that gives the seconds left of a call's timeout at each of its steps."""
    limit = seconds(timeout)
    end = monotonic() + (group.timeout if limit is None else limit)
    return lambda: max(0.0, end - monotonic())


class _Encoded:
    """Objects of this rank as one array of bytes, or the error of encoding them."""

    def __init__(
        self, values: list[Any], group: ProcessGroup, tags: ObjectTags, to: Sequence[int] = ()
    ) -> None:
        """Encode objects for the global ranks `to`, one each; without any, all for all ranks."""
        self.error: Exception | None = None
        parts: list[bytes] = []
        me = group.ranks[group.rank()]
        try:
            allowed = _pickle_allowed(group)
            parts = [object_codec.encode(value, allow_pickle=allowed) for value in values]
            parts = [
                tags.seal(part, me, to[position] if to else TO_ALL, position)
                for position, part in enumerate(parts)
            ]
        except Exception as error:  # pickle raises anything; it is raised again after the call
            self.error = error
        self.sizes = np.array(
            [FAILED] * len(values) if self.error else [len(part) for part in parts], np.int64
        )
        self.data = np.frombuffer(bytearray(b"".join(parts)), np.uint8)

    def check(self, name: str, sizes: np.ndarray[Any, Any], rank: int) -> None:
        """Raise if rank `rank`, whose sizes these are, could not encode its objects."""
        if self.error is not None:
            raise self.error
        _check_sizes(name, sizes, rank)


def _check_sizes(name: str, sizes: np.ndarray[Any, Any], rank: int) -> None:
    """Raise if rank `rank`, whose sizes these are, could not encode its objects."""
    if (sizes < 0).any():
        raise DistBackendError(
            f"{name}: rank {rank} could not encode its object; its own error says why",
            op=name,
            ranks=(rank,),
        )


def _one_call(call: Callable[P, T]) -> Callable[P, T]:
    """Let an interrupt between the steps of `call` fail its group, as one inside a step does."""

    @wraps(call)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs.pop("async_op", False):
            return _started(call, signature(call).bind(*args, **kwargs))  # type: ignore[return-value]
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception) and is_initialized():
                given = signature(call).bind(*args, **kwargs).arguments
                if (group := resolve_group(given.get("group"))) is not None:
                    group.fail(error, call.__name__)
            raise

    return whole


def _started(call: Callable[..., object], given: BoundArguments) -> Work | None:
    """Start a call on the group's companion. The result is its first argument that is a list."""
    name, arguments = call.__name__, given.arguments
    timeout = arguments.get("timeout")
    group = _as_host_group(arguments.get("group"), name, timeout)
    if group is None:
        return None
    group.check_usable(name)
    companion, serial = _companion(group)
    left = _time_left(group, timeout)
    arguments["group"] = companion
    world = current_world()

    def run() -> None:
        arguments["timeout"] = left()
        with as_rank_of(world):
            call(*given.args, **given.kwargs)

    lists = (value for key, value in arguments.items() if key in _RESULTS)
    return serial.start(name, run, next(lists, None))


_RESULTS = ("object_list", "object_gather_list", "scatter_object_output_list")


def _companion(group: ProcessGroup) -> tuple[ProcessGroup, Serial]:
    """Return the group that carries a group's asynchronous calls, and the order that they run in.
    The first such call makes them. If the backend cannot split a group off, the members meet."""
    if group.companion is None:
        name = GroupName(f"{group.group_name}/{COMPANION}", group.group_desc)
        limit = group.timeout
        made = group.subgroup(range(group.size()), name, limit)
        if made is None:
            world = current_world()
            store = world.store.part(name, group.ranks, f"making {group_title(name)}", limit)
            with store.report_error(world.rank):
                made = world.make_one(store, group.ranks, name, group.backend, limit, None)
        group.companion = made, Serial()
        group.with_it.append(made.destroy)
    return group.companion


def _blocks(
    name: str, sizes: Sequence[int], senders: Sequence[int], group: ProcessGroup
) -> list[np.ndarray[Any, Any]]:
    """Allocate memory for the bytes that the ranks `senders` announce.

    Raises DistBackendError if there is too little memory, or the MismatchError that explains the
    size. Other ranks may go on, so the group fails.
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(sizes) > _UNCHECKED_BYTES:
        most = min(most, cgroup_left())
    try:
        if min(sizes) >= 0 and sum(sizes) <= most:
            return [np.empty(size, np.uint8) for size in sizes]
    except MemoryError:
        pass
    group.raise_pending_failure(name)
    size, sender = max(zip(sizes, senders, strict=True))
    error = DistBackendError(
        f"{name}: rank {sender} announces {size} bytes, of {sum(sizes)} together; this host, or "
        f"this process's cgroup, has {most}, or less that is free. The group has failed; "
        "send large data as arrays",
        op=name,
        group=group.group_name,
        ranks=(sender,),
    )
    group.fail(error, name)
    raise error


def _decode(
    name: str,
    data: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    rank: int,
    group: ProcessGroup,
    tags: ObjectTags,
    to: int = TO_ALL,
    first: int = 0,
) -> list[Any]:
    """Return the objects that rank `rank` sent to rank `to`, from number `first` of its list on."""
    ends, allowed = np.cumsum(sizes), _pickle_allowed(group)
    parts = [
        tags.open(data[end - size : end].data, rank, to, first + position)
        for position, (size, end) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True))
    ]
    try:
        return [object_codec.decode(part, allow_pickle=allowed) for part in parts]
    except object_codec.CodecError as error:
        raise DistBackendError(
            f"{name}: what rank {rank} sent is no object: {error}", op=name, ranks=(rank,)
        ) from error.__cause__


@_one_call
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: AnyGroup = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Give all ranks the objects of all ranks.

    Args:
        object_list: A list of p entries. Entry r becomes rank r's object.
        obj: This rank's object.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once, whose `result` is the list. Leave list and objects alone
            until its `wait` has returned. Errors, also of arguments, are raised there. On backends
            of your own the group's first such call waits for all members.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> names = [None, None]
        >>> dist.all_gather_object(names, f"rank {rank}")
        >>> names
        ['rank 0', 'rank 1']
    """
    name = "all_gather_object"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return None
    group, left = chosen, _time_left(chosen, timeout)
    p = chosen.size()
    _check_length(name, "object_list", object_list, p)
    tags = ObjectTags(chosen, name)
    mine = _Encoded([obj], chosen, tags)
    tags.count()
    sizes = np.empty((p, 1), np.int64)
    all_gather(list(sizes), mine.sizes, group, timeout=left())
    _check_all(mine, name, sizes, chosen)
    blocks = _blocks(name, sizes[:, 0].tolist(), chosen.ranks, chosen)
    all_gather(blocks, mine.data, group, timeout=left())
    for rank, block in enumerate(blocks):
        if rank == chosen.rank():
            object_list[rank] = obj
        else:
            sender = chosen.ranks[rank]
            object_list[rank] = _decode(name, block, sizes[rank], sender, chosen, tags)[0]
    return None


@_one_call
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: object = None,
    group_src: int | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Replace the lists of all ranks by that of rank `src`.

    Args:
        object_list: Of the same length on every rank. Overwritten except on `src`.
        src: The global rank that sends; 0 unless given.
        group: A group from `new_group`; None is the default group.
        device: Accepted and ignored, as objects travel through CPU memory.
        group_src: Instead of `src`: its rank in the group.
        async_op: Return a `Work` at once, whose `result` is the list. Leave list and objects alone
            until its `wait` has returned. Errors, also of arguments, are raised there. On backends
            of your own the group's first such call waits for all members.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> settings = [{"lr": 0.1}] if rank == 0 else [None]
        >>> dist.broadcast_object_list(settings)
        >>> settings
        [{'lr': 0.1}]
    """
    name = "broadcast_object_list"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return None
    group, left = chosen, _time_left(chosen, timeout)
    _check_list(name, object_list)
    root = root_rank(chosen, name, "src", src, group_src, default=0)
    here = chosen.rank() == root
    tags = ObjectTags(chosen, name)
    mine = _Encoded(object_list if here else [], chosen, tags)
    tags.count()
    length = np.array([len(object_list)], np.int64)
    broadcast(length, group=group, group_src=root, timeout=left())
    sender = chosen.ranks[root]
    sizes = mine.sizes if here else _sizes(name, length, sender, chosen)
    broadcast(sizes, group=group, group_src=root, timeout=left())
    mine.check(name, sizes, sender)
    data = mine.data if here else _blocks(name, [sum(sizes.tolist())], [sender], chosen)[0]
    broadcast(data, group=group, group_src=root, timeout=left())
    if length[0] != len(object_list):
        raise ValueError(
            f"{name}: object_list has {len(object_list)} entries here and {length[0]} on rank "
            f"{sender}"
        )
    if not here:
        object_list[:] = _decode(name, data, sizes, sender, chosen, tags)
    return None


@_one_call
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    group_dst: int | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Give rank `dst` the objects of all ranks.

    Args:
        obj: This rank's object.
        object_gather_list: On `dst` a list of p entries. None elsewhere.
        dst: The global rank that receives; 0 unless given.
        group: A group from `new_group`; None is the default group.
        group_dst: Instead of `dst`: its rank in the group.
        async_op: Return a `Work` at once, whose `result` is the list. Leave list and objects alone
            until its `wait` has returned. Errors, also of arguments, are raised there. On backends
            of your own the group's first such call waits for all members.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> names = [None, None] if rank == 0 else None
        >>> dist.gather_object(f"rank {rank}", names)
        >>> assert rank == 1 or names == ["rank 0", "rank 1"]
    """
    name = "gather_object"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return None
    group, left = chosen, _time_left(chosen, timeout)
    root = root_rank(chosen, name, "dst", dst, group_dst, default=0)
    here = chosen.rank() == root
    p = chosen.size()
    if here:
        _check_length(name, "object_gather_list", object_gather_list, p)
    elif object_gather_list is not None:
        raise ValueError(f"{name}: object_gather_list must be None except on dst")
    tags, receiver = ObjectTags(chosen, name), chosen.ranks[root]
    mine = _Encoded([obj], chosen, tags, [receiver])
    tags.count()
    sizes = np.empty((p, 1), np.int64)
    all_gather(list(sizes), mine.sizes, group, timeout=left())
    _check_all(mine, name, sizes, chosen)
    blocks = _blocks(name, sizes[:, 0].tolist(), chosen.ranks, chosen) if here else None
    gather(mine.data, blocks, group=group, group_dst=root, timeout=left())
    if blocks is not None and object_gather_list is not None:
        for rank, block in enumerate(blocks):
            sender = chosen.ranks[rank]
            object_gather_list[rank] = (
                obj
                if rank == root
                else _decode(name, block, sizes[rank], sender, chosen, tags, receiver)[0]
            )
    return None


@_one_call
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    group_src: int | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Scatter the objects in the list on rank `src`, one to each rank.

    Args:
        scatter_object_output_list: Not empty. Entry 0 becomes this rank's object.
        scatter_object_input_list: On `src` p objects; ignored elsewhere.
        src: The global rank that sends; 0 unless given.
        group: A group from `new_group`; None is the default group.
        group_src: Instead of `src`: its rank in the group.
        async_op: Return a `Work` at once, whose `result` is the list. Leave list and objects alone
            until its `wait` has returned. Errors, also of arguments, are raised there. On backends
            of your own the group's first such call waits for all members.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> mine = [None]
        >>> dist.scatter_object_list(mine, [("a", 1), ("b", 2)] if rank == 0 else None)
        >>> assert mine == [(("a", 1), ("b", 2))[rank]]
    """
    name = "scatter_object_list"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return None
    group, left = chosen, _time_left(chosen, timeout)
    root = root_rank(chosen, name, "src", src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            f"{name}: scatter_object_output_list must be a list of one or more entries"
        )
    values: list[Any] = []
    if chosen.rank() == root:
        _check_length(name, "scatter_object_input_list", scatter_object_input_list, chosen.size())
        values = list(scatter_object_input_list or ())
    tags = ObjectTags(chosen, name)
    mine = _Encoded(values, chosen, tags, chosen.ranks)
    tags.count()
    sizes = mine.sizes if values else np.empty(chosen.size(), np.int64)
    broadcast(sizes, group=group, group_src=root, timeout=left())
    sender = chosen.ranks[root]
    mine.check(name, sizes, sender)
    own = sizes[chosen.rank() :][:1]
    (block,) = _blocks(name, own.tolist(), [sender], chosen)
    parts = np.split(mine.data, np.cumsum(sizes)[:-1]) if values else None
    scatter(block, parts, group=group, group_src=root, timeout=left())
    here = chosen.rank()
    scatter_object_output_list[0] = (
        values[root]
        if values
        else _decode(name, block, own, sender, chosen, tags, chosen.ranks[here], here)[0]
    )
    return None


@_one_call
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: AnyGroup = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Send a list of objects to rank `dst`.

    Args:
        object_list: Objects of any kind, which the receiver's list replaces.
        dst: The global rank that receives.
        group: A group from `new_group`; None is the default group.
        device: Accepted and ignored, as objects travel through CPU memory.
        group_dst: Instead of `dst`: its rank in the group.
        use_batch: Accepted and ignored: one message goes out either way.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> if rank == 0:
        ...     dist.send_object_list(["step", 7], dst=1)
        ... else:
        ...     assert dist.recv_object_list([None, None], src=0) == 0
    """
    name = "send_object_list"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return
    group, left = chosen, _time_left(chosen, timeout)
    peer = peer_rank(chosen, name, "dst", dst, group_dst)
    _check_list(name, object_list)
    receiver = chosen.ranks[peer]
    tags = ObjectTags(chosen, MESSAGE, chosen.ranks[chosen.rank()], receiver)
    mine = _Encoded(object_list, chosen, tags, [receiver] * len(object_list))
    head = np.array([len(object_list)], np.int64)
    send(head, group=group, group_dst=peer, timeout=left())
    tags.count()
    send(mine.sizes, group=group, group_dst=peer, timeout=left())
    if mine.error is not None:
        raise mine.error
    send(mine.data, group=group, group_dst=peer, timeout=left())


@_one_call
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout = None,
) -> int:
    """Receive a list of objects from rank `src`, or from any rank if None.

    Args:
        object_list: Of the sender's length. Overwritten.
        src: The global rank that sends; None: the rank whose message comes first.
        group: A group from `new_group`; None is the default group.
        device: Accepted and ignored, as objects travel through CPU memory.
        group_src: Instead of `src`: its rank in the group.
        use_batch: Accepted and ignored: one message comes in either way.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        The sender's global rank; -1 on a group that this rank is not in.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise; or an object needs pickle, which is not allowed here.
        AuthenticationError: An object is not what its sender sent. The group stays usable.
        DistBackendError: Another rank could not encode its object, or its bytes are invalid. The
            group stays usable.
        DistError: The call failed otherwise, with PeerFailedError or DistTimeoutError for example.
            The group has failed then.

    Examples:
        >>> found = [None, None]
        >>> if rank == 0:
        ...     dist.send_object_list(["step", 7], dst=1)
        ... else:
        ...     assert dist.recv_object_list(found) == 0 and found == ["step", 7]
    """
    name = "recv_object_list"
    if (chosen := _as_host_group(group, name, timeout)) is None:
        return -1
    group, left = chosen, _time_left(chosen, timeout)
    if src is not None or group_src is not None:
        peer_rank(chosen, name, "src", src, group_src)
    _check_list(name, object_list)
    head = np.empty(1, np.int64)
    source = recv(head, src, group, group_src=group_src, timeout=left())
    receiver = chosen.ranks[chosen.rank()]
    tags = ObjectTags(chosen, MESSAGE, source, receiver)
    tags.count()
    sizes = _sizes(name, head, source, chosen)
    recv(sizes, source, group, timeout=left())
    _check_sizes(name, sizes, source)
    (data,) = _blocks(name, [sum(sizes.tolist())], [source], chosen)
    recv(data, source, group, timeout=left())
    if head[0] != len(object_list):
        raise ValueError(
            f"{name}: object_list has {len(object_list)} entries, and rank {source} sent {head[0]}"
        )
    object_list[:] = _decode(name, data, sizes, source, chosen, tags, receiver)
    return source


def _sizes(
    name: str, length: np.ndarray[Any, Any], sender: int, group: ProcessGroup
) -> np.ndarray[Any, Any]:
    """Allocate memory for the sizes of the objects that `sender` announces."""
    return _blocks(name, [8 * int(length[0])], [sender], group)[0].view(np.int64)


def _check_list(name: str, values: object) -> None:
    if not isinstance(values, list):
        raise TypeError(f"{name}: object_list must be a list of objects, not {values!r:.80}")


def _check_length(name: str, what: str, values: list[Any] | None, p: int) -> None:
    if not isinstance(values, list) or len(values) != p:
        found = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        raise ValueError(
            f"{name}: {what} must be a list of {p} entries, one for each rank; got {found}"
        )


def _check_all(mine: _Encoded, name: str, sizes: np.ndarray[Any, Any], group: ProcessGroup) -> None:
    for rank in range(group.size()):
        mine.check(name, sizes[rank], group.ranks[rank])

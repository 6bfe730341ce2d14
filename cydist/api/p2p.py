"""Messages between two ranks: send, recv, isend, irecv, batch_isend_irecv.

Messages between two ranks with one tag arrive in the order they were sent. Sender and
receiver must name the same number of elements and the same dtype. Ranks are global
(`src`, `dst`) or of the group (`group_src`, `group_dst`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist._native import LARGEST_TAG, fast_path, is_observed
from cydist.api import arguments
from cydist.api.arguments import root_rank
from cydist.api.dispatch import Timeout
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.errors import DistError, DistTimeoutError
from cydist.groups.hooks import ObservedCall, are_installed, observed
from cydist.groups.process_group import ProcessGroup
from cydist.groups.profiler_ranges import RangedWork, call_range, is_profiling
from cydist.waiting import seconds
from cydist.work import FinishedWork, Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.api.arguments import AnyArray


class _Message(NamedTuple):
    """A message that may start: its arguments are checked.

    Attributes:
        name: "send".
        group: The group that serves the array's memory.
        peer: The group rank of the other side; None: any rank.
        start: Starts it.
    """

    name: str
    group: ProcessGroup
    array: Array
    peer: int | None
    start: Callable[[], Work]

    def range(self, *, async_op: bool = True) -> AbstractContextManager[None]:
        """Show the message in a profiler that runs."""
        if not is_profiling():
            return nullcontext()
        return call_range(self.group, self.name, self.array, async_op=async_op, peer=self.peer)

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the global rank of the other side, for hooks."""
        return () if self.peer is None else (self.group.ranks[self.peer],)

    def observed(self) -> AbstractContextManager[object]:
        """Show the message, which blocks, to hooks."""
        if not are_installed():
            return nullcontext()
        return observed(self.group, self.name, self.array, peers=self.peers)

    def started(self, watches: list[Callable[[], None]] | None = None) -> Work:
        """Start it; return its Work. A profiler that runs and hooks see it until it has ended.

        Args:
            watches: Where to put what waits for the end, because nothing may wait for the message
                yet; None: it may.
        """
        if not is_observed():
            return self.start()
        ends: list[Callable[[Any], None]] = []
        with self.range():
            if is_profiling():
                work: Work = RangedWork(self.name, partial(self._observed_start, ends))
                ends.append(RangedWork.watch)
            else:
                work = self._observed_start(ends)
        for end in ends:
            if watches is None:
                end(work)
            else:
                watches.append(partial(end, work))
        return work

    def _observed_start(self, ends: list[Callable[[Any], None]]) -> Work:
        if not are_installed():
            return self.start()
        call = ObservedCall(self.group, self.name, self.array, async_op=True, peers=self.peers)
        try:
            work = self.start()
        except BaseException as error:
            call.end(error)
            raise
        ends.append(call.end_with)
        return work


def peer_rank(
    group: ProcessGroup, name: str, what: str, rank: int | None, group_rank: int | None
) -> int:
    """Return the group rank of another rank, which `src`/`dst` or `group_src`/`group_dst` means."""
    peer = root_rank(group, name, what, rank, group_rank)
    if peer == group.rank():
        raise ValueError(
            f"{name}: {what} is this rank itself (global rank {group.ranks[peer]}); a rank does "
            "not send to itself"
        )
    return peer


def _check_tag(name: str, tag: int) -> None:
    if not isinstance(tag, Integral):
        raise TypeError(f"{name}: tag must be an integer, not {tag!r}")
    if not 0 <= tag <= LARGEST_TAG:
        raise ValueError(f"{name}: tag must be between 0 and {LARGEST_TAG}, not {tag}")


@fast_path
def isend(
    tensor: AnyArray,
    dst: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start sending an array to rank `dst`. Do not change it before the Work's wait.

    If you drop the Work, the message still goes on and the array stays alive.

    Args:
        tensor: (...), of any shape and dtype. The receiver's has as many elements of that dtype.
        dst: The global rank that receives.
        group: A group from `new_group`; None is the default group.
        tag: Distinguishes messages between the same ranks; 0 to 2**31 - 1.
        group_dst: Instead of `dst`: its rank in the group.

    Returns:
        A `Work`; None, after one warning, on a group that this rank is not in.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for an object that is not an array.
        DistError: The group failed before. A failure of the message is raised by the Work's wait.

    Examples:
        >>> if rank == 0:
        ...     assert dist.isend(np.zeros(1), dst=1).wait()
        ... else:
        ...     _ = dist.recv(np.empty(1), src=0)
    """
    chosen = usable_group(group, "isend")
    if chosen is None:
        return None
    return _prepare_send(chosen, "isend", tensor, dst, tag, group_dst).started()


def _prepare_send(
    chosen: ProcessGroup, name: str, tensor: Any, dst: int | None, tag: int, group_dst: int | None
) -> _Message:
    """Check a send."""
    peer = peer_rank(chosen, name, "dst", dst, group_dst)
    _check_tag(name, tag)
    array = arguments.input_array(tensor, name, "tensor")
    backend = chosen.for_device(array.device)
    backend.check_usable(name)
    if backend.checks is not None:
        backend.checks.sent(backend, name, array, peer)
    if not (array.contiguous or backend.accepts_strided(array, peer)):
        backend.check_accepts(name, array)
        array = array.dense()
    return _Message(name, backend, array, peer, lambda: backend.isend(array, peer, tag))


@fast_path
def irecv(
    tensor: AnyArray,
    src: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start receiving an array from rank `src`, or from the rank that sends first if None.

    Args:
        tensor: (...), written until the Work's wait returns. It has the sender's dtype and number
            of elements, in any shape.
        src: The global rank that sends; None: the rank whose message comes first.
        group: A group from `new_group`; None is the default group.
        tag: Of the message to take; 0 to 2**31 - 1.
        group_src: Instead of `src`: its rank in the group.

    Returns:
        A `Work`, whose `source_rank()` is the sender's global rank; None, after one warning, on a
        group that this rank is not in.

    Raises:
        ValueError: The arguments are wrong on this rank. The group stays usable.
        TypeError: Likewise, for an object that is not an array.
        DistError: The group failed before. A failure of the message is raised by the Work's wait.

    Examples:
        >>> theirs = np.empty(1)
        >>> receive = dist.irecv(theirs, src=1 - rank)
        >>> dist.send(np.array([float(rank)]), dst=1 - rank)
        >>> assert receive.wait() and theirs == 1 - rank
    """
    chosen = usable_group(group, "irecv")
    if chosen is None:
        return None
    return _prepare_recv(chosen, "irecv", tensor, src, tag, group_src).started()


def _prepare_recv(
    chosen: ProcessGroup, name: str, tensor: Any, src: int | None, tag: int, group_src: int | None
) -> _Message:
    """Check a receive."""
    peer = None
    if src is not None or group_src is not None:
        peer = peer_rank(chosen, name, "src", src, group_src)
    _check_tag(name, tag)
    array = arguments.output_array(tensor, name, "tensor")
    backend = chosen.for_device(array.device)
    backend.check_usable(name)
    if array.contiguous or backend.accepts_strided(array, peer):
        return _Message(name, backend, array, peer, lambda: backend.irecv(array, peer, tag))
    packed = array.empty_like()

    def start() -> Work:
        received = backend.irecv(packed, peer, tag)
        return FinishedWork(received, lambda: array.copy_from(packed), [tensor])

    return _Message(name, backend, array, peer, start)


def _run_blocking(chosen: ProcessGroup, message: _Message, timeout: float | None) -> Work:
    """Start a blocking message and wait for it. A message fails its group, as a collective does, if
    it is late or if a signal handler raises, also between start and wait."""
    try:
        try:
            with message.observed(), message.range(async_op=False):
                work = message.start()
                if timeout is not None:
                    work.due(timeout)
                work.wait()
        except BaseException as error:
            if isinstance(error, DistTimeoutError) or not isinstance(error, DistError):
                chosen.fail(error, message.name)
            raise
    except BaseException as error:
        if not isinstance(error, Exception):  # the message may have arrived before that
            chosen.fail(error, message.name)
        raise
    return work


@fast_path
def send(
    tensor: AnyArray,
    dst: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Send an array to rank `dst`; return when you may change it again.

    Args:
        tensor: (...), of any shape and dtype. The receiver's has as many elements of that dtype.
        dst: The global rank that receives.
        group: A group from `new_group`; None is the default group.
        tag: Distinguishes messages between the same ranks; 0 to 2**31 - 1.
        group_dst: Instead of `dst`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for an object that is not an array.
        DistError: The message failed, with PeerFailedError or DistTimeoutError for example. The
            group has failed then.

    Examples:
        >>> x = np.arange(3.0)
        >>> if rank == 0:
        ...     dist.send(x, dst=1)
        ... else:
        ...     assert dist.recv(x, src=0) == 0
    """
    limit = seconds(timeout, "send")
    chosen = usable_group(group, "send")
    if chosen is not None:
        message = _prepare_send(chosen, "send", tensor, dst, tag, group_dst)
        _run_blocking(chosen, message, limit)


@fast_path
def recv(
    tensor: AnyArray,
    src: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> int:
    """Receive an array from rank `src`, or from any rank if None.

    A receive from any rank takes the next message with its tag, also one that was meant for a later
    phase of the program. End a phase with a barrier, or give each phase a tag of its own.

    Args:
        tensor: (...), written. It has the sender's dtype and number of elements, in any shape.
        src: The global rank that sends; None: the rank whose message comes first.
        group: A group from `new_group`; None is the default group.
        tag: Of the message to take; 0 to 2**31 - 1.
        group_src: Instead of `src`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        The sender's global rank; -1 on a group that this rank is not in.

    Raises:
        ValueError: The arguments are wrong on this rank. The group stays usable.
        TypeError: Likewise, for an object that is not an array.
        MismatchError: The message has another size or dtype. The group has failed then.
        DistError: The message failed otherwise, with PeerFailedError or DistTimeoutError for
            example. The group has failed then.

    Examples:
        >>> x = np.full(2, float(rank))
        >>> if rank == 0:
        ...     assert dist.recv(x) == 1
        ... else:
        ...     dist.send(x, dst=0)
        >>> x
        array([1., 1.])
    """
    limit = seconds(timeout, "recv")
    chosen = usable_group(group, "recv")
    if chosen is None:
        return -1
    message = _prepare_recv(chosen, "recv", tensor, src, tag, group_src)
    return _run_blocking(chosen, message, limit).source_rank()


def _own_start(op: Any) -> Callable[..., Work | None]:
    """Return `isend` or `irecv` for either, or for torch.distributed's. torch is not imported."""
    if op is isend or op is irecv:
        return isend if op is isend else irecv
    if getattr(op, "__module__", "") == "torch.distributed.distributed_c10d":
        name = getattr(op, "__name__", "")
        if name in ("isend", "irecv"):
            return isend if name == "isend" else irecv
    raise ValueError(f"P2POp: op must be cydist.isend or cydist.irecv, not {op!r}")


class P2POp:
    """One message of `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`, cydist's or torch.distributed's.
        tensor: (...), the array to send, or to receive into.
        peer: The global rank of the receiver or sender.
        group: A group from `new_group`; None is the default group.
        tag: Distinguishes messages between the same ranks; 0 to 2**31 - 1.
        group_peer: Instead of `peer`: its rank in the group.

    Raises:
        ValueError: `op` is neither of both.

    Examples:
        >>> message = dist.P2POp(dist.isend, np.zeros(3), 1 - rank)
    """

    __module__ = "cydist"

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: AnyArray,
        peer: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        self.op = _own_start(op)
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        peer = self.peer if self.group_peer is None else f"group rank {self.group_peer}"
        return f"P2POp({self.op.__name__}, peer={peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start many messages at once.

    Receives are posted before sends, so messages arrive without a copy. Messages with one peer and
    tag keep the order of the list.

    Args:
        p2p_op_list: One message or more, of one group.

    Returns:
        A `Work` for each message that this rank takes part in.

    Raises:
        ValueError: An entry is wrong. No message was started; the group stays usable.
        TypeError: Likewise, for an entry that is not a P2POp.
        DistError: The group failed before. Each Work raises the error of its own message.

    Examples:
        >>> theirs = np.empty(1)
        >>> send = dist.P2POp(dist.isend, np.array([float(rank)]), 1 - rank)
        >>> receive = dist.P2POp(dist.irecv, theirs, 1 - rank)
        >>> for work in dist.batch_isend_irecv([send, receive]):
        ...     _ = work.wait()
        >>> assert theirs == 1 - rank
    """
    name = "batch_isend_irecv"
    if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError(f"{name}: p2p_op_list must be a non-empty list of P2POp")
    groups = [usable_group(each.group, name) for each in p2p_op_list]
    chosen = groups[0]
    if any(group is not chosen for group in groups):
        raise ValueError(f"{name}: all entries must be of one group")
    if chosen is None:
        return []
    ready = []
    for each in p2p_op_list:
        check = _prepare_send if each.op is isend else _prepare_recv
        what = each.op.__name__
        ready.append(check(chosen, what, each.tensor, each.peer, each.tag, each.group_peer))
    works: dict[int, Work] = {}
    watches: list[Callable[[], None]] = []
    with chosen.coalesced():
        for wanted in (irecv, isend):
            for i, each in enumerate(p2p_op_list):
                if each.op is wanted:
                    works[i] = ready[i].started(watches)
    for watch in watches:
        watch()
    return [works[i] for i in range(len(ready))]

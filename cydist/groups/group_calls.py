"""Calls on a group object, under the names and with the arguments of torch's ProcessGroup.

Ranks are ranks of the group. Every call returns a `Work` and does not wait, as torch's do, unless
its options have `asyncOp = False`. The arrays stand in a list of one, or alone. Each call is
cydist's function of that subject with this group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist.group_names import GroupName, group_title
from cydist.reduce_ops import ReduceOp, own_op
from cydist.waiting import duration
from cydist.work import EventWork, Work

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.stores import MembershipStore, Store

Timeout = float | timedelta | None


class _Options(NamedTuple):
    """The options of a call.

    Attributes:
        op: The reduction.
        root: The root's rank in the group.
        timeout: Of this call; None: the group's.
        waits: Whether the call returns when it is complete.
    """

    op: Any
    root: int
    timeout: Timeout
    waits: bool


def _options(opts: Any, timeout: Timeout = None, op: Any = None, root: Any = 0) -> _Options:
    """Return options that were passed as an object, cydist's or torch's, or one by one.

    Args:
        opts: The object; or the reduction or the root's rank in its place; or None.
    """
    if not hasattr(opts, "asyncOp"):
        if isinstance(own_op(opts), ReduceOp):  # before numbers, since operations are numbers too
            op = opts
        elif isinstance(opts, timedelta | float):
            timeout = opts
        elif opts is not None:
            root = opts
        return _Options(ReduceOp.SUM if op is None else op, root, timeout, waits=False)
    given = opts.timeout
    if isinstance(given, timedelta) and given < timedelta(0):  # torch's mark of "the group's"
        given = None
    return _Options(
        getattr(opts, "reduceOp", ReduceOp.SUM),
        getattr(opts, "rootRank", 0),
        given,
        waits=not opts.asyncOp,
    )


def _single(entries: Any, call: str) -> Any:
    """Return the entry of a list of one, or what is no list."""
    if not isinstance(entries, list | tuple):
        return entries
    if len(entries) != 1:
        raise ValueError(f"{call}: expected a list of one array, found {len(entries)}")
    return entries[0]


def _function(name: str) -> Callable[..., Any]:
    """Return cydist's public function. By name, since it is built on this module."""
    found: Callable[..., Any] = getattr(sys.modules["cydist"], name)
    return found


def _start(name: str, *arrays: Any, options: _Options, result: Any, **rest: Any) -> Work:
    """Start the public function `name`; return a Work in any case."""
    work = _function(name)(*arrays, async_op=not options.waits, timeout=options.timeout, **rest)
    if work is None:
        work = EventWork(name, result=result)
        work.end()
    made: Work = work
    return made


class GroupCalls:
    """The calls of torch's ProcessGroup. A backend implements others, such as `run_broadcast`."""

    if TYPE_CHECKING:
        group_name: GroupName
        timeout: float

        def destroy(self) -> None: ...

    job_store: MembershipStore | None = None  # of the ranks' job; set when a group is made
    bound_device_id: object = None  # torch's: the device_id given where the group was made

    # Collectives.

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, op: Any = None
    ) -> Work:
        """Reduce in place: see `all_reduce`.

        Args:
            tensors: A list of one array, or the array.
            opts: AllreduceOptions, or the reduction.
            timeout: Of this call, without AllreduceOptions.
            op: The reduction, without AllreduceOptions.

        Returns:
            A `Work`.
        """
        options, tensor = _options(opts, timeout, op), _single(tensors, "allreduce")
        return _start(
            "all_reduce", tensor, options.op, group=self, options=options, result=[tensor]
        )

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """Reduce many arrays in place: see `all_reduce_coalesced`.

        Args:
            tensors: The arrays.
            opts: AllreduceCoalescedOptions, or the reduction.

        Returns:
            A `Work`.
        """
        options = _options(opts)
        return _start(
            "all_reduce_coalesced", tensors, options.op, group=self, options=options, result=tensors
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Timeout = None
    ) -> Work:
        """Give all ranks the arrays of all ranks: see `all_gather`.

        Args:
            output_tensors: A list of one list of p arrays; the list of p alone beside one array.
            input_tensors: A list of one array, or the array.
            opts: AllgatherOptions.
            timeout: Of this call, without AllgatherOptions.

        Returns:
            A `Work`.
        """
        options = _options(opts, timeout)
        several = isinstance(input_tensors, list | tuple)
        outputs = _single(output_tensors, "allgather") if several else output_tensors
        tensor = _single(input_tensors, "allgather")
        return _start("all_gather", outputs, tensor, group=self, options=options, result=outputs)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], input_list: Sequence[Any], opts: Any = None
    ) -> Work:
        """Gather many arrays: see `all_gather_coalesced`.

        Args:
            output_lists: p lists of arrays.
            input_list: This rank's arrays.
            opts: AllgatherOptions.

        Returns:
            A `Work`.
        """
        return _start(
            "all_gather_coalesced", output_lists, input_list, group=self, options=_options(opts),
            result=output_lists,
        )  # fmt: skip

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Concatenate the arrays of all ranks: see `all_gather_into_tensor`.

        Args:
            output: An array of p times the size.
            input: This rank's.
            opts: AllgatherOptions.

        Returns:
            A `Work`.
        """
        return _start(
            "all_gather_into_tensor", output, input, group=self, options=_options(opts),
            result=[output],
        )  # fmt: skip

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Concatenate many arrays: see `all_gather_into_tensor_coalesced`.

        Args:
            outputs: Arrays of p times the sizes.
            inputs: This rank's.
            opts: AllgatherOptions.

        Returns:
            A `Work`.
        """
        return _start(
            "all_gather_into_tensor_coalesced", outputs, inputs, group=self, options=_options(opts),
            result=outputs,
        )  # fmt: skip

    def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Work:
        """Reduce, and give each rank its part: see `reduce_scatter_tensor`.

        Args:
            outputTensor: This rank's part.
            inputTensor: An array of p times the size.
            opts: ReduceScatterOptions, or the reduction.

        Returns:
            A `Work`.
        """
        options = _options(opts)
        return _start(
            "reduce_scatter_tensor", outputTensor, inputTensor, options.op, group=self,
            options=options, result=[outputTensor],
        )  # fmt: skip

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Reduce and scatter many arrays: see `reduce_scatter_tensor_coalesced`.

        Args:
            outputs: This rank's parts.
            inputs: Arrays of p times the sizes.
            opts: ReduceScatterOptions, or the reduction.

        Returns:
            A `Work`.
        """
        options = _options(opts)
        return _start(
            "reduce_scatter_tensor_coalesced", outputs, inputs, options.op, group=self,
            options=options, result=outputs,
        )  # fmt: skip

    def alltoall(
        self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None
    ) -> Work:
        """Send one array to each rank, and receive one from each: see `all_to_all`.

        Args:
            output_tensors: p arrays.
            input_tensors: p arrays.
            opts: AllToAllOptions.

        Returns:
            A `Work`.
        """
        return _start(
            "all_to_all", output_tensors, input_tensors, group=self, options=_options(opts),
            result=output_tensors,
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send one part of an array to each rank: see `all_to_all_single`.

        Args:
            output: An array.
            input: An array.
            output_split_sizes: Rows from each rank; None or empty: even.
            input_split_sizes: Rows for each rank; None or empty: even.
            opts: AllToAllOptions.
            timeout: Of this call, without AllToAllOptions.

        Returns:
            A `Work`.
        """
        return _start(
            "all_to_all_single", output, input, output_split_sizes, input_split_sizes, group=self,
            options=_options(opts, timeout), result=[output],
        )  # fmt: skip

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, root: int = 0
    ) -> Work:
        """Copy the root's array to all ranks: see `broadcast`.

        Args:
            tensors: A list of one array, or the array.
            opts: BroadcastOptions, or the root's rank in the group.
            timeout: Of this call, without BroadcastOptions.
            root: The root's rank in the group, without BroadcastOptions.

        Returns:
            A `Work`.
        """
        options, tensor = _options(opts, timeout, root=root), _single(tensors, "broadcast")
        return _start(
            "broadcast",
            tensor,
            group=self,
            group_src=options.root,
            options=options,
            result=[tensor],
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Timeout = None,
        *, root: int = 0,
    ) -> Work:  # fmt: skip
        """Reduce into the root's array: see `reduce`.

        Args:
            tensors: A list of one array, or the array.
            opts: ReduceOptions, or the root's rank in the group.
            op: The reduction, without ReduceOptions.
            timeout: Of this call, without ReduceOptions.
            root: The root's rank in the group, without ReduceOptions.

        Returns:
            A `Work`.
        """
        options, tensor = _options(opts, timeout, op, root), _single(tensors, "reduce")
        return _start(
            "reduce", tensor, op=options.op, group=self, group_dst=options.root, options=options,
            result=[tensor],
        )  # fmt: skip

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None,
        timeout: Timeout = None, *, root: int = 0,
    ) -> Work:  # fmt: skip
        """Give the root the arrays of all ranks: see `gather`.

        Args:
            output_tensors: On the root a list of one list of p arrays; elsewhere empty.
            input_tensors: A list of one array, or the array.
            opts: GatherOptions, or the root's rank in the group.
            timeout: Of this call, without GatherOptions.
            root: The root's rank in the group, without GatherOptions.

        Returns:
            A `Work`.
        """
        options = _options(opts, timeout, root=root)
        outputs = output_tensors or None
        if outputs is not None and isinstance(input_tensors, list | tuple):
            outputs = _single(outputs, "gather")
        return _start(
            "gather", _single(input_tensors, "gather"), outputs, group=self, group_dst=options.root,
            options=options, result=outputs or [],
        )  # fmt: skip

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None,
        timeout: Timeout = None, *, root: int = 0,
    ) -> Work:  # fmt: skip
        """Give each rank its array of the root's: see `scatter`.

        Args:
            output_tensors: A list of one array, or the array.
            input_tensors: On the root a list of one list of p arrays; elsewhere empty.
            opts: ScatterOptions, or the root's rank in the group.
            timeout: Of this call, without ScatterOptions.
            root: The root's rank in the group, without ScatterOptions.

        Returns:
            A `Work`.
        """
        options = _options(opts, timeout, root=root)
        inputs = input_tensors or None
        if inputs is not None and isinstance(output_tensors, list | tuple):
            inputs = _single(inputs, "scatter")
        tensor = _single(output_tensors, "scatter")
        return _start(
            "scatter", tensor, inputs, group=self, group_src=options.root, options=options,
            result=[tensor],
        )  # fmt: skip

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None,
        timeout: Timeout = None, *, op: Any = None,
    ) -> Work:  # fmt: skip
        """Reduce, and give each rank its array: see `reduce_scatter`.

        Args:
            output_tensors: A list of one array, or the array.
            input_tensors: A list of one list of p arrays; the list of p alone beside one array.
            opts: ReduceScatterOptions, or the reduction.
            timeout: Of this call, without ReduceScatterOptions.
            op: The reduction, without ReduceScatterOptions.

        Returns:
            A `Work`.
        """
        options = _options(opts, timeout, op)
        several = isinstance(output_tensors, list | tuple)
        inputs = _single(input_tensors, "reduce_scatter") if several else input_tensors
        tensor = _single(output_tensors, "reduce_scatter")
        return _start(
            "reduce_scatter",
            tensor,
            inputs,
            options.op,
            group=self,
            options=options,
            result=[tensor],
        )

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Work:
        """Wait until all ranks have called this: see `barrier`.

        Args:
            opts: BarrierOptions.
            timeout: Of this call, without BarrierOptions.

        Returns:
            A `Work`.
        """
        return _start("barrier", group=self, options=_options(opts, timeout), result=[])

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and name those that are missing: see `monitored_barrier`.

        Args:
            timeout: Of this call; None: the group's.
            wait_all_ranks: Name all missing ranks, not only the first.
        """
        _function("monitored_barrier")(self, timeout, wait_all_ranks)

    # torch's other names of these.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        """Start sending: see `isend`.

        Args:
            tensors: A list of one array, or the array.
            dstRank: The receiver's rank in the group.
            tag: Distinguishes messages between the same ranks.

        Returns:
            A `Work`.
        """
        work: Work = _function("isend")(
            _single(tensors, "send"), group=self, tag=tag, group_dst=dstRank
        )
        return work

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        """Start receiving: see `irecv`.

        Args:
            tensors: A list of one array, or the array.
            srcRank: The sender's rank in the group.
            tag: Of the message to take.

        Returns:
            A `Work`.
        """
        work: Work = _function("irecv")(
            _single(tensors, "recv"), group=self, tag=tag, group_src=srcRank
        )
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Start receiving from the rank that sends first: see `irecv`.

        Args:
            tensors: A list of one array, or the array.
            tag: Of the message to take.

        Returns:
            A `Work`, whose `source_rank` is the sender's global rank.
        """
        work: Work = _function("irecv")(_single(tensors, "recv_anysource"), group=self, tag=tag)
        return work

    # The group itself.

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set the default timeout of later calls on this rank.

        Args:
            timeout: Seconds or a timedelta.

        Raises:
            TypeError: It is neither.
            ValueError: It is negative or not a number.
        """
        self.timeout = duration(timeout, "set_timeout")

    def shutdown(self) -> None:
        """Destroy the group, but not the job: later calls on it raise. Idempotent."""
        self.destroy()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ProcessGroup | None:
        """Make a group of some ranks of this one, without asking others: see `split_group`.

        Args:
            ranks: Ranks of this group. All of them call this with the same list.
            timeout: Of the new group; None: this group's.
            opts: Accepted for compatibility with torch.
            group_name: Accepted for compatibility with torch: cydist names its groups.
            group_desc: What messages call the group.
            device_types: Accepted for compatibility with torch.

        Returns:
            The group; None if this rank is not among the ranks.
        """
        made: ProcessGroup | None = _function("split_group")(
            self, [list(ranks)], timeout, opts, group_desc
        )
        return made

    @property
    def title(self) -> str:
        """Return the name of the group in messages: the default group, or its description or name.

        Returns:
            Such as "the default group" and "group '2'".
        """
        return group_title(self.group_name)

    @property
    def group_desc(self) -> str:
        """Return what the user calls the group.

        Returns:
            The description that the group was made with, or its name.
        """
        return self.group_name.description

    def get_group_store(self) -> Store:
        """Return the part of the job's store that belongs to this group's members.

        Keys that a program sets there stay apart from cydist's own.

        Returns:
            A store.

        Raises:
            ValueError: The group belongs to no job.
        """
        from cydist.stores import PrefixStore  # imported with the job's store

        if self.job_store is None:
            raise ValueError(f"{self.title} belongs to no job, and has no store")
        return PrefixStore(f"program/{self.group_name}", self.job_store)

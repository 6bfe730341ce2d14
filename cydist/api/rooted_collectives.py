"""broadcast, reduce, gather, scatter: the collectives that have a root.

As in collectives.py, p is the number of ranks of the group in docstrings, and shapes are those of
one rank's array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cydist._native import CallRecord, fast_path
from cydist.api import arguments
from cydist.api.arguments import root_rank
from cydist.api.dispatch import Prepared, Timeout
from cydist.api.packing import ContiguousCopies
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.reduce_ops import Op, RedOpType, ReduceOp, own_op

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.api.arguments import AnyArray
    from cydist.work import Work


@fast_path
def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Broadcast the array on rank `src` to all ranks of the group.

    Args:
        tensor: (...), of the same size and dtype on every rank. Read on `src`, written elsewhere.
        src: The global rank that sends.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
        group_src: Instead of `src`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for objects that are not arrays and dtypes that the call does not take.
        DistError: The call failed, with PeerFailedError, MismatchError or DistTimeoutError for
            example. The group has failed then.

    Examples:
        >>> x = np.full(3, float(rank))
        >>> dist.broadcast(x, src=1)
        >>> x
        array([1., 1., 1.])
    """
    if (chosen := usable_group(group, "broadcast")) is None:
        return None
    root = root_rank(chosen, "broadcast", "src", src, group_src)
    at_root = chosen.rank() == root
    take = arguments.input_array if at_root else arguments.output_array
    array = take(tensor, "broadcast", "tensor")
    prepared = Prepared(chosen, "broadcast", array)
    dense = array if array.contiguous else prepared.packed()

    def body(call: CallRecord) -> None:
        prepared.group.run_broadcast(call, dense, root)
        if not at_root:
            array.copy_from(dense)

    return prepared.run(
        body, [tensor], async_op, timeout, (array,) if at_root else (), () if at_root else (array,),
        root,
    )  # fmt: skip


@fast_path
def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays of all ranks into that of rank `dst`; other ranks keep theirs.

    Args:
        tensor: (...), of the same size and dtype on every rank. Written on `dst` only.
        dst: The global rank that gets the result.
        op: One of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the same on
            every rank.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
        group_dst: Instead of `dst`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for objects that are not arrays and dtypes that the call does not take.
        DistError: The call failed, with PeerFailedError, MismatchError or DistTimeoutError for
            example. The group has failed then.

    Examples:
        >>> x = np.array([rank + 1.0])
        >>> dist.reduce(x, dst=0)
        >>> assert x == (3.0, 2.0)[rank]  # rank 1 keeps its own
    """
    if (chosen := usable_group(group, "reduce")) is None:
        return None
    root = root_rank(chosen, "reduce", "dst", dst, group_dst)
    at_root = chosen.rank() == root
    take = arguments.output_array if at_root else arguments.input_array
    array = take(tensor, "reduce", "tensor")
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, "reduce", array, op)
    dense = array if array.contiguous else prepared.packed()

    def body(call: CallRecord) -> None:
        prepared.reducer.run_reduce(call, dense, root, op)
        if at_root:
            array.copy_from(dense)

    written = (array,) if at_root else ()
    return prepared.run(body, [tensor], async_op, timeout, (array,), written, root)


@fast_path
def gather(
    tensor: AnyArray,
    gather_list: Sequence[AnyArray] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give rank `dst` the arrays of all ranks.

    Args:
        tensor: (...), this rank's. Sizes may differ between ranks.
        gather_list: On `dst` p arrays, entry r as large as rank r's. Elsewhere None.
        dst: The global rank that receives; 0 unless given.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
        group_dst: Instead of `dst`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for objects that are not arrays and dtypes that the call does not take.
        DistError: The call failed, with PeerFailedError, MismatchError or DistTimeoutError for
            example. The group has failed then.

    Examples:
        >>> parts = [np.empty(1), np.empty(1)] if rank == 0 else None
        >>> dist.gather(np.array([10.0 + rank]), parts)
        >>> assert rank == 1 or parts == [10.0, 11.0]
    """
    if (chosen := usable_group(group, "gather")) is None:
        return None
    root = root_rank(chosen, "gather", "dst", dst, group_dst, default=0)
    array = arguments.input_array(tensor, "gather", "tensor")
    prepared = Prepared(chosen, "gather", array)
    own = array.dense()
    if chosen.rank() != root:
        arguments.check_absent(gather_list, "gather", "gather_list", "dst")

        def send(call: CallRecord) -> None:
            prepared.group.run_gather(call, own, None, root)

        return prepared.run(send, [], async_op, timeout, (array,), (), root)
    if gather_list is None:
        raise arguments.missing_list(chosen, "gather", "gather_list", "dst")
    outputs = arguments.output_list(gather_list, "gather", "gather_list", chosen.size())
    arguments.check_same_dtype([array, *outputs], "gather")
    arguments.check_same_size(outputs[root], array, "gather", f"gather_list[{root}]", "tensor")
    arguments.check_disjoint(
        outputs, [array], "gather",
        lambda i, _: i == root and array.same_memory(outputs[root]), arguments.OWN_BLOCK,
    )  # fmt: skip
    into = ContiguousCopies(outputs, filled=False)

    def receive(call: CallRecord) -> None:
        prepared.group.run_gather(call, own, into.arrays, root)
        into.copy_back()

    return prepared.run(receive, gather_list, async_op, timeout, (array,), outputs, root)


@fast_path
def scatter(
    tensor: AnyArray,
    scatter_list: Sequence[AnyArray] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Scatter the arrays in `scatter_list` on rank `src`, one to each rank.

    Args:
        tensor: (...), receives this rank's entry. Sizes may differ between ranks.
        scatter_list: On `src` p arrays, entry r as large as rank r's `tensor`. Elsewhere None.
        src: The global rank that sends; 0 unless given.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
        group_src: Instead of `src`: its rank in the group.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. Nothing was sent; the group stays usable.
        TypeError: Likewise, for objects that are not arrays and dtypes that the call does not take.
        DistError: The call failed, with PeerFailedError, MismatchError or DistTimeoutError for
            example. The group has failed then.

    Examples:
        >>> x = np.empty(2)
        >>> dist.scatter(x, [np.zeros(2), np.ones(2)] if rank == 0 else None)
        >>> assert (x == rank).all()
    """
    if (chosen := usable_group(group, "scatter")) is None:
        return None
    root = root_rank(chosen, "scatter", "src", src, group_src, default=0)
    output = arguments.output_array(tensor, "scatter", "tensor")
    prepared = Prepared(chosen, "scatter", output)
    dense = output if output.contiguous else output.empty_like()
    listed: Sequence[Array] = ()
    given: list[Array] | None = None
    if chosen.rank() == root:
        if scatter_list is None:
            raise arguments.missing_list(chosen, "scatter", "scatter_list", "src")
        inputs = arguments.input_list(scatter_list, "scatter", "scatter_list", chosen.size())
        arguments.check_same_dtype([output, *inputs], "scatter")
        arguments.check_same_size(
            output, inputs[root], "scatter", "tensor", f"scatter_list[{root}]"
        )
        arguments.check_disjoint(
            [output], inputs, "scatter",
            lambda _, j: all(output.same_memory(inputs[k]) for k in (j, root)),
            arguments.OWN_BLOCK,
        )  # fmt: skip
        listed, given = inputs, ContiguousCopies(inputs).arrays
    else:
        arguments.check_absent(scatter_list, "scatter", "scatter_list", "src")

    def body(call: CallRecord) -> None:
        prepared.group.run_scatter(call, dense, given, root)
        output.copy_from(dense)

    return prepared.run(body, [tensor], async_op, timeout, listed, (output,), root)

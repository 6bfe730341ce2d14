"""Many arrays in one call.

The arrays are flattened into one and back, or left as they are if the backend can start several
calls together. All arrays of a call have one dtype. The ranks compare each array's size, not only
the sum. cydist/api/collectives.py describes the arguments that all calls take, and what they raise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cydist._native import CallRecord, hash_of_sizes
from cydist.api import arguments
from cydist.api.dispatch import Prepared, Timeout
from cydist.api.packing import FlattenedList
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import Op, RedOpType, ReduceOp, own_op

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.api.arguments import AnyArray
    from cydist.work import Work


def all_reduce_coalesced(
    tensors: Sequence[AnyArray],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce many arrays in place by one all_reduce.

    Args:
        tensors: Arrays of one dtype, of the same sizes in the same order on every rank.
        op: One of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the same on
            every rank.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
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
        >>> gradients = [np.ones(1), np.full(2, 2.0)]
        >>> dist.all_reduce_coalesced(gradients)
        >>> gradients
        [array([2.]), array([4., 4.])]
    """
    name = "all_reduce_coalesced"
    if (chosen := usable_group(group, name)) is None:
        return None
    arrays = arguments.output_list(tensors, name, "tensors")
    arguments.check_disjoint(arrays, [], name)
    arguments.check_same_dtype(arrays, name)
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, name, arrays[0], op)
    flats = _flattened(prepared, arrays)
    sizes = hash_of_sizes(arrays)

    def body(call: CallRecord) -> None:
        call.sizes = sizes
        with prepared.group.coalesced():
            for flat in flats:
                prepared.reducer.run_all_reduce(call, flat.array, op)
        for flat in flats:
            flat.copy_back()

    return prepared.run(body, tensors, async_op, timeout, arrays, arrays)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[AnyArray]],
    input_tensor_list: Sequence[AnyArray],
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Gather many arrays from all ranks with one all_gather.

    Args:
        output_tensor_lists: p lists. Entry [r][i] receives input i of rank r, and is as large.
        input_tensor_list: This rank's arrays, of one dtype; as many on every rank. Input i may be
            this rank's own output i.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
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
        >>> outputs = [[np.empty(1), np.empty(2)] for _ in range(2)]
        >>> dist.all_gather_coalesced(outputs, [np.full(1, rank + 1.0), np.full(2, rank + 2.0)])
        >>> outputs
        [[array([1.]), array([2., 2.])], [array([2.]), array([3., 3.])]]
    """
    name = "all_gather_coalesced"
    if (chosen := usable_group(group, name)) is None:
        return None
    inputs = arguments.input_list(input_tensor_list, name, "input_tensor_list")
    arguments.check_length(output_tensor_lists, chosen.size(), name, "output_tensor_lists")
    lists = [
        arguments.output_list(arrays, name, f"output_tensor_lists[{rank}]", len(inputs))
        for rank, arrays in enumerate(output_tensor_lists)
    ]
    outputs = [array for arrays in lists for array in arrays]
    arguments.check_same_dtype([*inputs, *outputs], name)
    me = chosen.rank()
    for i, (output, array) in enumerate(zip(lists[me], inputs, strict=True)):
        arguments.check_same_size(
            output, array, name, f"output_tensor_lists[{me}][{i}]", f"input_tensor_list[{i}]"
        )
    first = me * len(inputs)  # of this rank's own outputs
    arguments.check_disjoint(
        outputs, inputs, name,
        lambda i, j: i == first + j and outputs[i].same_memory(inputs[j]), arguments.OWN_BLOCK,
    )  # fmt: skip
    prepared = Prepared(chosen, name, inputs[0])
    own = _flattened(prepared, inputs)
    into = [_flattened(prepared, arrays) for arrays in lists]
    sizes = hash_of_sizes(outputs)

    def body(call: CallRecord) -> None:
        call.sizes = sizes
        _gather(prepared.group, call, own, into)

    return prepared.run(body, output_tensor_lists, async_op, timeout, inputs, outputs)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[AnyArray],
    input_tensors: Sequence[AnyArray],
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Run all_gather_into_tensor on many pairs of arrays, with one all_gather.

    Args:
        output_tensors: Entry i is p times as large as input i.
        input_tensors: Arrays of one dtype, of the same sizes in the same order on every rank. Input
            i may be this rank's own part of output i.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
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
        >>> outputs = [np.empty(2), np.empty(4)]
        >>> inputs = [np.full(1, float(rank)), np.full(2, rank + 1.0)]
        >>> dist.all_gather_into_tensor_coalesced(outputs, inputs)
        >>> outputs
        [array([0., 1.]), array([1., 1., 2., 2.])]
    """
    name = "all_gather_into_tensor_coalesced"
    if (chosen := usable_group(group, name)) is None:
        return None
    p = chosen.size()
    outputs = arguments.output_list(output_tensors, name, "output_tensors")
    inputs = arguments.input_list(input_tensors, name, "input_tensors", len(outputs))
    for i, (output, array) in enumerate(zip(outputs, inputs, strict=True)):
        arguments.check_times_size(
            output, array, p, name, f"output_tensors[{i}]", f"input_tensors[{i}]"
        )
    dense = [output if output.contiguous else output.empty_like() for output in outputs]
    parts = [array.blocks(p) for array in dense]
    me = chosen.rank()
    arguments.check_disjoint(
        outputs, inputs, name,
        lambda i, j: i == j and arguments.block_number(inputs[j], outputs[i], p) == me,
        arguments.OWN_BLOCK,
    )  # fmt: skip
    arguments.check_same_dtype([*inputs, *outputs], name)
    prepared = Prepared(chosen, name, inputs[0])
    own = _flattened(prepared, inputs)
    into = [_flattened(prepared, [blocks[rank] for blocks in parts]) for rank in range(p)]
    sizes = hash_of_sizes(inputs)

    def body(call: CallRecord) -> None:
        call.sizes = sizes
        _gather(prepared.group, call, own, into)
        for output, packed in zip(outputs, dense, strict=True):
            output.copy_from(packed)

    return prepared.run(body, output_tensors, async_op, timeout, inputs, outputs)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[AnyArray],
    inputs: Sequence[AnyArray],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Run reduce_scatter_tensor on many pairs of arrays, with one reduce_scatter.

    Args:
        outputs: Entry i is a p-th of input i. It may be exactly one rank's part of input i, such as
            this rank's own. The call then needs memory for a second such output.
        inputs: Arrays of one dtype, of the same sizes in the same order on every rank.
        op: One of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the same on
            every rank.
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
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
        >>> outputs = [np.empty(1), np.empty(2)]
        >>> dist.reduce_scatter_tensor_coalesced(outputs, [np.ones(2), np.full(4, 2.0)])
        >>> outputs
        [array([2.]), array([4., 4.])]
    """
    name = "reduce_scatter_tensor_coalesced"
    if (chosen := usable_group(group, name)) is None:
        return None
    p = chosen.size()
    into = arguments.output_list(outputs, name, "outputs")
    arrays = arguments.input_list(inputs, name, "inputs", len(into))
    for i, (output, array) in enumerate(zip(into, arrays, strict=True)):
        arguments.check_times_size(array, output, p, name, f"inputs[{i}]", f"outputs[{i}]")
    shared = arguments.check_disjoint(
        into, arrays, name,
        lambda i, j: i == j and arguments.block_number(into[i], arrays[j], p) is not None,
        arguments.WHOLE_BLOCK,
    )  # fmt: skip
    arguments.check_same_dtype([*into, *arrays], name)
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, name, into[0], op)
    own = _flattened(prepared, into, shared)
    parts = [array.dense().blocks(p) for array in arrays]
    blocks = [_flattened(prepared, [cut[rank] for cut in parts]) for rank in range(p)]
    sizes = hash_of_sizes(into)

    def body(call: CallRecord) -> None:
        call.sizes = sizes
        with prepared.group.coalesced():
            for i, flat in enumerate(own):
                parts_of_all = [each[i].array for each in blocks]
                prepared.reducer.run_reduce_scatter(call, flat.array, parts_of_all, op)
        for flat in own:
            flat.copy_back()

    return prepared.run(body, outputs, async_op, timeout, arrays, into)


def _gather(
    group: ProcessGroup,
    call: CallRecord,
    own: Sequence[FlattenedList],
    into: Sequence[Sequence[FlattenedList]],
) -> None:
    """Fill each rank's arrays in `into` from the arrays it passes as its `own`."""
    with group.coalesced():
        for i, flat in enumerate(own):
            group.run_all_gather(call, [flats[i].array for flats in into], flat.array)
    for flats in into:
        for flat in flats:
            flat.copy_back()


def _flattened(
    prepared: Prepared, arrays: Sequence[Array], shared: Collection[int] = ()
) -> list[FlattenedList]:
    """Return the arrays flattened into one, or unchanged if the backend starts calls together.

    Args:
        shared: Numbers of outputs that share memory with inputs.
    """
    if prepared.group.coalesces_calls:
        return [FlattenedList([array], apart=i in shared) for i, array in enumerate(arrays)]
    return [FlattenedList(arrays, apart=bool(shared))]

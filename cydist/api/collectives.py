"""all_reduce ... barrier: check the arguments, pack strided arrays, call the group.

The calls with a root are in rooted_collectives.py.

Every function takes arrays of any library that `cydist.asarray` knows, strided or not. In the
docstrings p is the number of ranks of the group, and shapes are those of one rank's array.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cydist._native import CallRecord, fast_collectives, fast_path, use_operation
from cydist.api import arguments
from cydist.api.dispatch import Prepared, Timeout
from cydist.api.packing import ContiguousCopies
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.errors import counted
from cydist.reduce_ops import Op, RedOpType, ReduceOp, own_op
from cydist.waiting import countdown, seconds
from cydist.work import CombinedWork, EventWork

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.api.arguments import AnyArray
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

fast_collectives.use_operations(RedOpType)
use_operation(ReduceOp.SUM)


@fast_path
def all_reduce(
    tensor: AnyArray,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays of all ranks, element by element, and give all ranks the result.

    The bits of the result are the same on every rank.

    Args:
        tensor: (...), of the same size and dtype on every rank. Holds the result afterwards. It
            may be a sparse COO tensor of torch: then `op` is SUM, ranks may hold other elements,
            and the call is complete when it returns, with `async_op` too.
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
        >>> x = np.array([rank + 1.0])  # [1.] on rank 0, [2.] on rank 1
        >>> dist.all_reduce(x)
        >>> x
        array([3.])
    """
    if (chosen := usable_group(group, "all_reduce")) is None:
        return None
    if getattr(tensor, "is_sparse", None) is True:  # torch's
        return _all_reduce_sparse(tensor, op, chosen, async_op, timeout)
    array = arguments.output_array(tensor, "all_reduce", "tensor")
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, "all_reduce", array, op)
    dense = array if array.contiguous else prepared.packed()

    def body(call: CallRecord) -> None:
        prepared.reducer.run_all_reduce(call, dense, op)
        array.copy_from(dense)

    return prepared.run(body, [tensor], async_op, timeout, (array,), (array,))


def _all_reduce_sparse(
    tensor: Any, op: Op, group: ProcessGroup, async_op: bool, timeout: Timeout
) -> Work | None:
    """Sum torch's sparse tensors, which have no array to send."""
    # By name, since the bridge to torch is built on this module.
    sparse: Any = importlib.import_module("cydist.interop.torch.sparse")
    limit = seconds(timeout, "all_reduce")
    sparse.all_reduce(tensor, own_op(op), group.for_device(tensor.device.type), limit)
    if not async_op:
        return None
    done = EventWork("all_reduce", result=[tensor])
    done.end()
    return done


def all_gather(
    tensor_list: Sequence[AnyArray],
    tensor: AnyArray,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give all ranks the arrays of all ranks.

    Args:
        tensor_list: p arrays. Entry r receives rank r's and has its size. Sizes may differ between
            ranks; every rank passes the same list of sizes.
        tensor: (...), this rank's. It may be this rank's own entry of the list.
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
        >>> parts = [np.empty(r + 1) for r in range(2)]  # rank 0 has one number, rank 1 two
        >>> dist.all_gather(parts, np.full(rank + 1, float(rank)))
        >>> parts
        [array([0.]), array([1., 1.])]
    """
    if (chosen := usable_group(group, "all_gather")) is None:
        return None
    array = arguments.input_array(tensor, "all_gather", "tensor")
    outputs = arguments.output_list(tensor_list, "all_gather", "tensor_list", chosen.size())
    arguments.check_same_dtype([array, *outputs], "all_gather")
    arguments.check_same_size(
        outputs[chosen.rank()], array, "all_gather", f"tensor_list[{chosen.rank()}]", "tensor"
    )
    me = chosen.rank()
    arguments.check_disjoint(
        outputs, [array], "all_gather",
        lambda i, _: i == me and array.same_memory(outputs[me]), arguments.OWN_BLOCK,
    )  # fmt: skip
    prepared = Prepared(chosen, "all_gather", array)
    into = ContiguousCopies(outputs, filled=False)
    own = array.dense()

    def body(call: CallRecord) -> None:
        prepared.group.run_all_gather(call, into.arrays, own)
        into.copy_back()

    return prepared.run(body, tensor_list, async_op, timeout, (array,), outputs)


@fast_path
def all_gather_into_tensor(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Concatenate the arrays of all ranks, in rank order, into one on every rank.

    Args:
        output_tensor: (p*n, ...) or (p, n, ...). Rows r*n:(r+1)*n come from rank r.
        input_tensor: (n, ...), of the same size and dtype on every rank. It may be this rank's own
            part of the output.
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
        >>> x = np.empty(4)
        >>> dist.all_gather_into_tensor(x, np.full(2, float(rank)))
        >>> x
        array([0., 0., 1., 1.])
    """
    name = "all_gather_into_tensor"
    if (chosen := usable_group(group, name)) is None:
        return None
    array = arguments.input_array(input_tensor, name, "input_tensor")
    output = arguments.output_array(output_tensor, name, "output_tensor")
    arguments.check_same_dtype([output, array], name)
    p, me = chosen.size(), chosen.rank()
    arguments.check_times_size(output, array, p, name, "output_tensor", "input_tensor")
    dense = output if output.contiguous else output.empty_like()
    blocks = dense.blocks(p)
    arguments.check_disjoint(
        [output], [array], name,
        lambda *_: arguments.block_number(array, output, p) == me, arguments.OWN_BLOCK,
    )  # fmt: skip
    prepared = Prepared(chosen, name, array)
    own = array.dense()

    def body(call: CallRecord) -> None:
        prepared.group.run_all_gather(call, blocks, own)
        output.copy_from(dense)

    return prepared.run(body, [output_tensor], async_op, timeout, (array,), (output,))


def reduce_scatter(
    output: AnyArray,
    input_list: Sequence[AnyArray],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a list of arrays over all ranks and give rank r entry r.

    Args:
        output: (...), as large as this rank's entry. It may be exactly an entry of the list, such
            as this rank's own. The call then needs memory for a second output.
        input_list: p arrays. Entry r has the same size on every rank, entries may differ.
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
        >>> x = np.empty(1)
        >>> dist.reduce_scatter(x, [np.array([1.0]), np.array([2.0])])
        >>> assert x == (2.0, 4.0)[rank]
    """
    name = "reduce_scatter"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    inputs = arguments.input_list(input_list, name, "input_list", chosen.size())
    arguments.check_same_dtype([into, *inputs], name)
    own = inputs[chosen.rank()]
    arguments.check_same_size(into, own, name, "output", f"input_list[{chosen.rank()}]")
    shared = arguments.check_disjoint(
        [into], inputs, name, lambda _, j: into.same_memory(inputs[j]), arguments.WHOLE_ENTRY
    )
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, name, into, op)
    blocks = ContiguousCopies(inputs).arrays
    return _reduce_scatter(
        prepared, into, bool(shared), blocks, op, [output], async_op, timeout, inputs
    )


@fast_path
def reduce_scatter_tensor(
    output: AnyArray,
    input: AnyArray,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce an array over all ranks and give rank r the r-th part.

    Args:
        output: (n, ...). It may be exactly one rank's part of the input, such as this rank's own.
            The call then needs memory for a second output.
        input: (p*n, ...) or (p, n, ...), of the same size and dtype on every rank.
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
        >>> x = np.arange(4.0)
        >>> dist.reduce_scatter_tensor(x[2 * rank : 2 * rank + 2], x)  # in place
        >>> assert x.tolist() == ([0, 2, 2, 3], [0, 1, 4, 6])[rank]
    """
    name = "reduce_scatter_tensor"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    array = arguments.input_array(input, name, "input")
    arguments.check_same_dtype([into, array], name)
    p = chosen.size()
    arguments.check_times_size(array, into, p, name, "input", "output")
    shared = arguments.check_disjoint(
        [into], [array], name,
        lambda *_: arguments.block_number(into, array, p) is not None, arguments.WHOLE_BLOCK,
    )  # fmt: skip
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, name, into, op)
    return _reduce_scatter(
        prepared, into, bool(shared), array.dense().blocks(p), op, [output], async_op, timeout,
        (array,),
    )  # fmt: skip


def _reduce_scatter(
    prepared: Prepared, output: Array, shared: bool, blocks: list[Array], op: Op, result: object,
    async_op: bool, timeout: Timeout, inputs: Sequence[Array],
) -> Work | None:  # fmt: skip
    """Run a reduce_scatter. `shared`: the output shares memory with an input."""
    dense = output if output.contiguous and not shared else output.empty_like()

    def body(call: CallRecord) -> None:
        prepared.reducer.run_reduce_scatter(call, dense, blocks, op)
        output.copy_from(dense)

    return prepared.run(body, result, async_op, timeout, inputs, (output,))


def all_to_all(
    output_tensor_list: Sequence[AnyArray],
    input_tensor_list: Sequence[AnyArray],
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send entry r of a list to rank r, and receive entry r of another from it.

    Args:
        output_tensor_list: p arrays. Entry r is as large as the array that rank r sends here. An
            output may be exactly the memory of an input: all_to_all(xs, xs) exchanges the arrays of
            a list. The call then needs memory for a second one of each such output.
        input_tensor_list: p arrays of one dtype, of any sizes.
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
        >>> xs = [np.array([10 * rank]), np.array([10 * rank + 1])]
        >>> dist.all_to_all(xs, xs)
        >>> assert xs == [rank, 10 + rank]
    """
    name = "all_to_all"
    if (chosen := usable_group(group, name)) is None:
        return None
    outputs = arguments.output_list(output_tensor_list, name, "output_tensor_list", chosen.size())
    inputs = arguments.input_list(input_tensor_list, name, "input_tensor_list", chosen.size())
    arguments.check_same_dtype([*outputs, *inputs], name)
    me = chosen.rank()
    arguments.check_same_size(
        outputs[me], inputs[me], name, f"output_tensor_list[{me}]", f"input_tensor_list[{me}]"
    )
    shared = arguments.check_disjoint(
        outputs, inputs, name,
        lambda i, j: outputs[i].same_memory(inputs[j]), arguments.WHOLE_ENTRY,
    )  # fmt: skip
    prepared = Prepared(chosen, name, outputs[0])
    into = ContiguousCopies(outputs, filled=False, apart=shared)
    own = ContiguousCopies(inputs)

    def body(call: CallRecord) -> None:
        prepared.group.run_all_to_all(call, into.arrays, own.arrays, False)
        into.copy_back()

    return prepared.run(body, output_tensor_list, async_op, timeout, inputs, outputs)


@fast_path
def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Cut an array along its first dimension and send part r to rank r.

    Args:
        output: (m, ...), parts in rank order. It may be the input itself: all_to_all_single(x, x).
            The call then needs memory for a second output.
        input: (n, ...), parts in rank order. The other dimensions are equal.
        output_split_sizes: Rows from each rank, p numbers that sum to m. None: m / p each.
        input_split_sizes: Rows for each rank, p numbers that sum to n. None: n / p each. Every rank
            gives both lists, or none of them.
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
        >>> x = np.array([10 * rank, 10 * rank + 1])
        >>> dist.all_to_all_single(x, x)
        >>> assert x.tolist() == [rank, 10 + rank]
    """
    name = "all_to_all_single"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    array = arguments.input_array(input, name, "input")
    arguments.check_same_dtype([into, array], name)
    shared = arguments.check_disjoint(
        [into], [array], name, lambda *_: into.same_memory(array), arguments.SAME_MEMORY
    )
    p, me = chosen.size(), chosen.rank()
    even = (output_split_sizes is None or len(output_split_sizes) == 0) and (
        input_split_sizes is None or len(input_split_sizes) == 0
    )
    if even:
        arguments.check_divides(into, p, name, "output", "output_split_sizes")
        arguments.check_divides(array, p, name, "input", "input_split_sizes")
        gets, gives = into.size // p, array.size // p
    else:
        given = arguments.split_sizes(
            into, output_split_sizes, p, name, "output", "output_split_sizes"
        )
        taken = arguments.split_sizes(
            array, input_split_sizes, p, name, "input", "input_split_sizes"
        )
        gets, gives = given[me], taken[me]
    if gets != gives:
        raise ValueError(
            f"{name}: rank {me} sends itself {counted(gives, 'element')} (input_split_sizes) but "
            f"expects {gets} (output_split_sizes)"
        )
    prepared = Prepared(chosen, name, into)
    dense = into if into.contiguous and not shared else into.empty_like()
    parts = dense.blocks(p) if even else dense.split(given)
    own = array.dense().blocks(p) if even else array.dense().split(taken)

    def body(call: CallRecord) -> None:
        prepared.group.run_all_to_all(call, parts, own, even)
        into.copy_from(dense)

    return prepared.run(
        body, [output], async_op, timeout, (array,), (into,), splits=(own, parts)
    )  # fmt: skip


@fast_path
def scan(
    tensor: AnyArray,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the ranks up to and including this one, in place.

    Args:
        tensor: (...), of the same size and dtype on every rank. Holds the result afterwards.
        op: One of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the same on
            every rank. AVG divides by the group's size.
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
        >>> x = np.array([rank + 1.0])
        >>> dist.scan(x)
        >>> assert x == (1.0, 3.0)[rank]
    """
    return _scan("scan", True, tensor, op, group, async_op, timeout)


@fast_path
def exscan(
    tensor: AnyArray,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the ranks below this one, in place; rank 0 keeps its array.

    Args:
        tensor: (...), of the same size and dtype on every rank. Holds the result afterwards.
        op: One of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the same on
            every rank. AVG divides by the group's size.
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
        >>> first = np.array([100])  # how many rows each rank has; afterwards where they begin
        >>> dist.exscan(first)
        >>> assert rank == 0 or first == 100
    """
    return _scan("exscan", False, tensor, op, group, async_op, timeout)


def _scan(
    name: str, inclusive: bool, tensor: AnyArray, op: Op, group: AnyGroup, async_op: bool,
    timeout: Timeout,
) -> Work | None:  # fmt: skip
    if (chosen := usable_group(group, name)) is None:
        return None
    array = arguments.output_array(tensor, name, "tensor")
    if type(op) is not RedOpType:
        op = own_op(op)
    prepared = Prepared(chosen, name, array, op)
    dense = array if array.contiguous else prepared.packed()

    def body(call: CallRecord) -> None:
        prepared.reducer.run_scan(call, dense, op, inclusive)
        array.copy_from(dense)

    return prepared.run(body, [tensor], async_op, timeout, (array,), (array,))


@fast_path
def barrier(
    group: AnyGroup = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Wait until every rank of the group has made this call.

    A group with several backends does so on each of them. The backend "nccl" also waits for the
    GPUs.

    Args:
        group: A group from `new_group`; None is the default group.
        async_op: Return a `Work` at once. Leave the arrays alone until its `wait` has returned.
        device_ids: Accepted for compatibility with torch. On "nccl" the current device is used.
        timeout: Seconds or a timedelta for this call; None takes the group's.

    Returns:
        A `Work` with `async_op`, otherwise None. On a rank outside the group: None, after one
        warning.

    Raises:
        ValueError: The arguments are wrong on this rank. The group stays usable.
        DistError: The call failed, with PeerFailedError or DistTimeoutError for example. The group
            has failed then.

    Examples:
        >>> dist.barrier(timeout=10)
    """
    if (chosen := usable_group(group, "barrier")) is None:
        return None

    left = countdown(chosen.timeout if timeout is None else seconds(timeout, "barrier"))
    parts = chosen.backend_groups()
    for part in parts[1:]:  # all checks come before the first barrier starts
        part.check_usable("barrier")
    prepared = [Prepared(part, "barrier") for part in parts]
    works = [each.run(each.group.run_barrier, None, async_op, left()) for each in prepared]
    begun = [work for work in works if work is not None]
    return CombinedWork(begun) if len(begun) > 1 else begun[0] if begun else None


all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

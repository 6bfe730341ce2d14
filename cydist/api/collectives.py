"""all_reduce ... barrier: check the arguments, pack strided arrays, call the group.

Every function takes arrays of any library that `cydist.asarray` knows, strided or not, and

group       from new_group; None: the default group. On a group that this rank is not in a
            call warns once, does nothing and returns None
async_op    True: return a Work at once; the arrays must not be touched before its `wait`
timeout     seconds or a timedelta for this call; None: the group's

and raises ValueError or TypeError for arguments that are wrong on this rank (nothing was sent, the
group stays usable), and a DistError for every later failure (the group has failed then).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cydist._native import fast_collectives, fast_path, use_operation
from cydist.api import arguments
from cydist.api.arguments import check_accepts, check_op, root_rank
from cydist.api.dispatch import Timeout, reducer_for, run_on_backend
from cydist.api.packing import ContiguousCopies, as_contiguous
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.groups.process_group import Call, ProcessGroup
from cydist.reduce_ops import Op, RedOpType, ReduceOp
from cydist.waiting import countdown, seconds
from cydist.work import CombinedWork

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.work import Work

fast_collectives.use_operations(RedOpType)
use_operation(ReduceOp.SUM)


@fast_path
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy the array of rank `src` into those of all ranks.

    tensor      (...)   same size and dtype on every rank; read on `src`, written elsewhere
    src         global rank; or `group_src`, a rank in the group
    """
    if (chosen := usable_group(group, "broadcast")) is None:
        return None
    root = root_rank(chosen, "broadcast", "src", src, group_src)
    take = arguments.input_array if chosen.rank() == root else arguments.output_array
    array = take(tensor, "broadcast", "tensor")
    dense = as_contiguous(chosen, "broadcast", array)

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.broadcast(call, dense.arrays[0], root)
        if backend.rank() != root:
            dense.copy_back()

    return run_on_backend(chosen, "broadcast", array, body, [tensor], async_op, timeout)


@fast_path
def all_reduce(
    tensor: Any,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays of all ranks, element by element, and give all ranks the result.

    tensor      (...)   same size and dtype on every rank; holds the result afterwards
    op          one of ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.create(function); the
                same on every rank

    Raises TypeError for an op that is not defined for the dtype, ValueError or TypeError for other
    wrong arguments (the group stays usable), and a DistError for a later failure (the group has
    failed then).

    The bits of the result are the same on every rank.

        x = numpy.array([rank + 1.0])       # [1.] on rank 0, [2.] on rank 1
        dist.all_reduce(x)                  # [3.] on both
    """
    if (chosen := usable_group(group, "all_reduce")) is None:
        return None
    array = arguments.output_array(tensor, "all_reduce", "tensor")
    check_op("all_reduce", op, array)
    dense = as_contiguous(chosen, "all_reduce", array, op)
    reducer = reducer_for(chosen, op, array)

    def body(backend: ProcessGroup, call: Call) -> None:
        reducer.all_reduce(call, dense.arrays[0], op)
        dense.copy_back()

    return run_on_backend(chosen, "all_reduce", array, body, [tensor], async_op, timeout)


@fast_path
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays of all ranks into that of rank `dst`; other ranks keep theirs.

    tensor      (...)   same size and dtype on every rank; written on `dst` only
    dst         global rank; or `group_dst`, a rank in the group
    """
    if (chosen := usable_group(group, "reduce")) is None:
        return None
    root = root_rank(chosen, "reduce", "dst", dst, group_dst)
    take = arguments.output_array if chosen.rank() == root else arguments.input_array
    array = take(tensor, "reduce", "tensor")
    check_op("reduce", op, array)
    dense = as_contiguous(chosen, "reduce", array, op)
    reducer = reducer_for(chosen, op, array)

    def body(backend: ProcessGroup, call: Call) -> None:
        reducer.reduce(call, dense.arrays[0], root, op)
        if backend.rank() == root:
            dense.copy_back()

    return run_on_backend(chosen, "reduce", array, body, [tensor], async_op, timeout)


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give all ranks the arrays of all ranks.

    tensor_list     p arrays; entry r receives rank r's and has its size. Sizes may differ
                    between ranks; every rank passes the same list of sizes
    tensor          (...)   this rank's
    """
    if (chosen := usable_group(group, "all_gather")) is None:
        return None
    array = arguments.input_array(tensor, "all_gather", "tensor")
    outputs = arguments.output_list(tensor_list, "all_gather", "tensor_list", chosen.size())
    arguments.check_same_dtype([array, *outputs], "all_gather")
    arguments.check_same_size(
        outputs[chosen.rank()], array, "all_gather", f"tensor_list[{chosen.rank()}]", "tensor"
    )
    arguments.check_disjoint(outputs, [array], "all_gather", same=outputs[chosen.rank()])
    return _all_gather(chosen, "all_gather", outputs, array, tensor_list, async_op, timeout)


def _all_gather(
    group: ProcessGroup, name: str, outputs: list[Array], array: Array, result: object,
    async_op: bool, timeout: Timeout,
) -> Work | None:  # fmt: skip
    check_accepts(group, name, array)
    into = ContiguousCopies(outputs, filled=False)
    own = ContiguousCopies([array])

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.all_gather(call, into.arrays, own.arrays[0])
        into.copy_back()

    return run_on_backend(group, name, array, body, result, async_op, timeout)


@fast_path
def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Concatenate the arrays of all ranks, in rank order, into one on every rank.

    output_tensor   (p*n, ...) or (p, n, ...)   rows r*n:(r+1)*n come from rank r
    input_tensor    (n, ...)                    same size and dtype on every rank; may be this
                                                rank's own part of the output
    """
    name = "all_gather_into_tensor"
    if (chosen := usable_group(group, name)) is None:
        return None
    array = arguments.input_array(input_tensor, name, "input_tensor")
    output = arguments.output_array(output_tensor, name, "output_tensor")
    arguments.check_same_dtype([output, array], name)
    arguments.check_times_size(output, array, chosen.size(), name, "output_tensor", "input_tensor")
    into = ContiguousCopies([output], filled=False)
    blocks = into.arrays[0].blocks(chosen.size())
    arguments.check_disjoint([output], [array], name, same=blocks[chosen.rank()])
    check_accepts(chosen, name, array)
    own = ContiguousCopies([array])

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.all_gather(call, blocks, own.arrays[0])
        into.copy_back()

    return run_on_backend(chosen, name, array, body, [output_tensor], async_op, timeout)


@fast_path
def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give rank `dst` the arrays of all ranks.

    tensor          (...)   this rank's; sizes may differ between ranks
    gather_list     on `dst` p arrays, entry r as large as rank r's; elsewhere None
    dst             global rank, 0 unless given; or `group_dst`, a rank in the group
    """
    if (chosen := usable_group(group, "gather")) is None:
        return None
    root = root_rank(chosen, "gather", "dst", dst, group_dst, default=0)
    array = arguments.input_array(tensor, "gather", "tensor")
    check_accepts(chosen, "gather", array)
    own = ContiguousCopies([array])
    if chosen.rank() != root:
        arguments.check_absent(gather_list, "gather", "gather_list", "dst")

        def send(backend: ProcessGroup, call: Call) -> None:
            backend.gather(call, own.arrays[0], None, root)

        return run_on_backend(chosen, "gather", array, send, [], async_op, timeout)
    outputs = arguments.output_list(gather_list, "gather", "gather_list", chosen.size())
    arguments.check_same_dtype([array, *outputs], "gather")
    arguments.check_same_size(outputs[root], array, "gather", f"gather_list[{root}]", "tensor")
    arguments.check_disjoint(outputs, [array], "gather", same=outputs[root])
    into = ContiguousCopies(outputs, filled=False)

    def receive(backend: ProcessGroup, call: Call) -> None:
        backend.gather(call, own.arrays[0], into.arrays, root)
        into.copy_back()

    return run_on_backend(chosen, "gather", array, receive, gather_list, async_op, timeout)


@fast_path
def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give every rank its entry of a list of arrays on rank `src`.

    tensor          (...)   receives this rank's; sizes may differ between ranks
    scatter_list    on `src` p arrays, entry r as large as rank r's; elsewhere None
    src             global rank, 0 unless given; or `group_src`, a rank in the group
    """
    if (chosen := usable_group(group, "scatter")) is None:
        return None
    root = root_rank(chosen, "scatter", "src", src, group_src, default=0)
    output = arguments.output_array(tensor, "scatter", "tensor")
    check_accepts(chosen, "scatter", output)
    into = ContiguousCopies([output], filled=False)
    given: ContiguousCopies | None = None
    if chosen.rank() == root:
        inputs = arguments.input_list(scatter_list, "scatter", "scatter_list", chosen.size())
        arguments.check_same_dtype([output, *inputs], "scatter")
        arguments.check_same_size(
            output, inputs[root], "scatter", "tensor", f"scatter_list[{root}]"
        )
        arguments.check_disjoint([output], inputs, "scatter", same=inputs[root])
        given = ContiguousCopies(inputs)
    else:
        arguments.check_absent(scatter_list, "scatter", "scatter_list", "src")

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.scatter(call, into.arrays[0], given.arrays if given else None, root)
        into.copy_back()

    return run_on_backend(chosen, "scatter", output, body, [tensor], async_op, timeout)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a list of arrays over all ranks and give rank r entry r.

    output          (...)   as large as this rank's entry
    input_list      p arrays; entry r has the same size on every rank, entries may differ
    """
    name = "reduce_scatter"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    inputs = arguments.input_list(input_list, name, "input_list", chosen.size())
    arguments.check_same_dtype([into, *inputs], name)
    own = inputs[chosen.rank()]
    arguments.check_same_size(into, own, name, "output", f"input_list[{chosen.rank()}]")
    arguments.check_disjoint([into], inputs, name)
    check_op(name, op, into)
    check_accepts(chosen, name, into)
    return _reduce_scatter(
        chosen, name, into, ContiguousCopies(inputs).arrays, op, [output], async_op, timeout
    )


@fast_path
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce an array over all ranks and give rank r the r-th part.

    output      (n, ...)
    input       (p*n, ...) or (p, n, ...)   same size and dtype on every rank
    """
    name = "reduce_scatter_tensor"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    array = arguments.input_array(input, name, "input")
    arguments.check_same_dtype([into, array], name)
    arguments.check_times_size(array, into, chosen.size(), name, "input", "output")
    arguments.check_disjoint([into], [array], name)
    check_op(name, op, into)
    check_accepts(chosen, name, into)
    blocks = array.dense().blocks(chosen.size())
    return _reduce_scatter(chosen, name, into, blocks, op, [output], async_op, timeout)


def _reduce_scatter(
    group: ProcessGroup, name: str, output: Array, blocks: list[Array], op: Op, result: object,
    async_op: bool, timeout: Timeout,
) -> Work | None:  # fmt: skip
    into = ContiguousCopies([output], filled=False)
    reducer = reducer_for(group, op, output)

    def body(backend: ProcessGroup, call: Call) -> None:
        reducer.reduce_scatter(call, into.arrays[0], blocks, op)
        into.copy_back()

    return run_on_backend(group, name, output, body, result, async_op, timeout)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send entry r of a list to rank r, and receive entry r of another from it.

    output_tensor_list      p arrays; entry r is as large as the array that rank r sends here
    input_tensor_list       p arrays of one dtype, of any sizes
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
    arguments.check_disjoint(outputs, inputs, name)
    check_accepts(chosen, name, outputs[0])
    return _all_to_all(
        chosen, name, ContiguousCopies(outputs, filled=False), None,
        ContiguousCopies(inputs).arrays, False, output_tensor_list, async_op, timeout,
    )  # fmt: skip


@fast_path
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Cut an array along its first dimension and send part r to rank r.

    output                  (m, ...)    parts in rank order
    input                   (n, ...)    parts in rank order; the other dimensions are equal
    output_split_sizes      rows from each rank, p numbers that sum to m; None: m / p each
    input_split_sizes       rows for each rank, p numbers that sum to n; None: n / p each

    Every rank gives both lists, or none of them.
    """
    name = "all_to_all_single"
    if (chosen := usable_group(group, name)) is None:
        return None
    into = arguments.output_array(output, name, "output")
    array = arguments.input_array(input, name, "input")
    arguments.check_same_dtype([into, array], name)
    arguments.check_disjoint([into], [array], name)
    p = chosen.size()
    given = arguments.split_sizes(into, output_split_sizes, p, name, "output", "output_split_sizes")
    taken = arguments.split_sizes(array, input_split_sizes, p, name, "input", "input_split_sizes")
    me = chosen.rank()
    if given[me] != taken[me]:
        raise ValueError(
            f"{name}: rank {me} sends itself {taken[me]} elements (input_split_sizes) but "
            f"expects {given[me]} (output_split_sizes)"
        )
    sizes = (output_split_sizes, input_split_sizes)
    even = all(each is None or len(each) == 0 for each in sizes)
    check_accepts(chosen, name, into)
    dense = ContiguousCopies([into], filled=False)
    return _all_to_all(
        chosen, name, dense, dense.arrays[0].split(given), array.dense().split(taken), even,
        [output], async_op, timeout,
    )  # fmt: skip


def _all_to_all(
    group: ProcessGroup, name: str, into: ContiguousCopies, outputs: list[Array] | None,
    inputs: list[Array], even: bool, result: object, async_op: bool, timeout: Timeout,
) -> Work | None:  # fmt: skip
    def body(backend: ProcessGroup, call: Call) -> None:
        backend.all_to_all(call, into.arrays if outputs is None else outputs, inputs, even)
        into.copy_back()

    return run_on_backend(group, name, inputs[0], body, result, async_op, timeout)


@fast_path
def scan(
    tensor: Any,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the ranks up to and including this one, in place.

    tensor      (...)   same size and dtype on every rank. AVG divides by the group's size

        x = numpy.array([rank + 1.0])       # [1.] [2.] [3.]
        dist.scan(x)                        # [1.] [3.] [6.]
    """
    return _scan("scan", True, tensor, op, group, async_op, timeout)


@fast_path
def exscan(
    tensor: Any,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the ranks below this one, in place; rank 0 keeps its array.

    tensor      (...)   same size and dtype on every rank. AVG divides by the group's size
    """
    return _scan("exscan", False, tensor, op, group, async_op, timeout)


def _scan(
    name: str, inclusive: bool, tensor: Any, op: Op, group: AnyGroup, async_op: bool,
    timeout: Timeout,
) -> Work | None:  # fmt: skip
    if (chosen := usable_group(group, name)) is None:
        return None
    array = arguments.output_array(tensor, name, "tensor")
    check_op(name, op, array)
    dense = as_contiguous(chosen, name, array, op)
    reducer = reducer_for(chosen, op, array)

    def body(backend: ProcessGroup, call: Call) -> None:
        reducer.scan(call, dense.arrays[0], op, inclusive)
        dense.copy_back()

    return run_on_backend(chosen, name, array, body, [tensor], async_op, timeout)


@fast_path
def barrier(
    group: AnyGroup = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Wait until every rank of the group has made this call, on each backend of a group that has
    several. The backend "nccl" also waits for the GPUs. `device_ids` is for backends with
    devices."""
    if (chosen := usable_group(group, "barrier")) is None:
        return None

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.barrier(call)

    left = countdown(chosen.timeout if timeout is None else seconds(timeout, "barrier"))
    parts = chosen.backend_groups()
    for part in parts[1:]:  # all checks come before the first barrier starts
        part.check_usable("barrier")
    works = [run_on_backend(part, "barrier", None, body, None, async_op, left()) for part in parts]
    begun = [work for work in works if work is not None]
    return CombinedWork(begun) if len(begun) > 1 else begun[0] if begun else None


all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

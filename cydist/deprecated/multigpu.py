"""Calls of torch.distributed's first versions that take a list of arrays, one for each GPU.

All ranks pass as many arrays, of one size and dtype. All other functions of cydist expect one rank
per GPU. A list of one array makes the call for single arrays. Arrays may be in CPU memory if the
group's backend takes them. Calls with longer lists wait for all ranks, because their lengths are
compared. An error in such a call fails a group of its own: later calls with lists raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cydist.api import arguments, collectives, rooted_collectives
from cydist.api.arguments import check_op, root_rank
from cydist.api.multigpu import MultiGpuCall
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.deprecated.mode import check_process_group
from cydist.reduce_ops import Op, ReduceOp
from cydist.work import Work


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy entry `src_tensor` of rank `src` to every entry on every rank. See `broadcast`."""
    check_process_group()
    name = "broadcast_multigpu"
    arrays = arguments.output_list(tensor_list, name, "tensor_list")
    entry = _entry(name, tensor_list, src_tensor)
    if len(arrays) == 1:
        return rooted_collectives.broadcast(tensor_list[0], src, group, async_op)
    if (chosen := usable_group(group, name)) is None:
        return None
    root = root_rank(chosen, name, "src", src, None) * len(arrays) + entry
    return MultiGpuCall(chosen, name, arrays).run(
        lambda each, i: rooted_collectives.broadcast(tensor_list[i], None, each, async_op, root),
        tensor_list,
    )


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all entries of all ranks, and give every entry the result. See `all_reduce`."""
    check_process_group()
    name = "all_reduce_multigpu"
    arrays = arguments.output_list(tensor_list, name, "tensor_list")
    check_op(name, op, arrays[0])
    if len(arrays) == 1:
        return collectives.all_reduce(tensor_list[0], op, group, async_op)
    if (chosen := usable_group(group, name)) is None:
        return None
    return MultiGpuCall(chosen, name, arrays).run(
        lambda each, i: collectives.all_reduce(tensor_list[i], op, each, async_op), tensor_list
    )


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all entries of all ranks into entry `dst_tensor` of rank `dst`. See `reduce`."""
    check_process_group()
    name = "reduce_multigpu"
    arrays = arguments.output_list(tensor_list, name, "tensor_list")
    check_op(name, op, arrays[0])
    entry = _entry(name, tensor_list, dst_tensor)
    if len(arrays) == 1:
        return rooted_collectives.reduce(tensor_list[0], dst, op, group, async_op)
    if (chosen := usable_group(group, name)) is None:
        return None
    root = root_rank(chosen, name, "dst", dst, None) * len(arrays) + entry
    return MultiGpuCall(chosen, name, arrays).run(
        lambda each, i: rooted_collectives.reduce(tensor_list[i], None, op, each, async_op, root),
        tensor_list,
    )


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Give every list of outputs all entries of all ranks: rank r's entry j becomes its element
    r * len(input_tensor_list) + j. See `all_gather`."""
    check_process_group()
    name = "all_gather_multigpu"
    arrays = arguments.input_list(input_tensor_list, name, "input_tensor_list")
    arguments.check_length(output_tensor_lists, len(arrays), name, "output_tensor_lists")
    if (chosen := usable_group(group, name)) is None:
        return None
    for i, outputs in enumerate(output_tensor_lists):
        count = chosen.size() * len(arrays)
        into = arguments.output_list(outputs, name, f"output_tensor_lists[{i}]", count)
        arguments.check_same_dtype([arrays[i], *into], name)
        for output in into:
            arguments.check_same_size(
                output, arrays[i], name, f"output_tensor_lists[{i}]", "its input"
            )
    if len(arrays) == 1:
        return collectives.all_gather(output_tensor_lists[0], input_tensor_list[0], group, async_op)
    return MultiGpuCall(chosen, name, arrays).run(
        lambda each, i: collectives.all_gather(
            output_tensor_lists[i], input_tensor_list[i], each, async_op
        ),
        output_tensor_lists,
    )


def _entry(name: str, entries: Sequence[Any], entry: int) -> int:
    if not 0 <= entry < len(entries):
        raise ValueError(f"{name}: there is no entry {entry} in tensor_list, of {len(entries)}")
    return entry

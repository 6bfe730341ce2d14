"""Calls of torch.distributed's first versions, under their own names and with their own defaults.

The `*_multigpu` calls take a list of arrays, one for each GPU that a process drives. Here a process
drives one: lists have one entry, and anything else raises UnsupportedError before anything is sent.
Arrays may be on CPUs as well, where the group's backend takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cydist import collectives
from cydist.errors import UnsupportedError
from cydist.types import Op, ReduceOp
from cydist.work import Work
from cydist.world import AnyGroup


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy entry `src_tensor` of rank `src` to every entry on every rank. See `broadcast`."""
    tensor = _only("broadcast_multigpu", "tensor_list", tensor_list, src_tensor)
    return collectives.broadcast(tensor, src, group, async_op)


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all entries of all ranks, and give every entry the result. See `all_reduce`."""
    tensor = _only("all_reduce_multigpu", "tensor_list", tensor_list)
    return collectives.all_reduce(tensor, op, group, async_op)


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: Op = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all entries of all ranks into entry `dst_tensor` of rank `dst`. See `reduce`."""
    tensor = _only("reduce_multigpu", "tensor_list", tensor_list, dst_tensor)
    return collectives.reduce(tensor, dst, op, group, async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Give every list of outputs all entries of all ranks: rank r's entry j becomes its element
    r * len(input_tensor_list) + j. See `all_gather`."""
    outputs = _only("all_gather_multigpu", "output_tensor_lists", output_tensor_lists)
    tensor = _only("all_gather_multigpu", "input_tensor_list", input_tensor_list)
    return collectives.all_gather(outputs, tensor, group, async_op)


def _only(name: str, what: str, entries: Any, entry: int = 0) -> Any:
    """The one entry of a list."""
    if not isinstance(entries, list | tuple) or not entries:
        raise TypeError(f"{name}: {what} must be a list with an entry for each GPU")
    if len(entries) > 1:
        raise UnsupportedError(
            f"{name}: {what} has {len(entries)} entries, and a process drives one GPU here: start "
            "a rank for each, as in `cydistrun --nproc-per-node gpu`",
            op=name,
        )
    if entry != 0:
        raise ValueError(f"{name}: there is no entry {entry} in {what}, which has one")
    return entries[0]

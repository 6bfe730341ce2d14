"""scan and exscan: reductions over the ranks up to this one.

Arguments that all calls take, and what they raise, are described in cydist/api/collectives.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cydist._native import fast_path
from cydist.api import arguments
from cydist.api.dispatch import Timeout, as_contiguous, check_op, reducer_for, run
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.groups.process_group import Call, ProcessGroup
from cydist.reduce_ops import Op, ReduceOp

if TYPE_CHECKING:
    from cydist.work import Work


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
    """Reduce over the ranks below this one, in place; rank 0 keeps what it had.

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
        dense.unpack()

    return run(chosen, name, array, body, [tensor], async_op, timeout)

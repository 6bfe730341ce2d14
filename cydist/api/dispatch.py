"""From a public call to its group: who reduces its arrays, and who runs it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from cydist import _native
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError
from cydist.groups.process_group import Call, ProcessGroup
from cydist.groups.user_reduction import UserOpReducer, elements_dtype
from cydist.reduce_ops import Op, UserReduction

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.work import Work

Timeout = float | timedelta | None

_native.use_memory("cuda", array_libraries)


def reducer_for(group: ProcessGroup, op: Op, array: Array) -> ProcessGroup | UserOpReducer:
    """Return what reduces an array of the user's: the group's backend for it, or a user-defined
    operation.

    Raises UnsupportedError for a function that cannot reach the memory: before `run_on_backend`,
    so that the call does not count.
    """
    group = group.for_device(array.device)
    if not isinstance(op, UserReduction) or (array.device != "cpu" and group.folds):
        return group
    if array.device != "cpu":
        raise UnsupportedError(
            f"{op} reduces arrays in CPU memory, this one is on {array.device}, and backend "
            f"{group.backend!r} does not bring it there: copy it, or use backend 'tcp' or 'mpi'",
            group=group.group_name,
        )
    return UserOpReducer(group, op, elements_dtype(array))


def run_on_backend(
    group: ProcessGroup,
    name: str,
    array: Array | None,
    body: Callable[[ProcessGroup, Call], None],
    result: object,
    async_op: bool,
    timeout: Timeout,
) -> Work | None:
    """Run `body` on the group that serves the array's device; without an array, on any."""
    backend = group.for_device(group.devices[0] if array is None else array.device)
    return backend.execute(
        name, lambda call: body(backend, call), async_op=async_op, timeout=timeout, result=result,
        array=array,
    )  # fmt: skip

"""Choose the group that runs a public call, and the reducer of its arrays."""

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
    """Return the object that reduces a user's array: the group's backend for it, or a user-defined
    operation.

    Raises UnsupportedError for a function that cannot access the memory. Call this before
    `run_on_backend`, so that a refused call is not counted.
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
    """Run `body` on the group that serves the array's device, or on any group if there is no
    array."""
    backend = group.for_device(group.devices[0] if array is None else array.device)
    return backend.execute(
        name, lambda call: body(backend, call), async_op=async_op, timeout=timeout, result=result,
        array=array,
    )  # fmt: skip

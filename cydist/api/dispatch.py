"""The way from a public call to its group: packing, roots, and running in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist.api import arguments
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError
from cydist.groups.process_group import Call, ProcessGroup
from cydist.groups.user_reduction import UserOpReducer, elements_dtype
from cydist.reduce_ops import Op, UserReduction, op_and_factor

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.work import Work

Timeout = float | timedelta | None

_native.use_memory("cuda", array_libraries)


class ContiguousCopies:
    """Arrays of a call as contiguous memory: themselves, or packed copies.

    Inputs are packed when this is made; `unpack` writes outputs back.

    left        to the group, which packs them itself
    """

    def __init__(self, arrays: Sequence[Array], *, filled: bool = True, left: bool = False) -> None:
        self._arrays = arrays
        self.arrays = [
            array if array.contiguous or left else array.dense() if filled else array.empty_like()
            for array in arrays
        ]

    def unpack(self) -> None:
        """Copy what arrived into the arrays as the user laid them out."""
        for array, dense in zip(self._arrays, self.arrays, strict=True):
            array.take(dense)


class FlattenedList:
    """Several arrays of one dtype as one: flattened when made, unflattened by `unpack`. One array
    stays where it is."""

    def __init__(self, arrays: Sequence[Array], name: str) -> None:
        arguments.same_dtype(arrays, name)
        self._dense = ContiguousCopies(arrays)
        self.array = self._dense.arrays[0]
        if len(arrays) == 1:
            return
        self.array = _native.empty(sum(array.size for array in arrays), arrays[0])
        if self.array.device == "cpu":
            _native.flatten_buffers(self.array, self._dense.arrays)
        else:
            for part, array in self._parts():
                part.take(array)

    def unpack(self) -> None:
        """Copy the one array back into the many."""
        if len(self._dense.arrays) > 1:
            if self.array.device == "cpu":
                _native.unflatten_buffers(self._dense.arrays, self.array)
            else:
                for part, array in self._parts():
                    array.take(part)
        self._dense.unpack()

    def _parts(self) -> Iterator[tuple[Array, Array]]:
        arrays = self._dense.arrays
        return zip(self.array.split([array.size for array in arrays]), arrays, strict=True)


def root_rank(
    group: ProcessGroup, name: str, what: str, rank: int | None, group_rank: int | None,
    default: int | None = None,
) -> int:  # fmt: skip
    """The group rank that `src`/`dst` (global) or `group_src`/`group_dst` means."""
    if rank is not None and group_rank is not None:
        raise ValueError(f"{name}: give {what} or group_{what}, not both")
    if rank is None and group_rank is None:
        if default is None:
            raise ValueError(f"{name}: {what} (a global rank) or group_{what} is needed")
        rank = default
    if rank is not None:
        try:
            return group.get_group_rank(_integer(name, what, rank))
        except ValueError as error:
            raise ValueError(f"{name}: {what}={rank}: {error}") from None
    chosen = _integer(name, f"group_{what}", group_rank)
    if not 0 <= chosen < group.size():
        raise ValueError(
            f"{name}: group_{what}={group_rank} is not a rank of group {group.group_name!r}, "
            f"which has {group.size()}"
        )
    return chosen


def _integer(name: str, what: str, rank: Any) -> int:
    try:
        return index(rank)
    except TypeError:
        raise TypeError(f"{name}: {what} must be a rank, an integer, not {rank!r}") from None


def check_op(name: str, op: Op, array: Array) -> None:
    """Raise TypeError if the reduction makes no sense for the dtype, ValueError if its factor
    does not."""
    if isinstance(op, UserReduction):
        if refusal := op.refusal(elements_dtype(array)):
            raise TypeError(f"{name}: {refusal}")
        return
    kind, factor = op_and_factor(op)
    if not _native.supports(int(kind), array.dtype):
        raise TypeError(f"{name}: {kind.name} of {array.dtype_name} is not defined")
    if factor is None:
        return
    if refusal := _native.why_not(int(kind), array.dtype, factor):
        raise ValueError(f"{name}: {refusal}")


def check_takes(group: ProcessGroup, name: str, array: Array) -> None:
    """Before a call's arrays are packed: can the group take them, which are where this one is?"""
    if array.device != "cpu":
        group.for_device(array.device).check_takes(name, array)


def as_contiguous(
    group: ProcessGroup, name: str, array: Array, op: Op | None = None
) -> ContiguousCopies:
    """The array of a call on one array, of which every rank has as much."""
    check_takes(group, name, array)
    packs = group.for_device(array.device).packs and not isinstance(op, UserReduction)
    return ContiguousCopies([array], left=packs)


def reducer_for(group: ProcessGroup, op: Op, array: Array) -> ProcessGroup | UserOpReducer:
    """What reduces an array that the user passed: the group's backend for it, or a function of
    the user's.

    Raises UnsupportedError for a function that cannot reach the memory: before `run`, so that the
    call does not count.
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


def run(
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

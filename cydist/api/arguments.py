"""Checks of a call's arguments, before any traffic.

Every function raises TypeError or ValueError that names the call and the argument (and the
index in a list), what was found and what was expected. Nothing has been sent by then, and
the group stays usable. Only what one rank can see is checked here; what ranks must agree on
is compared by the fingerprint that travels with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from cydist import _native
from cydist._native import Array, asarray, of_one_kind, overlapping
from cydist.errors import counted
from cydist.groups.derived import elements_dtype
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import PREMUL_SUM, Op, RedOpType, UserReduction, op_and_factor

if TYPE_CHECKING:
    from typing_extensions import Buffer

    class HasDLPack(Protocol):
        @property
        def __dlpack__(self) -> Any: ...

    class HasArrayInterface(Protocol):
        @property
        def __array_interface__(self) -> Any: ...

    class HasCudaArrayInterface(Protocol):
        @property
        def __cuda_array_interface__(self) -> Any: ...

    class HasArray(Protocol):
        @property
        def __array__(self) -> Any: ...

    # The objects that `asarray` takes, as far as types can say. A list of numbers is none of them.
    AnyArray = Array | Buffer | HasDLPack | HasArrayInterface | HasCudaArrayInterface | HasArray


def input_array(obj: Any, call: str, name: str) -> Array:
    """Return the memory of an argument that is read."""
    try:
        return asarray(obj)
    except (TypeError, ValueError) as error:
        raise _located(error, call, name) from error


def output_array(obj: Any, call: str, name: str) -> Array:
    """Return the memory of an argument that is written: writable, without overlapping elements."""
    try:
        array = asarray(obj)
    except (TypeError, ValueError) as error:
        raise _located(error, call, name) from error
    if not array.writable:
        raise ValueError(
            f"{call}: {name} is read-only, and the call writes to it; pass a writable array, such "
            f"as a copy made by numpy.array(x), in place of this {type(obj).__qualname__}"
        )
    if array.self_overlapping:
        raise ValueError(
            f"{call}: {name} has elements that share memory (shape {array.shape}, strides "
            f"{array.strides} bytes), so a result does not fit into it; pass a copy"
        )
    return array


def _located(error: Exception, call: str, name: str) -> Exception:
    """Return an error of `asarray` that says which argument of which call it is about."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{call}: {name}: {error}")


def input_list(objs: Any, call: str, name: str, count: int | None = None) -> list[Array]:
    """Return the memory of a list of arguments that are read.

    Args:
        count: How many there must be; None: at least one.
    """
    check_length(objs, count, call, name)
    return [input_array(obj, call, f"{name}[{i}]") for i, obj in enumerate(objs)]


def output_list(objs: Any, call: str, name: str, count: int | None = None) -> list[Array]:
    """Return the memory of a list of arguments that are written.

    Args:
        count: How many there must be; None: at least one.
    """
    check_length(objs, count, call, name)
    return [output_array(obj, call, f"{name}[{i}]") for i, obj in enumerate(objs)]


def check_length(objs: Any, count: int | None, call: str, name: str) -> None:
    """Check that `objs` is a list or tuple of `count` entries; None: of at least one."""
    if not isinstance(objs, list | tuple):
        raise TypeError(f"{call}: {name} must be a list of arrays, not {type(objs).__qualname__}")
    if count is None and not objs:
        raise ValueError(f"{call}: {name} is empty")
    if count is not None and len(objs) != count:
        raise ValueError(f"{call}: {name} has {len(objs)} entries, expected {count}")


def missing_list(group: ProcessGroup, call: str, name: str, root: str) -> TypeError:
    """Return the error of a root that passes no list."""
    return TypeError(
        f"{call}: rank {group.ranks[group.rank()]} is {root} and must pass {name} as a list of "
        f"{group.size()} arrays, not None"
    )


def check_absent(objs: Any, call: str, name: str, root: str) -> None:
    """Check that this rank does not pass a list that only the root passes.

    Args:
        root: The argument that names the root: "src" or "dst".
    """
    if objs:
        raise ValueError(f"{call}: {name} is for rank {root} only; pass None on every other rank")


def check_same_dtype(arrays: list[Array], call: str) -> None:
    """Check that all arrays have one dtype and are on one device."""
    if of_one_kind(arrays):
        return
    first = arrays[0]
    for array in arrays:
        if array.dtype_name != first.dtype_name:
            found = ", ".join(sorted({each.dtype_name for each in arrays}))
            raise TypeError(f"{call}: all arrays must have one dtype, found {found}")
        if array.device != first.device or array.device_index != first.device_index:
            devices = sorted({f"{each.device}:{each.device_index}" for each in arrays})
            raise ValueError(
                f"{call}: all arrays must be on one device, found {', '.join(devices)}"
            )


def check_same_size(one: Array, other: Array, call: str, one_name: str, other_name: str) -> None:
    """Check that two arrays have the same number of elements."""
    if one.size != other.size:
        raise ValueError(
            f"{call}: {one_name} has {counted(one.size, 'element')} (shape {one.shape}), but "
            f"{other_name} has {other.size} (shape {other.shape})"
        )


def check_times_size(
    large: Array, small: Array, p: int, call: str, large_name: str, small_name: str
) -> None:
    """Check that one array holds an array of another's size for each of `p` ranks."""
    if large.size != p * small.size:
        raise ValueError(
            f"{call}: {large_name} has {counted(large.size, 'element')} (shape {large.shape}), "
            f"expected {p * small.size}: {counted(p, 'rank')} times the {small.size} of "
            f"{small_name} (shape {small.shape})"
        )


# What an in-place call allows, for errors.
OWN_BLOCK = "allows only for this rank's own block"
WHOLE_BLOCK = "allows only where the output is exactly one rank's block of the input"
WHOLE_ENTRY = "allows only where the output is exactly one entry of the input"
SAME_MEMORY = "allows only where both are exactly the same memory"

NONE_SHARED: Set[int] = frozenset()


def check_disjoint(
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    call: str,
    in_place: Callable[[int, int], bool] | None = None,
    rule: str = "never allows",
) -> Set[int]:
    """Check that no output shares memory with another output or with an input.

    Args:
        in_place: Whether output i may share memory with input j: the call is in place; None: never.
        rule: Which memory they may share, for errors.

    Returns the numbers of the outputs that share memory with an input.
    """
    arrays = [*outputs, *inputs]
    pairs = overlapping(arrays, len(outputs))
    if not pairs:  # nearly always
        return NONE_SHARED
    shared: set[int] = set()
    for i, j in pairs:
        if j < len(outputs):
            raise ValueError(
                f"{call}: outputs {i} and {j} share memory (shapes {arrays[i].shape} and "
                f"{arrays[j].shape}); each result needs memory of its own"
            )
        if in_place is None or not in_place(i, j - len(outputs)):
            output, given = _entry(i, outputs), _entry(j - len(outputs), inputs)
            raise ValueError(
                f"{call}: the output{output} and the input{given} share memory (shapes "
                f"{arrays[i].shape} and {arrays[j].shape}), which this call {rule}"
            )
        shared.add(i)
    return shared


def _entry(i: int, arrays: Sequence[Array]) -> str:
    return f" {i}" if len(arrays) > 1 else ""


def block_number(block: Array, array: Array, p: int) -> int | None:
    """Return which of the p equal parts of `array`, along its first dimension, is exactly the
    memory of `block`; None: it is none of them. Both may be strided."""
    whole = _steps(array.shape, array.strides) or [(1, array.itemsize)]
    (rows, step), *rest = whole
    if rows % p != 0 or step == 0 or array.size == 0:
        return None
    each = [(rows // p, step), *rest]
    if _steps(block.shape, block.strides) != _steps(*zip(*each, strict=True)):
        return None
    number, beside = divmod(block.address - array.address, rows // p * step)
    return number if beside == 0 and 0 <= number < p else None


def _steps(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return the elements and the stride of each dimension. Dimensions of one element are left
    out, and those that are walked in equal steps are one."""
    steps: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if steps and steps[-1][1] == count * stride:
            steps[-1] = (steps[-1][0] * count, stride)
        else:
            steps.append((count, stride))
    return steps


def _rows(array: Array, call: str, name: str) -> int:
    """Return the length of the dimension along which an array is cut."""
    if array.ndim == 0:
        raise ValueError(f"{call}: {name} has no dimension to cut; it needs at least one")
    return array.shape[0]


def check_divides(array: Array, p: int, call: str, name: str, sizes_name: str) -> None:
    """Check that an array can be cut along its first dimension into `p` equal parts."""
    rows = array.size if array.ndim == 1 else _rows(array, call, name)
    if rows % p != 0:
        raise ValueError(
            f"{call}: {name} has {counted(rows, 'row')}, which cannot be divided among {p} ranks; "
            f"pass {sizes_name}"
        )


def split_sizes(
    array: Array, sizes: Sequence[int] | None, p: int, call: str, name: str, sizes_name: str
) -> list[int]:
    """Return the number of elements of each rank's part of an array that is cut along its first
    dimension.

    Args:
        sizes: Rows of each part, p numbers that sum to the first dimension; None or empty: even.
    """
    if sizes is None or len(sizes) == 0:
        check_divides(array, p, call, name, sizes_name)
        return [array.size // p] * p
    rows = _rows(array, call, name)
    row = prod(array.shape[1:])
    try:
        counts = [index(size) for size in sizes]
    except TypeError as error:
        raise TypeError(f"{call}: {sizes_name} must be whole numbers, found {sizes!r}") from error
    if len(counts) != p:
        raise ValueError(f"{call}: {sizes_name} has {len(counts)} entries, expected {p}")
    if min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{call}: {sizes_name} {counts} must be {p} numbers, none negative, that sum to "
            f"the {rows} rows of {name} (shape {array.shape})"
        )
    return [count * row for count in counts]


def root_rank(
    group: ProcessGroup, name: str, what: str, rank: int | None, group_rank: int | None,
    default: int | None = None,
) -> int:  # fmt: skip
    """Return the group rank that `src`/`dst` (global) or `group_src`/`group_dst` means."""
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
            f"{name}: group_{what}={group_rank} is not a rank of {group.title}, "
            f"which has {group.size()}"
        )
    return chosen


def _integer(name: str, what: str, rank: Any) -> int:
    try:
        return index(rank)
    except TypeError:
        raise TypeError(f"{name}: {what} must be a rank, an integer, not {rank!r}") from None


def _dtype_text(array: Array) -> str:
    """Return the name of the dtype, which is numpy's where cydist has only numpy's code for it."""
    name = array.dtype_name
    return elements_dtype(array).name if name[:1] in "<>|=" else name


_KINDS = {"bool": "bool", "int32": "integers", "float32": "floats", "complex64": "complex numbers"}


def _kinds_for(kind: RedOpType) -> str:
    """Return the kinds of dtypes that a reduction is defined for, in words."""
    kinds = [
        words for name, words in _KINDS.items() if _native.supports(kind, _native.DTYPES[name])
    ]
    if not kinds:
        return "pairs of a value and an index"
    return f"{', '.join(kinds)} of up to {128 if kinds[-1].startswith('complex') else 64} bits"


def check_op(name: str, op: Op, array: Array) -> None:
    """Raise TypeError if the reduction is not defined for the dtype, ValueError for an invalid
    factor."""
    if type(op) is RedOpType and op is not PREMUL_SUM and _native.supports(op, array.dtype):
        return  # nearly all of them
    if isinstance(op, UserReduction):
        if refusal := op.refusal(elements_dtype(array)):
            raise TypeError(f"{name}: {refusal}")
        return
    try:
        kind, factor = op_and_factor(op)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not _native.supports(kind, array.dtype):
        raise TypeError(
            f"{name}: {kind.name} of {_dtype_text(array)} is not defined: it takes "
            f"{_kinds_for(kind)}"
        )
    if factor is None:
        return
    if refusal := _native.why_not(int(kind), array.dtype, factor):
        raise ValueError(f"{name}: {refusal}")

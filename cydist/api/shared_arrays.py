"""empty_shared: arrays in the memory that the ranks of a host share.

In a collective the other ranks read such an array in place, without a copy.
"""

from __future__ import annotations

import sys
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from cydist.api.arguments import input_array
from cydist.api.process_groups import AnyGroup, check_group, resolve_group

if TYPE_CHECKING:
    from cydist.api.arguments import AnyArray
    from cydist.groups.process_group import ProcessGroup


def empty_shared(shape: Any, dtype: Any = float, group: AnyGroup = None) -> Any:
    """Return an array that the group's collectives use without copies if its ranks share memory.

    Every rank makes its own array: this is not a collective, and waits for no other rank. The
    values are undefined. The array begins at a page boundary, and its memory is reserved: writing
    to it cannot fail. The memory is freed with the last view of the array, which may outlive the
    group. Making it is slower than making a private array, so make it once and use it often.

    If there is no shared memory (other hosts, `CYDIST_TRANSPORT=tcp` or `mpi`, the backend
    "inproc") the array is private; `is_shared` tells which it is.

    Args:
        shape: An integer or a sequence of them.
        dtype: Anything that numpy.dtype takes, except objects, for a numpy array; a torch dtype for
            a torch tensor.
        group: A group from `new_group`; None is the default group.

    Returns:
        A numpy array or a torch tensor of this shape and dtype.

    Raises:
        MemoryError: The host has too little memory left. The group stays usable.
        TypeError: The shape or dtype is invalid. The group stays usable.
        ValueError: Likewise, or this rank is not in the group.
        ForkedError: This process is a forked child of the rank.

    Examples:
        >>> gradient = dist.empty_shared(1000, "float32")
        >>> gradient[:] = rank
        >>> dist.all_reduce(gradient)
        >>> assert (gradient == 1).all()
    """
    import numpy as np

    chosen = _group(group, "empty_shared")
    chosen.check_process("empty_shared")
    backend = chosen.for_device("cpu")
    try:
        sizes = tuple(map(index, shape)) if np.iterable(shape) else (index(shape),)
    except TypeError:
        raise TypeError(
            f"empty_shared: shape must be an integer or a sequence of them, not {shape!r}"
        ) from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty_shared: shape {sizes} has a negative dimension")
    if type(dtype).__module__ == "torch":
        return _tensor(backend, sizes, dtype)
    kind = np.dtype(dtype)
    if kind.hasobject or kind.itemsize == 0:
        raise TypeError(f"empty_shared: elements of {kind} cannot lie in shared memory")
    memory = _memory(backend, prod(sizes) * kind.itemsize)
    return np.ndarray(sizes, kind, memory) if memory is not None else np.empty(sizes, kind)


def is_shared(tensor: AnyArray, group: AnyGroup = None) -> bool:
    """Return whether the group's other members can read this array in place.

    It is true for arrays from `empty_shared` on a group whose members are all on one host, and for
    their contiguous views.

    Args:
        tensor: An array of any library that `asarray` knows.
        group: A group from `new_group`; None is the default group.

    Returns:
        True or False.

    Raises:
        TypeError: `tensor` is not an array.
        ValueError: This rank is not in the group.

    Examples:
        >>> dist.is_shared(np.empty(3))
        False
    """
    array = input_array(tensor, "is_shared", "tensor")
    chosen = _group(group, "is_shared")
    return array.device == "cpu" and chosen.for_device("cpu").shares(array)


def _group(group: AnyGroup, name: str) -> ProcessGroup:
    check_group(group)
    if (chosen := resolve_group(group)) is None:
        raise ValueError(f"{name}: this rank is not in the group")
    return chosen


def _memory(backend: ProcessGroup, nbytes: int) -> memoryview | None:
    """Return memory that the ranks share; None if there is none, or if no bytes are asked for."""
    if nbytes > sys.maxsize:
        raise MemoryError(f"empty_shared: {nbytes} bytes are more than any address space has")
    return backend.share(nbytes) if nbytes else None


def _tensor(backend: ProcessGroup, sizes: tuple[int, ...], dtype: Any) -> Any:
    torch = sys.modules["torch"]
    memory = _memory(backend, prod(sizes) * dtype.itemsize)
    if memory is None:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(sizes)

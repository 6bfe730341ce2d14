"""Memory with gaps as MPI's datatypes, where MPI is faster by them than we by packing."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cydist._native import Array

MOST = 1000  # layouts of a process; arrays of further ones are packed
# Bytes that lie side by side, from which on. See docs/backends.md for what was measured.
LEAST_RUN = 64
LEAST_RUN_OF = {"Open MPI": 1}


class Datatypes:
    """The datatypes of a process, each made when first asked for, and kept: a message under way
    may use it."""

    def __init__(self, MPI: Any) -> None:
        self._byte = MPI.BYTE
        self._handle_of = MPI._handleof
        self._least_run = LEAST_RUN_OF.get(MPI.get_vendor()[0], LEAST_RUN)
        self._made: dict[tuple[int, Sequence[int], Sequence[int]], int] = {}

    def of(self, array: Array) -> int:
        """MPI's handle for an array with gaps, as bytes from its first element on; 0: pack it."""
        key = (array.itemsize, array.shape, array.strides)
        if key not in self._made:
            if len(self._made) >= MOST:
                return 0
            self._made[key] = self._described(*key)
        return self._made[key]

    def _described(self, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        run, axes = itemsize, [each for each in zip(shape, strides, strict=True) if each[0] != 1]
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        # Whoever runs down an array is slow at it, other than our kernels.
        across = all(abs(outer[1]) >= abs(inner[1]) for outer, inner in pairwise(axes))
        if run < self._least_run or not across:
            return 0
        made, count = self._byte, run
        for length, stride in reversed(axes):
            made, count = made.Create_hvector(length, count, stride), 1
        made.Commit()
        handle: int = self._handle_of(made)
        return handle


@cache
def layouts(MPI: Any) -> Datatypes:
    """Those of this process."""
    return Datatypes(MPI)

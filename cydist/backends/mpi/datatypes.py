"""MPI's datatypes for elements, with MPI's operations, and for strided arrays."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist.reduce_ops import RedOpType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cydist._native import Array

MOST = 1000  # most layouts of a process; arrays with further layouts are packed
# Least contiguous bytes for a datatype; docs/guide/backends.md has the measurements.
LEAST_RUN = 64
LEAST_RUN_OF = {"Open MPI": 1}


# dtype -> MPI's datatype, and the operations that MPI has with cydist's semantics. MPI's MIN and
# MAX of floats lose NaN, its product of complex numbers differs in infinities, its logical
# operations are the reductions of bool; Open MPI's sums of 8- and 16-bit integers do not wrap.
_FLOATS = {RedOpType.SUM: "SUM", RedOpType.PRODUCT: "PROD"}
_INTEGERS = {
    **_FLOATS,
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
_NARROW: dict[RedOpType, str] = {
    op: name for op, name in _INTEGERS.items() if op is not RedOpType.SUM
}
_BOOL = {
    RedOpType.SUM: "LOR",
    RedOpType.PRODUCT: "LAND",
    RedOpType.MIN: "LAND",
    RedOpType.MAX: "LOR",
    RedOpType.BAND: "LAND",
    RedOpType.BOR: "LOR",
    RedOpType.BXOR: "LXOR",
}
REDUCTIONS: dict[str, tuple[str, dict[RedOpType, str]]] = {
    **{
        f"{sign.lower()}int{bits}": (f"{sign}INT{bits}_T", operations)
        for sign in ("", "U")
        for bits, operations in ((8, _NARROW), (16, _NARROW), (32, _INTEGERS), (64, _INTEGERS))
    },
    "float32": ("FLOAT", _FLOATS),
    "float64": ("DOUBLE", _FLOATS),
    "complex64": ("C_FLOAT_COMPLEX", {RedOpType.SUM: "SUM"}),
    "complex128": ("C_DOUBLE_COMPLEX", {RedOpType.SUM: "SUM"}),
    "bool": ("C_BOOL", _BOOL),
}


def use_reductions(MPI: Any) -> None:
    """Pass the reductions to the compiled part."""
    for name, (datatype, operations) in REDUCTIONS.items():
        for op, operation in operations.items():
            _native.use_reduction(
                _native.DTYPES[name],
                int(op),
                MPI._handleof(getattr(MPI, datatype)),
                MPI._handleof(getattr(MPI, operation)),
            )


class Datatypes:
    """The datatypes of a process, each made at first use and kept, because a message under way may
    use it."""

    def __init__(self, MPI: Any) -> None:
        self._byte = MPI.BYTE
        self._handle_of = MPI._handleof
        self._least_run = LEAST_RUN_OF.get(MPI.get_vendor()[0], LEAST_RUN)
        self._made: dict[tuple[int, Sequence[int], Sequence[int]], int] = {}

    def of(self, array: Array) -> int:
        """Return MPI's handle for an array with gaps, as bytes from its first element on; 0: pack
        it."""
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
        # MPI is slow at copying the columns of an array; cydist's kernels are not.
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
def datatypes(MPI: Any) -> Datatypes:
    """Return this process's datatypes."""
    return Datatypes(MPI)

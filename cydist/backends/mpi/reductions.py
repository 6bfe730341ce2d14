"""What MPI can reduce with our meaning."""

from __future__ import annotations

from typing import Any

from cydist import _native
from cydist.reduce_ops import RedOpType

# dtype -> MPI's, and which operations MPI has with our meaning. Its MIN and MAX of floats
# lose NaN, its product of complex numbers differs in infinities, its logical operations
# are the reductions of bool; Open MPI's sums of integers of 8 and 16 bits do not wrap.
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


def use(MPI: Any) -> None:
    """Tell the compiled part."""
    for name, (datatype, operations) in REDUCTIONS.items():
        for op, operation in operations.items():
            _native.use_reduction(
                _native.DTYPES[name],
                int(op),
                MPI._handleof(getattr(MPI, datatype)),
                MPI._handleof(getattr(MPI, operation)),
            )

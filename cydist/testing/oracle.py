"""Expected results of collectives, computed in rank order with one rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cydist import _native

Array = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name, name)) for name in _native.DTYPES
}
OPS = tuple(name for name in _native.OPS if name != "PREMUL_SUM")  # SUM, of other contributions
SMALL_FLOATS = tuple(name for name, d in DTYPES.items() if d.itemsize < 4 and d.kind not in "biu")
INTEGERS = tuple(name for name, d in DTYPES.items() if d.kind in "iu")


def contribution(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return `count` values of one rank. Any sum or product of four ranks' values is exact in any
    order."""
    values = (np.arange(count) * 7 + rank * 3) % 3
    if dtype.kind == "b":
        return np.asarray(values == 1)
    if dtype.kind == "c":
        return (values + 1j * ((values + rank) % 2)).astype(dtype)
    return values.astype(dtype)


def reduced(op: str, arrays: Sequence[Array]) -> Array:
    """Return the arrays of all ranks reduced by the operation named `op`, in the first one's
    dtype."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in SMALL_FLOATS else dtype
    stack = [array.astype(wide) for array in arrays]
    total = stack[0].copy()
    for array in stack[1:]:
        total = _COMBINE[op](total, array)
    if op == "AVG":
        p = len(arrays)
        if dtype.kind in "iu":
            wrapped = total.astype(object)
            total = np.array(
                [abs(v) // p * (1 if v >= 0 else -1) for v in wrapped.ravel()], dtype
            ).reshape(total.shape)
        else:
            total = total / wide.type(p)
    return total.astype(dtype)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": lambda a, b: a | b if a.dtype == bool else a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a & b if a.dtype == bool else a * b,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def makes_sense(op: str, dtype: np.dtype[Any]) -> bool:
    """Return whether the operation is defined for the dtype."""
    if op in ("BAND", "BOR", "BXOR"):
        return dtype.kind in "biu"
    if op in ("MIN", "MAX"):
        return dtype.kind != "c"
    return not (op == "AVG" and dtype.kind == "b")


def same_bits(expected: Any, actual: Any) -> bool:
    """Return whether two arrays have one dtype and shape and equal bits."""
    expected, actual = np.asarray(expected), np.asarray(actual)
    return (expected.dtype, expected.shape, expected.tobytes()) == (
        actual.dtype, actual.shape, actual.tobytes(),
    )  # fmt: skip

"""A rank's local steps of a plan, for cupy and other libraries with numpy's functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cydist._native import ITEMSIZES
from cydist.backends.nccl.plans import BufferRange, LocalKernel

COMBINE = {"BAND": "bitwise_and", "BOR": "bitwise_or", "BXOR": "bitwise_xor", "PRODUCT": "multiply"}


def run(
    step: LocalKernel,
    at: Callable[[BufferRange], int],
    view: Callable[[int, int, str], Any],
    functions: Any,
    factor: complex | None,
) -> None:
    """Enqueue one step on the current stream.

    Args:
        at: Returns the address of a BufferRange.
        view: Returns an array of a number of elements of a dtype at an address.
        functions: numpy's functions for such arrays.
    """
    if step.kind == "mean":
        _mean(step, at, view, functions)
        return
    into = view(at(step.into), step.elements, step.dtype)
    if step.kind == "scale":
        # If input and output are different arrays of the same memory, cupy copies the input.
        in_place = at(step.sources[0]) == at(step.into)
        source = into if in_place else view(at(step.sources[0]), step.elements, step.dtype)
        _scale(step.dtype, into, source, functions, factor)
        return
    sources = [
        view(at(span), step.elements, step.source_dtype or step.dtype) for span in step.sources
    ]
    if step.kind in ("copy", "cast"):
        functions.copyto(into, sources[0], casting="unsafe")
    elif step.kind == "odd":
        functions.bitwise_and(into, 1, out=into)
    else:
        combine = getattr(functions, COMBINE[step.name])
        functions.copyto(into, sources[0])
        for source in sources[1:]:
            combine(into, source, out=into)


def _scale(dtype: str, into: Any, source: Any, functions: Any, factor: complex | None) -> None:
    """Multiply as the CPU kernels do: 16-bit floats by a float32, with one rounding, and integers
    with wrap-around."""
    assert factor is not None
    if dtype.startswith("complex"):
        functions.multiply(source, factor, out=into)
    elif dtype.startswith("float") or dtype == "bfloat16":
        wide = "float64" if dtype == "float64" else "float32"
        number = float(factor.real)
        if wide == "float32":
            number = ctypes.c_float(number).value  # infinity beyond its range, without a warning
        functions.multiply(source, number, out=into, dtype=wide)
    else:
        bits = 8 * ITEMSIZES[dtype]
        whole = int(factor.real) % (1 << bits)
        if dtype.startswith("int") and whole >> (bits - 1):
            whole -= 1 << bits
        functions.multiply(source, whole, out=into)


def _mean(
    step: LocalKernel,
    at: Callable[[BufferRange], int],
    view: Callable[[int, int, str], Any],
    functions: Any,
) -> None:
    """Divide 16-bit integers by a count in float32. Truncation is exact, since two quotients differ
    by more than float32's rounding."""
    into, source = (
        view(at(span), step.elements, step.dtype) for span in (step.into, step.sources[0])
    )
    quotient = view(at(step.sources[1]), step.elements, "float32")
    functions.divide(source, float(step.ranks), out=quotient, dtype="float32")
    functions.copyto(into, quotient, casting="unsafe")

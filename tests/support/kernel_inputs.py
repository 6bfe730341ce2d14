"""What kernels are given, and what numpy makes of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
INTEGERS = tuple(np.dtype(f"{kind}int{bits}") for kind in ("", "u") for bits in (8, 16, 32, 64))
NARROW = (np.dtype(np.float16), BFLOAT16, *FLOAT8)
REAL = (*NARROW, np.dtype(np.float32), np.dtype(np.float64))
COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))
BOOL = np.dtype(np.bool_)
DTYPES = (BOOL, *INTEGERS, *REAL, *COMPLEX)
ARITHMETIC = ("SUM", "PRODUCT", "AVG", "PREMUL_SUM")
ORDER = ("MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")


# The one quiet NaN of each format, as an unsigned integer.
NAN = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}


def defined(dtype):
    """The operations that make sense for a dtype."""
    if dtype == BOOL:
        return ("SUM", "PRODUCT", *ORDER, *BITS)
    if dtype in INTEGERS:
        return (*ARITHMETIC, *ORDER, *BITS)
    if dtype in COMPLEX:
        return ARITHMETIC
    return (*ARITHMETIC, *ORDER)


def unsigned(array):
    """The same bits as unsigned integers; complex numbers as pairs."""
    width = array.dtype.itemsize // (2 if array.dtype in COMPLEX else 1)
    return array.view(f"u{width}")


def with_one_nan(array):
    """Replace every NaN by the format's quiet positive one."""
    if array.dtype in COMPLEX:
        parts = array.view(f"f{array.dtype.itemsize // 2}")
        return with_one_nan(parts).view(array.dtype)
    if array.dtype in REAL:
        bits = unsigned(array).copy()
        bits[np.isnan(array)] = NAN[array.dtype.name]
        return bits.view(array.dtype)
    return array


def any_bits(dtype, count, seed):
    """Random bit patterns: for floats every kind of number, subnormal, infinity and NaN."""
    rng = np.random.default_rng([seed, count, dtype.num])
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


def moderate(dtype, count, seed):
    """Inexact numbers of similar size, so that roundings show; small integers."""
    rng = np.random.default_rng([seed, count, dtype.num])
    if dtype == BOOL or dtype in INTEGERS:
        return any_bits(dtype, count, seed)
    x = rng.standard_normal((2, count))
    return (x[0] + 1j * x[1]).astype(dtype) if dtype in COMPLEX else x[0].astype(dtype)


def accumulator(dtype):
    """What a dtype is added up in."""
    return np.dtype(np.float32) if dtype in NARROW else dtype


def complex_product(a, b):
    """By the definition, each operation rounded once."""
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def smaller(a, b):
    """The minimum, in which -0 < +0."""
    return np.where((a == b) & np.signbit(a), a, np.minimum(a, b))


def larger(a, b):
    """The maximum, in which -0 < +0."""
    return np.where((a == b) & ~np.signbit(a), a, np.maximum(a, b))


def pair(op, a, b):
    """a op b in the accumulator's dtype."""
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        return a | b if a.dtype == BOOL else a + b
    if op == "PRODUCT":
        return complex_product(a, b) if a.dtype in COMPLEX else a * b
    if op in ORDER:
        if a.dtype in REAL:
            return (smaller if op == "MIN" else larger)(a, b)
        return (np.minimum if op == "MIN" else np.maximum)(a, b)
    return {"BAND": a & b, "BOR": a | b, "BXOR": a ^ b}[op]


def average(total, ranks):
    """A sum divided by the number of ranks; integers truncate toward zero."""
    if total.dtype in INTEGERS:
        quotients = [abs(int(x)) // ranks * (1 if x >= 0 else -1) for x in total]
        return np.array(quotients, total.dtype)
    if total.dtype in COMPLEX:
        parts = total.view(f"f{total.dtype.itemsize // 2}")
        return (parts / parts.dtype.type(ranks)).view(total.dtype)
    return total / total.dtype.type(ranks)


def normal(array):
    """bool as numpy understands it: nonzero is true."""
    return array.view(np.uint8) != 0 if array.dtype == BOOL else array


def expected(op, sources, ranks=None):
    """The oracle: fold the sources in order, in the accumulator, and round once."""
    dtype = sources[0].dtype
    with np.errstate(all="ignore"):
        total = normal(sources[0]).astype(accumulator(dtype))
        for source in sources[1:]:
            total = pair(op, total, normal(source).astype(total.dtype))
        if op == "AVG" and ranks is not None:
            total = average(total, ranks)
        return with_one_nan(total.astype(dtype))


def raw(array):
    """The bytes of an array, as the buffer that every dtype has."""
    return array.view(np.uint8)

"""Every reduction of every dtype, bit for bit, on every instruction set that this machine has.

The oracles are numpy, ml_dtypes (8- and 16-bit floats through float32) and Python's integers.
"""

import ml_dtypes
import numpy as np
import pytest
from kernel_inputs import (
    BOOL,
    COMPLEX,
    DTYPES,
    INTEGERS,
    NAN,
    NARROW,
    ORDER,
    REAL,
    accumulator,
    any_bits,
    average,
    complex_product,
    defined,
    expected,
    moderate,
    raw,
    unsigned,
    with_one_nan,
)

from cydist._native import kernels

COUNTS = (0, 1, 3, 31, 32, 33, 1000, 2500)
RANKS = 3


PAIRS = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op}") for dtype in DTYPES for op in defined(dtype)
]


def same(a, b):
    """Are the bits equal?"""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def two(op, dtype, acc, low, high):
    """kernels.combine by names."""
    factor = 1 if op == "PREMUL_SUM" else None
    code = kernels.DTYPES[dtype.name]
    kernels.combine(kernels.OPS[op], code, raw(acc), raw(low), raw(high), factor)


def many(op, dtype, out, sources):
    """kernels.combine_all by names."""
    factor = 1 if op == "PREMUL_SUM" else None
    code = kernels.DTYPES[dtype.name]
    kernels.combine_all(kernels.OPS[op], code, raw(out), [raw(s) for s in sources], factor)


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_two_sources(isa, dtype, op):
    """combine gives the oracle's bits for any bit patterns, of any number of elements."""
    for count in COUNTS:
        low, high = any_bits(dtype, count, 1), any_bits(dtype, count, 2)
        acc = np.empty_like(low)
        two(op, dtype, acc, low, high)
        assert same(expected(op, [low, high]), acc), count


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_many_sources(isa, dtype, op):
    """combine_all folds any number of elements in order, finishes, and rounds once."""
    for count in COUNTS:
        sources = [moderate(dtype, count, seed) for seed in range(RANKS)]
        out = np.empty_like(sources[0])
        many(op, dtype, out, sources)
        assert same(expected(op, sources, RANKS), out), count


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_many_sources_of_any_bits(isa, dtype, op):
    """combine_all keeps the promises about NaN, infinity, subnormals and wrapping."""
    sources = [any_bits(dtype, 2000, seed) for seed in range(5)]
    out = np.empty_like(sources[0])
    many(op, dtype, out, sources)
    assert same(expected(op, sources, 5), out)


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_misaligned(isa, dtype, op):
    """No address needs to be a multiple of anything."""
    low, high = moderate(dtype, 100, 1), moderate(dtype, 100, 2)
    memory = np.zeros(3 * low.nbytes + 16, np.uint8)
    starts = [1, low.nbytes + 4, 2 * low.nbytes + 9]
    acc, a, b = (memory[start : start + low.nbytes] for start in starts)
    a[:], b[:] = raw(low), raw(high)
    factor = 1 if op == "PREMUL_SUM" else None
    kernels.combine(kernels.OPS[op], kernels.DTYPES[dtype.name], acc, a, b, factor)
    assert expected(op, [low, high]).tobytes() == acc.tobytes()


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_two_sources_in_place(isa, dtype, op):
    """acc may be low or high."""
    given = [moderate(dtype, 1100, 1), moderate(dtype, 1100, 2)]
    result = expected(op, given)
    for place in (0, 1):
        sources = [array.copy() for array in given]
        two(op, dtype, sources[place], *sources)
        assert same(result, sources[place]), place


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_many_sources_in_place(isa, dtype, op):
    """out may be any of the sources."""
    given = [moderate(dtype, 2500, seed) for seed in range(RANKS)]
    result = expected(op, given, RANKS)
    for place in range(RANKS):
        sources = [array.copy() for array in given]
        many(op, dtype, sources[place], sources)
        assert same(result, sources[place]), place


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_one_source(isa, dtype, op):
    """One source comes out as it is; bool comes out as 0 or 1."""
    source = any_bits(dtype, 300, 1)
    out = np.empty_like(source)
    many(op, dtype, out, [source])
    result = expected(op, [source], 1) if op == "AVG" or dtype == BOOL else source
    assert same(result, out)


@pytest.mark.parametrize("ranks", [1, 3, 7, 1000, 2**31 - 1])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "AVG" in defined(d)], ids=str)
def test_finish_divides(isa, dtype, ranks):
    """AVG divides in the accumulator's type and truncates integers toward zero."""
    acc = any_bits(dtype, 500, 1)
    with np.errstate(all="ignore"):
        quotient = average(acc.astype(accumulator(dtype)), ranks).astype(dtype)
    result = with_one_nan(quotient)
    kernels.finish(kernels.OPS["AVG"], kernels.DTYPES[dtype.name], raw(acc), ranks)
    assert same(result, acc)


@pytest.mark.parametrize("factor", [0.3, -1.0, 2.5e-5, float("inf")])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_prepare_multiplies_reals(isa, dtype, factor):
    """PREMUL_SUM multiplies by the factor, in the accumulator's type."""
    own = any_bits(dtype, 500, 1)
    wide = accumulator(dtype)
    with np.errstate(all="ignore"):
        result = with_one_nan((own.astype(wide) * wide.type(factor)).astype(dtype))
    out = np.empty_like(own)
    kernels.prepare(
        kernels.OPS["PREMUL_SUM"], kernels.DTYPES[dtype.name], raw(out), raw(own), factor
    )
    assert same(result, out)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_prepare_multiplies_complex(isa, dtype):
    """A complex contribution takes a complex factor."""
    own = any_bits(dtype, 500, 1)
    factor = dtype.type(0.3 - 1.7j)
    with np.errstate(all="ignore"):
        result = with_one_nan(complex_product(own, np.full_like(own, factor)))
    out = np.empty_like(own)
    kernels.prepare(
        kernels.OPS["PREMUL_SUM"], kernels.DTYPES[dtype.name], raw(out), raw(own), 0.3 - 1.7j
    )
    assert same(result, out)


@pytest.mark.parametrize("factor", [0, 3, -1, 2.0**40])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_prepare_multiplies_integers(isa, dtype, factor):
    """Integers are multiplied by whole factors, and wrap."""
    own = any_bits(dtype, 200, 1)
    bits = 8 * dtype.itemsize
    wrapped = [int(x) * int(factor) % 2**bits for x in own]
    result = np.array(wrapped, f"u{dtype.itemsize}").view(dtype)
    out = np.empty_like(own)
    kernels.prepare(
        kernels.OPS["PREMUL_SUM"], kernels.DTYPES[dtype.name], raw(out), raw(own), factor
    )
    assert same(result, out)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_round_once(isa, dtype):
    """1 and many halves of an ulp: rounding after each addition would lose them all."""
    ulp = float(ml_dtypes.finfo(dtype).eps)
    sources = [np.ones(40, dtype), *(np.full(40, ulp / 2, dtype) for _ in range(8))]
    out = np.empty(40, dtype)
    many("SUM", dtype, out, sources)
    assert same(np.full(40, 1 + 4 * ulp, dtype), out)


@pytest.mark.parametrize("op", ORDER)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_order_of_zeros(isa, dtype, op):
    """-0 < +0, whichever comes first."""
    low, high = np.array([0.0, -0.0], dtype), np.array([-0.0, 0.0], dtype)
    acc = np.empty_like(low)
    two(op, dtype, acc, low, high)
    assert [op == "MIN"] * 2 == np.signbit(acc).tolist()


@pytest.mark.parametrize("nan_first", [True, False])
@pytest.mark.parametrize("op", [*ORDER, "SUM"])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_nan_propagates(isa, dtype, op, nan_first):
    """NaN against anything is NaN, from either side and with either sign."""
    other = np.array([1, -1, 0, 2, -2] * 13, dtype)
    nan = np.full_like(other, np.nan)
    nan[::2] = -nan[::2]
    acc = np.empty_like(other)
    two(op, dtype, acc, *((nan, other) if nan_first else (other, nan)))
    assert [NAN[dtype.name]] * len(acc) == unsigned(acc).tolist()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(isa, dtype):
    """The largest integer plus one is the smallest."""
    info = np.iinfo(dtype)
    acc = np.empty(70, dtype)
    two("SUM", dtype, acc, np.full(70, info.max, dtype), np.ones(70, dtype))
    assert same(np.full(70, info.min, dtype), acc)


def test_average_of_integers_wraps_then_truncates(isa):
    """-3 over 2 ranks is -1; 100 + 100 in int8 is -56, and a half of that is -28."""
    sources = [np.array([-1, 100], np.int8), np.array([-2, 100], np.int8)]
    out = np.empty(2, np.int8)
    many("AVG", np.dtype(np.int8), out, sources)
    assert out.tolist() == [-1, -28]


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_variants_agree(dtype, op):
    """Every instruction set gives the same bits, whatever the bits that went in."""
    sources = [any_bits(dtype, 4099, seed) for seed in range(4)]
    results = set()
    for name in kernels.isas():
        kernels.use_isa(name)
        folded, out = np.empty_like(sources[0]), np.empty_like(sources[0])
        two(op, dtype, folded, *sources[:2])
        many(op, dtype, out, sources)
        results.add((folded.tobytes(), out.tobytes()))
    kernels.use_isa()
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_defined(dtype):
    """Reductions exist where they make sense, and nowhere else."""
    code = kernels.DTYPES[dtype.name]
    names = {op for op, number in kernels.OPS.items() if kernels.supports(number, code)}
    assert set(defined(dtype)) == names

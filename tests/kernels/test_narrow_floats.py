"""8- and 16-bit floats: every bit pattern in, every rounding out, on every instruction set."""

import contextlib
import ctypes

import ml_dtypes
import numpy as np
import pytest

from cydist._native import kernels

FORMATS = [
    pytest.param(np.dtype(np.float16), 0x7E00, id="float16"),
    pytest.param(np.dtype(ml_dtypes.bfloat16), 0x7FC0, id="bfloat16"),
    pytest.param(np.dtype(ml_dtypes.float8_e4m3fn), 0x7F, id="float8_e4m3fn"),
    pytest.param(np.dtype(ml_dtypes.float8_e5m2), 0x7E, id="float8_e5m2"),
]


def every(dtype):
    """All numbers of a format, in the order of their bits."""
    return np.arange(256**dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)


def rounded(wide, dtype, nan):
    """float32 rounded to the format by ml_dtypes or numpy, with one NaN; the bits."""
    with np.errstate(all="ignore"):
        result = wide.astype(np.float32).astype(dtype)
    bits = result.view(f"u{dtype.itemsize}").copy()
    bits[np.isnan(result)] = nan
    return bits


def reduce_two(op, low, high):
    """low op high through the kernel; the bits."""
    acc = np.empty(low.shape, f"u{low.dtype.itemsize}")
    code = kernels.DTYPES[low.dtype.name]
    raw = [x.view(np.uint8) for x in (acc, low, high)]
    kernels.combine(kernels.OPS[op], code, *raw)
    return acc


@pytest.mark.parametrize(("dtype", "nan"), FORMATS)
def test_every_pattern_survives(isa, dtype, nan):
    """Every number plus -0 is itself, through float32 and back; every NaN becomes one."""
    numbers = every(dtype)
    nothing = np.full(numbers.shape, -0.0, dtype)
    expected = numbers.view(f"u{dtype.itemsize}").copy()
    with np.errstate(invalid="ignore"):  # numpy minds signaling NaNs
        expected[np.isnan(numbers)] = nan
    actual = reduce_two("SUM", numbers, nothing)
    assert expected.tolist() == actual.tolist()


@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
@pytest.mark.parametrize(("dtype", "nan"), FORMATS[2:])
def test_every_pair_of_float8(isa, dtype, nan, op):
    """All 65,536 sums and products round as ml_dtypes rounds."""
    low, high = np.repeat(every(dtype), 256), np.tile(every(dtype), 256)
    a, b = low.astype(np.float32), high.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = rounded(a + b if op == "SUM" else a * b, dtype, nan)
    actual = reduce_two(op, low, high)
    assert expected.tolist() == actual.tolist()


@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
@pytest.mark.parametrize(("dtype", "nan"), FORMATS[:2])
def test_every_number_of_16_bits_with_some(isa, dtype, nan, op):
    """Sums and products of every number with the numbers at each format's borders, and with others
    by chance, are those of float32, rounded: ties, subnormals, overflow, NaN of any bits."""
    unsigned = every(dtype).view(np.uint16)
    least_normal = np.array(ml_dtypes.finfo(dtype).smallest_normal, dtype).view(np.uint16)
    infinity = np.array(np.inf, dtype).view(np.uint16)
    borders = [edge + step for edge in (1, int(least_normal), int(infinity)) for step in (-1, 0, 1)]
    chance = np.random.default_rng(16).integers(0, 2**15, 7).tolist()
    for pattern in [*borders, *chance]:
        for sign in (0, 0x8000):
            other = np.full(unsigned.shape, pattern | sign, np.uint16).view(dtype)
            with np.errstate(all="ignore"):  # numpy on ARM minds signaling NaNs
                a, b = every(dtype).astype(np.float32), other.astype(np.float32)
                expected = rounded(a + b if op == "SUM" else a * b, dtype, nan)
            assert np.array_equal(expected, reduce_two(op, every(dtype), other)), hex(pattern)


@pytest.mark.parametrize(
    "factor", [1 / 3, 1 + 2**-11, 1 - 2**-12, 2.0**-9, 1.5 * 2**-20, 255.99, 2.0**100, 2.0**-100]
)
@pytest.mark.parametrize(("dtype", "nan"), FORMATS)
def test_every_number_times_a_factor(isa, dtype, nan, factor):
    """Products of float32 round to nearest even: ties, subnormals, overflow included."""
    numbers = every(dtype)
    with np.errstate(all="ignore"):
        expected = rounded(numbers.astype(np.float32) * np.float32(factor), dtype, nan)
    out = np.empty(numbers.shape, f"u{dtype.itemsize}")
    kernels.prepare(
        kernels.OPS["PREMUL_SUM"],
        kernels.DTYPES[dtype.name],
        out.view(np.uint8),
        numbers.view(np.uint8),
        factor,
    )
    assert expected.tolist() == out.tolist()


@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
@pytest.mark.parametrize("special", ["subnormal", "NaN", "infinity", "-0"])
@pytest.mark.parametrize(("dtype", "nan"), FORMATS[:2])
def test_one_special_number_at_every_place(isa, dtype, nan, special, op):
    """A result that is subnormal, NaN or so is right wherever it stands among others, and so are
    they: numbers that are rounded together do not change each other."""
    places, around = 64, 3 * 64
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    a = np.linspace(1, 2, places * around).astype(dtype).reshape(places, around)
    b = np.linspace(3, 1, places * around).astype(dtype).reshape(places, around)
    pair = {
        "subnormal": (1.5 * least, -least if op == "SUM" else 0.25),
        "NaN": (np.inf, -np.inf if op == "SUM" else 0.0),
        "infinity": (np.inf, 1.0),
        "-0": (-0.0, -0.0 if op == "SUM" else 1.0),
    }[special]
    for place in range(places):
        a[place, place + 50], b[place, place + 50] = pair
    a, b = a.ravel(), b.ravel()
    with np.errstate(all="ignore"):
        wide = a.astype(np.float32), b.astype(np.float32)
        expected = rounded(wide[0] + wide[1] if op == "SUM" else wide[0] * wide[1], dtype, nan)
    assert np.array_equal(expected, reduce_two(op, a, b))


# Bits of x86's MXCSR: subnormal numbers are taken for zero; what would be one becomes zero.
TAKEN_FOR_ZERO, MADE_ZERO = 0x0040, 0x8000


@contextlib.contextmanager
def flushing(bits):
    """This thread's arithmetic treats subnormal numbers so."""
    library = ctypes.CDLL("libm.so.6")
    state = (ctypes.c_uint32 * 8)()  # x86's fenv_t: MXCSR is its last word
    assert library.fegetenv(state) == 0
    before, state[7] = state[7], state[7] | bits
    library.fesetenv(state)
    try:
        yield
    finally:
        state[7] = before
        library.fesetenv(state)


@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
@pytest.mark.parametrize(("dtype", "nan"), FORMATS[:2])
@pytest.mark.parametrize(
    "bits",
    [
        pytest.param(TAKEN_FOR_ZERO, id="taken"),
        pytest.param(MADE_ZERO, id="made"),
        pytest.param(TAKEN_FOR_ZERO | MADE_ZERO, id="both"),
    ],
)
def test_subnormal_numbers_are_flushed_alike(isa, dtype, nan, op, bits):
    """Where a process lets its arithmetic take subnormal numbers for zero, or make them zero,
    every variant gives the bits of the plainest one."""
    numbers = every(dtype)
    for pattern in (0x0001, 0x0081, 0x8080, 0x3F00):
        other = np.full(numbers.shape, pattern, np.uint16).view(dtype)
        found = {}
        for variant in ("baseline", isa):
            kernels.use_isa(variant)
            with flushing(bits):
                found[variant] = reduce_two(op, numbers, other)
        assert np.array_equal(found["baseline"], found[isa]), hex(pattern)

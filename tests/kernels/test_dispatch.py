"""The choice of instruction set, and what the kernels refuse."""

from fractions import Fraction

import numpy as np
import pytest

import cydist as dist
from cydist._native import kernels

SUM, AVG, PREMUL_SUM = (kernels.OPS[name] for name in ("SUM", "AVG", "PREMUL_SUM"))
FLOAT32, INT32, BOOL, COMPLEX64 = (
    kernels.DTYPES[name] for name in ("float32", "int32", "bool", "complex64")
)


def test_baseline_is_always_there():
    """The variant that needs no extension comes first."""
    assert kernels.isas()[0] == "baseline"


def test_the_best_variant_is_chosen():
    """Unless told otherwise, the last one that the machine can run is in use."""
    kernels.use_isa()
    assert kernels.isas()[-1] == kernels.isa()


def test_a_variant_can_be_named():
    """use_isa() switches, and back."""
    kernels.use_isa("baseline")
    named = kernels.isa()
    kernels.use_isa()
    assert named == "baseline"


def test_an_unknown_variant_is_refused():
    """The message lists those that can be had; the one in use stays."""
    before = kernels.isa()
    with pytest.raises(ValueError, match=r"this machine runs the kernels baseline.*'mmx'"):
        kernels.use_isa("mmx")
    assert before == kernels.isa()


def test_the_environment_names_a_variant(monkeypatch):
    """CYDIST_ISA forces a variant when a process joins a job."""
    monkeypatch.setenv("CYDIST_ISA", "baseline")
    dist.init_process_group("tcp", rank=0, world_size=1, store=dist.HashStore())
    forced = kernels.isa()
    dist.destroy_process_group()
    kernels.use_isa()
    assert forced == "baseline"


def test_the_environment_names_an_unknown_variant(monkeypatch):
    """A wrong CYDIST_ISA fails before anybody waits, and names the variable."""
    monkeypatch.setenv("CYDIST_ISA", "sse9")
    with pytest.raises(ValueError, match=r"CYDIST_ISA=sse9: this machine runs .*baseline"):
        dist.init_process_group("tcp", rank=0, world_size=1, store=dist.HashStore())


@pytest.mark.parametrize(
    ("dtype", "factor", "why"),
    [
        ("int32", 0.5, "all_reduce: PREMUL_SUM of int32 needs a whole factor"),
        ("float32", 1j, "all_reduce: PREMUL_SUM of float32 needs a real factor, not 1j"),
        (
            "int64",
            2**53 + 1,
            "all_reduce: PREMUL_SUM of int64 needs a factor that a float64 holds, not 9007199254",
        ),
        ("float64", 10**400, "all_reduce: PREMUL_SUM of float64 needs a factor that a float64"),
    ],
    ids=["whole", "real", "long", "beyond"],
)
def test_a_factor_that_would_be_cut_is_refused(dtype, factor, why):
    """A call with a factor that the dtype cannot hold fails before any traffic."""
    dist.init_process_group("tcp", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(ValueError, match=why):
            dist.all_reduce(np.ones(3, dtype), dist.ReduceOp.PREMUL_SUM(factor))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("factor", [None, "2", np.str_("2"), [2.0], np.ones(2)], ids=repr)
def test_what_is_no_number_is_no_factor(factor):
    """PREMUL_SUM of it makes no reduction, so no call has begun."""
    with pytest.raises(TypeError, match="PREMUL_SUM's factor must be a number, not"):
        dist.ReduceOp.PREMUL_SUM(factor)


@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize(
    "factor",
    [3, 3.0, 3 + 0j, np.int8(3), np.float16(3), np.array(3), np.array([3.0]), Fraction(3)],
    ids=repr,
)
def test_factors_are_numbers_of_any_kind(factor, dtype):
    """Arrays of one number too: what says its number by item(), as tensors do."""
    dist.init_process_group("tcp", rank=0, world_size=1, store=dist.HashStore())
    try:
        x = np.arange(4, dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(factor))
    finally:
        dist.destroy_process_group()
    np.testing.assert_array_equal(3 * np.arange(4, dtype=dtype), x, strict=True)


@pytest.mark.parametrize(
    ("op", "dtype", "factor", "ranks", "why"),
    [
        (kernels.OPS["BAND"], FLOAT32, None, 1, "BAND of float32 is not defined"),
        (kernels.OPS["MAX"], COMPLEX64, None, 1, "MAX of complex64 is not defined"),
        (AVG, BOOL, None, 1, "AVG of bool is not defined"),
        (AVG, FLOAT32, None, 0, "number of ranks, which cannot be 0"),
        (PREMUL_SUM, FLOAT32, None, 1, "PREMUL_SUM of float32 needs a factor"),
        (PREMUL_SUM, INT32, 0.5, 1, "needs a whole factor that fits 64 bits, not 0.5"),
        (PREMUL_SUM, INT32, 2.0**64, 1, "needs a whole factor that fits 64 bits"),
        (PREMUL_SUM, INT32, float("nan"), 1, "needs a whole factor that fits 64 bits, not nan"),
        (PREMUL_SUM, FLOAT32, 1j, 1, "PREMUL_SUM of float32 needs a real factor, not 1j"),
        (SUM, 0, None, 1, "SUM of dtype code 0 is not defined"),
        (SUM, 99, None, 1, "SUM of dtype code 99 is not defined"),
        (0, FLOAT32, None, 1, "op 0 of float32 is not defined"),
    ],
)
def test_refusals_say_why(op, dtype, factor, ranks, why):
    """What is not defined raises ValueError with op, dtype and reason."""
    with pytest.raises(ValueError, match=why):
        kernels.combine(op, dtype, bytearray(8), bytes(8), bytes(8), factor, ranks)


def test_sizes_must_agree():
    """Buffers of different sizes are refused before anything is written."""
    acc = np.full(4, 7, np.float32)
    with pytest.raises(ValueError, match="of one size, not 16 and 12 bytes"):
        kernels.combine(SUM, FLOAT32, acc, np.zeros(4, "f4"), np.zeros(3, "f4"))
    assert acc.tolist() == [7.0] * 4


def test_elements_must_be_whole():
    """Ten bytes are not float32 numbers."""
    with pytest.raises(ValueError, match="10 bytes are not whole elements of 4 bytes"):
        kernels.combine(SUM, FLOAT32, bytearray(10), bytes(10), bytes(10))


def test_strided_operands_are_refused():
    """Reductions take contiguous memory; pack_buffer makes it."""
    strided = np.zeros(8, np.float32)[::2]
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        kernels.combine(SUM, FLOAT32, np.zeros(4, "f4"), strided, strided)


def test_no_source_is_refused():
    """combine_all of nothing has no result."""
    with pytest.raises(ValueError, match="at least one source"):
        kernels.combine_all(SUM, FLOAT32, bytearray(4), [])


def test_read_only_result_is_refused():
    """bytes are not written to."""
    with pytest.raises(BufferError):
        kernels.combine(SUM, FLOAT32, bytes(8), bytes(8), bytes(8))


def test_prepare_copies_when_there_is_no_factor():
    """Only PREMUL_SUM changes a rank's contribution."""
    out = np.zeros(5, np.float32)
    kernels.prepare(SUM, FLOAT32, out, np.arange(5, dtype=np.float32))
    assert out.tolist() == [0, 1, 2, 3, 4]


def test_finish_leaves_sums_alone():
    """Only AVG divides."""
    acc = np.arange(5, dtype=np.float32)
    kernels.finish(SUM, FLOAT32, acc, 2)
    assert acc.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", kernels.DTYPES)
def test_itemsize(name):
    """Elements have the size that numpy or ml_dtypes gives them."""
    dtype = pytest.importorskip("ml_dtypes") and np.dtype(name)
    assert dtype.itemsize == kernels.itemsize(kernels.DTYPES[name])

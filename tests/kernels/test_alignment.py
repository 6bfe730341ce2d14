"""Reductions at any addresses and of any length, on every instruction set: hypothesis chooses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import DTYPES, any_bits, defined, expected, moderate, raw

from cydist._native import kernels

ROOM = 64  # bytes before and after each array: a rank that steps over an end is seen


@st.composite
def memories(draw, arrays):
    """Where each of several arrays begins, how many elements they have, and what kind of bits."""
    starts = [draw(st.integers(0, ROOM - 1)) for _ in range(arrays)]
    count = draw(st.integers(0, 70) | st.integers(1000, 1100) | st.integers(2040, 2200))
    return starts, count, draw(st.sampled_from((any_bits, moderate))), draw(st.integers(0, 999))


def placed(array, start):
    """A copy of the array's bytes at an address that is `start` past a cache line, and all of the
    memory around it."""
    memory = np.full(array.nbytes + 4 * ROOM, 0xA5, np.uint8)
    line = -memory.__array_interface__["data"][0] % ROOM
    around = memory[line : line + array.nbytes + 3 * ROOM]
    place = around[ROOM + start : ROOM + start + array.nbytes]
    place[:] = raw(array)
    return place, around


def reduce_on(variant, op, dtype, places, given_arrays, into):
    """The bytes of the result where it was put, with what lies around it."""
    copies = [placed(array, start) for array, start in zip(given_arrays, places, strict=False)]
    out, around = copies[into] if into < len(copies) else placed(given_arrays[0], places[-1])
    kernels.use_isa(variant)
    factor = 1 if op == "PREMUL_SUM" else None
    sources = [copy for copy, _ in copies]
    kernels.combine_all(kernels.OPS[op], kernels.DTYPES[dtype.name], out, sources, factor)
    kernels.use_isa()
    return out.tobytes(), around.tobytes()


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda ranks: f"{ranks}sources")
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_place_and_length(ranks, data):
    """Reductions of arrays at any addresses, into a new array or over one of them, have the
    oracle's bits on every instruction set, and nothing beside the result is written."""
    dtype = data.draw(st.sampled_from(DTYPES))
    op = data.draw(st.sampled_from(defined(dtype)))
    places, count, values, seed = data.draw(memories(ranks + 1))
    into = data.draw(st.integers(0, ranks))
    arrays = [values(dtype, count, seed + rank) for rank in range(ranks)]
    result = expected(op, arrays, ranks)
    _, around = placed(result, places[into])
    for variant in kernels.isas():
        got = reduce_on(variant, op, dtype, places, arrays, into)
        assert (result.tobytes(), around.tobytes()) == got, (variant, op, count, places, into)

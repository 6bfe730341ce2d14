"""Reductions element by element, against exact oracles, on every instruction set."""

import numpy as np
import pytest

from cydist._native import kernels


@pytest.fixture(params=kernels.isas())
def isa(request):
    """Each variant that this machine can run."""
    kernels.use(request.param)
    yield request.param
    kernels.use()


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float32", "complex128"])
def test_sum_of_two(isa, dtype):
    """combine adds element by element."""
    low = np.arange(33).astype(dtype)
    high = np.arange(33)[::-1].astype(dtype)
    acc = np.empty_like(low)
    kernels.combine(kernels.OPS["SUM"], kernels.DTYPES[dtype], acc, low, high)
    assert np.full(33, 32, dtype).tobytes() == acc.tobytes()

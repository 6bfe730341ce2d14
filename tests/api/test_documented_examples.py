"""Programs of torch.distributed's documents give what the documents print."""

from __future__ import annotations

from typing import Any

import pytest
from documented_examples import EXAMPLES, Arrays, listed

import cydist as dist
from cydist.testing import run_threads


@pytest.fixture(params=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest) -> Arrays:
    """Of which library the arrays are."""
    return Arrays(request.param)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(arrays: Arrays, name: str) -> None:
    """Every rank has what the documents say."""
    example, expected = EXAMPLES[name]
    found = run_threads(lambda rank: listed(example(arrays, rank)), len(expected), "tcp")
    assert found == expected


def test_complex_numbers_do_not_fit_integers(arrays: Arrays) -> None:
    """One of the documents' outputs has the wrong dtype, which is an error before any traffic."""

    def body(rank: int) -> Any:
        x = arrays.new([1, 2], "complex64")
        with pytest.raises(TypeError, match="complex64"):
            dist.all_to_all_single(arrays.zeros(2), x)
        dist.all_reduce(x)
        return listed(x)

    assert run_threads(body, 2, "tcp") == [[2, 4]] * 2

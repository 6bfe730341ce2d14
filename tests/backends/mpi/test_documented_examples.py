"""Over MPI too, programs of torch.distributed's documents give what the documents print."""

from __future__ import annotations

import pytest
from documented_examples import EXAMPLES, Arrays, listed


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, kind: str, rank: int, size: int) -> None:
    """Every rank has what the documents say, in a job of the documented number of ranks."""
    example, expected = EXAMPLES[name]
    if len(expected) == size:
        assert listed(example(Arrays(kind), rank)) == expected[rank]

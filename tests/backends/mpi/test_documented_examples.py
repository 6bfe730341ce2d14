"""Over MPI too, programs of torch.distributed's documents give what the documents print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from documented_examples import EXAMPLES, Arrays, listed


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, kind: str, rank: int, size: int) -> None:
    """Every rank has what the documents say, in a job of the documented number of ranks."""
    example, expected = EXAMPLES[name]
    if len(expected) == size:
        assert listed(example(Arrays(kind), rank)) == expected[rank]


def test_the_same_ranks_as_mpi4py(rank: int, size: int) -> None:
    """mpi4py.md's first program finds the rank and the size that cydist has."""
    page = (Path(__file__).resolve().parents[3] / "docs/guide/mpi4py.md").read_text()
    program = re.search(r"```python\n(from mpi4py.*?)```", page, re.S)
    assert program is not None
    found: dict[str, Any] = {}
    exec(program[1], found)
    assert (found["rank"], found["size"]) == (rank, size)

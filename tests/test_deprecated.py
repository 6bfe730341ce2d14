"""The oldest calls, under their own names."""

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist import deprecated
from cydist.testing import run_threads


def test_lists_of_one_array() -> None:
    """A process with one GPU, or none: each call is the one for single arrays."""

    def body(rank: int) -> Any:
        reduced, given, own = np.full(2, rank + 1.0), np.full(2, rank + 1.0), np.full(2, rank)
        deprecated.all_reduce_multigpu([reduced])
        deprecated.reduce_multigpu([given], 1)
        deprecated.broadcast_multigpu([own], 1)
        gathered = [np.zeros(1), np.zeros(1)]
        work = deprecated.all_gather_multigpu([gathered], [np.full(1, float(rank))], async_op=True)
        work.wait()
        return [x.tolist() for x in (reduced, given, own, *gathered)]

    first, second = run_threads(body, 2)
    assert first == [[3.0, 3.0], [1.0, 1.0], [1, 1], [0.0], [1.0]]
    assert second == [[3.0, 3.0], [3.0, 3.0], [1, 1], [0.0], [1.0]]


def test_more_gpus_in_a_process_are_refused() -> None:
    """UnsupportedError that says how to start a rank for each; nothing is sent."""
    x = np.ones(1)
    with pytest.raises(dist.UnsupportedError, match=r"has 2 entries.*start a rank for each"):
        deprecated.all_reduce_multigpu([x, x])
    with pytest.raises(TypeError, match="must be a list with an entry for each GPU"):
        deprecated.all_reduce_multigpu(x)
    with pytest.raises(ValueError, match="there is no entry 1 in tensor_list"):
        deprecated.broadcast_multigpu([x], 0, src_tensor=1)

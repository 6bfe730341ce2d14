"""MPI as `python -m cydist.bench` runs it beside cydist."""

import numpy as np
import pytest

from cydist.bench.cases import IN_BLOCKS, OPS
from cydist.bench.peers import Mpi4py
from cydist.bench.rank_loop import Session
from cydist.rendezvous.launcher_env import placement


@pytest.mark.parametrize("polled", [False, True], ids=["blocking", "polled"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("op", OPS if placement().size > 1 else sorted(IN_BLOCKS))
def test_every_op(op, dtype, polled):
    """The calls of mpi4py that stand for an op do it, once and in a loop."""
    session = Session(Mpi4py(polled))
    count = 12 * placement().size
    assert session.do({"do": "case", "op": op, "count": count, "dtype": dtype})["wrong"] == 0
    answer = session.do({"do": "round", "iterations": 3, "sampled": True, "checked": True})
    assert (answer["wrong"], len(answer["each_ns"])) == (0, 3)


def test_in_the_background(rank, size):
    """An all_reduce that is begun gives the sum once it was waited for."""
    array = np.full(1000, rank + 1, np.float32)
    Mpi4py().begin(array)()
    assert np.array_equal(array, np.full(1000, size * (size + 1) // 2, np.float32))

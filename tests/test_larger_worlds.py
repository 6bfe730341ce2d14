"""More ranks than most machines have cores."""

import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle


@pytest.mark.parametrize("ranks", [1, 5, 8, 13, 16])
def test_larger_worlds(jobs, ranks):
    """Up to 16 ranks as threads: reduce, gather and exchange."""
    given = [oracle.contribution(rank, 33, np.dtype("f4")) for rank in range(ranks)]

    def body(rank):
        total, gathered = given[rank].copy(), np.zeros(33 * ranks, "f4")
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, given[rank])
        swapped = np.zeros(ranks, "i4")
        dist.all_to_all_single(swapped, np.arange(ranks, dtype="i4") + 100 * rank)
        dist.barrier()
        return total, gathered, swapped

    for rank, (total, gathered, swapped) in enumerate(jobs.get("inproc", ranks).run(body)):
        assert oracle.same_bits(oracle.reduced("SUM", given), total)
        assert oracle.same_bits(np.concatenate(given), gathered)
        assert oracle.same_bits(np.arange(ranks, dtype="i4") * 100 + rank, swapped)

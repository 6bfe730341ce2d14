"""Long calls on several hosts, which go stretch by stretch."""

import itertools

import numpy as np
import pytest
from collective_cases import TINY, Case
from hierarchical_cases import PLACEMENTS, cut_parts_at, pending, placed, status_of

from cydist import _native
from cydist.testing import oracle

STRETCH_BYTES = 1 << 20  # of a long all_reduce by lanes, and of a broadcast between two hosts
LONG_SUMS = {
    "sum": {},
    "in-place": {"in_place": True},
    "bytes": {"dtype": "uint8", "op": "MAX"},
    "complex128": {"dtype": "complex128"},
    "avg": {
        "op": "AVG",
        "values": lambda rank, n, salt: (np.arange(n) % 5 + rank + salt) * 12,
    },
    "premul-sum": {"op": "PREMUL_SUM", "factor": 0.5, "in_place": True},
}


@pytest.mark.parametrize("segment", [8192, 1 << 18])
@pytest.mark.parametrize("given", LONG_SUMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_sum_of_several_stretches(ranks_on, placement, given, segment):
    """The last one has one element, which is in one rank's lane and has no part for most hosts, or
    it is more than half as long as the others."""
    group = ranks_on(placement, "shm")
    cut_parts_at(group, segment)
    itemsize = oracle.DTYPES[LONG_SUMS[given].get("dtype", "float32")].itemsize
    for count in (STRETCH_BYTES // itemsize + 1, 5 * STRETCH_BYTES // (2 * itemsize) + 3):
        case = Case("all_reduce", group.size, count, **LONG_SUMS[given])
        case.check(group.run(case, "lanes", segment=segment))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_broadcast_of_several_stretches(ranks_on, placement):
    """From each root; the last one is one byte long, or half as long as the others."""
    group = ranks_on(placement, "shm")
    for count in (STRETCH_BYTES + 1, 5 * STRETCH_BYTES // 2):
        for root in range(group.size):
            case = Case("broadcast", group.size, count, dtype="uint8", root=root)
            case.check(group.run(case, "lanes", segment=1 << 18))


SCRATCH_BYTES = 1 << 22  # of an array that a call takes at once if it needs memory for its sums
LONG_CALLS = [
    ("reduce", "lanes"), ("reduce", "leaders"), ("reduce_scatter", "lanes"),
    *itertools.product(("scan", "exscan"), ("lanes", "leaders")),
]  # fmt: skip


@pytest.mark.parametrize("given", ["sum", "in-place", "premul-sum"])
@placed(LONG_CALLS)
def test_a_call_of_several_stretches(ranks_on, row, placement, given):
    """The last one has one element, or one of each block; the root is on any host."""
    collective, name = row
    group = ranks_on(placement, "shm")
    blocks = group.size if collective == "reduce_scatter" else 1
    count = (SCRATCH_BYTES // (4 * blocks) + 1) * blocks
    for root in range(group.size) if collective == "reduce" else (0,):
        case = Case(collective, group.size, count, root=root, **LONG_SUMS[given])
        case.check(group.run(case, name, segment=1 << 18))


def test_blocks_of_several_stretches_and_short_ones(ranks_on):
    """A reduce_scatter goes on until the longest block is done."""
    group = ranks_on("2+2+2-mixed", "shm")
    sizes = [0, SCRATCH_BYTES // 4, 5, SCRATCH_BYTES // 8, 1, SCRATCH_BYTES // 24 + 1]
    case = Case("reduce_scatter", group.size, 0, sizes=sizes)
    case.check(group.run(case, "lanes", segment=1 << 18))


@pytest.mark.parametrize("count", [1000, STRETCH_BYTES])
@pytest.mark.parametrize("odd", [0, 1, 3], ids=lambda rank: f"rank{rank}")
def test_another_number_of_stretches_is_a_mismatch_on_all(fresh_ranks_on, odd, count):
    """A rank has one stretch less than the others, or none at all."""
    group = fresh_ranks_on("2+2")
    case = Case("all_reduce", group.size, STRETCH_BYTES)
    other = Case("all_reduce", group.size, count // 2)

    def body(rank):
        return status_of(group, other if rank == odd else case, "lanes", rank)

    assert group.each(body) == ["mismatch"] * group.size


@pytest.mark.parametrize("missing", [0, 3], ids=lambda rank: f"rank{rank}")
def test_a_rank_that_misses_a_long_sum_is_a_timeout(fresh_ranks_on, missing):
    """Ranks withdraw the messages of all stretches that they have begun."""
    group = fresh_ranks_on("2+2")
    case = Case("all_reduce", group.size, STRETCH_BYTES)
    ended = {}

    def body(rank):
        if rank != missing:
            with pytest.raises(_native.CallError) as error:
                case.run(group.groups[rank], rank, "lanes", 1, TINY, 0.3)
            ended[rank] = error.value.status

    group.each(body)
    assert len(ended) == group.size - 1
    assert "timeout" in ended.values()
    for rank in ended:
        group.groups[rank].close()
        assert pending(group.links[rank]) == (0, 0)

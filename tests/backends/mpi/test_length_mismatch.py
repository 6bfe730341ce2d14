"""Ranks that disagree about lengths: MPI writes to no memory beyond an array, on any rank."""

import numpy as np
import pytest

import cydist as dist


class Guarded:
    """Arrays of zeros between others that nobody may write to, of as many floats on either side as
    any rank has in all."""

    def __init__(self, most):
        self.most = most
        self.around = []

    def __call__(self, count):
        whole = np.full(count + 2 * self.most, 7, np.float32)
        mine = whole[self.most : self.most + count]
        mine[:] = 0
        self.around += [whole[: self.most], whole[self.most + count :]]
        return mine

    def touched(self):
        """Of how many floats beyond the arrays is the value another one?"""
        return sum(int(np.count_nonzero(each != 7)) for each in self.around)


CALLS = {
    "all_reduce": lambda g, size, zeros, n: dist.all_reduce(zeros(n), group=g),
    "reduce": lambda g, size, zeros, n: dist.reduce(zeros(n), 0, group=g),
    "reduce_scatter": lambda g, size, zeros, n: dist.reduce_scatter_tensor(
        zeros(n), zeros(size * n), group=g
    ),
    "broadcast": lambda g, size, zeros, n: dist.broadcast(zeros(n), 1, g),
    "all_gather": lambda g, size, zeros, n: dist.all_gather_into_tensor(
        zeros(size * n), zeros(n), g
    ),
    "all_to_all": lambda g, size, zeros, n: dist.all_to_all_single(
        zeros(size * n), zeros(size * n), group=g
    ),
}


def mismatched(group, spare, rank, size, usual, odd):
    """Rank 1 makes the odd call, and the others the usual one. What its error says, on each rank;
    nothing is written beyond the arrays."""
    call, count = odd if rank == 1 else usual
    zeros = Guarded(size * max(usual[1], odd[1]))

    def calls():
        for _ in range(2):
            CALLS[call](group, size, zeros, count)
        dist.barrier(group)  # who only sends may learn it here

    with pytest.raises(dist.MismatchError) as caught:
        calls()
    dist.barrier(spare)  # MPI writes nothing more
    assert zeros.touched() == 0
    return str(caught.value)


@pytest.mark.parametrize("odd_is_short", [False, True], ids=["odd-is-long", "odd-is-short"])
@pytest.mark.parametrize(
    ("short", "long"),
    [(300, 40000), (1300, 10000), (10000, 40000), (40000, 90000)],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_mismatch_of_lengths_writes_nowhere_else(
    group, rank, size, spare, call, short, long, odd_is_short
):
    """Of more bytes than Open MPI sends at once, it would write all of them. 300 floats, 1,300,
    10,000 and 40,000 are carried in different ways."""
    usual, odd = (long, short) if odd_is_short else (short, long)
    message = mismatched(group, spare, rank, size, (call, usual), (call, odd))
    for count in (short, long):
        assert f" {count} " in message or f" {size * count} " in message


@pytest.mark.parametrize(("usual_count", "odd_count"), [(40000, 300), (1300, 40000)])
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (usual, odd)
        for usual in ("broadcast", "all_gather", "all_to_all")
        for odd in CALLS
        if odd != usual
    ],
)
def test_different_calls_write_nowhere_else(
    group, rank, size, spare, usual, odd, usual_count, odd_count
):
    """Whatever carries them: what one rank sends may be more than the other has room for."""
    message = mismatched(group, spare, rank, size, (usual, usual_count), (odd, odd_count))
    assert usual in message
    assert odd in message

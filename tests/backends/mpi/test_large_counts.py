"""More elements than MPI's counts can say, in every call. Deselected unless asked for:
scripts/test-heavy. Two ranks, with some 4 GiB each."""

import numpy as np
import pytest

import cydist as dist

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

COUNT = 2**31 + 6  # int8
HALF = COUNT // 2
PATTERN = (np.arange(251 * 8192) % 251).astype("i1")
DEADLINE = 500.0


@pytest.fixture
def pair():
    """A group of two ranks; the others have nothing to do."""
    made = dist.new_group([0, 1], timeout=DEADLINE)
    dist.barrier()
    yield made
    dist.barrier(timeout=DEADLINE)
    dist.destroy_process_group(made)


def chunks(array):
    """The array in pieces of the pattern's length; the last is shorter."""
    return (array[at : at + PATTERN.size] for at in range(0, array.size, PATTERN.size))


def times(factor):
    """The pattern with each element multiplied, modulo 256."""
    return PATTERN * np.int8(factor)


def filled(count, factor):
    """That again and again."""
    array, pattern = np.empty(count, "i1"), times(factor)
    for chunk in chunks(array):
        chunk[...] = pattern[: chunk.size]
    return array


def holds(array, pattern):
    """Is the array such a pattern again and again, to the last element?"""
    return all(np.array_equal(chunk, pattern[: chunk.size]) for chunk in chunks(array))


def broadcast(group, rank):
    """Every element of the root's array arrives."""
    x = filled(COUNT, rank)
    dist.broadcast(x, 1, group)
    return holds(x, times(1))


def all_reduce(group, rank):
    """Every element is reduced once, by MPI itself."""
    x = filled(COUNT, 1 + 2 * rank)
    dist.all_reduce(x, dist.ReduceOp.BXOR, group)
    return holds(x, times(1) ^ times(3))


def all_reduce_of_ours(group, rank):
    """A reduction that no MPI has."""
    x = filled(COUNT, 1 + 2 * rank)
    dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(3), group)
    return holds(x, times(12))


def reduce(group, rank):
    """Into the root's array."""
    x = filled(COUNT, 1 + 2 * rank)
    dist.reduce(x, 1, dist.ReduceOp.BXOR, group)
    return holds(x, times(1) ^ times(3) if rank == 1 else times(1))


def scan(group, rank):
    """The sum of the ranks so far."""
    x = filled(COUNT, 1 + 2 * rank)
    dist.scan(x, group=group)
    return holds(x, times(4 if rank == 1 else 1))


def exscan(group, rank):
    """The sum of the ranks before; the first keeps what it has."""
    x = filled(COUNT, 1 + 2 * rank)
    dist.exscan(x, group=group)
    return holds(x, times(1))


def all_gather(group, rank):
    """Two blocks, in one array."""
    x = np.zeros(COUNT, "i1")
    dist.all_gather_into_tensor(x, filled(HALF, 1 + rank), group)
    return holds(x[:HALF], times(1)) and holds(x[HALF:], times(2))


def reduce_scatter(group, rank):
    """The sum of one block."""
    x = np.empty(COUNT, "i1")
    x[:HALF], x[HALF:] = filled(HALF, 1 + rank), filled(HALF, 3 + rank)
    out = np.zeros(HALF, "i1")
    dist.reduce_scatter_tensor(out, x, group=group)
    return holds(out, times((3, 7)[rank]))


def all_to_all(group, rank):
    """A block for each."""
    x = np.empty(COUNT, "i1")
    x[:HALF], x[HALF:] = filled(HALF, 1 + rank), filled(HALF, 3 + rank)
    out = np.zeros(COUNT, "i1")
    dist.all_to_all_single(out, x, group=group)
    first = (1, 3)[rank]
    return holds(out[:HALF], times(first)) and holds(out[HALF:], times(first + 1))


def gather(group, rank):
    """A long block and a short one, to the root, and back."""
    own = filled(COUNT, 5) if rank else np.full(1, 7, "i1")
    outputs = None if rank else [np.zeros(1, "i1"), np.zeros(COUNT, "i1")]
    dist.gather(own, outputs, 0, group)
    own[...] = 0
    dist.scatter(own, outputs, 0, group)
    return holds(own, times(5)) if rank else own[0] == 7


def send(group, rank):
    """One message is as long as memory allows."""
    if rank == 0:
        dist.send(filled(COUNT, 3), 1, group)
        return True
    x = np.zeros(COUNT, "i1")
    dist.recv(x, 0, group)
    return holds(x, times(3))


CALLS = [
    broadcast, all_reduce, all_reduce_of_ours, reduce, scan, exscan, all_gather, reduce_scatter,
    all_to_all, gather, send,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=[call.__name__ for call in CALLS])
def test_counts_beyond_31_bits(pair, rank, call):
    """Every element of 2**31 + 6 is where it belongs."""
    assert rank > 1 or call(pair, rank)

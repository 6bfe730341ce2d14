"""What calls take beyond their arrays on MPI: at most 16 MiB, as docs/guide/arrays.md says."""

import gc

import numpy as np
import pytest

import cydist as dist
from cydist.bench.rank_loop import resident

BOUND = 16 << 20
COUNT = 10 << 20  # float32: 40 MiB


def floats(count):
    """(count,) elements in memory that is there."""
    return np.ones(count, np.float32)


def strided():
    """(COUNT,) elements with gaps."""
    return np.ones((COUNT, 2), np.float32)[:, 0]


def apart(size):
    """Arrays that make COUNT elements, none behind the one before it."""
    return [floats(COUNT // size) for _ in range(size)][::-1]


CALLS = {
    "all_gather": lambda size: (dist.all_gather, apart(size), floats(COUNT // size)),
    "reduce_scatter": lambda size: (dist.reduce_scatter, floats(COUNT // size), apart(size)),
    "all_to_all": lambda size: (dist.all_to_all, apart(size), apart(size)),
    "all_reduce, strided": lambda size: (dist.all_reduce, strided()),
    "broadcast, strided": lambda size: (dist.broadcast, strided(), 0),
    "reduce, strided": lambda size: (dist.reduce, strided(), 0),
    "scan, strided": lambda size: (dist.scan, strided()),
}


@pytest.mark.parametrize("name", CALLS)
def test_extra_memory_is_bounded(group, size, name):
    """Lists of blocks that lie apart, and strided arrays, of 40 MiB."""
    if size == 1:
        return  # nothing moves
    dist.barrier(group)  # what a group takes at its first call is not the call's
    call, *arguments = CALLS[name](size)
    gc.collect()
    before = resident("VmRSS", reset_peak=True)
    call(*arguments, group=group)
    assert resident("VmHWM") - before < BOUND


def test_messages_with_gaps_are_not_packed(group, rank, size):
    """MPI gets 40 MiB of rows as they lie, where it carries them."""
    if size == 1 or group.windows:
        return  # no message goes by MPI
    x = np.ones((COUNT // 1024, 2048), np.float32)[:, :1024]
    dist.barrier(group)
    gc.collect()
    before = resident("VmRSS", reset_peak=True)
    if rank == 0:
        dist.send(x, 1, group)
    if rank == 1:
        dist.recv(x, 0, group)
    assert resident("VmHWM") - before < BOUND


def test_the_last_element_of_a_long_strided_array(group, size):
    """Everything, piece by piece, is reduced once."""
    x = strided()
    x[...] = np.arange(COUNT) % 1009
    dist.all_reduce(x, group=group)
    assert np.array_equal(x, np.arange(COUNT) % 1009 * size)

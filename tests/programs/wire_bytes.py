"""A rank of a job on several hosts: it checks each collective, and says what its host has sent.

Prints one line for each collective: the counter of the bytes that the host's interface has sent,
before this rank's first call and after its last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import cydist as dist

CALLS = 4  # of each collective, between two readings
ROOT = 1  # not the first of its host, or on the second host


def sent() -> int:
    """Return the bytes that the host's interface has sent."""
    (line,) = [each for each in Path("/proc/net/dev").read_text().splitlines() if "eth:" in each]
    return int(line.split(":")[1].split()[8])


def main(nbytes: int) -> None:
    """Measure calls of this size, of the whole array or of all blocks."""
    dist.init_process_group("tcp", timeout=120)
    rank, p = dist.get_rank(), dist.get_world_size()
    count = nbytes // 8 // p * p
    whole = np.arange(count, dtype=np.int64)
    x, block = np.empty_like(whole), np.empty(count // p, np.int64)
    mine = slice(rank * block.size, (rank + 1) * block.size)

    def broadcast() -> None:
        x[:] = whole if rank == ROOT else -1
        dist.broadcast(x, ROOT)
        assert np.array_equal(x, whole)

    def all_reduce() -> None:
        x[:] = whole + rank
        dist.all_reduce(x)
        assert np.array_equal(x, p * whole + p * (p - 1) // 2)

    def reduce() -> None:
        x[:] = whole + rank
        dist.reduce(x, ROOT)
        assert rank != ROOT or np.array_equal(x, p * whole + p * (p - 1) // 2)

    def all_gather() -> None:
        dist.all_gather_into_tensor(x, whole[mine])
        assert np.array_equal(x, whole)

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(block, whole + rank)
        assert np.array_equal(block, p * whole[mine] + p * (p - 1) // 2)

    for call in (broadcast, all_reduce, reduce, all_gather, reduce_scatter, dist.barrier):
        call()  # connects
        dist.barrier()
        before = sent()
        for _ in range(CALLS):
            call()
        dist.barrier()
        print(json.dumps([call.__name__, before, sent()]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


main(int(sys.argv[1]))

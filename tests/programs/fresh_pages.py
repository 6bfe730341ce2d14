"""A rank of a job on several hosts: it says how much memory its long calls take from the system.

    fresh_pages.py BYTES

Rank 0 prints one line for each collective: its name, and the pages that the system gave a rank in
each call, by those of the whole array; of the rank with most. The first calls do not count.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable

import numpy as np

import cydist as dist

FIRST, CALLS = 2, 3


def pages() -> int:
    """Return how often this process touched a page that it did not have."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(nbytes: int) -> None:
    """Measure calls of this size, of the whole array or of all blocks."""
    dist.init_process_group("tcp", timeout=120)
    rank, p = dist.get_rank(), dist.get_world_size()
    whole = np.ones(nbytes // 8 // p * p)
    other, block = np.ones_like(whole), np.ones(whole.size // p)
    blocks = np.split(other, p) if rank == 0 else None
    root = p - 1
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(whole, root),
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(whole, root, dist.ReduceOp.MAX),
        "reduce to rank 0": lambda: dist.reduce(whole, 0, dist.ReduceOp.MAX),
        "scan": lambda: dist.scan(whole, dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, block),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "gather": lambda: dist.gather(block, blocks, 0),
        "scatter": lambda: dist.scatter(block, blocks, 0),
    }
    for name, call in calls.items():
        for _ in range(FIRST):
            call()
        dist.barrier()
        before = pages()
        for _ in range(CALLS):
            call()
        taken = np.array([pages() - before])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if rank == 0:
            share = int(taken[0]) / CALLS / (whole.nbytes / resource.getpagesize())
            print(json.dumps([name, share]), flush=True)
    dist.destroy_process_group()


main(int(sys.argv[1]))

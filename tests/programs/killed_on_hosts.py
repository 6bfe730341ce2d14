"""A rank of a job on several hosts, one of whose ranks dies in the middle of a call.

    killed_on_hosts.py COLLECTIVE BYTES VICTIM FAILPOINT

The survivors print a JSON object: the class of their error, the ranks that it names, the size of
the group that they shrink to, and its sums. They check them.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np

import cydist as dist
from cydist import _native

LIMIT = 30.0  # seconds, of a call


def call(name: str, x: np.ndarray[Any, Any], root: int) -> None:
    """Make a call of a collective; `x` has a multiple of the ranks' number of elements."""
    size = dist.get_world_size()
    block = x[: x.size // size].copy()
    match name:
        case "broadcast":
            dist.broadcast(x, group_src=root)
        case "all_reduce":
            dist.all_reduce(x)
        case "reduce":
            dist.reduce(x, group_dst=root)
        case "all_gather":
            dist.all_gather_into_tensor(x, block)
        case "reduce_scatter":
            dist.reduce_scatter_tensor(block, x)
        case "all_to_all":
            dist.all_to_all_single(np.empty_like(x), x)
        case "gather":
            into = [np.empty_like(block) for _ in range(size)]
            dist.gather(block, into if dist.get_rank() == root else None, group_dst=root)
        case "scatter":
            blocks = np.split(x, size) if dist.get_rank() == root else None
            dist.scatter(block, blocks, group_src=root)
        case "scan":
            dist.scan(x)
        case "barrier":
            dist.barrier()


def main(name: str, nbytes: int, victim: int, failpoint: str) -> None:
    """Call until a rank dies, and go on without it."""
    dist.init_process_group("tcp", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.zeros(nbytes // 8 // size * size)
    call(name, x, 0)
    dist.barrier()
    if rank == victim:
        _native.arm_failpoint(failpoint)
    try:
        for number in itertools.count():
            call(name, x, number % size)
    except dist.DistError as error:
        found = {"kind": type(error).__name__, "ranks": error.ranks, "text": str(error)}
    dist.shrink_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 1 << 17):
        y = np.arange(count * size, dtype=np.int64) + rank
        dist.all_reduce(y)
        assert np.array_equal(y, np.arange(y.size) * size + size * (size - 1) // 2)
        dist.all_gather_into_tensor(y, np.full(count, rank))
        assert np.array_equal(y, np.repeat(np.arange(size), count))
        block = np.empty(count, np.int64)
        dist.reduce_scatter_tensor(block, y)
        assert np.array_equal(block, np.full(count, rank * size))
    print(json.dumps(found | {"left": size}), flush=True)
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

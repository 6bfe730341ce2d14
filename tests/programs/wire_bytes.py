"""A rank of a job on several hosts: it checks each collective, and says what its host has sent.

    wire_bytes.py BYTES ROOT CALLS

Prints one line for each collective: its name, and how many bytes the interface of the host has
sent, before the first call of this rank and after its last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import cydist as dist


def sent() -> int:
    """Return the bytes that the host's interface has sent."""
    (line,) = [each for each in Path("/proc/net/dev").read_text().splitlines() if "eth:" in each]
    return int(line.split(":")[1].split()[8])


def main(nbytes: int, root: int, calls: int) -> None:
    """Measure calls of this size, of the whole array or of all blocks."""
    dist.init_process_group("tcp", timeout=120)
    rank, p = dist.get_rank(), dist.get_world_size()
    count = max(nbytes // 8 // p, 1) * p
    whole = np.arange(count, dtype=np.int64)
    x, block = np.empty_like(whole), np.empty(count // p, np.int64)
    mine = slice(rank * block.size, (rank + 1) * block.size)
    lower = rank * (rank - 1) // 2  # the sum of the ranks below
    # The ranks on one side of a square have more for those on the other side.
    uneven = [[(1 + 2 * ((a + b) % 2)) * block.size // 2 for b in range(p)] for a in range(p)]

    def broadcast() -> None:
        x[:] = whole if rank == root else -1
        dist.broadcast(x, root)
        assert np.array_equal(x, whole)

    def all_reduce() -> None:
        x[:] = whole + rank
        dist.all_reduce(x)
        assert np.array_equal(x, p * whole + p * (p - 1) // 2)

    def reduce() -> None:
        x[:] = whole + rank
        dist.reduce(x, root)
        assert rank != root or np.array_equal(x, p * whole + p * (p - 1) // 2)

    def all_gather() -> None:
        dist.all_gather_into_tensor(x, whole[mine])
        assert np.array_equal(x, whole)

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(block, whole + rank)
        assert np.array_equal(block, p * whole[mine] + p * (p - 1) // 2)

    def gather() -> None:
        dist.gather(whole[mine], np.split(x, p) if rank == root else None, root)
        assert rank != root or np.array_equal(x, whole)

    def scatter() -> None:
        dist.scatter(block, np.split(whole, p) if rank == root else None, root)
        assert np.array_equal(block, whole[mine])

    def all_to_all() -> None:
        dist.all_to_all_single(x, whole + rank)
        assert np.array_equal(x, np.concatenate([whole[mine] + peer for peer in range(p)]))

    def uneven_all_to_all() -> None:
        gives, gets = uneven[rank], [row[rank] for row in uneven]
        into = np.full(sum(gets), -1, np.int64)
        dist.all_to_all_single(into, np.full(sum(gives), rank), gets, gives)
        assert np.array_equal(into, np.repeat(np.arange(p), gets))

    def scan() -> None:
        x[:] = whole + rank
        dist.scan(x)
        assert np.array_equal(x, (rank + 1) * whole + lower + rank)

    def exscan() -> None:
        x[:] = whole + rank
        dist.exscan(x)
        assert rank == 0 or np.array_equal(x, rank * whole + lower)

    for call in (broadcast, all_reduce, reduce, all_gather, reduce_scatter, gather, scatter,
                 all_to_all, uneven_all_to_all, scan, exscan, dist.barrier):  # fmt: skip
        call()  # connects
        dist.barrier()
        before = sent()
        for _ in range(calls):
            call()
        dist.barrier()
        print(json.dumps([call.__name__, before, sent()]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


main(*map(int, sys.argv[1:]))

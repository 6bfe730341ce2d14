"""The memory of a rank among many on this machine.

    rank_memory.py [RANKS [TRANSPORT]]      256 ranks, shm or tcp

Prints what a process takes more than before init_process_group, the median and the most of all
ranks, in MiB: memory of its own, and its share of shared memory. The ranks are forked, so that they
share Python and its modules.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import numpy as np

import cydist as dist

KINDS = {"own": ("Private_Clean", "Private_Dirty"), "with its share of the shared": ("Pss",)}
TIMEOUT = 500


def held() -> list[float]:
    """Return the MiB of this process, by KINDS."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return [sum(sizes[name] for name in names) for names in KINDS.values()]


def rank_of_many(rank: int) -> None:
    """Take part, and report on rank 0."""
    x, all_of = np.ones(2), np.ones(2 * dist_size())
    before = held()
    stages = {}
    dist.init_process_group("tcp", timeout=TIMEOUT)
    dist.all_reduce(x)
    stages["start and all_reduce of 16 bytes"] = held()
    dist.all_gather_into_tensor(all_of, x)
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.barrier()
    stages["and all_gather, broadcast, reduce, barrier"] = held()
    dist.all_to_all_single(np.ones(dist_size()), np.ones(dist_size()))
    stages["and all_to_all"] = held()
    for name, now in stages.items():
        gained: list[list[float]] = [[]] * dist_size()
        dist.all_gather_object(gained, [b - a for a, b in zip(before, now, strict=True)])
        if rank == 0:
            for kind, column in zip(KINDS, zip(*gained, strict=True), strict=True):
                print(
                    f"{name}: {kind}: median {statistics.median(column):.2f} MiB, "
                    f"most {max(column):.2f}",
                    flush=True,
                )
    dist.destroy_process_group()


def dist_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    os.environ["CYDIST_TRANSPORT"] = sys.argv[2] if len(sys.argv) > 2 else "shm"
    print(f"{ranks} ranks, transport {os.environ['CYDIST_TRANSPORT']}")
    dist.spawn(rank_of_many, nprocs=ranks, start_method="fork")

"""How long calls over MPI take by our algorithms, beside MPI's own by the same checks.

    CYDIST_TRANSPORT=mpi mpirun -n 4 python tests/programs/mpi_algorithms_time.py

Both ways by turns in one job; microseconds per call of float32, medians of the rounds on rank 0.
"""

import argparse
import os
import statistics
import time

import numpy as np

import cydist as dist
from cydist.tuning import table as tuning_table

OURS = {
    "barrier": "dissemination",
    "broadcast": "tree",
    "all_reduce": "doubling",
    "all_gather": "bruck",
    "reduce_scatter": "pairwise",
    "all_to_all": "pairwise",
}


def calls_of(nbytes, size):
    """The calls of so many bytes in all, by the name of the collective."""
    array = np.zeros(nbytes // 4, np.float32)
    part = np.zeros(max(1, nbytes // 4 // size), np.float32)
    whole, other = np.zeros((2, size * part.size), np.float32)
    return {
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(array, 0),
        "all_reduce": lambda: dist.all_reduce(array),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }


def timed(call, times):
    """Seconds per call, of all ranks together."""
    for _ in range(3):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    dist.barrier()
    return (time.perf_counter() - start) / times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="8,1024,4096,16384", help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("mpi")
    found = {}
    for turn in range(options.rounds):
        for way in ("ours", "MPI's") if turn % 2 else ("MPI's", "ours"):
            os.environ["CYDIST_ALGORITHM"] = ",".join(
                f"{name}:{ours if way == 'ours' else 'native'}" for name, ours in OURS.items()
            )
            tuning_table.reload()
            for nbytes in map(int, options.sizes.split(",")):
                for name, call in calls_of(nbytes, dist.get_world_size()).items():
                    found.setdefault((name, nbytes), {}).setdefault(way, []).append(
                        timed(call, 300)
                    )
    if dist.get_rank() == 0:
        for (name, nbytes), ways in found.items():
            ours, theirs = (1e6 * statistics.median(ways[way]) for way in ("ours", "MPI's"))
            print(
                f"{name:15} {nbytes:6}  ours {ours:7.2f}  MPI's {theirs:7.2f}  {ours / theirs:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

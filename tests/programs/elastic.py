"""A rank of an elastic job: it sums ones until it is told to stop, over argv[1], cydist or gloo.

Lines say what it finds: "start", its round's world size, and "end". The folder argv[2], which all
hosts see, holds the files by which a test tells it what to do: `stop`, and `fail`, which one rank
takes and fails.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np

TIMEOUT = timedelta(seconds=60)
LIBRARY, FOLDER = sys.argv[1], Path(sys.argv[2])


def say(*words: object) -> None:
    """Print a line in one write, as torchrun's ranks share one stdout."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def meet() -> tuple[Callable[[np.ndarray], object], Callable[[], object]]:
    """Meet the others; return a function that sums an array in place, and one that leaves."""
    if LIBRARY == "gloo":
        import torch
        import torch.distributed as torch_dist

        torch_dist.init_process_group("gloo", timeout=TIMEOUT)
        return (
            lambda array: torch_dist.all_reduce(torch.from_numpy(array)),
            torch_dist.destroy_process_group,
        )
    import cydist as dist

    dist.init_process_group("tcp", timeout=TIMEOUT)
    return dist.all_reduce, dist.destroy_process_group


def is_taken(name: str) -> bool:
    """Return whether this rank is the one that takes a file away."""
    try:
        os.rename(FOLDER / name, FOLDER / f"{name}-{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say("start", os.getpid())
    all_reduce, leave = meet()
    told = False
    while True:
        found = np.array([1.0, float(rank), 0.0])
        found[2] = float(rank == 0 and (FOLDER / "stop").exists())
        all_reduce(found)
        assert found[:2].tolist() == [size, size * (size - 1) / 2], found
        if not told:
            say("world", size, "rank", rank)
            told = True
        if found[2]:
            break
        if rank and is_taken("fail"):
            raise RuntimeError("told to fail")
        time.sleep(0.05)
    leave()
    say("end", rank)


main()

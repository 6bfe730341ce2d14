"""The arguments of init_process_group, as the rendezvous handlers take them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from cydist.tuning.file import MOST_RANKS

if TYPE_CHECKING:
    from urllib.parse import SplitResult  # slow to import, and env:// needs no URL


class InitArguments(NamedTuple):
    """The arguments of init_process_group, for the handlers. None: not given."""

    url: SplitResult | None
    rank: int | None
    world_size: int | None
    group_name: str
    deadline: float
    shared_stores: ExitStack  # closed when all have met

    @property
    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def with_rank(self, how: str) -> tuple[int, int]:
        """Return rank and world size, which must be known by now."""
        rank, size = self.rank, self.world_size
        if rank is None or size is None:
            lacking = [
                name
                for name, value in (("rank (RANK)", rank), ("world_size (WORLD_SIZE)", size))
                if value is None
            ]
            raise ValueError(
                f"{how} needs {' and '.join(lacking)}: pass it, set the variable, or start the "
                "ranks with cydistrun, torchrun, mpirun or srun. Without a launcher, as in a "
                "notebook, rank=0 and world_size=1 make a job of this process alone, and "
                "cydist.testing.run_threads runs a function on several ranks that are threads"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to {size - 1}, not {rank}")
        check_size(size)
        return rank, size


def check_size(size: int) -> None:
    """Raise ValueError for more ranks than any job has: their names alone would fill the memory."""
    if size > MOST_RANKS:
        raise ValueError(f"world_size (WORLD_SIZE) must be at most {MOST_RANKS}, not {size}")

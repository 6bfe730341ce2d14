"""Torch groups for tests: the ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from cydist.interop.torch import create
from cydist.testing import ThreadJob

SECONDS = 30


def options(
    store: Any,
    rank: int,
    size: int,
    ranks: tuple[int, ...] = (),
    name: str = "0",
    timeout: timedelta = timedelta(seconds=SECONDS),
) -> SimpleNamespace:
    """What torch passes to the function that makes a group."""
    return SimpleNamespace(
        store=dist.PrefixStore(f"{name}/", store),
        group_rank=rank,
        group_size=size,
        timeout=timeout,
        group_id=name,
        global_ranks_in_group=list(ranks),
    )


class Job:
    """Ranks that are threads, each with a torch group of all of them."""

    def __init__(self, size: int, timeout: timedelta = timedelta(seconds=SECONDS)) -> None:
        self.size = size
        self.threads = ThreadJob(size)
        self.store = dist.HashStore()
        self.groups = self.threads.run(
            lambda rank: create(options(self.store, rank, size, timeout=timeout))
        )

    def run(self, body: Callable[[Any], Any]) -> list[Any]:
        """Call `body(group)` on every rank; what they return, by rank."""
        return self.threads.run(lambda rank: body(self.groups[rank]))

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.threads.close()

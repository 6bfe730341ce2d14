"""How the ranks of a group on GPUs come together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.errors import RendezvousError


def test_options_on_some_ranks_only_are_refused(gpu_jobs: Any, gpus: Any) -> None:
    """Those that give none would make the group out of the default one's connections, and wait
    there for the others. The next group is made, and its stream may differ from rank to rank."""
    options = dist.ProcessGroupNCCL.Options

    def body(rank: int) -> float:
        with pytest.raises(RendezvousError, match="on rank 0; 'nccl with pg_options' on rank 1"):
            dist.new_group(pg_options=options() if rank else None)
        group = dist.new_group(pg_options=options(is_high_priority_stream=rank == 1))
        array = gpus.array(np.ones(1))
        dist.all_reduce(array, group=group)
        return float(array.get()[0])

    assert gpu_jobs.get(2).run(body) == [2.0, 2.0]


def test_another_backend_on_one_rank_is_refused(gpu_jobs: Any) -> None:
    """Each would wait for the other's ranks."""

    def body(rank: int) -> None:
        with pytest.raises(RendezvousError, match=r"'nccl' on rank 0; 'cpu:tcp,cuda:"):
            dist.new_group([1, 0], backend="cpu:tcp,cuda:nccl" if rank else "nccl")

    gpu_jobs.get(2).run(body)

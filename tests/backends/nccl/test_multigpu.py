"""Several GPUs in each process: the calls on lists, over the stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cydist import deprecated

EACH = 3  # GPUs of a process


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_process_with_several_gpus(gpu_jobs: Any, gpus: Any, async_op: bool) -> None:
    """Each array is on a GPU of its own, and all are ranks of one communicator."""
    ranks = 2

    def body(rank: int) -> list[Any]:
        def made(width: int) -> list[Any]:
            return [gpus.array_on(n, np.full(width, n + 1.0)) for n in here]

        def over(work: Any) -> None:
            if async_op:
                work.wait()

        here = range(rank * EACH, (rank + 1) * EACH)
        given, reduced, rooted = made(1), made(1000), made(1)
        outs = [[gpus.array_on(n, np.zeros(1)) for _ in range(ranks * EACH)] for n in here]
        over(deprecated.broadcast_multigpu(given, 1, async_op=async_op, src_tensor=1))
        over(deprecated.all_reduce_multigpu(reduced, async_op=async_op))
        over(deprecated.reduce_multigpu(rooted, 0, async_op=async_op, dst_tensor=2))
        over(deprecated.all_gather_multigpu(outs, made(1), async_op=async_op))
        return [
            [float(x.get()[-1]) for x in given + reduced + rooted],
            [[float(x.get()[0]) for x in out] for out in outs],
        ]

    first, second = gpu_jobs.get(ranks).run(body)
    everything = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * EACH
    assert first == [[5.0] * EACH + [21.0] * EACH + [1.0, 2.0, 21.0], everything]
    assert second == [[5.0] * EACH + [21.0] * EACH + [4.0, 5.0, 6.0], everything]

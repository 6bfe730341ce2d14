"""A rank of a job on slow hosts: it says how often its connections have paused.

Prints one line: the pauses in calls that go both ways, until each rank has had some, and in ten
broadcasts.
"""

from __future__ import annotations

import json

import numpy as np

import cydist as dist

COUNT = 1 << 19  # of int64: 4 MiB
MOST_CALLS = 200


def pauses() -> int:
    """Return how often a connection of this rank has paused."""
    native = dist.group.WORLD.native  # type: ignore[union-attr]
    return native.link.messages.statistics()["pauses"]


def main() -> None:
    """Make calls of both kinds, and check them."""
    dist.init_process_group("tcp", timeout=60)
    rank, p = dist.get_rank(), dist.get_world_size()
    whole = np.arange(COUNT, dtype=np.int64)
    x = np.empty_like(whole)
    fewest = np.zeros(1, np.int64)
    for _ in range(MOST_CALLS):
        x[:] = whole + rank
        dist.all_reduce(x)
        assert np.array_equal(x, p * whole + p * (p - 1) // 2)
        fewest[0] = pauses()
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        if fewest[0] > 0:
            break
    both_ways = pauses()
    for call in range(11):
        if call == 1:  # the first follows bytes that came
            before = pauses()
        x[:] = whole if rank == 0 else -1
        dist.broadcast(x, 0)
        assert np.array_equal(x, whole)
    print(json.dumps({"both ways": both_ways, "one way": pauses() - before}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A rank of two, each on a host of its own: how soon short waits are awake after long ones.

Rank 0 prints one line: in how many of the attempts the waits of both had recovered within fifty
messages each way.
"""

from __future__ import annotations

import os

import numpy as np

import cydist as dist

ATTEMPTS = 12
LONG_WAITS = 6
ROUNDS = 50


def looks() -> int:
    """Return how often a wait of this rank looks at the sockets before it sleeps."""
    return dist.group.WORLD.native.link.statistics()["spins"]  # type: ignore[union-attr]


def wait_for_long() -> None:
    """Wait for messages that do not come."""
    for _ in range(LONG_WAITS):
        try:
            dist.irecv(np.zeros(1), 1 - dist.get_rank(), tag=9).wait(0.01)
        except dist.DistTimeoutError:
            continue
        raise AssertionError("a message that no rank sent has come")


def main() -> None:
    """Count the attempts that succeed."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-rank]})
    dist.init_process_group("tcp", timeout=60)
    x, recovered, most = np.zeros(1), 0, looks()
    for _ in range(ATTEMPTS):
        wait_for_long()
        for _ in range(ROUNDS):
            if rank == 0:
                dist.send(x, 1)
            dist.recv(x, 1 - rank)
            if rank == 1:
                dist.send(x, 0)
        both = np.array([looks() >= most // 2], np.int64)
        dist.all_reduce(both, dist.ReduceOp.MIN)
        recovered += int(both[0])
    if rank == 0:
        print(recovered, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

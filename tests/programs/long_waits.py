"""A rank of two, each on a host of its own: how soon short waits are awake after long ones.

Rank 0 prints one line: in how many attempts no other thread wanted a core, and in how many of these
the waits of both had recovered within fifty messages each way.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import numpy as np

import cydist as dist

ATTEMPTS = 40  # at most
ENOUGH = 12
LONG_WAITS = 5
ROUNDS = 50
SWITCH = 2e-6  # seconds of a yield in which another thread has run


def looks() -> int:
    """Return how often a wait of this rank looks at the sockets before it sleeps."""
    return dist.group.WORLD.native.link.statistics()["spins"]  # type: ignore[union-attr]


def is_core_free() -> bool:
    """Return whether no other thread wants this core."""
    times = []
    for _ in range(100):
        began = time.perf_counter()
        os.sched_yield()
        times.append(time.perf_counter() - began)
    return statistics.quantiles(times, n=10)[-1] < SWITCH


def wait_for_long() -> None:
    """Wait for messages that do not come."""
    for _ in range(LONG_WAITS):
        try:
            dist.irecv(np.zeros(1), 1 - dist.get_rank(), tag=9).wait(0.01)
        except dist.DistTimeoutError:
            continue
        raise AssertionError("a message that nobody sent has come")


def main() -> None:
    """Try until the cores were free often enough."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-rank]})
    dist.init_process_group("tcp", timeout=60)
    x, most = np.zeros(1), looks()
    tried = recovered = 0
    for _ in range(ATTEMPTS):
        wait_for_long()
        assert looks() <= most // 8
        free_before = is_core_free()
        for _ in range(ROUNDS):
            if rank == 0:
                dist.send(x, 1)
            dist.recv(x, 1 - rank)
            if rank == 1:
                dist.send(x, 0)
        both = np.array([free_before and is_core_free(), looks() >= most // 2], np.int64)
        dist.all_reduce(both, dist.ReduceOp.MIN)
        tried += both[0]
        recovered += both[0] & both[1]
        if tried == ENOUGH:
            break
    if rank == 0:
        print(json.dumps({"tried": int(tried), "recovered": int(recovered)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

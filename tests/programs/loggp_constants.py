"""Constants of the model of `python -m cydist.bench --simulate`, as a job of two ranks.

Rank 0 prints JSON: the seconds of its core that a message of 8 bytes takes it, and those that one
takes rank 1, where it has arrived; and half of a message there and back of 8 bytes, 256 KiB and
1 MiB. They are medians of many rounds, after as many in which waits find out how long to spin.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

import cydist as dist

ROUNDS, BURST = 200, 8
ON_THE_WAY = 1e-3  # seconds, in which a burst arrives


def end_seconds() -> float:
    """Return what a message of 8 bytes takes this rank, of a burst from rank 0 to rank 1."""
    data, token = np.zeros(1), np.zeros(1)
    found = []
    for _ in range(2 * ROUNDS):
        if dist.get_rank() == 0:
            dist.recv(token, 1)
            call, peer = dist.send, 1
        else:
            dist.send(token, 0)
            arrived = time.perf_counter() + ON_THE_WAY
            while time.perf_counter() < arrived:  # not asleep: its core stays awake
                pass
            call, peer = dist.recv, 0
        began = time.perf_counter()
        for _ in range(BURST):
            call(data, peer)
        found.append((time.perf_counter() - began) / BURST)
    return statistics.median(found[ROUNDS:])


def half_seconds(nbytes: int) -> float:
    """Return half of what a message there and back takes."""
    data = np.zeros(nbytes, np.uint8)
    found = []
    for _ in range(2 * ROUNDS):
        began = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)
        found.append((time.perf_counter() - began) / 2)
    return statistics.median(found[ROUNDS:])


dist.init_process_group("tcp", timeout=60)
dist.barrier()
ends: list[float | None] = [None, None]
dist.all_gather_object(ends, end_seconds())
halves = {nbytes: half_seconds(nbytes) for nbytes in (8, 262144, 1048576)}
if dist.get_rank() == 0:
    print(json.dumps({"post": ends[0], "take": ends[1], "half": halves}), flush=True)
dist.barrier()
dist.destroy_process_group()

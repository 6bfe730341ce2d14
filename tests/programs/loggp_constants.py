"""Constants of the model of `python -m cydist.bench --simulate`, as a job of two ranks.

Rank 0 prints JSON: the seconds that a post of 8 bytes and of 32 KiB takes its sender, and half of a
message there and back of 8 bytes, 32 KiB, 256 KiB and 1 MiB: medians of many rounds, after as many
in which waits find out how long to spin.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

import cydist as dist

ROUNDS, BURST = 200, 8


def post_seconds(nbytes: int) -> float:
    """Return what a post takes, of a burst that the connection takes at once."""
    data = np.zeros(nbytes, np.uint8)
    token = np.zeros(1)
    found = []
    for _ in range(2 * ROUNDS):
        began = time.perf_counter()
        if dist.get_rank() == 0:
            for _ in range(BURST):
                dist.send(data, 1)
            found.append((time.perf_counter() - began) / BURST)
            dist.recv(token, 1)
        else:
            for _ in range(BURST):
                dist.recv(data, 0)
            dist.send(token, 0)
    return statistics.median(found[ROUNDS:]) if found else 0.0


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
posts = {nbytes: post_seconds(nbytes) for nbytes in (8, 32768)}
halves = {nbytes: half_seconds(nbytes) for nbytes in (8, 32768, 262144, 1048576)}
if dist.get_rank() == 0:
    print(json.dumps({"post": posts, "half": halves}), flush=True)
dist.barrier()
dist.destroy_process_group()

"""A rank that reduces until another one dies, and goes on with those who are left.

    survivors.py URL RANK RANKS [FIRST [LATER]]

FIRST is a failpoint to die at while reducing, LATER one while shrinking. Says
`RANK: now N of M, sum S, at T`: its new rank, the new size, the sum of 2**RANK over the
survivors, and time.monotonic().
"""

import sys
import time

import numpy as np

import cydist as dist
from cydist import _native


def main(url: str, rank: int, ranks: int, first: str = "", later: str = "") -> None:
    dist.init_process_group("tcp", init_method=url, rank=rank, world_size=ranks, timeout=30)
    x = np.ones(1 << 18)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    _native.arm_failpoint(first)
    try:
        while True:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
    except dist.DistError as error:
        print(f"{rank}: {error}", file=sys.stderr)
    _native.arm_failpoint(later)
    while True:
        dist.shrink_group()
        y = np.full(1 << 18, 2.0**rank)
        try:
            dist.all_reduce(y)
            break
        except dist.PeerFailedError as error:  # after the shrink, this time
            print(f"{rank}: {error}", file=sys.stderr)
    now = time.monotonic()
    assert (y == y[0]).all()
    print(f"{rank}: now {dist.get_rank()} of {dist.get_world_size()}, sum {y[0]:g}, at {now}")
    dist.barrier(dist.new_group())
    if int(y[0]) & 1:  # rank 0 is there, and with it the store, in which a new group meets
        dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])

"""One rank of a job whose rank 0 runs ahead: it broadcasts numbers without waiting for any other.

Usage: one_way_calls.py COUNT [BACKEND]. Prints "ok" if all arrive, each in its turn.
"""

import sys

import numpy as np

import cydist as dist

TIMEOUT = 30.0  # of calls that take microseconds


def main() -> None:
    dist.init_process_group(*sys.argv[2:], timeout=TIMEOUT)
    number = np.zeros(1, np.int64)
    for turn in range(int(sys.argv[1])):
        number[0] = turn if dist.get_rank() == 0 else -1
        dist.broadcast(number, 0)
        assert number[0] == turn
    dist.barrier()
    dist.destroy_process_group()
    print("ok")


main()

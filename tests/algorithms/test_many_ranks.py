"""More ranks than most machines have cores."""

import os
import subprocess
import sys

import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle


@pytest.mark.parametrize("ranks", [1, 5, 8, 13, 16])
def test_larger_worlds(jobs, ranks):
    """Up to 16 ranks as threads: reduce, gather and exchange."""
    given = [oracle.contribution(rank, 33, np.dtype("f4")) for rank in range(ranks)]

    def body(rank):
        total, gathered = given[rank].copy(), np.zeros(33 * ranks, "f4")
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, given[rank])
        swapped = np.zeros(ranks, "i4")
        dist.all_to_all_single(swapped, np.arange(ranks, dtype="i4") + 100 * rank)
        dist.barrier()
        return total, gathered, swapped

    for rank, (total, gathered, swapped) in enumerate(jobs.get("inproc", ranks).run(body)):
        assert oracle.same_bits(oracle.reduced("SUM", given), total)
        assert oracle.same_bits(np.concatenate(given), gathered)
        assert oracle.same_bits(np.arange(ranks, dtype="i4") * 100 + rank, swapped)


MANY = """
import numpy as np

import cydist as dist

RANKS, TIMES = 64, 5


def rank_of_many(rank):
    dist.init_process_group(timeout=150)
    assert dist.group.WORLD.windows
    for time in range(TIMES):
        total = np.full(3, rank + time)
        dist.all_reduce(total)
        assert total.tolist() == [RANKS * (RANKS - 1) // 2 + RANKS * time] * 3
    swapped = np.zeros(RANKS, "i4")
    dist.all_to_all_single(swapped, np.arange(RANKS, dtype="i4") + 100 * rank)
    assert swapped.tolist() == [100 * peer + rank for peer in range(RANKS)]
    long = np.full(100_000, 1.0, "f4")
    dist.all_reduce(long)
    assert (long == RANKS).all()
    dist.barrier()
    dist.destroy_process_group()


dist.spawn(rank_of_many, nprocs=RANKS, start_method="fork")
print("content")
"""


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(200)
def test_sixty_four_processes(tmp_path):
    """Far more processes than cores share windows, and all of them go on."""
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        env={**os.environ, "CYDIST_TRANSPORT": "shm"},
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("content\n", 0), done.stderr


LATE = """
import time

import numpy as np

import cydist as dist

WAIT, MOST = 1.0, 0.5  # seconds of the clock, and of a core: far more than a wait takes


def spent(call):
    before = time.process_time()
    try:
        call()
    except dist.DistTimeoutError:
        pass
    return time.process_time() - before


def rank_of_two(rank):
    dist.init_process_group(timeout=30)
    array, groups = np.ones(100), [dist.new_group() for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    waits = [lambda: dist.barrier()]
    if rank == 0:
        waits = [
            lambda: dist.all_reduce(array, group=groups[0], timeout=WAIT),
            lambda: dist.recv(array, 1, groups[1], timeout=WAIT),
            lambda: dist.barrier(),
        ]
    costs = [spent(wait) for wait in waits]
    assert max(costs) < MOST, costs
    dist.destroy_process_group()


dist.spawn(rank_of_two, nprocs=2, start_method="fork")
print("content")
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_long_wait_costs_no_core(tmp_path, transport):
    """Who waits for a collective or a message, for a second or two, takes little of a core."""
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, "CYDIST_TRANSPORT": transport},
        cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("content\n", 0), done.stderr

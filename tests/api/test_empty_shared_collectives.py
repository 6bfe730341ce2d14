"""Collectives on arrays in shared memory: the same bits as on private ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from transport_ranks import DEADLINE, free_port

import cydist as dist

ROOT = Path(__file__).parents[2]
COUNT = 9001  # elements of a block: past what goes through windows, no multiple of anything
DTYPES = [np.float32, np.int64, np.complex128, np.float16, ml_dtypes.bfloat16, bool]
Make = Callable[[int], np.ndarray]


def filled(make: Make, count: int, seed: int) -> np.ndarray:
    """An array of values that every order of summing rounds in another way."""
    array = make(count)
    values = np.random.default_rng(seed).standard_normal(count) * 10
    array[:] = (values > 0) if array.dtype == bool else values.astype(array.dtype)
    return array


def all_reduce(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size + 1, rank)
    dist.all_reduce(x)
    return [x]


def largest(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size + 1, rank)
    if x.dtype.kind != "c":
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return [x]


def broadcast(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.broadcast(x, size - 1)
    return [x]


def reduce(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.reduce(x, 1)
    return [x]


def all_gather(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x, out = filled(make, COUNT, rank), filled(make, COUNT * size, -rank - 1 + 99)
    dist.all_gather_into_tensor(out, x)
    return [x, out]


def all_gather_in_place(make: Make, rank: int, size: int) -> list[np.ndarray]:
    out = filled(make, COUNT * size, rank)
    dist.all_gather_into_tensor(out, out[rank * COUNT : (rank + 1) * COUNT])
    return [out]


def reduce_scatter(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x, out = filled(make, COUNT * size, rank), filled(make, COUNT, 99)
    dist.reduce_scatter_tensor(out, x)
    return [x, out]


def all_to_all(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x, out = filled(make, COUNT * size, rank), filled(make, COUNT * size, 99)
    dist.all_to_all_single(out, x)
    return [x, out]


def reduce_scatter_in_place(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.reduce_scatter_tensor(x[rank * COUNT : (rank + 1) * COUNT], x)
    return [x]


def all_to_all_in_place(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.all_to_all_single(x, x)
    return [x]


def uneven_gather(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT + rank, rank)
    out = [filled(make, COUNT + r, 99) for r in range(size)] if rank == 1 else None
    dist.gather(x, out, 1)
    return [x, *(out or [])]


def uneven_scatter(make: Make, rank: int, size: int) -> list[np.ndarray]:
    out = filled(make, COUNT + rank, 99)
    given = [filled(make, COUNT + r, r) for r in range(size)] if rank == 1 else None
    dist.scatter(out, given, 1)
    return [out]


def scan(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.scan(x)
    return [x]


def exscan(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    dist.exscan(x)
    return [x]


def odd_offset(make: Make, rank: int, size: int) -> list[np.ndarray]:
    whole = filled(make, COUNT * size + 5, rank)
    dist.all_reduce(whole[3:-1])
    return [whole]


def strided(make: Make, rank: int, size: int) -> list[np.ndarray]:
    whole = filled(make, 2 * COUNT * size, rank)
    dist.all_reduce(whole[::-2])
    return [whole]


def in_background(make: Make, rank: int, size: int) -> list[np.ndarray]:
    arrays = [filled(make, COUNT * size, 10 * rank + i) for i in range(3)]
    for work in [dist.all_reduce(x, async_op=True) for x in arrays]:
        work.wait()
    return arrays


def premultiplied(make: Make, rank: int, size: int) -> list[np.ndarray]:
    x = filled(make, COUNT * size, rank)
    if x.dtype != bool:
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(rank + 2))
    return [x]


CALLS = [
    all_reduce, largest, broadcast, reduce, all_gather, all_gather_in_place, reduce_scatter,
    reduce_scatter_in_place, all_to_all, all_to_all_in_place, uneven_gather, uneven_scatter,
    scan, exscan, odd_offset, strided, in_background, premultiplied,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_same_bits(call: Callable[..., list[np.ndarray]], dtype: Any, job: Any, size: int) -> None:
    """A rank's arrays are shared, every rank's results are those of private arrays."""

    def body(rank: int) -> list[list[bytes]]:
        def private(count: int) -> np.ndarray:
            return np.empty(count, dtype)

        def shared(count: int) -> np.ndarray:
            return dist.empty_shared(count, dtype)

        placements = [private, shared, shared if rank == 0 else private]
        return [[x.tobytes() for x in call(make, rank, size)] for make in placements]

    for private, shared, mixed in job.run(body):
        assert shared == private
        assert mixed == private


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("size", [3])
def test_groups_of_some(job: Any) -> None:
    """A group finds the arrays of its own members, in whatever order they are."""

    def body(rank: int) -> float:
        group = dist.new_group([2, 0], sort_ranks=False)
        x = dist.empty_shared(COUNT)
        x[:] = 10**rank
        if group:
            dist.all_reduce(x, group=group)
        assert (x == x[0]).all()
        return float(x[0])

    assert job.run(body) == [101.0, 10.0, 101.0]


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("size", [2])
def test_many_come_and_go(job: Any) -> None:
    """Arrays that take the places of earlier ones are not taken for them."""

    def body(rank: int) -> None:
        before = dist.group.WORLD._endpoint.link.heap.left()
        for turn in range(40):
            x = dist.empty_shared(5000 + 700 * ((turn * 5 + rank) % 7))
            y = x[rank * 10 : 4000 + rank * 10]
            y[:] = turn + rank
            dist.all_reduce(y)
            assert (y == 2 * turn + 1).all()
            del x, y
        assert dist.group.WORLD._endpoint.link.heap.left() == before

    job.run(body)


PROGRAM = """
import os, sys
import numpy as np
import cydist as dist

rank = int(os.environ["RANK"])
dist.init_process_group("tcp", timeout=60)
x = dist.empty_shared(100_000)
x[:] = rank
try:
    while True:
        dist.all_reduce(x)
        x[:] = rank
except dist.PeerFailedError as error:
    x[:] = 5
    y = dist.empty_shared(100_000)
    y[:] = 7
    print(error.ranks, x.sum(), y.sum(), flush=True)
"""


def test_a_death_in_the_middle() -> None:
    """A rank that is killed while it writes into others' arrays ends the call; they are free."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": "3", "CYDIST_TRANSPORT": "shm", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={
                **environment,
                "RANK": f"{rank}",
                "CYDIST_FAILPOINT": "send.mid:kill:30" if rank == 1 else "",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        printed = [rank.communicate(timeout=DEADLINE * 2)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = "(1,) 500000.0 700000.0\n"
    assert printed == [said, "", said]

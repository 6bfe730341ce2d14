"""What calls take beyond the arrays that they are given: as docs/guide/arrays.md says."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "memory.py"
NBYTES = 64 << 20
BOUND = 16 << 20
COPYING = {  # the bytes of what two ranks copy
    "all_to_all_single, strided": NBYTES,
    "all_reduce_coalesced": NBYTES,
    "all_to_all_single, in place": NBYTES,
    "reduce_scatter_tensor, in place": NBYTES // 2,
}
BOUNDED = (
    *("all_reduce", "reduce", "broadcast", "scan", "gather", "scatter", "all_gather, uneven"),
    *("reduce_scatter", "all_to_all, uneven", "send and recv"),
    *("all_reduce, strided", "broadcast, strided", "reduce, strided", "scan, strided"),
)
# What is freed goes back to the system, and threads have no arenas of their own.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

Found = dict[str, int]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def measure(transport: str, ranks: int = 2, algorithm: str = "", *calls: str) -> Found:
    """Bytes that each call takes on the rank that takes most, in new processes."""
    launch = ("-m", "cydist.run", "--no-prefix", "--nproc-per-node", str(ranks))
    settings = {"CYDIST_TRANSPORT": transport, "CYDIST_ALGORITHM": algorithm}
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(NBYTES), *calls],
        env=os.environ | MALLOC | settings,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def measured() -> Callable[[str], Found]:
    """One job for each transport."""
    return functools.cache(measure)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", BOUNDED)
def test_extra_memory_is_bounded(
    call: str, transport: str, measured: Callable[[str], Found]
) -> None:
    """A call takes at most 16 MiB more, however large its arrays are: contiguous ones, and strided
    ones where every rank has one of as much."""
    assert measured(transport)[call] < BOUND


@pytest.mark.parametrize("algorithm", ["ring", "pairwise", "ordered"])
def test_extra_memory_of_reduce_scatter(algorithm: str) -> None:
    """However the partial sums of three ranks travel, they take at most 16 MiB."""
    found = measure("tcp", 3, f"reduce_scatter:{algorithm}", "reduce_scatter")
    assert found["reduce_scatter"] < BOUND


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", COPYING)
def test_extra_memory_of_copies(
    call: str, transport: str, measured: Callable[[str], Found]
) -> None:
    """Coalesced arrays, other strided ones, and the outputs of calls in place are copied once."""
    copied = COPYING[call]
    assert copied // 2 < measured(transport)[call] < copied + BOUND


def test_all_calls_are_judged(measured: Callable[[str], Found]) -> None:
    """Every call that the program makes has its bound here."""
    assert sorted(measured("shm")) == sorted((*BOUNDED, *COPYING))

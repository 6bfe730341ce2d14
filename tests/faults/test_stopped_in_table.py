"""A rank that is stopped while it changes the table of the shared memory holds up no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BEGIN = """
import contextlib, os, signal, sys, time
import numpy as np
import cydist as dist
from cydist._native import arm_failpoint
dist.init_process_group("tcp", timeout=60)
rank = dist.get_rank()
pids = np.zeros(4, np.int64)
dist.all_gather_into_tensor(pids, np.array([os.getpid()]))

def total(group, timeout=60):
    x = np.ones(3)
    dist.all_reduce(x, group=group, timeout=timeout)
    return x[0]

def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"

def await_stop():
    while not stopped(pids[0]):
        time.sleep(0.01)

def stop_at(point, group):
    arm_failpoint(f"{point}:stop")
    return total(group)
"""

# Rank 0 is stopped with the lock of the table. Groups of ranks 1 and 2 end; their next one cannot
# begin, and says so at its timeout, or when it is interrupted.
LOCKED = """
both = dist.new_group([0, 3])
used, unused, late, interrupted = [dist.new_group([1, 2]) for _ in range(4)]
if rank in (1, 2):
    assert total(used) == 2
dist.barrier()
if rank == 0:
    assert stop_at("table", both) == 2
elif rank == 3:
    assert total(both) == 2
else:
    await_stop()
    for group in (used, unused):
        dist.destroy_process_group(group)
    began = time.monotonic()
    try:
        total(late, 0.5)
    except dist.DistTimeoutError as error:
        assert "locks the table" in str(error) or "gave up" in str(error), error
        print("late", flush=True)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with contextlib.suppress(KeyboardInterrupt):  # also one that comes after the other rank's
        try:
            total(interrupted)
            raise AssertionError("not interrupted")
        except dist.DistError as error:
            assert "was interrupted" in str(error), error   # the other rank, first
        signal.setitimer(signal.ITIMER_REAL, 0)
    print("interrupted", flush=True)
    assert time.monotonic() - began < 30
if rank in (1, 2):
    dist.send(np.ones(1), 3 - rank) if rank == 1 else dist.recv(np.ones(1), 1)
if rank == 2:
    os.kill(pids[0], signal.SIGCONT)
assert total(None) == 4
assert total(dist.new_group([0, 1, 2])) == 3 if rank != 3 else True
dist.destroy_process_group()
"""

# Rank 0 is stopped while it zeroes memory that its group got from a former one.
ZEROED = """
former, both = dist.new_group([0, 1]), dist.new_group([0, 1])
others = dist.new_group([2, 3])
if rank in (0, 1):
    assert total(former) == 2
    dist.destroy_process_group(former)
dist.barrier()
if rank == 0:
    try:
        stop_at("zero", both)
    except dist.DistError as error:
        print("late", flush=True)
else:
    await_stop()
if rank == 1:
    try:
        total(both, 0.5)
    except dist.DistTimeoutError as error:
        assert error.ranks == (0,), error.ranks
        print("late", flush=True)
elif rank > 1:
    assert total(others) == 2
    print("went on", flush=True)
    if rank == 2:
        dist.send(np.ones(1), 1)
if rank == 1:
    dist.recv(np.ones(1), 2)
    os.kill(pids[0], signal.SIGCONT)
dist.barrier()
assert total(dist.new_group([0, 1])) == 2 if rank < 2 else True
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [(LOCKED, ["interrupted"] * 2 + ["late"] * 2), (ZEROED, ["late"] * 2 + ["went on"] * 2)],
    ids=["locked", "zeroes"],
)
def test_a_stopped_rank(tmp_path: Path, program: str, words: list[str]) -> None:
    """Groups without it end at once; those that need the table wait no longer than their timeout
    and Ctrl-C; and all goes on after it."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN + program)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "-n", "4", "--no-prefix", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted(done.stdout.splitlines()) == words

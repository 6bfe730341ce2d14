"""How a process ends that has not destroyed its groups on nccl: over the stand-ins, with no thread
started once the interpreter ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launched_hosts import without_notices

PROGRAM = Path(__file__).parents[2] / "programs/gpu_faults.py"
LIMIT = 120  # seconds, for a machine that does much else
pytestmark = pytest.mark.timeout(2 * LIMIT)


def started(standins: Path, *command: str, log: Path, **settings: str) -> Any:
    """A program on two ranks, when it is over, and what its ranks called of NCCL. Its errors are
    without notices of a slow start."""
    launch = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", *command]
    given = {"STANDIN": str(standins), "PYTHONWARNINGS": "ignore", "STANDIN_LOG": str(log)}
    done = subprocess.run(
        launch, env={**os.environ, **given, **settings}, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    done.stderr = without_notices(done.stderr)
    return done, log.read_text().splitlines()


def checks(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in stdout.splitlines() if "{" in line]


@pytest.mark.parametrize("step", ["exit", "atexit"])
def test_idle_communicators_are_destroyed(standins: Path, tmp_path: Path, step: str) -> None:
    """Not aborted, since an abort drops what NCCL still sends to the next rank."""
    done, calls = started(standins, str(PROGRAM), step, log=tmp_path / "log")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(each["ok"] for each in checks(done.stdout))
    assert sorted(line for line in calls if "destroy" in line) == ["0 destroy", "1 destroy"]
    assert not [line for line in calls if "abort" in line]


def test_a_call_that_hangs_holds_no_process_back(standins: Path, tmp_path: Path) -> None:
    """Its communicator is aborted."""
    start = time.monotonic()
    done, calls = started(standins, str(PROGRAM), "exithung", log=tmp_path / "log")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 abort" in calls
    assert time.monotonic() - start < 60  # the call's deadline


LAST_BYTES = f"""
import sys, time
sys.path[:0] = [{str(PROGRAM.parent)!r}, {str(PROGRAM.parents[1] / "support")!r}]
from gpu_arrays import Cupy, say, share_a_gpu, stand_in
import cydist as dist
share_a_gpu(), stand_in()
cupy = Cupy().cupy
dist.init_process_group("nccl", timeout=60.0)
x = cupy.ones(1000, "float32")
dist.all_reduce(x)
dist.barrier()
if dist.get_rank() == 0:
    dist.send(x * 3, 1, timeout=30.0)
else:
    time.sleep(3)
    dist.recv(x, 0, timeout=30.0)
    say("the last bytes come", float(x[-1]) == 6.0)
"""


def test_the_last_bytes_reach_the_next_rank(standins: Path, tmp_path: Path) -> None:
    """Of a rank that ends as soon as its GPU has passed the call."""
    program = tmp_path / "program.py"
    program.write_text(LAST_BYTES)
    done, _ = started(standins, str(program), log=tmp_path / "log", STANDIN_ABORT_CUTS="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert [each["ok"] for each in checks(done.stdout)] == [True]


def test_a_replay_ends_when_a_rank_does(standins: Path, tmp_path: Path) -> None:
    """Though the process makes no call, and nothing tells when a graph is replayed."""
    done, _ = started(standins, str(PROGRAM), "graphdeath", log=tmp_path / "log")
    assert done.returncode == 0, done.stderr
    found = {each["check"]: each["ok"] for each in checks(done.stdout)}
    assert found["a replay whose peer ended is found"]
    assert found["the replay is ended"]


def test_calls_that_hang_fail_whatever_the_program_does(standins: Path, tmp_path: Path) -> None:
    """A launch that blocks holds CUDA's locks, as long as the call hangs, and a first call blocks
    in NCCL: it is revoked before the communicator is freed."""
    done, calls = started(
        standins, str(PROGRAM), "hang", log=tmp_path / "log", STANDIN_FIRST_CALL_BLOCKS="1"
    )
    assert done.returncode == 0, done.stderr
    found = checks(done.stdout)
    assert len(found) == 12
    assert not [each for each in found if not each["ok"]]
    assert "0 revoke" in calls
    assert not [line for line in calls if "freed memory" in line]

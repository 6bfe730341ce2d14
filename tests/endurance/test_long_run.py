"""The program of scripts/test-long, for seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more

PROGRAM = Path(__file__).parents[1] / "programs" / "long_run.py"
WORK = {"calls": 20_000, "groups": 1, "shrinks": 1, "restarts": 2}


@pytest.mark.parametrize("transport", ["shm", *more("tcp")])
@pytest.mark.parametrize("what", WORK)
def test_what_scripts_test_long_does(what: str, transport: str) -> None:
    """Each part ends in order, with right results, and leaves no file."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, transport, str(WORK[what])],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{what} {transport}" in done.stdout

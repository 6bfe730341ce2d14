"""Programs that the documentation names for its figures still run, and print them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = (sys.executable, "-m", "cydist.run", "--nproc-per-node", "2")
PROGRAMS = {
    "burst_time": (*LAUNCHED, "tests/programs/burst_time.py", "cydist"),
    "rank_memory": (sys.executable, "tests/programs/rank_memory.py", "4", "tcp"),
    "wake_up_time": (sys.executable, "tests/programs/wake_up_time.py"),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_prints_its_figures(name: str) -> None:
    """A few lines with numbers, and nothing goes wrong."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    done = subprocess.run(
        PROGRAMS[name], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\d\.\d", done.stdout)) > 2, done.stdout

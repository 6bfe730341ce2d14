"""A test that ends its process ends the run, with its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = 8  # more than processes
CRASHES = """
import os, signal

def test_before():
    pass

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


@pytest.mark.parametrize("dist", ["loadfile", "worksteal"])
def test_the_run_ends_with_the_name_of_the_test(tmp_path: Path, dist: str) -> None:
    """It does not wait for the tests that the process would have run next."""
    for file in range(FILES):
        text = CRASHES if file == FILES - 1 else CRASHES.replace("os.kill", "print")
        (tmp_path / f"test_{file}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "4", "--dist", dist, "-p", "no:cacheprovider",
         "--color=no", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"crashed while running 'test_{FILES - 1}.py::test_crashes'" in done.stdout

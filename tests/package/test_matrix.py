"""docs/dev/coverage.md: which calls are tested on which backend and device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # some of the tests that are counted need it
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/dev/coverage.md"


def test_the_page_is_current() -> None:
    """`scripts/matrix` prints the page as it is."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts/matrix")], capture_output=True, text=True, timeout=55,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert made.stdout == PAGE.read_text(), "run scripts/matrix > docs/dev/coverage.md"


def test_every_call_has_contract_tests() -> None:
    """No call lacks a test on any of the CPU's backends."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.M)
    assert len(rows) >= 29
    on_cpu = {name: [int(each) for each in numbers.split("|")[:5]] for name, numbers in rows}
    assert [name for name, numbers in on_cpu.items() if 0 in numbers] == []

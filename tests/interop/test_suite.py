"""torch's own tests of a backend, passed by "cydist"."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more

pytest.importorskip("torch")
pytest.importorskip("expecttest")

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "tests/interop/torch_suite.py"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "ranks", [*more(3), pytest.param(4, marks=pytest.mark.long)], ids="{} ranks".format
)
def test_torchs_tests_pass(ranks: int) -> None:
    """Every test that torch has for its backends on CPUs passes, but for those that are listed."""
    command = [sys.executable, str(SUITE), "--ranks", str(ranks), "--limit", "240"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=270, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    passed = re.search(r"(\d+) passed, 0 failed", result.stdout)
    assert passed is not None
    assert int(passed[1]) > 100


def test_what_is_known_to_fail_is_documented() -> None:
    """docs/dev/torch.md names every test that is known to fail, and no other."""
    text = SUITE.read_text()
    known = re.findall(r'^    "(test_\w+)": ', text, re.M)
    page = (ROOT / "docs/dev/torch.md").read_text()
    assert known
    assert sorted(known) == sorted(set(re.findall(r"`(test_\w+)`", page)))

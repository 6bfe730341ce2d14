"""One version: cydist/config.py states it, and what repeats it agrees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cydist

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_has_it() -> None:
    """CITATION.cff, which GitHub shows."""
    found = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert found is not None
    assert found[1] == cydist.__version__


@pytest.mark.parametrize("module", ["cydist", "cydist.run"])
def test_programs_tell_it(module: str) -> None:
    """With --version."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert cydist.__version__ in done.stdout

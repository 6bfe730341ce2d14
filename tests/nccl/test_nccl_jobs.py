"""Ranks that are processes: the steps of scripts/test-gpu, over the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "programs/gpu.py"


def ran(standin: Any, step: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a step say."""
    command = [sys.executable, "-m", "cydist.launch", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, str(PROGRAM), step],
        env={**os.environ, "STANDIN": str(standin.path), "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_correctness(standin: Any, ranks: int) -> None:
    """Every call, from separate processes."""
    said = ran(standin, "correctness", ranks)
    assert sorted(each["rank"] for each in said) == [*range(ranks)]
    assert min(each["calls"] for each in said) > 300


def test_faults(standin: Any) -> None:
    """Different calls, a late rank and a dead one are errors on every rank that lives."""
    said = ran(standin, "faults", 3)
    assert sorted(each["rank"] for each in said) == [0, 1, 2]
    assert {each["death"] for each in said if each["rank"] < 2} == {"PeerFailedError"}

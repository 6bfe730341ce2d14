"""The examples for GPUs, on CPUs: they learn, and as many ranks as one learn the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


def losses(program: str, ranks: int) -> list[float]:
    """The first and the last loss that a job prints."""
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(ranks)]
    said = subprocess.run(
        [*command, str(EXAMPLES / program), "--on", "cpu"],
        capture_output=True, text=True, timeout=50, check=True,
    ).stdout  # fmt: skip
    return [float(each) for each in re.findall(r"\d\.\d{4}", said)]


@pytest.mark.parametrize("program", ["parallel_cupy.py", *more("parallel_torch.py")])
def test_ranks_together_learn_what_one_learns(program: str) -> None:
    """The loss falls, by the same amount on two ranks."""
    if "torch" in program:
        pytest.importorskip("torch")
    alone, together = losses(program, 1), losses(program, 2)
    assert alone[1] < alone[0] / 2
    assert alone == pytest.approx(together, abs=0.002)

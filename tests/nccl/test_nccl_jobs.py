"""Ranks that are processes: the steps of scripts/test-gpu, over the stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "programs/gpu.py"
EXAMPLE = PROGRAM.with_name("gpu_example.py")


def started(standin: Any, step: str, ranks: int, program: Path = PROGRAM, **settings: str) -> Any:
    """A step, when it is over."""
    command = [sys.executable, "-m", "cydist.launch", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(program), step],
        env={**os.environ, "STANDIN": str(standin.path), "PYTHONWARNINGS": "ignore", **settings},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip


def ran(standin: Any, step: str, ranks: int, program: Path = PROGRAM) -> list[dict[str, Any]]:
    """What the ranks of a step say."""
    result = started(standin, step, ranks, program)
    assert result.returncode == 0, result.stderr
    return [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_correctness(standin: Any, ranks: int) -> None:
    """Every call, from separate processes, on arrays of cupy's and tensors of torch's."""
    said = ran(standin, "correctness", ranks)
    assert sorted(each["rank"] for each in said) == [*range(ranks)]
    assert min(each["calls"]["standin"] for each in said) > 500
    assert min(each["calls"]["torch"] for each in said) > 300


def test_the_example_for_torch_learns(standin: Any) -> None:
    """By reductions behind the backward pass: as many ranks as one learn the same."""
    pytest.importorskip("torch")
    (alone,) = ran(standin, "", 1, EXAMPLE)
    together = ran(standin, "", 2, EXAMPLE)
    assert alone["losses"][-1] < alone["losses"][0] / 2
    for each in together:
        assert each["losses"] == pytest.approx(alone["losses"], abs=0.002)


def test_faults(standin: Any) -> None:
    """Different calls, a late rank and a dead one are errors on every rank that lives."""
    said = ran(standin, "faults", 3)
    assert sorted(each["rank"] for each in said) == [0, 1, 2]
    assert {each["death"] for each in said if each["rank"] < 2} == {"PeerFailedError"}
    assert {each["left"] for each in said if each["rank"] < 2} == {2}


def test_a_failure_may_end_the_process(standin: Any) -> None:
    """With NCCL_ASYNC_ERROR_HANDLING=1 no rank goes on after a failed call."""
    result = started(standin, "faults", 2, NCCL_ASYNC_ERROR_HANDLING="1")
    assert result.returncode != 0
    assert "ends, as asked: MismatchError: all_reduce #2 on group '1'" in result.stderr


def test_the_steps_take_25_minutes_at_most() -> None:
    """By their own timeouts, and none more than 8, whatever the machine does."""
    text = (PROGRAM.parent.parent.parent / "scripts/test-gpu").read_text()
    steps = re.findall(r'^ +(\w+)\) ranks="([\d ]+)" seconds=(\d+)', text, re.MULTILINE)
    assert {name for name, _, _ in steps} == set(re.search(r"\$\{\*:-(.*?)\}", text)[1].split())
    grace = int(re.search(r"timeout -k (\d+)", text)[1])
    bounds = [len(ranks.split()) * (int(seconds) + grace) for _, ranks, seconds in steps]
    assert max(bounds) <= 8 * 60
    assert sum(bounds) <= 25 * 60

"""A peer misbehaves while torch trains or saves in parallel: every survivor gets an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from program_tables import names_in

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interop/torch_failing_peer.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

# What the last rank does in its last step, and the words that cydist's error must have.
WAYS = {
    "raise": ("PeerFailedError", "was lost"),
    "exit": ("PeerFailedError", "was lost"),
    "kill": ("PeerFailedError", "was lost"),
    "fewer-steps": ("PeerFailedError", "it closed its connections and left"),
    "hang": ("DistTimeoutError", " s: nothing from rank"),
    "barrier": ("MismatchError", "barrier"),
}
MODES = names_in(PROGRAM, "MODES")
# Every way and every mode, in as few trials as that takes.
DIAGONAL = {
    ("raise", "fsdp2", 2),
    ("exit", "zero_overlapped", 2),
    ("kill", "zero", 3),
    ("fewer-steps", "pipeline", 3),
    ("hang", "async_save", 2),
    ("barrier", "plain", 2),
}


def marks(way: str, mode: str, size: int) -> list[pytest.MarkDecorator]:
    """The lane of a trial."""
    if (way, mode, size) in DIAGONAL:
        return []
    return [pytest.mark.more if size == 2 else pytest.mark.long]


TRIALS = [
    pytest.param(way, mode, size, marks=marks(way, mode, size), id=f"{way}-{mode}-{size} ranks")
    for way in WAYS
    for mode in MODES
    for size in (2, 3)
]


@pytest.fixture(scope="module")
def server() -> Generator[subprocess.Popen[str], None, None]:
    """The program, which has imported torch once for all trials."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize(("way", "mode", "size"), TRIALS)
def test_survivors_get_an_exception(
    way: str, mode: str, size: int, server: subprocess.Popen[str]
) -> None:
    """It has cydist's whole text, the group names the typed error, a checkpoint can be written
    afterwards, and no signal ends a rank."""
    typed, words = WAYS[way]
    if (way, mode) == ("barrier", "pipeline"):  # a message that does not come, and no collective
        typed, words = WAYS["hang"]
    timeout = 1.0 if typed == "DistTimeoutError" else 25.0
    trial = {"way": way, "mode": mode, "size": size, "timeout": timeout}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(trial) + "\n")
    server.stdin.flush()
    ranks: list[dict[str, Any]] = json.loads(server.stdout.readline())
    survivors = ranks if way == "barrier" else ranks[:-1]
    for rank in survivors:
        assert rank["code"] == 0
        assert rank["typed"] in (typed, "GroupFailedError")
        # Where two survive, one may learn of it from the other, which gave up first.
        told = ("says rank", "gave up waiting")
        assert any(each in rank["text"] for each in (words, *told))
        assert rank["saved"]
    assert typed in [rank["typed"] for rank in survivors]
    assert {rank["error"] for rank in survivors} <= {"RuntimeError", "GroupFailedError", typed}

"""A peer misbehaves in DistributedDataParallel's backward: every survivor gets an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interop/torch_failing_peer.py"

pytestmark = [pytest.mark.slow, pytest.mark.more, pytest.mark.timeout(200)]

# What the last rank does in its last step, and the words that cydist's error must have.
WAYS = {
    "raise": ("PeerFailedError", "was lost"),
    "exit": ("PeerFailedError", "was lost"),
    "kill": ("PeerFailedError", "was lost"),
    "fewer-steps": ("PeerFailedError", "was lost, step 0: it closed its connections and left"),
    "hang": ("DistTimeoutError", " s: nothing from rank"),
    "barrier": ("MismatchError", "barrier"),
}
MODES = ["plain", "unused", "static-graph", "python-hook", "builtin-hook"]
Trial = tuple[str, str, int]


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


@pytest.mark.parametrize("size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_survivors_get_an_exception(
    way: str, mode: str, size: int, server: subprocess.Popen[str]
) -> None:
    """It has cydist's whole text, the group names the typed error, a checkpoint can be written
    afterwards, and no signal ends a rank."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"way": way, "mode": mode, "size": size}) + "\n")
    server.stdin.flush()
    ranks: list[dict[str, Any]] = json.loads(server.stdout.readline())
    typed, words = WAYS[way]
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

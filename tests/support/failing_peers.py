"""Trials of a program that torch_failing_peer.serve runs: one rank misbehaves as torch trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# What the last rank does in its last step, and the words that cydist's error must have.
WAYS = {
    "raise": ("PeerFailedError", "was lost"),
    "exit": ("PeerFailedError", "was lost"),
    "kill": ("PeerFailedError", "was lost"),
    "fewer-steps": ("PeerFailedError", "it closed its connections and left"),
    "hang": ("DistTimeoutError", " s waiting for rank"),
    "barrier": ("MismatchError", "barrier"),
}

Server = subprocess.Popen[str]


@contextmanager
def serving(program: Path) -> Generator[Server, None, None]:
    """Start the program; expect it to end well after the last trial."""
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def check_trial(server: Server, way: str, mode: str, size: int, *, late: bool = False) -> None:
    """Run a trial, and check what each survivor got.

    Args:
        server: What `serving` yields.
        way: One of WAYS.
        mode: How the program trains.
        size: Ranks.
        late: Whether the survivors can see nothing but a timeout.
    """
    typed, words = WAYS["hang" if late else way]
    timeout = 1.0 if typed == "DistTimeoutError" else 25.0
    trial = {"way": way, "mode": mode, "size": size, "timeout": timeout}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(trial) + "\n")
    server.stdin.flush()
    ranks: list[dict[str, Any]] = json.loads(server.stdout.readline())
    survivors = ranks if way == "barrier" else ranks[:-1]
    for rank in survivors:
        assert rank["code"] == 0, ranks
        assert rank["typed"] in (typed, "GroupFailedError"), ranks
        # Where two survive, one may learn of it from the other, which gave up first.
        told = ("says rank", "gave up waiting")
        assert any(each in rank["text"] for each in (words, *told)), ranks
        assert rank["saved"], ranks
    assert typed in [rank["typed"] for rank in survivors], ranks
    assert {rank["error"] for rank in survivors} <= {"RuntimeError", "GroupFailedError", typed}

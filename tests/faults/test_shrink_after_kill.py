"""Processes that are killed in the middle of things, and those that go on without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transport_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/programs/survivors.py"
DEADLINE = 50.0


def run(directory: Path, transport: str, failpoints: dict[int, list[str]], ranks: int) -> str:
    """What the ranks print; those with failpoints must have been killed, the others be done."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CYDIST_", "GLOO_"))}
    common = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory)}
    common |= {"CYDIST_TRANSPORT": transport}
    url = f"tcp://127.0.0.1:{free_port()}"
    output = (directory / "output").open("w+b")
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), url, f"{rank}", f"{ranks}", *failpoints.get(rank, ())],
            env={**inherited, **common},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        codes = [process.wait(DEADLINE) for process in processes]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for process in processes:
            process.kill()
            process.wait()
        output.close()
    text = (directory / "output").read_text()
    assert codes == [-9 if rank in failpoints else 0 for rank in range(ranks)], text
    return text


@pytest.mark.parametrize(
    ("transport", "failpoints"),
    [
        pytest.param("tcp", {2: ["send.mid:kill:5"]}, id="one"),
        pytest.param("tcp", {0: ["recv.mid:kill:7"]}, id="rank0-and-the-store"),
        pytest.param("shm", {1: ["enter:kill:4"], 3: ["enter:kill:4"]}, id="two-at-once"),
        pytest.param("tcp", {1: ["enter:kill:4"], 2: ["", "post:kill:5"]}, id="one-while-agreeing"),
        pytest.param("shm", {3: ["enter:kill:4"], 0: ["", "enter:kill"]}, id="one-in-the-barrier"),
        pytest.param("tcp", {2: ["enter:kill:4"], 0: ["", "enter:kill:2"]}, id="one-right-after"),
    ],
)
def test_killed_ranks(tmp_path: Path, transport: str, failpoints: dict[int, list[str]]) -> None:
    """Four ranks, some killed while reducing or while the others shrink: the rest reduce right."""
    text = run(tmp_path, transport, failpoints, 4)
    left = [rank for rank in range(4) if rank not in failpoints]
    said = re.findall(r"(\d): now (\d) of (\d), sum (\d+),", text)
    total = f"{sum(2**rank for rank in left)}"
    expected = [(f"{r}", f"{i}", f"{len(left)}", total) for i, r in enumerate(left)]
    assert sorted(said) == expected, text

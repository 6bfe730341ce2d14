"""What the scripts leave behind when they fail early: nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 20.0


class Tree:
    """A folder with one of cydist's scripts, and stand-ins for what the script calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._gate = root / "gate"
        os.mkfifo(self._gate)

    def copy(self, script: str) -> None:
        (self.root / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / script, self.root / script)

    def stand_in(self, path: str, body: str = "") -> None:
        program = self.root / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def endless(self, path: str) -> None:
        """A program that ends with this test only."""
        self.stand_in(path, f"exec cat {self._gate}")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script, until all that it has started has ended: they share its output."""
        return subprocess.run(
            [str(self.root / script)], capture_output=True, text=True, timeout=DEADLINE, check=False
        )

    def open_gate(self) -> None:
        os.close(os.open(self._gate, os.O_RDWR))


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.open_gate()


def test_a_check_that_fails_ends_the_others(tree: Tree) -> None:
    """Those that run in the background of scripts/check end with it."""
    tree.copy("scripts/check")
    for name in ("cython-lint", "stubtest"):
        tree.endless(f".venv/bin/{name}")
    tree.stand_in(".venv/bin/ruff", "exit 3")
    assert tree.run("scripts/check").returncode == 3


def test_a_test_that_fails_ends_the_checks(tree: Tree) -> None:
    """And all that scripts/check has started."""
    tree.copy("scripts/test")
    tree.stand_in("scripts/install")
    tree.stand_in("scripts/test-mpi", "exit 3")
    tree.endless(".venv/bin/cython-lint")
    tree.stand_in("scripts/check", ".venv/bin/cython-lint & .venv/bin/cython-lint")
    assert tree.run("scripts/test").returncode == 3

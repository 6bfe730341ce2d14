"""Scripts leave nothing behind if they fail early; scripts/test-wheel refuses wrong wheels."""

from __future__ import annotations

import os
import platform
import re
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

    def run(
        self, script: str, *arguments: str, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, until all that it has started has ended: they share its output."""
        return subprocess.run(
            [str(self.root / script), *arguments],
            capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=self.root,
            env={**os.environ, **settings},
        )  # fmt: skip

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


SHOWN = 'is consistent with\nthe following platform tag:\n"{}".'
PLATFORM = f"manylinux_2_28_{platform.machine()}"
PYTHON = """
[ "$2" = venv ] || exit 3
mkdir -p "$3/bin"
for program in python cydistrun; do
  printf '#!/bin/sh\\necho "$@" >>{log}\\n' >"$3/bin/$program"
  chmod +x "$3/bin/$program"
done
"""


@pytest.fixture
def wheels(tree: Tree) -> Tree:
    """A tree with two wheels, which stand-ins for auditwheel, twine and CPython take."""
    tree.copy("scripts/test-wheel")
    (tree.root / "dist").mkdir()
    (tree.root / "dist/cydist-0.9.0.tar.gz").touch()
    tree.stand_in(".venv-wheels/bin/auditwheel", f"echo '{SHOWN.format(PLATFORM)}'")
    tree.stand_in(".venv-wheels/bin/twine")
    for minor in (11, 12):
        (tree.root / f"dist/cydist-0.9.0-cp3{minor}-cp3{minor}-manylinux.whl").touch()
        body = PYTHON.format(log=tree.root / "log")
        tree.stand_in(f".venv-wheels-3.{minor}/bin/python", body)
    return tree


def test_each_wheel_is_installed_and_tested(wheels: Tree) -> None:
    """With nothing compiled, and the contract tests on both backends."""
    done = wheels.run("scripts/test-wheel", "dist")
    assert done.returncode == 0, done.stderr
    log = (wheels.root / "log").read_text()
    for minor in (11, 12):
        name = f"cydist-0.9.0-cp3{minor}-cp3{minor}-manylinux.whl"
        assert re.search(rf"pip .*--only-binary :all: \S*/dist/{name}\[test\]$", log, re.M)
    assert log.count("--pyargs cydist.testing --cydist-backend inproc --cydist-backend tcp\n") == 2


@pytest.mark.parametrize("shown", ["linux_x86_64", "manylinux_2_34_x86_64"])
def test_a_wheel_for_another_glibc_is_refused(wheels: Tree, shown: str) -> None:
    """By name, before it is installed."""
    wheels.stand_in(".venv-wheels/bin/auditwheel", f"echo '{SHOWN.format(shown)}'")
    done = wheels.run("scripts/test-wheel", "dist")
    assert done.returncode == 1
    assert "cydist-0.9.0-cp311-cp311-manylinux.whl is not for manylinux_2_28" in done.stderr
    assert not (wheels.root / "log").exists()


def test_a_folder_without_wheels_is_refused(wheels: Tree) -> None:
    """There is nothing to check."""
    for wheel in (wheels.root / "dist").glob("*.whl"):
        wheel.unlink()
    wheels.stand_in(".venv-wheels/bin/auditwheel", '[ -e "$2" ]')
    assert wheels.run("scripts/test-wheel", "dist").returncode == 1


def test_what_twine_refuses_is_refused(wheels: Tree) -> None:
    """A description that PyPI would not show."""
    wheels.stand_in(".venv-wheels/bin/twine", "exit 3")
    assert wheels.run("scripts/test-wheel", "dist").returncode == 3
    assert not (wheels.root / "log").exists()


def test_a_missing_python_is_named(wheels: Tree) -> None:
    """With the command that makes its environment."""
    (wheels.root / ".venv-wheels-3.12/bin/python").unlink()
    done = wheels.run("scripts/test-wheel", "dist")
    assert done.returncode == 1
    assert "PYTHONS=3.12 scripts/wheels makes" in done.stderr


@pytest.fixture
def root(wheels: Tree) -> Tree:
    """As root, with debootstrap; unshare shows what would run in a root of Debian."""
    (wheels.root / "docs/examples").mkdir(parents=True)
    (wheels.root / "scripts/demo").touch()
    wheels.stand_in("bin/id", "echo 0")
    for program in ("debootstrap", "dpkg"):
        wheels.stand_in(f"bin/{program}")
    wheels.stand_in("bin/unshare", 'for last; do :; done; cat "$last/inside"')
    wheels.stand_in("scripts/debian-root", 'mkdir -p "$1"')
    wheels.stand_in(".venv-wheels-3.11/bin/python", '[ "$4" = download ]')
    return wheels


def with_stand_ins(tree: Tree) -> dict[str, str]:
    return {"ROOT": "1", "PATH": f"{tree.root / 'bin'}:{os.environ['PATH']}"}


def test_a_wheel_is_tested_in_a_root(root: Tree) -> None:
    """That for CPython 3.11: the contract tests and the demo. The other has an environment."""
    done = root.run("scripts/test-wheel", "dist", **with_stand_ins(root))
    assert done.returncode == 0, done.stderr
    assert "--pyargs cydist.testing --cydist-backend inproc --cydist-backend tcp\n" in done.stdout
    assert done.stdout.count("scripts/demo\n") == 1
    assert (root.root / "log").read_text().count("--pyargs") == 1


def test_a_root_takes_root(root: Tree) -> None:
    """Who is not root is told so, before anything is built."""
    root.stand_in("bin/id", "echo 1000")
    done = root.run("scripts/test-wheel", **with_stand_ins(root))
    assert done.returncode == 1
    assert done.stderr == "scripts/test-wheel: ROOT=1 takes root\n"

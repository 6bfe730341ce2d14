"""In CI a test that is skipped has failed, unless the machine lacks what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPS = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("nobody installed it")

@pytest.mark.skipif(True, reason="not today")
def test_marked():
    pass

def test_excused():
    pytest.skip("no IPv6")

@pytest.mark.xfail(reason="known")
def test_known():
    raise AssertionError
"""
MODULE = "import pytest\n\npytest.importorskip('no_such_module')\n"


def results(directory: Path, name: str, content: str, environ: dict[str, str]) -> tuple[int, str]:
    """What pytest makes of a file with this project's conftest.py."""
    (directory / name).write_text(content)
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--color=no",
         "-c", ROOT / "pyproject.toml", "--rootdir", directory, directory / name],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        cwd=directory, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def test_a_skip_is_a_failure_in_ci(tmp_path: Path) -> None:
    """Inside a test or by a mark, with the reason; not where the machine lacks something."""
    code, said = results(tmp_path, "test_some.py", SKIPS, {"CI": "true"})
    assert code == 1
    assert "skipped in CI: Skipped: nobody installed it" in said
    assert "skipped in CI: Skipped: not today" in said
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in said


def test_a_module_that_is_skipped_is_a_failure_in_ci(tmp_path: Path) -> None:
    """The run ends with an error, and the reason."""
    code, said = results(tmp_path, "test_module.py", MODULE, {"CI": "true"})
    assert code != 0
    assert "could not import 'no_such_module'" in said
    assert "1 error" in said


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("test_some.py", SKIPS, "1 passed, 3 skipped, 1 xfailed"),
    ("test_module.py", MODULE, "1 skipped"),
], ids=["tests", "module"])  # fmt: skip
def test_a_skip_is_none_elsewhere(tmp_path: Path, name: str, content: str, expected: str) -> None:
    """Without CI they are skipped."""
    _, said = results(tmp_path, name, content, {})
    assert f"= {expected} in " in said


def test_ci_says_so(tmp_path: Path) -> None:
    """What CI runs sets the variable."""
    stand_in = tmp_path / "timeout"
    stand_in.write_text('#!/bin/sh\necho "CI=$CI $*"\n')
    stand_in.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": ""}
    done = subprocess.run(
        [ROOT / ".ci/run"], env=environ, capture_output=True, text=True, timeout=20, check=False
    )
    command = "scripts/test && scripts/test-all && scripts/test-heavy"
    assert done.stdout == f"CI=true 3300 sh -c {command}\n"

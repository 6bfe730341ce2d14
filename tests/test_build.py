"""Every way to build with plain pip: in the tree, editable, a wheel, an sdist and its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEFT_OUT = (".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "demo-output")
# Build requirements are there already; fetching them again would need a network.
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")

PROGRAM = """
import numpy as np
import cydist as dist

dist.init_process_group("tcp")
x = np.array([1.0, 10.0]) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(dist.__file__, x.tolist())
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a command to its end, with `path` in front of sys.path; what it printed."""
    environment = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def check_works(package: Path, scratch: Path) -> None:
    """Two ranks, started by cydistrun with the cydist in `package`, add up their arrays."""
    program = scratch / "program.py"
    program.write_text(PROGRAM)
    launch = (sys.executable, "-m", "cydist.launch", "--nproc-per-node", "2", str(program))
    printed = run(*launch, cwd=scratch, path=package).splitlines()
    expected = f"{package}/cydist/__init__.py [3.0, 30.0]"
    assert [line.endswith(expected) for line in printed] == [True, True], printed


def copy_of_sources(scratch: Path) -> Path:
    """A copy of the tree without anything built."""
    tree = scratch / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree built in place."""
    tree = copy_of_sources(tmp_path_factory.mktemp("in-place"))
    run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tree)
    return tree


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    scratch = tmp_path_factory.mktemp("sdist")
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(scratch)!r})"
    run(sys.executable, "-c", hook, cwd=copy_of_sources(scratch))
    (archive,) = scratch.glob("*.tar.gz")
    return archive


def sources() -> set[str]:
    """What a build needs, and what a user should get with it."""
    found = {
        str(path.relative_to(ROOT))
        for room in ("cydist", "src")
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".typed"}
    }
    return found | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}


def test_sdist_is_complete(sdist: Path) -> None:
    """The sdist holds every source, and no C that Cython generated."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    held = {name for name in names if not name.startswith("cydist.egg-info")}
    assert sources() - held == set()
    assert {name for name in held if name.endswith(".c")} == {
        name for name in sources() if name.endswith(".c")
    }


def check_wheel(wheel: Path, scratch: Path) -> None:
    """The wheel holds what runs and what types and cimports need; installed, it works."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {n for n in sources() if n.startswith("cydist/") and not n.endswith(".pyx")}
    assert wanted - held == set()
    assert {n for n in held if n.endswith((".pyx", ".c", ".h"))} == set()
    assert {"_cydist_pytest.py", "_cydist_torch.py"} <= held
    site = scratch / "site"
    run(*PIP, "install", *OFFLINE, "--target", site, wheel, cwd=scratch)
    check_works(site, scratch)
    told = run(sys.executable, "-m", "pytest", "--help", cwd=scratch, path=site)
    assert "--cydist-backend" in told


def test_wheel_from_sdist(sdist: Path, tmp_path: Path) -> None:
    """`pip wheel` of the sdist makes a wheel that works."""
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    check_wheel(wheel, tmp_path)


def test_wheel_from_tree(tree: Path, tmp_path: Path) -> None:
    """`pip wheel` of the tree makes a wheel that works."""
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path, tree, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    check_wheel(wheel, tmp_path)


def test_editable(tmp_path: Path) -> None:
    """`pip install --editable` builds into the tree, which works from there."""
    tree = copy_of_sources(tmp_path)
    site = tmp_path / "site"
    run(*PIP, "install", *OFFLINE, "--target", site, "--editable", tree, cwd=tmp_path)
    assert list(site.glob("*cydist*"))
    check_works(tree, tmp_path)


def test_in_place(tree: Path, tmp_path: Path) -> None:
    """`setup.py build_ext --inplace` builds into the tree, and leaves no C there."""
    generated = {p.name for p in (tree / "src").glob("**/*.c")}
    assert generated == {p.name for p in (ROOT / "src/kernels").glob("*.c")}
    check_works(tree, tmp_path)

"""Every way to build with plain pip: an sdist, its wheel, in its tree, editable.

Compiling takes long, so what lies in the sdist is compiled once, into the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEFT_OUT = (".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "demo-output")
# Build requirements are there already; fetching them again would need a network.
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")
FLAGS = "-g0 -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers"

PROGRAM = """
import numpy as np
import cydist as dist

dist.init_process_group("tcp")
x = np.array([1.0, 10.0]) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(dist.__file__, x.tolist())
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end, with some variables set; what it printed."""
    result = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def check_works(package: Path, scratch: Path) -> None:
    """Two ranks, started by cydistrun with the cydist in `package`, add up their arrays."""
    program = scratch / "program.py"
    program.write_text(PROGRAM)
    launch = (sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", str(program))
    printed = run(*launch, cwd=scratch, PYTHONPATH=str(package)).splitlines()
    expected = f"{package}/cydist/__init__.py [3.0, 30.0]"
    assert [line.endswith(expected) for line in printed] == [True, True], printed


def objects_of(tree: Path) -> dict[str, int]:
    """When each object file was written, in nanoseconds."""
    return {path.name: path.stat().st_mtime_ns for path in (tree / "build").rglob("*.o")}


def copy_of_sources(scratch: Path) -> Path:
    """A copy of the tree without anything built."""
    tree = scratch / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return tree


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    scratch = tmp_path_factory.mktemp("sdist")
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(scratch)!r})"
    run(sys.executable, "-c", hook, cwd=copy_of_sources(scratch))
    (archive,) = scratch.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def tree(sdist: Path) -> Path:
    """What lies in the sdist."""
    shutil.unpack_archive(sdist, sdist.parent)
    return sdist.with_name(sdist.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def compiled(tree: Path) -> str:
    """What the compilers said when `pip wheel` built the tree; the wheel lies beside it."""
    aloud = ("sh", "-c", 'exec "$0" "$@" 2>&1', *PIP[:-1], "-v")
    command = (*aloud, "wheel", *OFFLINE, "--wheel-dir", tree.parent, tree)
    # pip warns where Python writes no bytecode.
    return run(*command, cwd=tree.parent, CFLAGS=FLAGS, PYTHONDONTWRITEBYTECODE="")


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


@pytest.mark.more
def test_without_warnings(compiled: str) -> None:
    """Neither Cython nor the C compiler warns of anything."""
    assert len(re.findall(r"gcc .*-Wextra.* -c ", compiled)) > len(
        list((ROOT / "src").rglob("*.pyx"))
    )
    assert re.findall(r".*(?:warning|performance hint):.*", compiled) == []


@pytest.mark.more
@pytest.mark.usefixtures("compiled")
def test_wheel(tree: Path, tmp_path: Path) -> None:
    """`pip wheel` of the sdist makes one that holds what runs and what types and cimports need;
    installed, it works."""
    (wheel,) = tree.parent.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {n for n in sources() if n.startswith("cydist/") and not n.endswith(".pyx")}
    assert wanted - held == set()
    assert {n for n in held if n.endswith((".pyx", ".c", ".h"))} == set()
    assert {"_cydist_pytest.py", "_cydist_torch.py"} <= held
    site = tmp_path / "site"
    run(*PIP, "install", *OFFLINE, "--target", site, wheel, cwd=tmp_path)
    check_works(site, tmp_path)
    told = run(sys.executable, "-m", "pytest", "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "--cydist-backend" in told


@pytest.mark.more
@pytest.mark.usefixtures("compiled")  # so that there is little left to compile
def test_in_place(tree: Path, tmp_path: Path) -> None:
    """`setup.py build_ext --inplace` builds into the tree, and leaves no C there."""
    run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tree)
    generated = {p.name for p in (tree / "src").glob("**/*.c")}
    written = [*(ROOT / "src/kernels").glob("*.c"), *(ROOT / "src/vendor").glob("**/*.c")]
    assert generated == {p.name for p in written}
    check_works(tree, tmp_path)


@pytest.mark.more
@pytest.mark.usefixtures("compiled")
def test_editable(tree: Path, tmp_path: Path) -> None:
    """`pip install --editable` builds into the tree, which works from there, and compiles only what
    changed since the last build."""
    for built in (tree / "cydist/_native").glob("*.so"):
        built.unlink()
    (tree / "src/engine/call_queue.pyx").touch()
    before = objects_of(tree)
    run(*PIP, "install", *OFFLINE, "--target", tmp_path / "site", "--editable", tree, cwd=tmp_path)
    assert list((tmp_path / "site").glob("*cydist*"))
    assert [name for name, made in objects_of(tree).items() if made != before[name]] == [
        "call_queue.o"
    ]
    check_works(tree, tmp_path)

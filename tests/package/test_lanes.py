"""Every test is in a lane, and docs/dev/contributing.md has a row for every lane."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (ROOT / "scripts/test-heavy").read_text()


def heavy_lanes() -> list[str]:
    """The lanes of scripts/test-heavy that take turns."""
    turns = re.search(r"^  set -- (\w[\w ]+)$", HEAVY, re.M)
    assert turns is not None
    return turns[1].split()


def test_every_lane_is_in_the_table() -> None:
    """Each script that runs tests, and each heavy lane."""
    page = (ROOT / "docs/dev/contributing.md").read_text()
    scripts = [f"scripts/{path.name}" for path in (ROOT / "scripts").glob("test*")]
    lanes = [f"scripts/test-heavy {lane}" for lane in heavy_lanes()]
    rows = re.findall(r"^\| `(scripts/test[^`]*)` \|", page, re.M)
    assert sorted(rows) == sorted({*scripts, *lanes} - {"scripts/test-heavy"})


def test_every_turn_is_a_lane() -> None:
    """What takes turns is what scripts/test-heavy knows."""
    known = re.findall(r"^    (\w+)\)", HEAVY, re.M)
    assert sorted(known) == sorted(heavy_lanes())


def test_every_long_test_is_in_a_heavy_lane() -> None:
    """scripts/test-heavy names its file or folder, or a script of its own: scripts/test-mpi for
    backend mpi, scripts/test-clients, and scripts/test-monitoring."""
    run = [line for line in HEAVY.splitlines() if "-m long" in line]
    named = tuple(re.findall(r"\btests/[\w/.]+", " ".join(run)))
    marked = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bmark\.long\b|[*+] ?long\(|\blong_but\(", path.read_text())
    ]
    assert len(marked) > 5
    named += ("tests/backends/mpi", "tests/clients", "tests/monitoring")
    assert [f for f in marked if not f.startswith(named)] == []


def test_scripts_name_extras() -> None:
    """What scripts/install and pip are asked for is in pyproject.toml, but for torch's version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = set()
    for script in (ROOT / "scripts").glob("test*"):
        text = script.read_text()
        for names in re.findall(r"(?:extras=|scripts/install )([a-z][\w,-]*)", text):
            asked |= set(names.split(","))
        for bracket in re.findall(r"cydist\[([\w$,-]+)\]", text):
            asked |= {bracket.replace("$mpi", mpi) for mpi in ("openmpi", "mpich")}
    assert len(asked) > 5
    assert asked - set(extras) == set()

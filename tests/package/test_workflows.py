"""Builds and tests elsewhere: GitHub's workflows and cibuildwheel; neither was run so far."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCRIPT = re.compile(r"\bscripts/[\w-]+")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs() -> dict[str, dict[str, Any]]:
    found = {}
    for workflow in WORKFLOWS:
        found |= yaml.safe_load(workflow.read_text())["jobs"]
    return found


def commands() -> str:
    """All that the jobs run, with the values of their matrices."""
    lines = []
    for job in jobs().values():
        lines += [step["run"] for step in job["steps"] if "run" in step]
        matrix = job.get("strategy", {}).get("matrix", {})
        lines += [each["commands"] for each in matrix.get("include", [])]
    return "\n".join(lines)


def pythons() -> list[str]:
    """The CPythons of pyproject.toml's classifiers, such as 3.11."""
    return re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one(workflow: Path) -> None:
    """It is YAML with triggers and jobs, and each job has a deadline, a machine and steps that
    either run something or use an action of a stated version."""
    content = yaml.safe_load(workflow.read_text())
    assert content[True]  # "on", as YAML reads it
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] > 0, name
        assert job["runs-on"], name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)
            assert "run" in step or "@v" in step["uses"], (name, step)


def test_scripts_of_workflows_exist() -> None:
    """And can be executed."""
    named = set(SCRIPT.findall(commands()))
    assert len(named) > 4
    assert [each for each in named if not os.access(ROOT / each, os.X_OK)] == []


def test_workflows_run_what_ci_runs() -> None:
    """Each script of .ci/run, the documentation, and the wheels."""
    wanted = {*SCRIPT.findall((ROOT / ".ci/run").read_text()), "scripts/docs", "scripts/wheels"}
    assert wanted - set(SCRIPT.findall(commands())) == set()


def test_every_heavy_lane_is_in_the_matrix() -> None:
    """Once."""
    turns = re.search(r"^  set -- (\w[\w ]+)$", (ROOT / "scripts/test-heavy").read_text(), re.M)
    assert turns is not None
    assert sorted(jobs()["heavy"]["strategy"]["matrix"]["lane"]) == sorted(turns[1].split())


def test_cibuildwheel_takes_its_configuration() -> None:
    """cibuildwheel itself reads it: a wheel for each CPython of the classifiers, for manylinux on
    x86-64 and ARM."""
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux",
         "--archs", "x86_64,aarch64", str(ROOT)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [f"cp{each.replace('.', '')}" for each in pythons()]
    expected = {f"{n}-manylinux_{machine}" for n in names for machine in ("x86_64", "aarch64")}
    assert len(names) > 2
    assert set(done.stdout.split()) == expected


def test_wheels_are_for_the_pythons_of_the_classifiers() -> None:
    """scripts/wheels builds one for each of them."""
    default = re.search(r"\$\{PYTHONS:-([\d. ]+)\}", (ROOT / "scripts/wheels").read_text())
    assert default is not None
    assert default[1].split() == pythons()

"""Protocols between ranks: every interleaving of a small model of each, by the model checker spin.

The head of each model names the functions that it models. A model has mutations, which leave out
or swap what makes the protocol right: each must fail, else the model could not have found it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = sorted(HERE.glob("*.pml"))
MACRO = re.compile(r"^#ifn?def (\w+)$", re.M)
MUTATIONS = [(path, name) for path in MODELS for name in sorted({*MACRO.findall(path.read_text())})]

# Steps of the longest run. A run of the largest model takes 1 GiB and some seconds.
LIMIT = "-m100000"


def check(model: Path, scratch: Path, *defines: str) -> str:
    """What spin's verifier prints of a model."""
    spin = shutil.which("spin")
    if spin is None:
        pytest.skip("spin is missing: apt-get install spin")
    flags = [f"-D{name}" for name in defines]
    for command in (
        [spin, *flags, "-a", model],
        ["gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c"],
    ):
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["./pan", LIMIT], cwd=scratch, capture_output=True, text=True, timeout=50, check=False
    )
    return done.stdout


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_model_holds(model: Path, tmp_path: Path) -> None:
    """No interleaving breaks an assertion or waits for ever; all were tried, and all code ran."""
    said = check(model, tmp_path)
    assert re.search(r"errors: 0$", said, re.M), said
    assert "Search not completed" not in said
    assert "max search depth too small" not in said
    unreached = re.findall(r"^\t.*, state \d+, (\".*\")$", said, re.M)
    assert set(unreached) <= {'"-end-"'}, said  # of processes that go on for ever


@pytest.mark.parametrize(
    ("model", "mutation"), MUTATIONS, ids=[f"{path.stem}-{name}" for path, name in MUTATIONS]
)
def test_mutation_fails(model: Path, mutation: str, tmp_path: Path) -> None:
    """A model without one of the things that it needs has an error."""
    said = check(model, tmp_path, mutation)
    assert re.search(r"errors: 1$", said, re.M), said
    assert re.search(r"assertion violated|invalid end state", said), said


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_model_names_what_it_models(model: Path) -> None:
    """The functions in the head of a model are in the files that it names there."""
    head = model.read_text().partition("*/")[0]
    named = re.findall(r"^     (src/\S+): ([\w, ]+)$", head, re.M)
    assert named != []
    for file, functions in named:
        text = (ROOT / file).read_text()
        for function in functions.split(", "):
            assert re.search(rf"^cdef .*\b{function}\(", text, re.M), f"{file} has no {function}"

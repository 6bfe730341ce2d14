"""Public docstrings have the sections that documentation tools read, and examples that run."""

from __future__ import annotations

import builtins
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from public_names import public

import cydist

griffe = pytest.importorskip("griffe")  # mkdocstrings reads docstrings with it
ROOT = Path(__file__).resolve().parents[2]
PUBLIC = dict(public())
NOTHING = {None, "None", inspect.Signature.empty}
ARRAYS = {"Array"}  # compiled, without a signature of its own


def sections(name: str) -> dict[str, Any]:
    """The sections of a docstring in Google's style, by kind."""
    text = griffe.Docstring(inspect.getdoc(PUBLIC[name]) or "", parser="google", lineno=1)
    found = text.parse(returns_multiple_items=False, returns_named_value=False, warnings=False)
    return {each.kind.value: each.value for each in found}


def signature(name: str) -> inspect.Signature:
    """The parameters of a function, or of the constructor of a class."""
    found = PUBLIC[name]
    made = isinstance(found, type) and "__init__" not in vars(found)
    return inspect.Signature() if made or name in ARRAYS else inspect.signature(found)


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_are_explained(name: str) -> None:
    """The section Args has all parameters, in their order, and no other."""
    expected = [each for each in signature(name).parameters if each != "self"]
    assert [each.name for each in sections(name).get("parameters", [])] == expected


@pytest.mark.parametrize("name", PUBLIC)
def test_results_are_explained(name: str) -> None:
    """A function that returns something has a section Returns."""
    if signature(name).return_annotation not in NOTHING and not isinstance(PUBLIC[name], type):
        assert "returns" in sections(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_exist(name: str) -> None:
    """Raises names exceptions of Python or public ones of cydist."""
    for each in sections(name).get("raises", []):
        found = getattr(cydist, each.annotation, None) or getattr(builtins, each.annotation)
        assert issubclass(found, BaseException)


@pytest.mark.parametrize("name", [each for each in PUBLIC if "." not in each])
def test_functions_and_classes_have_an_example(name: str) -> None:
    """Every public function and class has an example, but for exceptions."""
    found = PUBLIC[name]
    exception = isinstance(found, type) and issubclass(found, BaseException)
    assert exception or "examples" in sections(name)


def test_examples_run() -> None:
    """The examples give on both ranks of a job what they show."""
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2"]
    program = ROOT / "tests/programs/docstring_examples.py"
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=120, env=place
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 failed") == 2

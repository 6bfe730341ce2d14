"""Private names: an attribute with an underscore belongs to the class that sets it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = sorted((ROOT / "src").rglob("*.pyx"))
# Groups, and the modules that serve a part of a group's calls.
GROUPS = sorted(
    path
    for room in ("api", "groups", "backends/host", "backends/mpi", "backends/nccl")
    for path in (ROOT / "cydist" / room).glob("*.py")
)
ELSEWHERE = [ROOT / "cydist/executor.py", ROOT / "cydist/work.py"]

WORDS = re.compile(r'"""(?:.|\n)*?"""|#.*')  # docstrings and comments
# An attribute of another object, in the text or by its name.
OF_ANOTHER = re.compile(
    r"""(?<!\bself)(?<!\bcydist)\.(_[a-z]\w*)|[gsh][ea][ts]attr\([^,]+,\s*["'](_[a-z]\w*)""",
)


def private_reads(text: str) -> list[str]:
    """The private attributes that Cython code reads of other objects than its own."""
    return [a or b for a, b in OF_ANOTHER.findall(WORDS.sub("", text))]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if group._failed is not None:", ["_failed"]),
        ("if group.host._failed is not None or f(x)._open:", ["_failed", "_open"]),
        ("done._source = self.group.ranks[peer]", ["_source"]),
        ('found = getattr(group, "_native", None)', ["_native"]),
        ('setattr(group, "_native", None)', ["_native"]),
        ("self._count += 1", []),
        ("from cydist._native.group cimport Group", []),
        ('getattr(obj, "__array_interface__", None)', []),
        ('"""Reads group._failed."""  # and group._open', []),
    ],
)
def test_private_reads_are_found(code: str, found: list[str]) -> None:
    """The scan below finds an attribute however it is read, and nothing else."""
    assert private_reads(code) == found


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_compiled_code_reads_no_private_attribute(path: Path) -> None:
    """Compiled code uses attributes that Python classes offer it: no type checker sees the use of
    any other, so nothing would fail when one of those is renamed."""
    assert private_reads(path.read_text()) == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes_of(tree: ast.AST) -> list[ast.Attribute]:
    """The private attributes that a module reads and writes."""
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)
    ]


def own_attributes(tree: ast.AST) -> set[str]:
    """The private attributes and methods of a module's classes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found.add(member.name)
                elif isinstance(member, ast.Assign):
                    found |= {target.id for target in member.targets if is_name(target)}
                elif isinstance(member, ast.AnnAssign) and is_name(member.target):
                    found.add(member.target.id)
    return found | {
        node.attr
        for node in attributes_of(tree)
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def uses_of_others(text: str, of_cydist: set[str]) -> list[str]:
    """The private attributes that a module uses of objects of other modules of cydist."""
    tree = ast.parse(text)
    others = of_cydist - own_attributes(tree)
    return [
        ast.unparse(node)
        for node in attributes_of(tree)
        if node.attr in others and ast.unparse(node.value) not in {"self", "cls", "super()"}
    ]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("host._serial.run()", ["host._serial"]),
        ("self.host._serial = None", ["self.host._serial"]),
        ("self._serial.run()", []),
        ("super()._serial", []),
        ("class Own:\n    _serial = None\nhost._serial", []),
        ("class Own:\n    def _serial(self): ...\nhost._serial", []),
        ("class Own:\n    def f(self): self._serial = 1\nhost._serial", []),
        ("MPI._handleof(comm)", []),
    ],
)
def test_uses_of_others_are_found(code: str, found: list[str]) -> None:
    """The scan below finds other modules' private attributes, and no foreign library's."""
    assert uses_of_others(code, {"_serial"}) == found


@pytest.fixture(scope="module")
def of_cydist() -> set[str]:
    """The private attributes of all these classes."""
    modules = [ast.parse(path.read_text()) for path in [*GROUPS, *ELSEWHERE]]
    return {name for tree in modules for name in own_attributes(tree) if is_private(name)}


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_groups_have_an_interface(path: Path, of_cydist: set[str]) -> None:
    """A module uses a private attribute only of its own classes, or of those it derives from."""
    assert uses_of_others(path.read_text(), of_cydist) == []

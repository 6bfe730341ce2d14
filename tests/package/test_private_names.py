"""Private names: an attribute with an underscore belongs to the class that sets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = sorted((ROOT / "src").rglob("*.pyx"))

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

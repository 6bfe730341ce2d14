"""Prose: sentences of user pages are short, docstrings begin with what a function does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Pages of measurements and findings, which are not written for users.
LAB_NOTES = {"algorithms.md", "backends.md", "bugs.md", "gpu.md", "performance.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in LAB_NOTES),
]
MODULES = sorted(p for p in (ROOT / "cydist").rglob("*.py") if not p.name.startswith("test_"))
MOST_WORDS = 25
NO_BEGINNING = r"(What|Who\w*|Whose|Where|Why|How|Which|Is|Are|Was|Has|Does|Did|Can|May|Must)\b"


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page's paragraphs and lists, without code, tables and headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    lines = [line for line in text.split("\n") if not line.lstrip().startswith(("|", "#", "    "))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*\d])", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """No sentence of a page for users has more than 25 words."""
    assert [each for each in sentences(page) if len(each.split()) > MOST_WORDS] == []


def test_docstrings_begin_with_what_a_function_does() -> None:
    """No function's docstring begins with a question or a relative clause."""
    functions = [
        (path, node) for path in MODULES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]  # fmt: skip
    texts = {f"{p.name}:{n.lineno} {n.name}": ast.get_docstring(n) or "" for p, n in functions}
    assert {name: text for name, text in texts.items() if re.match(NO_BEGINNING, text)} == {}

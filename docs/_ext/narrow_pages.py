"""Lets tables fit narrow pages: long names break behind punctuation, cells of prose stay wide."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

LONG_NAME = 13  # characters that every column has room for
PROSE = 40  # characters from which a cell needs some width
CODE = re.compile(r'(<span class="pre">)([^<]+)(?=</span>)')
PUNCTUATION = re.compile(r"(?<=\w)([_./,:=(]+)(?=[\w'])")
CELL = re.compile(r"<td>((?:(?!</td>).)*)(?=</td>)", re.S)


def broken(match: re.Match[str]) -> str:
    """Return a name with places to break, if it is long."""
    start, name = match.groups()
    return start + (PUNCTUATION.sub(r"\1<wbr>", name) if len(name) > LONG_NAME else name)


def cell(match: re.Match[str]) -> str:
    """Return a cell, of a class of its own if its text is long."""
    long = len(re.sub(r"<[^>]*>", "", match[1])) > PROSE
    return f'<td class="prose">{match[1]}' if long else match[0]


def change(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Change the tables and names of a page."""
    if "body" in context:
        context["body"] = CELL.sub(cell, CODE.sub(broken, context["body"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("html-page-context", change)
    return {"parallel_read_safe": True}

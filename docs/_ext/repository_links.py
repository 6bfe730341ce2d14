"""Links from pages to files of the repository become the file's path: the site has no copy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def replace(app: Sphinx, name: str, source: list[str]) -> None:
    """Write the path in place of a link that leads out of docs/, or to a file that is no page."""
    page = Path(app.env.doc2path(name))

    def path(match: re.Match[str]) -> str:
        text, link, _ = match.groups()
        if "://" in link:
            return match[0]
        target = (page.parent / link).resolve()
        if target.suffix in (".md", ".png", ".svg") and target.is_relative_to(app.srcdir):
            return match[0]
        where = f"`{target.relative_to(ROOT)}`"
        return where if text.strip("`") == target.name else f"{text} ({where})"

    source[0] = LINK.sub(path, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", replace)
    return {"parallel_read_safe": True}

"""Signatures and docstrings of the reference, as a reader of Python expects them."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# Values that print as they are made, and what a program writes.
VALUES = {
    r"<?RedOpType\.(\w+)(?:: \d+>)?": r"ReduceOp.\1",
    r"datetime\.timedelta\(seconds=1800\)": "30 minutes",
    r"datetime\.timedelta\(seconds=300\)": "5 minutes",
}


def plain(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    """Replace what would be no Python, and leave out what all exceptions have."""
    if what == "exception" and "__init__" not in vars(obj):
        return "", ""
    if not signature:
        return None
    for pattern, value in VALUES.items():
        signature = re.sub(pattern, value, signature)
    return signature, returns


def skip(
    app: Sphinx, what: str, name: str, obj: object, skipped: bool, options: object
) -> bool | None:
    """Leave out the fields of named tuples, which the section Attributes explains."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def plain_returns(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show an exception's code, and let napoleon take no words before a colon for a type."""
    if what in ("data", "attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " -- ", 1)  # as for a type, too
    if what == "exception" and "code" in vars(obj):
        lines[1:1] = ["", f"Its code is ``{obj.code}``."]
    for number, line in enumerate(lines[:-1]):
        if line.strip() in ("Returns:", "Yields:"):
            text = lines[number + 1]
            lines[number + 1] = text.replace(text.strip(), f": {text.strip()}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-process-signature", plain)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", plain_returns, priority=100)  # before napoleon
    return {"parallel_read_safe": True}

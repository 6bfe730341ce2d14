"""Read the tables of programs that a test cannot import, since they need a launcher."""

from __future__ import annotations

import ast
from pathlib import Path


def names_in(program: Path, table: str) -> list[str]:
    """Return the names in a tuple that the program assigns to `table` with a type."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            assert isinstance(node.value, ast.Tuple)
            return [ast.unparse(entry) for entry in node.value.elts]
    raise AssertionError(f"{program} has no {table}")

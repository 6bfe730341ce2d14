"""More values of an axis, on which a test repeats a claim: scripts/test-all or a heavy lane runs
them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(*values: Any) -> list[Any]:
    """Return parameters of one value each, marked so that scripts/test leaves them out."""
    return [pytest.param(value, marks=pytest.mark.more) for value in values]


def long(*values: Any) -> list[Any]:
    """Return parameters of one value each, which only a heavy lane runs."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def long_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all the values as parameters, of which only a heavy lane runs those not kept."""
    chosen = list(kept)
    return [value if value in chosen else long(value)[0] for value in values]


def more_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all the values as parameters, of which scripts/test runs those that are kept."""
    chosen = list(kept)
    return [value if value in chosen else more(value)[0] for value in values]

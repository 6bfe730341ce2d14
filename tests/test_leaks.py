"""What is done often leaves nothing behind: memory, descriptors and threads stay as they are.

The long versions (scripts/test-long) find a leak of a few bytes a call, these one of a kilobyte.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("programs") / "leaks.py"
ALLOWED_KB = 4096  # that the process may gain in all
WARM_UP = 500
_spec = importlib.util.spec_from_file_location("leaks", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
leaks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(leaks)

# How often each kind is done: here, and in the long version.
HEAVY = {"groups", "groups that nobody uses", "groups that end with work under way"}
SLOW = {"groups that fail", "jobs"}


def times(kind: str, long: bool) -> tuple[int, int]:
    """Warm-up and count."""
    if kind in SLOW:
        return (50, 1000) if long else (20, 30)
    if kind in HEAVY:
        return (100, 10_000) if long else (50, 100)
    if kind == "blocking calls":
        return (WARM_UP, 1_000_000) if long else (WARM_UP, 1500)
    return (WARM_UP, 100_000) if long else (200, 500)


def found(kinds: list[str], transport: str, long: bool, timeout: float) -> dict[str, Any]:
    """What the process held before and after, by kind."""
    plan = [(kind, *times(kind, long)) for kind in kinds]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), transport.replace("shm", "tcp"), json.dumps(plan)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    return dict(json.loads(done.stdout))


def check(found: dict[str, Any], kind: str) -> None:
    """Nothing more after than before."""
    (memory, *before), (memory_later, *after) = found[kind]
    assert before == after, "descriptors and threads"
    assert memory_later - memory < ALLOWED_KB, "kilobytes"


@pytest.fixture(scope="module")
def after_a_while() -> Callable[[str], dict[str, Any]]:
    """Every kind in one process, by transport."""
    return functools.cache(lambda transport: found(list(leaks.KINDS), transport, False, 55))


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("kind", leaks.KINDS)
def test_nothing_is_left_behind(
    kind: str, transport: str, after_a_while: Callable[[str], dict[str, Any]]
) -> None:
    """A thousand calls, a few hundred groups."""
    check(after_a_while(transport), kind)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("kind", leaks.KINDS)
def test_nothing_is_left_behind_in_the_long_run(kind: str, transport: str) -> None:
    """A million blocking calls, a hundred thousand of every other kind, ten thousand groups."""
    check(found([kind], transport, True, 1750), kind)

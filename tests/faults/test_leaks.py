"""What is done often leaves nothing behind: memory, descriptors and threads stay as they are.

The long versions (scripts/test-heavy) find a leak of a few bytes a call, these one of a kilobyte.
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

import numpy as np
import pytest
import two_process_job
from extra_values import more
from two_process_job import TwoProcessJob

import cydist as dist

PROGRAM = Path(__file__).parents[1] / "programs" / "leaks.py"
ALLOWED_KB = 4096  # that the process may gain in all
# A process that makes no groups gains up to 320, one long array; on busy cores up to 1450, however
# many calls it makes.
ALLOWED_IN_MANY_CALLS_KB = 2048
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
        return (WARM_UP, 250_000) if long else (WARM_UP, 1500)
    return (WARM_UP, 25_000) if long else (200, 500)


def found(kinds: list[str], transport: str, long: bool, timeout: float) -> dict[str, Any]:
    """What the process held before and after, by kind."""
    plan = [(kind, *times(kind, long)) for kind in kinds]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), transport.replace("shm", "tcp"), json.dumps(plan)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    return dict(json.loads(done.stdout))


def check(found: dict[str, Any], kind: str, allowed: int = ALLOWED_KB) -> None:
    """Nothing more after than before."""
    (memory, *before), (memory_later, *after) = found[kind]
    # Fewer is fine: an idle thread of before may have ended meanwhile.
    assert all(b >= a for b, a in zip(before, after, strict=True)), "descriptors and threads"
    assert memory_later - memory < allowed, "kilobytes"


@pytest.fixture(scope="module")
def after_a_while() -> Callable[[str], dict[str, Any]]:
    """Every kind in one process, by transport."""
    return functools.cache(lambda transport: found(list(leaks.KINDS), transport, False, 55))


@pytest.mark.parametrize("transport", ["tcp", *more("inproc", "shm")])
@pytest.mark.parametrize("kind", leaks.KINDS)
def test_nothing_is_left_behind(
    kind: str, transport: str, after_a_while: Callable[[str], dict[str, Any]]
) -> None:
    """A thousand calls, a few hundred groups."""
    check(after_a_while(transport), kind)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("kind", leaks.KINDS)
def test_nothing_is_left_behind_in_the_long_run(kind: str, transport: str) -> None:
    """No call keeps 42 bytes, a blocking one 5; no group 420, and one that fails 4 KiB."""
    allowed = ALLOWED_KB if kind in HEAVY | SLOW else ALLOWED_IN_MANY_CALLS_KB
    check(found([kind], transport, True, 550), kind, allowed)


MANY_GROUPS = """
groups = [dist.new_group([0, 1]) for _ in range(int(sys.argv[2]))]
for group in groups:
    x = np.ones(1)
    dist.all_reduce(x, group=group)
    assert x[0] == 2
    assert dist.all_reduce(x, group=group, async_op=True).wait()
print(*(len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")))
dist.barrier()
dist.destroy_process_group()
"""


def live_groups(directory: Path, count: int) -> None:
    """So many groups of two processes, all of which work; what one process holds for them."""
    with TwoProcessJob(directory, MANY_GROUPS, str(count)) as other:

        def body() -> None:
            groups = [dist.new_group([0, 1]) for _ in range(count)]
            for group in groups:
                x = np.ones(1)
                dist.all_reduce(x, group=group)
                dist.all_reduce(x, group=group, async_op=True).wait()
            dist.barrier()
            for group in groups:
                dist.destroy_process_group(group)

        other.rank_0(body)
        assert other.process.stdout is not None
        descriptors, threads = map(int, other.process.stdout.readline().split())
        assert (0, "") == other.ended()
    assert descriptors <= 3 + 2 + 16  # standard streams, ranks, and ours
    assert threads <= 1 + 3


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_many_live_groups_share_descriptors_and_threads(tmp_path: Path, transport: str) -> None:
    """At most one descriptor a rank and 16 more, and three threads."""
    live_groups(tmp_path, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_ten_thousand_live_groups(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors and threads do not depend on the number of groups."""
    monkeypatch.setattr(two_process_job, "DEADLINE", 1700.0)
    live_groups(tmp_path, 10_000)

"""Failpoints are where they say, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from collective_cases import Case, Ranks

from cydist import _native

PROGRAM = """
import os, sys
from cydist import _native
_native.arm_failpoint(sys.argv[1])
for turn in range(3):
    _native.failpoint("connect")
    _native.failpoint("rendezvous")
    print(turn, flush=True)
"""


def turns_of(spec: str) -> tuple[list[str], int]:
    """What a process prints with this failpoint, and how it ends."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, spec],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ended.stdout.split(), ended.returncode


@pytest.mark.parametrize(
    ("spec", "turns", "code"),
    [
        ("", 3, 0),
        ("enter:kill", 3, 0),
        ("connect:kill", 0, -9),
        ("rendezvous:exit:2", 1, 70),
        ("connect:exit:4", 3, 0),
    ],
)
def test_happens_there_at_its_turn(spec: str, turns: int, code: int) -> None:
    """The process ends where it was told to, at the turn it was told to, or not at all."""
    printed, ended = turns_of(spec)
    assert (len(printed), ended) == (turns, code)


def test_a_message_ends_whose_turn_it_is_not() -> None:
    """Messages are written by halves, so that one can be half written, but to their ends."""
    group = Ranks(2, "tcp")
    case = Case("all_reduce", 2, 1000)
    _native.arm_failpoint("send.mid:kill:1000000")
    try:
        case.check(group.run(case, "doubling"))
    finally:
        _native.arm_failpoint("")
        group.close()


@pytest.mark.parametrize("spec", ["nowhere:kill", "enter", "enter:sing", "enter:kill:soon", ":"])
def test_wrong_specification(spec: str) -> None:
    """A failpoint that does not exist is refused, with those that do."""
    with pytest.raises(ValueError, match=r"enter, send\.mid.*kill, stop, exit"):
        _native.arm_failpoint(spec)


def test_wrong_specification_ends_the_start() -> None:
    """A misspelt CYDIST_FAILPOINT is an error of init_process_group, not a test that passes."""
    ended = subprocess.run(
        [sys.executable, "-c", "import cydist; cydist.init_process_group('inproc', rank=0, "
         "world_size=1, store=cydist.HashStore())"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "CYDIST_FAILPOINT": "sendmid:kill"},
    )  # fmt: skip
    assert "is no failpoint" in ended.stderr

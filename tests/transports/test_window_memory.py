"""The memory of groups' windows is given back, a rank that leaves or dies, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest
from transport_ranks import DEADLINE, Group, Ranks

from cydist import _native

WINDOW = 1 << 20  # bytes of one rank's slots in a group's windows


def test_groups_that_a_member_left_before_give_it_back() -> None:
    """Who comes when another has left already takes none, or leaves it for the next group."""
    with closing(Ranks("shm", 2)) as world:
        used = world.links[0].memory.used()
        for context in range(1, 40):
            early, late = world.group(context=context)
            early.close()
            assert not late.native.windows
            late.close()
        assert world.links[0].memory.used() <= used + 2 * WINDOW + (1 << 16)
        assert [group.native.windows for group in world.group(context=40)] == [True, True]


@pytest.mark.parametrize("dies", ["before", "after"])
def test_groups_with_a_dead_member_give_it_back(dies: str) -> None:
    """A process that has ended keeps no group's memory, whether it dies before or after others
    have asked for it."""
    with (
        closing(Ranks("tcp", 3)) as ranks,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        first = _native.SharedMemory.create(3, 24 << 20, bytes(range(32)))
        second = _native.SharedMemory.attach(os.dup(first.fd), bytes(range(32)))
        pids = {0: os.getpid(), 1: os.getpid(), 2: child.pid}
        ranks.links[:2] = [
            _native.ShmLink(link, each, pids)
            for link, each in zip(ranks.links[:2], (first, second), strict=True)
        ]
        # Groups that the dead one had windows with, or would have.
        groups = [ranks.group(context=context)[:2] for context in range(1, 6)]
        if dies == "before":
            end(child)
        used = []
        for pair in groups:
            assert [group.native.windows for group in pair] == [True, True]
            if dies == "before":
                used.append(leave(pair, first))
        if dies == "after":
            end(child)
            used = [leave(pair, first) for pair in groups]
        later = ranks.group(context=6, members=[0, 1, 2])[:2]
        assert [group.native.windows for group in later] == [True, True]
        assert first.used() == used[0]


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait until it has ended."""
    child.kill()
    child.wait(DEADLINE)


def leave(groups: list[Group], memory: _native.SharedMemory) -> int:
    """Close all ends; what is given out."""
    for group in groups:
        group.close()
    return int(memory.used())

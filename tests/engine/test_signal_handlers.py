"""Signal handlers that raise at any point of a call: they leave no message and no gap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupted_calls import DEADLINE, MOST_POINTS, CtrlC, interrupted_at

import cydist as dist
from cydist.testing import run_threads


class Alarm(Exception):
    """What another one raises."""


# Rank 1 takes part in none of them.
ALONE: dict[str, Callable[[Any, Any], Any]] = {
    "recv": lambda group, array: dist.recv(array, 1, group, timeout=0),
    "recv from anyone": lambda group, array: dist.recv(array, None, group, timeout=0),
    "recv by group_src": lambda group, array: dist.recv(array, group=group, group_src=1, timeout=0),
    "strided recv": lambda group, array: dist.recv(array[::2], 1, group, timeout=0),
    "send": lambda group, array: dist.send(array, 1, group, timeout=0),
    "strided send": lambda group, array: dist.send(array[::2], 1, group, timeout=0),
}


def wherever_it_ends(
    call: Callable[[Any], Any], follow: Callable[[Any, int], Any], kind: type[BaseException]
) -> list[set[bool]]:
    """Raise `kind` on rank 0 in `call(group)`, which must time out, at each of its points. If the
    group takes calls then, both ranks `follow(group, rank)`. Per rank: did it, each time?"""

    def alone(group: Any) -> None:
        with contextlib.suppress(dist.DistTimeoutError):
            call(group)

    def body(rank: int) -> set[bool]:
        outcomes = set()
        flags = np.array([True, False], "u1")  # is there another point; is the group usable
        for point in range(1, MOST_POINTS):
            group = dist.new_group([0, 1])
            if rank == 0:
                flags[0] = interrupted_at(point, functools.partial(alone, group), kind)
                flags[1] = is_usable(group)
            dist.broadcast(flags, 0)
            if flags[1]:
                follow(group, rank)
            dist.destroy_process_group(group)
            outcomes.add(bool(flags[1]))
            if not flags[0]:
                break
        return outcomes

    return run_threads(body, 2)


# Raised in a generator that is being closed, Python swallows it.
IN_GENERATORS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@IN_GENERATORS
@pytest.mark.parametrize("call", ALONE)
def test_an_interrupt_at_any_point_of_a_message_leaves_none_under_way(call: str) -> None:
    """Its group has failed, or the next message is the first one; the array is let go of."""
    array = np.zeros(100_000)
    sender = 0 if call.endswith("send") else 1

    def follow(group: Any, rank: int) -> None:
        message = np.full(100_000, 5.0 if rank == sender else 0.0)
        if rank == sender:
            dist.send(message, 1 - rank, group, timeout=DEADLINE)
        else:
            dist.recv(message, 1 - rank, group, timeout=DEADLINE)
        assert message.all()

    ended = wherever_it_ends(lambda group: ALONE[call](group, array), follow, CtrlC)
    assert ended == [{True, False}] * 2
    assert not array.any()


@IN_GENERATORS
def test_an_alarm_at_any_point_of_a_collective_leaves_no_gap() -> None:
    """What a handler raises need not be an interrupt: its group has failed, or the ranks' next
    calls have one number."""

    def call(group: Any) -> None:
        dist.all_reduce(np.ones(3), group=group, timeout=0)

    def follow(group: Any, rank: int) -> None:
        total = np.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3

    # The second time the choice of the algorithm is known, so other points follow each other.
    for _ in range(2):
        assert wherever_it_ends(call, follow, Alarm) == [{True, False}] * 2


def is_usable(group: Any) -> bool:
    """Does the group take calls?"""
    try:
        group.check_usable("test")
    except dist.GroupFailedError:
        return False
    return True

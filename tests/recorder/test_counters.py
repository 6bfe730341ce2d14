"""What a process's calls add up to, counted from outside its calls."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist import _native, recorder
from cydist.recorder.counters import MOST_GROUPS, OTHER_GROUPS, CallCounters, Kind
from cydist.testing import run_threads

KEPT = 2048
DEADLINE = 30.0


def look(counters: CallCounters) -> None:
    counters.look(_native.own_ring())


def by_call(counters: CallCounters) -> dict[str, tuple[int, int]]:
    """Calls and bytes, by the call's name."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for kind, counts in counters.counts.items():
        calls, nbytes = found[kind.call]
        found[kind.call] = calls + counts.calls, nbytes + counts.nbytes
    return found


def counted(
    body: Callable[[int, CallCounters], Any], size: int = 2
) -> tuple[CallCounters, dict[str, tuple[int, int]]]:
    """The calls and bytes that ranks add while they run as threads, and the counters."""
    counters = CallCounters()
    look(counters)  # counts the calls of other tests that the ring still has
    before = by_call(counters)
    run_threads(lambda rank: body(rank, counters), size, "tcp")
    look(counters)
    after = by_call(counters)
    added = {
        call: (calls - before[call][0], nbytes - before[call][1])
        for call, (calls, nbytes) in after.items()
    }
    return counters, {call: each for call, each in added.items() if each[0]}


@pytest.mark.parametrize("looks", [0, 1, 7])
def test_calls_and_bytes_are_exact(looks: int) -> None:
    """However often one looks meanwhile."""

    def body(rank: int, counters: CallCounters) -> None:
        for call in range(200):
            dist.all_reduce(np.ones(3))
            if rank == 0 and looks and call % (200 // looks) == 0:
                look(counters)
        for _ in range(5):
            (dist.send, dist.recv)[rank](np.ones(2, "f4"), 1 - rank)

    counters, added = counted(body)
    assert added == {"all_reduce": (400, 9600), "send": (5, 40), "recv": (5, 40)}
    assert counters.estimated == 0


def test_calls_that_left_the_ring_are_estimated() -> None:
    """As many as there were, as large as those that are found, and as many of each kind."""

    def body(rank: int, counters: CallCounters) -> None:
        for _ in range(3 * KEPT):
            dist.all_reduce(np.ones(4))
            dist.broadcast(np.ones(1), 0)

    counters, added = counted(body)
    calls = 2 * 2 * 3 * KEPT
    assert counters.estimated == calls - KEPT
    assert sum(each[0] for each in added.values()) == calls
    for call, nbytes in (("all_reduce", 32), ("broadcast", 8)):
        # The ring ends with a few more of one kind, since the ranks are not in step.
        assert added[call][0] == pytest.approx(calls / 2, rel=0.05)
        assert added[call][1] == pytest.approx(added[call][0] * nbytes, rel=1e-3)


def test_a_wait_counts_while_it_goes_on() -> None:
    """Its time grows from look to look, also that for the awaited rank, and is counted once."""
    waiting = threading.Event()

    def body(rank: int, counters: CallCounters) -> None:
        dist.barrier()
        if rank == 1:
            assert waiting.wait(DEADLINE)
            dist.send(np.ones(1), 0)
            return
        waited = threading.Thread(target=watch, args=(counters,))
        waited.start()
        dist.recv(np.ones(1), 1)
        waited.join()

    def watch(counters: CallCounters) -> None:
        seen: list[int] = []
        until = time.monotonic() + DEADLINE
        while len(set(seen)) < 5:
            assert time.monotonic() < until, seen
            look(counters)
            seen.append(counters.total().waited_ns)
            awaited.append(counters.awaited_ns[1])
        assert seen == sorted(seen)
        assert awaited == sorted(awaited)
        assert counters.running is not None
        assert (counters.running["call"], counters.running["waits_for"]) == ("recv", 1)
        waiting.set()

    awaited: list[int] = []
    counters = CallCounters()
    look(counters)
    before = sum(c.spent_ns for kind, c in counters.counts.items() if kind.call == "recv")
    run_threads(lambda rank: body(rank, counters), 2, "tcp")
    look(counters)
    (recv,) = (each for each in recorder.dump()["calls"][-4:] if each["call"] == "recv")
    after = sum(c.spent_ns for kind, c in counters.counts.items() if kind.call == "recv")
    assert after - before == pytest.approx(recv["ended_ns"] - recv["began_ns"], rel=1e-3)


def test_time_that_is_estimated_is_no_longer_than_the_time_between_looks() -> None:
    """A rank does not wait for longer than it exists."""
    began = time.monotonic_ns()
    waited: list[int] = []

    def body(rank: int, counters: CallCounters) -> None:
        waited.append(counters.total().waited_ns)
        for _ in range(2 * KEPT):
            dist.all_reduce(np.ones(1))

    counters, _ = counted(body)
    spent = time.monotonic_ns() - began
    assert counters.estimated > 0
    assert counters.total().waited_ns - waited[0] <= 2 * spent


def test_very_many_groups_are_counted_together() -> None:
    """From some number of groups on, so that metrics stay few."""

    def body(rank: int, counters: CallCounters) -> None:
        for _ in range(MOST_GROUPS + 10):
            group = dist.new_group([0, 1])
            dist.all_reduce(np.ones(1), group=group)
            dist.destroy_process_group(group)
            if rank == 0:
                look(counters)
        dist.barrier()

    counters, added = counted(body)
    names = {kind.group for kind in counters.counts}
    assert len(names - {OTHER_GROUPS, ""}) == MOST_GROUPS
    assert added["all_reduce"] == (2 * (MOST_GROUPS + 10), 16 * (MOST_GROUPS + 10))
    assert Kind(OTHER_GROUPS, "tcp", "all_reduce") in counters.counts

"""Ctrl-C: in every wait, and between any two steps of one."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.executor import Serial
from cydist.testing import run_threads

MOST_POINTS = 10_000  # far more than any call here has


class CtrlC(KeyboardInterrupt):
    """What a signal handler raises."""


def interrupted_at(point: int, call: Callable[[], Any]) -> bool:
    """Run `call`; raise CtrlC in it at its n-th point: False if it has fewer.

    The points are those at which Python runs signal handlers: when a function begins, and
    when a compiled one has returned.
    """
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and argument is not sys.setprofile:
            count += 1
            if count == point:
                raise CtrlC

    sys.setprofile(watch)
    try:
        call()
    except CtrlC:
        return True
    finally:
        sys.setprofile(None)
    return False


def every_point(attempt: Callable[[int], bool], step: int = 1) -> int:
    """Call attempt(1), attempt(2), ... until one is not interrupted; how many were."""
    for point in range(1, MOST_POINTS, step):
        if not attempt(point):
            return point - 1
    raise AssertionError("it never ends")


def works(serial: Serial) -> bool:
    """Does a call run, on the caller's thread and behind another?"""
    ran = []
    deadline = time.monotonic() + 20
    first = serial.run("first", lambda: ran.append(1), deadline, ran.append)
    queued = serial.start("queued", lambda: ran.append(2), None)
    second = serial.run("second", lambda: ran.append(3), deadline, ran.append)
    queued.wait(20)
    return first and second and [1, 2, 3] == ran


def test_an_interrupt_at_any_point_of_a_blocking_call_leaves_the_queue_working() -> None:
    """The turn is given back, whether or not the call ran."""

    def attempt(point: int) -> bool:
        serial = Serial()
        far = time.monotonic() + 60
        ended = interrupted_at(point, lambda: serial.run("x", lambda: None, far, print))
        assert works(serial), point
        return ended

    assert every_point(attempt) > 4


def test_an_interrupt_at_any_point_of_starting_a_call_leaves_the_queue_working() -> None:
    """Later calls find a thread, though it is not known whether this one did."""

    def attempt(point: int) -> bool:
        serial = Serial()
        ended = interrupted_at(point, lambda: serial.start("x", lambda: None, None))
        assert works(serial), point
        return ended

    assert every_point(attempt) > 10


def test_an_interrupt_at_any_point_leaves_the_group_usable_or_failed() -> None:
    """Never busy for ever: the next call runs, or raises GroupFailedError, at once."""

    def body(rank: int) -> tuple[int, int]:
        outcomes = []

        def attempt(point: int) -> bool:
            group = dist.new_group([0])
            array = np.ones(3)
            ended = interrupted_at(point, lambda: dist.all_reduce(array, group=group))
            with contextlib.suppress(dist.GroupFailedError):
                dist.all_reduce(array, group=group, timeout=30)
                outcomes.append("usable")
            dist.destroy_process_group(group)
            return ended

        return every_point(attempt), len(outcomes)

    ((points, usable),) = run_threads(body, 1)
    assert 10 < usable < points - 10  # before anything began, and when it was over


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_an_interrupted_call_behind_an_asynchronous_one_writes_nothing_more(transport: str) -> None:
    """It had begun on another thread; when the caller gets the exception it has ended."""
    begun = threading.Event()

    def body(rank: int) -> None:
        group = dist.new_group([0, 1])
        array = np.full(1000, 1.0)
        dist.barrier()
        if rank == 1:
            first = dist.all_reduce(np.ones(1), group=group, async_op=True)
            first.wait(30)
            assert begun.wait(30)
            dist.barrier()  # rank 0 has been interrupted
            with pytest.raises(dist.DistError):
                dist.all_reduce(np.full(1000, 2.0), group=group, timeout=20)
            dist.barrier()
            return
        first = dist.all_reduce(np.ones(1), group=group, async_op=True)
        # The wait that an interrupt ends: for a call that is at work on another thread.
        work_class = type(first)
        original = work_class.done_by

        def done_by(work: Any, deadline: float) -> bool:
            work_class.done_by = original  # type: ignore[method-assign]
            assert first.wait(30)
            while group._seq < 2:
                first.done_by(0)
            begun.set()
            raise CtrlC

        work_class.done_by = done_by  # type: ignore[method-assign]
        with pytest.raises(CtrlC):
            dist.all_reduce(array, group=group)
        before = array.tobytes()
        dist.barrier()
        dist.barrier()  # rank 1 has tried
        assert before == array.tobytes()
        with pytest.raises(dist.GroupFailedError):
            dist.barrier(group)

    run_threads(body, 2, transport)

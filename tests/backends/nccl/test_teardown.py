"""How a group gives up its communicator and its stream: beside calls that are under way, too."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest

import cydist as dist
from cydist.backends.nccl import binding, failure
from cydist.testing import run_threads


def test_a_communicator_ends_when_nobody_is_in_a_call(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has seen the group well, and is about to call NCCL, finds what it calls."""
    monkeypatch.setattr(failure, "CALL_SECONDS", fake_gpu_threaded.DEADLINE)
    assert ended_in_a_call(gpus) == ["call", "end"]


def test_a_call_that_hangs_does_not_keep_a_communicator(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's first calls may block in the host until the communicator is aborted."""
    monkeypatch.setattr(failure, "CALL_SECONDS", 0.01)
    assert ended_in_a_call(gpus, hangs=True) == ["end", "call"]


def ended_in_a_call(gpus: Any, *, hangs: bool = False) -> list[str]:
    """What comes first, if a group is aborted while a thread is about to call NCCL: the call, or
    the communicator's end; one that hangs returns when that has come."""
    order: list[str] = []
    inside, waiting, going, ended = (threading.Event() for _ in range(4))

    def body(rank: int) -> None:
        group: Any = dist.new_group()
        comm, abort, reduce = group.comm, group.comm.abort, group.comm.all_reduce

        def late(*arguments: int) -> None:
            inside.set()
            assert (ended if hangs else going).wait(fake_gpu_threaded.DEADLINE)
            order.append("call")
            reduce(*arguments)

        def end() -> None:
            order.append("end")
            ended.set()
            abort()

        def call() -> None:
            threading.current_thread().name = "rank 0"
            with contextlib.suppress(dist.DistError):  # when it finds the group failed
                dist.all_reduce(gpus.array(np.ones(3)), dist.ReduceOp.SUM, group)

        def left(seconds: float) -> bool:
            if seconds:  # the thread that is to end the communicator has come
                waiting.set()
            return bool(before(seconds))

        before = group.failures._wait_until_left
        vars(group.failures).update(_wait_until_left=left)
        vars(comm).update(all_reduce=late, abort=end)
        caller = threading.Thread(target=call)
        caller.start()
        assert inside.wait(fake_gpu_threaded.DEADLINE)
        aborter = threading.Thread(target=lambda: dist.abort(group))
        aborter.start()
        assert waiting.wait(fake_gpu_threaded.DEADLINE)
        going.set()
        for thread in (caller, aborter):
            thread.join(fake_gpu_threaded.DEADLINE)
        assert ended.is_set()

    run_threads(body, 1, "nccl")
    return order[:2]  # it is asked to end again when the group is destroyed


def test_the_end_of_a_process_waits_for_calls(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may be in a call of NCCL's then, which must not lose the communicator."""
    order: list[str] = []
    inside, asked, going = (threading.Event() for _ in range(3))
    monkeypatch.setattr(binding, "CALL_SECONDS", fake_gpu_threaded.DEADLINE)

    def body(rank: int) -> None:
        group: Any = dist.new_group()
        comm, reduce = group.comm, group.comm.all_reduce
        # It is destroyed if the GPU has passed the call by then, and aborted otherwise.
        ends = {"destroy": comm.destroy, "abort": comm.abort}

        def late(*arguments: int) -> None:
            inside.set()
            assert going.wait(fake_gpu_threaded.DEADLINE)
            order.append("call")
            reduce(*arguments)

        def end(way: str) -> None:
            order.append("end")
            ends[way]()

        def call() -> None:
            threading.current_thread().name = "rank 0"
            with contextlib.suppress(dist.DistError):
                dist.all_reduce(gpus.array(np.ones(3)), dist.ReduceOp.SUM, group)

        def ask(timeout: float) -> bool:
            asked.set()
            return bool(group._lock.acquire(timeout=timeout))

        calls = SimpleNamespace(acquire=ask, release=group._lock.release)
        vars(comm).update({way: partial(end, way) for way in ends}, all_reduce=late, calls=calls)
        caller = threading.Thread(target=call)
        caller.start()
        assert inside.wait(fake_gpu_threaded.DEADLINE)
        with monkeypatch.context() as patch:
            patch.setattr(binding, "alive", {group.comm})
            exiting = threading.Thread(target=binding.end_all)
            exiting.start()
            fake_gpu_threaded.until(lambda: asked.is_set() or bool(order))
            going.set()
            for thread in (caller, exiting):
                thread.join(fake_gpu_threaded.DEADLINE)

    run_threads(body, 1, "nccl")
    assert order[:2] == ["call", "end"]


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failed"])
def test_a_group_gives_its_stream_up(gpus: Any, fails: bool) -> None:
    """When it is destroyed and its communicator has ended; a call that is over can still be waited
    for."""

    def body(rank: int) -> Any:
        group: Any = dist.new_group([0, 1])
        x = gpus.array(np.ones(3))
        work = dist.all_reduce(x, group=group, async_op=True)
        work.synchronize()
        if fails:
            dist.abort(group)
        before = group.streams.own in gpus.dropped
        dist.destroy_process_group(group)
        if not fails:
            work.wait()
        return before, gpus.dropped.count(group.streams.own), x.get()[0]

    assert run_threads(body, 2, "nccl") == [(False, 1, 2.0)] * 2


def test_ends_that_hang_take_no_longer_than_one(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are destroyed one after the other, but their communicators end beside each other."""
    stuck = threading.Event()
    monkeypatch.setattr(failure, "ABORT_SECONDS", 1.0)

    def body(rank: int) -> float:
        groups: list[Any] = [dist.new_group([0]) for _ in range(4)]
        for group in groups:
            group.comm.abort = lambda: stuck.wait(fake_gpu_threaded.DEADLINE)
            dist.abort(group)
        start = time.monotonic()
        for group in groups:
            dist.destroy_process_group(group)
        return time.monotonic() - start

    try:
        assert run_threads(body, 1, "nccl")[0] < 1.0
    finally:
        stuck.set()

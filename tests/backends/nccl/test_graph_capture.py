"""Calls while a CUDA graph is captured: what is part of the graph, and what must not be."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest

import cydist as dist


@pytest.fixture
def job(gpu_jobs: Any) -> Any:
    """Two ranks with a GPU each."""
    return gpu_jobs.get(2)


def test_a_capture_is_not_watched(job: Any, gpus: Any) -> None:
    """While a graph is captured no event is asked for, and its scratch memory is kept."""

    def body(rank: int) -> tuple[Any, bool]:
        group = dist.group.WORLD
        fake_gpu_threaded.until(lambda: not group.failures.watch.in_flight)
        dist.monitored_barrier()
        gpus.capturing = True
        try:
            x = gpus.array(np.arange(5, dtype="i4"))
            dist.all_reduce(x, dist.ReduceOp.BOR)
            assert not group.failures.watch.call_check.pending  # nor is anything compared
            return group.failures.watch.oldest, bool(group.enqueuer.captured)
        finally:
            dist.monitored_barrier()
            gpus.capturing = False
            gpus.synchronize(gpus.current_stream(rank))

    assert job.run(body) == [(None, True)] * 2


def test_a_captured_call_is_joined_by_wait(job: Any, gpus: Any) -> None:
    """Its stream was forked from the captured one, and wait() brings both together again."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        fake_gpu_threaded.until(lambda: group.failures.watch.oldest is None)
        dist.monitored_barrier()
        gate = gpus.hold(group.streams.own)
        gpus.capturing = True
        try:
            x = gpus.array(np.ones(3))
            dist.all_reduce(x, async_op=True).wait()
            seen = np.zeros(3)
            stream = gpus.current_stream(rank)
            gpus.enqueue(stream, lambda: np.copyto(seen, x.memory))
            gate.set()
            gpus.synchronize(stream)
            return seen[0], group.failures.watch.oldest
        finally:
            dist.monitored_barrier()
            gpus.capturing = False

    assert job.run(body) == [(2.0, None)] * 2


def test_a_capture_is_the_calls_own_streams_affair(
    job: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One library's stream is captured, another's is idle: the call belongs to the graph, nobody
    asks for its event, and the idle stream is not made to wait for it, which would end the capture.
    """

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        fake_gpu_threaded.until(lambda: group.failures.watch.oldest is None)
        dist.monitored_barrier()
        idle, captured = gpus.current_stream(rank), 7000 + rank
        gpus.captured.add(captured)
        with gpus.on_stream(rank, captured):
            monkeypatch.setattr(group.gpu, "current_streams", lambda: [idle, captured])
            x = gpus.array(np.ones(3))
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            watched = group.failures.watch.oldest
            gpus.synchronize(captured)
        gpus.captured.remove(captured)
        return watched, idle in gpus.waits, captured in gpus.waits, x.memory[0]

    gpus.waits.clear()
    assert job.run(body) == [(None, False, True, 4.0)] * 2


def test_a_call_from_before_a_capture_is_not_waited_for_in_it(job: Any, gpus: Any) -> None:
    """UnsupportedError, and the capture goes on: CUDA would end it."""

    def body(rank: int) -> float:
        gate = gpus.hold()
        x = gpus.array(np.ones(3))
        work = dist.all_reduce(x, async_op=True)
        stream = gpus.current_stream(rank)
        gpus.captured.add(stream)
        with pytest.raises(dist.UnsupportedError, match="wait before the capture begins"):
            work.wait()
        gpus.captured.remove(stream)
        gate.set()
        work.wait()
        return x.get()[0]

    assert job.run(body) == [2.0, 2.0]


def test_a_call_that_ended_before_a_capture_is_not_in_it(job: Any, gpus: Any) -> None:
    """wait() in the capture enqueues nothing: CUDA ends one that waits for what is outside."""

    def body(rank: int) -> bool:
        group: Any = dist.group.WORLD
        with group.failures.watch._lock:  # the watchdog does not look
            work = dist.all_reduce(gpus.array(np.ones(3)), async_op=True)
            work.synchronize()
            assert not work.flight.over
            captured = 7300 + rank
            gpus.captured.add(captured)
            with gpus.on_stream(rank, captured):
                work.wait()
            gpus.captured.remove(captured)
        return captured in gpus.waits

    gpus.waits.clear()
    assert job.run(body) == [False, False]


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_captured_call_is_waited_for_in_its_own_capture(job: Any, gpus: Any, kind: str) -> None:
    """UnsupportedError in another one and outside of any, where CUDA would refuse it; nothing is
    enqueued then, and the call can still be waited for in its own."""

    def begun(rank: int) -> Any:
        x = gpus.array(np.ones(3))
        if kind == "collective":
            return dist.all_reduce(x, async_op=True)
        return (dist.isend if rank == 0 else dist.irecv)(x, 1 - rank)

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        captured, found = 7400 + rank, []
        with gpus.on_stream(rank, captured), pytest.MonkeyPatch.context() as patch:
            gpus.captured.add(captured)
            patch.setattr(group.gpu, "capture", lambda stream: 1)
            work = begun(rank)
            waits = gpus.waits.count(captured)
            patch.setattr(group.gpu, "capture", lambda stream: 2)
            with pytest.raises(dist.UnsupportedError, match="outside of the CUDA graph"):
                work.wait()
            gpus.captured.remove(captured)
            with pytest.raises(dist.UnsupportedError, match="outside of the CUDA graph"):
                work.wait()
            found.append(gpus.waits.count(captured) - waits)
            gpus.captured.add(captured)
            patch.setattr(group.gpu, "capture", lambda stream: 1)
            work.wait()
            found.append(gpus.waits.count(captured) - waits)
            gpus.captured.remove(captured)
            gpus.synchronize(captured)
        return found

    assert job.run(body) == [[0, 1]] * 2


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_call_that_a_broken_capture_refuses_does_not_count(
    job: Any, gpus: Any, async_op: bool
) -> None:
    """CUDA answers by an error whether a stream is captured: the rank is not ahead of the others,
    whose next calls would be a MismatchError."""

    def invalid(stream: int) -> bool:
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    def body(rank: int) -> float:
        group: Any = dist.group.WORLD
        if rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group.gpu, "is_captured", invalid)
                with pytest.raises(RuntimeError, match="Invalidated"):
                    dist.all_reduce(gpus.array(np.ones(3)), async_op=async_op)
        for width in (1, 2):
            x = gpus.array(np.ones(width))
            dist.all_reduce(x)
        fake_gpu_threaded.until(lambda: group.error or not group.failures.watch.call_check.pending)
        assert group.error is None
        return float(x.get()[0])

    assert job.run(body) == [2.0, 2.0]


@pytest.mark.parametrize("message", [False, True], ids=["collective", "message"])
def test_a_call_from_outside_does_not_end_a_capture(job: Any, gpus: Any, message: bool) -> None:
    """The group's stream is part of a capture: an asynchronous call from another stream is an
    UnsupportedError, and those that follow the capture are right."""

    def outside(rank: int, x: Any) -> Any:
        if not message:
            return dist.all_reduce(x, async_op=True)
        return dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)

    def body(rank: int) -> float:
        group: Any = dist.group.WORLD
        fake_gpu_threaded.until(lambda: group.failures.watch.oldest is None)
        dist.monitored_barrier()
        x = gpus.array(np.full(3, rank + 1.0))
        gpus.captured.add(group.streams.own)
        with pytest.raises(dist.UnsupportedError, match="which would end the capture"):
            outside(rank, x)
        gpus.captured.remove(group.streams.own)
        dist.all_reduce(x, async_op=True).wait()
        return x.get()[0]

    assert job.run(body) == [3.0, 3.0]


def test_arrays_of_captured_calls_are_the_programs(job: Any, gpus: Any) -> None:
    """They end when the program drops them, with its graph, and not with the group; what cydist has
    packed for the graph stays."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        fake_gpu_threaded.until(lambda: group.failures.watch.oldest is None)
        dist.monitored_barrier()
        before = len(group.enqueuer.captured)
        gpus.capturing = True
        try:
            x, y = gpus.array(np.ones(3)), gpus.array(np.ones((3, 2)))
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            plain = len(group.enqueuer.captured) - before
            dist.all_reduce(y[:, 1])
            kept, packed = weakref.ref(x), len(group.enqueuer.captured) - before - plain
            gpus.synchronize(gpus.current_stream(rank))
            gpus.synchronize(group.streams.own)
            del x, work
            gc.collect()
            return plain, packed > 0, kept() is None
        finally:
            dist.monitored_barrier()
            gpus.capturing = False

    assert job.run(body) == [(0, True, True)] * 2


def test_a_group_with_a_graph_is_looked_after(job: Any, gpus: Any) -> None:
    """Since a replay may wait for a rank that is lost: without a call under way, too."""

    def body(rank: int) -> bool:
        group: Any = dist.group.WORLD
        gpus.capturing = True
        try:
            dist.all_reduce(gpus.array(np.ones(3)))
        finally:
            dist.monitored_barrier()
            gpus.capturing = False
        return group.failures.watch.captured is not None

    assert job.run(body) == [True, True]

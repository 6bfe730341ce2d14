"""The short way of plain calls: taken where it should be, and the same to every rank as the long.

Threads that are ranks have a default group each, which the short way does not look up: the calls
here name their group. The steps of test_jobs.py, in processes, take it by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest
from fake_gpu_threaded import until

import cydist as dist
from cydist.backends.nccl.call_check import _text
from cydist.testing import oracle

SIZE, COUNT = 3, 12
PART = COUNT // SIZE
SUM = dist.ReduceOp.SUM


@pytest.fixture
def job(gpu_jobs: Any) -> Any:
    """Ranks with a GPU each."""
    return gpu_jobs.get(SIZE)


def given(rank: int, dtype: str = "f4") -> np.ndarray:
    return (np.arange(COUNT) + 10 * rank).astype(dtype)


Call = Callable[..., Any]  # (gpus, rank, options of the call) -> the array that it writes


def all_reduce(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(given(rank))
    return x, dist.all_reduce(x, dist.ReduceOp.MAX, **options)


def reduce(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(given(rank))
    return x, dist.reduce(x, 1, **options)


def broadcast(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(given(rank))
    return x, dist.broadcast(x, 2, **options)


def all_gather(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(np.zeros(COUNT, "f4"))
    return x, dist.all_gather_into_tensor(x, gpus.array(given(rank)[:PART]), **options)


def reduce_scatter(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(np.zeros(PART, "f4"))
    return x, dist.reduce_scatter_tensor(x, gpus.array(given(rank)), **options)


def all_to_all(gpus: Any, rank: int, **options: Any) -> Any:
    x = gpus.array(np.zeros(COUNT, "f4"))
    return x, dist.all_to_all_single(x, gpus.array(given(rank)), **options)


def expected(call: Call, rank: int) -> np.ndarray:
    """What the call must write on a rank."""
    all_inputs = [given(r) for r in range(SIZE)]
    total = np.sum(all_inputs, axis=0)
    own = slice(PART * rank, PART * (rank + 1))
    results = {
        all_reduce: np.max(all_inputs, axis=0),
        reduce: total if rank == 1 else all_inputs[rank],
        broadcast: all_inputs[2],
        all_gather: np.concatenate([each[:PART] for each in all_inputs]),
        reduce_scatter: total[own],
        all_to_all: np.concatenate([each[own] for each in all_inputs]),
        message: all_inputs[0 if rank == 2 else rank],
    }
    return results[call]


def message(gpus: Any, rank: int, *, async_op: bool = False, **options: Any) -> Any:
    """From rank 0 to rank 2."""
    x = gpus.array(given(rank))
    if rank == 0:
        return x, (dist.isend if async_op else dist.send)(x, 2, **options)
    if rank == 2 and async_op:
        return x, dist.irecv(x, 0, **options)
    if rank == 2:
        assert dist.recv(x, 0, **options) == 0
    return x, None


CALLS = [all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all]


class Long:
    """How often the long way was taken by this rank, while this is open."""

    def __init__(self) -> None:
        self.group: Any = dist.group.WORLD
        self.calls = 0

    def __enter__(self) -> Long:
        for name in ("execute", "isend", "irecv"):
            setattr(self.group, name, self._counted(getattr(self.group, name)))
        return self

    def _counted(self, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return function(*arguments, **options)

        return counted

    def __exit__(self, *_: object) -> None:
        del self.group.execute, self.group.isend, self.group.irecv


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("call", [*CALLS, message])
def test_plain_calls_are_fast(job: Any, library: Any, call: Call, async_op: bool) -> None:
    """Every plain call gives what it must, and the long way is not taken."""

    def body(rank: int) -> Any:
        with Long() as long, library.here():
            x, work = call(library, rank, group=long.group, async_op=async_op)
            if async_op and work is not None:
                work.wait()
                if call is message and rank == 2:
                    assert work.source_rank() == 0
            assert isinstance(work, dist.Work) == (async_op and (call is not message or rank != 1))
            return library.get(x), long.calls

    for rank, (found, calls) in enumerate(job.run(body)):
        np.testing.assert_array_equal(found, expected(call, rank))
        assert calls == 0


@pytest.mark.parametrize("call", CALLS)
def test_both_paths_note_the_same(job: Any, gpus: Any, call: Call) -> None:
    """A rank may take the long way beside one that takes the short: they are in one call."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        call_check = group.failures.watch.call_check
        noted = []
        note = call_check.note
        call_check.note = lambda seq, text: (noted.append(_text(text)), note(seq, text))
        try:
            with Long() as long:
                call(gpus, rank, group=group)
                short = long.calls
                call(gpus, rank, group=group, timeout=60)
                return noted, short, long.calls
        finally:
            del call_check.note

    for noted, short, calls in job.run(body):
        assert (short, calls) == (0, 1)
        assert noted[0] == noted[1]


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"])
def test_every_reduction_of_every_dtype(job: Any, gpus: Any, op: str) -> None:
    """By the short way where it is one call of NCCL's, and right in any case."""
    kind = getattr(dist.ReduceOp, op)
    dtypes = [each for each in oracle.DTYPES.values() if oracle.makes_sense(op, each)]

    def values(rank: int, dtype: np.dtype) -> np.ndarray:
        if op == "AVG":
            return ((np.arange(4) % 2) * SIZE).astype(dtype)
        if op == "SUM" and dtype.name.startswith("float8"):
            return ((np.arange(4) + rank) % 2).astype(dtype)
        return oracle.contribution(rank, 4, dtype)

    def body(rank: int) -> Any:
        with Long() as long:
            found = []
            for dtype in dtypes:
                x = gpus.array(values(rank, dtype))
                dist.all_reduce(x, kind, long.group)
                found.append(x)
            return [x.get() for x in found], long.calls

    for results, long in job.run(body):
        for dtype, found in zip(dtypes, results, strict=True):
            want = oracle.reduced(op, [values(r, dtype) for r in range(SIZE)])
            assert oracle.same_bits(want, found), (dtype, want, found)
        assert long < len(dtypes) or op in ("BAND", "BOR", "BXOR")


def test_an_undefined_reduction_is_refused(job: Any, gpus: Any) -> None:
    """TypeError each time, before anything happens; the group stays usable."""

    def body(rank: int) -> float:
        group = dist.group.WORLD
        for _ in range(2):
            with pytest.raises(TypeError, match="MAX of complex64 is not defined"):
                dist.all_reduce(gpus.array(np.ones(3, "c8")), dist.ReduceOp.MAX, group)
        x = gpus.array(np.ones(3))
        dist.all_reduce(x, SUM, group)
        return float(x.get()[0])

    assert job.run(body) == [3.0] * SIZE


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "to itself": (
        lambda g, w: dist.send(g.array(np.ones(3)), w.rank(), w), ValueError, "itself"
    ),
    "no peer": (lambda g, w: dist.isend(g.array(np.ones(3)), SIZE, w), ValueError, "dst=3"),
    "from anyone": (
        lambda g, w: dist.irecv(g.array(np.ones(3)), None, w), dist.UnsupportedError, "anyone"
    ),
    "tag": (lambda g, w: dist.recv(g.array(np.ones(3)), 1 - min(w.rank(), 1), w, -1),
            ValueError, "tag"),
    "host": (lambda g, w: dist.all_reduce(np.ones(3), SUM, w), dist.UnsupportedError, "on GPUs"),
    "other GPU": (
        lambda g, w: dist.all_reduce(fake_gpu_threaded.GpuArray(g, np.ones(3), 7), SUM, w),
        ValueError, "on GPU 7",
    ),
    "root": (lambda g, w: dist.broadcast(g.array(np.ones(3)), SIZE, w), ValueError, "src=3"),
    "no root": (lambda g, w: dist.broadcast(g.array(np.ones(3)), None, w), ValueError, "src"),
    "gather sizes": (
        lambda g, w: dist.all_gather_into_tensor(g.array(np.ones(5)), g.array(np.ones(2)), w),
        ValueError, "5 elements",
    ),
    "gather dtypes": (
        lambda g, w: dist.all_gather_into_tensor(g.array(np.ones(6, "f4")), g.array(np.ones(2)), w),
        TypeError, "one dtype",
    ),
    "gather overlap": (
        lambda g, w: overlapping(g, lambda x: dist.all_gather_into_tensor(x, x[1:3], w)),
        ValueError, "memory",
    ),
    "scatter sizes": (
        lambda g, w: dist.reduce_scatter_tensor(g.array(np.ones(2)), g.array(np.ones(5)), SUM, w),
        ValueError, "5 elements",
    ),
    "scatter overlap": (
        lambda g, w: overlapping(g, lambda x: dist.reduce_scatter_tensor(x[1:3], x, SUM, w)),
        ValueError, "memory",
    ),
    "exchange sizes": (
        lambda g, w: dist.all_to_all_single(g.array(np.ones(5)), g.array(np.ones(5)), group=w),
        ValueError, "5",
    ),
    "exchange overlap": (
        lambda g, w: overlapping(g, lambda x: dist.all_to_all_single(x[:3], x[2:5], group=w)),
        ValueError, "memory",
    ),
}  # fmt: skip


def overlapping(gpus: Any, call: Callable[[Any], Any]) -> None:
    call(gpus.array(np.ones(6)))


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_take_the_general_path(job: Any, gpus: Any, case: Any) -> None:
    """Which says what is wrong; nothing has been enqueued, and no rank is ahead."""
    call, kind, message = case

    def body(rank: int) -> float:
        group: Any = dist.group.WORLD
        with pytest.raises(kind, match=message):
            call(gpus, group)
        x = gpus.array(np.ones(3))
        dist.all_reduce(x, SUM, group)
        return float(x.get()[0])

    assert job.run(body) == [3.0] * SIZE


def test_what_is_not_plain_takes_the_general_path(job: Any, gpus: Any) -> None:
    """Strides, no elements, a factor, calls that are collected: all are right."""

    def body(rank: int) -> Any:
        with Long() as long:
            strided = gpus.array(np.ones((2, 3), "f4"))
            dist.all_reduce(strided.view(strided.memory.T), SUM, long.group)
            dist.all_reduce(gpus.array(np.ones(0)), SUM, long.group)
            scaled = gpus.array(np.ones(2))
            dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(2.0), long.group)
            collected = gpus.array(np.ones(3))
            with long.group.coalesced():
                dist.all_reduce(collected, SUM, long.group)
            calls = long.calls
        return [x.get().ravel()[-1] for x in (strided, scaled, collected)], calls

    assert job.run(body) == [([3.0, 6.0, 3.0], 4)] * SIZE


def test_a_message_that_is_not_plain_takes_the_general_path(job: Any, gpus: Any) -> None:
    """Strides, no elements, one that is collected: all arrive."""

    def body(rank: int) -> Any:
        with Long() as long:
            x = gpus.array(np.full((2, 3), float(rank)))
            whole, none = gpus.array(np.full(2, float(rank))), gpus.array(np.ones(0))
            if rank < 2:
                move, peer = (dist.send, 1) if rank == 0 else (dist.recv, 0)
                move(x.view(x.memory[:, :1]), peer, long.group)
                move(none, peer, long.group)
                start = dist.isend if rank == 0 else dist.irecv
                for work in dist.batch_isend_irecv([dist.P2POp(start, whole, peer, long.group)]):
                    work.wait()
            return x.get().tolist(), whole.get().tolist(), long.calls

    rows = [[0.0, 1.0, 1.0]] * 2
    said = job.run(body)
    assert said[0] == ([[0.0] * 3] * 2, [0.0, 0.0], 3)
    assert said[1] == (rows, [0.0, 0.0], 3)


def test_tensors_that_are_not_plain_take_the_general_path(job: Any, tensors: Any) -> None:
    """Strides, no elements, complex ones (which may be lazily conjugated), a Parameter's own
    class: all are right, and what a view shows is not mistaken for what its memory holds."""
    torch = tensors.torch

    def body(rank: int) -> Any:
        with Long() as long, tensors.here():
            strided = tensors.array(np.ones((2, 3), "f4"))
            dist.all_reduce(strided.T, SUM, long.group)
            dist.all_reduce(tensors.array(np.ones(0)), SUM, long.group)
            pairs = tensors.array(np.full(2, 1 + 2j, "c8"))
            dist.all_reduce(pairs, SUM, long.group)
            with pytest.raises(ValueError, match="conjugated"):
                dist.all_reduce(pairs.conj(), SUM, long.group)
            calls = long.calls
            parameter = torch.nn.Parameter(tensors.array(np.ones(3, "f4")))
            dist.all_reduce(parameter, SUM, long.group)
            found = [tensors.get(x.detach()).ravel()[-1] for x in (strided, pairs, parameter)]
            return found, calls, long.calls

    assert job.run(body) == [([3.0, 3 + 6j, 3.0], 3, 3)] * SIZE


def test_arrays_of_two_libraries_take_the_general_path(job: Any, gpus: Any, tensors: Any) -> None:
    """An all_gather is on the stream of the array that is sent."""

    def body(rank: int) -> Any:
        with Long() as long, tensors.here():
            x, y = gpus.array(np.zeros(SIZE, "f4")), tensors.array(np.full(1, rank + 1.0, "f4"))
            x.get()  # when its stream has filled it: the call is on that of y, and does not wait
            dist.all_gather_into_tensor(x, y, long.group)
            tensors.get(y)
            dist.all_gather_into_tensor(tensors.array(x.get()), gpus.array(y.numpy()), long.group)
            return x.get().tolist(), long.calls

    assert job.run(body) == [([1.0, 2.0, 3.0], 2)] * SIZE


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_call_comes_after_its_own_librarys_stream(
    job: Any, gpus: Any, tensors: Any, async_op: bool
) -> None:
    """torch's, for a tensor: cupy's may be held back by something else for as long as it takes."""

    def body(rank: int) -> Any:
        with Long() as long, tensors.here():
            other = gpus.hold()
            gate = gpus.hold(tensors.current_stream(rank))
            x = tensors.array(np.ones(3))
            work = dist.all_reduce(x, SUM, long.group, async_op)
            if async_op:
                with gpus.on_stream(rank, 95 + rank):  # which would wait for cupy's, too
                    work.wait()
            early = bool((x == SIZE).any())
            gate.set()
            found = tensors.get(x).tolist()
            other.set()
            return early, found, long.calls

    assert job.run(body) == [(False, [3.0] * 3, 0)] * SIZE


def test_a_capture_takes_the_general_path(job: Any, gpus: Any) -> None:
    """Which neither watches nor compares; a call on a stream beside it is short."""

    def body(rank: int) -> Any:
        with Long() as long, gpus.on_stream(rank, 80 + rank):
            x = gpus.array(np.ones(3))
            gpus.captured.add(80 + rank)
            dist.all_reduce(x, SUM, long.group)
            gpus.captured.discard(80 + rank)
            captured = long.calls
            dist.all_reduce(x, SUM, long.group)
            return captured, long.calls, float(x.get()[0])

    assert job.run(body) == [(1, 1, 9.0)] * SIZE


def test_streams_are_ordered(job: Any, gpus: Any) -> None:
    """A call comes after what the current stream holds, and what waits for it comes after it."""

    def body(rank: int) -> Any:
        group = dist.group.WORLD
        with gpus.on_stream(rank, 90 + rank):
            gate = gpus.hold()
            x, y = gpus.array(np.ones(3)), gpus.array(np.ones(3))
            dist.all_reduce(x, SUM, group)
            work = dist.all_reduce(y, SUM, group, True)
            before = (x.memory == SIZE).any() or (y.memory == SIZE).any() or work.is_completed()
            gate.set()
            work.wait()
            return bool(before), x.get()[0], y.get()[0]

    assert job.run(body) == [(False, 3.0, 3.0)] * SIZE


def test_arrays_live_as_long_as_they_are_needed(job: Any, gpus: Any) -> None:
    """A blocking call keeps none; an asynchronous one keeps what it reads and what it writes."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        gate = gpus.hold()
        x = gpus.array(np.ones(3))
        blocking = weakref.ref(x)
        dist.all_reduce(x, SUM, group)
        del x
        given_up = blocking() is None
        out, part = gpus.array(np.zeros(2 * SIZE)), gpus.array(np.full(2, rank + 1.0))
        refs = [weakref.ref(out), weakref.ref(part)]
        work = dist.all_gather_into_tensor(out, part, group, True)
        work._result = None
        del out, part
        kept = [each() is not None for each in refs]
        gate.set()
        work.synchronize()
        until(lambda: work.flight.over)
        return given_up, kept, [each() is None for each in refs]

    assert job.run(body) == [(True, [True, True], [True, True])] * SIZE

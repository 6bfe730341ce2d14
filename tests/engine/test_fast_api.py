"""The compiled public functions: the same to callers and readers as the functions behind them."""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist._native import fast_api, fast_collectives
from cydist.testing import run_threads

NAMES = sorted({*vars(fast_api)} & {*dist.__all__})


@pytest.fixture(params=NAMES)
def function(request: pytest.FixtureRequest) -> Any:
    """A public function with a shortcut."""
    return getattr(dist, request.param)


def test_signature(function: Any) -> None:
    """The compiled function takes what its Python one takes, in the same order."""
    said = inspect.signature(function).parameters.values()
    taken = inspect.signature(function, follow_wrapped=False).parameters.values()
    assert function is not inspect.unwrap(function)
    assert [(p.name, p.kind) for p in said] == [(p.name, p.kind) for p in taken]
    for one, other in zip(said, taken, strict=True):
        if one.name != "op":  # a private object stands for SUM
            assert one.default is other.default


def test_what_readers_see(function: Any) -> None:
    """Name, module, docstring and annotations are the Python function's; it can be pickled."""
    assert function.__module__ == inspect.unwrap(function).__module__
    assert function.__doc__ == inspect.unwrap(function).__doc__
    assert function.__annotations__ == inspect.unwrap(function).__annotations__
    assert inspect.isroutine(function)
    assert pickle.loads(pickle.dumps(function)) is function


def test_the_op_that_is_not_named_is_sum() -> None:
    """On the short way and on the long one."""

    def body(rank: int) -> list[float]:
        x, part, whole = np.ones(1), np.zeros(1), np.ones(2)
        for _ in range(3):
            dist.all_reduce(x)
            dist.reduce_scatter_tensor(part, whole)
        return [float(x[0]), float(part[0])]

    assert run_threads(body, 2) == [[8.0, 2.0]] * 2


def test_keywords_take_the_fast_path_too() -> None:
    """All of them but those that ask for more."""

    def body(rank: int) -> list[int]:
        x = np.ones(1)
        dist.all_reduce(x)
        native: Any = dist.group.WORLD.native  # type: ignore[union-attr]
        queue = native.call_queue
        # The fast path makes no record: each answer is a new one.
        assert queue.last_call() is queue.last_call()
        dist.all_reduce(tensor=x, op=dist.ReduceOp.MAX, group=dist.group.WORLD, async_op=False)
        assert queue.last_call() is not queue.last_call()
        assert queue.last_call().name == "all_reduce"
        dist.broadcast(src=0, tensor=x)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait(60)
        dist.all_reduce(x, timeout=60)
        return [int(x[0]), native.seq]

    assert run_threads(body, 2) == [[8, 5]] * 2


@pytest.mark.parametrize("wrong", [(), (1, 2, 3, 4, 5), ("x",)])
def test_wrong_arguments(wrong: tuple[object, ...]) -> None:
    """TypeError, as from any function."""
    with pytest.raises(TypeError):
        dist.all_reduce(*wrong, nothing=1)


@pytest.mark.parametrize("backend", ["inproc", "shm"])
def test_a_call_that_waits_lets_other_threads_run(backend: str) -> None:
    """The GIL is kept for a few looks only: the rank waited for is a thread that needs it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread takes the GIL away from another

    def body(rank: int) -> float:
        x = np.ones(1)
        dist.all_reduce(x)
        for turn in range(20):
            if turn % 2 == rank:
                sum(range(1000))  # the other waits meanwhile
            assert fast_collectives.all_reduce(x, dist.ReduceOp.SUM, dist.group.WORLD)
        return float(x[0])

    try:
        assert run_threads(body, 2, backend) == [2.0**21] * 2
    finally:
        sys.setswitchinterval(interval)


def test_a_thread_computes_while_another_waits() -> None:
    """For as long as a rank does not come, every other thread of the one that waits goes on."""
    come = threading.Event()

    def body(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            worker = threading.Thread(target=lambda: (sum(range(100000)), come.set()))
            worker.start()
            assert fast_collectives.barrier(dist.group.WORLD)
            worker.join(60)
        else:
            assert come.wait(60)  # the worker's work is done while rank 0 waits
            assert fast_collectives.barrier(dist.group.WORLD)

    run_threads(body, 2)

"""timeout= of every call and of a group: DistTimeoutError, not before its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.contract import Jobs

Array = np.ndarray[Any, Any]

TIMEOUT = 0.05
OF_A_GROUP = 0.5  # in which its ranks also meet to make it, on a machine that does other things
LONG = 300_000


def one() -> Array:
    return np.ones(4)


def two() -> list[Array]:
    return [np.ones(4), np.ones(4)]


def begun(**how: Any) -> Any:
    return dist.all_reduce(one(), async_op=True, **how)


# Calls in which rank 0 waits for rank 1, which never comes. `how` has the group, and maybe a
# timeout.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda **how: dist.all_reduce(one(), **how),
    "all_reduce of a long array": lambda **how: dist.all_reduce(np.ones(LONG), **how),
    "broadcast": lambda **how: dist.broadcast(one(), 1, **how),
    "reduce": lambda **how: dist.reduce(one(), 0, **how),
    "all_gather": lambda **how: dist.all_gather(two(), one(), **how),
    "gather": lambda **how: dist.gather(one(), two(), 0, **how),
    "scatter": lambda **how: dist.scatter(one(), None, 1, **how),
    "reduce_scatter": lambda **how: dist.reduce_scatter(one(), two(), **how),
    "all_to_all": lambda **how: dist.all_to_all(two(), two(), **how),
    "all_reduce_coalesced": lambda **how: dist.all_reduce_coalesced(two(), **how),
    "barrier": lambda **how: dist.barrier(**how),
    "monitored_barrier": lambda **how: dist.monitored_barrier(**how),
    "async": lambda **how: begun(**how).wait(),
    "recv": lambda **how: dist.recv(one(), 1, **how),
    "recv from anyone": lambda **how: dist.recv(one(), **how),
    "all_gather_object": lambda **how: dist.all_gather_object([None] * 2, "x", **how),
    "broadcast_object_list": lambda **how: dist.broadcast_object_list([None], 1, **how),
    "recv_object_list": lambda **how: dist.recv_object_list([None], 1, **how),
}
ADD = dist.ReduceOp.create(np.add)
# Rank 1's counterpart of rank 0's call.
ANSWERED: dict[str, Callable[..., Any]] = {
    "recv": lambda **how: dist.send(one(), 0, **how),
    "recv_object_list": lambda **how: dist.send_object_list(["x"], 0, **how),
    "all_reduce": CALLS["all_reduce"],
    "all_reduce by a function": lambda **how: dist.all_reduce(one(), ADD, **how),
    "monitored_barrier": CALLS["monitored_barrier"],
}
STARTED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(one(), group=group, async_op=True),
    "irecv": lambda group: dist.irecv(one(), 1, group),
    "strided irecv": lambda group: dist.irecv(np.ones(8)[::2], 1, group),
}


def late(jobs: Jobs, backend: str, call: Callable[[Any], Any], limit: float | None = None) -> None:
    """Rank 0's call on a group, whose own timeout is `limit`, must raise in time."""

    def body(rank: int) -> float:
        group = dist.new_group([0, 1], timeout=limit)
        started = time.monotonic()
        if rank == 0:
            with pytest.raises(dist.DistTimeoutError) as caught:
                call(group)
            assert isinstance(caught.value, TimeoutError)
        waited = time.monotonic() - started
        dist.barrier()
        dist.destroy_process_group(group)
        return waited

    waited, _ = jobs.get(backend, 2).run(body)
    assert TIMEOUT <= waited < 30


@pytest.mark.parametrize("call", CALLS)
def test_of_a_call(jobs: Jobs, backend: str, call: str) -> None:
    """A call ends when its timeout has passed."""
    if call == "recv from anyone":
        jobs.need_any_source(backend)
    late(jobs, backend, lambda group: CALLS[call](group=group, timeout=TIMEOUT))


@pytest.mark.parametrize("call", ANSWERED)
def test_of_a_call_that_has_longer_than_its_group(jobs: Jobs, backend: str, call: str) -> None:
    """The call has its own timeout, though the group's has passed before any rank answers."""

    def body(rank: int) -> None:
        group, silent = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.barrier()
        group.timeout = 0.0  # type: ignore[union-attr]
        if rank == 0:
            CALLS.get(call, ANSWERED[call])(group=group, timeout=30)
        else:
            with pytest.raises(dist.DistTimeoutError):
                dist.recv(one(), 0, silent, timeout=TIMEOUT)
            ANSWERED[call](group=group, timeout=30)
        dist.barrier()
        for each in (group, silent):
            dist.destroy_process_group(each)

    jobs.get(backend, 2).run(body)


@pytest.mark.parametrize("call", CALLS)
def test_of_a_group(jobs: Jobs, backend: str, call: str) -> None:
    """Calls without a timeout of their own have the group's."""
    if call == "recv from anyone":
        jobs.need_any_source(backend)
    late(jobs, backend, lambda group: CALLS[call](group=group), OF_A_GROUP)


@pytest.mark.parametrize("call", STARTED)
def test_of_a_wait(jobs: Jobs, backend: str, call: str) -> None:
    """It ends the wait; whatever was started goes on."""
    late(jobs, backend, lambda group: waited_for(STARTED[call](group)))


@pytest.mark.parametrize("call", STARTED)
def test_of_a_group_for_what_was_started(jobs: Jobs, backend: str, call: str) -> None:
    """It counts from the start of the call, not of the wait."""
    late(jobs, backend, lambda group: STARTED[call](group).wait(), OF_A_GROUP)


@pytest.mark.parametrize("call", STARTED)
def test_of_a_group_for_what_is_polled(jobs: Jobs, backend: str, call: str) -> None:
    """A late call has ended, and reports that to a caller that never waits."""

    def polled(group: Any) -> None:
        work, deadline = STARTED[call](group), time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < deadline
        assert not work.is_success()
        raise work.exception()

    late(jobs, backend, polled, OF_A_GROUP)


def waited_for(work: Any) -> None:
    """Wait for a short time, after which the work must be under way."""
    try:
        work.wait(TIMEOUT)
    finally:
        assert not work.is_completed()

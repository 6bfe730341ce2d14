"""Tracebacks: the program's line, then at most two frames of cydist."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

MOST_FRAMES = 2
Ones = Callable[[int], Any]
Call = Callable[[int, Ones], object]


@pytest.fixture(params=["numpy", "torch"])
def ones(request: pytest.FixtureRequest) -> Ones:
    """Makes an array of one library."""
    if request.param == "numpy":
        return lambda size: np.ones(size, "float32")
    torch = pytest.importorskip("torch")
    return lambda size: torch.ones(size)


def leave(rank: int, ones: Ones) -> None:
    """Leave the group on rank 1, so that rank 0 finds it lost."""
    if rank == 1:
        dist.destroy_process_group(dist.group.WORLD)
        raise dist.DistError("as its rank wanted")
    dist.recv(ones(1), 1)


def call_on_failed_group(rank: int, ones: Ones) -> None:
    pair = dist.new_group([0, 1])
    pair.abort()
    dist.barrier(pair)


def different_messages(rank: int, ones: Ones) -> None:
    if rank == 1:
        dist.send(ones(3), 0)
        raise dist.DistError("as its rank wanted")
    dist.recv(ones(4), 1)


def wait_for_nothing(rank: int, ones: Ones) -> None:
    if rank == 1:
        raise dist.DistError("as its rank wanted")
    work = dist.irecv(ones(1), 1)
    work.wait(0.01)


# Calls that fail on both ranks, or on rank 0.
FAILING: dict[str, Call] = {
    "different sizes": lambda rank, ones: dist.all_reduce(ones(3 + rank)),
    "different sizes of lists": lambda rank, ones: dist.all_gather(
        [ones(3 + rank), ones(3 + rank)], ones(3 + rank)
    ),
    "different sizes, asynchronous": lambda rank, ones: dist.all_reduce(
        ones(3 + rank), async_op=True
    ).wait(),
    "different sizes of messages": different_messages,
    "to itself": lambda rank, ones: dist.send(ones(3), rank),
    "no array": lambda rank, ones: dist.all_reduce("text"),
    "too few entries": lambda rank, ones: dist.all_gather([ones(1)], ones(1)),
    "timeout": lambda rank, ones: dist.recv(ones(3), 1 - rank, timeout=0.01),
    "timeout of a wait": wait_for_nothing,
    "no such rank": lambda rank, ones: dist.new_group([7]),
    "twice": lambda rank, ones: dist.init_process_group("inproc"),
    "an object": lambda rank, ones: dist.broadcast_object_list([lambda: None], src=0),
    "failed before": call_on_failed_group,
    "lost": leave,
}


def raised_by(call: Call, ones: Ones) -> list[BaseException]:
    """What the call raises on each rank, after both have made a call that works."""

    def body(rank: int) -> BaseException:
        for _ in range(2):
            dist.all_reduce(ones(3))
        with pytest.raises(Exception) as caught:  # noqa: PT011  each has its own
            call(rank, ones)
        return caught.value

    return run_threads(body, 2)


def frames_after_ours(error: BaseException) -> list[str]:
    """The frames after the last one of this file."""
    entries = traceback.extract_tb(error.__traceback__)
    ours = [i for i, entry in enumerate(entries) if entry.filename == __file__]
    assert ours[0] == 0
    return [f"{each.filename}:{each.lineno} {each.name}" for each in entries[ours[-1] + 1 :]]


@pytest.mark.parametrize("name", FAILING)
def test_few_frames_of_cydist(name: str, ones: Ones) -> None:
    """After the line that made the call, on the fast path and off it."""
    for error in raised_by(FAILING[name], ones):
        assert len(frames_after_ours(error)) <= MOST_FRAMES, frames_after_ours(error)


@pytest.mark.parametrize("name", FAILING)
def test_all_frames(name: str, ones: Ones, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CYDIST_TRACEBACK=full; the deepest is the one that raised it."""
    monkeypatch.setenv("CYDIST_TRACEBACK", "full")
    found = [frames_after_ours(error) for error in raised_by(FAILING[name], ones)]
    assert max(map(len, found)) >= MOST_FRAMES


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_frames_of_the_program_stay(async_op: bool) -> None:
    """Those of a function that cydist calls, too."""

    def wrong(a: Any, b: Any) -> None:
        raise ArithmeticError("wrong")

    def body(rank: int) -> BaseException:
        def call() -> None:
            work = dist.all_reduce(np.ones(3), dist.ReduceOp.create(wrong), async_op=async_op)
            work.wait()

        with pytest.raises((ArithmeticError, dist.DistError)) as caught:
            call()
        return caught.value

    errors = [each for each in run_threads(body, 2) if isinstance(each, ArithmeticError)]
    assert errors
    for error in errors:
        entries = traceback.extract_tb(error.__traceback__)
        assert [each.name for each in entries if each.filename == __file__] == [
            "body", "call", "wrong",
        ]  # fmt: skip
        assert entries[-1].name == "wrong"


def test_warnings_point_at_the_program() -> None:
    """As of a call on a group without this rank."""

    def body(rank: int) -> str:
        only = dist.new_group([0])
        if rank == 0:
            return __file__
        with pytest.warns(UserWarning, match="does nothing") as caught:
            dist.all_gather([np.ones(1)], np.ones(1), group=only)
        return caught[0].filename

    assert run_threads(body, 1) == [__file__]
    assert set(run_threads(body, 2)) == {__file__}

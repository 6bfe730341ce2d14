"""CYDIST_DEBUG=DETAIL and CYDIST_CHECK_NAN=1 on GPUs: errors before a call, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

SIZE = 3


def errors(gpus: Any, call: Callable[[int], Any], kind: type[Exception]) -> list[str]:
    """Make a call that fails on every rank, and then one that works; the messages."""

    def body(rank: int) -> str:
        with pytest.raises(kind) as caught:
            call(rank)
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)
        assert x.get().tolist() == [SIZE] * 3
        return str(caught.value)

    return run_threads(body, SIZE, "nccl")


DIFFERENT: dict[str, tuple[Callable[[Any, int], Any], str, str]] = {
    "count": (
        lambda gpus, rank: dist.all_reduce(gpus.array(np.ones(3 + (rank == 1)))),
        "Ranks 0, 2: all_reduce #1 of (3,) at ", "Rank 1: all_reduce #1 of (4,) at ",
    ),
    "dtype": (
        lambda gpus, rank: dist.reduce(gpus.array(np.ones(4, "i4" if rank == 1 else "f4")), 0),
        "Ranks 0, 2: reduce #1 of float32 on cuda", "Rank 1: reduce #1 of int32 on cuda",
    ),
    "root": (
        lambda gpus, rank: dist.broadcast(gpus.array(np.ones(3)), int(rank == 1)),
        "Ranks 0, 2: broadcast #1, root 0 at ", "Rank 1: broadcast #1, root 1 at ",
    ),
    "call": (
        lambda gpus, rank: (
            dist.barrier() if rank == 1 else dist.all_reduce(gpus.array(np.ones(3)), async_op=True)
        ),
        "Ranks 0, 2: all_reduce #1 of (3,) float64 on cuda", "Rank 1: barrier #1 at ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_are_compared_before_they_run(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In the calls themselves, where the watchdog finds a difference after they have begun."""
    monkeypatch.setenv("CYDIST_DEBUG", "DETAIL")
    call, theirs, its = DIFFERENT[name]
    for text in errors(gpus, lambda rank: call(gpus, rank), dist.MismatchError):
        assert theirs in text
        assert its in text
        assert "Nothing was sent, and the group goes on" in text


def test_inputs_are_searched(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks learn which rank, call and element it is."""
    monkeypatch.setenv("CYDIST_CHECK_NAN", "1")

    def call(rank: int) -> Any:
        return dist.all_reduce(gpus.array(np.array([1.0, np.nan if rank == 2 else 2.0])))

    for text in errors(gpus, call, dist.NonFiniteError):
        assert "all_reduce #1 on the default group: rank 2's input has nan at index (1,)" in text

"""A mismatch shows the last calls of the ranks that differ, below the line that says how."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist import recorder
from cydist.backends.host import peer_report
from cydist.testing import run_threads

DEADLINE = 30.0


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where ranks can be threads."""
    return str(request.param)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks that answer as long as a busy machine needs."""
    monkeypatch.setattr(peer_report, "PATIENCE", 20.0)


def skips(rank: int) -> None:
    """Rank 1 skips the third of four calls."""
    dist.all_reduce(np.ones(1))
    dist.all_reduce(np.ones(2))
    if rank != 1:
        dist.all_reduce(np.ones(3))
    dist.all_reduce(np.ones(4))


def errors_of(body: Callable[[int], Any], size: int, transport: str) -> list[str]:
    """The mismatch that each rank gets. No rank leaves before all have theirs, so all answer."""
    all_failed = threading.Barrier(size)

    def guarded(rank: int) -> str:
        with pytest.raises(dist.MismatchError) as caught:
            body(rank)
        all_failed.wait(DEADLINE)
        return str(caught.value)

    return run_threads(guarded, size, transport)


def test_the_calls_of_both_ranks(transport: str) -> None:
    """With their bytes, from the last four on: they show which rank skipped one."""
    for rank, text in enumerate(errors_of(skips, 2, transport)):
        first, *more = text.splitlines()
        assert "all_reduce #3" in first
        sizes = {
            ("here" if "(here)" in line else "there"): [
                int(nbytes) for nbytes in re.findall(r"all_reduce #\d of (\d+) bytes", line)
            ]
            for line in more
        }
        skipped, made = [8, 16, 32], [8, 16, 24]
        expected = (made, skipped) if rank == 0 else (skipped, made)
        assert sizes == {"here": expected[0], "there": expected[1]}, text
        assert re.match(rf"rank {rank}( on \S+)? \(here\): last calls: ", more[0]), text
        assert re.match(rf"rank {1 - rank}( on \S+)?: last calls: ", more[1]), text


def test_a_third_rank_shows_the_odd_one(transport: str) -> None:
    """A rank that agrees with the first shows the calls of one that it differs from."""
    texts = errors_of(skips, 3, transport)
    for rank in (0, 2):
        assert re.search(r"(?m)^rank 1( on \S+)?: last calls: .* of 32 bytes", texts[rank]), texts


def test_the_first_call_needs_no_list(transport: str) -> None:
    """The first line says it all."""

    def body(rank: int) -> None:
        dist.all_reduce(np.ones(1 + rank))

    for text in errors_of(body, 2, transport):
        assert "last calls" not in text
        assert "\n" not in text


def test_messages(transport: str) -> None:
    """A receiver whose array has another size shows the messages before."""

    def body(rank: int) -> None:
        for count in (5, 6):
            (dist.send, dist.recv)[rank](np.ones(count), 1 - rank)
        (dist.send, dist.recv)[rank](np.ones(7 + rank), 1 - rank)
        dist.barrier()

    text = errors_of(body, 2, transport)[1]
    calls = "recv from rank 0 of 40 bytes, float64, recv from rank 0 of 48 bytes, float64"
    assert re.search(rf"\(here\): last calls: {calls}", text), text
    assert "send to rank 1 of 40 bytes" in text


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has this rank's own calls, and comes all the same."""
    hung = threading.Event()
    monkeypatch.setattr(
        "cydist.backends.host.group.HostGroup.report", lambda group: hung.wait(DEADLINE)
    )
    try:
        for text in errors_of(skips, 2, "inproc"):
            assert len(re.findall(r"last calls: ", text)) == 1, text
            assert "(here): last calls: " in text
    finally:
        hung.set()


def test_last_calls_of_a_group() -> None:
    """As many as are asked for, and those of no other group."""

    def body(rank: int) -> list[str]:
        other = dist.new_group([0, 1])
        dist.barrier(other)
        for count in range(1, 4):
            dist.all_reduce(np.ones(count))
        return recorder.last_calls(dist.group.WORLD.call_queue.group_number, most=2)

    for calls in run_threads(body, 2, "tcp"):
        assert calls == ["all_reduce #2 of 16 bytes, float64", "all_reduce #3 of 24 bytes, float64"]

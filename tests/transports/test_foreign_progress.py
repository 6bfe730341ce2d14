"""Waits for messages of a library that moves bytes only when it is polled, as MPI."""

from __future__ import annotations

import pytest

from cydist._native.foreign_trial import ForeignTrial

MOST = 600  # polls: more than a wait that spins makes before it yields its core

spins_like = pytest.mark.parametrize(
    "spins", [0, 40, 400], ids=["shares-its-core", "spins", "spins-long"]
)


@spins_like
def test_a_wait_ends_with_its_message(spins: int) -> None:
    """The library is not polled again, whenever the message arrives: each time costs a system
    call."""
    link = ForeignTrial(0, 2, spins)
    assert [link.polls_to_receive(poll) for poll in range(1, MOST)] == list(range(1, MOST))


@spins_like
@pytest.mark.parametrize("after", [1, 30, 500])
def test_a_wait_outlasts_a_time_without_a_core(spins: int, after: int) -> None:
    """A wait looks at clock, signals and peers after each slice, and then goes on."""
    link = ForeignTrial(0, 2, spins)
    assert link.polls_to_receive(after + 10, stalls=after) == after + 10

"""How rank 0 chooses the segments of long calls, on networks that are made up, and which groups let
it."""

import numpy as np
import pytest

import cydist as dist
from cydist._native.pace_trial import PaceTrial
from cydist.testing import run_threads
from cydist.tuning import table as tuning_table

LONG, SHORT = 1 << 18, 1 << 14
TIME = 10_000  # microseconds of a call
CALLS = 200


def chosen(pace, with_long, with_short, calls=CALLS):
    """Return the segments of some calls that carry so many bytes in a microsecond."""
    found = []
    for _ in range(calls):
        found.append(pace.segment(LONG))
        pace.carry(TIME * (with_short if found[-1] == SHORT else with_long), TIME)
    return found


def test_segments_stay_long_on_a_fast_network():
    """Nothing is tried there, whatever would come of it."""
    assert set(chosen(PaceTrial(), 300, 3000)) == {LONG}


@pytest.mark.parametrize(
    ("with_long", "with_short", "best"),
    [(60, 100, SHORT), (60, 1000, SHORT), (100, 20, LONG)],
    ids=["slow", "gets-fast", "distant"],
)
def test_the_length_that_carries_more_is_taken(with_long, with_short, best):
    """The other one is tried again after 16, 32, 64 calls and so on."""
    found = chosen(PaceTrial(), with_long, with_short)
    tried = [number for number, segment in enumerate(found) if segment != best]
    assert found[:2] == [LONG, SHORT]
    waits = [after - before - 1 for before, after in zip([1, *tried[1:]], tried[1:], strict=False)]
    assert waits == [16, 32, 64][: len(waits)]
    assert len(waits) == 3


def test_a_network_that_has_become_fast_is_noticed():
    """At the next trial of long segments, which stay."""
    pace = PaceTrial()
    assert chosen(pace, 60, 100)[-1] == SHORT
    found = chosen(pace, 1000, 500, calls=1100)
    assert found[-1] == LONG
    assert set(found[found.index(LONG) :]) == {LONG}


class Noting:
    """A compiled group that notes whether its calls may find their segments."""

    def __init__(self, inner, noted):
        self.__dict__.update(inner=inner, noted=noted)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    def pace_segments(self, adapts):
        self.noted.append(adapts)
        self.inner.pace_segments(adapts)


@pytest.mark.parametrize(
    ("segment", "library", "adapts"),
    [("", "", True), ("262144", "", True), ("65536", "", False), ("", "Open MPI", False)],
    ids=["default", "set-to-the-default", "set", "mpi"],
)
def test_segments_that_are_set_or_mpis_stay(monkeypatch, segment, library, adapts):
    """The default value counts as not set. MPI cuts messages itself."""
    monkeypatch.setenv("CYDIST_SEGMENT_BYTES", segment)
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    tuning_table.reload()
    noted = []

    def body(_):
        group = dist.group.WORLD
        group.library = library
        group.native = Noting(group.native, noted)
        dist.all_reduce(np.ones(1 << 20, np.uint8), timeout=60)

    try:
        run_threads(body, 2, "tcp")
    finally:
        tuning_table.reload()
    assert set(noted) == {adapts}

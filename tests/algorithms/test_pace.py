"""How rank 0 chooses the segments of long calls, on networks that are made up."""

import pytest

from cydist._native.pace_trial import PaceTrial

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

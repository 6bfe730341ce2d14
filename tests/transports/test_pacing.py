"""Both ways of a slow network stay in step, and nothing waits where one way is alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_on_hosts import PLACEMENTS, job_on
from network_hosts import Host, network_of, require_hosts

from cydist._native.pacing_trial import PacingTrial

MS = 1_000_000  # nanoseconds
SECOND = 1000 * MS
TICK = MS // 5
LEAST_AHEAD = 65536
PORT = 29840
LIMIT = 60.0

sizes = st.integers(1, 1 << 22)
rates = st.integers(1, 199)  # bytes in a microsecond


def paced(rate: int, round_trip_us: int = 50) -> tuple[PacingTrial, int]:
    """Return a connection that has delivered at such a rate, and its limit."""
    trial = PacingTrial()
    return trial, trial.deliver(rate * 20_000, 20_000, round_trip_us)


@given(rate=rates, round_trip_us=st.integers(0, 100_000))
def test_the_limit_is_what_a_connection_delivers(rate: int, round_trip_us: int) -> None:
    """In two milliseconds, or in four round trips if they take longer."""
    limit = paced(rate, round_trip_us)[1]
    assert limit == max(rate * max(2000, 4 * round_trip_us), LEAST_AHEAD)


@given(writes=st.lists(sizes, min_size=1, max_size=20), rate=st.integers(200, 1 << 20))
def test_a_fast_connection_has_no_limit(writes: list[int], rate: int) -> None:
    """Whatever comes in the meantime."""
    trial, limit = paced(rate)
    assert limit == 0
    for i, nbytes in enumerate(writes):
        trial.read(nbytes, SECOND + i * TICK)
        assert trial.write(nbytes, SECOND + i * TICK) == nbytes


@given(writes=st.lists(sizes, min_size=1, max_size=20), rate=rates, share=st.integers(0, 99))
def test_one_way_alone_never_waits(writes: list[int], rate: int, share: int) -> None:
    """Nor with a little traffic the other way."""
    trial, limit = paced(rate)
    for i, nbytes in enumerate(writes):
        now = SECOND + 500 * i * MS
        trial.read(share * limit // 200, now)
        assert trial.write(nbytes, now) == nbytes


@given(rate=rates, total=st.integers(1, 1 << 24), late=st.integers(0, 4))
def test_both_sides_stay_in_step(rate: int, total: int, late: int) -> None:
    """Though one begins a bit later, neither has much more under way than its limit, and the wire
    never rests once both have begun."""
    sides = [paced(rate) for _ in range(2)]
    limit = sides[0][1]
    ticked = rate * TICK // 1000
    left, under_way = [total, total], [0, 0]
    now = SECOND
    for trial, _ in sides:  # the end of another call, by which each knows that both ways are used
        trial.read(limit, now)
    for tick in range(2 * total // ticked + late + 400):
        now += TICK
        begun = [0, 1] if tick >= late else [0]
        for i in begun:
            if left[i]:
                written = sides[i][0].write(left[i], now)
                left[i] -= written
                under_way[i] += written
        if tick > late and min(left) > 0:
            assert min(under_way) > 0
            assert max(under_way) <= 2 * limit
        for i in begun:
            arrived = min(under_way[i], ticked)
            under_way[i] -= arrived
            if arrived:
                sides[1 - i][0].read(arrived, now)
    assert left == under_way == [0, 0]


@given(rate=rates, late=st.integers(1, 1000))
def test_a_pause_ends(rate: int, late: int) -> None:
    """Though nothing has come, since the other side may be late: after half of the time that the
    bytes before it take."""
    trial, limit = paced(rate)
    half = min(limit * 1000 // rate, 100 * MS) // 2
    trial.read(limit, SECOND)
    assert trial.write(2 * limit, SECOND) == limit
    assert trial.write(limit, SECOND) == 0
    assert trial.write(limit, SECOND + half - 1) == 0
    assert trial.write(limit, SECOND + half + late) == limit


@pytest.fixture(scope="module")
def slow_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts, each of which sends 1 Gbit/s at most."""
    require_hosts()
    with network_of(3, tmp_path_factory.mktemp("hosts")) as (_, made):
        for host in made:
            host.slow_down("1gbit")
        yield made


def test_ranks_pause_on_a_slow_network(slow_hosts: list[Host], tmp_path: Path) -> None:
    """In calls that go both ways, whose results are right, and not in those that go one way."""
    places = PLACEMENTS["2+2"]
    program = ["tests/programs/paced_calls.py"]
    with job_on(slow_hosts, places, program, tmp_path, PORT) as ranks:
        found = [json.loads(rank.line(LIMIT)) for rank in ranks]
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)
    assert all(each["both ways"] > 0 for each in found), found
    assert not any(each["one way"] for each in found), found


@pytest.mark.parametrize("placement", ["2+2+2", "3+1"])
def test_slow_calls_are_right(slow_hosts: list[Host], placement: str, tmp_path: Path) -> None:
    """Whatever the placement: each collective, also where one side has more to send."""
    places = PLACEMENTS[placement]
    program = ["tests/programs/wire_bytes.py", 1 << 21, 1, 10]
    with job_on(slow_hosts, places, program, tmp_path, PORT + 1) as ranks:
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)

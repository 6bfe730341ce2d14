"""What a job's hosts send each other, by the counters of their interfaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from extra_values import more
from network_hosts import Host, network_of, require_hosts

PROGRAM = "tests/programs/wire_bytes.py"
CALLS = 4  # of the program, of each collective
PORT = 29820
LIMIT = 120.0
PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "2+2+2": [0, 0, 1, 1, 2, 2],
}
# n bytes, h hosts: the least that all hosts together send.
LEAST = {
    "broadcast": lambda n, h: (h - 1) * n,
    "all_reduce": lambda n, h: 2 * (h - 1) * n,
    "reduce": lambda n, h: (h - 1) * n,
    "all_gather": lambda n, h: (h - 1) * n,
    "reduce_scatter": lambda n, h: (h - 1) * n,
}
OVERHEAD = 0.03  # headers of packets of 64 KiB, and acknowledgements
A_BARRIER = 4096  # bytes at most, also for the calls around those that are counted


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts on one switch."""
    require_hosts()
    with network_of(3, tmp_path_factory.mktemp("hosts")) as (_, made):
        yield made


def measured(
    hosts: list[Host], places: list[int], nbytes: int, directory: Path
) -> dict[str, float]:
    """Run the job; return what all hosts sent for a call of each collective."""
    key = directory / "secret"
    key.write_text("a" * 64)
    key.chmod(0o600)
    common = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": hosts[places[0]].address,
              "MASTER_PORT": str(PORT), "CYDIST_SECRET_FILE": str(key)}  # fmt: skip
    found: dict[str, float] = {}
    with ExitStack() as stack:
        ranks = []
        for rank, place in enumerate(places):
            environ = {**common, "RANK": str(rank)}
            ranks.append(hosts[place].start([PROGRAM, str(nbytes)], environ))
            stack.callback(ranks[-1].end)
        for _ in (*LEAST, "barrier"):
            said = [json.loads(rank.line(LIMIT)) for rank in ranks]
            name = said[0][0]
            # The first rank of a host that reads the counter does so before any of them sends.
            found[name] = sum(
                max(said[rank][2] for rank in here) - min(said[rank][1] for rank in here)
                for here in ([r for r, host in enumerate(places) if host == each]
                             for each in set(places))
            ) / CALLS  # fmt: skip
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)
    return found


@pytest.mark.parametrize("nbytes", [1 << 20, *more(1 << 16, 1 << 24)])
@pytest.mark.parametrize("placement", ["2+2", "round-robin", *more("3+1", "2+2+2")])
def test_each_byte_crosses_once_for_each_host_that_needs_it(
    hosts: list[Host], tmp_path: Path, placement: str, nbytes: int
) -> None:
    """Whatever the placement and the root, a job sends what it must, and 3 % for headers."""
    places = PLACEMENTS[placement]
    found = measured(hosts, places, nbytes, tmp_path)
    for name, least in LEAST.items():
        n = nbytes // 8 // len(places) * len(places) * 8
        must = least(n, len(set(places)))
        assert must <= found[name] <= (1 + OVERHEAD) * must + A_BARRIER, (name, found[name] / n)
    assert found["barrier"] < A_BARRIER

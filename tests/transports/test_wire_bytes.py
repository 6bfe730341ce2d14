"""The bytes that a job's hosts send each other, by the counters of their interfaces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from extra_values import more
from jobs_on_hosts import PLACEMENTS, job_on
from network_hosts import Host

PROGRAM = "tests/programs/wire_bytes.py"
FEW, MANY = 4, 200  # calls of the program, of each collective
PORT = 29820
LIMIT = 120.0
OVERHEAD = 0.03  # headers of packets of 64 KiB, and acknowledgements
A_BARRIER = 4096  # bytes at most, also for the calls around those that are counted
# Of a few bytes with its frame, the headers of a packet, and an acknowledgement that goes alone.
# Two of them in one packet are longer.
A_MESSAGE = 280

Least = Callable[[Sequence[int], int], float]


def on_other_hosts(places: Sequence[int], rank: int) -> int:
    return len(places) - places.count(places[rank])


def each_other_host(places: Sequence[int], root: int) -> float:
    return len(set(places)) - 1


def blocks_of_others(places: Sequence[int], root: int) -> float:
    return on_other_hosts(places, root) / len(places)


def all_pairs(places: Sequence[int], root: int) -> float:
    return sum(on_other_hosts(places, rank) for rank in range(len(places))) / len(places)


# What all hosts together must send, in units of the whole array or of all blocks of a rank.
LEAST: dict[str, Least] = {
    "broadcast": each_other_host,
    "all_reduce": lambda places, root: 2 * each_other_host(places, root),
    "reduce": each_other_host,
    "all_gather": each_other_host,
    "reduce_scatter": each_other_host,
    "gather": blocks_of_others,
    "scatter": blocks_of_others,
    "all_to_all": all_pairs,
    "scan": each_other_host,
    "exscan": each_other_host,
}
# Messages between two hosts, in both directions together.
MESSAGES = {
    "broadcast": 1, "all_reduce": 2, "reduce": 1, "all_gather": 2, "reduce_scatter": 2, "gather": 1,
    "scatter": 1, "all_to_all": 2, "uneven_all_to_all": 2, "scan": 1, "exscan": 1, "barrier": 2,
}  # fmt: skip


RUNS = 3  # at most: the counters include what TCP sends again when acknowledgements are late


def measured(
    hosts: list[Host], places: list[int], nbytes: int, root: int, calls: int, directory: Path
) -> dict[str, float]:
    """Run the job; return the bytes that all hosts sent for a call, by collective."""
    found = {}
    program = [PROGRAM, nbytes, root, calls]
    with job_on(hosts, places, program, directory, PORT) as ranks:
        for _ in range(12):
            said = [json.loads(rank.line(LIMIT)) for rank in ranks]
            # The first rank of a host that reads the counter does so before any of them sends.
            found[said[0][0]] = sum(
                max(said[rank][2] for rank in here) - min(said[rank][1] for rank in here)
                for here in ([r for r, host in enumerate(places) if host == each]
                             for each in set(places))
            ) / calls  # fmt: skip
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)
    return found


def consecutive(places: list[int]) -> bool:
    return sum(a != b for a, b in pairwise(places)) < len(set(places))


@pytest.mark.parametrize("nbytes", [1 << 20, *more(1 << 16, 1 << 24)])
@pytest.mark.parametrize("root", [1, *more(0, -1)])
@pytest.mark.parametrize(
    "placement", ["2+2", "round-robin", *more("3+1", "2+2+2", "1+2+1", "1+1+1")]
)
def test_each_byte_crosses_once_for_each_host_that_needs_it(
    hosts: list[Host], tmp_path: Path, placement: str, root: int, nbytes: int
) -> None:
    """Whatever the placement and the root, a job sends what it must, and 3 % for headers."""
    places = PLACEMENTS[placement]
    root %= len(places)
    n = nbytes // 8 // len(places) * len(places) * 8
    must = {
        name: least(places, root) * n
        for name, least in LEAST.items()
        if consecutive(places) or "scan" not in name
    }
    least_found: dict[str, float] = {}
    for run in range(RUNS):
        (directory := tmp_path / f"{run}").mkdir()
        for name, sent in measured(hosts, places, nbytes, root, FEW, directory).items():
            least_found[name] = min(sent, least_found.get(name, sent))
        most = {name: (1 + OVERHEAD) * must[name] + A_BARRIER for name in must}
        if all(least_found[name] <= most[name] for name in must):
            break
    for name in must:
        assert must[name] <= least_found[name] <= most[name], (name, least_found[name] / n)
    assert least_found["barrier"] < A_BARRIER


@pytest.mark.parametrize("placement", ["2+2", *more("round-robin", "3+1")])
def test_two_hosts_exchange_one_message(hosts: list[Host], tmp_path: Path, placement: str) -> None:
    """A call of 8 bytes for each rank takes one message each way, or one in all."""
    places = PLACEMENTS[placement]
    found = measured(hosts, places, 8 * len(places), 1, MANY, tmp_path)
    for name, count in MESSAGES.items():
        if "scan" in name and not consecutive(places):
            continue
        assert found[name] <= count * A_MESSAGE, (name, found[name])

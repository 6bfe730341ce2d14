"""Long calls between hosts use the same memory again: a page from the system costs more than its
bytes on the wire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extra_values import more
from jobs_on_hosts import PLACEMENTS, job_on
from network_hosts import Host

PROGRAM = "tests/programs/fresh_pages.py"
CALLS = 10  # of the program
PORT = 29825
LIMIT = 120.0
MOST = 0.05  # of the pages of the array, in each call


def fresh_pages(
    hosts: list[Host], placement: str, nbytes: int, directory: Path
) -> dict[str, float]:
    """Run the job; return the share of the array's pages that a call takes, by collective."""
    program = [PROGRAM, nbytes]
    with job_on(hosts, PLACEMENTS[placement], program, directory, PORT) as ranks:
        said = [json.loads(ranks[0].line(LIMIT)) for _ in range(CALLS)]
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)
    return dict(said)


@pytest.mark.parametrize("placement", ["2+2", *more("3+1")])
def test_a_long_call_takes_no_new_memory(hosts: list[Host], tmp_path: Path, placement: str) -> None:
    """Not even one of an array that the system's allocator would give back after each call."""
    found = fresh_pages(hosts, placement, 1 << 26, tmp_path)
    assert {name: share for name, share in found.items() if share > MOST} == {}


def test_a_root_with_several_children_keeps_no_messages(hosts: list[Host], tmp_path: Path) -> None:
    """Those that send to it are faster, so they wait until it has room in its own memory."""
    found = fresh_pages(hosts, "1+1+1", 1 << 24, tmp_path)
    assert max(found["reduce"], found["reduce to rank 0"]) < MOST

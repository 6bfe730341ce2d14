"""Ranks that have waited in vain for long soon wait awake again, where their cores are free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs_on_hosts import job_on
from network_hosts import network_of, require_hosts

PORT = 29845
LIMIT = 60.0
RUNS = 20  # at most: other processes may need the cores
ENOUGH = 8  # of twelve attempts


@pytest.mark.long
def test_ranks_recover_from_long_waits(tmp_path: Path) -> None:
    """Within fifty messages each way, between two hosts, if each rank is bound to a core."""
    require_hosts()
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("waits spin only where each rank has a core")
    found = []
    with network_of(2, tmp_path / "hosts") as (_, hosts):
        while max(found, default=0) < ENOUGH and len(found) < RUNS:
            program = ["tests/programs/long_waits.py"]
            with job_on(hosts, [0, 1], program, tmp_path, PORT + len(found)) as ranks:
                found.append(int(ranks[0].line(LIMIT)))
                assert [rank.ended(LIMIT) for rank in ranks] == [0, 0]
    assert max(found) >= ENOUGH, found

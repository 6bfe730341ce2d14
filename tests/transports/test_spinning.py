"""Ranks that have waited in vain for long soon wait awake again, where their cores are free."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from jobs_on_hosts import job_on
from network_hosts import network_of, require_hosts

PORT = 29845
LIMIT = 60.0
FEW = 8  # attempts with free cores


def test_ranks_recover_from_long_waits(tmp_path: Path) -> None:
    """Within fifty messages each way, between two hosts, if each rank is bound to a core."""
    require_hosts()
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("waits spin only where each rank has a core")
    with (
        network_of(2, tmp_path / "hosts") as (_, hosts),
        job_on(hosts, [0, 1], ["tests/programs/long_waits.py"], tmp_path, PORT) as ranks,
    ):
        found = json.loads(ranks[0].line(LIMIT))
        assert [rank.ended(LIMIT) for rank in ranks] == [0, 0]
    if found["tried"] < FEW:
        pytest.skip("other processes need the cores")
    assert found["recovered"] >= 0.75 * found["tried"], found

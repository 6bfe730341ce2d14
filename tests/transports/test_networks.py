"""Which ranks share memory does not depend on their networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_hosts import secret_file
from network_hosts import network_of, require_hosts

PROGRAM = "tests/programs/container_job.py"
PORT = 29800


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["networks", "hosts"])
def test_ranks_in_two_networks(tmp_path: Path, apart: bool) -> None:
    """On one kernel they share memory if they see each other's processes, and use sockets if
    not."""
    require_hosts()
    key = secret_file(tmp_path / "key")
    with network_of(2, tmp_path / "network") as (_, hosts):
        ranks = [
            (host.start if apart else host.start_in_network)(
                [PROGRAM],
                {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address,
                 "MASTER_PORT": str(PORT), "CYDIST_SECRET_FILE": str(key)},
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        over = "sockets" if apart else "memory"
        try:
            assert [rank.line() for rank in ranks] == [
                f"rank {number} is right, over {over}" for number in range(2)
            ]
        finally:
            for rank in ranks:
                rank.end()

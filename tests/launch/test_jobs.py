"""Whole jobs: what cydistrun and spawn start finds itself with init_process_group()."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched_hosts import without_notices

if TYPE_CHECKING:
    from conftest import Launcher

SUM = (
    "import numpy as np, cydist as dist",
    "dist.init_process_group()",
    "x = np.arange(3.0) + dist.get_rank()",
    "dist.all_reduce(x)",
    "print(x.tolist())",
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_host(launcher: Launcher, ranks: int) -> None:
    """Ranks of one host need no argument at all."""
    result = launcher.run("-n", str(ranks), launcher.script(*SUM, "dist.destroy_process_group()"))
    total = [float(ranks * i + ranks * (ranks - 1) // 2) for i in range(3)]
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {total}" for rank in range(ranks)]


def test_two_hosts(launcher: Launcher, tmp_path: Path) -> None:
    """Two launchers with one secret file make one job, at the address and port given."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = launcher.script(*SUM, "dist.destroy_process_group()")
    hosts = [
        launcher.start(
            "--nnodes=2", f"--node-rank={host}", "--master-addr=127.0.0.1",
            f"--master-port={port}", "-n", "2", script,
            env={"CYDIST_SECRET_FILE": str(key)},
        )
        for host in range(2)
    ]  # fmt: skip
    lines = [
        line
        for host in hosts
        for stream in host.communicate(timeout=60)
        for line in stream.decode().splitlines()
    ]
    assert sorted(lines) == [f"[{rank}] [6.0, 10.0, 14.0]" for rank in range(4)]


def test_one_host_needs_no_secret_file(launcher: Launcher) -> None:
    """It has a new secret for each start, and does not read CYDIST_SECRET_FILE."""
    script = launcher.script(*SUM, "dist.destroy_process_group()")
    env = {"CYDIST_SECRET_FILE": str(launcher.directory / "none")}
    result = launcher.run("-n", "2", script, env=env)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")


def test_killed_rank_is_the_first(launcher: Launcher) -> None:
    """Of a rank that was killed and those that waited for it, the launcher names the killed."""
    script = launcher.script(
        *SUM, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", "dist.all_reduce(x)"
    )
    result = launcher.run("-n", "3", script)
    assert "rank 1 (local rank 1" in result.stderr
    assert "failed first: killed by SIGKILL (9)" in result.stderr
    assert result.returncode == 137


def test_restart_is_a_new_job(launcher: Launcher) -> None:
    """After a restart the ranks find each other again, with another secret and store."""
    script = launcher.script(
        *SUM, "sys.exit(rank == 1 and os.environ['CYDIST_RESTART_COUNT'] == '0')"
    )
    result = launcher.run("-n", "2", "--max-restarts=1", "--restart-delay=0", script)
    assert result.returncode == 0
    assert result.stdout.count("[1.0, 3.0, 5.0]") == 4


def test_spawn(tmp_path: Path) -> None:
    """Ranks that spawn started need no argument either."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, numpy as np, cydist as dist\n"
        "def rank(i, add):\n"
        "    dist.init_process_group()\n"
        "    x = np.full(2, i + add)\n"
        "    dist.all_reduce(x)\n"
        "    sys.stdout.write(f'{x.tolist()}\\n')\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n"
        "    dist.spawn(rank, (10,), nprocs=3)\n"
    )
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert result.stdout == "[33, 33]\n" * 3


@pytest.mark.more
def test_torch_distributed(launcher: Launcher) -> None:
    """A program of torch.distributed runs too: rank 0 may bind the port for torch's own store."""
    pytest.importorskip("torch")
    script = launcher.script(
        "import torch, torch.distributed as dist",
        "dist.init_process_group('gloo')",
        "x = torch.ones(2)",
        "dist.all_reduce(x)",
        "print(x.tolist())",
        "dist.destroy_process_group()",
    )
    result = launcher.run("-n", "2", script)
    assert sorted(result.stdout.splitlines()) == ["[0] [2.0, 2.0]", "[1] [2.0, 2.0]"]
    assert result.returncode == 0

"""Contract tests where a launcher starts the ranks: every process runs all of them, and sees what
every rank returns or raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OTHERS = """
import numpy
import pytest
import cydist as dist


def test_results_of_all(jobs, backend):
    def body(rank):
        x = numpy.ones(1)
        dist.all_reduce(x)
        return rank, dist.get_world_size(), x[0]

    assert [(0, 2, 2.0), (1, 2, 2.0)] == jobs.get(backend, 2).run(body)
    assert [(0, 1, 1.0)] == jobs.get(backend, 1).run(body)


def test_fewer_ranks_than_needed(jobs, backend):
    jobs.get(backend, 3)
    pytest.fail("it goes on")


def raises(rank):
    if rank == 1:
        raise ValueError("only here")


def test_an_error_is_raised_everywhere(jobs, backend):
    job = jobs.get(backend, 2)
    with pytest.raises(ValueError, match="only here") as caught:
        job.run(raises)
    assert "on rank 1:" in caught.value.__notes__[0]
    assert "in raises" in caught.value.__notes__[0]
    assert job.broken
    assert jobs.get(backend, 2) is not job
    assert [0, 1] == jobs.get(backend, 2).run(lambda rank: rank)


def test_what_cannot_be_told_is_described(jobs, backend):
    with pytest.raises(RuntimeError, match="on rank 0: .*pickle"):
        jobs.get(backend, 2).run(lambda rank: (lambda: 0) if rank == 0 else 0)
"""


def pytest_on(ranks: int, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest under cydistrun, on so many ranks."""
    for name in ("cydist", "_cydist_pytest.py"):  # away from this project's conftest.py
        if not (cwd / name).exists():
            (cwd / name).symlink_to(ROOT / name)
    launch = ("-m", "cydist.run", "--nproc-per-node", str(ranks), "-m", "pytest")
    return subprocess.run(
        [sys.executable, *launch, "-p", "_cydist_pytest", "-q", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(cwd)}, capture_output=True, text=True,
        timeout=55, check=False,
    )  # fmt: skip


def test_contract_of_processes(tmp_path: Path) -> None:
    """cydistrun's ranks pass, and rank 0 says what the backend can do."""
    ended = pytest_on(
        2, tmp_path, "--pyargs", "cydist.testing", "--cydist-backend", "tcp",
        "-k", "coalesced or p2p or (mismatches and 2ranks)",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["[0]", "receives", "from", "any", "source", "yes"] in lines
    assert ["[1]", "receives", "from", "any", "source", "yes"] not in lines


def test_what_ranks_return_and_raise(tmp_path: Path) -> None:
    """All ranks see it, and a test that needs more of them is skipped."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["cydist.testing.contract"]\n')
    (tmp_path / "test_others.py").write_text(OTHERS)
    ended = pytest_on(2, tmp_path, "--cydist-backend", "tcp", "test_others.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("3 passed, 1 skipped") == 2


def test_one_backend_at_a_time(tmp_path: Path) -> None:
    """The ranks' processes join one job."""
    names = ("--cydist-backend", "tcp", "--cydist-backend", "gloo")
    ended = pytest_on(2, tmp_path, "--pyargs", "cydist.testing", *names)
    assert ended.returncode != pytest.ExitCode.OK
    assert "tcp and gloo: one at a time where a launcher starts the ranks" in ended.stderr

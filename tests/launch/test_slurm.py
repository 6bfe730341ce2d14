"""The batch scripts of docs/guide/slurm.md, run by a real Slurm on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import ROOT, Cluster

SCRIPTS = ROOT / "docs/examples/slurm"
PROGRAM = str(ROOT / "tests/programs/slurm_job.py")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def said(hosts: list[str]) -> list[str]:
    """What the ranks say, sorted."""
    size = len(hosts)
    total = sum(range(size))
    return [f"rank {r} of {size}: sum {total}, on {' '.join(hosts)}" for r in range(size)]


def lines(out: str) -> list[str]:
    """What ranks said, sorted, without a launcher's prefix."""
    return sorted(line[line.index("rank ") :] for line in out.splitlines() if ": sum " in line)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (("--ntasks-per-node=2",), ["host0", "host0", "host1", "host1"]),
        ((), ["host0", "host0", "host0", "host1"]),
        (("--distribution=cyclic", "--ntasks-per-node=2"), ["host0", "host1", "host0", "host1"]),
    ],
    ids=["even", "uneven", "round-robin"],
)
def test_srun_needs_no_variable(
    cluster: Cluster, options: tuple[str, ...], hosts: list[str]
) -> None:
    """Ranks of a step over two hosts meet by Slurm's variables and the user's secret, which the
    hosts' shared home holds."""
    state, out = cluster.result(cluster.submit(*options, str(SCRIPTS / "srun.sbatch"), PROGRAM))
    assert (state, lines(out)) == ("COMPLETED", said(hosts)), out


def test_two_jobs_at_once(cluster: Cluster) -> None:
    """Each step has a port of its own, though both begin on one host."""
    jobs = [cluster.submit(str(SCRIPTS / "srun.sbatch"), PROGRAM) for _ in range(2)]
    for job in jobs:
        state, out = cluster.result(job)
        assert state == "COMPLETED", out


def test_a_requeued_job_starts(cluster: Cluster) -> None:
    """The second attempt does not wait for ranks of the first."""
    job = cluster.submit(str(SCRIPTS / "srun.sbatch"), PROGRAM, "fails first")
    state, out = cluster.result(job)
    assert state == "FAILED"
    assert "rank 1 fails" in out
    cluster.requeue(job)
    state, out = cluster.result(job, 200)
    assert state == "COMPLETED", out
    assert lines(out) == said(["host0", "host0", "host0", "host1"])


def test_cydistrun_on_each_host(cluster: Cluster) -> None:
    """A launcher on each host, with the user's secret in the shared home."""
    state, out = cluster.result(cluster.submit(str(SCRIPTS / "cydistrun.sbatch"), PROGRAM))
    assert (state, lines(out)) == ("COMPLETED", said(["host0", "host0", "host1", "host1"])), out


def test_as_many_hosts_as_there_are(cluster: Cluster) -> None:
    """The command line that cydistrun gives for --nnodes 1:2."""
    command = ("--nodes=1-2", "--ntasks-per-node=2", "--requeue", "--wrap")
    step = f"srun --kill-on-bad-exit=1 python {PROGRAM}"
    state, out = cluster.result(cluster.submit(*command, step))
    assert (state, lines(out)) == ("COMPLETED", said(["host0", "host0", "host1", "host1"])), out


def test_torchrun_on_each_host(cluster: Cluster) -> None:
    """An agent on each host, by torchrun's own rendezvous."""
    pytest.importorskip("torch")
    state, out = cluster.result(cluster.submit(str(SCRIPTS / "torchrun.sbatch"), PROGRAM))
    assert state == "COMPLETED", out
    found = lines(out)
    assert len(found) == 4
    assert all("of 4: sum 6" in line for line in found)


def test_a_secret_that_differs_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Hosts without a shared home: the text says what to do."""
    job = cluster.submit("--export=ALL,APART=1", str(SCRIPTS / "srun.sbatch"), PROGRAM, "apart")
    state, out = cluster.result(job)
    assert state == "FAILED"
    assert "do not share one secret" in out
    assert "CYDIST_SECRET_FILE" in out

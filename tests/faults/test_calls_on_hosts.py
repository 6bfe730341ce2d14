"""Collectives of jobs on several hosts, which are namespaces: right, different, and cut short."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from extra_values import more
from jobs_on_hosts import PLACEMENTS, job_on, mpirun_on
from mpi_launchers import binaries
from network_hosts import ROOT, Host

PORT = 29840
LIMIT = 120.0  # for each line of a rank, and its end
OF_BOTH_KINDS = ("broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "all_to_all",
                 "scan", "exscan")  # fmt: skip
MISSING = {  # the rank that dies, and where
    "leader-begins": (2, "enter:kill:3"),
    "leader-sends": (2, "send.mid:kill:5"),
    "beside-a-leader": (3, "send.mid:kill:4"),
    "rank0": (0, "send.mid:kill:9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["table", *more("leaders", "lanes")])
@pytest.mark.parametrize(
    "placement", ["2+2", "round-robin", *more("3+1", "1+2+1", "2+2+2")]
)  # fmt: skip
def test_random_calls_give_every_bit(
    hosts: list[Host], tmp_path: Path, placement: str, algorithm: str
) -> None:
    """Calls of any collective, size, root and group, back to back and several at once."""
    forced = ",".join(f"{name}:{algorithm}" for name in OF_BOTH_KINDS)
    environ = {} if algorithm == "table" else {"CYDIST_ALGORITHM": forced}
    program = ["tests/programs/random_calls.py", 1, 1000]
    with job_on(hosts, PLACEMENTS[placement], program, tmp_path, PORT, environ) as ranks:
        assert [rank.line(LIMIT) for rank in ranks] == ["ok"] * len(ranks)
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [800, *more(1 << 20)])
@pytest.mark.parametrize("placement", ["2+2", *more("round-robin", "3+1", "1+2+1")])
def test_a_different_call_is_a_mismatch_on_all(
    hosts: list[Host], tmp_path: Path, placement: str, nbytes: int
) -> None:
    """Whichever rank differs, on whichever host, in its call, count, type, operation or root."""
    program = ["tests/programs/differing_calls.py", nbytes]
    with job_on(hosts, PLACEMENTS[placement], program, tmp_path, PORT) as ranks:
        said = [json.loads(rank.line(LIMIT)) for rank in ranks]
    ends = {case: {each[case] for each in said} for case in said[0]}
    assert len(ends) == 160
    assert {case: end for case, end in ends.items() if end != {"MismatchError"}} == {}


class Mpi(NamedTuple):
    """An MPI with what lies below its messages: where its programs are, and its settings."""

    programs: Path
    environ: dict[str, str]


# MPICH over UCX, which its wheel takes by default, and over libfabric. There it would take the
# provider "sockets", with which MPI_Init of three hosts hangs now and then.
BELOW_MPI = {
    "openmpi": {},
    "mpich-ucx": {"MPIR_CVAR_CH4_NETMOD": "ucx"},
    "mpich-ofi": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}


@pytest.fixture(params=["openmpi", *more("mpich-ucx", "mpich-ofi")])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI, with each of what may lie below its messages."""
    return Mpi(binaries(request.param.partition("-")[0]), BELOW_MPI[request.param])


def said_over_mpi(
    mpi: Mpi, hosts: list[Host], placement: str, program: list[object], directory: Path,
    meeting: dict[str, str],
) -> list[str]:  # fmt: skip
    """Run a job on the backend "mpi"; return the lines of all ranks."""
    key = directory / "secret"
    key.write_text("a" * 64)
    key.chmod(0o600)
    environ = {**mpi.environ, **meeting, "CYDIST_SECRET_FILE": str(key)}
    command = mpirun_on(
        str(mpi.programs / "python"), hosts, PLACEMENTS[placement], [*program, "mpi"], environ,
        directory,
    )  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


WHERE = """
import socket
from mpi4py import MPI
for name in MPI.COMM_WORLD.gather(socket.gethostname()) or ():
    print(name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["round-robin", "1+2+1"])
def test_mpirun_places_ranks_as_it_is_told(
    mpi: Mpi, hosts: list[Host], tmp_path: Path, placement: str
) -> None:
    """What compares placements over MPI rests on this."""
    lines = said_over_mpi(mpi, hosts, placement, ["-c", WHERE], tmp_path, {})
    assert lines == [hosts[place].name for place in PLACEMENTS[placement]]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["2+2", "1+1+1", *more("3+1", "round-robin")])
def test_random_calls_over_mpi_give_every_bit(
    mpi: Mpi, hosts: list[Host], tmp_path: Path, placement: str
) -> None:
    """With memory inside a host, and MPI's messages between."""
    program: list[object] = ["tests/programs/random_calls.py", 2, 500]
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    lines = said_over_mpi(mpi, hosts, placement, program, tmp_path, meeting)
    assert lines == ["ok"] * len(PLACEMENTS[placement])


@pytest.mark.slow
def test_a_rank_may_run_far_ahead_over_mpi(mpi: Mpi, hosts: list[Host], tmp_path: Path) -> None:
    """Thousands of its messages come before another rank asks for them; none is lost."""
    program: list[object] = ["tests/programs/one_way_calls.py", 20_000]
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    assert said_over_mpi(mpi, hosts, "2+2", program, tmp_path, meeting) == ["ok"] * 4


@pytest.mark.slow
def test_ranks_on_hosts_meet_over_mpi(mpi: Mpi, hosts: list[Host], tmp_path: Path) -> None:
    """Without MASTER_ADDR rank 0 sends its address by MPI."""
    program: list[object] = ["tests/programs/random_calls.py", 2, 10]
    meeting = {"CYDIST_SOCKET_IFNAME": "eth"}  # these hosts' names have no addresses
    assert said_over_mpi(mpi, hosts, "2+2", program, tmp_path, meeting) == ["ok"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["2+2", "1+1+1"])
def test_a_different_call_over_mpi_is_a_mismatch_on_all(
    mpi: Mpi, hosts: list[Host], tmp_path: Path, placement: str
) -> None:
    """As over TCP."""
    program: list[object] = ["tests/programs/differing_calls.py", 800]
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    lines = said_over_mpi(mpi, hosts, placement, program, tmp_path, meeting)
    said = [json.loads(line) for line in lines]
    assert len(said) == len(PLACEMENTS[placement])
    ends = {case: [each[case] for each in said] for case in said[0]}
    assert {case: end for case, end in ends.items() if {*end} != {"MismatchError"}} == {}


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [4096, *more(1 << 22)])
@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_to_all", *more("broadcast", "reduce_scatter", "gather")]
)
def test_survivors_name_the_dead_and_go_on(
    hosts: list[Host], tmp_path: Path, collective: str, missing: str, nbytes: int
) -> None:
    """They shrink to a group with one rank less on a host, whose calls are right."""
    dead, failpoint = MISSING[missing]
    program = ["tests/programs/killed_on_hosts.py", collective, nbytes, dead, failpoint]
    with job_on(hosts, PLACEMENTS["2+2"], program, tmp_path, PORT) as ranks:
        for number, rank in enumerate(ranks):
            if number != dead:
                end = json.loads(rank.line(LIMIT))
                assert (end["kind"], end["ranks"], end["left"]) == ("PeerFailedError", [dead], 3)

"""Jobs of two ranks that a launcher has started, and an attacker of another user."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from attacks import (
    CHANGED,
    LEADING,
    LED,
    PROGRAM,
    ROOT,
    SETTINGS,
    STAYS,
    Attack,
    Attacker,
    Job,
    another_user,
    check_unharmed,
)
from mpi_launchers import TOLERANT, binaries
from network_hosts import Host
from slurm_cluster import Cluster

WAIT = 30
HERE = "127.0.0.1"
VISITS = 400  # of the attacker, before the calls and again during them
SWITCHES = {name for settings in SETTINGS.values() for name in settings}
PORT = 29511  # MASTER_PORT of cydistrun over hosts, whose networks no other test uses

# Open MPI has a port of its own in each rank, for other hosts. A process that
# talks to it can stop Open MPI.
WITHOUT_MPIS_PORT = {"OMPI_MCA_btl": "self,sm"}


class Launch(NamedTuple):
    """How a launcher starts two ranks, and where the attacker is.

    Attributes:
        start: Starts them; of the launchers of several hosts those that are named.
        host: Address of rank 0's host.
        inside: Command that starts the attacker on that host.
        port: MASTER_PORT; None: the ranks know it, as he does, or there is none.
    """

    start: Callable[..., None]
    host: str = HERE
    inside: Sequence[str] = ()
    port: int | None = None


def by_mpirun(name: str, **place: str) -> Launch:
    """Start ranks by an MPI's mpirun, with these variables."""
    mpi = binaries(name)
    variables = [f"{variable}={value}" for variable, value in place.items()]
    command = ["-n", "2", "env", *variables, str(mpi / "python"), PROGRAM]

    def start(job: Job) -> None:
        job.start(command, [str(mpi / "mpirun")], **TOLERANT, **WITHOUT_MPIS_PORT)

    return Launch(start, port=int(place.get("MASTER_PORT", 0)) or None)


def by_srun(cluster: Cluster) -> Launch:
    """Start a rank on each of two hosts."""
    first = cluster.hosts[0]

    def start(job: Job) -> None:
        command = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", sys.executable, PROGRAM]
        job.start(command, first.enter("srun"), **cluster.environ)

    return Launch(start, first.address, first.in_network())


def by_cydistrun(hosts: Sequence[Host], program: str = PROGRAM) -> Launch:
    """Start a launcher with one rank on each of two hosts."""

    def start(job: Job, *numbers: int) -> None:
        for number in numbers or (0, 1):
            job.start(
                ["-m", "cydist.run", "--nnodes=2", f"--node-rank={number}",
                 f"--master-addr={hosts[0].address}", f"--master-port={PORT}", program],
                [*hosts[number].enter("sh", "-c", 'cd "$0" && exec "$@"', str(ROOT)),
                 sys.executable],
            )  # fmt: skip

    return Launch(start, hosts[0].address, hosts[0].in_network(), PORT)


@contextlib.contextmanager
def attacked(launch: Launch, **environ: str) -> Iterator[tuple[Attacker, Job]]:
    """The attacker of a job, and the job, whose ranks will wait at the gate `start`."""
    settings = {name: environ[name] for name in environ if name in SWITCHES}
    with (
        another_user(inside=launch.inside, ATTACKER_HOST=launch.host, **settings) as attacker,
        Job(attacker, **{"WAIT": "6", "GATE": str(attacker.folder / "start"), **environ}) as job,
    ):
        yield attacker, job


def await_event(attacker: Attacker, event: str) -> None:
    """Wait until something has happened to him."""
    until = time.monotonic() + WAIT
    while event not in attacker.events():
        assert time.monotonic() < until, (event, attacker.events())
        time.sleep(0.01)


def await_visits(attacker: Attacker, count: int) -> Any:
    """Wait until he has come to ports so often; return how he fared."""
    until = time.monotonic() + WAIT
    while (seen := attacker.ask("visits"))["visits"] < count:
        assert time.monotonic() < until, seen
        time.sleep(0.01)
    return seen


def connect_through_him(attacker: Attacker, job: Job) -> None:
    """Let rank 1, which was led to him, begin its calls, and rank 0 when they are connected. An
    attempt of rank 0's to connect might lead past him."""
    job.allow("calls.1")
    await_event(attacker, "let through: peer")
    job.allow("calls.0")


def take_the_port(launch: Launch, attacker: Attacker, job: Job, attack: Attack) -> None:
    """He listens where rank 0 will, keeps rank 1, and relays to rank 0 when that has come."""
    launch.start(job)
    known, _ = job.is_at("start", 0), job.is_at("start", 1)
    port = launch.port or known["slurm"][1]
    assert attacker.ask("take", port, attack | {"job": known["job"]}) == {"taken": True}
    job.allow("start.1")
    await_event(attacker, LED)
    job.allow("start.0")


def check_that_a_lost_port_is_told(launch: Launch) -> None:
    """He listens where rank 0 should, stays, and says nothing: rank 0 names the port, and the job
    ends."""
    with attacked(launch) as (attacker, job):
        launch.start(job)
        known, _ = job.is_at("start", 0), job.is_at("start", 1)
        port = launch.port or known["slurm"][1]
        assert attacker.ask("squat", [port]) == {"got": [port]}
        for rank in range(2):
            job.allow(f"start.{rank}")
        check_unharmed(attacker, job, "DistNetworkError", ranks=1)
        assert re.search(rf"DistNetworkError.*{port}", job.said), job.said
        assert '"fine"' not in job.said


def check_that_both_refuse(launch: Launch, settings: str) -> None:
    """He is let through nowhere, and rank 1, which was led to him, ends in words."""
    with attacked(launch, **SETTINGS[settings], **STAYS) as (attacker, job):
        take_the_port(launch, attacker, job, LEADING)
        check_unharmed(attacker, job, ranks=1)
        assert not [event for event in attacker.events() if event.startswith("let through")]
        assert "refused each other's connection" in job.said
        assert '"fine"' not in job.said


def check_that_changes_are_found(launch: Launch) -> None:
    """With CYDIST_NAT=1 he is let through, and what he changes is found."""
    with attacked(launch, **SETTINGS["nat"], **STAYS) as (attacker, job):
        take_the_port(launch, attacker, job, LEADING)
        check_unharmed(attacker, job, ranks=1)
        assert "let through: store" in attacker.events()
        assert '"fine"' not in job.said


def check_that_he_changes_an_object(launch: Launch) -> None:
    """With CYDIST_INSECURE=1 a rank gets another object than was sent."""
    with attacked(launch, **SETTINGS["insecure"], **STAYS, WAIT="40") as (attacker, job):
        job.environ["GATE_CALLS"] = job.gate("calls")
        take_the_port(launch, attacker, job, LEADING | {"public": True})
        connect_through_him(attacker, job)
        ends = job.ended()
        assert attacker.did("plain", "peer"), str((attacker.events(), ends, job.said))
        assert "wrong" in {end["end"] for end in ends}, (ends, job.said)
        assert CHANGED["text"][1:] in "".join(end["text"] for end in ends)


def flooded(launch: Launch, backend: str, settings: str) -> tuple[int, str, list[str]]:
    """How often he was let in at the ports of a job, what it said, and how its ranks ended."""
    environ = {"BACKEND": backend, "CYDIST_TRANSPORT": backend, "WAIT": "40"} | SETTINGS[settings]
    with attacked(launch, **environ) as (attacker, job):
        gates = {"GATE_CALLS": job.gate("calls"), "UNTIL": job.gate("over")}
        job.environ.update(gates)
        launch.start(job)
        known, _ = job.is_at("start", 0), job.is_at("start", 1)
        port = launch.port or (known["slurm"] or [0, 0])[1]
        if port:
            attacker.ask("flood", [[launch.host, port]], known["job"])
        for rank in range(2):
            job.allow(f"start.{rank}")
        ports = [port for rank in range(2) for port in job.is_at("calls", rank)["ports"]]
        assert attacker.ask("flood", ports, known["job"])["flooded"] >= 3
        so_far = await_visits(attacker, VISITS)["visits"]
        for rank in range(2):
            job.allow(f"calls.{rank}")
        seen = await_visits(attacker, so_far + VISITS)
        job.allow("over")
        ends = [end["end"] for end in job.ended()]
        return seen["let in"], job.said, ends


def check_a_flood(launch: Launch, backend: str = "tcp", settings: str = "default") -> None:
    """Garbage, silence, and proofs of another secret let him in nowhere, and the job goes on
    with every value right."""
    let_in, said, ends = flooded(launch, backend, settings)
    assert let_in == 0
    assert ends == ["fine", "fine"], said

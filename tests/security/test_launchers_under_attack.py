"""An attacker of another user against jobs that mpirun and cydistrun over hosts have started.

What he does to ranks that are started by hand, by torchrun and by cydistrun on one host is in
test_attacks.py, and srun in test_slurm_under_attack.py. The hosts of cydistrun are namespaces of
this machine; he is on rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attacks import LED, SETTINGS, Attack, free_port
from extra_values import more
from launched_jobs import (
    HERE,
    PORT,
    Launch,
    attacked,
    await_event,
    await_visits,
    by_cydistrun,
    by_mpirun,
    check_a_flood,
    check_that_a_lost_port_is_told,
    check_that_both_refuse,
    check_that_changes_are_found,
    check_that_he_changes_an_object,
    flooded,
)
from network_hosts import Host, network_of, require_hosts

pytestmark = pytest.mark.timeout(120)  # each starts some processes, one after the other
LONG = [pytest.mark.long, pytest.mark.timeout(300)]

# All ranks are on this host, and cydist does not know: they meet over MPI.
AS_ON_HOSTS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MPI_LOCALNRANKS": "1"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts."""
    require_hosts()
    with network_of(2, tmp_path) as (_, made):
        yield made


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Launch:
    """The launcher that the test names, and how its ranks meet."""
    if request.param == "cydistrun":
        return by_cydistrun(request.getfixturevalue("hosts"))
    name, _, way = request.param.partition(" ")
    ways = {
        "one host": {},
        "over MPI": AS_ON_HOSTS,
        "MASTER_ADDR": {"MASTER_ADDR": HERE, "MASTER_PORT": f"{free_port()}"},
    }
    return by_mpirun(name, **ways[way])


BY_ADDRESS = ["openmpi MASTER_ADDR", *more("mpich MASTER_ADDR"), "cydistrun"]


@pytest.mark.parametrize("launch", BY_ADDRESS, indirect=True)
@pytest.mark.parametrize("settings", ["default", pytest.param("encrypted", marks=LONG)])
def test_he_takes_the_port_of_rank_0(launch: Launch, settings: str) -> None:
    """Both ranks refuse his relay."""
    check_that_both_refuse(launch, settings)


@pytest.mark.parametrize("launch", BY_ADDRESS, indirect=True)
def test_he_keeps_the_port_of_rank_0(launch: Launch) -> None:
    """The job ends in words."""
    check_that_a_lost_port_is_told(launch)


@pytest.mark.parametrize("launch", BY_ADDRESS, indirect=True)
def test_he_takes_the_port_where_addresses_are_translated(launch: Launch) -> None:
    """What he changes is found."""
    check_that_changes_are_found(launch)


@pytest.mark.parametrize("launch", BY_ADDRESS, indirect=True)
def test_he_takes_the_port_where_nothing_is_authenticated(launch: Launch) -> None:
    """So the attack is one."""
    check_that_he_changes_an_object(launch)


FLOODS = [
    pytest.param("openmpi one host", "tcp"),
    pytest.param("openmpi over MPI", "mpi"),
    pytest.param("cydistrun", "tcp"),
    *(
        pytest.param(name, backend, marks=pytest.mark.more)
        for name, backend in (
            ("openmpi one host", "mpi"), ("mpich one host", "tcp"), ("mpich over MPI", "mpi"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("launch", "backend"), FLOODS, indirect=["launch"])
def test_he_floods_every_port(launch: Launch, backend: str) -> None:
    """He is let in nowhere, and the job goes on."""
    check_a_flood(launch, backend)


@pytest.mark.parametrize("launch", ["openmpi MASTER_ADDR", "cydistrun"], indirect=True)
def test_he_is_let_in_where_nothing_is_authenticated(launch: Launch) -> None:
    """By the same flood."""
    let_in, _, _ = flooded(launch, "tcp", "insecure")
    assert let_in > 0


# The meeting of cydistrun's launchers

CODE: Attack = {"on": "launch", "kind": "value", "always": True, "way": "up",
                "old": '"code": 7', "new": '"code": 0', "job": "cydistrun none hosts"}  # fmt: skip


def test_he_takes_the_port_of_host_0s_launcher(hosts: Sequence[Host]) -> None:
    """Both launchers refuse his relay, and the one that was led to him ends. When it is started
    again, in his flood and what he has recorded, the launchers meet, and the job is well."""
    launch = by_cydistrun(hosts)
    with attacked(launch) as (attacker, job):
        for rank in range(2):
            job.allow(f"start.{rank}")
        attacker.ask("take", PORT, CODE)
        launch.start(job, 1)
        await_event(attacker, LED)
        launch.start(job, 0)
        code, said = job.end_of(0)
        assert code == 1
        assert "refused each other's connection" in said
        attacker.ask("flood", [[launch.host, PORT]], CODE["job"])
        await_visits(attacker, 200)
        launch.start(job, 1)
        assert [end["end"] for end in job.ended()] == ["fine", "fine"], job.said
        assert attacker.ask("visits")["let in"] == 0
        assert "refused" in attacker.events()


@pytest.mark.parametrize("settings", ["nat", "insecure"])
def test_what_launchers_tell_each_other_is_changed(
    hosts: Sequence[Host], settings: str, tmp_path: Path
) -> None:
    """On the path between launchers he makes a failed job end well where nothing is authenticated.
    Elsewhere the change is found."""
    program = tmp_path / "fails.py"
    program.write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))")
    launch = by_cydistrun(hosts, str(program))
    with attacked(launch, **SETTINGS[settings]) as (attacker, job):
        attacker.ask("take", PORT, CODE | {"public": settings == "insecure"})
        launch.start(job, 1)
        await_event(attacker, LED)
        launch.start(job, 0)
        code, said = job.end_of(1)
        assert "value: launch up" in attacker.events()
        assert code == (0 if settings == "insecure" else 1)
        assert ("tampered with" in said) is (settings == "nat")

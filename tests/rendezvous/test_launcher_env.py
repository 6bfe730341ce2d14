"""What launchers leave in the environment, and what we make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cydist.devices import array_libraries, cuda_driver
from cydist.errors import RendezvousError
from cydist.rendezvous import launcher_env
from cydist.rendezvous.launcher_env import Placement

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-vm-677@1", "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3",
    "PMI_FD": "9", "HYDI_CONTROL_FD": "7",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3",
}  # fmt: skip
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}

CASES = [
    pytest.param(TORCHRUN, "torchrun", Placement(5, 8, 1, 4), id="torchrun"),
    pytest.param(OPENMPI, "openmpi", Placement(1, 4, 1, 4), id="openmpi"),
    pytest.param(HYDRA, "hydra", Placement(2, 3, 2, 3), id="hydra"),
    pytest.param(SLURM, "slurm", Placement(6, 8, 2, 4), id="srun"),
    pytest.param(
        SLURM | {"PMI_RANK": "6", "PMI_SIZE": "8"}, "slurm", Placement(6, 8, 2, 4), id="pmi2"
    ),
    pytest.param(BATCH, None, Placement(), id="sbatch"),
    pytest.param(BATCH | OPENMPI, "openmpi", Placement(1, 4, 1, 4), id="mpirun in sbatch"),
    pytest.param(BATCH | HYDRA, "hydra", Placement(2, 3, 2, 3), id="mpiexec in sbatch"),
    pytest.param(SLURM | TORCHRUN, "torchrun", Placement(5, 8, 1, 4), id="torchrun under srun"),
    pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, None, Placement(1, 2), id="by hand"),
    pytest.param({}, None, Placement(), id="alone"),
]


@pytest.fixture(autouse=True)
def no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run under cydistrun."""
    monkeypatch.delenv("CYDIST_RUN_ID", raising=False)


@pytest.mark.parametrize(("environ", "name", "place"), CASES)
def test_launcher_is_recognised(
    environ: dict[str, str], name: str | None, place: Placement
) -> None:
    """Each launcher's variables give its name, the rank and the sizes."""
    assert launcher_env.launcher(environ) == name
    assert launcher_env.placement(environ) == place


def test_cydistrun_is_told_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launcher sets torchrun's variables and one of its own."""
    monkeypatch.setenv("CYDIST_RUN_ID", "abc")
    assert launcher_env.launcher(TORCHRUN) == "cydistrun"


@pytest.mark.parametrize(
    ("environ", "single"),
    [(OPENMPI, True), (HYDRA, True), (SLURM, False), (TORCHRUN, False), ({}, False)],
    ids=["openmpi", "hydra", "srun", "torchrun", "alone"],
)
def test_one_host_is_known_by_the_local_size(environ: dict[str, str], single: bool) -> None:
    """All ranks are here if the local size is the size."""
    assert launcher_env.placement(environ).single_host is single


def test_uneven_hosts_are_not_one_host() -> None:
    """Slurm's list of different numbers per host is no number, and no error."""
    place = launcher_env.placement(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"})
    assert place == Placement(6, 8, 2, None)
    assert not place.single_host


def test_a_rank_that_is_no_number_is_named() -> None:
    """The variable is in the message."""
    with pytest.raises(ValueError, match="RANK must be a number, not 'first'"):
        launcher_env.placement({"RANK": "first", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("host0", "host0"),
        ("host0,host1", "host0"),
        ("host[3-7,9]", "host3"),
        ("node[01-03,07],gpu1", "node01"),
        ("rack[1-2]node[004-012]", "rack1node004"),
        ("n[5]-ib,n[1-4]-ib", "n5-ib"),
        ("gpu-a.cluster.example,gpu-b.cluster.example", "gpu-a.cluster.example"),
    ],
)
def test_rank_0_is_on_the_first_host_of_a_step(nodes: str, first: str) -> None:
    """However Slurm writes its list."""
    found = launcher_env.slurm_address(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found[0] == first


def test_port_is_of_one_attempt_of_one_step() -> None:
    """All ranks of a step find the same, below the ports of outgoing connections."""
    nodes = {"SLURM_STEP_NODELIST": "host[0-1]"}
    steps = [
        SLURM | nodes | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": count}
        for job in ("77", "78") for step in ("0", "1") for count in ("", "1")
    ]  # fmt: skip
    ports = [launcher_env.slurm_address(environ)[1] for environ in steps]  # type: ignore[index]
    assert len(set(ports)) == len(steps)
    assert all(12_000 <= port < 32_000 for port in ports)
    assert ports == [launcher_env.slurm_address(environ | {"SLURM_PROCID": "7"})[1]  # type: ignore[index]
                     for environ in steps]  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [{}, OPENMPI, BATCH | {"SLURM_STEP_NODELIST": "host0"}, SLURM, TORCHRUN],
    ids=["alone", "openmpi", "sbatch", "no list", "torchrun"],
)
def test_others_have_no_such_address(environ: dict[str, str]) -> None:
    """Only a step of Slurm has a list of its hosts."""
    assert launcher_env.slurm_address(environ) is None


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (TORCHRUN, "torchrun none"),
        (OPENMPI, "openmpi prterun-vm-677@1"),
        (SLURM, "slurm 77 3"),
        (SLURM | {"SLURM_RESTART_COUNT": "1"}, "slurm 77 3 1"),
        ({}, ""),
    ],
    ids=["torchrun", "openmpi", "srun", "requeued", "alone"],
)
def test_job_has_a_name(environ: dict[str, str], job: str) -> None:
    """Jobs, steps and restarts are told apart; nothing is invented."""
    assert launcher_env.job_id(environ) == job


@pytest.mark.parametrize("name", ["hydra_pmi_proxy", "prterun"])
def test_a_job_is_named_by_its_launchers_start(name: str) -> None:
    """Hydra gives no name, and Open MPI one that each start of a container repeats: the launcher's
    process on this host, our ancestor, and its start time do."""
    code = (
        "import ctypes, subprocess, sys\n"
        f"ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
        "ask = ('from cydist.rendezvous import launcher_env as l;'\n"
        f'       \'print(l._server_id(("no such", "{name}")))\')\n'
        "shell = ['sh', '-c', f\"'{sys.executable}' -c '{ask}'; true\"]\n"
        "for _ in range(2): subprocess.run(shell, check=True)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=60
    )
    first, second = process.stdout.decode().splitlines()
    assert first == second
    assert first.startswith(f"{name} ")
    assert launcher_env._server_id(("no such ancestor",)) == ""


def test_only_a_job_on_one_host_is_named_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts the launcher's processes differ, and the name must not."""
    monkeypatch.setattr(launcher_env, "_server_id", lambda names: f"{names[0]} 1 2")
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
    assert launcher_env.job_id(hydra) == "hydra_pmi_proxy 1 2"
    assert launcher_env.job_id(hydra | {"MPI_LOCALNRANKS": "2"}) == ""
    assert launcher_env.job_id(OPENMPI) == "openmpi prterun-vm-677@1 prterun 1 2"


@pytest.mark.parametrize(
    ("environ", "installed", "backend"),
    [
        (OPENMPI, True, "mpi"),
        (HYDRA, True, "mpi"),
        (OPENMPI, False, "tcp"),
        (SLURM, True, "tcp"),
        (SLURM | {"PMIX_RANK": "6"}, True, "mpi"),
        (TORCHRUN, True, "tcp"),
        ({}, True, "tcp"),
    ],
    ids=["openmpi", "hydra", "no mpi4py", "srun", "srun pmix", "torchrun", "alone"],
)
def test_default_backend(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], installed: bool, backend: str
) -> None:
    """MPI where a launcher of MPI started us and mpi4py is installed; TCP everywhere else."""
    for name in TORCHRUN | OPENMPI | HYDRA | SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher_env, "has_mpi4py", lambda: installed)
    assert launcher_env.default_backend() == backend


def test_default_backend_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL for what is on GPUs, if the process works on them; the CPU's is the same as ever."""
    monkeypatch.setattr(launcher_env, "under_mpi", lambda: False)
    monkeypatch.setattr(array_libraries, "has_nccl", lambda: True)
    assert launcher_env.default_backend() == "cpu:tcp,cuda:nccl"


def test_tensors_never_go_to_the_cpu_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch works on a GPU, and "nccl" cannot be used, init_process_group says so."""
    monkeypatch.setattr(launcher_env, "under_mpi", lambda: False)
    monkeypatch.setattr(array_libraries, "has_nccl", lambda: False)
    monkeypatch.setattr(array_libraries, "torch_works_on_gpus", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"'tcp' copies tensors through CPU memory"):
        assert launcher_env.default_backend() == "tcp"


@pytest.mark.parametrize(("version", "expected"), [(22809, True), (21899, False), (0, False)])
def test_torch_alone_has_nccl(
    monkeypatch: pytest.MonkeyPatch, version: int, expected: bool
) -> None:
    """Without cupy: the library that torch has loaded, if it is new enough."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy.cuda.nccl", raising=False)
    monkeypatch.setattr(cuda_driver, "loaded_nccl_version", lambda: version)
    assert array_libraries.has_nccl() is expected


@pytest.mark.parametrize(
    ("cupy", "torch_works", "available", "versions", "gpu", "expected"),
    [
        (True, False, True, ("14.1.0", 22809), True, True),
        (False, True, True, ("14.1.0", 21900), True, True),
        (False, False, True, ("14.1.0", 22809), True, False),
        (True, False, False, ("14.1.0", 22809), True, False),
        (True, False, True, ("14.0.1", 22809), True, False),
        (True, False, True, ("14.1.0", 21899), True, False),
        (True, False, True, ("14.1.0", 22809), False, False),
    ],
    ids=[
        "cupy",
        "torch on a GPU",
        "torch on the CPU",
        "no NCCL",
        "old cupy",
        "old NCCL",
        "no GPU",
    ],
)
def test_who_works_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
    cupy: bool, torch_works: bool, available: bool, versions: tuple[str, int], gpu: bool,
    expected: bool,
) -> None:  # fmt: skip
    """Who has imported cupy, or made torch work on a GPU, where cupy has NCCL and a GPU, and
    backend "nccl" takes both."""
    imported: list[str] = []
    of_cupy, of_nccl = versions
    made = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: gpu), __version__=of_cupy)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: torch_works))

    def found(name: str) -> object:
        imported.append(name)
        monkeypatch.setitem(sys.modules, "cupy", made)
        return SimpleNamespace(available=available, get_version=lambda: of_nccl)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if cupy:
        monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(array_libraries.importlib, "import_module", found)
    assert array_libraries.has_nccl() is expected
    assert imported == (["cupy.cuda.nccl"] if cupy or torch_works else [])


def test_launcher_of_another_mpi_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py sees one process where the launcher started four: the error says why."""
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=r"rank 1 of 4.*another MPI"):
        launcher_env.check_mpi_agrees(0, 1)
    with pytest.raises(RendezvousError, match="MPI says rank 3 of 4"):
        launcher_env.check_mpi_agrees(3, 4)
    launcher_env.check_mpi_agrees(1, 4)


def test_nothing_is_imported_to_find_out() -> None:
    """Looking for launchers and mpi4py does not start MPI, nor import torch or cupy."""
    code = (
        "import sys; from cydist.rendezvous import handlers as r\n"
        "r.launcher(); r.default_backend()\n"
        "print([m for m in ('mpi4py.MPI', 'torch', 'cupy') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=60
    )
    assert process.stdout == b"[]\n"


def test_others_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory that others may enter is not trusted."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"cydist-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(RendezvousError, match="0700"):
        launcher_env.job_directory()
    (tmp_path / f"cydist-{os.geteuid()}").rmdir()
    (tmp_path / f"cydist-{os.geteuid()}").symlink_to("/tmp")
    with pytest.raises(RendezvousError, match="0700"):
        launcher_env.job_directory()

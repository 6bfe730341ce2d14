"""Detect the launcher that started this process, by the variables it sets.

Launchers' own variables are read here only, through one table; cydist's are read in
`cydist.config`. Detection imports nothing, because importing mpi4py.MPI starts MPI.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import config
from cydist.errors import RendezvousError, warn_user

if TYPE_CHECKING:
    from pathlib import Path  # slow to import and rarely needed


class Launcher:
    """The variables with which a launcher identifies a process; the first that is set counts.

    Args:
        mpi: Whether it starts MPI jobs.
        job: Variables that together name the job.
        servers: The names of its process on each host, whose start tells a job on one host from an
            earlier one of the same name.
    """

    __slots__ = ("job", "local_rank", "local_size", "mpi", "name", "rank", "servers", "size")

    def __init__(
        self,
        name: str,
        rank: tuple[str, ...],
        size: tuple[str, ...],
        local_rank: tuple[str, ...],
        local_size: tuple[str, ...],
        mpi: bool,
        job: tuple[str, ...] = (),
        servers: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.mpi = mpi
        self.job = job
        self.servers = servers

    def started_us(self, environ: Mapping[str, str]) -> bool:
        """Return whether `environ` names a rank and a size."""
        return _first(environ, self.rank) is not None and _first(environ, self.size) is not None


# Below the ports that Linux gives to outgoing connections (32768 to 60999).
_SLURM_PORTS = range(12_000, 32_000)

# In the order of detection: under srun, torchrun may start the ranks, and in a Slurm job, mpirun
# keeps Slurm's variables of the batch script.
LAUNCHERS = (
    Launcher(
        "torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), False,
        ("TORCHELASTIC_RUN_ID",),  # each agent counts restarts separately
    ),
    Launcher(
        "openmpi", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",), True,
        ("PMIX_NAMESPACE",),  # holds mpirun's pid, which is the same in each start of a container
        ("prterun", "mpirun", "mpiexec", "orterun", "prted", "orted"),
    ),
    Launcher(
        "slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), False,
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),  # the last if it was requeued
    ),
    Launcher(
        "hydra", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",), True,
        servers=("hydra_pmi_proxy",),
    ),
)  # fmt: skip


def launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher that started this process: "cydistrun", "torchrun", "openmpi", "hydra"
    (MPICH, Intel MPI), "slurm"; None: started by hand."""
    found = find(environ)
    if found is None:
        return None
    return "cydistrun" if found.name == "torchrun" and config.RUN_ID.get() else found.name


def find(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the row of the table for the launcher that started this process."""
    for each in LAUNCHERS:
        if each.started_us(environ) and _is_meant(each, environ):
            return each
    return None


def _is_meant(each: Launcher, environ: Mapping[str, str]) -> bool:
    if each.name == "torchrun":
        return "TORCHELASTIC_RUN_ID" in environ
    if each.name == "slurm":
        # A batch script has these variables too, and so has an mpirun inside it, whose ranks Hydra
        # numbers. Under srun the two agree.
        in_step = _first(environ, ("SLURM_STEP_NUM_TASKS",)) is not None
        by_hydra = environ.get("PMI_RANK") not in (None, environ.get("SLURM_PROCID"))
        return in_step and not by_hydra and environ.get("HYDI_CONTROL_FD") is None
    return True


class Placement(NamedTuple):
    """A process's place according to its launcher. None: not given.

    Attributes:
        single_host: Whether all ranks are on this host.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def single_host(self) -> bool:
        return self.size is not None and self.local_size == self.size


def placement(environ: Mapping[str, str] = os.environ) -> Placement:
    """Return rank and size of this process, from its launcher or from RANK and WORLD_SIZE."""
    names = find(environ) or LAUNCHERS[0]  # by hand: the same variables as torchrun's
    own = LAUNCHERS[0]
    return Placement(
        _number(environ, own.rank + names.rank),
        _number(environ, own.size + names.size),
        _number(environ, own.local_rank + names.local_rank),
        _number(environ, own.local_size + names.local_size),
    )


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the job's name, unique among the user's jobs; "" if it has none.

    cydistrun's restarts are included: a rank of an earlier attempt belongs to another job.
    """
    if config.RUN_ID.get():
        return f"cydistrun {config.RUN_ID.get()} {config.RESTART_COUNT.get()}"
    found = find(environ)
    if found is None:
        return ""
    values = [environ.get(name, "") for name in found.job]
    named = f"{found.name} {' '.join(values).rstrip()}" if any(values) else ""
    # Each host has a process of its own.
    started = _server_id(found.servers) if found.servers and placement(environ).single_host else ""
    return f"{named} {started}".strip()


def slurm_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return host and port where rank 0 of a Slurm step listens; None: no step of Slurm.

    The host is the first in the step's list, where Slurm starts task 0. The port follows from the
    job's name, so that two steps on one host rarely share it.
    """
    found = find(environ)
    nodes = environ.get("SLURM_STEP_NODELIST")
    if found is None or found.name != "slurm" or not nodes:
        return None
    # rack[1-2]node[01-04,7],gpu1: the first of each list in brackets, up to a comma outside.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        return None
    host = re.sub(r"\[([^\]\[,-]+)[^\]]*\]", r"\1", first[0])
    number = int.from_bytes(hashlib.sha256(job_id(environ).encode()).digest()[:4], "big")
    return host, _SLURM_PORTS[number % len(_SLURM_PORTS)]


def _server_id(names: tuple[str, ...]) -> str:
    """Return an identifier of the launcher's process on this host, an ancestor of this process. It
    includes the start time."""
    pid = os.getppid()
    while pid > 1:
        try:
            # The name is in parentheses and may itself contain some; the fields after it do not.
            with open(f"/proc/{pid}/stat") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            return ""
        fields = tail.split()
        if (name := head.partition("(")[2]) in names:
            return f"{name} {pid} {fields[19]}"
        pid = int(fields[1])
    return ""


def default_backend() -> str:
    """Return "mpi" under an MPI launcher if mpi4py is installed, else "tcp"; plus "nccl" for
    arrays on GPUs, if the process works on GPUs and has cupy and NCCL."""
    from cydist.devices import array_libraries  # the launcher does not import it

    host = "mpi" if under_mpi() and has_mpi4py() else "tcp"
    if array_libraries.has_nccl():
        return f"cpu:{host},cuda:nccl"
    if array_libraries.torch_works_on_gpus():
        warn_user(
            f"init_process_group: torch works on a GPU here, and backend 'nccl' cannot be used, so "
            f"{host!r} copies tensors through CPU memory. For 'nccl', install a torch with NCCL "
            "2.19 or later, or cupy-cuda13x[ctk] and nvidia-nccl-cu13; or pass backend "
            f"{host!r}"
        )
    return host


def under_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI launcher started this process; srun counts if it offers PMI or PMIx."""
    found = find(environ)
    if found is None:
        return False
    by_slurm = found.name == "slurm" and ("PMI_RANK" in environ or "PMIX_RANK" in environ)
    return found.mpi or by_slurm


def has_mpi4py() -> bool:
    """Return whether mpi4py is installed, without importing it."""
    return importlib.util.find_spec("mpi4py") is not None


def check_mpi_agrees(rank: int, size: int) -> None:
    """Compare MPI's rank and size with the launcher's.

    Raises RendezvousError if they differ: mpi4py was then built for another MPI than the
    launcher's, and every process is rank 0 of 1 to its MPI.
    """
    found = find()
    said = placement()
    if found is None or said.size is None or (rank, size) == (said.rank, said.size):
        return
    if size == 1:
        raise RendezvousError(
            f"{found.name} started this process as rank {said.rank} of {said.size}, but mpi4py's "
            "MPI sees 1 process: mpi4py belongs to another MPI than the launcher. Use the mpirun "
            "or mpiexec of the MPI that mpi4py was built for (python -m mpi4py --mpi-lib-version "
            "names it), or init_process_group('tcp')",
            ranks=(said.rank or 0,),
        )
    raise RendezvousError(
        f"{found.name} started this process as rank {said.rank} of {said.size}, but MPI says "
        f"rank {rank} of {size}: unset RANK and WORLD_SIZE, or start the ranks with one launcher",
        ranks=(said.rank or 0,),
    )


def import_mpi() -> Any:
    """Return mpi4py's MPI if it is installed, loads, and agrees with the launcher; else None."""
    if not has_mpi4py():
        return None
    try:
        MPI: Any = importlib.import_module("mpi4py.MPI")
        check_mpi_agrees(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    except (ImportError, RuntimeError):
        # There is no libmpi, or it is another MPI's: other handlers remain.
        return None
    return MPI


def job_directory() -> Path:
    """Return a directory of this user on this host that no other user can enter. Created if
    missing.

    Raises RendezvousError if another user owns it.
    """
    from pathlib import Path

    runtime = Path(config.RUNTIME_DIR.get() or "/nowhere")
    root = runtime if runtime.is_dir() else Path("/tmp")
    path = root / f"cydist-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise RendezvousError(f"cannot make {path}: {error}; set MASTER_ADDR") from None
    if path.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise RendezvousError(
            f"{path} is not a directory of this user alone (mode 0700): remove it, or set "
            "MASTER_ADDR and MASTER_PORT"
        )
    return path


def job_file(job: str) -> Path:
    """Return the file in which the ranks of `job` on this host meet."""
    return job_directory() / hashlib.sha256(job.encode()).hexdigest()[:32]


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the number in the first of `names` that is set. Slurm writes 4(x2) for 4 on each of 2
    hosts."""
    value = _first(environ, names)
    if value is None:
        return None
    found = re.fullmatch(r"\s*(\d+)(\(x\d+\))?\s*", value)
    if found is None:
        named = next(name for name in names if environ.get(name))
        if "," in value:
            return None  # Slurm's 4,3: a different number on each host
        raise ValueError(f"{named} must be a number, not {value!r}")
    return int(found[1])

"""Scripts started by mpirun, of two MPIs: how they begin, and how they end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more
from mpi_launchers import ROOT, TOLERANT, binaries

PROGRAM = ROOT / "tests/programs/mpi_exits.py"
JOINS = ROOT / "tests/programs/mpi_joins.py"
EVERYTHING = ROOT / "tests/programs/every_call.py"
DEADLINE = 50.0

pytestmark = pytest.mark.slow  # each starts an mpirun


@pytest.fixture(params=["openmpi", *more("mpich")])
def mpi(request: pytest.FixtureRequest) -> Path:
    """Each MPI that we test with."""
    return binaries(request.param)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which must come soon; output and errors together."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CYDIST_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "MASTER_"))
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**inherited, **TOLERANT, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def start(
    mpi: Path, *way: str, ranks: int = 2, transport: str = "auto", program: Path = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Ranks of the program that ends in some way."""
    python = ("env", f"CYDIST_TRANSPORT={transport}", mpi / "python")
    return run(mpi / "mpirun", "-n", ranks, *python, program, *way)


@pytest.mark.parametrize("backend", ["mpi", *more("tcp")])
def test_every_call(mpi: Path, backend: str) -> None:
    """Every public call, on each backend, compared bit for bit with the oracle."""
    done = run(mpi / "mpirun", "-n", 2, mpi / "python", EVERYTHING, "--backend", backend)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d of 2: \d+ results as expected", done.stdout)) == 2


@pytest.mark.parametrize("ranks", [*more(1), 3])
def test_mpirun_says_everything(mpi: Path, ranks: int) -> None:
    """init_process_group() alone: rank, size, store and the backend come from MPI."""
    done = start(mpi, "well", ranks=ranks)
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d of \d on mpi: \d+", done.stdout))
    total = sum(range(ranks))
    assert [f"rank {r} of {ranks} on mpi: {total}" for r in range(ranks)] == said


def test_ranks_with_and_without_memory(mpi: Path) -> None:
    """Two ranks share memory and MPI reaches the third: every call, through both at once."""
    ranks: list[object] = []
    for transport in ("auto", "auto", "mpi"):
        rank = ("env", f"CYDIST_TRANSPORT={transport}", mpi / "python", EVERYTHING)
        ranks += [":"] * bool(ranks) + ["-n", 1, *rank, "--backend", "mpi"]
    done = run(mpi / "mpirun", *ranks)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d of 3: \d+ results as expected", done.stdout)) == 3


def test_tcp_under_mpirun(mpi: Path) -> None:
    """The backend may be tcp all the same."""
    done = start(mpi, "tcp")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d of 2 on tcp: 1", done.stdout)) == 2


def test_groups_beside_a_default_group_of_tcp_share_one_link(mpi: Path) -> None:
    """However many there are, and of which ranks: MPI has few communicators, and below its highest
    level of threads there is one lock."""
    done = start(mpi, "beside-tcp", ranks=3, program=JOINS)
    assert done.returncode == 0, done.stdout
    for rank, with_one in enumerate((2, 2, 3)):
        said = f"rank {rank}: 1 for all groups, {with_one} communicators"
        assert said in done.stdout, done.stdout
    assert len(re.findall(r"rank \d: 1 after the shrink", done.stdout)) == 2


def test_a_receive_of_anything_by_the_program_is_not_disturbed(mpi: Path) -> None:
    """Nor does it disturb how MPI makes communicators: a receive on COMM_WORLD, of any tag from
    anyone, which is pending from before the job begins until after its end."""
    done = start(mpi, "beside-a-wildcard", ranks=3, transport="mpi", program=JOINS)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d: undisturbed", done.stdout)) == 3


def test_what_a_program_keeps_till_its_end_asks_nothing_of_mpi(mpi: Path) -> None:
    """MPI has ended by then, and ends a process that asks."""
    done = start(mpi, "kept-till-the-end", ranks=3, transport="mpi", program=JOINS)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d: (Mismatch|PeerFailed)Error", done.stdout)) == 3


def test_an_uncaught_exception_ends_the_job(mpi: Path) -> None:
    """The traceback is printed once, MPI_Abort's code is the job's, and nobody waits for the rank
    that is gone."""
    done = start(mpi, "raising")
    assert done.returncode == 1
    assert done.stdout.count("LookupError: nothing here") == 1


def test_an_interrupt_that_nobody_catches_ends_the_job(mpi: Path) -> None:
    """With the exit code of Ctrl-C, though the other rank waits for this one."""
    done = start(mpi, "interrupted")
    assert done.returncode == 130
    assert "KeyboardInterrupt" in done.stdout


def test_an_exception_after_leaving_the_job_is_not_ours(mpi: Path) -> None:
    """sys.excepthook is as it was, and the job does not abort."""
    done = start(mpi, "raising-after-the-end")
    assert done.returncode != 0
    # Of two ranks that raise, the launcher may end one before it has printed.
    assert "LookupError: nothing here" in done.stdout
    assert "AssertionError" not in done.stdout


def test_a_rank_that_ends_early_is_named(mpi: Path) -> None:
    """Who waits for a rank that has ended gets an error, with its host, and not silence."""
    done = start(mpi, "leaving-early")
    assert done.returncode != 0
    assert "PeerFailedError" in done.stdout
    assert f"rank 1 on {socket.gethostname()} was lost" in done.stdout
    assert "it closed its connections and left" in done.stdout


@pytest.mark.parametrize("how", ["late", "interrupted"])
@pytest.mark.parametrize("where", ["at-the-start", *more("beside-tcp")])
def test_who_fails_when_all_have_come_leaves_nobody_in_mpi(mpi: Path, where: str, how: str) -> None:
    """While MPI makes the communicator of all ranks, they have a deadline, and hear Ctrl-C. A
    default group of another backend goes on."""
    done = start(mpi, "half-made", where, how, program=JOINS)
    assert "rank 1: RuntimeError: failed just now" in done.stdout
    ends = {"late": ".*timeout after 3 s: all ranks have come", "interrupted": "KeyboardInterrupt"}
    assert re.search(f"rank 0: {ends[how]}", done.stdout), done.stdout
    goes_on = "2 go on" if where == "beside-tcp" else "joined False"
    for rank in range(2):
        assert f"rank {rank}: {goes_on}" in done.stdout, done.stdout


def test_the_end_after_a_creation_that_was_given_up(mpi: Path) -> None:
    """MPICH crashes in its finalization while a thread still makes a communicator, as Open MPI does
    now and then: it is not called, and the job says why."""
    done = start(mpi, "given-up")
    assert "rank 0: given up" in done.stdout
    assert done.returncode == 1, done.stdout
    assert "cydist: rank 0 of MPI aborts the job: a group's first call was given" in done.stdout


def test_groups_of_another_job_that_failed_count(mpi: Path) -> None:
    """MPI's limit of communicators is the process's."""
    done = start(mpi, "failed-in-two-jobs", transport="mpi")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": 5 had one") == 2, done.stdout


def test_a_rank_that_cannot_join_says_why_to_all(mpi: Path) -> None:
    """Also when MPI runs already: nobody waits in its first call for one that is not there."""
    ranks: list[object] = []
    for transport in ("mpi", "shm", "mpi"):
        rank = ("env", f"CYDIST_TRANSPORT={transport}", mpi / "python", JOINS, "unfit")
        ranks += [":"] * bool(ranks) + ["-n", 1, *rank]
    done = run(mpi / "mpirun", *ranks)
    assert done.returncode == 0, done.stdout
    assert "rank 1: RendezvousError: CYDIST_TRANSPORT=shm, but rank 1 cannot share" in done.stdout
    for rank in (0, 2):
        told = rf"rank {rank}: PeerFailedError: .*rank 1 on .* gave up: .*rank 1 cannot share"
        assert re.search(told, done.stdout), done.stdout


def test_another_backends_transport_is_refused_before_mpi_starts(mpi: Path) -> None:
    """CYDIST_TRANSPORT=tcp on one rank: the others hear of it, and no MPI waits for anybody."""
    ranks: list[object] = []
    for transport in ("mpi", "tcp"):
        rank = ("env", f"CYDIST_TRANSPORT={transport}", mpi / "python", JOINS, "unfit")
        ranks += [":"] * bool(ranks) + ["-n", 1, *rank]
    done = run(mpi / "mpirun", *ranks)
    assert done.returncode == 0, done.stdout
    assert "rank 1: ValueError: CYDIST_TRANSPORT=tcp is for backend 'tcp'" in done.stdout
    assert "rank 1: MPI False" in done.stdout
    assert "rank 0: PeerFailedError: " in done.stdout


@pytest.mark.parametrize("how", ["destroying", "ending"])
@pytest.mark.parametrize("ranks", [*more(2), 3])
def test_a_late_rank_outlives_those_who_are_done(mpi: Path, ranks: int, how: str) -> None:
    """Its broadcast is right, though the rank that hears what it calls has left the job in order,
    or ended, since it returned from that call."""
    done = start(mpi, "late", how, ranks=ranks, transport="mpi")
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert f"rank {rank}: [7.0, 7.0, 7.0, 7.0, 7.0]" in done.stdout, done.stdout


def test_a_message_that_was_taken_before_its_receiver_left_is_not_lost(mpi: Path) -> None:
    """Though MPI, which is asked about a few at a time, was not asked about it for a while."""
    done = start(mpi, "left-when-it-had-heard", ranks=3, transport="mpi")
    assert "rank 0: content" in done.stdout, done.stdout


def test_a_rank_that_can_listen_nowhere_joins_all_the_same(mpi: Path) -> None:
    """Timeouts come without what late ranks do, on all ranks."""
    done = start(mpi, "deaf", program=JOINS)
    assert done.returncode == 0, done.stdout
    assert "rank 1: DistTimeoutError" in done.stdout
    assert "is in recv" not in done.stdout


@pytest.mark.parametrize("how", ["destroying", *more("ending")])
def test_a_rank_that_is_late_in_many_groups_is_waited_for_once(mpi: Path, how: str) -> None:
    """Not once for each group, by one that leaves the job."""
    done = start(mpi, "late-in-many", how, transport="mpi")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d: content", done.stdout)) == 2


@pytest.mark.parametrize("how", ["destroying", *more("ending")])
def test_a_late_rank_learns_what_the_others_called(mpi: Path, how: str) -> None:
    """It calls something else than the rank did that has left: MismatchError, there."""
    done = start(mpi, "differing-late", how, transport="mpi")
    assert re.search(
        r"rank 1: broadcast #\d on the default group: the ranks disagree about the dtype",
        done.stdout,
    )
    assert "of int64" in done.stdout
    assert "of float64" in done.stdout


def test_who_fails_the_group_and_leaves_the_job_says_why(mpi: Path) -> None:
    """A receive from it ends with that, and not because it is gone."""
    done = start(mpi, "saying-why", transport="mpi", program=JOINS)
    assert re.search(r"rank 0: recv .* rank 1 gave up waiting .*all_reduce #\d", done.stdout)


@pytest.mark.parametrize("odd", ["0", *more("1")])
def test_monitored_barrier_against_another_call_is_a_mismatch(mpi: Path, odd: str) -> None:
    """On both ranks, though each leaves the job at once."""
    done = start(mpi, "monitored", odd, transport="mpi", program=JOINS)
    for rank in range(2):
        assert f"rank {rank}: MismatchError" in done.stdout, done.stdout


def test_exit_codes_are_kept(mpi: Path) -> None:
    """sys.exit(3) is what mpirun exits with."""
    assert start(mpi, "exit-code").returncode == 3


def test_mpi_without_threads(mpi: Path) -> None:
    """Where MPI was started for one thread, asynchronous calls run while it waits for something."""
    done = start(mpi, "without-threads")
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d: \[[\d, ]+\] \d\.\d", done.stdout))
    assert ["rank 0: [0, 2, 4, 6] 1.0", "rank 1: [0, 2, 4, 6] 0.0"] == said


# What the levels of MPI_Init_thread allow: calls on other threads.
LEVELS = {
    "single": ("SINGLE", "UnsupportedError"),
    "funneled": ("FUNNELED", "UnsupportedError"),
    "serialized": ("SERIALIZED", "2"),
    "multiple": ("MULTIPLE", "2"),
}


@pytest.mark.parametrize("transport", [*more("auto"), "mpi"])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_threads(mpi: Path, level: str, transport: str) -> None:
    """With each that MPI may have been started at by the user, what it allows works, and the rest
    is refused; also where MPI carries everything."""
    done = start(mpi, "thread-level", level, transport=transport)
    assert done.returncode == 0, done.stdout
    granted, elsewhere = LEVELS[level]
    for rank in range(2):
        assert f"rank {rank}: {granted}, elsewhere {elsewhere}" in done.stdout


@pytest.mark.parametrize("transport", [*more("auto"), "mpi"])
@pytest.mark.parametrize("level", LEVELS)
def test_asynchronous_calls_at_every_level(mpi: Path, level: str, transport: str) -> None:
    """They wait for no call that comes after them, on their group or another, whatever threads MPI
    allows; and between calls of cydist the program's thread has MPI to itself."""
    done = run(
        mpi / "mpirun", "-n", 2, "env", f"CYDIST_TRANSPORT={transport}",
        mpi / "python", PROGRAM, "asynchronous", level,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d: content", done.stdout)) == 2


def test_threads_that_take_turns_in_mpi(mpi: Path) -> None:
    """Where MPI allows one thread at a time, two threads of a rank use groups of their own, whose
    first calls come in any order."""
    done = run(
        mpi / "mpirun", "-n", 2, "env", "CYDIST_TRANSPORT=mpi",
        mpi / "python", PROGRAM, "threads-in-turn", 100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d: \[[^]]*\]", done.stdout))
    assert ["rank 0: [100, 100]", "rank 1: [100, 100]"] == said


def test_the_user_may_finalize(mpi: Path) -> None:
    """After the job has been left MPI is the user's, to its end; no receive of ours is left in it,
    of which MPICH would warn."""
    done = start(mpi, "finalizing")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("finalized") == 2
    assert "WARN" not in done.stdout


def test_finalizing_destroys_the_groups(mpi: Path) -> None:
    """MPI.Finalize() in a job is as destroy_process_group() before it; later calls say so."""
    done = start(mpi, "finalizing-first")
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        for call in ("all_reduce", "isend"):
            assert f"rank {rank}: {call}: the default group was destroyed" in done.stdout
    assert done.stdout.count("finalized") == 2


@pytest.mark.parametrize("transport", [*more("auto"), "mpi"])
def test_ranks_go_on_without_a_dead_one(transport: str) -> None:
    """Under an mpirun that tolerates deaths the others learn which rank died, and shrink_group
    leaves a world in which everything works."""
    openmpi = binaries("openmpi")
    done = run(
        openmpi / "mpirun", "--with-ft", "ulfm", "-x", f"CYDIST_TRANSPORT={transport}",
        "-n", 3, openmpi / "python", PROGRAM, "killed",
    )  # fmt: skip
    for rank in range(2):
        assert f"rank {rank} of 2: 2 are left, heard {1 - rank}" in done.stdout, done.stdout


def test_mpi_that_nobody_started(mpi: Path) -> None:
    """With mpi4py.rc.initialize off, MPI is started and ended by us."""
    done = start(mpi, "before-the-others")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d of 2 on mpi: 1", done.stdout)) == 2


def test_joining_and_leaving_many_times(mpi: Path) -> None:
    """What nobody received of one job does not turn up in the next."""
    done = start(mpi, "again")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d: content", done.stdout)) == 2


def test_forked_children_are_refused(mpi: Path) -> None:
    """Their calls raise ForkedError, and the job goes on without them."""
    done = start(mpi, "forked")
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d: child \d, sum \d", done.stdout))
    assert ["rank 0: child 7, sum 2", "rank 1: child 7, sum 2"] == said


@pytest.mark.more
def test_the_mpirun_of_another_mpi_is_explained() -> None:
    """MPICH's mpirun with Open MPI's mpi4py: every rank would be rank 0 of 1."""
    mpich, openmpi = binaries("mpich"), binaries("openmpi")
    done = run(mpich / "mpirun", "-n", 2, openmpi / "python", PROGRAM, "over-mpi")
    assert done.returncode != 0
    assert "mpi4py belongs to another MPI than the launcher" in done.stdout


@pytest.mark.more
def test_open_mpis_mpirun_of_another_mpi_is_explained() -> None:
    """The other way round MPICH ends the process while it starts; we say why before."""
    openmpi, mpich = binaries("openmpi"), binaries("mpich")
    done = run(openmpi / "mpirun", "-n", 2, mpich / "python", PROGRAM, "over-mpi")
    assert done.returncode != 0
    assert "mpirun is Open MPI's, and mpi4py's MPI is MPICH" in done.stdout


def test_a_launcher_that_is_not_mpis_is_explained(mpi: Path) -> None:
    """Under cydistrun the backend mpi says how to start its ranks."""
    done = run(
        mpi / "python", "-m", "cydist.run", "--nproc-per-node", 2, PROGRAM, "over-mpi"
    )  # fmt: skip
    assert done.returncode != 0
    assert "mpirun -n 2" in done.stdout
    assert "backend 'tcp'" in done.stdout


@pytest.mark.more
def test_torchrun_is_not_mpis(mpi: Path) -> None:
    """Nor is torchrun: its ranks hear of both ways out."""
    pytest.importorskip("torch.distributed.run")
    done = run(
        mpi / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
        PROGRAM, "over-mpi",
    )  # fmt: skip
    assert done.returncode != 0
    assert "mpirun -n 2" in done.stdout
    assert "backend 'tcp'" in done.stdout


# What srun tells a rank of a job step, here one on this host; none of Hydra's own variables.
STEP = (
    "export SLURM_PROCID=$PMI_RANK SLURM_LOCALID=$PMI_RANK SLURM_NTASKS=$PMI_SIZE"
    " SLURM_STEP_NUM_TASKS=$PMI_SIZE SLURM_STEP_TASKS_PER_NODE=$PMI_SIZE SLURM_JOB_ID=77"
    " SLURM_STEP_ID=3; unset HYDI_CONTROL_FD MPI_LOCALRANKID MPI_LOCALNRANKS"
)


@pytest.mark.more
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_ranks_of_a_step_of_slurm(transport: str) -> None:
    """srun's variables, and a PMI for MPICH as it gives one: init_process_group() alone."""
    mpich = binaries("mpich")
    script = f"{STEP}; export CYDIST_TRANSPORT={transport}; exec {mpich / 'python'} {PROGRAM} well"
    done = run(mpich / "mpirun", "-n", 3, "sh", "-c", script)
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d of \d on mpi: \d+", done.stdout))
    assert [f"rank {rank} of 3 on mpi: 3" for rank in range(3)] == said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["auto", *more("mpi")])
def test_bits_of_two_runs(mpi: Path, transport: str) -> None:
    """Sums that round have the same bits a rank that comes last, and in the next job."""
    runs = [start(mpi, "bits", ranks=3, transport=transport) for _ in range(2)]
    said = [re.findall(r"sums: [0-9a-f]{64}", done.stdout) for done in runs]
    assert [len(each) for each in said] == [1, 1], runs[0].stdout + runs[1].stdout
    assert said[0] == said[1]


def test_without_mpi4py_the_error_says_what_to_install() -> None:
    """And which backend needs neither."""
    done = run(sys.executable, "-c", (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import cydist; cydist.init_process_group('mpi', rank=0, world_size=1)"
    ))  # fmt: skip
    assert done.returncode != 0
    assert "pip install mpi4py" in done.stdout


@pytest.mark.parametrize(
    ("program", "options", "lines"),
    [
        ("mpi_algorithms_time", ("--rounds", 1, "--sizes", 8), 6),
        ("mpi_nonblocking_time", ("--rounds", 2, "--sizes", 8), 6),
        ("mpi_operation_time", (), 3),
    ],
)
def test_programs_that_time_calls(program: str, options: tuple[object, ...], lines: int) -> None:
    """The notes' programs run on what there is today."""
    mpi = binaries("openmpi")
    path = ROOT / f"tests/programs/{program}.py"
    python = ("env", "CYDIST_TRANSPORT=mpi", mpi / "python")
    done = run(mpi / "mpirun", "-n", 2, *python, path, *options)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^\S.*\d\.\d\d$", done.stdout, re.MULTILINE)) >= lines, done.stdout

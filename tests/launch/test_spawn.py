"""`spawn`: ranks as children of a Python program."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched_hosts import without_notices
from pausing import PAUSE

from cydist.errors import DistError, ProcessExitedException, ProcessRaisedException
from cydist.launch.spawn import spawn

if TYPE_CHECKING:
    from conftest import Launcher

METHODS = ["spawn", "forkserver"]

# Children find their functions in a module, so the programs run from files, as a user's do.
PROGRAM = """
import os, signal, socket, sys, threading, time
from pathlib import Path
from cydist.launch.spawn import spawn, ProcessContext
import cydist.errors as errors
{pause}
{functions}

if __name__ == "__main__":
    {main}
"""


def program(directory: Path, functions: str, main: str) -> str:
    path = directory / "program.py"
    path.write_text(
        PROGRAM.format(pause=PAUSE, functions=functions, main=main.replace("\n", "\n    "))
    )
    return str(path)


def run(directory: Path, functions: str, main: str) -> str:
    """What the program prints; it must end well, and quietly."""
    result = subprocess.run(
        [sys.executable, program(directory, functions, main)],
        cwd=directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    return result.stdout


@pytest.mark.parametrize("method", [*METHODS, "fork"])
def test_ranks_find_each_other(tmp_path: Path, method: str) -> None:
    """Each process has its rank, one secret for all, and rank 0 the socket that listens."""
    functions = """
def rank(i, a, b):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    secret = os.read(int(os.environ["CYDIST_SECRET_FD"].split(":")[0]), 100)
    bound = None
    if "CYDIST_STORE_FD" in os.environ:
        with socket.socket(fileno=int(os.environ["CYDIST_STORE_FD"])) as store:
            port = int(os.environ["CYDIST_STORE_PORT"].split()[0])
            listens = store.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            bound = listens and store.getsockname() == ("127.0.0.1", port)
    values = [os.environ[name] for name in names.split()]
    Path(str(i)).write_text(repr((i, a, b, values, len(secret), bound)))
    Path(f"secret{i}").write_bytes(secret)
"""
    run(tmp_path, functions, f"spawn(rank, ('x', 2), 3, start_method={method!r})")
    for i in range(3):
        values = [str(i), str(i), "3", "3", "127.0.0.1"]
        expected = (i, "x", 2, values, 32, True if i == 0 else None)
        assert (tmp_path / str(i)).read_text() == repr(expected)
    assert len({(tmp_path / f"secret{i}").read_bytes() for i in range(3)}) == 1


@pytest.mark.parametrize("method", [*METHODS, "fork"])
def test_ranks_can_meet_twice(tmp_path: Path, method: str) -> None:
    """No other process of the job holds the store's port open."""
    functions = """
import cydist as dist
def rank(i):
    for _ in range(2):
        dist.init_process_group(timeout=30)
        dist.barrier()
        dist.destroy_process_group()
    Path(str(i)).write_text("met twice")
"""
    run(tmp_path, functions, f"spawn(rank, nprocs=2, start_method={method!r})")
    assert [(tmp_path / str(i)).read_text() for i in range(2)] == ["met twice"] * 2


def test_exception_is_raised_here(tmp_path: Path) -> None:
    """What a process raised is raised in the parent, with rank and traceback; others end."""
    functions = """
def rank(i):
    if i == 1:
        raise ValueError("why")
    pause()
"""
    main = """
try:
    spawn(rank, nprocs=3)
except errors.ProcessRaisedException as error:
    print(error.error_index, error.ranks, error)
"""
    out = run(tmp_path, functions, main)
    assert out.startswith("1 (1,) rank 1 raised:\n\nTraceback (most recent call last):\n")
    assert out.endswith("ValueError: why\n\n")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("os._exit(3)", "1 3 None rank 1 failed: exit code 3\n"),
        ("os.kill(os.getpid(), 9)", "1 -9 SIGKILL rank 1 failed: killed by SIGKILL (9)\n"),
    ],
)
def test_exit_is_named(tmp_path: Path, end: str, shown: str) -> None:
    """A process that left or was killed is named, with its exit code or signal."""
    functions = f"""
def rank(i):
    if i == 1:
        {end}
    pause()
"""
    main = """
try:
    spawn(rank, nprocs=2)
except errors.ProcessExitedException as error:
    print(error.error_index, error.exit_code, error.signal_name, error)
"""
    assert run(tmp_path, functions, main) == shown


def test_cause_comes_before_its_consequence(tmp_path: Path) -> None:
    """A rank that only reports the death of another is not the first, even if it ends first."""
    functions = """
class PeerFailedError(Exception):
    pass

def rank(i):
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise PeerFailedError("rank 1 is gone")
"""
    main = """
context = spawn(rank, nprocs=2, join=False)
for process in context.processes:
    process.join()
try:
    context.join()
except errors.ProcessExitedException as error:
    print(error)
"""
    assert run(tmp_path, functions, main) == "rank 1 failed: killed by SIGKILL (9)\n"


def test_processes_that_do_not_listen(tmp_path: Path) -> None:
    """Others that ignore SIGTERM are killed after the grace period."""
    functions = """
def rank(i):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "rw"[i == 0]).close()
    if i == 1:
        sys.exit(5)
    pause()
"""
    os.mkfifo(tmp_path / "ready")
    main = """
context = spawn(rank, nprocs=2, join=False)
try:
    while not context.join(grace_period=0.05):
        pass
except errors.ProcessExitedException as error:
    print(error.exit_code, [process.exitcode for process in context.processes])
"""
    assert run(tmp_path, functions, main) == "5 [-9, 5]\n"


def test_join_later(tmp_path: Path) -> None:
    """join=False returns a context; its join says whether all have ended."""
    functions = """
def rank(i):
    open(f"go{i}").close()
"""
    for i in range(2):
        os.mkfifo(tmp_path / f"go{i}")
    main = """
context = spawn(rank, nprocs=2, join=False)
print(len(set(context.pids())), context.join(timeout=0))
for i in range(2):
    open(f"go{i}", "w").close()
while not context.join():
    pass
print(context.join())
"""
    assert run(tmp_path, functions, main) == "2 False\nTrue\n"


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "other thread"])
@pytest.mark.parametrize("method", METHODS)
def test_sigkill_of_the_parent(launcher: Launcher, method: str, thread: bool) -> None:
    """No process outlives the program that spawned it, even when that is killed."""
    functions = """
def rank(i):
    os.write(1, b"ready %d\\n" % os.getpid())
    pause()
"""
    start = f"spawn(rank, (), 2, False, False, {method!r})"
    main = f"threading.Thread(target=lambda: {start}).start()" if thread else start
    path = program(launcher.directory, functions, f"{main}\npause()")
    process = subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "LAUNCH_TEST": launcher.marker},
    )
    launcher.started.append(process)
    launcher.wait_ready(process, 2)
    process.kill()
    process.wait(60)
    assert launcher.settles() == 0


def test_no_descriptors_are_left() -> None:
    """After a spawn this process has no more descriptors than before."""
    spawn(os.getpgid, nprocs=1)  # multiprocessing starts its resource tracker
    before = set(os.listdir("/proc/self/fd"))
    spawn(os.getpgid, nprocs=1)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_failed_job_leaves_no_descriptors(tmp_path: Path) -> None:
    """Its error does not keep its processes, also where nobody collects garbage."""
    functions = """
def rank(i):
    sys.exit(3)

def fail():
    try:
        spawn(rank, nprocs=2, start_method="fork")
    except errors.ProcessExitedException:
        return len(os.listdir("/proc/self/fd"))
"""
    assert run(tmp_path, functions, "import gc; gc.disable(); print(fail() - fail())") == "0\n"


def test_nprocs_is_checked() -> None:
    """At least one process is needed."""
    with pytest.raises(ValueError, match="nprocs must be at least 1, got 0"):
        spawn(os.getpgid, nprocs=0)


@pytest.mark.parametrize(
    "error",
    [ProcessRaisedException("m", 1, 2), ProcessExitedException("m", 1, 2, -9, "SIGKILL")],
    ids=["raised", "exited"],
)
def test_errors_travel(error: DistError) -> None:
    """Both errors survive pickling whole: they may cross processes themselves."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))

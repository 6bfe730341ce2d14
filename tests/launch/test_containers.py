"""Ranks in containers as people have them: what is missing there costs speed, and nothing else."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from transport_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests/programs/container_job.py")
JOB = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", PROGRAM]
LIMIT = 100  # seconds
PROCESS_VM_READV, PROCESS_VM_WRITEV, MEMFD_CREATE = 310, 311, 319  # on x86-64
PERMISSION = 1

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture(autouse=True)
def containers() -> None:
    """Skip where there can be none."""
    if shutil.which("bwrap") is None or os.geteuid() != 0:
        pytest.skip("no bwrap" if shutil.which("bwrap") is None else "not root")
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls are those of x86-64")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


def refusing(*calls: int) -> int:
    """Return a descriptor with a seccomp filter that refuses these system calls."""
    load_number = struct.pack("HBBI", 0x20, 0, 0, 0)
    tests = [struct.pack("HBBI", 0x15, len(calls) - i, 0, number) for i, number in enumerate(calls)]
    allow, refuse = (struct.pack("HBBI", 0x06, 0, 0, v) for v in (0x7FFF0000, 0x50000 | PERMISSION))
    reader, writer = os.pipe()
    os.write(writer, b"".join([load_number, *tests, allow, refuse]))
    os.close(writer)
    return reader


def start(
    command: Sequence[str],
    *options: str,
    environ: dict[str, str] | None = None,
    refused: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start a command in a container of its own, whose root is read-only."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CYDIST_TUNING": "off", **(environ or {})}
    seccomp = refusing(*refused) if refused else None
    container = [
        "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent",
        *([] if seccomp is None else ["--seccomp", str(seccomp)]), *options,
    ]  # fmt: skip
    try:
        return subprocess.Popen(
            [*container, "--", *command], env=environ, text=True, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[] if seccomp is None else [seccomp],
        )  # fmt: skip
    finally:
        if seccomp is not None:
            os.close(seccomp)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def ended(process: subprocess.Popen[str]) -> str:
    """Return what it wrote, once it has ended well."""
    try:
        out, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, out
    return out


PRIVATE = ["--unshare-pid", "--unshare-ipc", "--tmpfs", "/tmp", "--bind", str(ROOT), str(ROOT)]
NOWHERE = ["--ro-bind", str(ROOT), str(ROOT), "--remount-ro", "/tmp"]  # ROOT may be below /tmp
CASES = {
    "plain": ([], [], "memory"),
    "a tiny /dev/shm": (["--size", "65536", "--tmpfs", "/dev/shm"], [], "memory"),
    "no copies between processes": ([], [PROCESS_VM_READV, PROCESS_VM_WRITEV], "memory"),
    "no memory without a name": ([], [MEMFD_CREATE], "sockets"),
    "nothing to write to": (NOWHERE, [], "memory"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_one_container(case: str) -> None:
    """A job of cydistrun starts and is right, and shares memory if the kernel lets it."""
    options, refused, by = CASES[case]
    out = ended(start(JOB, *PRIVATE, *options, refused=refused))
    assert out.count(f"is right, over {by}") == 2, out


def test_last_words_without_a_place_to_write() -> None:
    """The launcher repeats the traceback of the rank that failed, which no file holds."""
    job = [*JOB[:-1], "--no-python", sys.executable, "-c", "raise ValueError('the cause')"]
    process = start(job, *PRIVATE, *NOWHERE)
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, out
    assert "    ValueError: the cause\n" in out.partition("the last words of rank")[2]


def test_the_containers_refuse() -> None:
    """What these tests take away is gone: two system calls, and all that can be written to."""
    script = (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0), ctypes.get_errno())\n"
        "places = ('/', '/tmp', '/var/tmp', os.path.expanduser('~'), os.getcwd())\n"
        "print([path for path in places if os.access(path, os.W_OK)])\n"
    )
    options, refused = [*PRIVATE, *NOWHERE], [PROCESS_VM_READV, PROCESS_VM_WRITEV]
    out = ended(start([sys.executable, "-c", script], *options, refused=refused))
    assert out.splitlines() == [f"-1 {PERMISSION}", "[]"]


def test_hidden_processes() -> None:
    """Where /proc hides the processes of other users, a user's own ranks share memory."""
    hidden = "mount -o remount,hidepid=2 /proc && exec setpriv --inh-caps=-all --bounding-set=-all"
    out = ended(subprocess.Popen(
        ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "sh", "-c", f'{hidden} "$@"', "-",
         *JOB],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CYDIST_TUNING": "off"}, text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ))  # fmt: skip
    assert out.count("is right, over memory") == 2, out


@pytest.mark.parametrize("shared", [True, False], ids=["processes shared", "processes apart"])
def test_a_container_for_each_rank(shared: bool, secret_file: Path) -> None:
    """Ranks that see each other's processes share memory, others use sockets."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        environ = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "CYDIST_SECRET_FILE": str(secret_file),
        }  # fmt: skip
        options = [] if shared else ["--unshare-pid"]
        processes.append(start([sys.executable, PROGRAM], *options, environ=environ))
    outs = [ended(process) for process in processes]
    by = "memory" if shared else "sockets"
    assert [f"rank {rank} is right, over {by}" in out for rank, out in enumerate(outs)] == [
        True
    ] * 2


REASONS = {
    "processes apart": (["--unshare-pid"], [], "in other containers"),
    "no memory without a name": ([], [MEMFD_CREATE], "rank 0 has no memory to share: [Errno 1]"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_can_be_asked_for(case: str, secret_file: Path) -> None:
    """CYDIST_TRANSPORT=shm says what keeps two ranks from sharing memory."""
    options, refused, reason = REASONS[case]
    port = str(free_port())
    processes = []
    for rank in range(2):
        environ = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "CYDIST_SECRET_FILE": str(secret_file), "CYDIST_TRANSPORT": "shm",
        }  # fmt: skip
        command = [sys.executable, PROGRAM]
        processes.append(start(command, *options, environ=environ, refused=refused))
    for process in processes:
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert "cannot share memory with rank " in out
        assert reason in out


def test_a_name_that_comes_late(tmp_path: Path, secret_file: Path) -> None:
    """A host's name that is not known yet is looked up again: pods start before their names."""
    port = str(free_port())
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    processes = []
    for rank in (1, 0):
        environ = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "late-host", "MASTER_PORT": port,
            "CYDIST_SECRET_FILE": str(secret_file),
        }  # fmt: skip
        options = ["--ro-bind", str(hosts), "/etc/hosts"]
        processes.append(start([sys.executable, PROGRAM], *options, environ=environ))
    hosts.write_text("127.0.0.1 localhost late-host\n")
    assert all("is right" in ended(process) for process in processes)

"""The job's secret is in no log line at any level, on each way to a rank; where it is from, is."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mpi_launchers import TOLERANT, binaries
from transport_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 55
# Connections over sockets use the secret, encrypted ones also to make keys. A connection without
# the secret is refused with a line. Each rank leaves its secret in a file.
PROGRAM = """
import os, socket, sys, numpy, cydist as dist
from pathlib import Path
from cydist.net import secret

def main(rank=None):
    dist.init_process_group("tcp")
    rank = dist.get_rank()
    dist.all_reduce(numpy.ones(9))
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {rank})
    Path(os.environ["SECRETS"], str(rank)).write_bytes(bytes(secret.secret()))
    dist.destroy_process_group()

if __name__ == "__main__":
    if "spawn" in sys.argv:
        dist.spawn(main, nprocs=2)
    else:
        main()
"""
# What stands for ssh: it runs a command in a shell with an environment of its own.
SSH = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
shift
exec env -i PATH="$PATH" HOME="$HOME" SECRETS="$SECRETS" BACKEND="$BACKEND" \\
  XDG_STATE_HOME="$XDG_STATE_HOME" SSH_CONNECTION="127.0.0.1 4711 127.0.0.1 22" sh -c "$*"
"""

Job = Callable[[dict[str, str]], str]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables of a job that logs at the lowest level to stderr."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CYDIST_", "TORCH", "RANK", "WORLD_SIZE", "MASTER_"))
    }
    (tmp_path / "secrets").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    return {
        **inherited, "PYTHONPATH": str(ROOT), "SECRETS": str(tmp_path / "secrets"),
        "XDG_STATE_HOME": str(tmp_path / "state"), "CYDIST_LOG": "debug",
        "CYDIST_TRANSPORT": "tcp", "CYDIST_ENCRYPT": "1", "CYDIST_TUNING": "off",
    }  # fmt: skip


def run(command: list[str], environ: dict[str, str]) -> str:
    """Its output, once it has ended well."""
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=DEADLINE, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def program(environ: dict[str, str]) -> str:
    return str(Path(environ["SECRETS"]).parent / "program.py")


def by_hand(environ: dict[str, str]) -> str:
    """Two processes that only know where rank 0 is."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program(environ)], env={**environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return "".join(said)


def by_a_file(environ: dict[str, str]) -> str:
    path = Path(environ["SECRETS"]).parent / "secret"
    path.touch(mode=0o600)
    path.write_text(os.urandom(32).hex())
    return by_hand({**environ, "CYDIST_SECRET_FILE": str(path)})


def by_cydistrun(environ: dict[str, str]) -> str:
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node=2", program(environ)]
    return run(command, environ)


def by_spawn(environ: dict[str, str]) -> str:
    return run([sys.executable, program(environ), "spawn"], environ)


def by_ssh(environ: dict[str, str]) -> str:
    folder = Path(environ["SECRETS"]).parent
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    more = {"PATH": f"{folder}:{environ['PATH']}", "PET_MASTER_PORT": str(free_port())}
    command = ["-m", "cydist.run", "--hosts=a:1,b:1", program(environ)]
    return run([sys.executable, *command], {**environ, **more})


def by_mpi(environ: dict[str, str]) -> str:
    """Ranks of two users' directories, to which rank 0 sends a secret."""
    mpi = binaries("openmpi")
    ranks: list[str] = []
    for rank in range(2):
        state = f"{environ['XDG_STATE_HOME']}/{rank}"
        # Ranks that are all on one host meet in a file.
        command = ["env", f"XDG_STATE_HOME={state}", "OMPI_COMM_WORLD_LOCAL_SIZE=1"]
        ranks += [":"] * (rank > 0)
        ranks += ["-n", "1", *command, str(mpi / "python"), program(environ)]
    return run([str(mpi / "mpirun"), *ranks], {**environ, **TOLERANT})


SOURCES: dict[str, tuple[Job, str]] = {
    "cydistrun": (by_cydistrun, "the launcher, through descriptor "),
    "spawn": (by_spawn, "the launcher, through descriptor "),
    "ssh": (by_ssh, "the launcher, through descriptor "),
    "file": (by_a_file, "/secret (CYDIST_SECRET_FILE)"),
    "mpi": (by_mpi, "rank 0, over MPI"),
    "user": (by_hand, "the user's own file "),
}


def forms(secret: bytes) -> Iterator[str]:
    """A secret as it might be printed."""
    yield secret.hex()
    yield base64.b64encode(secret).decode()
    yield repr(secret)[2:-1]
    yield str(list(secret))[1:-1]
    yield secret.decode("latin-1")


@pytest.mark.parametrize("route", SOURCES)
def test_the_secret_is_in_no_line(route: str, environ: dict[str, str]) -> None:
    """Neither whole nor its first eight bytes, in no form; its source is in one."""
    start, source = SOURCES[route]
    said = start(environ)
    secrets = {path.read_bytes() for path in Path(environ["SECRETS"]).iterdir()}
    assert len(secrets) == 1
    assert source in said
    assert said.count(" DEBUG cydist.") > 10
    (secret,) = secrets
    assert len(secret) == 32
    lower = said.lower()
    for part in (secret, secret[:8]):
        assert [form for form in forms(part) if form.lower() in lower] == []

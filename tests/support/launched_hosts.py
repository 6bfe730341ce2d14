"""Launchers of a job over several hosts, all on this machine, and what they say."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transport_ranks import free_port

if TYPE_CHECKING:
    from conftest import Launcher

DEADLINE = 60.0
Ended = tuple[int, str, str]

# A rank that meets the others and sums.
SUM = (
    "import numpy as np, cydist as dist",
    "dist.init_process_group()",
    "x = np.arange(3.0) + dist.get_rank()",
    "dist.all_reduce(x)",
)
# Rank 1 raises, and takes longer to end than rank 0, which only reports rank 1's death. They need
# the two fifos.
FIFOS = ("pid", "raised")
CAUSE_ENDS_LAST = (
    "class PeerFailedError(Exception): pass",
    "import atexit, select",
    "if rank == 1:",
    "    other = os.pidfd_open(int(open('pid').read()))",
    "    def slow_end():",
    "        open('raised', 'w').close()",
    "        select.select([other], [], [])",
    "    atexit.register(slow_end)",
    "    raise ValueError('the cause')",
    "with open('pid', 'w') as file: file.write(str(os.getpid()))",
    "open('raised').close()",
    "raise PeerFailedError('rank 1 is gone')",
)


def secret_file(path: Path) -> Path:
    """Write a new secret to a file of this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


@dataclass
class HostLaunchers:
    """Starts the launchers of one job, which has a port and a secret of its own."""

    launcher: Launcher
    port: int = field(default_factory=free_port)

    def __call__(
        self,
        node: int | None,
        script: str,
        *options: str,
        nodes: int = 2,
        key: str = "key",
        env: Mapping[str, str] = {},
        stdin: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher of a host.

        Args:
            key: The secret's file below the test's directory, made at first use; "": none.
        """
        path = self.launcher.directory / key
        if key and not path.exists():
            secret_file(path)
        which = () if node is None else (f"--node-rank={node}",)
        settings = {**({"CYDIST_SECRET_FILE": str(path)} if key else {}), **env}
        return self.launcher.start(
            f"--nnodes={nodes}", *which, "--master-addr=127.0.0.1", f"--master-port={self.port}",
            "--restart-delay=0", *options, script, env=settings, stdin=stdin,
        )  # fmt: skip


def ends(*processes: subprocess.Popen[bytes]) -> list[Ended]:
    """Return exit code, stdout and stderr of each."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=DEADLINE)
        found.append((process.returncode, out.decode(), err.decode()))
    return found


def said(process: subprocess.Popen[bytes], words: str) -> str:
    """Return the first line of its stderr with these words."""
    assert process.stderr is not None
    seen = ""
    for line in iter(process.stderr.readline, b""):
        seen += line.decode()
        if words in line.decode():
            return line.decode()
    raise AssertionError(f"{words!r} is not in {seen!r}")


def first_failures(stderr: str) -> list[int]:
    """Return the ranks that launchers say have failed first."""
    return [int(rank) for rank in re.findall(r"rank (\d+) \(local rank .*failed first", stderr)]


def without_notices(stderr: str) -> str:
    """Leave out what a busy machine adds: notices about waits that take seconds."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if " has waited " not in line)

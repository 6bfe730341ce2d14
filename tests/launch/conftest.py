"""Starts cydistrun as its user does: a process, watched from outside."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pausing import PAUSE

DEADLINE = 60.0
# Every program starts with this. A worker is `ready` in one write, so that it stays one line.
HEADER = f"""import json, os, signal, subprocess, sys, time
rank = int(os.environ['RANK'])
def ready(*_):
    os.write(1, b'ready %d\\n' % os.getpid())
{PAUSE}"""


@dataclass
class Launcher:
    """Starts cydistrun on programs written for it, and knows every process that came of it."""

    directory: Path
    marker: str = field(default_factory=lambda: secrets.token_hex(8))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def script(self, *lines: str) -> str:
        """A program of these lines; it knows `rank`, `ready()` and `pause()`."""
        path = self.directory / f"worker{len(list(self.directory.iterdir()))}.py"
        path.write_text(HEADER + "\n".join(lines) + "\n")
        return str(path)

    def start_shell(self, command: str) -> subprocess.Popen[bytes]:
        """Start a shell's command line."""
        return self._start(["sh", "-c", command])

    def start_command(self, *command: str, **more: object) -> subprocess.Popen[bytes]:
        """Start another program; see `start`."""
        return self._start([*command], **more)

    def start(self, *arguments: str, **more: object) -> subprocess.Popen[bytes]:
        """Start cydistrun; `more` goes to Popen, `env` is added to the environment."""
        return self._start([sys.executable, "-m", "cydist.run", *arguments], **more)

    def _start(self, command: list[str], **more: object) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        extra = more.pop("env", {})
        assert isinstance(extra, dict)
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            process_group=0,
            env={**environment, "LAUNCH_TEST": self.marker, **extra},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},  # type: ignore[arg-type]
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=DEADLINE)
        return subprocess.CompletedProcess(
            arguments, process.returncode, (out or b"").decode(), (err or b"").decode()
        )

    def alive(self) -> list[int]:
        """Every process that carries our marker in its environment, zombies left out."""
        mark = f"LAUNCH_TEST={self.marker}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # A zombie's environment is empty.
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def settles(self, expected: int = 0) -> int:
        """How many processes there are, once it is `expected` or the deadline has passed."""
        self.until(lambda: len(self.alive()) == expected)
        return len(self.alive())

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, or until the deadline."""
        end = time.monotonic() + DEADLINE
        while not done() and time.monotonic() < end:
            select.select([], [], [], 0.01)

    def read_until(self, process: subprocess.Popen[bytes], done: Callable[[bytes], bool]) -> bytes:
        """What cydistrun prints to stdout until `done`; fails at the deadline or the end."""
        assert process.stdout is not None
        seen = b""
        end = time.monotonic() + DEADLINE
        while not done(seen):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(process.stdout.fileno(), 65536) if ready else b""
            assert data, f"no more output after {seen!r}"
            seen += data
        return seen

    def wait_ready(self, process: subprocess.Popen[bytes], count: int) -> list[int]:
        """The pids that `count` processes printed with READY."""
        lines = re.compile(rb"ready (\d+)\n")
        seen = self.read_until(process, lambda seen: len(lines.findall(seen)) == count)
        return [int(pid) for pid in lines.findall(seen)]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path)
    yield it
    for process in it.started:
        process.kill()
    for pid in it.alive():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for process in it.started:
        process.communicate(timeout=DEADLINE)

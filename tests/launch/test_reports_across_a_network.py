"""Reports of `cydist` and `cydistrun --report-hangs` on a job of two hosts that share no processes.

The hosts are namespaces of this machine, with names and directories of their own.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_hosts import secret_file
from network_hosts import IN_ROOT, ROOT, Host, network_of, only_child, require_hosts

PORT = 29870
DEADLINE = 60.0
REPORT = b"cydistrun: a call takes longer than 1 s (--report-hangs):\n"
LATE = "Rank 2 on host 1 (host1) is late"


class Job:
    """The program of docs/guide/debugging.md, two ranks on each host, of which rank 2 hangs."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts = hosts
        self._key = str(secret_file(directory / "key"))
        self._places = []
        for host in hosts:
            self._places.append(directory / host.name)
            self._places[-1].mkdir()
        self.launchers = [
            self._start(
                host, "-m", "cydist.run", f"--nnodes={len(hosts)}", f"--node-rank={host.number}",
                f"--master-addr={hosts[0].address}", f"--master-port={PORT}", "-n2",
                "--report-hangs=1", "docs/examples/faulty.py", "hang",
            )
            for host in hosts
        ]  # fmt: skip

    def _start(self, host: Host, *command: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self._places[host.number]),
               "CYDIST_SECRET_FILE": self._key}  # fmt: skip
        return subprocess.Popen(
            [*host.enter(), *IN_ROOT, *command], env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def await_said(self, node: int, command: str, pattern: str) -> str:
        """The output of a command on a host, once it shows what is expected."""
        until = time.monotonic() + DEADLINE
        while True:
            out, errors = self._start(
                self.hosts[node], "-m", "cydist", *command.split()
            ).communicate(timeout=DEADLINE)
            if re.search(pattern, text := out.decode()):
                return text
            assert time.monotonic() < until, (text, errors)

    def await_report(self) -> bytes:
        """The output of host 0's launcher, until the stacks of the late rank come."""
        stderr = self.launchers[0].stderr
        assert stderr is not None
        seen, until = b"", time.monotonic() + DEADLINE
        while b"in load_batch" not in seen:
            ready, _, _ = select.select([stderr], [], [], max(0.0, until - time.monotonic()))
            assert ready, seen
            seen += os.read(stderr.fileno(), 1 << 16)
        return seen

    def end(self) -> list[bytes]:
        """End the job; return what its launchers have printed on stderr since the last look."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                os.kill(only_child(launcher.pid), signal.SIGTERM)
        ended = [launcher for launcher in self.launchers if not launcher.stderr.closed]  # type: ignore[union-attr]
        return [launcher.communicate(timeout=DEADLINE)[1] for launcher in ended]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Provide a job that hangs. It ends afterwards."""
    require_hosts()
    directory = tmp_path_factory.mktemp("job")
    with network_of(2, directory / "network") as (_, hosts):
        made = Job(hosts, directory)
        yield made
        made.end()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1], ids=["on-host-0", "on-host-1"])
@pytest.mark.parametrize("command", ["ps", "hang", "top --once"], ids=["ps", "hang", "top"])
def test_the_table_has_all_ranks(job: Job, command: str, node: int) -> None:
    """With the names of their hosts, and the late one is named."""
    text = job.await_said(node, command, rf"(?m)^{re.escape(LATE)}")
    rows = [tuple(line.split()[:3]) for line in text.splitlines() if re.match(r"\d", line)]
    assert rows == [
        ("0", "0", "host0"), ("1", "0", "host0"), ("2", "1", "host1"), ("3", "1", "host1"),
    ]  # fmt: skip
    assert ("in load_batch" in text) == (command == "hang")


@pytest.mark.slow
def test_host_0_reports_the_hang_once(job: Job) -> None:
    """With the late rank of the other host, and its stacks; that host's launcher reports none."""
    said = job.await_report()
    rest, other = job.end()
    assert (said + rest).count(REPORT) == 1
    assert f"\n{LATE}: ranks 0, 1, 3 are in all_reduce #4".encode() in said
    assert REPORT not in other

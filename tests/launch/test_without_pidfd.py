"""Where the kernel gives no descriptors of processes, as under gVisor."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from cydist.launch import processes, supervisor


@pytest.fixture(params=[errno.ENOSYS, errno.EPERM], ids=["no-such-call", "forbidden"])
def no_descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.pidfd_open fails so."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "pidfd_open", refuse)


def test_a_process_is_signalled_by_its_number(no_descriptors: None) -> None:
    """It ends by the signal."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (found,) = (each for each in processes.descendants() if each.pid == child.pid)
        found.send(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL


def test_a_namesake_is_left_alone(no_descriptors: None) -> None:
    """A process of that number that began later is another one."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (found,) = (each for each in processes.descendants() if each.pid == child.pid)
        found._replace(started=found.started - 1).send(signal.SIGKILL)
        assert child.communicate(b"\n", 30)
        assert child.returncode == 0


def test_the_end_of_the_inner_launcher_is_seen(no_descriptors: None) -> None:
    """With its exit code."""
    wake, _ = ends = os.pipe()
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(3)"], {})
    assert supervisor._forward_until_exit(child, wake, ends[1], set(), None) == 3
    for end in ends:
        os.close(end)

"""cydistrun --hosts over a real ssh and sshd, between hosts that are namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched_hosts import SUM, ends, without_notices
from network_hosts import Host, only_child
from ssh_hosts import SshHosts, ssh_hosts

if TYPE_CHECKING:
    from conftest import Launcher

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[SshHosts]:
    """Three hosts: two for jobs, and one more for the user."""
    with ssh_hosts(3, tmp_path / "network") as hosts:
        yield hosts


def cydistrun(
    launcher: Launcher, made: SshHosts, host: Host, *arguments: str
) -> subprocess.Popen[bytes]:
    """Start it on a host."""
    command = (sys.executable, "-m", "cydist.run", "--export=LAUNCH_TEST", *arguments)
    path = f"{made.programs}:{os.environ['PATH']}"
    inside = host.enter("sh", "-c", 'cd "$0" && exec "$@"', str(launcher.directory), *command)
    return launcher.start_command(*inside, env={"PATH": path})


def at_work(launcher: Launcher) -> list[int]:
    """Every process that runs in the job's directory: launchers and ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == launcher.directory:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def settles(launcher: Launcher) -> bool:
    """Whether all processes of the job have ended."""
    launcher.until(lambda: not at_work(launcher))
    return at_work(launcher) == []


@pytest.mark.parametrize(("user", "address"), [(0, "10.77.0.1"), (2, "10.77.0.1")])
def test_one_command(launcher: Launcher, made: SshHosts, user: int, address: str) -> None:
    """Started on the first host or outside: ranks find the first host where the others reach it,
    by names that only ssh knows."""
    script = launcher.script(
        *SUM,
        "print(os.uname().nodename, os.environ['MASTER_ADDR'], x.tolist())",
        "dist.destroy_process_group()",
        "sys.exit(5 if rank == 1 and len(sys.argv) > 1 else 0)",
    )
    first = made.hosts[0].name if user == 0 else "root@node0"
    listed = f"--hosts={first}:1,node1:2"
    for arguments, expected in (((), 0), (("fail",), 5)):
        process = cydistrun(launcher, made, made.hosts[user], listed, script, *arguments)
        ((code, out, err),) = ends(process)
        assert code == expected, err
        assert sorted(out.splitlines()) == [
            f"[0] host0 {address} [3.0, 6.0, 9.0]",
            f"[1] host1 {address} [3.0, 6.0, 9.0]",
            f"[2] host1 {address} [3.0, 6.0, 9.0]",
        ]
        if expected:
            assert err.count("failed first") == 1
            assert "host host1) failed first: exit code 5" in err
        else:
            assert without_notices(err) == ""
    assert settles(launcher)


@pytest.mark.parametrize("what", ["ssh", "sshd", "launcher", "command", "terminate"])
def test_every_death_ends_all(launcher: Launcher, made: SshHosts, what: str) -> None:
    """Of one ssh, of its sshd, of a launcher, or of the command itself."""
    script = launcher.script("ready()", "pause()")
    process = cydistrun(launcher, made, made.hosts[2], "--hosts=node0:1,node1:1", script)
    launcher.wait_ready(process, 2)
    if what in ("command", "terminate"):
        number = signal.SIGKILL if what == "command" else signal.SIGTERM
        os.kill(only_child(process.pid), number)
    else:
        kill_one(made, what)
    ((code, _, err),) = ends(process)
    assert code == {"command": -signal.SIGKILL, "terminate": 143}.get(what, 1)
    if code == 1:
        assert "was lost, or its launcher killed" in err
    assert settles(launcher)


def kill_one(made: SshHosts, what: str) -> None:
    """Kill the ssh to node1, or a process on that host."""
    host, words = {
        "ssh": (made.hosts[2], "/usr/bin/ssh.*node1"),
        "sshd": (made.hosts[1], "sshd: root@notty"),
        "launcher": (made.hosts[1], "cydist.launch.remote"),
    }[what]
    done = subprocess.run(host.enter("pkill", "-KILL", "-o", "-f", words), timeout=30, check=False)
    assert done.returncode == 0


def test_a_host_without_power(launcher: Launcher, made: SshHosts) -> None:
    """Is noticed by ssh, or by the other launcher, and the job ends."""
    script = launcher.script("ready()", "pause()")
    process = cydistrun(launcher, made, made.hosts[2], "--hosts=node0:1,node1:1", script)
    launcher.wait_ready(process, 2)
    made.hosts[1].power_off()
    ((code, _, err),) = ends(process)
    assert code in (1, 143)
    assert "node1 was lost" in err
    assert settles(launcher)


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ((), "unknown", "Permission denied (publickey)"),
        (("-oUserKnownHostsFile=none",), "user", "Host key verification failed."),
        (("-p", "1"), "user", "Connection refused"),
    ],
    ids=["key", "unknown host", "port"],
)
def test_what_ssh_refuses(
    launcher: Launcher, made: SshHosts, options: tuple[str, ...], key: str, words: str
) -> None:
    """Nothing is asked, and its last line says why."""
    made.write_ssh(*options, key=key)
    script = launcher.script("print('started')")
    process = cydistrun(launcher, made, made.hosts[2], "--hosts=node0:1,node1:1", script)
    ((code, out, err),) = ends(process)
    assert (code, out) == (1, "")
    assert "cannot be reached with ssh, which may ask nothing (try: ssh node" in err
    assert words in err
    assert settles(launcher)

"""Hosts with a real sshd (network_hosts.py), and an ssh that finds them by names of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from network_hosts import DEADLINE, Host, Network, call, network_of, require_hosts

SSHD = "/usr/sbin/sshd"
PORT = 2222
CONFIGURATION = """
Port {port}
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""
CLIENT = """
Host *
  Port {port}
  IdentitiesOnly yes
  UserKnownHostsFile {directory}/known
  GlobalKnownHostsFile none
  LogLevel ERROR
"""


class SshHosts:
    """Hosts whose names for ssh are node0, node1 and so on; `programs` holds the user's ssh."""

    def __init__(self, network: Network, hosts: Sequence[Host], directory: Path) -> None:
        self.network = network
        self.hosts = hosts
        self.programs = directory / "bin"
        self.programs.mkdir()
        self._directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("host", "user", "unknown"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name))
        key = (directory / "host.pub").read_text()
        known = [f"[{host.address}]:{PORT} {key}" for host in hosts]
        (directory / "known").write_text("".join(known))
        (directory / "sshd_config").write_text(CONFIGURATION.format(port=PORT, directory=directory))
        aliases = [f"Host node{host.number}\n  HostName {host.address}\n" for host in hosts]
        (directory / "config").write_text(
            "".join(aliases) + CLIENT.format(port=PORT, directory=directory)
        )
        self.write_ssh()
        for host in hosts:
            self._start(host)

    def write_ssh(self, *options: str, key: str = "user") -> None:
        """Let the user's ssh use these options, before those of the configuration, and a key:
        `user`, which the hosts know, or `unknown`."""
        program = self.programs / "ssh"
        files = ("-F", str(self._directory / "config"), "-i", str(self._directory / key))
        words = ("exec", "/usr/bin/ssh", *options, *files)
        program.write_text(f'#!/bin/sh\n{" ".join(words)} "$@"\n')
        program.chmod(0o755)

    def _start(self, host: Host) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and keeps nothing there
        self._daemons.append(subprocess.Popen(
            host.enter(SSHD, "-D", "-e", "-f", str(self._directory / "sshd_config")),
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ))  # fmt: skip
        end = time.monotonic() + DEADLINE
        while f":{PORT:04X} " not in host.run("cat", "/proc/net/tcp"):
            assert time.monotonic() < end, "sshd does not listen"
            time.sleep(0.02)

    def end(self) -> None:
        """Reap the daemons, which end with their hosts."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(DEADLINE)


@contextlib.contextmanager
def ssh_hosts(count: int, directory: Path) -> Iterator[SshHosts]:
    """Make hosts with an sshd each; skip the test where there are none."""
    missing = [name for name in (SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}")
    require_hosts()
    with network_of(count, directory) as (network, hosts):
        network.name_hosts(hosts)
        made = SshHosts(network, hosts, directory)
        try:
            yield made
        finally:
            made.end()

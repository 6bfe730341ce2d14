"""Hosts on this machine: namespaces that share neither memory nor processes, and a network.

Each host has namespaces for its network, processes, mounts, IPC and host name, and a boot id of its
own, so ranks on two of them meet as ranks on two machines do. A namespace in the middle holds the
switch. All end with this process, because each is held by a child that reads its standard input.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The kernel gives a namespace only the congestion controls in this file.
ALLOWED_CONTROLS = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
TOOLS = ("ip", "tc", "unshare", "nsenter", "taskset")
# Words of a classic BPF program, and what it returns to the traffic control.
LOAD, JUMP_IF_NOT_LESS, RETURN = 0x20, 0x35, 0x06
RANDOM = (1 << 32) - 0x1000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
PASS, DROP = (1 << 32) - 1, 2
DEADLINE = 30.0  # seconds for one command, or one line of a rank


@functools.cache
def why_none() -> str:
    """Return why no hosts can be made here; "" if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        return ", ".join(missing) or "not root"
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            network_of(1, Path(directory)) as (_, made),
        ):
            made[0].slow_down("1gbit")
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def why_not_controlled_by(name: str) -> str:
    """Return why hosts here cannot have this congestion control; "" if they can."""
    allowed = ALLOWED_CONTROLS.read_text().split()
    if name in allowed:
        return ""
    return f"{name} is none of {', '.join(allowed)}: let root add it to {ALLOWED_CONTROLS}"


def require_hosts() -> None:
    """Skip the test where no hosts can be made."""
    if why_none():
        pytest.skip(f"no network namespaces: {why_none()}")


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Namespaces:
    """New namespaces, held by a process until `end`."""

    def __init__(self, kinds: Sequence[str], script: str = "") -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--net", *kinds, "--fork", "--kill-child", "sh", "-c",
             f"{script} ip link set lo up && echo held && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "held\n":
            self.end()
            raise OSError("namespaces cannot be made here")
        self.pid = only_child(self.holder.pid)

    def run(self, *command: str) -> str:
        """Run a tool of this machine in the network."""
        return call("nsenter", f"--target={self.pid}", "--net", *command)

    def end(self) -> None:
        """Kill all processes in it."""
        for stream in (self.holder.stdin, self.holder.stdout):
            if stream is not None:
                stream.close()
        self.holder.kill()
        self.holder.wait(DEADLINE)


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class Host:
    """One host: 10.77.0.(number + 1), port p(number) of the switch."""

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self.number = number
        self._bound: list[str] = []
        self.address = f"10.77.0.{number + 1}"
        self.name = f"host{number}"
        boot = network.directory / f"boot-{number}-{uuid.uuid4().hex}"
        boot.write_text(f"{uuid.uuid4()}\n")
        self.inside = Namespaces(
            ["--uts", "--ipc", "--pid", "--mount", "--mount-proc"],
            f"hostname {self.name} && mount --bind {boot} /proc/sys/kernel/random/boot_id &&",
        )
        switch = network.switch
        call("nsenter", f"--target={switch.pid}", "--net", "ip", "link", "add", f"p{number}",
             "type", "veth", "peer", "name", "eth", "netns", str(self.inside.pid))  # fmt: skip
        self.run("ip", "link", "set", "eth", "address", self.mac, "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth")
        switch.run("ip", "link", "set", f"p{number}", "up")
        self.plug()

    @property
    def mac(self) -> str:
        return f"02:00:00:00:00:{self.number + 1:02x}"

    def run(self, *command: str) -> str:
        return self.inside.run(*command)

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs `command` on it, as a process of it."""
        return [*self._bound, "nsenter", f"--target={self.inside.pid}", "--net", "--uts", "--ipc",
                "--pid", "--mount", "--", *command]  # fmt: skip

    def bind(self, cores: Iterable[int]) -> None:
        """Let what is started on it from now on run on these cores only."""
        self._bound = ["taskset", "--cpu-list", ",".join(map(str, cores))]

    def plug(self) -> None:
        """Connect it to the switch."""
        self._network.switch.run("ip", "link", "set", f"p{self.number}", "master", "bridge")

    def black_hole(self) -> None:
        """Lose all packets from and to it. Its link stays up."""
        self._network.switch.run("ip", "link", "set", f"p{self.number}", "nomaster")

    def link_down(self) -> None:
        """Take its cable out."""
        self._network.switch.run("ip", "link", "set", f"p{self.number}", "down")

    def power_off(self) -> None:
        """End it, so that no packet of it tells."""
        self.black_hole()
        self.inside.end()
        with contextlib.suppress(OSError):  # the kernel may have removed it
            self._network.switch.run("ip", "link", "delete", f"p{self.number}")

    def slow_down(self, rate: str) -> None:
        """Limit what it sends.

        The kernel cuts packets that are longer than the burst into those of a network, which keeps
        the cores busy that all hosts share. So the longest, of 64 KiB and its headers, fits.
        """
        self.run("tc", "qdisc", "replace", "dev", "eth", "root", "tbf", "rate", rate,
                 "burst", "96k", "latency", "400ms")  # fmt: skip

    def use_congestion_control(self, name: str) -> None:
        """Choose that of its connections from now on, as its administrator would."""
        self.run("sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control")

    def lose(self, percent: float) -> None:
        """Lose so many of the packets that arrive, by chance, each of the size that a network has.

        A classifier does it, which kernels without netem have, too.
        """
        limit = round(percent / 100 * (1 << 32))
        program = ((LOAD, 0, 0, RANDOM), (JUMP_IF_NOT_LESS, 1, 0, limit), (RETURN, 0, 0, DROP),
                   (RETURN, 0, 0, PASS))  # fmt: skip
        text = ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])
        self.run("ip", "link", "set", "eth", "gso_max_segs", "1")
        self.run("tc", "qdisc", "replace", "dev", "eth", "clsact")
        self.run("tc", "filter", "add", "dev", "eth", "ingress", "bpf", "da", "bytecode", text)

    def grow_packets(self) -> None:
        """Let it send packets that the switch drops without a word."""
        self.run("ip", "link", "set", "eth", "mtu", "9000", "gso_max_segs", "1")

    def impostor(self) -> None:
        """Let another kernel answer in its place, which knows none of its connections."""
        self.black_hole()
        switch = self._network.switch
        switch.run("ip", "link", "set", "bridge", "address", self.mac)
        switch.run("ip", "address", "add", f"{self.address}/24", "dev", "bridge")

    def await_connections(self, port: int, count: int) -> None:
        """Wait until so many connections to a port of it are established."""
        end = time.monotonic() + DEADLINE
        while True:
            rows = [line.split() for line in self.run("cat", "/proc/net/tcp").splitlines()[1:]]
            made = sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
            if made >= count:
                return
            assert time.monotonic() < end, f"{made} of {count} connections in {DEADLINE} s"
            time.sleep(0.01)

    def in_network(self) -> list[str]:
        """Return the beginning of a command line that runs a command in its network alone."""
        return ["nsenter", f"--target={self.inside.pid}", "--net", "--"]

    def start(self, command: Sequence[str], environ: dict[str, str]) -> Process:
        """Run a Python program on it."""
        return python([*self.enter(), *IN_ROOT, *command], environ)

    def start_in_network(self, command: Sequence[str], environ: dict[str, str]) -> Process:
        """Run a Python program in its network, as a process of this machine."""
        return python([*self.in_network(), *IN_ROOT, *command], environ)


# Begins the command line of a Python program in the repository.
IN_ROOT = ("sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), sys.executable)


def python(command: Sequence[str], environ: dict[str, str]) -> Process:
    """Run a command line of a Python program."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}",
               "CYDIST_TUNING": "off", **environ}  # fmt: skip
    return Process(subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ))  # fmt: skip


class Network:
    """A switch and the hosts on it."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path) -> None:
        self.directory = directory
        self._stack = stack
        self.switch = Namespaces([])
        stack.callback(self.switch.end)
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self.switch.run("ip", "link", "set", "bridge", "up")

    def host(self, number: int) -> Host:
        made = Host(self, number)
        self._stack.callback(made.inside.end)
        return made

    def name_hosts(self, hosts: Sequence[Host]) -> None:
        """Let these hosts know each other by name."""
        names = self.directory / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
        names.write_text("".join(f"{line}\n" for line in lines))
        for host in hosts:
            call(*host.enter("mount", "--bind", str(names), "/etc/hosts"))


@contextlib.contextmanager
def network_of(hosts: int, directory: Path) -> Iterator[tuple[Network, list[Host]]]:
    """Make a network of hosts, which end afterwards, with all processes on them."""
    directory.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        network = Network(stack, directory)
        yield network, [network.host(number) for number in range(hosts)]


class Process:
    """A program on a host, whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, timeout: float = DEADLINE) -> str:
        """Return its next line; "" when it has ended. Raises queue.Empty after `timeout` s."""
        return self._lines.get(timeout=timeout) or ""

    def lines(self, timeout: float = DEADLINE) -> Iterator[str]:
        """Return its lines until it ends, empty ones too. Raises as `line` does."""
        while (line := self._lines.get(timeout=timeout)) is not None:
            yield line

    def is_silent(self, seconds: float) -> bool:
        """Return whether it says nothing for so long."""
        try:
            raise AssertionError(self._lines.get(timeout=seconds))
        except queue.Empty:
            return True

    def ended(self, timeout: float = DEADLINE) -> int:
        """Wait until it has ended, and return its exit code."""
        return self._process.wait(timeout)

    def tell(self, line: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send the program itself a signal."""
        os.kill(only_child(self._process.pid), number)

    def end(self) -> None:
        """Kill it, if it still runs."""
        with contextlib.suppress(OSError, IndexError):
            os.kill(only_child(self._process.pid), 9)
        self._process.kill()
        self._process.wait(DEADLINE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

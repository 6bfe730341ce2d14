"""Start the launchers of several hosts over the user's ssh: `cydistrun --hosts a:2,b:2`.

One ssh for each host runs remote.py there. Its standard streams carry what the two say, see there.
A host of the list that is this one needs no ssh. The job gets a fresh secret.

The launchers meet by themselves (hosts.py), and decide how the job ends. This process passes on
their output and the signals that it gets. When it ends, or an ssh does, the end of a stream tells
the launcher there to end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cydist import config
from cydist.errors import RendezvousError
from cydist.launch.console import Console
from cydist.launch.environment import remove_stale
from cydist.launch.hosts import patience_with_hosts
from cydist.launch.options import LaunchOptions, ListedHost, for_host
from cydist.launch.output import Lines, OutputStream, OutputStreams, Tail
from cydist.launch.processes import exit_code, kill_descendants
from cydist.launch.remote import GREETING
from cydist.launch.supervisor import FINAL_WAIT_SECONDS
from cydist.net.secret import new_secret
from cydist.stores.membership_store import printable
from cydist.waiting import LONGEST_TIMEOUT, LONGEST_WAIT, LoopGuard, WaitNotices, duration

_QUESTIONS = 3  # of ssh to a silent host, before it takes it for lost
# Variables that travel to other hosts: those whose names begin so.
TRAVELLING = ("CYDIST_", "GLOO_", "NCCL_", "OMP_", "TORCH_")
_PATH = "PYTHONPATH"
_UNREACHED = 255  # ssh's own exit code
_LATE_SECONDS = 10.0  # after the grace period, an ssh that has not ended is killed
_EARLY_BYTES = 1 << 20  # of output before the greeting


class _Errors(Lines):
    """The stderr of one launcher. Before its greeting it is ssh's or a shell's, kept for a message.

    Attributes:
        shown: Whether the launcher has greeted.
    """

    shown = False

    def add(self, data: bytes) -> None:
        if self.shown:
            super().add(data)


class _Output(Lines):
    """The stdout of one launcher, without its first and last words, which are for this process."""

    def __init__(
        self,
        console: Console,
        mark: bytes,
        on_greeting: Callable[[dict[str, Any]], object],
        on_end: Callable[[int, bool], object],
    ) -> None:
        super().__init__(b"", console)
        self._early: bytes | None = b""  # what came before the greeting, such as a shell's text
        self._mark = mark
        self._on_greeting = on_greeting
        self._on_end = on_end

    def add(self, data: bytes) -> None:
        if self._early is not None:
            self._early = (self._early + data)[-_EARLY_BYTES:]
            _, _, rest = self._early.partition(GREETING)
            text, newline, data = rest.partition(b"\n")
            if not newline:
                return
            self._early = None
            self._on_greeting(json.loads(text))
        super().add(data)

    def _prefixed(self, whole: bytes) -> bytes:
        rest, _, last = whole.rpartition(b"\n")
        if not last.startswith(self._mark):
            return super()._prefixed(whole)
        code, started = last[len(self._mark) :].split()
        self._on_end(int(code), started == b"1")
        return super()._prefixed(rest) if rest else b""


class _Remote:
    """A launcher on a host of the list.

    Attributes:
        greeting: What it said when it came; None: it has not.
        code: Its exit code, once it has said so.
        started: Whether it had started ranks by then.
        ended: Whether its ssh has ended.
        words: The end of what it, or ssh, wrote to stderr.
    """

    def __init__(self, host: ListedHost) -> None:
        self.name = host.name
        self.local = is_local(host.name)
        self.greeting: dict[str, Any] | None = None
        self.code: int | None = None
        self.started = False
        self.ended = False
        self.words = Tail()
        here = (sys.executable, *_safe_path(), "-m", "cydist.launch.remote")
        (self.out, out), (self.err, err) = os.pipe(), os.pipe()
        try:
            self.process = subprocess.Popen(
                here
                if self.local
                else (*ssh_command(), "--", host.name.translate(_NO_BRACKETS), _command(here)),
                stdin=subprocess.PIPE, stdout=out, stderr=err,
            )  # fmt: skip
        finally:
            os.close(out)
            os.close(err)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        """Send an order, or signals; a launcher that is gone gets none."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def tell_end(self) -> None:
        """Tell the launcher to end, by the end of its stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def last_line(self) -> str:
        """Return the last line on stderr."""
        lines = self.words.bytes().split(b"\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), b"it said nothing")
        return printable(last)


_NO_BRACKETS = str.maketrans("", "", "[]")


def ssh_command() -> tuple[str, ...]:
    """Return ssh with its options.

    It asks the user nothing, since no user would see the question. It gives up a host that drops
    every packet of a first connection, and notices a lost host when the launchers do. It makes no
    connection for later ones, which would outlive the job.

    Raises RendezvousError if CYDIST_PEER_TIMEOUT is not a time.
    """
    patience = patience_with_hosts()
    # ssh asks after each interval in which nothing comes, and gives up at the end of the last one.
    interval = 0
    if not math.isinf(patience):
        interval = math.ceil(min(patience, LONGEST_TIMEOUT) / (_QUESTIONS + 1))
    return (
        "ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=30",
        f"-oServerAliveInterval={interval}", f"-oServerAliveCountMax={_QUESTIONS}",
        "-oControlMaster=no",
    )  # fmt: skip


def _safe_path() -> tuple[str, ...]:
    """Return the option by which a launcher imports nothing from its directory, unless this process
    does. Others may be able to write there, as in /tmp."""
    return () if {"", os.getcwd()} & set(sys.path) else ("-P",)


def _command(program: tuple[str, ...]) -> str:
    """Return the command line that starts the launcher in this directory, for the user's shell."""
    path = os.environ.get(_PATH)
    before = () if path is None else ("env", f"{_PATH}={path}")
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join((*before, *program))}"


def is_local(name: str) -> bool:
    """Return whether a host of the list is this one: its name, localhost, or a numeric address."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name.translate(_NO_BRACKETS))
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((str(address), 0))
    except (ValueError, OSError):
        return False
    return True


def master_address(hosts: list[tuple[bool, str]]) -> str:
    """Return the address of the first host as the others reach it.

    Args:
        hosts: Whether each is this host, and the addresses of ssh's connection to it: client, port,
            server, port.

    ssh has reached the first host at its address, or another host has seen where ssh came from.
    Raises RendezvousError if that is an address that means another host elsewhere, or unknown.
    """
    pairs = [connection.split() for local, connection in hosts if not local]
    if len(hosts) == 1 or not pairs:
        return "127.0.0.1"
    try:
        client, server = pairs[0][0], pairs[0][2]
        address = client if hosts[0][0] else server
        loopback = [ipaddress.ip_address(each[2].partition("%")[0]).is_loopback for each in pairs]
        here = ipaddress.ip_address(address.partition("%")[0])
    except (IndexError, ValueError):  # an sshd that does not know says UNKNOWN
        raise RendezvousError(
            "ssh does not tell the first host's address (SSH_CONNECTION there): give its address "
            "with --master-addr"
        ) from None
    if here.is_link_local or (here.is_loopback and not all(loopback)):
        raise RendezvousError(
            f"ssh knows the first host as {address}, which the others cannot reach: give its "
            "address with --master-addr"
        )
    return address


class _Starter:
    """All launchers of the list, until the last has ended."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._output = OutputStreams(self._selector)
        self._mark = f"cydist-{os.urandom(8).hex()}"
        self._remotes: list[_Remote] = []
        self._notices: WaitNotices | None = WaitNotices(self._output.print)
        self._loop_guard = LoopGuard("cydistrun", self._output.print)
        self._wrong: RendezvousError | None = None  # why no launcher gets an order
        self._ordered = False
        self._code: int | None = None  # of the host that failed first
        self._stopped_by: int | None = None
        self._abandoned = False  # the outer process is dead
        self._ends_at: float | None = None  # of an ssh that does not end by itself

    def run(self, lifeline: int) -> int:
        """Run the job to its end, and return the exit code."""
        self._selector.register(
            lifeline, selectors.EVENT_READ, partial(self._on_lifeline, lifeline)
        )
        try:
            for host in self._options.hosts:
                self._remotes.append(remote := _Remote(host))
                self._watch(remote)
            while not self._over():
                with self._loop_guard:
                    self._round()
                if self._wrong is not None:
                    raise self._wrong
        except (OSError, RendezvousError) as error:
            self._output.print(f"cydistrun: {error}\n")
            self._code = self._code or 1
        finally:
            for remote in self._remotes:
                remote.tell_end()
            kill_descendants(FINAL_WAIT_SECONDS)
            self._output.finish()
            if not self._abandoned:
                told = self._stopped_by is not None
                self._output.drain(lifeline, self._options.grace if told else None)
        if self._stopped_by is not None:
            return exit_code(-self._stopped_by)
        return self._code or 0

    def _over(self) -> bool:
        if self._abandoned or all(remote.ended for remote in self._remotes):
            return True
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def _round(self) -> None:
        now = time.monotonic()
        notice = None if self._notices is None else now + self._notices.left
        ends = (now + LONGEST_WAIT, self._output.hold_back(), self._ends_at, notice)
        first = min(end for end in ends if end is not None)
        for key, _ in self._selector.select(max(0.0, first - now)):
            try:
                key.data()
            except RendezvousError as error:
                self._wrong = error
            except Exception as error:
                self._loop_guard.record(error)  # other hosts do not wait for this one
        if self._notices is not None:
            self._notices.say_if_due(self._notice)
        for remote in self._remotes:
            if not remote.ended and remote.out not in self._output:
                self._take_end(remote)

    def _notice(self, seconds: float) -> str:
        late = [remote.name for remote in self._remotes if remote.greeting is None]
        bare = late[0].translate(_NO_BRACKETS)
        return (
            f"cydistrun: this command has waited {seconds:.0f} s for ssh to {', '.join(late)}. To "
            f"see what ssh waits for, run: ssh {bare} true"
        )

    def _watch(self, remote: _Remote) -> None:
        """Pass on a launcher's output."""
        consoles = self._output.consoles

        def on_greeting(greeting: dict[str, Any]) -> None:
            remote.greeting = greeting
            self._output.read_all(remote.err)  # the text of ssh came first, and may be read later
            errors.shown = True
            if all(each.greeting for each in self._remotes):
                self._order_all()

        def on_end(code: int, started: bool) -> None:
            remote.code, remote.started = code, started

        out = _Output(consoles[1], self._mark.encode(), on_greeting, on_end)
        errors = _Errors(b"", consoles[2])
        keep = partial(remote.words.add, now=0.0)
        # `logged`: these pipes are read to their end even if this process's output has no reader.
        self._output.add(OutputStream(remote.out, [], out, consoles[1], logged=True))
        self._output.add(OutputStream(remote.err, [keep], errors, consoles[2], logged=True))

    def _order_all(self) -> None:
        """Tell all launchers what to do, now that all are there. Raises RendezvousError."""
        self._notices = None
        options = self._options
        seen = [
            (each.local, each.greeting["connection"]) for each in self._remotes if each.greeting
        ]
        address = options.master_addr or master_address(seen)
        first = self._remotes[0].greeting
        assert first is not None
        port = options.given["master_port"]
        if port == 0 and len(self._remotes) > 1:
            port = first["port"]
        secret = new_secret()
        variables = travelling_variables(options.exported)
        for node, remote in enumerate(self._remotes):
            order = {
                "given": for_host(options.given, options.hosts, node, address, port),
                "label": remote.name,
                "mark": self._mark,
                "secret": secret.hex(),
                "variables": variables,
            }
            remote.send(json.dumps(order).encode() + b"\n")
        self._ordered = True

    def _on_lifeline(self, lifeline: int) -> None:
        """Pass on the signals that the outer process got, or its death."""
        numbers = os.read(lifeline, 4096)
        if not numbers:
            self._abandoned = True
            return
        for remote in self._remotes:
            if self._ordered:
                remote.send(numbers)
        ends = [each for each in numbers if each not in (signal.SIGTSTP, signal.SIGCONT)]
        if ends and self._stopped_by is None:
            self._stopped_by = ends[0]
            wait = duration(self._options.grace) + _LATE_SECONDS if self._ordered else 0.0
            self._ends_at = time.monotonic() + wait

    def _take_end(self, remote: _Remote) -> None:
        """Take the end of an ssh, or of the launcher on this host."""
        remote.ended = True
        self._output.read_all(remote.err)
        with contextlib.suppress(subprocess.TimeoutExpired):
            remote.process.wait(FINAL_WAIT_SECONDS)
        status = remote.process.returncode
        if remote.code == 0 or self._stopped_by is not None:
            return
        lost = remote.code is None
        if lost:
            how = self._how_lost(remote, status)
            self._output.print(f"cydistrun: {remote.name} {how}: {remote.last_line()}\n")
        self._code = self._code or remote.code or 1
        # Once ranks have started, the launchers end each other, or go on without one.
        if not remote.started and not (lost and self._ordered and self._options.keep_going):
            self._end_all()

    def _how_lost(self, remote: _Remote, status: int | None) -> str:
        if remote.greeting is not None:
            return "was lost, or its launcher killed. The last line from there"
        if status == _UNREACHED and not remote.local:
            bare = remote.name.translate(_NO_BRACKETS)
            return f"cannot be reached with ssh, which may ask nothing (try: ssh {bare} true)"
        return f"cannot start cydist with {sys.executable} in {os.getcwd()}"

    def _end_all(self) -> None:
        """Tell all launchers to end, and wait no longer than they may take."""
        for remote in self._remotes:
            remote.tell_end()
        wait = duration(self._options.grace) + _LATE_SECONDS if self._ordered else 0.0
        self._ends_at = self._ends_at or time.monotonic() + wait


def travelling_variables(exported: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that launchers on other hosts get from this environment."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(TRAVELLING) or name in (_PATH, *exported)
    }
    remove_stale(found)
    for name in config.SECRET_FILE.names:
        found.pop(name, None)
    return found


def run_over_ssh(options: LaunchOptions, lifeline: int) -> int:
    """Start a job on its hosts, and return the exit code when all have ended."""
    return _Starter(options).run(lifeline)

"""An attacker of another user, and jobs that he attacks, as processes of a test."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 50.0  # seconds for a job, which takes one or two, and ten where a rank is missed
NOBODY = 65534

Attack = dict[str, Any]
NO_ATTACK: Attack = {}

SETTINGS = {
    "default": {},
    "encrypted": {"CYDIST_ENCRYPT": "1"},
    "nat": {"CYDIST_NAT": "1"},
    "insecure": {"CYDIST_INSECURE": "1"},
}
TEXT = "a text of plain values"
# An object that needs no pickle is changed, where ranks were led to him. Ranks may dial each other
# at once, and only one of the two connections stays: the object goes up or down.
CHANGED: Attack = {"on": "peer", "kind": "plain", "at": 1, "text": TEXT}
# In the store he puts his own places for those of the ranks.
LEADING: Attack = {"on": "store", "kind": "addresses", "always": True, "peers": CHANGED}
LED = "a rank was led here"
# A rank that was led to him stays until rank 0 has come, which may take long on a busy machine:
# one that gave up would find rank 0 when it comes again, since he has left the port to it.
STAYS = {"PATIENCE": "30"}


class Attacker:
    """tests/programs/attacker.py, and the folder that all users may write.

    Args:
        folder: World-writable; his commands leave their marks in it.
    """

    def __init__(
        self, folder: Path, secret: Path, *more: str, inside: Sequence[str] = (), **environ: str
    ) -> None:
        self.folder = folder
        self.mark = folder / "mark"
        self.process = subprocess.Popen(
            [*inside, sys.executable, str(ROOT / "tests/programs/attacker.py"), str(secret), *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={
                **inherited(),
                "XDG_STATE_HOME": str(folder),  # a home of his own
                **environ,
            },
        )  # fmt: skip
        self._started = False

    def tell(self, *command: object) -> None:
        """Give him a command; `hear` has his answer."""
        if not self._started:
            assert self.hear() == {"uid": NOBODY, "secret": "refused"}
            self._started = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.hear()

    def events(self) -> list[str]:
        return list(self.ask("events")["events"])

    def did(self, kind: str, channel: str) -> bool:
        """Whether a frame was attacked, on its way up or down."""
        return any(event.startswith(f"{kind}: {channel} ") for event in self.events())

    def command(self) -> str:
        """A shell command that leaves a mark with the uid of who ran it."""
        return f"id -u >> {self.mark}"

    def ran_as(self) -> list[int]:
        """The users whose processes ran it."""
        return [int(line) for line in self.mark.read_text().split()] if self.mark.exists() else []

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def inherited() -> dict[str, str]:
    """The environment of the test, without settings of cydist's."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("CYDIST_")}
    return own | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"}


@contextmanager
def another_user(*more: str, inside: Sequence[str] = (), **environ: str) -> Iterator[Attacker]:
    """The attacker, and a secret file that he cannot read.

    Args:
        inside: Command that starts others in the namespaces of his host.
    """
    if os.geteuid() != 0:
        pytest.skip("not root: there is no other user to attack as")
    with tempfile.TemporaryDirectory(prefix="cydist-attack-") as directory:
        folder = Path(directory)
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        attacker = Attacker(folder, secret, *more, inside=inside, **environ)
        try:
            yield attacker
        finally:
            attacker.end()


class Job:
    """Ranks of tests/programs/attacked.py, started by hand or by a launcher.

    Attributes:
        environ: Of what starts from now on.
    """

    def __init__(self, attacker: Attacker, **environ: str) -> None:
        self._attacker = attacker
        self.environ = {
            **inherited(),
            "XDG_STATE_HOME": str(attacker.folder / "state"),
            "CYDIST_SECRET_FILE": str(attacker.folder / "secret"),
            "CYDIST_TRANSPORT": "tcp",  # as between hosts
            **environ,
        }
        self._processes: list[subprocess.Popen[str]] = []
        self.said = ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def start(
        self, command: Sequence[str], program: Sequence[str] = (sys.executable,), **environ: str
    ) -> None:
        """Start Python, or another program, on a command line."""
        self._processes.append(
            subprocess.Popen(
                [*program, *command], env=self.environ | environ, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip

    def rank(self, rank: int, size: int, port: int, *arguments: str, **environ: str) -> None:
        """Start a rank by hand."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        number = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        self.start([PROGRAM, *arguments], **(place | number | environ))

    def allow(self, name: str) -> None:
        """Make the file that a rank waits for."""
        (self._attacker.folder / name).touch()

    def is_at(self, name: str, rank: int) -> dict[str, Any]:
        """Wait until a rank is at a gate, and return what any user may know of it."""
        until = time.monotonic() + DEADLINE
        here = self._attacker.folder / f"{name}.{rank}.here"
        while not here.exists():
            ended = [p for p in self._processes if p.poll() is not None]
            assert not ended, [p.communicate() for p in ended]
            assert time.monotonic() < until, f"rank {rank} is not at the gate {name}"
            time.sleep(0.01)
        return dict(json.loads(here.read_text()))

    def variables(self) -> dict[str, str]:
        """The environment of a rank that the launcher has started."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            pids = [self._processes[0].pid]
            for pid in pids:
                with suppress(OSError):
                    found = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    variables = dict(each.split("=", 1) for each in found if "=" in each)
                    if "CYDIST_STORE_PORT" in variables:
                        return variables
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        pids += map(int, (task / "children").read_text().split())
            time.sleep(0.01)
        raise AssertionError("the launcher started no rank")

    def gate(self, name: str) -> str:
        return str(self._attacker.folder / name)

    def end_of(self, number: int) -> tuple[int, str]:
        """The exit code of the process that was started so many others later, and its errors."""
        process = self._processes[number]
        out, errors = process.communicate(timeout=DEADLINE)
        self._processes.remove(process)
        self.said += out + errors
        return process.returncode, errors

    def ended(self) -> list[dict[str, Any]]:
        """How the ranks ended, by rank."""
        ends = []
        for process in self._processes:
            out, errors = process.communicate(timeout=DEADLINE)
            self.said += out + errors
            # A launcher writes the rank before the line.
            ends += [json.loads(line) for line in re.findall(r'\{"rank".*', out)]
        return sorted(ends, key=lambda end: int(end["rank"]))


PROGRAM = str(ROOT / "tests/programs/attacked.py")
# How a rank of a job under attack may end.
IN_WORDS = {"AuthenticationError", "PeerFailedError", "RendezvousError"}


def check_unharmed(attacker: Attacker, job: Job, *more: str, ranks: int = 2) -> None:
    """No code of his ran, no value was changed unseen, and every rank ended well or in words.

    Args:
        more: Other classes of errors that he can cause.
        ranks: How many at least say how they ended; a launcher ends the others.
    """
    ends = job.ended()
    assert attacker.ran_as() == []
    assert len(ends) >= ranks, job.said
    for end in ends:
        known = {*IN_WORDS, *more} & set(end.get("is", ()))
        assert end["end"] == "fine" or (known and end["text"]), (attacker.events(), end)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

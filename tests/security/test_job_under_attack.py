"""A job of processes with outsiders at every port, in every phase: it goes on, and stays small."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from job_ports import SocketAddress, listening
from transport_ranks import DEADLINE, SECRET, eventually

from cydist.net import auth

SIZE = 3
GROWTH = 8 << 20  # bytes that an attack may cost a rank
LONG = [pytest.mark.long, pytest.mark.timeout(3000)]
AT_ONCE = 60  # connections to each port

RANK = """
import sys
import numpy as np
import cydist as dist
rank, size = int(sys.argv[1]), int(sys.argv[2])
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "init":
        dist.init_process_group(
            "tcp", init_method="tcp://127.0.0.1:" + numbers[0], rank=rank, world_size=size,
            timeout=60,
        )
    elif word == "work":
        for turn in range(int(numbers[0])):
            x = np.arange(1000) * (rank + 1) + turn
            dist.all_reduce(x)
            assert (x == np.arange(1000) * size * (size + 1) // 2 + turn * size).all()
            dist.barrier()
    print(word, flush=True)
"""


class Rank:
    """A rank in a process of its own, told what to do."""

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(SIZE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment,
        )  # fmt: skip

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")

    def heard(self, words: str) -> None:
        """Wait until it has done what it was told."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == words.split()[0] + "\n", "the rank has failed"

    def memory(self) -> int:
        """What it has of the host's memory, in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Attack:
    """Outsiders that come to `places`, say something and leave, again and again.

    Some hang up at once, some when they have been heard out, some say no more and stay.

    Attributes:
        said: How many have been at their end.
    """

    def __init__(self, kind: Callable[[random.Random], bytes]) -> None:
        self.places: list[SocketAddress] = []
        self.said = 0
        self._kind = kind
        self._source = random.Random(5)
        self._selector = selectors.DefaultSelector()
        self._there: dict[SocketAddress, int] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lift(self) -> None:
        """All of them leave."""
        self._stopping = True
        self._thread.join(DEADLINE)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            for place in list(self.places):
                while self._there.setdefault(place, 0) < AT_ONCE:
                    self._come(place)
            for key, _ in self._selector.select(0.05):
                place, unsent = key.data
                if unsent is None:
                    self._listen(key.fileobj, place)
                else:
                    self._talk(key.fileobj, place, unsent)

    def _come(self, place: SocketAddress) -> None:
        outsider = socket.socket()
        outsider.setblocking(False)
        outsider.connect_ex(place)
        self._there[place] += 1
        self._selector.register(outsider, selectors.EVENT_WRITE, (place, self._kind(self._source)))

    def _talk(self, outsider: socket.socket, place: SocketAddress, message: bytes) -> None:
        with contextlib.suppress(OSError):
            outsider.send(message)
        how = self._source.random()
        if how < 0.3:
            self._leave(outsider, place)
            return
        if how < 0.97:
            with contextlib.suppress(OSError):
                outsider.shutdown(socket.SHUT_WR)
        self._selector.modify(outsider, selectors.EVENT_READ, (place, None))

    def _listen(self, outsider: socket.socket, place: SocketAddress) -> None:
        with contextlib.suppress(OSError):
            if outsider.recv(4096):
                return
        self._leave(outsider, place)

    def _leave(self, outsider: socket.socket, place: SocketAddress) -> None:
        self._selector.unregister(outsider)
        outsider.close()
        self._there[place] -= 1
        self.said += 1


WORDS = [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"SSH-2.0-OpenSSH_9.0\r\n", b"\x16\x03\x01\x02"]


def noise(source: random.Random) -> bytes:
    """What scanners and other programs say: nothing, another protocol, anything at all."""
    if source.random() < 0.2:
        return source.choice(WORDS)
    return source.randbytes(source.randint(0, 400))


def near_proof(source: random.Random) -> bytes:
    """What a member said to another greeting, with some of it changed."""
    channel = source.choice([b"store", b"peer"])
    handshake = auth.ClientHandshake(SECRET, channel, "", source.randbytes(10))
    greeting = auth.ServerHandshake(SECRET, channel, "").greeting
    proof = bytearray(handshake.receive(greeting))
    for _ in range(source.randint(0, 3)):
        proof[source.randrange(len(proof))] ^= 1 << source.randrange(8)
    if source.random() < 0.3:
        return bytes(proof[: source.randint(0, len(proof))])
    return bytes(proof) * source.randint(1, 2)


@pytest.fixture(
    params=[
        pytest.param((noise, 2000), id="noise"),
        pytest.param((near_proof, 1000), id="near proofs"),
        pytest.param((noise, 3 * 10**5), id="noise for long", marks=LONG),
        pytest.param((near_proof, 10**5), id="near proofs for long", marks=LONG),
    ]
)
def attack(request: pytest.FixtureRequest) -> Iterator[tuple[Attack, int]]:
    """Outsiders of one kind, and how many make an attack."""
    kind, count = request.param
    made = Attack(kind)
    yield made, count
    made.lift()


def test_job_under_attack(attack: tuple[Attack, int], tmp_path: Path) -> None:
    """Outsiders come to the store before the ranks do, to each rank as soon as it listens, and
    stay: the ranks meet, connect and compute, and none of them grows."""
    outsiders, count = attack
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    environment = {**os.environ, "CYDIST_SECRET_FILE": str(secret)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = probe.getsockname()[1]
    with ExitStack() as stack:
        ranks = [Rank(rank, environment) for rank in range(SIZE)]
        for rank in ranks:
            stack.callback(rank.end)

        def together(words: str) -> None:
            for rank in ranks:
                rank.tell(words)
            for rank in ranks:
                rank.heard(words)

        outsiders.places.append(("127.0.0.1", store))
        ranks[0].tell(f"init {store}")
        eventually(lambda: outsiders.said > 100)
        for rank in ranks[1:]:
            rank.tell(f"init {store}")

        def all_found() -> bool:
            for rank in ranks:
                outsiders.places += listening(rank.process.pid) - set(outsiders.places)
            return len(outsiders.places) == 1 + SIZE

        eventually(all_found)
        for rank in ranks:
            rank.heard("init")
        idle_until = outsiders.said + count // 4
        together("work 1")
        before = [rank.memory() for rank in ranks]
        limit = time.monotonic() + 500
        while outsiders.said < idle_until:  # nobody calls
            assert time.monotonic() < limit
            threading.Event().wait(0.01)
        last = outsiders.said + count
        while outsiders.said < last:
            together("work 100")
        together("work 1")
        growth = [rank.memory() - held for rank, held in zip(ranks, before, strict=True)]
    assert max(growth) < GROWTH

"""The TCP store's server against outsiders, nonsense and floods: the job goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from tcp_proxy import RESET

from cydist.errors import (
    AuthenticationError,
    DistStoreError,
)
from cydist.net import auth
from cydist.net.records import Records
from cydist.stores import TCPStore, tcp_server
from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import (
    MAX_FRAME_BYTES,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Op,
    StoreRequest,
    encode_request,
)

pytestmark = pytest.mark.usefixtures("secret")

HOST = "127.0.0.1"
SECRET = bytes(range(32))
WAIT = 30


def raw(port: int) -> socket.socket:
    """A connection of a outsider."""
    return socket.create_connection((HOST, port), WAIT)


def member(port: int) -> tuple[socket.socket, Records]:
    """A connection that has proved itself, and its records."""
    sock = raw(port)
    shake = auth.authenticate_client(sock, channel=b"store", job="", secret=SECRET)
    return sock, Records(shake, MAX_FRAME_BYTES)


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            data += part
    return data


# Outsiders


def test_other_secret_is_refused_naming_both_hosts(master: TCPStore) -> None:
    """The error names this host, the server, and the remedy; the server goes on."""
    auth.forget_secret()
    auth.set_secret(bytes(32))
    with pytest.raises(AuthenticationError, match="CYDIST_SECRET_FILE") as caught:
        TCPStore(HOST, master.port)
    assert socket.gethostname() in str(caught.value)
    assert f"{HOST}:{master.port}" in str(caught.value)
    master.set("key", "v")
    assert master.get("key") == b"v"


def test_other_job_is_refused(master: TCPStore) -> None:
    """A store of another job of the same user does not let us in."""
    with pytest.raises(AuthenticationError, match="different jobs"):
        TCPStore(HOST, master.port, job="yesterday's")


@pytest.mark.parametrize("seed", range(20))
def test_garbage_costs_a_client_its_connection(master: TCPStore, seed: int) -> None:
    """Random bytes, as many as they are, get the sender closed; members notice nothing."""
    random_bytes = random.Random(seed).randbytes(random.Random(seed).randint(192, 5000))
    with raw(master.port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(random_bytes)
        assert len(read_to_end(sock)) <= 77 + 32
    assert master.add("n", 1) == 1


def test_request_before_the_handshake_is_not_run(master: TCPStore) -> None:
    """A outsider's perfectly formed request changes nothing."""
    request = encode_request(StoreRequest(Op.SET, (b"key",), (b"x" * 300,)))
    with raw(master.port) as sock:
        sock.sendall(request)
        read_to_end(sock)
    assert not master.check(["key"])


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
def test_scanners_that_hang_up_are_forgotten(master: TCPStore, reset: bool) -> None:
    """Connections that close at once leave no descriptor behind in the server."""
    master.set("key", "v")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with raw(master.port) as sock:
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    deadline = time.monotonic() + WAIT
    while len(os.listdir("/proc/self/fd")) > before:
        assert master.check(["key"])
        assert time.monotonic() < deadline
    assert master.get("key") == b"v"


def test_server_survives_without_descriptors() -> None:
    """At its limit of descriptors the server turns newcomers away and serves its members;
    when descriptors are free again, newcomers get in."""
    script = (
        "import os, resource, sys; from cydist.net import auth; auth.set_secret(bytes(range(32)))\n"
        "from cydist.stores import TCPStore; s = TCPStore('127.0.0.1', 0, None, True)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)); held = []\n"
        "print(s.port, flush=True)\n"
        "for line in sys.stdin:\n"
        "    if line == 'fill\\n':\n"
        "        try:\n"
        "            while True: held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "        except OSError: pass\n"
        "    else:\n"
        "        [os.close(fd) for fd in held]\n"
        "    print('done', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        store = TCPStore(HOST, port, timeout=WAIT)
        process.stdin.write(b"fill\n")
        assert process.stdout.readline() == b"done\n"
        with raw(port) as turned_away:
            assert read_to_end(turned_away) == auth.FULL
        assert store.add("n", 1) == 1
        process.stdin.write(b"free\n")
        assert process.stdout.readline() == b"done\n"
        assert TCPStore(HOST, port, timeout=WAIT).add("n", 1) == 2
    finally:
        process.kill()
        process.communicate()


# Members that break the protocol, and limits


@pytest.mark.parametrize(
    "bodies",
    [
        [bytes(MAX_FRAME_BYTES + 1)],
        [b"\xff\xff\xff\xff"],
        [b""],
        [encode_request(StoreRequest(Op.NUM_KEYS))] * 2,
        [encode_request(StoreRequest(Op.QUEUE_POP, (), (), True, 1.0))],
    ],
    ids=["too-long", "malformed", "empty", "two-at-once", "no-queue"],
)
def test_bad_requests_close_that_connection_alone(master: TCPStore, bodies: list[bytes]) -> None:
    """A member's nonsense closes its connection; the store serves every rank else."""
    sock, records = member(master.port)
    with sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"".join(map(records.seal, bodies)))
        read_to_end(sock)
    assert master.add("n", 1) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("k" * (MAX_KEY_BYTES + 1), "v"), ("k", bytes(MAX_VALUE_BYTES + 1))],
    ids=["key", "value"],
)
def test_too_large_is_refused_before_it_is_sent(
    master: TCPStore, key: str, value: str | bytes
) -> None:
    """Limits of keys and values are typed errors that name them; the store stays usable."""
    with pytest.raises(DistStoreError, match="at most"):
        master.set(key, value)
    assert master.list_keys() == []


def test_append_cannot_pass_the_limit(master: TCPStore) -> None:
    """A value cannot grow beyond the limit piece by piece."""
    master.set("key", bytes(MAX_VALUE_BYTES))
    with pytest.raises(DistStoreError, match="more than"):
        master.append("key", "x")
    assert len(master.get("key")) == MAX_VALUE_BYTES


def test_long_replies_are_refused(master: TCPStore) -> None:
    """More than 16 MiB at once is an error that says to ask for fewer keys."""
    names = ["a", "b", "c"]
    for name in names:
        master.set(name, bytes(6 * 1024 * 1024))
    with pytest.raises(DistStoreError, match="fewer keys"):
        master.multi_get(names)
    assert len(master.get("a")) == 6 * 1024 * 1024


def test_full_store_says_so_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its cap the store refuses more, keeps what it has, and takes more after a delete."""
    monkeypatch.setattr(tcp_server, "MAX_TOTAL_BYTES", 10_000)
    with contextlib.closing(TCPStore(HOST, 0, None, True, WAIT)) as store:
        store.set("first", bytes(5_000))
        with pytest.raises(DistStoreError, match="full"):
            store.set("second", bytes(5_000))
        assert store.list_keys() == ["first"]
        store.delete_key("first")
        store.set("second", bytes(5_000))


def test_full_store_serves_the_others(monkeypatch: pytest.MonkeyPatch, master: TCPStore) -> None:
    """A member that fills the store up to its cap gets an error; others read, count and write
    what they had."""
    monkeypatch.setattr(master._refcount.server.table, "limit_bytes", 1_000_000)
    with contextlib.closing(TCPStore(HOST, master.port, timeout=WAIT)) as greedy:
        master.set("mine", "before")
        master.add("count", 1)
        for i in range(19):
            greedy.set(f"greedy/{i}", bytes(50_000))
        with pytest.raises(DistStoreError, match=r"the store is full: \d+ of 1000000 bytes"):
            greedy.set("greedy/19", bytes(50_000))
        assert master.get("mine") == b"before"
        master.set("mine", "after.")
        assert greedy.add("count", 1) == 2


def test_wills_are_bounded(master: TCPStore) -> None:
    """A member cannot leave more than a request's bytes behind for its death."""
    with contextlib.closing(TCPStore(HOST, master.port, timeout=WAIT)) as other:
        other.will("key", bytes(MAX_VALUE_BYTES))
        with pytest.raises(DistStoreError, match=f"at most {MAX_FRAME_BYTES} bytes"):
            other.will("key", bytes(MAX_VALUE_BYTES))
        other.will("key", b"small")


def test_tiny_keys_count_too() -> None:
    """Ten thousand empty values do not fit a table of 100,000 bytes."""
    table = KeyValueTable(100_000)
    taken = 0
    with contextlib.suppress(DistStoreError):
        for i in range(10_000):
            table.execute(StoreRequest(Op.SET, (b"%d" % i,), (b"",)))
            taken = i + 1
    assert 100 < taken < 1_000
    assert table.used_bytes <= 100_000


def test_waiting_costs_no_threads(master: TCPStore) -> None:
    """Fifty requests that wait are parked in one thread of the server."""
    before = threading.active_count()
    waiting = [member(master.port) for _ in range(50)]
    for sock, records in waiting:
        sock.sendall(records.seal(encode_request(StoreRequest(Op.GET, (b"key",), (), True, WAIT))))
    assert threading.active_count() <= before
    master.set("key", "v")
    for sock, _ in waiting:
        assert sock.recv(4)
        sock.close()

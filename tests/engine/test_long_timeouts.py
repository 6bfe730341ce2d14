"""Timeouts of weeks, of years, and without end; and threads that outlive what one round raises."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handshakes import shaken_hands
from transport_ranks import DEADLINE, Ranks, done, eventually

import cydist as dist
from cydist import waiting
from cydist.api import process_groups
from cydist.backends.host.connect_attempt import ConnectAttempt
from cydist.backends.host.connections import Connections
from cydist.errors import DistStoreError, StoreTimeoutError
from cydist.launch.spawn import spawn
from cydist.stores import FileStore, HashStore, TCPStore, tcp
from cydist.stores.protocol import Op, StoreRequest, decode_request, encode_request
from cydist.stores.tcp_server import StoreServer, servers
from cydist.testing import ThreadJob
from cydist.waiting import LONGEST_TIMEOUT, LONGEST_WAIT, LoopGuard, duration, one_wait, seconds

HOST = "127.0.0.1"
# More than epoll's 2^31 ms; what training recipes have; what a socket's 2^32 ms make 0.2 s of; more
# than 64 bits of nanoseconds.
LONG = {
    "25 days": timedelta(days=25),
    "180000000 s": 180_000_000,
    "2**32 ms": 4_294_967.5,
    "1e9 s": 1e9,
    "largest": sys.float_info.max,
    "inf": math.inf,
}
long = pytest.mark.parametrize("timeout", LONG.values(), ids=LONG.keys())


def on_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Call it on a thread; returns a function that gives what it returned, or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE)
        (found,) = outcome
        if isinstance(found, BaseException):
            raise found
        return found

    return result


def server_of(store: TCPStore) -> StoreServer:
    assert store._refcount is not None
    return store._refcount.server


# What a timeout is


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None), (3, 3.0), (0.5, 0.5), (timedelta(minutes=1), 60.0), (10**400, 1e9),
        (math.inf, 1e9), (timedelta.max, 1e9), (np.float32(2), 2.0),
    ],
    ids=str,
)  # fmt: skip
def test_a_timeout_is_converted_once(given: Any, found: float | None) -> None:
    """To seconds, which are at most LONGEST_TIMEOUT."""
    assert seconds(given) == found


@pytest.mark.parametrize("given", [math.nan, -1, -math.inf, timedelta(days=-1)], ids=str)
def test_no_timeout_is_negative_or_nan(given: Any) -> None:
    """ValueError, with what was given and to which call."""
    with pytest.raises(ValueError, match="get: timeout must be 0 seconds or more, not "):
        duration(given, "get")


@pytest.mark.parametrize("given", ["5", b"5", [5], 5j, np.timedelta64(5, "s")], ids=repr)
def test_only_durations_are_timeouts(given: Any) -> None:
    """TypeError for what is none."""
    with pytest.raises(TypeError, match="timeout must be seconds or a timedelta"):
        duration(given)


def test_one_wait_is_an_hour_at_most() -> None:
    """What is longer is waited for in turns."""
    assert [one_wait(left) for left in (0.0, 7.5, LONGEST_TIMEOUT)] == [0.0, 7.5, LONGEST_WAIT]


def test_an_event_is_waited_for_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one turn is not the end of the wait, the end of the timeout is."""
    monkeypatch.setattr(waiting, "LONGEST_WAIT", 0.001)
    event, waits = threading.Event(), []

    class Late:
        def wait(self, limit: float | None) -> bool:
            waits.append(limit)
            return len(waits) == 3

    assert waiting.wait_for(Late(), 60.0)  # type: ignore[arg-type]
    assert waits == [0.001] * 3
    assert not waiting.wait_for(event, 0.003)


# Stores


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path, secret: bytes) -> Iterator[Any]:
    """Each kind of store, with a timeout of its own that is short."""
    make: dict[str, Callable[[], Any]] = {
        "tcp": lambda: TCPStore(HOST, 0, None, True, DEADLINE),
        "file": lambda: FileStore(str(tmp_path / "store"), 1, DEADLINE),
        "hash": lambda: HashStore(DEADLINE),
    }
    made = make[request.param]()
    yield made
    if request.param != "hash":
        made.close()


@long
def test_a_key_is_waited_for(store: Any, timeout: Any) -> None:
    """Through get and wait, until it is there; nothing ends but the wait."""
    other = store.clone()
    other.set_timeout(timeout)
    found, waited = on_thread(lambda: other.get("a")), on_thread(lambda: store.wait(["b"], timeout))
    if isinstance(store, TCPStore):
        eventually(lambda: len(server_of(store)._parked) == 2)
    store.set("a", "there")
    store.set("b", "")
    assert (found(), waited()) == (b"there", None)
    if hasattr(other, "close"):
        other.close()


@long
def test_a_store_is_made(timeout: Any, secret: bytes) -> None:
    """The master waits for its worker, who joins the store."""
    with socket.create_server((HOST, 0)) as held:
        port = held.getsockname()[1]
    master = on_thread(lambda: TCPStore(HOST, port, 2, True, timeout))
    eventually(lambda: any(server.port == port and server._parked for server in servers))
    with closing(TCPStore(HOST, port, 2, False, timeout)) as worker, closing(master()) as served:
        worker.set("key", "value")
        assert served.get("key") == b"value"


class OneRound:
    """A socket on which one wait passes before anything happens."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def fileno(self) -> int:
        return -1

    def settimeout(self, limit: float) -> None:
        self.limits.append(limit)

    def recv(self, count: int) -> bytes:
        if len(self.limits) < 2:
            raise TimeoutError("timed out")
        return b"x" * count

    def send(self, data: memoryview) -> int:
        if len(self.limits) < 2:
            raise TimeoutError("timed out")
        return len(data)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_socket_waits_an_hour_at_a_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hands a socket's timeout to poll in 32 bits; its end is not the deadline's."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "inf")  # else it looks at the host meanwhile
    sock: Any = OneRound()
    deadline = time.monotonic() + LONGEST_TIMEOUT
    connection = tcp._Connection(sock, shaken_hands()[1])
    if way == "send":
        connection.send(b"xyz", deadline)
    else:
        assert connection._exactly(3, deadline) == b"xxx"
    assert sock.limits == [LONGEST_WAIT] * 2


def sent(body: bytes, timeout: bytes) -> bytes:
    """A request with another timeout."""
    head = 10  # operation, block, keys, values
    return body[:head] + timeout + body[head + 8 :]


@pytest.mark.parametrize("limit", [2.2e6, sys.float_info.max, math.inf, math.nan, -1.0], ids=str)
def test_no_timeout_of_a_member_ends_the_store(master: TCPStore, limit: float) -> None:
    """Whatever a request says, as no client of cydist says it, other members are served."""
    import struct

    plain = encode_request(StoreRequest(Op.WAIT, (b"never",), (), True, 1.0))
    connection = master._pool.acquire(time.monotonic() + DEADLINE)
    with closing(connection):
        sock = connection._sock
        sock.sendall(connection._records.seal(sent(plain, struct.pack("<d", limit))))
        if 0 <= limit < math.inf:
            eventually(lambda: server_of(master)._parked)
        else:
            sock.settimeout(DEADLINE)
            assert sock.recv(1) == b""
        master.set("a", "b")
        assert master.get("a") == b"b"


def test_a_requests_timeout_is_bounded() -> None:
    """As it is decoded, so that no deadline can be made of it that no clock holds."""
    request = encode_request(StoreRequest(Op.WAIT, (b"a",), (), True, 1e300))
    assert decode_request(request).timeout == LONGEST_TIMEOUT


# Jobs


@long
def test_ranks_meet_and_call(timeout: Any, secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1 in the store; then all calls that wait have the same timeout."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    with socket.create_server((HOST, 0)) as held:
        port = held.getsockname()[1]
    may_call = threading.Event()

    def rank(number: int) -> list[Any]:
        process_groups.thread_is_rank()
        dist.init_process_group(
            "tcp", f"tcp://{HOST}:{port}", rank=number, world_size=2, timeout=timeout
        )
        if number == 1:
            may_call.wait(DEADLINE)
        group = dist.new_group([0, 1], timeout=timeout)
        x = np.full(3, number + 1)
        work = dist.all_reduce(x, async_op=True, timeout=timeout)
        work.wait(timeout)
        dist.barrier(group, timeout=timeout)
        dist.monitored_barrier(timeout=timeout)
        if number == 0:
            dist.recv(x, 1, timeout=timeout)
        else:
            dist.send(x + 1, 0, timeout=timeout)
        dist.destroy_process_group()
        return x.tolist()

    first = on_thread(lambda: rank(0))
    eventually(lambda: any(server.port == port and server._parked for server in servers))
    second = on_thread(lambda: rank(1))
    eventually(lambda: not any(server.port == port and server._parked for server in servers))
    may_call.set()
    assert (first(), second()) == ([4] * 3, [3] * 3)


@long
@pytest.mark.parametrize("backend", ["inproc", "tcp", "derived"])
def test_a_groups_timeout_can_be_set(
    thread_job: Callable[..., ThreadJob], backend: str, timeout: Any
) -> None:
    """Later calls have it, on the short way too: compiled code makes nanoseconds of it."""
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout

    def body(rank: int) -> float:
        group = dist.new_group()
        group.timeout = limit
        x = np.ones(2)
        dist.all_reduce(x, group=group)
        dist.barrier(group)
        return float(x.sum())

    assert thread_job(2, backend).run(body) == [4.0, 4.0]


@long
def test_a_bodys_timeout(thread_job: Callable[..., ThreadJob], timeout: Any) -> None:
    """The test's job of threads takes them as well."""
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    assert thread_job(2, timeout=limit).run(lambda rank: rank, timeout=limit) == [0, 1]


@long
def test_a_work_of_a_third_party(timeout: Any) -> None:
    """That some thread ends, and whose timeout is the group's."""
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    work = dist.EventWork("send", limit)
    waited = on_thread(lambda: work.wait(timeout))
    work.end()
    assert waited()


@long
def test_a_group_of_torchs(timeout: Any) -> None:
    """torch's own type has no more than a timedelta; ddp_timeout=180000000 is usual."""
    import torch
    from torch_thread_job import Job

    limit = timeout if isinstance(timeout, timedelta) else timedelta.max
    if not isinstance(timeout, timedelta) and timeout < timedelta.max.total_seconds():
        limit = timedelta(seconds=timeout)
    job = Job(2, limit)

    def body(group: Any) -> float:
        group._set_default_timeout(limit)
        x = torch.ones(2)
        group.allreduce([x]).wait(limit)
        return float(x.sum())

    try:
        assert job.run(body) == [4.0, 4.0]
    finally:
        job.close()


def finish(rank: int, path: str) -> None:
    """A spawned rank, which ends when the test lets it."""
    end = time.monotonic() + DEADLINE
    while not os.path.exists(path) and time.monotonic() < end:
        threading.Event().wait(0.002)


@long
def test_joining_spawned_ranks(tmp_path: Path, timeout: Any) -> None:
    """join waits as long as it takes."""
    go = tmp_path / "go"
    running = spawn(finish, (str(go),), 1, join=False, start_method="fork")
    assert running is not None
    joined = on_thread(lambda: running.join(timeout, timeout))
    go.touch()
    assert joined()


def test_joining_ends_after_its_timeout(tmp_path: Path) -> None:
    """False, and the ranks go on."""
    go = tmp_path / "go"
    running = spawn(finish, (str(go),), 1, join=False, start_method="fork")
    assert running is not None
    assert not running.join(0.0)
    assert not running.join(0.01)
    go.touch()
    assert running.join(DEADLINE)


# Threads that serve


class Broken(Exception):
    """What a round raises here."""


class Once:
    """Raises once in the place of `real`, then calls it."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.raised = threading.Event()

    def __call__(self, *args: Any, **more: Any) -> Any:
        if not self.raised.is_set():
            self.raised.set()
            raise Broken("injected")
        return self.real(*args, **more)


def said(err: str, thread: str) -> bool:
    """Was it told once, of this thread, with what was raised and where?"""
    return (
        err.count(f"cydist: {thread} goes on after an exception") == 1
        and err.count("Broken: injected") == 1
        and "test_long_timeouts.py" in err
    )


def replace_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Once:
    once = Once(getattr(owner, name))
    monkeypatch.setattr(owner, name, once)
    return once


@pytest.mark.parametrize("place", ["_until_next", "_ring_alarms", "_carry_out_wills", "acceptor"])
def test_the_stores_thread_survives_a_round(
    master: TCPStore, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It serves members that were there and new ones, and says what happened."""
    server = server_of(master)
    once = replace_once(
        monkeypatch, *((server._acceptor, "react") if place == "acceptor" else (server, place))
    )
    with closing(TCPStore(HOST, master.port, timeout=DEADLINE)) as newcomer:
        newcomer.set("a", "b")
        assert once.raised.wait(DEADLINE)
        newcomer.set("c", "d")
        assert master.multi_get(["a", "c"]) == [b"b", b"d"]
    assert said(capfd.readouterr().err, "thread cydist-store")


@pytest.mark.parametrize("place", ["missing", "awaits"])
def test_one_connections_trouble_is_its_own(
    master: TCPStore, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At its alarm, and when another one sets its key: others are served, and it is told."""
    server = server_of(master)
    with closing(TCPStore(HOST, master.port, timeout=DEADLINE)) as other:
        waits = on_thread(lambda: other.wait(["a"], 0.05 if place == "missing" else DEADLINE))
        if place == "awaits":
            eventually(lambda: server._parked)
            real, table = server.table.awaits, server.table

            def awaits(request: StoreRequest, start: int) -> Any:
                if request.op is Op.WAIT:
                    raise Broken("injected")
                return real(request, start)

            monkeypatch.setattr(table, "awaits", awaits)
        else:
            replace_once(monkeypatch, server.table, place)
            with pytest.raises(DistStoreError):
                waits()
        master.set("a", "b")
        if place == "awaits":
            with pytest.raises(DistStoreError):
                waits()
        assert master.get("a") == b"b"
    assert said(capfd.readouterr().err, "thread cydist-store")


def test_a_store_that_serves_nothing_ends(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members learn of it, and do not wait until their timeouts."""
    monkeypatch.setattr(waiting, "LONGEST_REST", 0.0)
    ended: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    server = server_of(master)

    def broken() -> float:
        raise Broken("injected")

    monkeypatch.setattr(server, "_until_next", broken)
    with pytest.raises(DistStoreError, match="lost the store"):
        master.wait(["a"], DEADLINE)
    eventually(lambda: bool(ended))
    assert [each.exc_type for each in ended] == [Broken]


@pytest.mark.parametrize("place", ["_react", "_start_requested", "_expire"])
def test_a_connections_thread_survives_a_round(
    place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks connect after it."""
    raised: list[Connections] = []
    real: Callable[..., Any] = getattr(Connections, place)

    def once(self: Connections, *args: Any) -> Any:
        if not raised and self._rank == 0 and self._peers:
            raised.append(self)
            raise Broken("injected")
        return real(self, *args)

    monkeypatch.setattr(Connections, place, once)
    with closing(Ranks("tcp", 2)) as ranks:
        a, b = ranks.group()
        got = np.zeros(3)
        receive = b.irecv(got, 0, 0)
        done(a.isend(np.arange(3.0), 1, 0), receive)
        assert got.tolist() == [0, 1, 2]
        assert raised
    assert said(capfd.readouterr().err, "thread cydist-connections-0")


def test_what_a_link_asks_for_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says once which connection it wants, in the round that raises too."""
    raised: list[ConnectAttempt] = []
    real = ConnectAttempt.__init__

    def once(self: ConnectAttempt, *args: Any) -> None:
        if not raised:
            raised.append(self)
            raise Broken("injected")
        real(self, *args)

    monkeypatch.setattr(ConnectAttempt, "__init__", once)
    with closing(Ranks("tcp", 2)) as ranks:
        a, b = ranks.group()
        got = np.zeros(3)
        done(a.isend(np.arange(3.0), 1, 0), b.irecv(got, 0, 0))
        assert got.tolist() == [0, 1, 2]
    assert "Broken: injected" in capfd.readouterr().err


# LoopGuard


def test_a_kind_is_told_once_and_rests_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind: a type at a line. The rest grows while rounds raise, and begins again."""
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    told: list[str] = []
    guard = LoopGuard("thread x", told.append)
    for raises in [True] * 6 + [False, True]:
        with guard:
            if raises:
                raise Broken("injected")
    with guard:
        raise KeyError("another")
    assert [text.split()[-1] for text in told] == ["injected", "'another'"]
    assert rests == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.01, 0.02]


def test_interrupts_are_let_through() -> None:
    """What is no Exception ends a loop, as ever."""
    guard = LoopGuard("thread x", lambda text: None)
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt


def test_a_noted_error_never_ends_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other events of the round were served; but it rests."""
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    told: list[str] = []
    guard = LoopGuard("thread x", told.append)
    error = Broken("injected")
    for _ in range(3 * waiting.MOST_IN_A_ROW):
        with guard:
            guard.record(error)
    assert (len(told), len(rests)) == (1, 3 * waiting.MOST_IN_A_ROW)


def test_that_it_cannot_be_said_ends_nothing() -> None:
    """As where stderr is closed."""

    def closed(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    guard = LoopGuard("thread x", closed)
    with guard:
        raise Broken("injected")


def test_a_wait_still_ends(master: TCPStore) -> None:
    """A short timeout is as short as ever."""
    with pytest.raises(StoreTimeoutError, match=r"timeout after 0\.01 s waiting for 'never'"):
        master.wait(["never"], 0.01)

"""TCPStore: how it starts, and what a dead, stopped or wrong server means to a client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.api import process_groups
from cydist.errors import (
    DistNetworkError,
    DistStoreError,
    StoreTimeoutError,
)
from cydist.net import auth
from cydist.stores import MembershipStore, TCPStore, listen, server_refcount
from cydist.stores.tcp import _Pool

pytestmark = pytest.mark.usefixtures("secret")

HOST = "127.0.0.1"
WAIT = 30


def server_process(
    code: str = "import signal; signal.pause()", before: str = ""
) -> tuple[subprocess.Popen[bytes], int]:
    """A process that serves a store, and its port."""
    script = (
        f"import sys; from cydist.net import auth; auth.set_secret(bytes(range(32)))\n{before}\n"
        "from cydist.stores import TCPStore; s = TCPStore('127.0.0.1', 0, None, True)\n"
        f"print(s.port, flush=True)\n{code}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture
def remote() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    process, port = server_process()
    yield process, port
    process.kill()
    process.communicate()


# Construction


def test_port_zero_finds_one(master: TCPStore) -> None:
    """The port that the system chose is in `port`, the host asked for in `host`."""
    assert master.port > 0
    assert master.host == HOST


def test_client_may_not_ask_for_port_zero() -> None:
    """Only a master can be given any port."""
    with pytest.raises(ValueError, match="port"):
        TCPStore(HOST, 0)


def test_client_waits_for_its_server() -> None:
    """A client that is early finds the server that comes later."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(TCPStore(HOST, port).get("key")))
    thread.start()
    with contextlib.closing(TCPStore(HOST, port, None, True)) as store:
        store.set("key", "v")
        thread.join(WAIT)
    assert found == [b"v"]


def test_nobody_there_is_a_timeout() -> None:
    """Without a server the client gives up at its timeout and names the address."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound, not listening: refused
        port = taken.getsockname()[1]
        with pytest.raises(StoreTimeoutError, match=rf"{HOST}:{port}: timeout"):
            TCPStore(HOST, port, timeout=0.1)


def test_taken_port_is_named_at_once(master: TCPStore) -> None:
    """A second master on the port fails and says which port is taken."""
    with pytest.raises(DistNetworkError, match=f"port {master.port} .*in use"):
        TCPStore(HOST, master.port, None, True)


def test_foreign_address_is_an_error() -> None:
    """A master must run where its address is."""
    with pytest.raises(DistNetworkError, match="not an address of this host"):
        TCPStore("192.0.2.77", 0, None, True)


def test_only_the_address_asked_for_is_bound(master: TCPStore) -> None:
    """/proc/net shows one listener on the port, on 127.0.0.1, and none on IPv6."""
    listening = "0A"
    shown = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == listening and line.split()[1].endswith(f":{master.port:04X}")
    ]
    assert shown == [f"0100007F:{master.port:04X}"]


def test_master_waits_for_its_workers() -> None:
    """The master returns when world_size stores are there."""
    ports: list[int] = []
    listener = socket.socket()
    listener.bind((HOST, 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(
        target=lambda: ports.append(
            TCPStore(HOST, port, 3, True, WAIT, master_listen_fd=listener.detach()).port
        )
    )
    thread.start()
    clients = [TCPStore(HOST, port, 3) for _ in range(2)]
    thread.join(WAIT)
    assert ports == [port]
    assert len(clients) == 2


def test_missing_workers_are_counted() -> None:
    """A master that waits in vain says how many came, which processes, and how ranks are named."""
    with pytest.raises(StoreTimeoutError, match=r"timeout after 0.3 s: 1 of 3 users") as caught:
        TCPStore(HOST, 0, 3, True, 0.3)
    assert f"(process {os.getpid()} on {socket.gethostname()})" in str(caught.value)
    assert "init_process_group names missing ranks" in str(caught.value)


def test_a_waiting_master_says_who_has_joined(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints that while it waits, and goes on waiting."""
    monkeypatch.setattr("cydist.waiting.FIRST_NOTICE", 0.1)
    with pytest.raises(StoreTimeoutError, match="timeout after 1 s"):
        TCPStore(HOST, 0, 2, True, 1)
    said = capfd.readouterr().err
    assert "for the users of the TCPStore on" in said
    assert f"1 of 2 users have joined (process {os.getpid()} on {socket.gethostname()})" in said


def test_master_need_not_wait() -> None:
    """wait_for_workers=False returns at once."""
    TCPStore(HOST, 0, 5, True, WAIT, wait_for_workers=False).close()


def test_listening_socket_is_used() -> None:
    """A bound socket that is passed in serves the store."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    port = listener.getsockname()[1]
    with contextlib.closing(
        TCPStore(HOST, port, None, True, master_listen_fd=listener.detach())
    ) as store:
        assert TCPStore(HOST, port).add("n", 1) == 1
        assert store.get("n") == b"1"


def test_listening_socket_must_have_the_port() -> None:
    """A socket that is bound elsewhere is refused, and stays the caller's."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        with pytest.raises(ValueError, match="bound to port"):
            TCPStore(HOST, 1, None, True, master_listen_fd=listener.fileno())
        assert listener.getsockname()[0] == HOST


def test_several_stores_share_a_server(master: TCPStore) -> None:
    """With multi_tenant several masters of one process serve one port; the last closes it."""
    first = TCPStore(HOST, 0, None, True, multi_tenant=True)
    second = TCPStore(HOST, first.port, None, True, multi_tenant=True)
    first.set("key", "v")
    assert second.get("key") == b"v"
    first.close()
    assert second.get("key") == b"v"
    second.close()
    with pytest.raises(StoreTimeoutError):
        TCPStore(HOST, second.port, timeout=0.1)


@pytest.mark.parametrize("multi_tenant", [False, True])
def test_store_closes_while_another_is_made(
    monkeypatch: pytest.MonkeyPatch, multi_tenant: bool
) -> None:
    """Closing, which garbage collection does on any thread, waits for no store in the making."""
    old = TCPStore(HOST, 0, None, True, multi_tenant=multi_tenant)
    serve = server_refcount.StoreServer

    def server(*arguments: Any) -> server_refcount.StoreServer:
        closer = threading.Thread(target=old.close)
        closer.start()
        closer.join(WAIT)
        assert not closer.is_alive()
        return serve(*arguments)

    monkeypatch.setattr(server_refcount, "StoreServer", server)
    TCPStore(HOST, 0, None, True, multi_tenant=multi_tenant).close()


def test_closed_store_says_so(master: TCPStore) -> None:
    """A call after close is a typed error."""
    client = TCPStore(HOST, master.port)
    client.close()
    with pytest.raises(DistStoreError, match="closed"):
        client.get("key")


# Servers that fail


CALLS: dict[str, Callable[[TCPStore], object]] = {
    "set": lambda store: store.set("key", "v"),
    "get": lambda store: store.get("key"),
    "add": lambda store: store.add("key", 1),
    "check": lambda store: store.check(["key"]),
    "wait": lambda store: store.wait(["key"]),
    "delete_key": lambda store: store.delete_key("key"),
    "num_keys": lambda store: store.num_keys(),
    "compare_set": lambda store: store.compare_set("key", "", "v"),
    "append": lambda store: store.append("key", "v"),
    "multi_get": lambda store: store.multi_get(["key"]),
    "multi_set": lambda store: store.multi_set(["key"], ["v"]),
    "queue_push": lambda store: store.queue_push("key", "v"),
    "queue_pop": lambda store: store.queue_pop("key"),
    "queue_len": lambda store: store.queue_len("key"),
    "list_keys": lambda store: store.list_keys(),
    "watch": lambda store: store.watch("key", b"", ["other"], store.timeout),
    "will": lambda store: store.will("key", "v"),
}


def test_dead_server_is_an_error(remote: tuple[subprocess.Popen[bytes], int]) -> None:
    """After the server's death no operation is reported as done, be its connection an old or a
    new one; the error says that the store did not answer."""
    process, port = remote
    stores = {name: TCPStore(HOST, port, timeout=WAIT) for name in CALLS}
    process.kill()
    process.wait()
    for _ in range(2):
        for name, store in stores.items():
            with pytest.raises(DistStoreError, match="lost the store") as caught:
                CALLS[name](store)
            assert not caught.value.answered


def test_waiting_clients_learn_of_the_servers_death(
    remote: tuple[subprocess.Popen[bytes], int],
) -> None:
    """A get that is waiting ends with the server, long before its timeout."""
    process, port = remote
    store = TCPStore(HOST, port, timeout=3600)
    store.set("waiting", "")
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(DistStoreError, match="lost the store"):
        store.get("never")
    killer.join()


@pytest.mark.parametrize("call", ["set", "get"])
def test_stopped_server_is_a_timeout(
    remote: tuple[subprocess.Popen[bytes], int], call: str
) -> None:
    """A server that is stopped costs the timeout, on idle and on new connections."""
    process, port = remote
    store = TCPStore(HOST, port, timeout=0.2)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    started = time.monotonic()
    for _ in range(2):  # the second call needs a new connection
        with pytest.raises(DistStoreError):
            store.set("key", "v") if call == "set" else store.get("key")
    assert time.monotonic() - started < WAIT  # a hang, not a speed, is what this rules out
    process.send_signal(signal.SIGCONT)
    store.set_timeout(WAIT)
    store.set("key", "after")
    assert store.get("key") == b"after"


def test_nobody_hangs_up_on_a_stopped_server(
    remote: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits in a meeting, and does something meanwhile, goes on to wait where it is: knocking
    again, all ranks would fill what the kernel keeps of connections, and give the store up."""
    process, port = remote
    here = MembershipStore("meeting", TCPStore(HOST, port, timeout=WAIT), range(2))
    here.set_timeout(0.5)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    knocks = []
    monkeypatch.setattr(_Pool, "connect", lambda *about, **how: knocks.append(about))
    monkeypatch.setattr(here, "set", lambda key, value: None)  # said before
    with pytest.raises(StoreTimeoutError, match="stopped") as caught:
        here.meet("topic", 0, range(2), meanwhile=lambda: None)
    assert not caught.value.answered
    assert not knocks
    process.send_signal(signal.SIGCONT)


def test_stopped_server_reports_nothing_as_done(
    remote: tuple[subprocess.Popen[bytes], int],
) -> None:
    """Every operation on a store whose server is stopped ends as an error."""
    process, port = remote
    stores = {name: TCPStore(HOST, port, timeout=0.2) for name in CALLS}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    outcomes: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            outcomes[name] = CALLS[name](stores[name])
        except DistStoreError as error:
            outcomes[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in CALLS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert {name: type(outcome) for name, outcome in outcomes.items()} == dict.fromkeys(
        CALLS, StoreTimeoutError
    )
    assert not any(outcome.answered for outcome in outcomes.values())


def test_groups_need_no_store_once_made(remote: tuple[subprocess.Popen[bytes], int]) -> None:
    """A group that is formed runs 1,000 more collectives after the store's server was killed,
    also between ranks that had not spoken before, and so does a group made of its members."""
    process, port = remote
    formed, killed = threading.Barrier(4, timeout=WAIT), threading.Barrier(4, timeout=WAIT)
    sums: list[float] = []

    def rank(number: int) -> None:
        process_groups.thread_is_rank()
        store = TCPStore(HOST, port, timeout=WAIT)
        dist.init_process_group("tcp", store=store, rank=number, world_size=3, timeout=WAIT)
        formed.wait()
        killed.wait()
        x = np.ones(3)
        for _ in range(1000):
            x[:] = 1
            dist.all_reduce(x)
        pair = dist.new_group([0, 2])
        if number != 1:
            dist.all_reduce(x, group=pair)
        sums.append(float(x.sum()))
        dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    formed.wait()
    process.kill()
    process.wait()
    killed.wait()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(sums) == [9.0, 18.0, 18.0]


def test_interrupt_ends_a_wait() -> None:
    """Ctrl-C in a get raises KeyboardInterrupt; the process exits, and with its own code."""
    process, _ = server_process(
        "s.set('x', ''); print('ready', flush=True)\n"
        "try:\n    s.get('never')\nexcept KeyboardInterrupt:\n"
        "    s.set('still', 'works'); sys.exit(7 if s.get('still') == b'works' else 8)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT)
    # The signal may come before the wait begins; then the process ends by it.
    assert process.returncode in (7, -signal.SIGINT)


@pytest.mark.parametrize(
    "banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["http", "closes"]
)
def test_wrong_service_is_recognised(banner: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another service on the port is called so, not waited for."""
    monkeypatch.setattr("cydist.stores.tcp._CLOSED_LIMIT", 0.05)
    with socket.create_server((HOST, 0)) as other:

        def serve() -> None:
            while True:
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(banner)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(DistStoreError, match="not a cydist store"):
            TCPStore(HOST, other.getsockname()[1], timeout=WAIT)
        other.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT)


def test_silent_service_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that waits for us to speak is given up after the handshake's deadline."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.05)
    with (
        socket.create_server((HOST, 0)) as other,
        pytest.raises(DistStoreError, match="not a cydist store"),
    ):
        TCPStore(HOST, other.getsockname()[1], timeout=WAIT)


@pytest.mark.parametrize("end", ["pass", "del s", "raise SystemExit(3)"])
def test_server_lingers_for_those_who_are_connected(end: str) -> None:
    """When the master's program is over, the others finish what they are at; the port is free
    at once, and the process ends with the last of them, with its own exit code."""
    process, port = server_process(
        f"s.set('key', 'v'); sys.stdin.read()\n{end}",
        before="import cydist.stores.tcp as t; t._LINGER = 60",
    )
    client = TCPStore(HOST, port, timeout=WAIT)
    assert process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + WAIT
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            socket.create_connection((HOST, port)).close()
    TCPStore(HOST, port, None, True).close()
    assert client.get("key") == b"v"
    client.close()
    assert process.wait(WAIT) == (3 if "3" in end else 0)
    assert process.stdout is not None
    process.stdout.close()


def test_own_name_is_reachable_from_outside() -> None:
    """A host whose name means loopback on itself listens where others find it, too."""
    name = socket.gethostname()
    with contextlib.closing(TCPStore(name, 0, None, True)) as store:
        bound = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        outer = listen.outer_address(name, str(bound)) or name
        client = TCPStore(outer, store.port, timeout=WAIT)
        assert client.add("n", 1) == 1
        client.close()


# Fork


def test_forked_child_has_connections_of_its_own(master: TCPStore) -> None:
    """A child may use the parent's client; the parent's connections are undisturbed."""
    client = TCPStore(HOST, master.port, timeout=WAIT)
    client.add("n", 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if client.add("n", 1) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert client.add("n", 1) == 3


def test_forked_child_does_not_keep_the_port() -> None:
    """The port is free when the master closes, whatever its children do."""
    store = TCPStore(HOST, 0, None, True)
    gate_out, gate_in = os.pipe()
    running_out, running_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_in)
        os.write(running_in, b"x")
        os.read(gate_out, 1)
        os._exit(0)
    assert os.read(running_out, 1) == b"x"
    for fd in (gate_out, running_out, running_in):
        os.close(fd)
    port = store.port
    store.close()
    TCPStore(HOST, port, None, True).close()
    os.close(gate_in)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("third", "fourth"), [(True, timedelta(seconds=30)), (True, True), (1, 30)], ids=str
)
def test_arguments_in_the_wrong_place_are_refused(third: Any, fourth: Any) -> None:
    """The first documentation of torch's TCPStore left world_size out."""
    with pytest.raises(TypeError, match="third and fourth argument"):
        TCPStore("localhost", 0, third, fourth)


def test_libuv_is_not_used() -> None:
    """torch's programs ask."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert store.libuvBackend is False

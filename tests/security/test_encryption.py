"""CYDIST_ENCRYPT=1: every socket of the job is encrypted, or the job does not start."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from handshakes import KEY, SECRET, ciphers, record_pair, shake_hands, shaken_hands
from relayed_links import RelayedLinks
from tcp_proxy import NetworkFaults, Proxy
from transport_ranks import DEADLINE, Group, done, eventually, run, soon, status_of

from cydist import _native
from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import Connections
from cydist.backends.host.peer_report import PeerReport
from cydist.errors import AuthenticationError, DistError, UnsupportedError
from cydist.groups import registry
from cydist.net import auth, interfaces
from cydist.net.encryption import check_encryption
from cydist.stores import HashStore, TCPStore

TEXT = b"the elements of an array" * 3
RECORD = 65536  # bytes that the longest sealed record carries
OVERHEAD = 20  # its length and tag
JOINED = 16384  # bytes of data that travel in one record with their frame's header
HEADER = 104


@pytest.fixture(autouse=True)
def encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYDIST_ENCRYPT", "1")
    check_encryption()


@contextlib.contextmanager
def keys_last(blocks: int) -> Iterator[None]:
    """Keys of connections that are made meanwhile seal so many blocks."""
    before = _native.change_keys_after(blocks)
    yield
    _native.change_keys_after(before)


@pytest.fixture
def every_thousand() -> Iterator[None]:
    """Keys serve for a thousand short frames."""
    with keys_last(1000 * blocks_of(HEADER + 8)):
        yield


def blocks_of(nbytes: int) -> int:
    """How many blocks count for a record that carries so many bytes."""
    return nbytes // 16 + 3


class Wire(RelayedLinks):
    """Two links, and between them a relay that keeps what it carries.

    Args:
        change: What becomes of the bytes that rank 0 sends.
    """

    def __init__(self, change: Callable[[bytes], bytes] = bytes, *, encrypts: bool = True) -> None:
        self.seen = bytearray()
        self._change = change
        super().__init__(ciphers() if encrypts else (None, None))

    def carry(self, sender: int, source: socket.socket, sink: socket.socket) -> None:
        while part := source.recv(65536):
            self.seen += part
            sink.sendall(self._change(part) if sender == 0 else part)


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """Makes a wire by its attack."""
    made: list[Wire] = []

    def make(change: Callable[[bytes], bytes] = bytes, *, encrypts: bool = True) -> Wire:
        made.append(Wire(change, encrypts=encrypts))
        return made[-1]

    yield make
    for each in made:
        each.close()


# The handshake


def test_both_sides_agree_on_a_cipher() -> None:
    """After the handshake each opens what the other has sealed."""
    server, client = shaken_hands()
    assert server.cipher is not None
    assert client.cipher is not None
    assert server.cipher.open(client.cipher.seal(TEXT)) == TEXT
    assert client.cipher.open(server.cipher.seal(TEXT)) == TEXT


def test_keys_are_of_one_connection() -> None:
    """Another connection of the same two processes opens nothing of this one."""
    first, second = shaken_hands(), shaken_hands()
    assert first[1].cipher is not None
    assert second[0].cipher is not None
    with pytest.raises(ValueError, match="not the next one"):
        second[0].cipher.open(first[1].cipher.seal(TEXT))


def test_a_handshake_needs_the_key() -> None:
    """Two sides with different keys do not complete TLS's handshake."""
    client, server = _native.TlsHandshake(KEY, False), _native.TlsHandshake(bytes(32), True)
    with pytest.raises(ValueError, match="does not hold"):
        client.receive(server.receive(client.receive(b"")))
    assert client.cipher is None
    assert server.cipher is None


# Bytes that RFC 8446 (5.1) says to ignore, by message: the version in the head of the first record.
IGNORED = {1: (198, 199), 2: (1, 2)}


@pytest.mark.parametrize("message", range(5))
def test_a_changed_byte_of_the_handshake_is_refused(message: int) -> None:
    """Whichever byte of whichever message is changed, no connection comes of it."""
    rng = random.Random(message)
    lengths: list[int] = []

    def attempt(place: int | None) -> None:
        count = 0

        def change(data: bytes) -> bytes:
            nonlocal count
            if not data:
                return data
            count += 1
            if place is None:
                lengths.append(len(data))
            elif count == message + 1:
                changed = bytearray(data)
                changed[place] ^= 1 << rng.randrange(8)
                return bytes(changed)
            return data

        server = auth.ServerHandshake(SECRET, b"store", "")
        shake_hands(server, auth.ClientHandshake(SECRET, b"store", ""), change)

    attempt(None)
    assert len(lengths) == 5
    for place in sorted(set(range(lengths[message])) - set(IGNORED.get(message, ()))):
        # A longer length makes a side wait for what does not come: its deadline ends that.
        with pytest.raises((DistError, OSError, AssertionError)):
            attempt(place)


@pytest.mark.parametrize("on_server", [True, False], ids=["server", "client"])
def test_one_sided_encryption_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, on_server: bool
) -> None:
    """Both sides say which variable differs, and to what."""
    monkeypatch.setenv("CYDIST_ENCRYPT", str(int(on_server)))
    server = auth.ServerHandshake(SECRET, b"store", "")
    monkeypatch.setenv("CYDIST_ENCRYPT", str(int(not on_server)))
    client = auth.ClientHandshake(SECRET, b"store", "")
    on, off = (int(on_server), int(not on_server))
    with pytest.raises(AuthenticationError, match=f"CYDIST_ENCRYPT is {on} there and {off} here"):
        client.receive(server.greeting)
    with pytest.raises(AuthenticationError, match=f"CYDIST_ENCRYPT is {off} there and {on} here"):
        server.receive(client.refusal)


def test_the_other_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's refusal comes where a record of TLS is expected, and is read as one."""
    server = auth.ServerHandshake(bytes(32), b"store", "")
    client = auth.ClientHandshake(SECRET, b"store", "")
    answer = client.receive(server.greeting)
    with pytest.raises(AuthenticationError, match="do not share one secret"):
        server.receive(answer[: server.needs])
    client.receive(server.refusal[: client.needs])
    with pytest.raises(AuthenticationError, match="do not share one secret"):
        client.receive(server.refusal[-client.needs :])


def test_no_key_comes_from_the_secret_alone() -> None:
    """A client offers its pre-shared key only together with a Diffie-Hellman exchange, so that a
    secret that is learnt later opens nothing that was recorded."""
    hello = _native.TlsHandshake(KEY, False).receive(b"")
    extensions = extensions_of(hello)
    modes, shares = extensions[45], extensions[51]  # RFC 8446, 4.2
    assert modes == bytes([1, 1])  # one mode, psk_dhe_ke
    assert int.from_bytes(shares[:2], "big") == len(shares) - 2 > 32


@pytest.mark.parametrize("message", [2, 3, 4], ids=["hello", "answer", "finished"])
def test_changed_tls_is_told_to_the_other_side(message: int) -> None:
    """Both sides say that TLS's handshake failed: the one that found it, and the one that was
    refused, so that it does not try again."""
    server = auth.ServerHandshake(SECRET, b"store", "")
    client = auth.ClientHandshake(SECRET, b"store", "")
    sent = 0

    def change(data: bytes) -> bytes:
        nonlocal sent
        sent += bool(data)
        if not data or sent != message:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    with pytest.raises(AuthenticationError, match="the handshake of TLS failed"):
        shake_hands(server, client, change)
    finder, told = (client, server) if message == 3 else (server, client)

    def hear(refusal: bytes) -> None:
        while refusal:
            part, refusal = refusal[: told.needs], refusal[told.needs :]
            told.receive(part)

    with pytest.raises(AuthenticationError, match="the handshake of TLS failed"):
        hear(finder.refusal)


class Changer(Proxy):
    """A proxy that turns a bit of what each client sends first of TLS."""

    PLACE = 197 + 60  # behind the answer to the greeting

    def _write(self, sock: socket.socket, data: bytes) -> None:
        place = self.PLACE - self._inward.get(sock, self.PLACE + 1)
        if 0 <= place < len(data):
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        super()._write(sock, data)


def test_a_rank_whose_handshakes_are_all_changed_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns that a third party is there, and does not try until its timeout."""
    monkeypatch.setenv("CYDIST_NAT", "1")  # for the proxy
    with (
        closing(Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)) as asked,
        closing(Connections(1, 2, host="127.0.0.1", job="j", secret=SECRET)) as asking,
    ):
        there = Address.decode(asked.address())
        with closing(Changer(there.lanes[0][0], NetworkFaults())) as between:
            lanes = [[("127.0.0.1", between.port)]]
            asking.connect([Address(0, there.host, lanes).encode(), asking.address()])
            group = Group(_native.Group(asking.link, [0, 1], 1, 1))
            send = group.isend(np.ones(8), 0, 1)
            assert send.wait(soon())
        assert status_of(send) == "peer_lost"
        assert "the handshake of TLS failed: a third party" in asking.link.lost(0)


def extensions_of(hello: bytes) -> dict[int, bytes]:
    """Those of the ClientHello in this record (RFC 8446, 4.1.2)."""
    at = 5 + 4 + 2 + 32  # record, message, version, random
    at += 1 + hello[at]  # session
    at += 2 + int.from_bytes(hello[at : at + 2], "big")  # ciphers
    at += 1 + hello[at] + 2  # compression, length
    found = {}
    while at < len(hello):
        kind, count = (int.from_bytes(hello[p : p + 2], "big") for p in (at, at + 2))
        found[kind] = hello[at + 4 : at + 4 + count]
        at += 4 + count
    return found


# Processes that cannot


def test_no_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encryption without authentication is refused in words, before any traffic."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    with pytest.raises(ValueError, match="CYDIST_INSECURE=1 says that there is none"):
        TCPStore("127.0.0.1", 0, None, True)


def test_a_python_without_ssl_is_refused(monkeypatch: pytest.MonkeyPatch, secret: bytes) -> None:
    """So is a Python that was built without OpenSSL."""
    monkeypatch.setitem(sys.modules, "_ssl", None)
    with pytest.raises(ValueError, match="CYDIST_ENCRYPT=1 needs the libssl"):
        TCPStore("127.0.0.1", 0, None, True)


def test_a_libssl_without_the_functions_is_refused() -> None:
    """The missing function is named, from a process that has not loaded a libssl yet."""
    script = (
        "from cydist import _native\n"
        "from numpy.linalg import _umath_linalg as other\n"  # Debian's Python has math built in
        "try: _native.load_openssl(other.__file__)\n"
        "except OSError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "has no TLS_method: it is not OpenSSL 1.1.1" in ran.stdout, ran.stderr


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")], ids=["one host", "two hosts"])
@pytest.mark.parametrize("encrypts", [True, False])
def test_a_backend_that_does_not_encrypt_is_refused_over_hosts(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], encrypts: bool
) -> None:
    """Only there, and both ranks learn it before the backend makes anything."""
    made: list[int] = []

    def create(options: registry.BackendOptions, pg_options: object) -> object:
        made.append(options.group_rank)

    create.extended_api = True  # type: ignore[attr-defined]
    create.encrypts = encrypts  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "find", lambda name: registry._plugin(create, True, "cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(interfaces, "boot_id", lambda: hosts[int(threading.current_thread().name)])
    store, said = HashStore(), {}

    def body(rank: int) -> None:
        threading.current_thread().name = str(rank)
        options = registry.BackendOptions(store, rank, 2, 30.0, "0", (4, 7))  # type: ignore[arg-type]
        try:
            registry.create("some", options, None)
        except UnsupportedError as error:
            said[rank] = str(error)

    run(lambda: body(0), lambda: body(1))
    if encrypts or hosts == ("a", "a"):
        assert sorted(made) == [0, 1]
    else:
        assert made == []
        assert "backend 'some' does not encrypt what rank 4 sends" in said[0]
        assert "where ranks 7 are" in said[0]
        assert "where ranks 4 are" in said[1]


# Reports of a hang


class Listener(Proxy):
    """A proxy that keeps what it carries."""

    seen = b""

    def _write(self, sock: socket.socket, data: bytes) -> None:
        self.seen += data
        super()._write(sock, data)


@pytest.mark.parametrize("encrypts", [True, False])
def test_reports_are_not_on_the_wire(monkeypatch: pytest.MonkeyPatch, encrypts: bool) -> None:
    """A rank that asks another what it is doing hears it, and a relay on the path does not."""
    monkeypatch.setenv("CYDIST_ENCRYPT", str(int(encrypts)))
    monkeypatch.setenv("CYDIST_NAT", "1")  # for the proxy
    with (
        closing(Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)) as asked,
        closing(Connections(1, 2, host="127.0.0.1", job="j", secret=SECRET)) as asking,
    ):
        asked.report_of = lambda comm_id: PeerReport("busy", TEXT.decode())
        there = Address.decode(asked.address())
        with closing(Listener(there.lanes[0][0], NetworkFaults())) as between:
            lanes = [[("127.0.0.1", between.port)]]
            asking.connect([Address(0, there.host, lanes).encode(), asking.address()])
            said = asking.query(0, 1, time.monotonic() + DEADLINE)
        assert TEXT.decode() in str(said)
        assert (TEXT in between.seen) is not encrypts


# Records


def test_records_travel_sealed() -> None:
    """The store's records are not on the wire, and arrive whole however they are cut."""
    server, client = record_pair()
    sent = client.seal(TEXT * 1000)
    assert TEXT not in sent
    parts = [server.decrypt(sent[place : place + 777]) for place in range(0, len(sent), 777)]
    record = b"".join(parts)
    head = record[:12]
    assert len(record) == len(head) + server.open_head(head)
    assert server.open_body(record[12:]) == TEXT * 1000


@pytest.mark.parametrize(
    "place", [0, 3, 4, 40, -1], ids=["too long", "shorter", "first", "body", "tag"]
)
def test_a_changed_record_is_refused(place: int) -> None:
    """By an AuthenticationError, or it waits for bytes that do not come."""
    server, client = record_pair()
    sent = bytearray(client.seal(TEXT))
    sent[place] ^= 0x40
    with pytest.raises(AuthenticationError, match="tampered"):
        server.decrypt(bytes(sent))


def test_a_store_serves(secret: bytes) -> None:
    """A value longer than a record goes to the server and back."""
    with contextlib.closing(TCPStore("127.0.0.1", 0, None, True, 30)) as store:
        store.set("long", TEXT * 10_000)
        assert store.get("long") == TEXT * 10_000


def test_idle_connections_hold_no_buffers(secret: bytes) -> None:
    """A store with a connection for each of many ranks needs little memory for each."""

    def mapped_kb() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmData:")[1].split()[0])

    before, pairs = mapped_kb(), [record_pair() for _ in range(400)]
    for server, client in pairs:
        server.decrypt(client.seal(bytes(100_000)))
    assert mapped_kb() - before < 800 * 48


# Frames


@pytest.mark.parametrize("encrypts", [True, False], ids=["encrypted", "plain"])
@pytest.mark.parametrize("times", [1, 10_000], ids=["short", "long"])
def test_nothing_is_on_the_wire(wire: Callable[..., Wire], encrypts: bool, times: int) -> None:
    """A wire carries the bytes of arrays, short or long, unless it is encrypted."""
    made = wire(encrypts=encrypts)
    a, b = made.groups
    sent = np.frombuffer(TEXT * times, np.uint8)
    got = np.zeros_like(sent)
    receive, send = b.irecv(got, 0, 1), a.isend(sent, 1, 1)
    run(lambda: done(receive), lambda: done(send))
    assert got.tobytes() == sent.tobytes()
    assert (TEXT in made.seen) == (not encrypts)


@pytest.mark.parametrize(
    "place", [0, 3, 4, 60, -1], ids=["too long", "longer", "first", "body", "tag"]
)
def test_a_changed_byte_ends_the_connection(wire: Callable[..., Wire], place: int) -> None:
    """The receiver says that somebody changed it, and delivers nothing."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)

    made = wire(change)
    a, b = made.groups
    got = np.zeros(len(TEXT), np.uint8)
    receive = b.irecv(got, 0, 1)
    a.isend(np.frombuffer(TEXT, np.uint8), 1, 1)
    if place == 3:  # one byte more or less: what follows is not a record
        a.isend(np.frombuffer(TEXT, np.uint8), 1, 2)
    assert receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert "tampered with" in made.links[1].lost(0)
    assert not got.any()


def test_of_a_changed_record_nothing_is_delivered(wire: Callable[..., Wire]) -> None:
    """The records of a long message are opened in its receiver's memory. Nothing remains
    there of one that was changed, and nothing comes of later ones."""
    passed, place = 0, 2 * (HEADER + OVERHEAD) + 3 * (RECORD + OVERHEAD) + 5000

    def change(data: bytes) -> bytes:
        nonlocal passed
        at, passed = place - passed, passed + len(data)
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    made = wire(change)
    a, b = made.groups
    got = np.zeros(5 * RECORD, np.uint8)
    receive = b.irecv(got, 0, 1)
    send = a.isend(np.ones(5 * RECORD, np.uint8), 1, 1)
    assert receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert got[: 3 * RECORD].all()
    assert not got[3 * RECORD :].any()
    del send  # kept until here: who forgets a message takes it back


def test_a_cut_within_a_record_is_a_lost_peer(wire: Callable[..., Wire]) -> None:
    """The rest of a record never comes: its receiver learns that the connection has ended."""
    made = wire(lambda data: data[:100])
    a, b = made.groups
    receive = b.irecv(np.zeros(1000, np.uint8), 0, 1)
    a.isend(np.ones(1000, np.uint8), 1, 1)
    eventually(lambda: len(made.seen) >= 1000)
    made.links[0].close()
    assert receive.wait(soon())
    assert status_of(receive) == "peer_lost"


@pytest.mark.parametrize("seed", range(4))
def test_messages_both_ways_at_once(wire: Callable[..., Wire], seed: int) -> None:
    """Messages of all lengths, in both directions, some withdrawn, through sockets with little
    room."""
    rng = random.Random(seed)
    made = wire()
    sizes = [
        rng.choice([0, 1, 100, JOINED, JOINED + 1, RECORD, RECORD + 1, 300_001, 1 << 21])
        for _ in range(30)
    ]

    def body(rank: int) -> None:
        mine, group = random.Random(seed + rank), made.groups[rank]
        data = [np.full(size, 1 + tag % 250, np.uint8) for tag, size in enumerate(sizes)]
        got = [np.zeros_like(each) for each in data]
        order = list(range(len(sizes)))
        mine.shuffle(order)
        receives = {tag: group.irecv(got[tag], 1 - rank, tag) for tag in order[::2]}
        sends = [group.isend(data[tag], 1 - rank, tag) for tag in range(len(sizes))]
        receives |= {tag: group.irecv(got[tag], 1 - rank, tag) for tag in order[1::2]}
        done(*receives.values(), *sends)
        for one, other in zip(data, got, strict=True):
            assert one.tobytes() == other.tobytes()

    run(lambda: body(0), lambda: body(1))


def test_the_last_message_arrives_though_its_sender_leaves(wire: Callable[..., Wire]) -> None:
    """A send that is complete is in the socket, all of it: its rank may end at once."""
    made = wire()
    a, b = made.groups
    sent, got = np.arange(60_000, dtype=np.uint8), np.zeros(60_000, np.uint8)
    send = a.isend(sent, 1, 1)
    done(send)
    made.links[0].close()
    done(b.irecv(got, 0, 1))
    assert got.tobytes() == sent.tobytes()


def exchange(made: Wire, frames: int) -> None:
    """Send so many short messages each way, and compare what comes."""

    def body(rank: int) -> None:
        group, peer = made.groups[rank], 1 - rank
        sent, got = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for number in range(frames):
            sent[0] = number
            send, receive = group.isend(sent, peer, 1), group.irecv(got, peer, 1)
            done(receive, send)
            assert got[0] == number

    run(lambda: body(0), lambda: body(1))


def test_a_fork_takes_no_connection_along(wire: Callable[..., Wire]) -> None:
    """A child's links have none, and their ciphers are freed. The parent's go on."""
    made = wire()
    exchange(made, 10)
    child = os.fork()
    if child == 0:
        os._exit(sum(link.lane_is_live(1 - rank, 0) for rank, link in enumerate(made.links)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    exchange(made, 10)


@pytest.mark.usefixtures("every_thousand")
def test_keys_change_while_frames_pass(wire: Callable[..., Wire]) -> None:
    """After every thousand records both sides take a new key, and all records are opened."""
    made = wire()
    exchange(made, 3500)
    assert len(made.seen) >= 2 * 3500 * (HEADER + 8 + OVERHEAD)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("every_thousand")
def test_a_million_frames(wire: Callable[..., Wire]) -> None:
    """The same for a million frames."""
    made = wire()
    for _ in range(20):  # each has a deadline
        exchange(made, 25_000)

"""Who may join, and what is open to whom: the promises of docs/guide/security.md, as tests."""

from __future__ import annotations

import ast
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from job_ports import JOB, Service, listening, read_to_end
from transport_ranks import DEADLINE, SECRET

from cydist.backends.host.connections import CLAIM, Connections
from cydist.errors import AuthenticationError, DistError, PeerFailedError
from cydist.net import auth
from cydist.net.auth import ClientHandshake, ServerHandshake
from cydist.net.interfaces import public_address
from cydist.rendezvous import handlers
from cydist.stores import PrefixStore, TCPStore
from cydist.stores.listen import bind

ROOT = Path(__file__).resolve().parents[2]
CLAIMED = CLAIM.pack(1, 0, 0)
CHANNELS = [b"store", b"peer", b"report"]
SETTINGS, ENDPOINTS = slice(40, 41), slice(41, 77)  # in the greeting, and in the answer
CLAIM_AT = slice(102, 112)  # in the answer

# Forged handshakes. A forger sees whole conversations of members, and may talk to as many of
# them as it likes; it does not know the secret.

LONG = [pytest.mark.long, pytest.mark.timeout(600)]
TRIES = [pytest.param(300, id="some"), pytest.param(50_000, id="many", marks=LONG)]


def changed(source: random.Random, message: bytes) -> bytes:
    """The message with one to three bits of it turned."""
    bits = bytearray(message)
    for at in source.sample(range(8 * len(bits)), source.randint(1, 3)):
        bits[at // 8] ^= 1 << at % 8
    return bytes(bits)


def member(greeting: bytes, channel: bytes, **other: object) -> bytes:
    """What an honest client answers that sees the same endpoints."""
    says = {
        "secret": SECRET, "channel": channel, "job": JOB, "claim": CLAIMED,
        "endpoints": greeting[ENDPOINTS], **other,
    }  # fmt: skip
    return ClientHandshake(**says).receive(greeting)  # type: ignore[arg-type]


def noise(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """Anything."""
    return source.randbytes(197)


def plausible(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """All right but the MAC."""
    return member(greeting, channel)[:-32] + source.randbytes(32)


def guessed(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """By somebody with another secret."""
    return member(greeting, channel, secret=source.randbytes(32))


def replayed(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """What a member answered to another greeting of this server."""
    return member(server(channel).greeting, channel)


def of_an_earlier_generation(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """By a rank of this job before it was restarted, or of another job of this user."""
    return member(greeting, channel, job=f"{JOB}/{source.randrange(2**32)}")


def for_another_service(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """What a member answered that was made to believe that this is another service."""
    return member(greeting, source.choice([other for other in CHANNELS if other != channel]))


def renamed(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """The same, with the service's name put right."""
    other = source.choice([other for other in CHANNELS if other != channel])
    return member(greeting, other).replace(other.ljust(8, b"\0"), channel.ljust(8, b"\0"))


def altered(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """A member's own answer, changed on the way."""
    return changed(source, member(greeting, channel))


def with_another_claim(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """A member's own answer, by which another rank would connect to another."""
    answer = bytearray(member(greeting, channel))
    assert answer[CLAIM_AT] == CLAIMED
    answer[CLAIM_AT] = CLAIM.pack(*(source.randrange(start, 9) for start in (2, 0, 0)))
    return bytes(answer)


def reflected(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """A member's answer under a MAC that a server made, of this very greeting."""
    twin = server(channel)
    twin.greeting, twin.endpoints = greeting, greeting[ENDPOINTS]
    answer = member(greeting, channel)
    return answer[:-32] + twin.receive(answer)


def relayed(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """What a member answered that sees a connection to somewhere else."""
    client = ClientHandshake(SECRET, channel, JOB, CLAIMED, endpoints=source.randbytes(36))
    with pytest.raises(AuthenticationError):
        client.receive(greeting)
    return client.refusal


def relayed_and_rewritten(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """The same, of a member that was told what it sees itself; with the endpoints put right."""
    elsewhere = source.randbytes(36)
    answer = bytearray(member(greeting[:41] + elsewhere, channel, endpoints=elsewhere))
    answer[ENDPOINTS] = greeting[ENDPOINTS]
    return bytes(answer)


def switched(source: random.Random, greeting: bytes, channel: bytes) -> bytes:
    """The same, of a member that has other settings; with these put right, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYDIST_NAT", "1")
        elsewhere = source.randbytes(36)
        answer = bytearray(
            member(greeting[:40] + b"\x01" + elsewhere, channel, endpoints=elsewhere)
        )
    answer[SETTINGS], answer[ENDPOINTS] = greeting[SETTINGS], greeting[ENDPOINTS]
    return bytes(answer)


Forge = Callable[[random.Random, bytes, bytes], bytes]


def server(channel: bytes) -> ServerHandshake:
    return ServerHandshake(SECRET, channel, JOB)


FORGERIES = [
    noise, plausible, guessed, replayed, of_an_earlier_generation, for_another_service, renamed,
    altered, with_another_claim, reflected, relayed, relayed_and_rewritten, switched,
]  # fmt: skip


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("forge", FORGERIES)
def test_forged_answers_are_refused(forge: Forge, channel: bytes, tries: int) -> None:
    """A server lets none of them in."""
    source = random.Random(3)
    accepted = 0
    for _ in range(tries):
        asked = server(channel)
        try:
            asked.receive(forge(source, asked.greeting, channel))
            accepted += 1
        except AuthenticationError:
            accepted += asked.done
    assert accepted == 0


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_forged_servers_are_refused(channel: bytes, tries: int) -> None:
    """A client believes no server that does not know the secret, or that answers another."""
    source = random.Random(4)
    accepted = 0
    for turn in range(tries):
        honest = server(channel)
        client = ClientHandshake(SECRET, channel, JOB, CLAIMED)
        answer = client.receive(honest.greeting)
        proof = honest.receive(answer)
        forged = [
            source.randbytes(32),
            answer[-32:],  # reflected
            changed(source, proof),
            other_proof(channel),
        ][turn % 4]
        try:
            client.receive(forged)
            accepted += 1
        except AuthenticationError:
            accepted += client.done
    assert accepted == 0


def other_proof(channel: bytes) -> bytes:
    """What a server proved to another client."""
    honest = server(channel)
    return honest.receive(member(honest.greeting, channel))


@pytest.mark.parametrize("forge", FORGERIES)
def test_forgers_are_hung_up_on(service: Service, forge: Forge) -> None:
    """At a real port a forger hears a refusal at the most, and members do not notice."""
    source = random.Random(5)
    for _ in range(5):
        with service.outsider() as sock:
            greeting = sock.recv(77, socket.MSG_WAITALL)
            sock.sendall(forge(source, greeting, service.channel))
            said = read_to_end(sock)
        assert said == b"" or said.startswith(b"cydist: refused, other ")
    service.use()


def test_every_bit_turned_on_the_way_is_found(service: Service) -> None:
    """Of somebody who relays a member's handshake and turns one bit, in any byte of any of its
    three messages, the client hears: it does not take the connection for good."""
    source = random.Random(6)
    for at in range(77 + 197 + 32):
        with service.outsider() as sock:
            endpoints = auth.endpoints_of(sock, accepted=False)
            client = ClientHandshake(
                SECRET, service.channel, JOB, service.claim, endpoints=endpoints
            )
            with pytest.raises((DistError, OSError)):
                relay(sock, client, lambda data, start, at=at: turned(source, data, at - start))
            assert not client.done
    service.use()


def relay(
    sock: socket.socket, client: ClientHandshake, pass_on: Callable[[bytes, int], bytes]
) -> None:
    """Carry a handshake between a client and the service behind a socket."""
    passed = 0
    while not client.done:
        data = sock.recv(client.needs, socket.MSG_WAITALL)
        if not data:
            raise PeerFailedError("hung up")
        answer = client.receive(pass_on(data, passed))
        passed += len(data)
        sock.sendall(pass_on(answer, passed))
        passed += len(answer)


def turned(source: random.Random, data: bytes, at: int) -> bytes:
    """The data with one bit turned in its byte `at`, if it has one."""
    if not 0 <= at < len(data):
        return data
    return data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]


def test_member_that_was_led_to_another_rank_is_not_let_in() -> None:
    """A relay takes a connection for rank 2 to rank 0: its proof is good, but not for there."""
    with closing(Connections(0, 3, host="127.0.0.1", job=JOB, secret=SECRET)) as rank:
        place = next(iter(own_listeners(rank)))
        with socket.create_connection(place, DEADLINE) as sock:
            endpoints = auth.endpoints_of(sock, accepted=False)
            client = ClientHandshake(SECRET, b"peer", JOB, CLAIM.pack(1, 2, 0), endpoints=endpoints)
            sock.sendall(client.receive(sock.recv(77, socket.MSG_WAITALL)))
            assert read_to_end(sock) == b""
        assert not rank.link.lane_is_live(1, 0)


# Where we listen


@pytest.fixture
def new_listeners() -> Iterator[Callable[[], set[tuple[str, int]]]]:
    """Where this process listens and did not when the test began."""
    before = listening(os.getpid())
    return lambda: listening(os.getpid()) - before


def own_listeners(connections: Connections) -> set[tuple[str, int]]:
    from cydist.backends.host.addresses import Address

    return {place for lane in Address.decode(connections.address()).lanes for place in lane}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.77", "localhost"])
def test_store_listens_where_it_was_told(
    host: str, secret: bytes, new_listeners: Callable[[], set[tuple[str, int]]]
) -> None:
    """A store listens on the address that was asked for, and on nothing else."""
    with closing(TCPStore(host, 0, None, True, DEADLINE)) as store:
        assert new_listeners() == {(socket.gethostbyname(host), store.port)}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.77"])
def test_rank_listens_where_it_was_told(
    host: str, new_listeners: Callable[[], set[tuple[str, int]]]
) -> None:
    """A rank's listener likewise, and it publishes that address."""
    with closing(Connections(0, 1, host=host, job=JOB, secret=SECRET)) as rank:
        assert new_listeners() == own_listeners(rank)
        assert {place[0] for place in new_listeners()} == {host}


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_all_addresses_only_if_written(
    host: str, secret: bytes, new_listeners: Callable[[], set[tuple[str, int]]]
) -> None:
    """0.0.0.0 means all addresses when it is written, and only then."""
    listeners = bind(host, 0)
    assert {place[0] for place in new_listeners()} == {host}
    for listener in listeners:
        listener.close()


def test_rank_0_without_an_address_listens_on_two(
    secret: bytes,
    monkeypatch: pytest.MonkeyPatch,
    new_listeners: Callable[[], set[tuple[str, int]]],
) -> None:
    """With MASTER_PORT and no MASTER_ADDR: on loopback and on the way out, not on everything."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("MASTER_ADDR", "CYDIST_MASTER_ADDR", "CYDIST_MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store, _, _ = handlers.rendezvous("env://", rank=0, world_size=1, timeout=DEADLINE)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    with closing(store), closing(TCPStore("127.0.0.1", port, timeout=DEADLINE)) as other:
        assert new_listeners() == {(host, port) for host in ("127.0.0.1", public_address())}
        assert store.host == public_address()
        assert other.add("n", 1) == 1


# What can be seen of the secret

WATCHED = """
import os, sys
import cydist as dist
from cydist.net import auth
from cydist.rendezvous import handlers as rendezvous
dist.init_process_group("tcp")
dist.barrier()
shown = [open(f"/proc/{pid}/{name}", "rb").read()
         for pid in (os.getpid(), os.getppid()) for name in ("environ", "cmdline")]
secret = auth.secret()
forms = [secret, secret.hex().encode(), repr(bytes(secret)).encode()[2:-1]]
print("secret", secret.hex(), any(form in text for form in forms for text in shown))
print("listens", [host for host, _ in __import__("job_ports").listening(os.getpid())])
sys.stdout.flush()
dist.barrier()
if dist.get_rank() == 1:
    raise dist.DistError("rank 1 fails, with a traceback")
dist.barrier()
"""


def test_secret_of_a_job_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    """Not in a rank's or the launcher's environment or command line, in no output, traceback
    or log of a job that fails; and its ports are open to this host alone."""
    program = tmp_path / "program.py"
    program.write_text(WATCHED)
    logs = tmp_path / "logs"
    old = os.umask(0)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", "--log-dir", str(logs),
             "--tee", "3", str(program)],
            capture_output=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"},
        )  # fmt: skip
    finally:
        os.umask(old)
    out = ended.stdout.decode()
    reports = [
        line.partition("secret ")[2].split() for line in out.splitlines() if "secret " in line
    ]
    assert len(reports) == 2, out + ended.stderr.decode()
    assert len({secret for secret, _ in reports}) == 1
    assert [seen for _, seen in reports] == ["False", "False"]
    assert "rank 1 fails, with a traceback" in ended.stderr.decode()
    assert out.count("listens ['127.0.0.1'") == 2
    assert "0.0.0.0" not in out
    secret = bytes.fromhex(reports[0][0])
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    for text in [ended.stderr, *(path.read_bytes() for path in files)]:
        printed = b"\n".join(line for line in text.splitlines() if b"secret " not in line)
        assert secret.hex().encode() not in printed
        assert repr(secret).encode()[2:-1] not in printed
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = [path for path in logs.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


# What is never run


RUNNING = {"eval", "exec", "compile", "__import__"}
OTHERS = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "dbm"}


@pytest.mark.parametrize("path", sorted((ROOT / "cydist").rglob("*.py")), ids=lambda p: p.stem)
def test_nothing_that_arrives_is_run(path: Path) -> None:
    """No module unpickles but the codec, in the one place where it asks whether it may; none
    evaluates text, none knows another format that holds code."""
    tree = ast.parse(path.read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom)
                     else [alias.name for alias in node.names])
    }  # fmt: skip
    assert not imported & OTHERS
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not RUNNING & set(called)
    pickled = [name for name in called if name.startswith("pickle.")]
    if path == ROOT / "cydist/api/object_codec.py":
        assert sorted(pickled) == ["pickle.dumps", "pickle.loads"]
    elif path == ROOT / "cydist/recorder/torch_format.py":
        assert pickled == ["pickle.dumps"]  # torch's analyser reads it
    else:
        assert "pickle" not in imported


def test_compiled_modules_do_not_unpickle() -> None:
    """Nor does what is compiled."""
    for path in (ROOT / "src").rglob("*.pyx"):
        words = path.read_text()
        assert not any(f"{word}(" in words.replace("re.compile(", "") for word in RUNNING), path
        assert "pickle" not in words, path


def test_unpickling_asks_first() -> None:
    """In the codec, pickle.loads stands behind the test that refuses it."""
    (function,) = [
        node
        for node in ast.parse((ROOT / "cydist/api/object_codec.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and "pickle.loads" in ast.unparse(node)
    ]
    text = ast.unparse(function)
    assert text.index("if not allow_pickle:\n            raise TypeError") < text.index(
        "pickle.loads"
    )

"""The job's secret and the handshake: who gets in, and who does not."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_ranks import has_ipv6

import cydist as dist
from cydist.backends.mpi import bootstrap
from cydist.errors import AuthenticationError, DistNetworkError, DistTimeoutError
from cydist.launch import __main__ as launch
from cydist.net import auth
from cydist.net import secret as secret_module
from cydist.stores import HashStore, MembershipStore, TCPStore

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6")

SECRET = bytes(range(32))
OTHER = bytes(reversed(range(32)))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every test looks for the secret again, in its own home."""
    for name in ("CYDIST_SECRET_FD", "CYDIST_SECRET_FILE", "CYDIST_INSECURE", "CYDIST_NAT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    auth.forget_secret()
    yield
    auth.forget_secret()


def converse(server: auth.ServerHandshake, client: auth.ClientHandshake) -> None:
    """Run both sides of a handshake in memory."""
    proof = server.receive(client.receive(server.greeting))
    assert client.receive(proof) == b""


def server(secret: bytes = SECRET, channel: bytes = b"store", job: str = "j"):
    return auth.ServerHandshake(secret, channel, job, "10.0.0.2:999")


def client(secret: bytes = SECRET, channel: bytes = b"store", job: str = "j", claim: bytes = b""):
    return auth.ClientHandshake(secret, channel, job, claim, "10.0.0.1:29500")


# The handshake


@given(
    claim=st.binary(max_size=auth.MAX_CLAIM_BYTES),
    channel=st.sampled_from([b"store", b"peer", b"eight888"]),
    job=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
def test_same_secret_agrees(claim: bytes, channel: bytes, job: str) -> None:
    """Two sides with one secret, job and channel both finish, and the claim arrives whole."""
    ours, theirs = server(channel=channel, job=job), client(channel=channel, job=job, claim=claim)
    converse(ours, theirs)
    assert (ours.done, theirs.done, ours.claim) == (True, True, claim)


def test_handshake_is_small() -> None:
    """The three messages together have 306 bytes."""
    ours, theirs = server(), client(claim=bytes(auth.MAX_CLAIM_BYTES))
    answer = theirs.receive(ours.greeting)
    proof = ours.receive(answer)
    assert len(ours.greeting) + len(answer) + len(proof) == 306


@pytest.mark.parametrize(
    ("theirs", "hint"),
    [
        ({"secret": OTHER}, "share one secret"),
        ({"job": "k"}, "different jobs"),
        ({"channel": b"peer"}, "different services"),
    ],
    ids=["secret", "job", "channel"],
)
def test_refusal_says_why_on_both_sides(theirs: dict[str, object], hint: str) -> None:
    """Another secret, job or channel is refused; both errors name both hosts and the remedy."""
    ours, outsider = server(), client(**theirs)  # type: ignore[arg-type]
    with pytest.raises(AuthenticationError, match=hint) as at_server:
        ours.receive(outsider.receive(ours.greeting))
    with pytest.raises(AuthenticationError, match=hint) as at_client:
        outsider.receive(ours.refusal)
    here = socket.gethostname()
    assert here in str(at_server.value)
    assert "10.0.0.2:999" in str(at_server.value)
    assert here in str(at_client.value)
    assert "10.0.0.1:29500" in str(at_client.value)
    assert not ours.done
    assert not outsider.done


def test_replayed_answer_is_refused() -> None:
    """A recorded answer does not open a second connection: the server's nonce is fresh."""
    first = server()
    recorded = client().receive(first.greeting)
    first.receive(recorded)
    with pytest.raises(AuthenticationError):
        server().receive(recorded)


def test_reflected_proof_is_refused() -> None:
    """A server that echoes the client's own MAC back is refused: each direction has its key."""
    theirs = client()
    answer = theirs.receive(server().greeting)
    with pytest.raises(AuthenticationError):
        theirs.receive(answer[-32:])


def test_server_without_the_secret_is_refused() -> None:
    """A client does not trust a server that cannot prove itself."""
    theirs = client()
    theirs.receive(server(OTHER).greeting)
    with pytest.raises(AuthenticationError):
        theirs.receive(bytes(32))


@given(st.data())
def test_every_flipped_bit_is_refused(data: st.DataObject) -> None:
    """Changing any one bit of the greeting or of the answer makes the server refuse."""
    ours, theirs = server(), client(claim=b"1,2,0")
    greeting, answer = bytearray(ours.greeting), b""
    where = data.draw(st.integers(0, 8 * (len(greeting) + 197) - 1))
    byte, bit = divmod(where, 8)
    if byte < len(greeting):
        greeting[byte] ^= 1 << bit
        try:
            answer = theirs.receive(bytes(greeting))
        except DistNetworkError:
            return  # the magic itself: the client refused
    else:
        changed = bytearray(theirs.receive(bytes(greeting)))
        changed[byte - len(greeting)] ^= 1 << bit
        answer = bytes(changed)
    with pytest.raises(AuthenticationError):
        ours.receive(answer)


@given(st.binary(min_size=197, max_size=197))
def test_garbage_is_refused(data: bytes) -> None:
    """197 bytes of anything are refused with a typed error."""
    with pytest.raises(AuthenticationError):
        server().receive(data)


def test_wrong_length_is_a_programming_error() -> None:
    """Feeding another count of bytes than asked for is refused at once."""
    with pytest.raises(ValueError, match="wants 197"):
        server().receive(b"short")


def test_other_version_is_named() -> None:
    """A peer of another wire version is told to install one version everywhere."""
    greeting = bytearray(server().greeting)
    greeting[7] = 9
    with pytest.raises(DistNetworkError, match="version 9"):
        client().receive(bytes(greeting))


@pytest.mark.parametrize("length", range(7, 41))
def test_other_version_is_named_whatever_its_length(length: int) -> None:
    """A shorter greeting of another version is named as that once the version is there."""
    greeting = b"cydist\x00\x09".ljust(40, b"x")[:length]
    if length < 8:
        client().check_beginning(greeting)
    else:
        with pytest.raises(DistNetworkError, match="version 9"):
            client().check_beginning(greeting)


def test_hkdf_matches_rfc_5869() -> None:
    """Test case 1 of the RFC, its first 32 bytes."""
    assert auth.hkdf(
        bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA))
    ) == bytes.fromhex("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf")


# Over a socket


def test_sockets_authenticate_each_other() -> None:
    """Over a real connection both sides finish, and the claim arrives."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        claims: list[bytes] = []
        thread = threading.Thread(
            target=lambda: claims.append(
                auth.authenticate_server(ours, channel=b"peer", job="j", secret=SECRET).claim
            )
        )
        thread.start()
        auth.authenticate_client(theirs, channel=b"peer", job="j", claim=b"me", secret=SECRET)
        thread.join(10)
        assert claims == [b"me"]


def test_client_with_another_secret_learns_why() -> None:
    """The refusal reaches the client before the connection closes."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with ours, pytest.raises(AuthenticationError):
            auth.authenticate_server(ours, channel=b"peer", job="j", secret=SECRET)

    thread = threading.Thread(target=serve)
    thread.start()
    with theirs, pytest.raises(AuthenticationError, match="CYDIST_SECRET_FILE"):
        auth.authenticate_client(theirs, channel=b"peer", job="j", secret=OTHER)
    thread.join(10)


def test_silent_peer_is_dropped_at_the_deadline() -> None:
    """A peer that says nothing costs its deadline and no more."""
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + 0.05
    with ours, theirs, pytest.raises(DistTimeoutError):
        auth.authenticate_server(ours, channel=b"p", job="j", secret=SECRET, deadline=deadline)


@pytest.mark.parametrize("banner", [b"SSH-2.0\r\n", b"x", bytes(40)], ids=["ssh", "byte", "zeros"])
def test_other_service_is_recognised(banner: bytes) -> None:
    """A service that greets otherwise is named as no cydist service without waiting for more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(banner)
        with pytest.raises(DistNetworkError, match="not a cydist service"):
            auth.authenticate_client(theirs, channel=b"peer", job="j", secret=SECRET)


def test_hanging_up_is_an_error() -> None:
    """A connection that ends in the middle is reported, not waited for."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(DistNetworkError, match="closed the connection"):
        auth.authenticate_client(theirs, channel=b"peer", job="j", secret=SECRET)


# The connection's endpoints, and settings

SEEN = bytes(10) + b"\xff\xff\x0a\0\0\x01\x03\xe7" + b"\xfe\x80" + bytes(13) + b"\x02\x73\x3c"
RELAYED = bytes(10) + b"\xff\xff\x0a\0\0\x07\x10\0" + SEEN[18:]
SEEN_TEXT = re.escape("10.0.0.1:999 -> [fe80::2]:29500")
RELAYED_TEXT = re.escape("10.0.0.7:4096 -> [fe80::2]:29500")


def refusals(server: auth.ServerHandshake, client: auth.ClientHandshake) -> tuple[str, str]:
    """What the server and the client of a handshake in memory say when both refuse."""
    with pytest.raises(AuthenticationError) as at_client:
        client.receive(server.greeting)
    with pytest.raises(AuthenticationError) as at_server:
        server.receive(client.refusal)
    assert not server.done
    assert not client.done
    return str(at_server.value), str(at_client.value)


def test_other_endpoints_are_refused_naming_both() -> None:
    """Sides that see other addresses refuse; each names what both see, and the switch."""
    ours = auth.ServerHandshake(SECRET, b"peer", "j", "10.0.0.7:4096", endpoints=RELAYED)
    theirs = auth.ClientHandshake(SECRET, b"peer", "j", b"", "[fe80::2]:29500", SEEN)
    at_server, at_client = refusals(ours, theirs)
    assert re.search(f"this side .*{RELAYED_TEXT}, the other side .*{SEEN_TEXT}.", at_server)
    assert re.search(f"this side .*{SEEN_TEXT}, the other side .*{RELAYED_TEXT}.", at_client)
    for words in (at_server, at_client):
        assert "set CYDIST_NAT=1 on every rank of the job" in words
        assert "somebody relays" in words


def test_other_endpoints_are_allowed_for_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CYDIST_NAT=1 on both sides they agree."""
    monkeypatch.setenv("CYDIST_NAT", "1")
    converse(
        auth.ServerHandshake(SECRET, b"peer", "j", endpoints=RELAYED),
        auth.ClientHandshake(SECRET, b"peer", "j", endpoints=SEEN),
    )


def test_other_endpoints_need_no_switch_without_authentication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CYDIST_INSECURE=1 the endpoints protect nothing, and stop nobody."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    with pytest.warns(RuntimeWarning, match="CYDIST_INSECURE"):
        public = auth.secret()
    converse(
        auth.ServerHandshake(public, b"peer", "j", endpoints=RELAYED),
        auth.ClientHandshake(public, b"peer", "j", endpoints=SEEN),
    )


@pytest.mark.parametrize("at_server", [False, True], ids=["at the client", "at the server"])
def test_one_sided_switch_is_refused_by_name(
    at_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CYDIST_NAT=1 on one side alone opens nothing, and both sides name it."""
    sides = {}
    for server_side in (False, True):
        monkeypatch.setenv("CYDIST_NAT", "1" if server_side == at_server else "0")
        sides[server_side] = (
            auth.ServerHandshake(SECRET, b"peer", "j", endpoints=SEEN)
            if server_side
            else auth.ClientHandshake(SECRET, b"peer", "j", endpoints=SEEN)
        )
    words = refusals(sides[True], sides[False])  # type: ignore[arg-type]
    assert f"CYDIST_NAT is {1 - at_server} there and {at_server:d} here: set it alike" in words[0]
    assert f"CYDIST_NAT is {at_server:d} there and {1 - at_server} here: set it alike" in words[1]


def test_one_sided_insecurity_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_INSECURE=1 on one side alone is named by both."""
    ours = server()
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    with pytest.warns(RuntimeWarning, match="CYDIST_INSECURE"):
        theirs = client(auth.secret())
    at_server, at_client = refusals(ours, theirs)
    assert "CYDIST_INSECURE is 1 there and 0 here" in at_server
    assert "CYDIST_INSECURE is 0 there and 1 here" in at_client


@pytest.mark.parametrize(
    ("which", "place"),
    [("endpoints", slice(41, 77)), ("settings", slice(40, 41))],
    ids=["endpoints", "NAT"],
)
def test_greeting_that_says_what_the_client_sees_is_refused(which: str, place: slice) -> None:
    """A relay that writes the client's own view into the greeting is found by the server, and
    the client hears that somebody changes what they send."""
    ours = auth.ServerHandshake(SECRET, b"peer", "j", endpoints=RELAYED)
    theirs = auth.ClientHandshake(SECRET, b"peer", "j", endpoints=SEEN)
    if which == "settings":
        theirs._settings = 1  # as with CYDIST_NAT=1 there
    greeting = bytearray(ours.greeting)
    greeting[41:77] = SEEN
    greeting[40] = theirs._settings
    with pytest.raises(
        AuthenticationError, match=RELAYED_TEXT if which == "endpoints" else "_NAT is 1"
    ):
        ours.receive(theirs.receive(bytes(greeting)))
    with pytest.raises(AuthenticationError, match="a third party between the two changes"):
        theirs.receive(ours.refusal)
    assert not ours.done


def connection(listen: str, connect: str) -> tuple[socket.socket, socket.socket]:
    """The accepted and the connecting socket of a TCP connection on this host."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    dual = listen == "::"
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=dual) as listener:
        ours = socket.create_connection((connect, listener.getsockname()[1]), 10)
        return listener.accept()[0], ours


@pytest.mark.parametrize(
    ("listen", "connect"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.77", "127.0.0.77"),
        ("0.0.0.0", "127.0.0.77"),
        ("0.0.0.0", "0.0.0.0"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("::", "::", marks=needs_ipv6),
        pytest.param("::", "127.0.0.77", marks=needs_ipv6),
        pytest.param("::", "::ffff:127.0.0.1", marks=needs_ipv6),
    ],
)
def test_both_sides_see_the_same_endpoints(listen: str, connect: str) -> None:
    """Whatever the listener is bound to, and by whatever family either side speaks IPv4."""
    accepted, connected = connection(listen, connect)
    with accepted, connected:
        endpoints = auth.endpoints_of(accepted, accepted=True)
        assert endpoints == auth.endpoints_of(connected, accepted=False)
        assert endpoints != auth.NO_ENDPOINTS
        port = connected.getsockname()[1]
        assert endpoints[16:18] == port.to_bytes(2, "big")


def test_sockets_through_a_relay_refuse_each_other() -> None:
    """Two real connections joined to one: both sides refuse at once."""
    seen_by: dict[str, str] = {}
    with ExitStack() as stack:
        server_sock, relay_out = map(stack.enter_context, connection("127.0.0.1", "127.0.0.1"))
        relay_in, client_sock = map(stack.enter_context, connection("127.0.0.1", "127.0.0.1"))

        def serve() -> None:
            with pytest.raises(AuthenticationError) as caught:
                auth.authenticate_server(server_sock, channel=b"peer", job="j", secret=SECRET)
            seen_by["server"] = str(caught.value)

        thread = threading.Thread(target=serve)
        thread.start()
        relay_in.sendall(relay_out.recv(77, socket.MSG_WAITALL))
        with pytest.raises(AuthenticationError) as caught:
            auth.authenticate_client(client_sock, channel=b"peer", job="j", secret=SECRET)
        seen_by["client"] = str(caught.value)
        relay_out.sendall(relay_in.recv(197, socket.MSG_WAITALL))
        thread.join(10)
        for words in seen_by.values():
            for sock in (server_sock, client_sock):
                assert "{}:{}".format(*sock.getsockname()) in words
                assert "{}:{}".format(*sock.getpeername()) in words


# The secret


def test_descriptor_is_read_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inherited descriptor is closed and its variable unset after the first use."""
    reader, writer = os.pipe()
    os.write(writer, SECRET)
    os.close(writer)
    monkeypatch.setenv("CYDIST_SECRET_FD", str(reader))
    assert auth.secret() == SECRET
    assert auth.secret() == SECRET
    assert "CYDIST_SECRET_FD" not in os.environ
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(reader)


def test_shared_memfd_serves_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that share one open file all read the whole secret, wherever its offset is."""
    fd = os.memfd_create("secret")
    os.write(fd, SECRET)
    monkeypatch.setenv("CYDIST_SECRET_FD", str(os.dup(fd)))
    assert auth.secret() == SECRET
    auth.forget_secret()
    monkeypatch.setenv("CYDIST_SECRET_FD", str(os.dup(fd)))
    os.close(fd)
    assert auth.secret() == SECRET


@pytest.mark.parametrize("value", ["x", "987654", "9" * 20], ids=["word", "closed", "too large"])
def test_bad_descriptor_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A variable that names no descriptor stops the job; it does not fall back silently."""
    monkeypatch.setenv("CYDIST_SECRET_FD", value)
    with pytest.raises(AuthenticationError, match=f"CYDIST_SECRET_FD={value}"):
        auth.secret()


def test_a_closed_descriptor_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says who may have closed it, and what to do."""
    monkeypatch.setenv("CYDIST_SECRET_FD", "987654")
    with pytest.raises(AuthenticationError, match=r"program between.*close_fds=False"):
        auth.secret()


def test_a_secret_that_was_read_before_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second program of a rank finds the launcher's pipe empty, and says what to do."""
    reader, writer = os.pipe()
    os.close(writer)
    monkeypatch.setenv("CYDIST_SECRET_FD", str(reader))
    with pytest.raises(AuthenticationError, match=r"can be read once.*env -u CYDIST_SECRET_FD"):
        auth.secret()


def test_another_file_with_the_descriptors_number_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below a wrapper that closes descriptors the number is the program's own file by then."""
    reader, writer = os.pipe()
    os.write(writer, SECRET)
    os.close(writer)
    monkeypatch.setenv("CYDIST_SECRET_FD", secret_module.descriptor_text(reader))
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    os.dup2(own, reader)
    with pytest.raises(AuthenticationError, match=r"another file.*started through a wrapper\?"):
        auth.secret()
    assert os.fstat(reader).st_ino == os.fstat(own).st_ino
    for fd in (own, reader):
        os.close(fd)


@pytest.mark.parametrize("source", ["user", "file", "descriptor", "mpi"])
def test_no_traceback_shows_the_secret(
    monkeypatch: pytest.MonkeyPatch, secret_file: Path, source: str
) -> None:
    """A start that fails shows it in none of its frames' local variables, nor in their repr."""
    if source != "file":
        monkeypatch.delenv("CYDIST_SECRET_FILE")
    if source == "descriptor":
        fd = os.memfd_create("secret")
        os.write(fd, SECRET)
        monkeypatch.setenv("CYDIST_SECRET_FD", secret_module.descriptor_text(fd))
    if source == "mpi":
        auth.set_secret(bytes(SECRET))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(dist.DistError) as caught:
            dist.init_process_group(
                "tcp", init_method=f"tcp://127.0.0.1:{taken.getsockname()[1]}",
                rank=1, world_size=2, timeout=0.2,
            )  # fmt: skip
    text = ""
    error: BaseException | None = caught.value
    while error is not None:  # those that the traceback leaves out, too, as error trackers do
        found = traceback.TracebackException.from_exception(error, capture_locals=True)
        text += "".join(found.format())
        error = error.__context__
    value = bytes(auth.secret())
    assert "<secret>" in text
    assert repr(value)[2:-1] not in text
    assert value.hex() not in text
    assert repr(auth.secret()) == str(auth.secret()) == f"{auth.secret()}" == "<secret>"


def test_a_malformed_secret_is_not_shown(secret_file: Path) -> None:
    """Nor is one that is refused."""
    secret_file.write_text("correct horse battery staple")
    with pytest.raises(AuthenticationError) as caught:
        auth.secret()
    found = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "horse" not in "".join(found.format())


def test_a_renewed_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """cydistrun --new-secret replaces the user's file; a process that has read it keeps its own."""
    before = auth.secret()
    path = auth.user_secret_path()
    with pytest.raises(SystemExit) as ended:
        launch.main(["--new-secret"])
    assert ended.value.code == 0
    assert str(path) in "".join(capsys.readouterr())
    assert auth.secret() == before
    auth.forget_secret()
    assert auth.secret() != before
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("CYDIST_SECRET_FILE", str(path))
    return path


@pytest.mark.parametrize("form", ["raw", "hex"])
def test_file_holds_bytes_or_hex(secret_file: Path, form: str) -> None:
    """32 raw bytes and 64 hex digits with a newline mean the same."""
    if form == "hex":
        secret_file.write_text(SECRET.hex() + "\n")
    assert auth.secret() == SECRET


@pytest.mark.parametrize("content", [b"", b"password\n", bytes(33), b"z" * 64])
def test_short_or_malformed_file_is_refused(secret_file: Path, content: bytes) -> None:
    """A file that holds anything else is refused and the right length named."""
    secret_file.write_bytes(content)
    with pytest.raises(AuthenticationError, match="32 bytes"):
        auth.secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_open_file_is_refused(secret_file: Path, mode: int) -> None:
    """A file that others may read or write is refused; the remedy is named."""
    secret_file.chmod(mode)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        auth.secret()


@pytest.mark.parametrize("kind", ["directory", "fifo", "missing"])
def test_only_regular_files_are_read(secret_file: Path, kind: str) -> None:
    """Directories and fifos are refused, and nothing blocks."""
    secret_file.rename(secret_file.with_name("target"))
    if kind == "directory":
        secret_file.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(secret_file, 0o600)
    with pytest.raises(AuthenticationError, match="secret file"):
        auth.secret()


@pytest.fixture
def mounted(secret_file: Path) -> Path:
    """The secret as Kubernetes mounts it: a link to a link to a folder of the version."""
    version = secret_file.with_name("..2026")
    version.mkdir()
    target = secret_file.rename(version / "secret")
    secret_file.with_name("..data").symlink_to("..2026")
    secret_file.symlink_to("..data/secret")
    return target


def test_a_linked_file_is_read(mounted: Path) -> None:
    """A link of this user's or of root's leads to the file, which is checked."""
    assert auth.secret() == SECRET


def test_a_strangers_link_is_refused(
    mounted: Path, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could let a link lead elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("root is needed")
    os.chown(secret_file, 65534, 65534, follow_symlinks=False)
    with pytest.raises(AuthenticationError, match="cannot be read"):
        auth.secret()


@pytest.mark.parametrize("mode", [0o440, 0o400, 0o444])
def test_a_file_of_root_is_read_if_others_cannot(
    mounted: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """A file of root's for a group, as with fsGroup, is taken; else the error says how."""
    if os.geteuid() != 0:
        pytest.skip("root is needed")
    mounted.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if mode == 0o444:
        with pytest.raises(AuthenticationError, match=r"mode 0444.*Kubernetes.*0440 with fsGroup"):
            auth.secret()
    else:
        assert auth.secret() == SECRET


def test_set_secret_yields_to_the_file(secret_file: Path) -> None:
    """What the user configured wins over what a launcher broadcasts."""
    assert auth.is_configured()
    auth.set_secret(OTHER)
    assert auth.secret() == SECRET


def test_set_secret_wins_over_the_users_file() -> None:
    """A broadcast secret is used, and no file is made."""
    auth.set_secret(OTHER)
    assert auth.secret() == OTHER
    assert not auth.user_secret_path().exists()


def test_insecure_is_told_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep in cydist the secret is read, the warning is at the line of the program."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    with pytest.warns(RuntimeWarning, match="CYDIST_INSECURE") as found:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).close()
    assert [each.filename for each in found] == [__file__]


def test_insecure_warns_and_uses_a_public_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching authentication off is said aloud, and both sides still shake hands."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    with pytest.warns(RuntimeWarning, match="CYDIST_INSECURE"):
        public = auth.secret()
    converse(server(public), client(auth.secret()))
    with pytest.raises(AuthenticationError):
        converse(server(SECRET), client(public))


def test_users_file_is_private_and_stable() -> None:
    """The user's own secret is made once, 0600 in a 0700 directory, and then kept."""
    first = auth.secret()
    auth.forget_secret()
    path = auth.user_secret_path()
    assert auth.secret() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_home_that_cannot_be_written_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place for a secret the error says which variable gives one."""
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(AuthenticationError, match="CYDIST_SECRET_FILE"):
        auth.secret()


def test_racing_processes_agree_on_one_secret() -> None:
    """20 processes that start together in a new home all find the same secret."""
    code = (
        "import os, sys\n"
        "from cydist.net import auth\n"
        "gate_out, gate_in = os.pipe()\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        os.close(gate_in); os.read(gate_out, 1)\n"
        "        os.write(1, auth.secret().hex().encode() + b'\\n'); os._exit(0)\n"
        "os.close(gate_in)\n"  # end of file lets them all go
        "assert all(os.wait()[1] == 0 for _ in range(20))"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    found = run.stdout.split()
    assert run.returncode == 0
    assert len(found) == 20
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert os.listdir(auth.user_secret_path().parent) == ["secret"]


def test_secret_is_nowhere_to_be_read(secret_file: Path) -> None:
    """Neither the environment nor the command line shows the secret."""
    secret = auth.secret()
    for name in ("environ", "cmdline"):
        shown = Path(f"/proc/self/{name}").read_bytes()
        assert secret not in shown
        assert secret.hex().encode() not in shown


def test_a_secret_that_cannot_be_read_is_no_missing_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backend mpi goes on without sockets where a rank can listen nowhere. A secret that cannot be
    read is an error that its user sees."""
    store = MembershipStore("", HashStore(), range(2))
    options = SimpleNamespace(store=store, group_rank=0, group_size=2)
    monkeypatch.setenv("CYDIST_SECRET_FILE", "/nowhere/secret")
    monkeypatch.setattr(bootstrap, "where_to_listen", lambda store: "127.0.0.1")
    with pytest.raises(AuthenticationError, match="/nowhere/secret cannot be read"):
        bootstrap.reports_of(options)  # type: ignore[arg-type]

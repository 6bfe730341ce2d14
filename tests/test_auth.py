"""The job's secret and the handshake: who gets in, and who does not."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist import auth
from cydist.errors import AuthenticationError, DistNetworkError, DistTimeoutError

SECRET = bytes(range(32))
OTHER = bytes(reversed(range(32)))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every test looks for the secret anew, in its own home."""
    for name in ("CYDIST_SECRET_FD", "CYDIST_SECRET_FILE", "CYDIST_INSECURE"):
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
    """The three messages together have fewer than 256 bytes."""
    ours, theirs = server(), client(claim=bytes(auth.MAX_CLAIM_BYTES))
    answer = theirs.receive(ours.greeting)
    proof = ours.receive(answer)
    assert len(ours.greeting) + len(answer) + len(proof) == 232


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
    ours, stranger = server(), client(**theirs)  # type: ignore[arg-type]
    with pytest.raises(AuthenticationError, match=hint) as at_server:
        ours.receive(stranger.receive(ours.greeting))
    with pytest.raises(AuthenticationError, match=hint) as at_client:
        stranger.receive(ours.farewell)
    here = socket.gethostname()
    assert here in str(at_server.value)
    assert "10.0.0.2:999" in str(at_server.value)
    assert here in str(at_client.value)
    assert "10.0.0.1:29500" in str(at_client.value)
    assert not ours.done
    assert not stranger.done


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
    where = data.draw(st.integers(0, 8 * (len(greeting) + 160) - 1))
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


@given(st.binary(min_size=160, max_size=160))
def test_garbage_is_refused(data: bytes) -> None:
    """160 bytes of anything are refused with a typed error."""
    with pytest.raises(AuthenticationError):
        server().receive(data)


def test_wrong_length_is_a_programming_error() -> None:
    """Feeding another count of bytes than asked for is refused at once."""
    with pytest.raises(ValueError, match="wants 160"):
        server().receive(b"short")


def test_other_version_is_named() -> None:
    """A peer of another wire version is told to install one version everywhere."""
    greeting = bytearray(server().greeting)
    greeting[7] = 9
    with pytest.raises(DistNetworkError, match="version 9"):
        client().receive(bytes(greeting))


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
                auth.authenticate_server(ours, channel=b"peer", job="j", secret=SECRET)
            )
        )
        thread.start()
        auth.authenticate_client(theirs, channel=b"peer", job="j", claim=b"me", secret=SECRET)
        thread.join(10)
        assert claims == [b"me"]


def test_client_with_another_secret_hears_why() -> None:
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


@pytest.mark.parametrize("value", ["x", "987654"], ids=["word", "closed"])
def test_bad_descriptor_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A variable that names no descriptor stops the job; it does not fall back silently."""
    monkeypatch.setenv("CYDIST_SECRET_FD", value)
    with pytest.raises(AuthenticationError, match=f"CYDIST_SECRET_FD={value}"):
        auth.secret()


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


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo", "missing"])
def test_only_regular_files_are_read(secret_file: Path, kind: str) -> None:
    """Links, directories and fifos are refused, and nothing blocks."""
    target = secret_file.rename(secret_file.with_name("target"))
    if kind == "symlink":
        secret_file.symlink_to(target)
    elif kind == "directory":
        secret_file.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(secret_file, 0o600)
    with pytest.raises(AuthenticationError, match="secret file"):
        auth.secret()


def test_set_secret_yields_to_the_file(secret_file: Path) -> None:
    """What the user configured wins over what a launcher broadcasts."""
    assert auth.configured()
    auth.set_secret(OTHER)
    assert auth.secret() == SECRET


def test_set_secret_wins_over_the_users_file() -> None:
    """A broadcast secret is used, and no file is made."""
    auth.set_secret(OTHER)
    assert auth.secret() == OTHER
    assert not auth.user_secret_path().exists()


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
        "from cydist import auth\n"
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

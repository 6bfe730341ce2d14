"""The job's secret, and the handshake that proves knowledge of it on every TCP connection.

The secret is 32 bytes. It comes from the first of these that is there:

1. the inherited descriptor named by CYDIST_SECRET_FD (read once, closed, variable unset),
2. the file named by CYDIST_SECRET_FILE (regular, ours, mode 0600),
3. `set_secret`, which the MPI side calls with a broadcast,
4. a file of the user, created 0600 at first use, which all jobs of the user share.

Every job derives its own keys from it (HKDF-SHA256, RFC 5869, with the job's id), one per
direction. The handshake is three messages of fixed size, 232 bytes in all; the server
speaks first:

    server -> client   magic+version 8, nonce 32
    client -> server   magic+version 8, nonce 32, channel 8, job 16, claim 1+63, MAC 32
    server -> client   MAC 32, or 32 bytes of refusal

Each MAC (HMAC-SHA256) covers every byte before it in both directions. Fresh nonces stop
replay, separate keys stop reflection, the channel stops a proof for one service from
opening another. Nothing is allocated or parsed for a stranger beyond these bytes.

With CYDIST_INSECURE=1 the exchange is the same, with a key that everyone knows.

This module knows sockets and files, and no store, transport or launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
import warnings
from pathlib import Path

from cydist import config
from cydist.errors import AuthenticationError, DistNetworkError, DistTimeoutError

SECRET_BYTES = 32
MAX_CLAIM_BYTES = 63
MAX_CHANNEL_BYTES = 8
# How long a connection may take to prove itself, in seconds.
HANDSHAKE_TIMEOUT = 2.0

_MAGIC = b"cydist\x00\x01"  # the last byte is the version of the wire
_GREETING = struct.Struct("<8s32s")
_ANSWER = struct.Struct("<8s32s8s16sB63s")
_MAC_BYTES = 32
_PUBLIC_SECRET = b"cydist without authentication..."
# What a refusing server sends in place of its MAC; sixteen bytes of text cannot be a MAC by chance.
_REFUSALS = {
    "key": b"cydist: refused, other secret".ljust(_MAC_BYTES, b"\0"),
    "job": b"cydist: refused, other job".ljust(_MAC_BYTES, b"\0"),
    "channel": b"cydist: refused, other service".ljust(_MAC_BYTES, b"\0"),
}

_lock = threading.Lock()
_secret: bytes | None = None
_warned = False


# The secret


def insecure() -> bool:
    """Was authentication switched off with CYDIST_INSECURE=1?"""
    return config.INSECURE.on()


def secret() -> bytes:
    """The secret of this process's job, found once; see the module's text for where.

    Raises AuthenticationError when the place that should hold it cannot be trusted or read.
    """
    global _secret, _warned
    with _lock:
        if insecure():
            if not _warned:
                _warned = True
                warnings.warn(
                    "CYDIST_INSECURE=1: anyone who reaches this job's ports can join it and "
                    "read or change its data",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return _PUBLIC_SECRET
        if _secret is None:
            _secret = _configured_secret() or _user_secret()
        return _secret


def configured() -> bool:
    """Is there a secret already that `set_secret` would not replace?"""
    return (
        _secret is not None
        or insecure()
        or bool(config.SECRET_FD.get() or config.SECRET_FILE.get())
    )


def set_secret(value: bytes) -> None:
    """Take `value` (32 bytes) as the job's secret, unless a descriptor or a file gave one.

    For launchers that have their own way to share it, such as a broadcast by MPI.
    """
    global _secret
    if len(value) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(value)}")
    with _lock:
        _secret = _configured_secret() or value


def new_secret() -> bytes:
    """A fresh random secret, for a launcher to hand out."""
    return secrets.token_bytes(SECRET_BYTES)


def forget_secret() -> None:
    """Look for the secret anew at the next use."""
    global _secret, _warned
    with _lock:
        _secret = None
        _warned = False


def _configured_secret() -> bytes | None:
    """The secret that a launcher or the user gave explicitly."""
    fd = config.SECRET_FD.take()
    if fd:
        return _read_descriptor(fd)
    path = config.SECRET_FILE.get()
    if path:
        return _read_file(Path(path))
    return None


def _read_descriptor(text: str) -> bytes:
    try:
        fd = int(text)
        try:
            # Workers that inherited one memfd share its offset: read at 0, where that is possible.
            data = os.pread(fd, 128, 0)
        except OSError:
            data = os.read(fd, 128)
        os.close(fd)
    except (ValueError, OSError) as error:
        raise AuthenticationError(
            f"{config.SECRET_FD.names[0]}={text} is not a descriptor to read: {error}"
        ) from None
    return _parse(data, f"descriptor {text}")


def _read_file(path: Path) -> bytes:
    """The secret in `path`, if the file is regular, ours, and closed to everyone else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(f"the secret file {path} cannot be read: {error}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"the secret file {path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise AuthenticationError(
                f"the secret file {path} belongs to user {status.st_uid}, not to {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            raise AuthenticationError(
                f"the secret file {path} is open to others (mode {status.st_mode & 0o777:04o}): "
                f"chmod 600 {path}"
            )
        return _parse(os.read(fd, 128), str(path))
    finally:
        os.close(fd)


def _parse(data: bytes, source: str) -> bytes:
    """32 raw bytes, or 64 hex digits with white space around them."""
    if len(data) == SECRET_BYTES:
        return data
    text = data.strip()
    if len(text) == 2 * SECRET_BYTES:
        with contextlib.suppress(ValueError):
            return bytes.fromhex(text.decode("ascii", "replace"))
    raise AuthenticationError(
        f"{source} holds {len(data)} bytes: a secret is {SECRET_BYTES} bytes, or "
        f"{2 * SECRET_BYTES} hex digits (openssl rand -hex {SECRET_BYTES})"
    )


def user_secret_path() -> Path:
    """Where the user's own secret lies: below XDG_STATE_HOME, or ~/.local/state."""
    state = config.STATE_HOME.get()
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "cydist" / "secret"


def _user_secret() -> bytes:
    """The user's own secret, made at first use; processes that race agree on one."""
    path = user_secret_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path, new_secret())
    except OSError as error:
        raise AuthenticationError(
            f"no secret: {path} cannot be created ({error}); set {config.SECRET_FILE.names[0]} "
            "to a file of mode 0600 that all ranks share"
        ) from None
    return _read_file(path)


def _create(path: Path, value: bytes) -> None:
    """Put `value` at `path` whole or not at all; whoever comes first wins."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(value.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


# Keys


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """32 bytes derived from `key` by HKDF-SHA256 (RFC 5869)."""
    extracted = hmac.digest(salt or bytes(32), key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def job_key(secret: bytes, job: str, role: bytes) -> bytes:
    """The key of one job for one purpose."""
    return hkdf(secret, b"cydist job key", role + b"\0" + job.encode())


def _job_name(job: str) -> bytes:
    """What tells jobs apart on the wire, so that a refusal can say which is wrong."""
    return hashlib.sha256(job.encode()).digest()[:16]


# The handshake, without any input or output of its own


class _Handshake:
    """What both sides share.

    needs   bytes that `receive` wants next; 0 when nothing more is expected
    done    both sides have proved themselves
    """

    def __init__(self, secret: bytes, channel: bytes, job: str, there: str) -> None:
        if len(channel) > MAX_CHANNEL_BYTES:
            raise ValueError(f"a channel's name has at most {MAX_CHANNEL_BYTES} bytes: {channel!r}")
        self.channel = channel
        self.job = job
        self.there = there
        self.done = False
        self.needs = 0
        self._client_key = job_key(secret, job, b"client")
        self._server_key = job_key(secret, job, b"server")

    def _refused(self, why: str) -> AuthenticationError:
        here = socket.gethostname()
        hint = {
            "key": "the two do not share one secret: give every host the same file, mode 0600, "
            f"in {config.SECRET_FILE.names[0]}",
            "job": f"the two belong to different jobs (this one is {self.job!r})",
            "channel": f"the two expect different services (this one is {self.channel.decode()!r})",
        }[why]
        return AuthenticationError(
            f"{here} and {self.there} refused each other's connection: {hint}"
        )


class ServerHandshake(_Handshake):
    """The side that accepted the connection.

    Send `greeting`; feed `receive` with `needs` bytes; send what it returns; when `done`,
    `claim` is what the client says of itself, authenticated. When `receive` raises
    AuthenticationError, `farewell` may be sent before the connection is closed.
    """

    def __init__(self, secret: bytes, channel: bytes, job: str, there: str = "a client") -> None:
        super().__init__(secret, channel, job, there)
        self.greeting = _GREETING.pack(_MAGIC, secrets.token_bytes(32))
        self.needs = _ANSWER.size + _MAC_BYTES
        self.claim = b""
        self.farewell = b""

    def receive(self, data: bytes) -> bytes:
        """Check the client's answer; return the server's own proof, which completes it.

        Raises AuthenticationError for anything but a valid answer to this very greeting.
        """
        if self.done or len(data) != self.needs:
            raise ValueError(f"the handshake wants {self.needs} bytes now, not {len(data)}")
        body, mac = data[: _ANSWER.size], data[_ANSWER.size :]
        magic, _, channel, job, claim_bytes, claim = _ANSWER.unpack(body)
        if magic != _MAGIC or claim_bytes > MAX_CLAIM_BYTES:
            raise AuthenticationError(f"{self.there} does not speak cydist's protocol")
        expected = hmac.digest(self._client_key, self.greeting + body, "sha256")
        if not hmac.compare_digest(expected, mac):
            why = "key" if job == _job_name(self.job) else "job"
            self.farewell = _REFUSALS[why]
            raise self._refused(why)
        if channel.rstrip(b"\0") != self.channel:
            self.farewell = _REFUSALS["channel"]
            raise self._refused("channel")
        self.claim = claim[:claim_bytes]
        self.needs = 0
        self.done = True
        return hmac.digest(self._server_key, self.greeting + data, "sha256")


class ClientHandshake(_Handshake):
    """The side that opened the connection.

    Feed `receive` with `needs` bytes and send what it returns, until `done`.
    claim   at most 63 bytes that the server can trust to come from a member of the job
    """

    def __init__(
        self, secret: bytes, channel: bytes, job: str, claim: bytes = b"", there: str = "a server"
    ) -> None:
        super().__init__(secret, channel, job, there)
        if len(claim) > MAX_CLAIM_BYTES:
            raise ValueError(f"a claim has at most {MAX_CLAIM_BYTES} bytes, not {len(claim)}")
        self.claim = claim
        self.needs = _GREETING.size
        self._transcript = b""

    def receive(self, data: bytes) -> bytes:
        """Answer the greeting, then check the server's proof.

        Raises DistNetworkError when the other side is no cydist service, AuthenticationError
        when it is one that refuses us or cannot prove itself.
        """
        if self.done or len(data) != self.needs:
            raise ValueError(f"the handshake wants {self.needs} bytes now, not {len(data)}")
        return self._check(data) if self.answered else self._answer(data)

    @property
    def answered(self) -> bool:
        """Has the server's greeting been answered, so that its proof comes next?"""
        return bool(self._transcript)

    def _answer(self, greeting: bytes) -> bytes:
        if greeting[:8] != _MAGIC:
            raise DistNetworkError(_stranger(self.there, greeting))
        body = _ANSWER.pack(
            _MAGIC,
            secrets.token_bytes(32),
            self.channel,
            _job_name(self.job),
            len(self.claim),
            self.claim,
        )
        answer = body + hmac.digest(self._client_key, greeting + body, "sha256")
        self._transcript = greeting + answer
        self.needs = _MAC_BYTES
        return answer

    def _check(self, proof: bytes) -> bytes:
        for why, refusal in _REFUSALS.items():
            if proof == refusal:
                raise self._refused(why)
        expected = hmac.digest(self._server_key, self._transcript, "sha256")
        if not hmac.compare_digest(expected, proof):
            raise self._refused("key")
        self.needs = 0
        self.done = True
        return b""


def _stranger(there: str, greeting: bytes) -> str:
    if greeting[:6] == _MAGIC[:6]:
        return (
            f"{there} speaks version {greeting[7]} of cydist's protocol, this process version "
            f"{_MAGIC[7]}: install one version of cydist everywhere"
        )
    return f"{there} is not a cydist service: it began with {greeting[:16]!r}"


# The handshake over a socket


def authenticate_server(
    sock: socket.socket,
    *,
    channel: bytes,
    job: str,
    secret: bytes | None = None,
    deadline: float | None = None,
) -> bytes:
    """Let the client of an accepted connection prove itself; return its claim.

    deadline   on time.monotonic(); default: 2 s from now

    Raises AuthenticationError, DistTimeoutError (the client was too slow) or
    DistNetworkError (it hung up). The caller then closes the socket.
    """
    there = _address(sock)
    handshake = ServerHandshake(_or_ours(secret), channel, job, there)
    conversation = _Conversation(sock, there, deadline)
    with conversation:
        conversation.send(handshake.greeting)
        try:
            proof = handshake.receive(conversation.receive(handshake.needs))
        except AuthenticationError:
            with contextlib.suppress(DistNetworkError, DistTimeoutError):
                conversation.send(handshake.farewell)
            raise
        conversation.send(proof)
    return handshake.claim


def authenticate_client(
    sock: socket.socket,
    *,
    channel: bytes,
    job: str,
    claim: bytes = b"",
    secret: bytes | None = None,
    deadline: float | None = None,
) -> None:
    """Prove ourselves to the server of a connection that we opened, and check the server.

    deadline   on time.monotonic(); default: 2 s from now

    Raises AuthenticationError, DistTimeoutError (the server said nothing in time) or
    DistNetworkError (it hung up, or is no cydist service). The caller then closes the socket.
    """
    there = _address(sock)
    handshake = ClientHandshake(_or_ours(secret), channel, job, claim, there)
    conversation = _Conversation(sock, there, deadline)
    with conversation:
        while not handshake.done:
            prefix = b"" if handshake.answered else _MAGIC[:6]
            answer = handshake.receive(conversation.receive(handshake.needs, prefix))
            if answer:
                conversation.send(answer)


def _or_ours(value: bytes | None) -> bytes:
    return secret() if value is None else value


def _address(sock: socket.socket) -> str:
    """The other end, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "a local process"


class _Conversation:
    """Whole messages over a socket until a deadline; the socket's own timeout is kept."""

    def __init__(self, sock: socket.socket, there: str, deadline: float | None) -> None:
        self._sock = sock
        self._there = there
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT if deadline is None else deadline
        self._timeout = sock.gettimeout()

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._sock.settimeout(self._timeout)

    def send(self, data: bytes) -> None:
        try:
            self._arm()
            self._sock.sendall(data)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._hung_up(error) from None

    def receive(self, count: int, prefix: bytes = b"") -> bytes:
        """Exactly `count` bytes; gives up as soon as they cannot begin with `prefix`."""
        data = b""
        while len(data) < count:
            try:
                self._arm()
                part = self._sock.recv(count - len(data))
            except TimeoutError:
                raise self._late() from None
            except OSError as error:
                raise self._hung_up(error) from None
            if not part:
                raise self._hung_up("end of stream")
            data += part
            if data[: len(prefix)] != prefix[: len(data)]:
                # The shorter greeting of some other service must not cost the whole deadline.
                raise DistNetworkError(_stranger(self._there, data))
        return data

    def _arm(self) -> None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining)

    def _late(self) -> DistTimeoutError:
        return DistTimeoutError(f"{self._there} did not complete cydist's handshake in time")

    def _hung_up(self, error: object) -> DistNetworkError:
        return DistNetworkError(
            f"{self._there} closed the connection during cydist's handshake: {error}"
        )

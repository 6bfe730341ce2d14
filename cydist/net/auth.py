"""The job's secret, and the handshake that proves knowledge of it on every TCP connection.

`cydist.net.secret` finds the secret; callers use its functions through this module. Every job
derives its own keys from it (HKDF-SHA256, RFC 5869, with the job's id), one per direction. The
handshake is three messages of fixed size, 306 bytes in all; the server speaks first:

    server -> client   magic+version 8, nonce 32, settings 1, endpoints 36
    client -> server   magic+version 8, nonce 32, settings 1, endpoints 36, channel 8, job 16,
                       claim 1+63, MAC 32
    server -> client   MAC 32, or 32 bytes of refusal

Each MAC (HMAC-SHA256) covers every byte before it in both directions. Fresh nonces stop
replay, separate keys stop reflection, the channel stops a proof for one service from
opening another. Nothing beyond these bytes is allocated or parsed for an unauthenticated peer.

After the handshake both sides derive the keys of this one connection (`_Handshake.keys`) from the
secret and all bytes of the handshake, and so from both nonces, the endpoints, the channel and the
job. The frames that follow carry tags made with them (cydist/net/records.py, and
src/transports/stream/stream_auth.pyx), so a relay that let the handshake pass can change nothing.

The endpoints are the connection's two addresses as each side sees them. They differ where a relay,
or a network that translates addresses, has joined two connections. Then both sides refuse before
the server has proved anything, unless CYDIST_NAT=1 is set on both. The settings are switches that
must be equal on both sides.

With CYDIST_ENCRYPT=1 the handshake of TLS 1.3 comes before the server's last message, with a key
derived from the secret and the bytes so far (cydist/net/encryption.py). All that follows the last
message is sealed (cydist/_native/cipher.pxd).

With CYDIST_INSECURE=1 the exchange is the same, with a public key. The endpoints may differ then,
since a relay could write any.

This module knows sockets and files, and no store, transport or launcher.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import math
import os
import socket
import struct
import time
from collections.abc import Collection

from cydist import _native, config
from cydist.errors import (
    AuthenticationError,
    DistNetworkError,
    DistTimeoutError,
    PeerFailedError,
)
from cydist.net.encryption import RECORD_HEAD_BYTES, KeyExchange
from cydist.net.secret import (
    SECRET_BYTES,
    Secret,
    forget_secret,
    insecure,
    is_configured,
    is_public,
    new_secret,
    secret,
    set_secret,
    user_secret_path,
    user_secret_tag,
)

__all__ = [
    "FULL",
    "HANDSHAKE_TIMEOUT",
    "MAX_CHANNEL_BYTES",
    "MAX_CLAIM_BYTES",
    "NO_ENDPOINTS",
    "SECRET_BYTES",
    "ClientHandshake",
    "Secret",
    "ServerHandshake",
    "address_of",
    "authenticate_client",
    "authenticate_server",
    "is_configured",
    "endpoints_of",
    "forget_secret",
    "hkdf",
    "insecure",
    "job_key",
    "new_secret",
    "secret",
    "set_secret",
    "user_secret_path",
    "user_secret_tag",
]

MAX_CLAIM_BYTES = 63
MAX_CHANNEL_BYTES = 8
# How long a handshake may take, in seconds, and the slices in which it waits.
HANDSHAKE_TIMEOUT = 2.0
_SLICE = 0.1

_MAGIC = b"cydist\x00\x04"  # the last byte is the version of the wire
_GREETING = struct.Struct("<8s32sB36s")
_ANSWER = struct.Struct("<8s32sB36s8s16sB63s")
_MAC_BYTES = 32
# An endpoint is an IPv6 address, or an IPv4 one mapped into IPv6, and a port.
_ENDPOINT_BYTES = 18
_MAPPED = bytes(10) + b"\xff\xff"
NO_ENDPOINTS = bytes(2 * _ENDPOINT_BYTES)  # of sockets without addresses, which cannot be relayed
# The reason when a server refuses although its greeting gave none: it sent another greeting.
_CHANGED = "a third party between the two changes what they send"
# Settings that must be equal on both sides; the bit of each is its index here.
_SETTINGS = (config.NAT, config.INSECURE, config.ENCRYPT)
_ENCRYPTED = 1 << _SETTINGS.index(config.ENCRYPT)
# The greeting of a server without a free descriptor; no random nonce is this text.
FULL = _GREETING.pack(_MAGIC, b"no file descriptor left", 0, b"")
# Sent by a refusing server in place of its MAC; no MAC is this text.
_REFUSALS = {
    "key": b"cydist: refused, other secret".ljust(_MAC_BYTES, b"\0"),
    "job": b"cydist: refused, other job".ljust(_MAC_BYTES, b"\0"),
    "channel": b"cydist: refused, other service".ljust(_MAC_BYTES, b"\0"),
    "settings": b"cydist: refused, other settings".ljust(_MAC_BYTES, b"\0"),
    "endpoints": b"cydist: refused, other addresses".ljust(_MAC_BYTES, b"\0"),
    "tls": b"cydist: refused, changed TLS".ljust(_MAC_BYTES, b"\0"),
}
# No record of TLS begins so.
_REFUSAL_HEAD = b"cydist"[:RECORD_HEAD_BYTES]

# Keys


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes derived from `key` by HKDF-SHA256 (RFC 5869)."""
    extracted = hmac.digest(salt or bytes(32), key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def job_key(secret: bytes, job: str, role: bytes) -> bytes:
    """Return the key of one job for one purpose."""
    return hkdf(secret, b"cydist job key", role + b"\0" + job.encode())


def _job_name(job: str) -> bytes:
    """Return the job's name on the wire, by which a refusal can say what is wrong."""
    return hashlib.sha256(job.encode()).digest()[:16]


# The endpoints of a connection


def endpoints_of(sock: socket.socket, *, accepted: bool) -> bytes:
    """Return the addresses of a connection's client and server, as this side sees them.

    IPv4 is the same in an IPv6 socket and in its own. Zones of link-local addresses are left
    out: each host numbers its interfaces by itself. NO_ENDPOINTS for a socket without addresses.

    Raises OSError when the other side has hung up.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return NO_ENDPOINTS
    here, there = _endpoint(sock.getsockname()), _endpoint(sock.getpeername())
    return there + here if accepted else here + there


def _endpoint(name: tuple[str, int]) -> bytes:
    host, port = name[0].partition("%")[0], name[1]
    if ":" in host:
        address = socket.inet_pton(socket.AF_INET6, host)
    else:
        address = _MAPPED + socket.inet_pton(socket.AF_INET, host)
    return address + port.to_bytes(2, "big")


def _endpoints_text(endpoints: bytes) -> str:
    """Return "client -> server" for messages."""
    shown = []
    for end in (endpoints[:_ENDPOINT_BYTES], endpoints[_ENDPOINT_BYTES:]):
        address, port = end[:16], int.from_bytes(end[16:], "big")
        if address.startswith(_MAPPED):
            shown.append(f"{socket.inet_ntop(socket.AF_INET, address[12:])}:{port}")
        else:
            shown.append(f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{port}")
    return " -> ".join(shown)


def _settings(secret: bytes) -> int:
    on = (config.NAT.is_on(), is_public(secret), config.ENCRYPT.is_on())
    return sum(is_on << bit for bit, is_on in enumerate(on))


# The handshake, without any input or output of its own


class OtherJobError(AuthenticationError):
    """The other side belongs to another job, or is another service of this one."""


class _Handshake:
    """The part of the handshake that both sides share.

    Attributes:
        needs: Bytes that `receive` wants next; 0 when nothing more is expected.
        done: Both sides are authenticated.
        refusal: After AuthenticationError: bytes to send before closing, so that the other side
            learns the reason.
        endpoints: Of the connection, as this side sees them (`endpoints_of`).
    """

    __slots__ = (
        "_exchange", "_secret", "_session", "_settings", "_theirs", "channel", "done", "endpoints",
        "job", "needs", "refusal", "there",
    )  # fmt: skip

    def __init__(
        self, secret: bytes, channel: bytes, job: str, there: str, endpoints: bytes
    ) -> None:
        if len(channel) > MAX_CHANNEL_BYTES:
            raise ValueError(f"a channel's name has at most {MAX_CHANNEL_BYTES} bytes: {channel!r}")
        self.channel = channel
        self.job = job
        self.there = there
        self.endpoints = endpoints
        self.done = False
        self.needs = 0
        self.refusal = b""
        self._exchange: KeyExchange | None = None  # of an encrypted connection
        self._secret = secret
        self._session = b""
        self._settings = _settings(secret)
        self._theirs = (self._settings, endpoints)  # the other side's greeting

    def _mac(self, role: bytes, transcript: bytes) -> bytes:
        """Return the MAC of `transcript` for the role "client" or "server"."""
        return hmac.digest(job_key(self._secret, self.job, role), transcript, "sha256")

    def keys(self, purpose: bytes) -> tuple[bytes, bytes]:
        """Return two keys of 32 bytes for `purpose`: to send with, and to receive with.

        Another connection has others. Raises ValueError before the handshake is done.
        """
        if not self.done:
            raise ValueError("a connection has no keys before its handshake is done")
        server, client = (
            hmac.digest(self._session, b"cydist " + role + b"\0" + purpose, "sha256")
            for role in (b"server", b"client")
        )
        return (server, client) if isinstance(self, ServerHandshake) else (client, server)

    def _begin_session(self, transcript: bytes) -> None:
        """Derive the connection's keys from these bytes, which are all but the server's proof and
        those of TLS."""
        self._session = hkdf(
            self._secret, hashlib.sha256(transcript).digest(), b"session\0" + self.job.encode()
        )
        if self._settings & _ENCRYPTED:
            key = hmac.digest(self._session, b"cydist tls", "sha256")
            self._exchange = KeyExchange(key, server=isinstance(self, ServerHandshake))
            self.needs = self._exchange.needs

    def _exchange_keys(self, data: bytes) -> bytes:
        """Take bytes of TLS's handshake; return what answers them."""
        assert self._exchange is not None
        try:
            answer = self._exchange.receive(data)
        except ValueError:
            self.refusal = _REFUSALS["tls"]
            raise self._refused("tls") from None
        self.needs = self._exchange.needs
        return answer

    @property
    def cipher(self) -> _native.CipherHandle | None:
        """Return the cipher of an encrypted connection, once both sides have agreed on it."""
        return None if self._exchange is None else self._exchange.cipher

    def _finish(self) -> None:
        self.needs = 0
        self.done = True

    def _compare(self, settings: int, endpoints: bytes) -> str:
        """Return which part of the other side's settings and endpoints is unacceptable, or ""."""
        self._theirs = (settings, endpoints)
        if settings != self._settings:
            return "settings"
        # Both other switches allow endpoints to differ.
        return "endpoints" if endpoints != self.endpoints and not settings & ~_ENCRYPTED else ""

    def _refused(self, why: str) -> AuthenticationError:
        here = socket.gethostname()
        hint = {
            "key": "the two do not share one secret: give every host the same file, mode 0600, "
            f"in {config.SECRET_FILE.names[0]}",
            "job": f"the two belong to different jobs (this one is {self.job!r})",
            "channel": f"the two expect different services (this one is {self.channel.decode()!r})",
            "settings": self._differing_settings(),
            "endpoints": self._differing_endpoints(),
            "tls": f"the handshake of TLS failed: {_CHANGED}",
        }[why]
        kind = OtherJobError if why in ("job", "channel") else AuthenticationError
        return kind(f"{here} and {self.there} refused each other's connection: {hint}")

    def _differing_settings(self) -> str:
        theirs = self._theirs[0]
        differing = [
            f"{variable.names[0]} is {theirs >> bit & 1} there and {self._settings >> bit & 1} here"
            for bit, variable in enumerate(_SETTINGS)
            if (theirs ^ self._settings) >> bit & 1
        ]
        if not differing:
            return _CHANGED
        return f"{' and '.join(differing)}: set it alike on every rank of the job"

    def _differing_endpoints(self) -> str:
        if self._theirs[1] == self.endpoints:
            return _CHANGED
        return (
            f"this side sees a connection {_endpoints_text(self.endpoints)}, the other side one "
            f"{_endpoints_text(self._theirs[1])}. If a network between the hosts translates "
            f"addresses, set {config.NAT.names[0]}=1 on every rank of the job; if none does, "
            "somebody relays the connection"
        )


class ServerHandshake(_Handshake):
    """The side that accepted the connection.

    Send `greeting`; feed `receive` with `needs` bytes; send what it returns; when `done`,
    `claim` is the client's authenticated claim.

    Args:
        also: Further channels that are served; `channel` is then the one that the client requested.

    Attributes:
        knows: After AuthenticationError: whether the client knows the job's secret all the same,
            and is refused for its settings alone.
    """

    __slots__ = ("_also", "_proof", "claim", "greeting", "knows")

    def __init__(
        self,
        secret: bytes,
        channel: bytes,
        job: str,
        there: str = "a client",
        also: Collection[bytes] = (),
        endpoints: bytes = NO_ENDPOINTS,
    ) -> None:
        super().__init__(secret, channel, job, there, endpoints)
        self._also = also
        self.greeting = _GREETING.pack(_MAGIC, os.urandom(32), self._settings, endpoints)
        self.needs = _ANSWER.size + _MAC_BYTES
        self.claim = b""
        self.knows = False
        self._proof = b""

    def check_beginning(self, data: bytes) -> None:
        """Do nothing: a client's answer is checked when it is complete."""

    def receive(self, data: bytes) -> bytes:
        """Check the client's answer; return the server's own proof, which completes it. Records of
        TLS come between the two on an encrypted connection.

        Raises AuthenticationError for anything but a valid answer to this very greeting.
        """
        if self.done or len(data) != self.needs:
            raise ValueError(f"the handshake wants {self.needs} bytes now, not {len(data)}")
        if self._exchange is not None:
            answer = self._exchange_keys(data)
            return answer if self.cipher is None else answer + self._prove()
        body, mac = data[: _ANSWER.size], data[_ANSWER.size :]
        magic, _, settings, endpoints, channel, job, claim_bytes, claim = _ANSWER.unpack(body)
        if magic != _MAGIC or settings >> len(_SETTINGS) or claim_bytes > MAX_CLAIM_BYTES:
            raise AuthenticationError(f"{self.there} does not speak cydist's protocol")
        wanted = channel.rstrip(b"\0")
        why = self._compare(settings, endpoints)
        proved = hmac.compare_digest(self._mac(b"client", self.greeting + body), mac)
        # Not where its connection may be relayed: somebody else has led it here then.
        self.knows = proved and why == "settings" and endpoints == self.endpoints
        if not why and not proved:
            why = "key" if job == _job_name(self.job) else "job"
        if not why and wanted not in (self.channel, *self._also):
            why = "channel"
        if why:
            self.refusal = _REFUSALS[why]
            raise self._refused(why)
        self.channel = wanted
        self.claim = claim[:claim_bytes]
        self._begin_session(self.greeting + data)
        self._proof = self._mac(b"server", self.greeting + data)
        return self._prove() if self._exchange is None else b""

    def _prove(self) -> bytes:
        self._finish()
        return self._proof


class ClientHandshake(_Handshake):
    """The side that opened the connection.

    Feed `receive` with `needs` bytes and send what it returns, until `done`.

    Args:
        claim: At most 63 bytes that the server can trust to come from a member of the job.
        endpoints: Must be set before the greeting is received.
    """

    __slots__ = ("_refusal_head", "_transcript", "claim")

    def __init__(
        self,
        secret: bytes,
        channel: bytes,
        job: str,
        claim: bytes = b"",
        there: str = "a server",
        endpoints: bytes = NO_ENDPOINTS,
    ) -> None:
        super().__init__(secret, channel, job, there, endpoints)
        if len(claim) > MAX_CLAIM_BYTES:
            raise ValueError(f"a claim has at most {MAX_CLAIM_BYTES} bytes, not {len(claim)}")
        self.claim = claim
        self.needs = _GREETING.size
        self._transcript = b""
        self._refusal_head = b""  # of a refusal that came in place of a record of TLS

    def receive(self, data: bytes) -> bytes:
        """Answer the greeting, then check the server's proof.

        Raises DistNetworkError when the other side is no cydist service, AuthenticationError
        when it is one that refuses us or cannot prove itself, or whose connection is not ours,
        OSError (EMFILE) when it has no descriptor left for us.
        """
        if self.done or len(data) != self.needs:
            raise ValueError(f"the handshake wants {self.needs} bytes now, not {len(data)}")
        if not self.answered:
            return self._answer(data)
        if self._exchange is not None and self.cipher is None:
            return self._receive_tls(data)
        return self._check(data)

    def check_beginning(self, data: bytes) -> None:
        """Raise DistNetworkError unless cydist's greeting begins so.

        Another service's or version's greeting may be shorter, and must not cost the deadline.
        """
        if not self.answered and data[: len(_MAGIC)] != _MAGIC[: len(data)]:
            raise DistNetworkError(_not_cydist(self.there, data))

    @property
    def answered(self) -> bool:
        """Return whether the server's greeting has been answered, so that its proof comes next."""
        return bool(self._transcript)

    def _answer(self, greeting: bytes) -> bytes:
        if greeting == FULL:
            raise OSError(errno.EMFILE, f"{self.there} has no file descriptor left for us")
        self.check_beginning(greeting)
        _, _, settings, endpoints = _GREETING.unpack(greeting)
        if settings >> len(_SETTINGS):
            raise DistNetworkError(f"{self.there} does not speak cydist's protocol")
        body = _ANSWER.pack(
            _MAGIC,
            os.urandom(32),
            self._settings,
            self.endpoints,
            self.channel,
            _job_name(self.job),
            len(self.claim),
            self.claim,
        )
        answer = body + self._mac(b"client", greeting + body)
        why = self._compare(settings, endpoints)
        if why:
            self.refusal = answer  # from which the server draws the same conclusion
            raise self._refused(why)
        self._transcript = greeting + answer
        self.needs = _MAC_BYTES
        self._begin_session(self._transcript)
        return answer if self._exchange is None else answer + self._exchange.begin()

    def _receive_tls(self, data: bytes) -> bytes:
        assert self._exchange is not None
        if data == _REFUSAL_HEAD and self._exchange.is_between_records:
            self._refusal_head = data
            self.needs = _MAC_BYTES - len(data)
            return b""
        if self._refusal_head:
            return self._check(self._refusal_head + data)
        answer = self._exchange_keys(data)
        if self.cipher is not None:
            self.needs = _MAC_BYTES
        return answer

    def _check(self, proof: bytes) -> bytes:
        for why, refusal in _REFUSALS.items():
            if proof == refusal:
                raise self._refused(why)
        expected = self._mac(b"server", self._transcript)
        if not hmac.compare_digest(expected, proof):
            raise self._refused("key")
        self._finish()
        return b""


def _not_cydist(there: str, greeting: bytes) -> str:
    if greeting[:7] == _MAGIC[:7] and len(greeting) > 7:
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
) -> ServerHandshake:
    """Let the client of an accepted connection prove itself; return the handshake, which has its
    claim and the connection's keys.

    Args:
        deadline: On time.monotonic(); in any case 2 s of silence end it.

    Raises AuthenticationError, DistTimeoutError (the client was too slow) or
    PeerFailedError (it hung up). The caller then closes the socket.
    """
    there = address_of(sock)
    connection = _BlockingHandshake(sock, there, deadline)
    endpoints = connection.endpoints(accepted=True)
    handshake = ServerHandshake(_or_ours(secret), channel, job, there, endpoints=endpoints)
    with connection:
        connection.send(handshake.greeting)
        while not handshake.done:
            connection.exchange(handshake)
    return handshake


def authenticate_client(
    sock: socket.socket,
    *,
    channel: bytes,
    job: str,
    claim: bytes = b"",
    secret: bytes | None = None,
    deadline: float | None = None,
    patience: float = HANDSHAKE_TIMEOUT,
) -> ClientHandshake:
    """Authenticate this process to the server of a connection that it opened, and check the server.

    Return the handshake, which has the connection's keys.

    Args:
        deadline: On time.monotonic().
        patience: Seconds of silence that end the handshake earlier.

    Raises AuthenticationError, DistTimeoutError (the server said nothing in time),
    PeerFailedError (it hung up), DistNetworkError (it is no cydist service) or OSError (EMFILE:
    it has no descriptor left). The caller then closes the socket.
    """
    there = address_of(sock)
    connection = _BlockingHandshake(sock, there, deadline, patience)
    endpoints = connection.endpoints(accepted=False)
    handshake = ClientHandshake(_or_ours(secret), channel, job, claim, there, endpoints)
    with connection:
        while not handshake.done:
            connection.exchange(handshake)
    return handshake


def _or_ours(value: bytes | None) -> bytes:
    return secret() if value is None else value


def address_of(sock: socket.socket) -> str:
    """Return the peer's address for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "a local process"


class _BlockingHandshake:
    """Send and receive whole messages on a socket until a deadline, and restore its timeout.

    It also ends when the other side has been silent for `patience` seconds. Silence is counted in
    slices: when the whole machine stands still, that counts as one, so that two processes on it do
    not blame each other.
    """

    def __init__(
        self,
        sock: socket.socket,
        there: str,
        deadline: float | None,
        patience: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self._sock = sock
        self._there = there
        self._deadline = math.inf if deadline is None else deadline
        self._patience = patience
        self._timeout = sock.gettimeout()

    def __enter__(self) -> _BlockingHandshake:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._sock.settimeout(self._timeout)

    def send(self, data: bytes) -> None:
        try:
            self._arm()
            self._sock.sendall(data)  # always fits: the socket is new
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._hung_up(error) from None

    def endpoints(self, *, accepted: bool) -> bytes:
        """Return `endpoints_of` the socket."""
        try:
            return endpoints_of(self._sock, accepted=accepted)
        except OSError as error:
            raise self._hung_up(error) from None

    def exchange(self, handshake: ClientHandshake | ServerHandshake) -> None:
        """Receive one message and answer it."""
        data = b""
        while len(data) < handshake.needs:
            part = self._receive_some(handshake.needs - len(data))
            if not part:
                raise self._hung_up("end of stream")
            data += part
            handshake.check_beginning(data)
        try:
            answer = handshake.receive(data)
        except AuthenticationError:
            with contextlib.suppress(DistNetworkError, DistTimeoutError):
                self.send(handshake.refusal)
            raise
        if answer:
            self.send(answer)

    def _receive_some(self, most: int) -> bytes:
        while True:
            slice_seconds = 0.0
            try:
                slice_seconds = self._arm()
                return self._sock.recv(most)
            except TimeoutError:
                self._patience -= slice_seconds
                if slice_seconds == 0.0:
                    raise self._late() from None
            except OSError as error:
                raise self._hung_up(error) from None

    def _arm(self) -> float:
        """Set the socket's timeout to one slice. Raises TimeoutError if no time is left."""
        remaining = min(self._deadline - time.monotonic(), self._patience, _SLICE)
        if remaining <= 1e-6:
            raise TimeoutError
        self._sock.settimeout(remaining)
        return remaining

    def _late(self) -> DistTimeoutError:
        return DistTimeoutError(f"{self._there} did not complete cydist's handshake in time")

    def _hung_up(self, error: object) -> PeerFailedError:
        return PeerFailedError(
            f"{self._there} closed the connection during cydist's handshake: {error}"
        )

"""CYDIST_ENCRYPT=1: whether this process can encrypt, and how a connection agrees on its cipher.

The handshake of TLS 1.3 is part of that of cydist/net/auth.py. OpenSSL makes and reads its messages
(src/net/tls.pyx); this module says how many bytes a side must wait for.
"""

from __future__ import annotations

import struct

from cydist import _native, config
from cydist.net.secret import insecure

# A record of TLS: its type, a version, and the length of the rest, at most this (RFC 8446, 5.2).
_RECORD_HEAD = struct.Struct(">BHH")
_MAX_RECORD_BYTES = (1 << 14) + 256
RECORD_HEAD_BYTES = _RECORD_HEAD.size


def check_encryption() -> None:
    """Check that this process can encrypt, if it is to.

    Raises ValueError if CYDIST_ENCRYPT=1 is set without a secret, or where OpenSSL is missing.
    """
    if not config.ENCRYPT.is_on():
        return
    name = config.ENCRYPT.names[0]
    if insecure():
        raise ValueError(
            f"{name}=1 encrypts with the job's secret, and {config.INSECURE.names[0]}=1 says that "
            "there is none: set one of the two"
        )
    try:
        import _ssl  # Python's module, whose libssl and libcrypto serve
    except ImportError as error:
        raise ValueError(
            f"{name}=1 needs the libssl of Python's module ssl, which this Python lacks: {error}"
        ) from None
    try:
        _native.load_openssl(getattr(_ssl, "__file__", None))
    except OSError as error:
        raise ValueError(f"{name}=1: {error}") from None


class KeyExchange:
    """TLS's handshake on one connection.

    Args:
        key: 32 bytes that only its two sides know.

    Feed `receive` with `needs` bytes and send what it returns, until there is a `cipher`.
    """

    __slots__ = ("_record", "_tls", "needs")

    def __init__(self, key: bytes, *, server: bool) -> None:
        self._tls = _native.TlsHandshake(key, server)
        self._record = b""  # as far as it has come
        self.needs = RECORD_HEAD_BYTES

    @property
    def cipher(self) -> _native.CipherHandle | None:
        """Return the connection's cipher, or None before the two have agreed on it."""
        return self._tls.cipher

    @property
    def is_between_records(self) -> bool:
        """Return whether the next bytes begin a record."""
        return not self._record

    def begin(self) -> bytes:
        """Return a client's first message."""
        return self._tls.receive(b"")

    def receive(self, data: bytes) -> bytes:
        """Take the head of a record, or the rest of it; return what answers it.

        Raises ValueError if the peer does not hold the key, or its bytes were changed.
        """
        self._record += data
        if len(self._record) == RECORD_HEAD_BYTES:
            self.needs = _RECORD_HEAD.unpack(self._record)[2]
            if not 0 < self.needs <= _MAX_RECORD_BYTES:
                raise ValueError(f"no record of TLS has {self.needs} bytes")
            return b""
        record, self._record = self._record, b""
        self.needs = RECORD_HEAD_BYTES
        return self._tls.receive(record)

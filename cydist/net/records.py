"""Authenticated records: what follows the handshake on connections served by Python.

    length u32, tag 8 | body, tag 16

The first tag covers the record's number and its length, so a changed length never makes the
receiver wait for bytes that do not come. The second covers the number and the body. Both are keyed
BLAKE2s (RFC 7693), with one key for each direction of the connection. The number counts the records
of a direction from 0 and does not travel. So a record that was dropped, repeated, reordered,
reflected, cut, changed or taken from another connection has a wrong tag.

On an encrypted connection sealed records (cydist/_native/cipher.pxd) carry these.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2s

from cydist.errors import AuthenticationError
from cydist.net.auth import ClientHandshake, ServerHandshake

_PURPOSE = b"records"
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_NUMBERS = 1 << 64
_HEAD_TAG_BYTES = 8
_TAG_BYTES = 16
HEAD_BYTES = _LENGTH.size + _HEAD_TAG_BYTES
# What a record adds to its body.
OVERHEAD_BYTES = HEAD_BYTES + _TAG_BYTES


class Records:
    """Seal and open the records of one authenticated connection.

    Sending and receiving are independent of each other; two threads may not do the same at once.

    Args:
        handshake: Of the connection, completed.
        most: Bytes of a body that `open_head` accepts.
    """

    first = 0  # number of the first record each way; another in tests
    __slots__ = ("_cipher", "_most", "_received", "_receiving", "_sending", "_sent", "_there")

    def __init__(self, handshake: ClientHandshake | ServerHandshake, most: int) -> None:
        self._sending, self._receiving = handshake.keys(_PURPOSE)
        self._sent = self._received = self.first
        self._there = handshake.there
        self._cipher = handshake.cipher
        self._most = most

    def seal(self, body: bytes) -> bytes:
        """Return the bytes to send for the next record, all of them."""
        number = _NUMBER.pack(self._sent)
        self._sent = (self._sent + 1) % _NUMBERS
        length = _LENGTH.pack(len(body))
        head = _tag(self._sending, b"head", _HEAD_TAG_BYTES, number, length)
        record = b"".join(
            (length, head, body, _tag(self._sending, b"body", _TAG_BYTES, number, body))
        )
        return record if self._cipher is None else self._cipher.seal(record)

    def decrypt(self, data: bytes) -> bytes:
        """Return the bytes of records that received bytes carry: these or, on an encrypted
        connection, those of the sealed records that are complete.

        Raises AuthenticationError if the peer did not send them next.
        """
        if self._cipher is None:
            return data
        try:
            return self._cipher.open(data)
        except ValueError:
            raise self._tampered() from None

    def open_head(self, head: bytes | bytearray) -> int:
        """Return how many bytes of body and tag follow the first HEAD_BYTES of a record.

        Raises AuthenticationError if the peer did not send this head next.
        """
        length, tag = head[: _LENGTH.size], head[_LENGTH.size : HEAD_BYTES]
        number = _NUMBER.pack(self._received)
        self._check(_tag(self._receiving, b"head", _HEAD_TAG_BYTES, number, length), tag)
        (size,) = _LENGTH.unpack(length)
        if size > self._most:
            raise AuthenticationError(f"{self._there} sent a record of {size} bytes")
        return int(size) + _TAG_BYTES

    def open_body(self, rest: bytes | bytearray) -> bytes:
        """Return the body from the bytes whose number `open_head` told.

        Raises AuthenticationError if the peer did not send them next.
        """
        body, tag = bytes(rest[:-_TAG_BYTES]), rest[-_TAG_BYTES:]
        number = _NUMBER.pack(self._received)
        self._check(_tag(self._receiving, b"body", _TAG_BYTES, number, body), tag)
        self._received = (self._received + 1) % _NUMBERS
        return body

    def _check(self, expected: bytes, tag: bytes | bytearray) -> None:
        if not hmac.compare_digest(expected, bytes(tag)):
            raise self._tampered()

    def _tampered(self) -> AuthenticationError:
        return AuthenticationError(
            f"{self._there}: the connection was tampered with: record {self._received} is not "
            "the one that was sent. Somebody between the two, who does not know the job's "
            "secret, changes what they send"
        )


def _tag(key: bytes, part: bytes, tag_bytes: int, number: bytes, data: bytes | bytearray) -> bytes:
    state = blake2s(number, key=key, digest_size=tag_bytes, person=part)
    state.update(data)
    return state.digest()

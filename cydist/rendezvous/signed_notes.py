"""Signed notes: what ranks write where cydist cannot authenticate the writer.

That is another library's store, a user's store, a file, or MPI. A note is one line of text that
ends in a MAC (HMAC-SHA256) under a key from the job's secret. The key depends on the job's id and
the note's purpose, so the note of another job or for another purpose is not taken for this one.
A process without the secret can destroy a note or repeat an old one, but it cannot write one.
"""

from __future__ import annotations

import hmac
import socket
from typing import NamedTuple

from cydist import config
from cydist.errors import AuthenticationError
from cydist.net import auth


class Address(NamedTuple):
    """Rank 0's note of where its store is, for one start of the job.

    name    random, of this start; the store admits only ranks that know it
    """

    size: int
    host: str
    port: int
    name: str


def signed(text: str, purpose: str, job: str = "") -> str:
    """Return `text` as a note for `purpose`."""
    return f"{text} {_mac(text, purpose, job)}"


def verified(
    note: bytes, purpose: str, job: str = "", *, reader: str, writer: str, where: str
) -> str:
    """Return the text of a note that `signed` made for the same purpose and job.

    reader, writer, where   for messages: the two processes, and the place of the note

    Raises AuthenticationError for any other bytes.
    """
    text, _, mac = note.decode(errors="replace").rpartition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(text, purpose, job).encode()):
        raise AuthenticationError(
            f"{reader} on {socket.gethostname()} found a note of {writer} in {where} that does not "
            "prove knowledge of this job's secret. Either the two do not share one secret: give "
            f"every host the same file, mode 0600, in {config.SECRET_FILE.names[0]}, and set "
            f"{config.INSECURE.names[0]} alike. Or somebody else wrote there, or another job did: "
            "start the job where only its own ranks can write"
        )
    return text


def signed_address(address: Address, purpose: str, job: str) -> str:
    """Return rank 0's note of `address`. Its host is a name or an address, without spaces."""
    return signed(" ".join(map(str, address)), f"address {purpose}", job)


def verified_address(note: bytes, purpose: str, job: str, *, rank: int, where: str) -> Address:
    """Return the address in rank 0's note. Raises AuthenticationError as `verified`."""
    text = verified(
        note, f"address {purpose}", job, reader=f"rank {rank}", writer="rank 0", where=where
    )
    size, host, port, name = text.split(" ")
    return Address(int(size), host, int(port), name)


def _mac(text: str, purpose: str, job: str) -> str:
    key = auth.job_key(auth.secret(), job, b"note " + purpose.encode())
    return hmac.digest(key, text.encode(errors="replace"), "sha256").hex()

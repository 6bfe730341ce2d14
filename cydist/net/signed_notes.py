"""Signed notes: what ranks write where cydist cannot authenticate the writer.

That is another library's store, a user's store, a file, or MPI. A note is its text, a space and a
MAC (HMAC-SHA256) under a key from the job's secret. The key depends on the job's id and the note's
purpose, so the note of another job or for another purpose is not taken for this one. A process
without the secret can destroy a note or repeat an old one, but it cannot write one.
"""

from __future__ import annotations

import hmac
import socket

from cydist import config
from cydist.errors import AuthenticationError
from cydist.net import auth


def signed(text: bytes | str, purpose: str, job: str = "") -> bytes:
    """Return `text` as a note for `purpose`."""
    text = text.encode() if isinstance(text, str) else text
    return text + b" " + _mac(text, purpose, job)


def verified(
    note: bytes, purpose: str, job: str = "", *, reader: str, what: str, where: str
) -> bytes:
    """Return the text of a note that `signed` made for the same purpose and job.

    Args:
        reader, what, where: For messages: the process, whose or which note, and its place.

    Raises AuthenticationError for any other bytes.
    """
    text, _, mac = note.rpartition(b" ")
    if not hmac.compare_digest(mac, _mac(text, purpose, job)):
        raise AuthenticationError(
            f"{reader} on {socket.gethostname()} found a note {what} in {where} that does not "
            "prove knowledge of this job's secret. Either the two do not share one secret: give "
            f"every host the same file, mode 0600, in {config.SECRET_FILE.names[0]}, and set "
            f"{config.INSECURE.names[0]} alike. Or somebody else wrote there, or another job did"
            f"{f' (this one is {job!r})' if job else ''}: start the job where only its own ranks "
            "can write"
        )
    return text


def _mac(text: bytes, purpose: str, job: str) -> bytes:
    role = b"note " + purpose.encode()
    return hmac.digest(auth.job_key(auth.secret(), job, role), text, "sha256").hex().encode()

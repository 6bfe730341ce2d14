"""Ask a peer one question, over a short authenticated connection of its own.

The thread that accepts connections answers, so a rank answers while it computes or waits, unless it
is stopped or holds the GIL. The question is the claim of the handshake, the answer one record.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from cydist.backends.host.addresses import SocketAddress
from cydist.errors import AuthenticationError, DistError
from cydist.net import auth
from cydist.net.acceptor import PendingPeer
from cydist.net.auth import ClientHandshake
from cydist.net.interfaces import family_of
from cydist.net.records import HEAD_BYTES, Records

MOST_ANSWER_BYTES = 8192


def ask(
    addresses: Sequence[SocketAddress],
    *,
    channel: bytes,
    secret: bytes,
    job: str,
    claim: bytes,
    deadline: float,
) -> bytes:
    """Return the answer of the rank that listens at one of these addresses. Raises OSError or
    DistError."""
    refusal: Exception = TimeoutError("no address was queried")
    for address in addresses:
        try:
            with socket.socket(family_of(address[0]), socket.SOCK_STREAM) as sock:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                sock.connect(address)
                handshake = auth.authenticate_client(
                    sock, channel=channel, job=job, claim=claim, secret=secret, deadline=deadline
                )
                return _opened(_rest_of(sock, deadline), handshake)
        except (OSError, DistError) as error:
            if not isinstance(refusal, AuthenticationError):  # which says more than a closed port
                refusal = error
    raise refusal


def _opened(data: bytes, handshake: ClientHandshake) -> bytes:
    """Return the answer in the one record that a peer sends; what is cut off is no answer."""
    records = Records(handshake, MOST_ANSWER_BYTES)
    data = records.decrypt(data)
    if len(data) < HEAD_BYTES or len(data) != HEAD_BYTES + records.open_head(data[:HEAD_BYTES]):
        raise AuthenticationError(f"{handshake.there} sent an answer that is not whole")
    return bytes(records.open_body(data[HEAD_BYTES:]))


def _rest_of(sock: socket.socket, deadline: float) -> bytes:
    data = b""
    while len(data) <= 2 * MOST_ANSWER_BYTES:  # encrypted, it is longer
        left = deadline - time.monotonic()
        if left <= 0.0:  # one byte at a time would prolong it
            raise TimeoutError("the answer did not come in time")
        sock.settimeout(left)
        part = sock.recv(MOST_ANSWER_BYTES)
        if not part:
            break
        data += part
    return data


def tell(peer: PendingPeer, data: bytes) -> None:
    """Complete the handshake with a member, and send it the answer. Raises OSError."""
    record = Records(peer.handshake, MOST_ANSWER_BYTES).seal(data)
    # An answer has some 8 KiB. An empty socket that does not take it is broken.
    peer.sock.send(peer.unsent + record, socket.MSG_NOSIGNAL)

"""Both sides of a handshake, in memory."""

from __future__ import annotations

from cydist.net.auth import ClientHandshake, ServerHandshake
from cydist.net.records import Records
from cydist.stores.protocol import MAX_FRAME_BYTES

SECRET = bytes(range(32))


def shaken_hands(
    channel: bytes = b"store", job: str = "", secret: bytes = SECRET
) -> tuple[ServerHandshake, ClientHandshake]:
    """Return a server and a client that have authenticated each other."""
    server = ServerHandshake(secret, channel, job)
    client = ClientHandshake(secret, channel, job)
    client.receive(server.receive(client.receive(server.greeting)))
    return server, client


def record_pair(most: int = MAX_FRAME_BYTES) -> tuple[Records, Records]:
    """Return a server's and its client's records of one connection."""
    server, client = shaken_hands()
    return Records(server, most), Records(client, most)

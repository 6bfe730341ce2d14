"""Both sides of a handshake, in memory."""

from __future__ import annotations

from collections.abc import Callable

from cydist._native import CipherHandle
from cydist.net.auth import ClientHandshake, ServerHandshake
from cydist.net.records import Records
from cydist.stores.protocol import MAX_FRAME_BYTES

SECRET = bytes(range(32))
KEY = bytes(range(32))  # of an encrypted connection


def shaken_hands(
    channel: bytes = b"store", job: str = "", secret: bytes = SECRET
) -> tuple[ServerHandshake, ClientHandshake]:
    """Return a server and a client that have authenticated each other."""
    server = ServerHandshake(secret, channel, job)
    client = ClientHandshake(secret, channel, job)
    shake_hands(server, client)
    return server, client


def shake_hands(
    server: ServerHandshake, client: ClientHandshake, change: Callable[[bytes], bytes] = bytes
) -> None:
    """Carry both sides' bytes to each other until both have finished.

    Args:
        change: What becomes of the bytes that one side sends.
    """
    waiting = {client: bytearray(change(server.greeting)), server: bytearray()}
    sides: tuple[ServerHandshake | ClientHandshake, ...] = (client, server)
    while not (server.done and client.done):
        moved = False
        for side, other in (sides, sides[::-1]):
            received = waiting[side]
            while side.needs and len(received) >= side.needs:
                message = bytes(received[: side.needs])
                del received[: side.needs]
                waiting[other] += change(side.receive(message))
                moved = True
        assert moved, "both sides wait"


def record_pair(most: int = MAX_FRAME_BYTES) -> tuple[Records, Records]:
    """Return a server's and its client's records of one connection."""
    server, client = shaken_hands()
    return Records(server, most), Records(client, most)


def ciphers() -> tuple[CipherHandle, CipherHandle]:
    """Return both sides' of one encrypted connection."""
    return CipherHandle(KEY, bytes(32)), CipherHandle(bytes(32), KEY)

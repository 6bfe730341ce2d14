"""The ports of a job, as a outsider finds them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transport_ranks import DEADLINE, SECRET, Ranks, done

from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import CLAIM
from cydist.net import auth
from cydist.stores import TCPStore

JOB = "test"

SocketAddress = tuple[str, int]


@dataclass
class Service:
    """A port of a job.

    Attributes:
        channel, claim: What a member says who comes to it.
        pending_peers: How many connections there have not proved themselves.
        use: A member that is there uses it, another comes; both see that it is right.
    """

    place: SocketAddress
    channel: bytes
    claim: bytes
    pending_peers: Callable[[], int]
    use: Callable[[], None]

    def outsider(self) -> socket.socket:
        return socket.create_connection(self.place, DEADLINE)

    def member(self) -> socket.socket:
        """A connection that has proved itself, at the first try."""
        sock = self.outsider()
        auth.authenticate_client(
            sock, channel=self.channel, job=JOB, claim=self.claim, secret=SECRET
        )
        return sock


@contextlib.contextmanager
def store_service() -> Iterator[Service]:
    auth.forget_secret()
    auth.set_secret(SECRET)
    with closing(TCPStore("127.0.0.1", 0, None, True, DEADLINE, job=JOB)) as master:
        count = 0

        def use() -> None:
            nonlocal count
            count += 1
            assert master.add("uses", 1) == 2 * count - 1
            with closing(TCPStore("127.0.0.1", master.port, timeout=DEADLINE, job=JOB)) as other:
                assert other.add("uses", 1) == 2 * count

        assert master._refcount is not None
        pending_peers = master._refcount.server.pending_peers
        yield Service(("127.0.0.1", master.port), b"store", b"", pending_peers, use)
    auth.forget_secret()


@contextlib.contextmanager
def peer_service() -> Iterator[Service]:
    """The listener of rank 0 of 16; ranks 0 and 1 talk, and each time a rank more."""
    with closing(Ranks("tcp", 16)) as world:
        newcomers = iter(range(2, 15))

        def message(source: int, destination: int) -> None:
            members = sorted((source, destination))
            group = dict(zip(members, world.group(members=members), strict=True))
            got = np.zeros(3)
            receive = group[destination].irecv(got, members.index(source), 0)
            done(group[source].isend(np.arange(3.0), members.index(destination), 0), receive)
            assert got.tolist() == [0, 1, 2]

        def use() -> None:
            message(1, 0)
            message(next(newcomers), 0)

        use()
        listener = world.connections[0]
        place = Address.decode(listener.address()).lanes[0][0]
        claim = CLAIM.pack(15, 0, 0)
        yield Service(place, b"peer", claim, listener.pending_peers, use)


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            data += part
    return data


def listening(pid: int) -> set[SocketAddress]:
    """Where a process listens, by the kernel's own tables."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()]
        for row in rows[1:]:
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:  # TCP_LISTEN
                host, _, port = row[1].partition(":")
                found.add((_address(bytes.fromhex(host)), int(port, 16)))
    return found


def _address(words: bytes) -> str:
    """An address from the kernel's words of 32 bits in its own byte order."""
    swapped = b"".join(words[at : at + 4][:: -1 if sys.byteorder == "little" else 1]
                       for at in range(0, len(words), 4))  # fmt: skip
    return str(ipaddress.ip_address(swapped))

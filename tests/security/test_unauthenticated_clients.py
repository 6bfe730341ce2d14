"""Outsiders at every port of a job: they cost nobody but themselves anything."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import select
import selectors
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from job_ports import JOB, Service, read_to_end
from transport_ranks import (
    DEADLINE,
    SECRET,
    Group,
    Ranks,
    descriptors,
    done,
    eventually,
    run,
    soon,
    status_of,
)

import cydist as dist
from cydist.backends.host import connect_attempt
from cydist.backends.host.addresses import Address
from cydist.errors import DistTimeoutError
from cydist.net import acceptor, auth
from cydist.rendezvous import multicast
from cydist.testing import run_threads

FLOOD = bytes(1 << 20)

# Many


def test_many_pending_peers_do_not_keep_members_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More outsiders than are heard at once, none of which will ever be done: members get in
    before any of them has had its time."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 10 * DEADLINE)
    with ExitStack() as stack:
        for i in range(acceptor.MOST_PENDING_PEERS + 50):
            outsider = stack.enter_context(service.outsider())
            if i % 2:
                outsider.send(b"c")
        eventually(lambda: service.pending_peers() == acceptor.MOST_PENDING_PEERS)
        service.member().close()
        service.use()
        assert service.pending_peers() <= acceptor.MOST_PENDING_PEERS


def test_a_pending_peer_takes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the room is full only the pending peer that came first gives way, and only to a
    newcomer."""
    monkeypatch.setattr(acceptor, "MOST_PENDING_PEERS", 4)
    monkeypatch.setattr(acceptor, "GRACE", 0.0)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        own = acceptor.Acceptor(selector, SECRET, b"peer", JOB)
        stack.callback(own.close)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        own.listen(listener)
        pending_peers = []
        for count in [1, 2, 3, 4, 4, 4]:
            pending_peers.append(
                stack.enter_context(socket.create_connection(listener.getsockname()))
            )
            for key, _ in selector.select(DEADLINE):
                own.react(key.fileobj)
            assert len(own) == count
        assert [len(read_to_end(peer)) for peer in pending_peers[:2]] == [77, 77]
        for peer in pending_peers[2:]:
            assert len(peer.recv(100)) == 77
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_silent_and_slow_clients_are_disconnected(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has not proved itself in time is hung up on, whether it said nothing or a part."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.3)
    outsiders = [service.outsider() for _ in range(20)]
    for i, outsider in enumerate(outsiders):
        outsider.send(bytes(8 * i))
    for outsider in outsiders:
        assert len(read_to_end(outsider)) == len(auth.FULL)  # the greeting, then the end
        outsider.close()
    eventually(lambda: service.pending_peers() == 0)


def test_flood_before_the_proof_takes_no_memory(service: Service) -> None:
    """Outsiders that send as much as the network takes, and those that stop a byte before the
    end of a proof, cost less than a KiB each, both ends' sockets included."""
    service.use()
    count = 200
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with ExitStack() as stack:
            for i in range(count):
                outsider = stack.enter_context(service.outsider())
                outsider.setblocking(False)
                with contextlib.suppress(OSError):
                    outsider.send(FLOOD if i % 2 else FLOOD[:196])
            eventually(lambda: service.pending_peers() <= count // 2)
            service.member().close()
            held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held - before < count * 1024
    service.use()


# Out of descriptors


@pytest.fixture
def world() -> Iterator[Ranks]:
    """Three ranks, of which 0 and 1 are connected."""
    with closing(Ranks("tcp", 3)) as ranks:
        exchange(ranks.group(), 0, 1)
        yield ranks


def exchange(groups: list[Group], source: int, destination: int) -> None:
    """One message, seen to be right."""
    got = np.zeros(3)
    run(
        lambda: done(groups[source].isend(np.arange(3.0), destination, 0)),
        lambda: done(groups[destination].irecv(got, source, 0)),
    )
    assert got.tolist() == [0, 1, 2]


def test_connected_ranks_need_no_descriptor(world: Ranks) -> None:
    """Without any descriptor left, ranks that are connected go on."""
    groups = world.group()
    with descriptors(0):
        for _ in range(10):
            exchange(groups, 0, 1)
            exchange(groups, 1, 0)


def test_connection_takes_one_descriptor_on_each_side(world: Ranks) -> None:
    """The last two descriptors are enough for both ends of a connection."""
    groups = world.group()
    with descriptors(2):
        exchange(groups, 0, 2)


def test_connection_is_made_once_there_are_descriptors(world: Ranks) -> None:
    """A message that needs a new connection goes when there are descriptors again."""
    groups = world.group()
    got = np.zeros(1)
    with descriptors(0):
        send, receive = groups[2].isend(np.ones(1), 0, 0), groups[0].irecv(got, 2, 0)
        assert not send.wait(soon(0.3))
    done(send, receive)
    assert got[0] == 1


def test_no_descriptor_for_a_connection_says_so(
    world: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are none in time, the error names EMFILE and what to do."""
    monkeypatch.setattr(connect_attempt, "CONNECT_TIMEOUT", 0.3)
    with descriptors(0):
        send = world.group()[2].isend(np.ones(1), 0, 0)
        send.wait(soon())
    assert status_of(send) == "peer_lost"
    assert "[Errno 24] Too many open files: close files, or raise" in world.links[2].lost(0)


@pytest.mark.parametrize(
    "receive",
    [
        lambda: dist.recv(np.zeros(1), 1, timeout=0.5),
        lambda: dist.irecv(np.zeros(1), 1).wait(0.5),
    ],
    ids=["call", "wait"],
)
def test_timeout_for_want_of_a_descriptor_says_so(
    receive: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends at its own deadline before that says why nothing came."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    ready, over = threading.Barrier(2, timeout=DEADLINE), threading.Event()

    def body(rank: int) -> None:
        ready.wait()
        if rank == 0:
            try:
                with descriptors(0), pytest.raises(DistTimeoutError) as caught:
                    receive()
            finally:
                over.set()
            assert re.search(r"waiting for rank 1 .*no connection.*\[Errno 24\].*ulimit -n",
                             str(caught.value))  # fmt: skip
        over.wait(DEADLINE)

    run_threads(body, 2, "tcp")


def test_peer_without_descriptors_says_so(world: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that connects to a rank that has no descriptor left learns that, and what to do."""
    place = Address.decode(world.connections[0].address()).lanes[0][0]
    with socket.socket() as newcomer, descriptors(0):
        newcomer.connect(place)
        with pytest.raises(OSError, match=r"\[Errno 24\].*has no file descriptor left") as caught:
            auth.authenticate_client(newcomer, channel=b"peer", job=JOB, secret=SECRET)
    assert "ulimit -n" in acceptor.with_remedy(caught.value)


def test_unauthenticated_clients_make_room_for_authenticated_ones(world: Ranks) -> None:
    """A rank whose last descriptors outsiders hold still connects to a peer."""
    place = Address.decode(world.connections[0].address()).lanes[0][0]
    groups = world.group()
    with ExitStack() as stack:
        outsiders = [stack.enter_context(socket.socket()) for _ in range(8)]
        with descriptors(4):
            for outsider in outsiders:
                outsider.connect(place)
            eventually(lambda: world.connections[0].pending_peers() >= 4)
            exchange(groups, 0, 2)
            exchange(groups, 0, 1)


def test_port_whose_descriptors_unauthenticated_clients_hold(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While outsiders hold the process's last descriptors members go on, and new ones get in."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.5)
    service.use()
    with ExitStack() as stack:
        outsiders = [stack.enter_context(socket.socket()) for _ in range(30)]
        with descriptors(8):
            for outsider in outsiders:
                outsider.connect(service.place)
            service.use()


# Announcements


@pytest.fixture
def multicast_groups(secret: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two processes' ends of a meeting, the leader's first, that hear what a test sends them."""

    def plain(host: str, port: int) -> tuple[socket.socket, socket.socket]:
        sender, receiver = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
        receiver.bind((host, port))
        return sender, receiver

    monkeypatch.setattr(multicast, "_sockets", plain)
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            group = multicast._MulticastGroup("127.0.0.1", port, "", 2)
            stack.callback(group._own.close)
            made.append(stack.enter_context(group))
        yield sorted(made, key=lambda group: group.name)


def announcement(group: Any) -> bytes:
    """What a process announces."""
    group._announce()
    return bytes(group._receiver.recv(4096))


def announce_to(group: Any, *datagrams: bytes, sender: str = "127.0.0.1") -> None:
    """Let a process hear datagrams, and choose whom to follow."""
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.bind((sender, 0))
        for datagram in datagrams:
            sock.sendto(datagram, group._to)
    arrived = select.poll()  # which knows no largest descriptor
    arrived.register(group._receiver, select.POLLIN)
    while arrived.poll(0):
        group._listen(time.monotonic() + 0.01)
    group.join_leading_store(time.monotonic() + DEADLINE)


def test_announcement_is_followed(multicast_groups: list[Any]) -> None:
    """A process follows the one with the smaller name."""
    leader, other = multicast_groups
    announce_to(other, announcement(leader))
    assert other._leader == leader.name


def test_repeated_announcement_leads_to_its_author(multicast_groups: list[Any]) -> None:
    """An announcement that a outsider repeats from its own address says where its author is."""
    leader, other = multicast_groups
    announce_to(other, announcement(leader), sender="127.0.0.9")
    assert other._leader == leader.name


def test_changed_announcements_are_ignored(multicast_groups: list[Any]) -> None:
    """Noise, and an announcement with any byte changed, cut or added, are nobody's."""
    leader, other = multicast_groups
    honest = announcement(leader)
    noise = random.Random(11)
    changed = [bytes(b ^ (i == at) for i, b in enumerate(honest)) for at in range(len(honest))]
    cut = [honest[:-1], honest + b"x", b"", honest * 2]
    for datagrams in (changed, cut, [noise.randbytes(noise.randint(0, 200)) for _ in range(200)]):
        announce_to(other, *datagrams)
    assert set(other._announced) <= {other.name}
    assert other._leader == other.name
    announce_to(other, honest)
    assert other._leader == leader.name

"""What is set on connections, so that the kernels find hosts that vanish."""

from __future__ import annotations

import math
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from cydist import _native
from cydist.backends.host import connect_attempt
from cydist.backends.host.addresses import Address
from cydist.backends.host.connect_attempt import set_options
from cydist.backends.host.connections import Connections
from cydist.net.silence import peer_timeout, watch_idle

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("seconds", ["2", "3", "15", "60", "86400", "1e8"])
def test_idle_connections_end_in_time(
    pair: Pair, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's probes take no longer than the timeout, as far as it can count."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", seconds)
    watch_idle(pair[0])
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, probes = (
        pair[0].getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert 0.5 * min(float(seconds), 20000) <= idle + interval * probes <= float(seconds)


def test_no_timeout_leaves_connections_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is probed, and nothing looked at."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "inf")
    watch_idle(pair[0])
    assert not pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert math.isinf(_native.SilenceWatch(peer_timeout()).period)


@pytest.mark.parametrize("value", ["1.9", "-15", "soon", "", "nan"])
def test_bad_timeouts_are_refused(
    value: str, secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting's name, before anything is connected."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"CYDIST_PEER_TIMEOUT='{value}' is not 2 or more"):
        Connections(0, 1, host="127.0.0.1", job="j")


def test_unread_bytes_are_no_silence(pair: Pair) -> None:
    """A full connection owes no answer: the other kernel has acknowledged all that it has room
    for, and the rest waits for its process."""
    ours, _ = pair
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    watch = _native.SilenceWatch(2.0)
    # Owed for a moment only, while bytes are on their way to a kernel that has room.
    while watch.look(ours.fileno())[0]:
        pass
    assert watch.look(ours.fileno()) == (False, False)


def test_a_connection_that_was_reset_can_be_handed_over(pair: Pair) -> None:
    """Its options are set, so that the link takes it and finds out that the peer is gone."""
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    ours.settimeout(10)
    with pytest.raises(ConnectionResetError):
        ours.recv(1)
    with pytest.raises(OSError, match="not connected"):
        ours.getpeername()
    set_options(ours)


def test_other_descriptors_owe_nothing() -> None:
    """A socket pair of one kernel is never silent."""
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")
        assert _native.SilenceWatch(2.0).look(one.fileno()) == (False, False)


class Crowded:
    """A port whose kernel lets connections in until its queue is full, and then does not answer."""

    def __init__(self, stack: ExitStack, *, full: bool) -> None:
        self._listener = stack.enter_context(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.place = self._listener.getsockname()
        if full:
            stack.enter_context(socket.create_connection(self.place))

    def address(self, rank: int, host: str) -> bytes:
        return Address(rank, host, [[self.place]]).encode()


def first_message(stack: ExitStack, others: list[bytes], to: int = 1) -> Connections:
    """Return rank 0 of some ranks, which has tried for a while to send to another one first."""
    ours = stack.enter_context(closing(Connections(0, 1 + len(others), host="127.0.0.1", job="j")))
    ours.connect([ours.address(), *others])
    send(ours, to)
    return ours


def send(ours: Connections, to: int, seconds: float = 5.0) -> None:
    """Send a byte, or try for some seconds."""
    group = _native.Group(ours.link, list(range(ours.link.size)), 0, to)
    message = _native.isend(group, _native.asarray(bytearray(1)), to, 0)
    message.wait(int((time.monotonic() + seconds) * 1e9))
    group.close()


def test_a_first_connection_without_an_answer(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host counts as gone, with all its ranks, those that were not tried too."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "2")
    with ExitStack() as stack:
        crowded = Crowded(stack, full=True)
        hosts = {1: "far", 2: "far", 3: "farther"}
        ours = first_message(stack, [crowded.address(*each) for each in hosts.items()])
        assert [ours.link.vanished(rank) for rank in (1, 2, 3)] == [True, True, False]
        assert "it has not answered for 2 s (CYDIST_PEER_TIMEOUT)" in ours.link.lost(1)
        assert "or a firewall drops packets to its ranks' ports" in ours.link.lost(1)


def test_a_rank_listens_in_the_kernels_range(secret: bytes) -> None:
    """A firewall that lets this range pass lets ranks connect."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with closing(Connections(0, 2, host="127.0.0.1", job="j")) as ours:
        ports = [port for lane in Address.decode(ours.address()).lanes for _, port in lane]
    assert ports
    assert all(low <= port <= high for port in ports)


def test_a_first_connection_to_a_stopped_rank(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel accepts, so it is alive, however long it says nothing."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "2")
    monkeypatch.setattr(connect_attempt, "CONNECT_TIMEOUT", 0.3)
    with ExitStack() as stack:
        stopped = Crowded(stack, full=False)
        ours = stack.enter_context(closing(Connections(0, 2, host="127.0.0.1", job="j")))
        ours.connect([ours.address(), stopped.address(1, "far")])
        send(ours, 1, 1.0)
        assert ours.link.lost(1) == ""
        assert "has not greeted this rank yet" in ours.connect_error(1)


def test_a_host_that_answers_others_is_tried_for_longer(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall may let its rank connect to this one: only the attempts' own end gives it up."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "3")
    monkeypatch.setattr(connect_attempt, "CONNECT_TIMEOUT", 3.5)
    with ExitStack() as stack:
        crowded = Crowded(stack, full=True).address(1, "far")
        beside = stack.enter_context(closing(Connections(2, 3, host="127.0.0.1", job="j")))
        address = Address.decode(beside.address())._replace(host="far").encode()
        ours = first_message(stack, [crowded, address], to=2)
        beside.connect([ours.address(), crowded, address])
        send(ours, 1)
        assert not ours.link.vanished(1)
        assert re.search(r"rank 1 at \S+: no answer \(for", ours.link.lost(1))


def test_a_rank_without_others_has_no_traffic(secret: bytes) -> None:
    """Traffic is that of connections through sockets."""
    with closing(Connections(0, 2, host="127.0.0.1", job="j")) as connections:
        assert connections.link.traffic(0) is None
        assert connections.link.traffic(1) is None
        assert not connections.link.vanished(1)

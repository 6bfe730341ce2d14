"""The sockets behind a TcpLink: who gets in, what a outsider costs, what damage does."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest
from extra_values import more
from transport_ranks import (
    DEADLINE,
    SECRET,
    Group,
    Ranks,
    descriptors,
    done,
    eventually,
    has_ipv6,
    run,
    soon,
    status_of,
)

from cydist import _native
from cydist.backends.host import addresses, connect_attempt
from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import CHANNEL, CLAIM, Connections
from cydist.backends.host.peer_report import PeerReport
from cydist.errors import DistError, DistNetworkError, RendezvousError
from cydist.net import auth, interfaces
from cydist.stores import FileStore, HashStore, PrefixStore, Store


@pytest.fixture
def tcp() -> Iterator[Callable[[int], Ranks]]:
    """Makes ranks over loopback; all of them leave at the end."""
    with ExitStack() as stack:

        def make(size: int = 2) -> Ranks:
            return stack.enter_context(closing(Ranks("tcp", size)))

        yield make


def made(world: Ranks) -> list[int]:
    """How many connections each rank's link has ever taken."""
    return [link.statistics()["made"] for link in world.links]


def endpoint(connection: Connections) -> tuple[str, int]:
    """Where a rank listens."""
    return Address.decode(connection.address()).lanes[0][0]


def ended(outsider: socket.socket) -> bool:
    """Has the other side hung up? Waits until it does."""
    try:
        while outsider.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# Lazy, and one per pair


def test_no_connection_before_the_first_message(tcp: Callable[[int], Ranks]) -> None:
    """Groups alone connect nobody."""
    world = tcp(3)
    world.group()
    assert made(world) == [0, 0, 0]


def test_only_ranks_that_send_connect(tcp: Callable[[int], Ranks]) -> None:
    """A message from 0 to 1 leaves 2 without a connection."""
    world = tcp(3)
    groups = world.group()
    got = np.zeros(1)
    run(lambda: done(groups[0].isend(np.ones(1), 1, 0)), lambda: done(groups[1].irecv(got, 0, 0)))
    assert made(world) == [1, 1, 0]


@pytest.mark.parametrize("turn", [0, 1, 2, *more(*range(3, 10))])
def test_one_connection_when_all_start_at_once(tcp: Callable[[int], Ranks], turn: int) -> None:
    """When both ranks of every pair start together, each pair has exactly one connection."""
    world = tcp(4)
    groups = world.group()

    def talk_to_all(me: int) -> None:
        peers = [peer for peer in range(4) if peer != me]
        got = {peer: np.zeros(1) for peer in peers}
        sends = [groups[me].isend(np.full(1, float(me)), peer, 0) for peer in peers]
        done(*sends, *[groups[me].irecv(got[peer], peer, 0) for peer in peers])
        assert {peer: got[peer][0] for peer in peers} == {peer: peer for peer in peers}

    run(*[lambda me=me: talk_to_all(me) for me in range(4)])
    assert made(world) == [3, 3, 3, 3]


def test_a_waiting_rank_finds_a_dead_peer_without_a_message(tcp: Callable[[int], Ranks]) -> None:
    """A rank that nobody can reach any more is lost, with a reason that names it."""
    world = tcp(2)
    groups = world.group()
    world.leave(1)
    receive = groups[0].irecv(np.zeros(1), 1, 0)
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert "no connection to rank 1" in world.links[0].lost(1)


# Lanes


def test_interfaces_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interfaces are two connections per pair, and calls use both."""
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", "lo,127.0.0.1")
    with closing(Ranks("tcp", 2)) as world:
        a, b = world.group()
        got = np.zeros(6, np.int64)
        sends = [a.isend(np.full(1, tag, np.int64), 1, tag) for tag in range(6)]
        run(
            lambda: done(*sends),
            lambda: done(*[b.irecv(got[tag : tag + 1], 0, tag) for tag in range(6)]),
        )
        assert got.tolist() == list(range(6))
        assert made(world) == [2, 2]
        assert [world.links[0].lane_is_live(1, lane) for lane in (0, 1)] == [True, True]


def test_other_number_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with unequal numbers of interfaces are told which, and what to set."""
    one = Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", "lo,lo")
    two = Connections(1, 2, host="127.0.0.1", job="j", secret=SECRET)
    with closing(one), closing(two):
        published = [one.address(), two.address()]
        with pytest.raises(RendezvousError, match=r"1 network interface and rank 1 2.*IFNAME"):
            one.connect(published)


def test_unknown_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is not there is named, beside those that are."""
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(DistNetworkError, match=r"'nosuch0'.*\blo\b"):
        Connections(0, 1, host="127.0.0.1", job="j", secret=SECRET)


class OfAnotherLibrary:
    """A TCPStore that is not ours, as torch's: it says where it is."""

    host = "localhost"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(HashStore, "127.0.0.1", id="hash"),
        pytest.param(OfAnotherLibrary, "127.0.0.1", id="another library's TCPStore"),
        pytest.param(lambda: FileStore("store", 2), "192.0.2.2", id="file"),
        pytest.param(Store, "192.0.2.2", id="the user's own"),
    ],
)
def test_ranks_listen_where_others_reach_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Callable[[], object], expected: str
) -> None:
    """By loopback only if the store says that they all are on this host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(addresses, "public_address", lambda: "192.0.2.2")
    store = made()
    for each in (store, PrefixStore("part", store)):
        assert addresses.where_to_listen(each) == expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        pytest.param("lo", "127.0.0.1", id="interface"),
        pytest.param(" ,  lo,nowhere", "127.0.0.1", id="spaces"),
        pytest.param("127.0.0.9", "127.0.0.9", id="address"),
        pytest.param("fd00::1", "fd00::1", id="address of IPv6"),
        pytest.param("only6", "fd00::2", id="interface with IPv6 alone"),
    ],
)
def test_ranks_that_meet_in_a_file_listen_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, expected: str
) -> None:
    """Where the store does not say where it is, others reach the first interface that is named,
    however it is."""
    table = tmp_path / "if_inet6"
    table.write_text("fd000000000000000000000000000002 09 40 00 80 only6\n")
    monkeypatch.setattr(interfaces, "IPV6_TABLE", str(table))
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", named)
    with closing(FileStore(str(tmp_path / "store"), 2)) as store:
        assert addresses.where_to_listen(store) == expected


def test_both_families_of_an_interface() -> None:
    """An interface is listened to at all of its addresses."""
    found = interfaces.interface_addresses("lo")
    assert "127.0.0.1" in found
    assert ("::1" in found) == has_ipv6()


@pytest.mark.parametrize(
    "data",
    [b"", b"0", b"0\nh", b"0\nh\nlocalhost 1", b"0\nh\n::1 1 ::1", b"00\nh\n::1 1", b"1" * 70000],
    ids=["empty", "no host", "no lane", "name", "no port", "zeros", "long"],
)
def test_addresses_are_checked(data: bytes) -> None:
    """What is no address is refused, not believed."""
    with pytest.raises(RendezvousError):
        Address.decode(data)


def test_addresses_out_of_order() -> None:
    """Addresses of the wrong ranks are refused."""
    one = Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)
    with closing(one), pytest.raises(RendezvousError, match="ranks 0 to 1"):
        one.connect([one.address(), one.address()])


# Outsiders


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.0\r\n\r\n" * 20, bytes(192), b"\xff" * 500])
def test_garbage_is_dismissed(tcp: Callable[[int], Ranks], garbage: bytes) -> None:
    """A rank that does not prove the secret is hung up on, and the ranks go on."""
    world = tcp(2)
    groups = world.group()
    with socket.create_connection(endpoint(world.connections[1]), DEADLINE) as outsider:
        outsider.sendall(garbage)
        assert ended(outsider)
    got = np.zeros(1)
    run(lambda: done(groups[0].isend(np.ones(1), 1, 0)), lambda: done(groups[1].irecv(got, 0, 0)))
    assert made(world) == [1, 1]


def test_other_job_is_refused(tcp: Callable[[int], Ranks]) -> None:
    """A rank of another job with the same secret is not let in."""
    world = tcp(2)
    with socket.create_connection(endpoint(world.connections[0]), DEADLINE) as outsider:
        endpoints = auth.endpoints_of(outsider, accepted=False)
        handshake = auth.ClientHandshake(
            SECRET, CHANNEL, "other", CLAIM.pack(1, 0, 0), endpoints=endpoints
        )
        outsider.sendall(handshake.receive(outsider.recv(handshake.needs, socket.MSG_WAITALL)))
        with pytest.raises(auth.AuthenticationError, match="different jobs"):
            handshake.receive(outsider.recv(handshake.needs, socket.MSG_WAITALL))
    assert made(world) == [0, 0]


@pytest.mark.parametrize(
    "claim",
    [CLAIM.pack(0, 0, 0), CLAIM.pack(1, 1, 0), CLAIM.pack(7, 0, 0), CLAIM.pack(1, 0, 3), b""],
    ids=["itself", "not us", "no such rank", "no such lane", "nothing"],
)
def test_wrong_claims_are_refused(tcp: Callable[[int], Ranks], claim: bytes) -> None:
    """A member of the job that claims what cannot be is hung up on."""
    world = tcp(2)
    with socket.create_connection(endpoint(world.connections[0]), DEADLINE) as member:
        endpoints = auth.endpoints_of(member, accepted=False)
        handshake = auth.ClientHandshake(SECRET, CHANNEL, "test", claim, endpoints=endpoints)
        member.sendall(handshake.receive(member.recv(handshake.needs, socket.MSG_WAITALL)))
        assert member.recv(4096) == b""
    assert made(world) == [0, 0]


@pytest.mark.parametrize("left", range(3))
def test_a_link_without_descriptors_is_not_made(left: int) -> None:
    """One that wants more than there are raises OSError, and keeps none."""
    with descriptors(left):
        with pytest.raises(OSError, match="no descriptors for a link") as caught:
            _native.TcpLink(0, 2)
        again = [os.open(os.devnull, os.O_RDONLY) for _ in range(left)]
    for fd in again:
        os.close(fd)
    assert caught.value.errno == errno.EMFILE


def test_a_connection_that_comes_as_the_link_closes_is_accepted() -> None:
    """The link closes before the listeners. A connection that comes in between may get the number
    of the descriptor through which the link asked for connections."""
    one = Connections(0, 1, host="127.0.0.1", job="j", secret=SECRET)
    with closing(one), ExitStack() as opened:
        one.connect([one.address()])
        number = one.link.wanted_fd
        one.link.close()
        client = opened.enter_context(socket.socket())
        while (fd := os.open(os.devnull, os.O_RDONLY)) != number:
            assert fd < number
            opened.callback(os.close, fd)
        os.close(fd)
        client.connect(endpoint(one))
        eventually(lambda: one.pending_peers() == 1)


def test_no_descriptor_left(tcp: Callable[[int], Ranks]) -> None:
    """Without a free descriptor a newcomer is told so at once, not left to wait."""
    place = endpoint(tcp(1).connections[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as newcomer:
        newcomer.settimeout(DEADLINE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            newcomer.connect(place)
            greeting = newcomer.recv(4096)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert greeting == auth.FULL
    with socket.create_connection(place, DEADLINE) as next_one:
        assert len(next_one.recv(4096)) == 77


def test_other_secret_is_a_lost_peer_with_a_reason() -> None:
    """Ranks with different secrets cannot talk, and the reason says so."""
    ours = Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)
    theirs = Connections(1, 2, host="127.0.0.1", job="j", secret=bytes(32))
    with closing(ours), closing(theirs):
        published = [ours.address(), theirs.address()]
        ours.connect(published)
        theirs.connect(published)
        send = Group(_native.Group(ours.link, [0, 1], 0, 1)).isend(np.ones(1), 1, 0)
        send.wait(soon())
        assert status_of(send) == "peer_lost"
        assert "secret" in ours.link.lost(1)


def test_short_greeting_of_another_service_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is led to another service says what that said, though it says no more."""
    monkeypatch.setattr(connect_attempt, "CONNECT_TIMEOUT", 0.3)
    stop = threading.Event()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with suppress(OSError):
                while not stop.is_set():
                    stack.enter_context(listener.accept()[0]).sendall(b"SSH-2.0\r\n")

        service = threading.Thread(target=serve)
        service.start()
        ours = stack.enter_context(
            closing(Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET))
        )
        there = Address(1, "elsewhere", [[listener.getsockname()]])
        ours.connect([ours.address(), there.encode()])
        send = Group(_native.Group(ours.link, [0, 1], 0, 1)).isend(np.ones(1), 1, 0)
        send.wait(soon())
        stop.set()
        socket.create_connection(listener.getsockname(), DEADLINE).close()
        service.join(DEADLINE)
        assert status_of(send) == "peer_lost"
        assert "not a cydist service: it began with b'SSH" in ours.link.lost(1)


def test_report_that_fails_is_no_report(tcp: Callable[[int], Ranks]) -> None:
    """Whatever goes wrong while a rank says what it is doing, it goes on connecting."""
    world = tcp(2)

    def fails(context: int) -> PeerReport:
        raise UnicodeError("a source that is none")

    world.connections[0].report_of = fails
    limit = time.monotonic() + DEADLINE
    with pytest.raises((DistError, OSError)):
        world.connections[1].query(0, 1, limit)
    got = np.zeros(1)
    groups = world.group()
    run(lambda: done(groups[1].isend(np.ones(1), 0, 0)), lambda: done(groups[0].irecv(got, 1, 0)))
    assert got[0] == 1


# Processes


def test_killed_process_is_lost() -> None:
    """SIGKILL of a peer ends the receives that wait for it."""
    ours = Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)
    script = (
        "import sys, numpy as np; from cydist import _native;"
        "from cydist.backends.host.connections import Connections;"
        "c = Connections(1, 2, host='127.0.0.1', job='j', secret=bytes(range(32)));"
        "print(c.address().hex(), flush=True); c.connect([bytes.fromhex(sys.stdin.readline()),"
        "c.address()]); g = _native.Group(c.link, [0, 1], 1, 1);"
        "_native.isend(g, _native.asarray(np.ones(1)), 0, 0).wait(10**18); sys.stdin.read()"
    )
    with closing(ours):
        peer = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with peer:
            assert peer.stdin is not None
            assert peer.stdout is not None
            published = [ours.address(), bytes.fromhex(peer.stdout.readline().decode())]
            peer.stdin.write(ours.address().hex().encode() + b"\n")
            peer.stdin.flush()
            ours.connect(published)
            group = Group(_native.Group(ours.link, [0, 1], 0, 1))
            done(group.irecv(np.zeros(1), 1, 0))
            receive = group.irecv(np.zeros(1), 1, 1)
            os.kill(peer.pid, signal.SIGKILL)
            receive.wait(soon())
            assert status_of(receive) == "peer_lost"
            assert "without a goodbye" in ours.link.lost(1)


def pollers() -> set[str]:
    """The descriptors by which this process waits for others."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_forked_child_lets_go(tcp: Callable[[int], Ranks]) -> None:
    """A forked child holds none of the parent's sockets, and the parent's go on working."""
    before = pollers()  # of whatever else the process does
    world = tcp(2)
    a, b = world.group()
    run(lambda: done(a.isend(np.ones(1), 1, 0)), lambda: done(b.irecv(np.ones(1), 0, 0)))
    pid = os.fork()
    if pid == 0:
        os._exit(len(pollers() - before))
    assert pollers() - before
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    got = np.zeros(1)
    run(lambda: done(a.isend(np.ones(1), 1, 0)), lambda: done(b.irecv(got, 0, 0)))
    assert got[0] == 1


def test_closing_twice() -> None:
    """close() may be called again, and leaves no thread and no descriptor."""
    before = set(os.listdir("/proc/self/fd"))
    one = Connections(0, 1, host="127.0.0.1", job="j", secret=SECRET)
    one.close()
    one.close()
    assert one._thread is not None
    assert not one._thread.is_alive()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_host_that_cannot_be_bound() -> None:
    """An address that is not ours is named."""
    with pytest.raises(DistNetworkError, match=r"rank 0 cannot listen.*192\.0\.2\.1"):
        Connections(0, 1, host="192.0.2.1", job="j", secret=SECRET)


@pytest.mark.parametrize("bound", [False, True], ids=["anywhere", "bound"])
def test_waits_spin_if_there_is_a_core_for_each_rank(bound: bool) -> None:
    """A rank that is bound to a core leaves the others to the ranks beside it."""
    before = os.sched_getaffinity(0)
    with closing(Connections(0, 1, host="127.0.0.1", job="j", secret=SECRET)) as connections:
        os.sched_setaffinity(0, {min(before)} if bound else before)
        try:
            enough = connections.link.share_cores(len(before))
            too_many = connections.link.share_cores((os.cpu_count() or 1) + 1)
        finally:
            os.sched_setaffinity(0, before)
    assert (enough, too_many) == (True, False)

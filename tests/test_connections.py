"""The sockets behind a TcpLink: who gets in, what a stranger costs, what damage does."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from cydist import _native, auth
from cydist.backends import addresses
from cydist.backends.addresses import Address
from cydist.backends.connections import CHANNEL, CLAIM, MAX_GUESTS, Connections
from cydist.errors import DistNetworkError, RendezvousError
from transports import DEADLINE, SECRET, Group, Ranks, done, has_ipv6, run, soon, status_of

# Header: magic, kind, lane, flags, context, tag, nbytes, id, other, released; fingerprint.
HEADER = struct.Struct("=IBBH6Q40s")
MAGIC = 0x01645943
EAGER, OFFER, ANSWER, DATA, GOODBYE = 1, 2, 3, 4, 7


def header(
    kind: int, *, tag: int = 0, nbytes: int = 0, magic: int = MAGIC, other: int = 0
) -> bytes:
    """One frame's header as the wire has it, of context 1."""
    return HEADER.pack(magic, kind, 0, 0, 1, tag, nbytes, 1, other, 0, bytes(40))


@pytest.fixture
def tcp() -> Iterator[Callable[[int], Ranks]]:
    """Makes ranks over loopback; all of them leave at the end."""
    with ExitStack() as stack:

        def make(size: int = 2) -> Ranks:
            return stack.enter_context(closing(Ranks("tcp", size)))

        yield make


@pytest.fixture
def pair() -> Iterator[tuple[_native.TcpLink, socket.socket]]:
    """A link whose peer, rank 1, is the other end of a socket in the test's hands."""
    link = _native.TcpLink(0, 2)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    assert link.adopt(1, 0, ours.detach())
    with theirs:
        theirs.settimeout(DEADLINE)
        yield link, theirs
    link.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    limit = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.002)


def made(world: Ranks) -> list[int]:
    """How many connections each rank's link has ever taken."""
    return [link.statistics()["made"] for link in world.links]


def endpoint(connection: Connections) -> tuple[str, int]:
    """Where a rank listens."""
    return Address.decode(connection.address()).lanes[0][0]


def ended(stranger: socket.socket) -> bool:
    """Has the other side hung up? Waits until it does."""
    try:
        while stranger.recv(4096):
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


def test_only_those_who_talk_connect(tcp: Callable[[int], Ranks]) -> None:
    """A message from 0 to 1 leaves 2 without a connection."""
    world = tcp(3)
    groups = world.group()
    got = np.zeros(1)
    run(lambda: done(groups[0].isend(np.ones(1), 1, 0)), lambda: done(groups[1].irecv(got, 0, 0)))
    assert made(world) == [1, 1, 0]


@pytest.mark.parametrize("turn", range(10))
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


def test_who_waits_finds_a_dead_peer_without_a_message(tcp: Callable[[int], Ranks]) -> None:
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
        with pytest.raises(RendezvousError, match=r"1 network interfaces and rank 1 2.*IFNAME"):
            one.connect(published)


def test_unknown_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is not there is named, beside those that are."""
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(DistNetworkError, match=r"'nosuch0'.*\blo\b"):
        Connections(0, 1, host="127.0.0.1", job="j", secret=SECRET)


def test_both_families_of_an_interface() -> None:
    """An interface is listened to at all of its addresses."""
    found = addresses.of_interface("lo")
    assert "127.0.0.1" in found
    assert ("::1" in found) == has_ipv6()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b'{"rank":0,"host":"h","lanes":[[["localhost",1]]]}', b"[" * 70000],
    ids=["empty", "no fields", "list", "name", "deep"],
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


# Strangers


def test_stranger_is_dismissed_at_the_deadline(
    tcp: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who says nothing is hung up on; the ranks do not notice."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.2)
    world = tcp(2)
    with socket.create_connection(endpoint(world.connections[0]), DEADLINE) as stranger:
        assert len(stranger.recv(4096)) == 40
        assert ended(stranger)
    eventually(lambda: world.connections[0].guests() == 0)


def test_half_a_handshake_is_dismissed(
    tcp: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an answer buys no more time than none."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.2)
    world = tcp(2)
    with socket.create_connection(endpoint(world.connections[0]), DEADLINE) as stranger:
        stranger.sendall(bytes(50))
        assert ended(stranger)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.0\r\n\r\n" * 20, bytes(192), b"\xff" * 500])
def test_garbage_is_dismissed(tcp: Callable[[int], Ranks], garbage: bytes) -> None:
    """Whoever does not prove the secret is hung up on, and the ranks go on."""
    world = tcp(2)
    groups = world.group()
    with socket.create_connection(endpoint(world.connections[1]), DEADLINE) as stranger:
        stranger.sendall(garbage)
        assert ended(stranger)
    got = np.zeros(1)
    run(lambda: done(groups[0].isend(np.ones(1), 1, 0)), lambda: done(groups[1].irecv(got, 0, 0)))
    assert made(world) == [1, 1]


def test_other_job_is_refused(tcp: Callable[[int], Ranks]) -> None:
    """A rank of another job with the same secret is not let in."""
    world = tcp(2)
    with socket.create_connection(endpoint(world.connections[0]), DEADLINE) as stranger:
        shake = auth.ClientHandshake(SECRET, CHANNEL, "other", CLAIM.pack(1, 0, 0))
        stranger.sendall(shake.receive(stranger.recv(shake.needs, socket.MSG_WAITALL)))
        with pytest.raises(auth.AuthenticationError, match="different jobs"):
            shake.receive(stranger.recv(shake.needs, socket.MSG_WAITALL))
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
        shake = auth.ClientHandshake(SECRET, CHANNEL, "test", claim)
        member.sendall(shake.receive(member.recv(shake.needs, socket.MSG_WAITALL)))
        assert member.recv(4096) == b""
    assert made(world) == [0, 0]


def test_crowd_of_strangers(tcp: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers than are heard at once delay a rank, and no more."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.3)
    world = tcp(2)
    groups = world.group()
    with ExitStack() as stack:
        for _ in range(MAX_GUESTS + 20):
            stack.enter_context(socket.create_connection(endpoint(world.connections[1]), DEADLINE))
        eventually(lambda: world.connections[1].guests() == MAX_GUESTS)
        got = np.zeros(1)
        run(
            lambda: done(groups[0].isend(np.ones(1), 1, 0)),
            lambda: done(groups[1].irecv(got, 0, 0)),
        )
    assert got[0] == 1


def test_no_descriptor_left(tcp: Callable[[int], Ranks]) -> None:
    """Without a free descriptor a newcomer is turned away at once, not left to wait."""
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
        except ConnectionResetError:
            greeting = b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert greeting == b""
    with socket.create_connection(place, DEADLINE) as next_one:
        assert len(next_one.recv(4096)) == 40


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


# Framing, with the peer in the test's hands


class Trickle:
    """Carries bytes between two links, a few at a time."""

    def __init__(self, links: list[_native.TcpLink], step: int) -> None:
        self.ends = []
        for rank, link in enumerate(links):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            assert link.adopt(1 - rank, 0, ours.detach())
            self.ends.append(theirs)
        self.threads = [
            threading.Thread(target=self.carry, args=(self.ends[i], self.ends[1 - i], step))
            for i in (0, 1)
        ]
        for thread in self.threads:
            thread.start()

    def carry(self, source: socket.socket, target: socket.socket, step: int) -> None:
        try:
            while data := source.recv(step):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE)
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("step", [1, 7, 96, 97, 4096])
def test_frames_in_pieces(step: int) -> None:
    """However the stream is cut, every message arrives whole."""
    links = [_native.TcpLink(rank, 2) for rank in (0, 1)]
    trickle = Trickle(links, step)
    a, b = (Group(_native.Group(link, [0, 1], rank, 1)) for rank, link in enumerate(links))
    sizes = [0, 1, 95, 96, 97, 1000, *([70_000] if step > 1 else [])]
    sent = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    got = [np.zeros(n, np.uint8) for n in sizes]
    sends = [a.isend(array, 1, 0) for array in sent]
    run(lambda: done(*sends), lambda: done(*[b.irecv(array, 0, 0) for array in got]))
    assert [array.tobytes() for array in got] == [array.tobytes() for array in sent]
    for link in links:
        link.close()
    trickle.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 96,
        header(EAGER, magic=MAGIC + (1 << 24)),
        header(EAGER, nbytes=1 << 60),
        header(DATA, other=12345, nbytes=10),
        header(99),
        header(0),
        HEADER.pack(MAGIC, EAGER, 3, 0, 1, 0, 0, 1, 0, 0, bytes(40)),
        HEADER.pack(MAGIC, EAGER, 0, 0, 1, 0, 0, 1, 0, 1 << 40, bytes(40)),
        header(GOODBYE) + header(EAGER),
    ],
    ids=[
        "noise", "other version", "huge", "data nobody asked for", "unknown kind", "kind zero",
        "other lane", "credit never given", "after goodbye",
    ],
)  # fmt: skip
def test_broken_frames_lose_the_peer(
    pair: tuple[_native.TcpLink, socket.socket], frame: bytes
) -> None:
    """Frames that no rank would send end the connection, and no memory is taken for them."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    receive = group.irecv(np.zeros(1), 1, 5)
    peer.sendall(frame)
    receive.wait(soon())
    assert status_of(receive) == "peer_lost"
    assert link.statistics()["connections"] == 0


def test_offer_of_any_size_takes_no_memory(pair: tuple[_native.TcpLink, socket.socket]) -> None:
    """An offer of 2**60 bytes is compared with the receive before any memory is taken."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    peer.sendall(header(OFFER, tag=5, nbytes=1 << 60))
    receive = group.irecv(np.zeros(3, np.uint8), 1, 5)
    receive.wait(soon())
    assert status_of(receive) == "mismatch"
    answer = HEADER.unpack(peer.recv(96, socket.MSG_WAITALL))
    assert answer[1] == ANSWER


def test_vanished_peer(pair: tuple[_native.TcpLink, socket.socket]) -> None:
    """The end of a stream without a goodbye ends what is half received."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    send = group.isend(np.zeros(100_000), 1, 5)
    anyone = group.irecv(np.zeros(1), -1, 6)
    peer.sendall(header(EAGER, tag=7, nbytes=100) + bytes(50))
    peer.close()
    anyone.wait(soon())
    assert status_of(anyone) == "peer_lost"
    send.wait(soon())
    assert status_of(send) == "peer_lost"
    assert link.statistics()["arrived"] == 0
    assert link.statistics()["moving"] == 0


def test_cancelled_half_written_send_keeps_the_stream_whole(
    pair: tuple[_native.TcpLink, socket.socket],
) -> None:
    """A send withdrawn in the middle of a frame: the frame ends as it should, then a withdrawal."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    data = np.arange(8_000_000, dtype=np.uint8)
    send = group.isend(data, 1, 5)
    offer = HEADER.unpack(peer.recv(96, socket.MSG_WAITALL))
    assert (offer[1], offer[6]) == (OFFER, data.nbytes)
    answer = HEADER.pack(MAGIC, ANSWER, 0, 0, 0, 0, 0, offer[7], 77, 0, bytes(40))
    peer.sendall(answer)
    frame = HEADER.unpack(peer.recv(96, socket.MSG_WAITALL))
    assert (frame[1], frame[8]) == (DATA, 77)
    send.cancel()
    sent = data[: frame[6]].tobytes()
    data[:] = 0
    rest = b""
    while len(rest) < frame[6]:
        rest += peer.recv(frame[6] - len(rest))
    assert rest == sent
    withdrawal = HEADER.unpack(peer.recv(96, socket.MSG_WAITALL))
    assert (withdrawal[1], withdrawal[7]) == (5, offer[7])


@pytest.mark.parametrize("stage", ["offered", "half arrived"])
def test_cancelled_receive_discards_what_comes(
    pair: tuple[_native.TcpLink, socket.socket], stage: str
) -> None:
    """A receive withdrawn while its bytes come: the rest goes nowhere, what follows arrives."""
    link, peer = pair
    group = Group(_native.Group(link, [0, 1], 0, 1))
    memory = np.zeros(1000, np.uint8)
    receive = group.irecv(memory, 1, 5)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1000, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(HEADER.pack(MAGIC, OFFER, 0, 0, 1, 5, 1000, 9, 0, 0, fingerprint))
    while True:
        receive.test()
        try:
            answer = HEADER.unpack(peer.recv(96, socket.MSG_WAITALL | socket.MSG_DONTWAIT))
            break
        except BlockingIOError:
            continue
    assert answer[1] == ANSWER
    data = header(DATA, nbytes=1000, other=answer[8]) + b"x" * 1000
    if stage == "half arrived":
        peer.sendall(data[:500])
        eventually(lambda: bool(receive.test() or memory.any()))
        data = data[500:]
    receive.cancel()
    memory[:] = 0
    got = np.zeros(1, np.uint8)
    next_one = group.irecv(got, 1, 6)
    fingerprint = struct.pack("=QQBBBBiIIQ", 0, 1, 0, 3, 0, 0, -1, 0, 0, 0)
    peer.sendall(data + HEADER.pack(MAGIC, EAGER, 0, 0, 1, 6, 1, 0, 0, 0, fingerprint) + b"y")
    done(next_one)
    assert got[0] == ord("y")
    assert not memory.any()


def test_flood_of_small_messages_is_bounded() -> None:
    """Beyond the limit small messages wait for their receives; a later tag still gets through."""
    limit = 100_000
    links = [_native.TcpLink(rank, 2, 1, limit) for rank in (0, 1)]
    ours, theirs = socket.socketpair()
    for link, end, peer in ((links[0], ours, 1), (links[1], theirs, 0)):
        end.setblocking(False)
        assert link.adopt(peer, 0, end.detach())
    a, b = (Group(_native.Group(link, [0, 1], rank, 1)) for rank, link in enumerate(links))
    sends = [a.isend(np.full(1000, i, np.uint8), 1, 1) for i in range(200)]
    late = a.isend(np.full(1, 9.0), 1, 2)
    got = np.zeros(1)
    run(lambda: done(late), lambda: done(b.irecv(got, 0, 2)))
    assert got[0] == 9
    assert 0 < sum(message.test() for message in sends) <= limit // 1000
    many = [np.zeros(1000, np.uint8) for _ in sends]
    run(lambda: done(*sends), lambda: done(*[b.irecv(array, 0, 1) for array in many]))
    assert [int(array[0]) for array in many] == [i % 256 for i in range(200)]
    assert all((array == array[0]).all() for array in many)
    for link in links:
        link.close()


def test_refused_peer_is_lost_for_good() -> None:
    """A peer that was refused cannot be adopted later."""
    link = _native.TcpLink(0, 2)
    link.refuse(1, "no way")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not link.adopt(1, 0, ours.fileno())
    assert link.lost(1) == "no way"
    link.close()


def test_second_connection_of_a_lane_is_not_taken(
    pair: tuple[_native.TcpLink, socket.socket],
) -> None:
    """A duplicate never displaces a live connection."""
    link, _ = pair
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not link.adopt(1, 0, ours.fileno())
    assert link.lane_is_live(1, 0)


# Processes


def test_killed_process_is_lost() -> None:
    """SIGKILL of a peer ends the receives that wait for it."""
    ours = Connections(0, 2, host="127.0.0.1", job="j", secret=SECRET)
    script = (
        "import sys, numpy as np; from cydist import _native;"
        "from cydist.backends.connections import Connections;"
        "c = Connections(1, 2, host='127.0.0.1', job='j', secret=bytes(range(32)));"
        "print(c.address().decode(), flush=True); c.connect([sys.stdin.readline().encode(),"
        "c.address()]); g = _native.Group(c.link, [0, 1], 1, 1);"
        "g.isend(_native.asarray(np.ones(1)), 0, 0).wait(10**18); sys.stdin.read()"
    )
    with closing(ours):
        peer = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with peer:
            assert peer.stdin is not None
            assert peer.stdout is not None
            published = [ours.address(), peer.stdout.readline()]
            peer.stdin.write(ours.address() + b"\n")
            peer.stdin.flush()
            ours.connect(published)
            group = Group(_native.Group(ours.link, [0, 1], 0, 1))
            done(group.irecv(np.zeros(1), 1, 0))
            receive = group.irecv(np.zeros(1), 1, 1)
            os.kill(peer.pid, signal.SIGKILL)
            receive.wait(soon())
            assert status_of(receive) == "peer_lost"
            assert "without a goodbye" in ours.link.lost(1)


def test_forked_child_lets_go(tcp: Callable[[int], Ranks]) -> None:
    """A forked child holds none of the parent's sockets, and the parent's go on working."""
    world = tcp(2)
    a, b = world.group()
    run(lambda: done(a.isend(np.ones(1), 1, 0)), lambda: done(b.irecv(np.ones(1), 0, 0)))
    pid = os.fork()
    if pid == 0:
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
        os._exit(sum("eventpoll" in name for name in held))
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
    del one
    assert set(os.listdir("/proc/self/fd")) <= before


def test_host_that_cannot_be_bound() -> None:
    """An address that is not ours is named."""
    with pytest.raises(DistNetworkError, match=r"rank 0 cannot listen.*192\.0\.2\.1"):
        Connections(0, 1, host="192.0.2.1", job="j", secret=SECRET)

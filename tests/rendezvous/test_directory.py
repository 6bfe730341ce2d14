"""What ranks tell each other at the start: who shares a host, and where the peers are."""

from __future__ import annotations

import random
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from thread_rendezvous import together
from transport_ranks import SECRET, Group, done, soon

from cydist import _native
from cydist.backends.host import directory, queries
from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import Connections
from cydist.backends.host.directory import (
    MOST_DIRECTORIES,
    Peers,
    decode_partition,
    directories,
    encode_partition,
    exchange,
    first_contacts,
    members,
    partition_of,
)
from cydist.errors import DistNetworkError, RendezvousError, StoreTimeoutError
from cydist.stores import HashStore, MembershipStore

SIZE = 40  # more than there are directories
WAIT = 30.0


# Who shares a host

PLACEMENTS: dict[str, Callable[[int], int]] = {
    "blocks": lambda rank: rank // 8,
    "by turns": lambda rank: rank % 512,
    "one host": lambda rank: 0,
    "one rank each": lambda rank: rank,
    "two sizes": lambda rank: rank // 8 if rank < 2048 else rank // 4,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_regular_placement_takes_few_bytes(placement: str) -> None:
    """However many ranks there are: every rank reads it."""
    found = partition_of(f"host{PLACEMENTS[placement](rank)}" for rank in range(4096))
    data = encode_partition(found)
    assert decode_partition(data, 4096) == found
    assert len(data) < 200


def test_any_placement_takes_bytes_for_each_rank_only() -> None:
    """Also one without any order."""
    draw = random.Random(1)
    found = partition_of(str(draw.randrange(512)) for _ in range(4096))
    data = encode_partition(found)
    assert decode_partition(data, 4096) == found
    assert len(data) < 3 * 4096


def test_parts_are_named_for_their_lowest_rank() -> None:
    """Ranks without a word are parts of their own."""
    found = partition_of([b"a", b"", b"b", b"a", b"", b"b"])
    assert [*found] == [0, 1, 2, 0, 4, 2]
    assert [members(found, each) for each in (0, 1, 2)] == [[0, 3], [1], [2, 5]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        encode_partition([0, 0]),
        encode_partition([0, 0, 0, 0]),
        encode_partition([0, 2, 2]),
        encode_partition([0, 0, 1]),
        encode_partition([-1, 0, 0]),
        encode_partition([0] * 1_000_000),
        zlib.compress(struct.pack("3i", 0, 2**31 - 1, 2**31 - 1)),
    ],
    ids=["empty", "garbage", "short", "long", "later", "unnamed", "negative", "bomb", "overflow"],
)
def test_what_is_no_partition_is_refused(data: bytes) -> None:
    """And takes no memory."""
    with pytest.raises(RendezvousError, match="share a host"):
        decode_partition(data, 3)


# Who knows what


@pytest.mark.parametrize("size", [1, 2, 16, 17, 100, 4096])
def test_a_rank_reads_few_addresses(size: int) -> None:
    """Those of the directories and of the peers at distances of powers of two, on both sides."""
    assert len(directories(size)) == min(size, len(directories(size))) <= MOST_DIRECTORIES
    assert size > MOST_DIRECTORIES or [*directories(size)] == [*range(size)]
    for rank in {0, size // 2, size - 1}:
        found = first_contacts(rank, size)
        assert rank not in found
        assert len(found) <= 2 * (size - 1).bit_length()
        assert {(rank + 1) % size, (rank - 1) % size} - {rank} <= set(found)


class World:
    """Ranks that met by `exchange`, each with its connections, on hosts of four ranks."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.connections = [
            stack.enter_context(
                closing(Connections(rank, size, host="127.0.0.1", job="j", secret=SECRET))
            )
            for rank in range(size)
        ]
        below = HashStore(WAIT)

        def meet(rank: int) -> Peers | None:
            store = MembershipStore("group", below, range(size))
            own = Address.decode(self.connections[rank].address())
            address = own._replace(host=f"host{rank // 4}/")  # whose kernel tells no boot
            place = b"" if rank % 4 == 3 else b"domain%d" % (rank // 4)
            return exchange(store, rank, range(size), address.encode(), place)

        self.peers: list[Peers] = together(*(lambda r=r: meet(r) for r in range(size)))
        for each in self.peers:
            if isinstance(each, Exception):
                raise each
        for rank, connections in enumerate(self.connections):
            connections.know(self.peers[rank])

    def send(self, source: int, destination: int, context: int) -> None:
        """Send a message between two ranks, over a connection that this needs."""
        members = sorted((source, destination))
        group = {
            each: Group(_native.Group(self.connections[each].link, members, place, context))
            for place, each in enumerate(members)
        }
        got = np.zeros(1)
        receive = group[destination].irecv(got, members.index(source), 0)
        done(group[source].isend(np.array([7.0]), members.index(destination), 0), receive)
        assert got.tolist() == [7]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, monkeypatch, SIZE)


def unknown_to(world: World, rank: int) -> list[int]:
    """Ranks whose addresses this rank does not have."""
    return [each for each in range(SIZE) if each not in world.peers[rank].known]


def test_directories_know_all_addresses_and_others_a_few(world: World) -> None:
    """All know who shares a host and who shares memory."""
    for rank, peers in enumerate(world.peers):
        assert [*peers.hosts] == [each // 4 * 4 for each in range(SIZE)]
        assert [*peers.domains] == [e if e % 4 == 3 else e // 4 * 4 for e in range(SIZE)]
        known = {*directories(SIZE)}
        if rank in known:
            assert peers.known.keys() == set(range(SIZE))
        else:
            apart = {
                e for e in first_contacts(rank, SIZE) if peers.domains[e] != peers.domains[rank]
            }
            assert peers.known.keys() == known | apart
            assert len(unknown_to(world, rank)) > SIZE // 4


def test_another_address_is_asked_for_when_a_message_needs_it(world: World) -> None:
    """Of a directory; the sender waits for nothing else."""
    source = SIZE - 3
    assert source not in directories(SIZE)
    destination = unknown_to(world, source)[0]
    world.send(source, destination, 1)
    assert world.peers[source].known[destination].rank == destination
    assert world.connections[source].host_of(destination) == f"host{destination // 4}"


def test_directories_that_are_gone_are_passed_over(world: World) -> None:
    """One that is left is enough: neither the store nor rank 0 is needed after the start."""
    for each in directories(SIZE)[:-1]:
        world.connections[each].close()
    source = SIZE - 3
    assert source not in directories(SIZE)
    destination = next(e for e in unknown_to(world, source) if e not in directories(SIZE))
    world.send(source, destination, 1)


def test_a_host_that_answers_nothing_is_asked_once() -> None:
    """Before directories on other hosts, however many are on it: each costs seconds."""
    size = 4 * MOST_DIRECTORIES
    asked: list[int] = []

    def answer(of: Address, claim: bytes) -> bytes:
        asked.append(of.rank)
        if of.rank >= size // 2:
            raise TimeoutError("no answer")
        return Address(size - 1, "far", [[("10.0.0.1", 5)]]).encode()

    hosts = [rank // (size // 2) * (size // 2) for rank in range(size)]
    known = {each: Address(each, "near", [[("10.0.0.2", 5)]]) for each in directories(size)}
    peers = Peers(hosts, hosts, known)
    rank = size // 2 - 1  # whose first directories are all on the host of the peer
    found = directory.lookup(size - 1, peers, answer, rank, time.monotonic() + WAIT)
    assert (found.host, asked) == ("far", [size // 2, 0])


def test_a_rank_that_nobody_can_find_is_named(world: World) -> None:
    """With the ranks that were asked."""
    for each in directories(SIZE):
        world.connections[each].close()
    source = SIZE - 3
    destination = unknown_to(world, source)[0]
    with pytest.raises(DistNetworkError, match=f"address of rank {destination} is not known: rank "
                       f"{source} asked ranks .*Connection refused") as found:  # fmt: skip
        world.connections[source].query(destination, 1, time.monotonic() + WAIT)
    assert found.value.ranks == (destination,)
    link = world.connections[source].link
    group = Group(_native.Group(link, sorted((source, destination)), 1, 1))
    message = group.isend(np.array([7.0]), 0, 0)
    message.wait(soon())
    assert re.search("none told it: .*Connection refused", link.lost(destination))


def test_a_directory_answers_its_own_questions_only(world: World) -> None:
    """From the requested rank on, as many as there is room for."""
    peers = world.peers[0]
    whole = directory.answer(directory.CLAIM.pack(5, 0, 7), 0, peers).split(b"\0")
    assert [Address.decode(data).rank for data in whole] == [*range(7, SIZE)]
    for claim in (directory.CLAIM.pack(5, 1, 7), directory.CLAIM.pack(5, 0, SIZE), b"", bytes(13)):
        assert directory.answer(claim, 0, peers) == b""
    aside = next(rank for rank in range(SIZE) if rank not in directories(SIZE))
    assert directory.answer(directory.CLAIM.pack(5, aside, 7), aside, world.peers[aside]) == b""


def test_an_answer_has_a_deadline() -> None:
    """A peer that sends a byte now and then does not prolong it."""
    here, there = socket.socketpair()
    with here, there:
        there.send(b"a")
        there.close()
        with pytest.raises(TimeoutError, match="not come in time"):
            queries._rest_of(here, time.monotonic() - 1.0)


def test_a_long_answer_ends_with_a_whole_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asking rank asks again for others."""
    lanes = [[("10.0.0.1", 50000)]]
    known = {rank: Address(rank, "h" * 1000 + "/", lanes) for rank in range(SIZE)}
    told = directory.answer(
        directory.CLAIM.pack(5, 0, 30), 0, Peers(range(SIZE), range(SIZE), known)
    )
    found = [Address.decode(data).rank for data in told.split(b"\0")]
    assert found == [*range(30, 30 + len(found))]
    assert 0 < len(found) < SIZE - 30
    assert len(told) <= directory.MOST_ANSWER_BYTES


# What does not fit together


def meet_others(below: HashStore, rank: int, size: int) -> Peers | None:
    """Exchange addresses with ranks that all are on hosts of their own."""
    store = MembershipStore("group", below, range(size))
    address = Address(rank, f"host{rank}/boot", [[("10.0.0.1", 5000 + rank)]])
    return exchange(store, rank, range(size), address.encode(), b"")


def test_a_directory_knows_all_addresses_or_does_not_start() -> None:
    """Others ask it for any of them. Somebody has changed them in a store of another library."""

    class Changed(HashStore):
        def set(self, key: str, value: Any) -> None:
            few = key.endswith("addresses")
            super().set(key, value.rpartition(b"\0")[0] if few else value)

    below, size = Changed(WAIT), MOST_DIRECTORIES + 2
    apart = directories(size)[1]
    ended = together(*(lambda r=r: meet_others(below, r, size) for r in range(size)))
    assert isinstance(ended[apart], RendezvousError)
    assert "rank 17" in str(ended[apart])


def test_a_directory_that_finds_no_addresses_is_named() -> None:
    """Somebody has removed them from a store of another library."""

    class Removed(HashStore):
        def set(self, key: str, value: Any) -> None:
            if not key.endswith("addresses"):
                super().set(key, value)

    below, size = Removed(0.2), MOST_DIRECTORIES + 2
    ended = together(*(lambda r=r: meet_others(below, r, size) for r in range(size)))
    apart = directories(size)[1]
    named = ended[apart]
    assert isinstance(named, StoreTimeoutError)
    assert re.search(f"^rank {apart} did not find all .* for 'group/addresses'", str(named))


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\0" * 8,
        directory._SIZES.pack(9, 9) + b"no partition",
        directory._SIZES.pack(11, 0) + encode_partition([0, 0]),
    ],
    ids=["short", "nothing", "no partition", "cut"],
)
def test_a_rank_that_was_told_nonsense_is_named(told: bytes) -> None:
    """With what it was told, and what to do: ranks of other versions may have told it."""
    store = MembershipStore("group", HashStore(WAIT), range(2))
    store.set("peers/all", b"+" + (told or b"x"))
    with pytest.raises(RendezvousError, match=r"^rank 1 cannot use what it was told .*Start"):
        exchange(store, 1, range(2), b"1\nhost/\n127.0.0.1 9", b"")


def told_to_all(change: Callable[[Address], Address]) -> list[Exception]:
    """The errors of three ranks, of which the last one changes its address."""
    below = HashStore(WAIT)

    def meet(rank: int) -> Peers | None:
        store = MembershipStore("group", below, range(3))
        address = Address(rank, f"host{rank}/boot{rank}", [[("10.0.0.1", 5000 + rank)]])
        if rank == 2:
            address = change(address)
        return exchange(store, rank, range(3), address.encode(), b"")

    return together(*(lambda r=r: meet(r) for r in range(3)))


@pytest.mark.parametrize(
    ("change", "words", "ranks"),
    [
        (lambda a: a._replace(lanes=2 * a.lanes), "rank 0 uses 1 network .* rank 2 2; set", (0, 2)),
        (lambda a: a._replace(lanes=[[("127.0.0.1", 9)]]), "rank 2 on host2 listens on", (2,)),
        (
            lambda a: a._replace(rank=1),
            "addresses of ranks 0 to 2, and in place of rank 2's is one of rank 1",
            (2,),
        ),
        (
            lambda a: a._replace(lanes=[]),
            "the address of rank 2: .* is not a rank's address: .*nowhere to connect to",
            (2,),
        ),
    ],
    ids=["networks", "loopback", "rank", "nowhere"],
)
def test_every_rank_learns_what_does_not_fit(
    change: Callable[[Address], Address], words: str, ranks: tuple[int, ...]
) -> None:
    """With the same words, and the ranks that it concerns."""
    errors = told_to_all(change)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert re.search(words, str(error)), error
        assert error.ranks == ranks

"""The ranks that share a host, and the addresses of peers, of which a rank asks for most later.

Every rank gives its address and its domain to the lowest rank of the group, which compares them and
writes down what all ranks need: which ranks share a host, which share memory, and the addresses of
a few ranks, the directories. These alone know all addresses. Every other rank reads those of the
peers at the distances 1, 2, 4 ... from it, to which most algorithms talk. It asks a directory for
any other, over a short connection (channel "address"), when a message first needs it. So a start of
p ranks moves O(p log p) bytes through the store, and the end of the store, or of some directories,
keeps no two ranks apart. Up to MOST_DIRECTORIES ranks are all directories.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from cydist import config
from cydist.backends.host.addresses import Address, check_reachable
from cydist.backends.host.queries import MOST_ANSWER_BYTES
from cydist.errors import (
    DistError,
    DistNetworkError,
    RendezvousError,
    StoreTimeoutError,
    counted,
    listed,
)

if TYPE_CHECKING:
    from cydist.stores import MembershipStore

MOST_DIRECTORIES = 16
CHANNEL = b"address"
CLAIM = struct.Struct("<III")  # source, destination, the rank whose address is wanted
_SEPARATOR = b"\0"  # between addresses, whose lines are text without it
_SIZES = struct.Struct("<II")  # bytes of the two partitions, which the addresses follow


class Peers(NamedTuple):
    """A rank's knowledge of the ranks with which it shares a link.

    Attributes:
        hosts: For each rank the lowest rank on its host.
        domains: For each rank the lowest rank with which it may share memory: itself if there is
            none.
        known: The addresses that this rank has, by rank.
    """

    hosts: Sequence[int]
    domains: Sequence[int]
    known: dict[int, Address]

    def learn(self, addresses: Iterable[bytes]) -> None:
        """Keep these addresses. Raises RendezvousError for anything else."""
        for data in addresses:
            address = Address.decode(data)
            if not address.rank < len(self.hosts):
                raise RendezvousError(f"there is no rank {address.rank} of {len(self.hosts)}")
            self.known[address.rank] = address

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host; "" if no address from there is known."""
        beside = (each for each in list(self.known.values())
                  if self.hosts[each.rank] == self.hosts[rank])  # fmt: skip
        found = self.known.get(rank) or next(beside, None)
        return "" if found is None else found.host.partition("/")[0]

    def beside(self, rank: int) -> list[int]:
        """Return all ranks on a rank's host."""
        return members(self.hosts, self.hosts[rank])


def members(partition: Sequence[int], lowest: int) -> list[int]:
    """Return the ranks of the part with this lowest rank."""
    found, start = [], lowest
    with contextlib.suppress(ValueError):
        while True:
            found.append(partition.index(lowest, start))
            start = found[-1] + 1
    return found


def partition_of(words: Iterable[bytes | str]) -> array[int]:
    """Return for each rank the lowest rank with the same word; for an empty word the rank
    itself."""
    first: dict[bytes | str, int] = {}
    return array(
        "i", (first.setdefault(word, rank) if word else rank for rank, word in enumerate(words))
    )


def encode_partition(partition: Sequence[int]) -> bytes:
    """Return a partition as some bytes: few if the ranks are placed regularly, at most about four
    for each rank."""
    steps = array("i", (b - a for a, b in zip([0, *partition[:-1]], partition, strict=True)))
    return zlib.compress(steps.tobytes())


def decode_partition(data: bytes, size: int) -> array[int]:
    """Return the partition of `size` ranks. Raises RendezvousError for anything that
    `encode_partition` cannot have made."""
    steps = array("i")
    with contextlib.suppress(zlib.error, OverflowError):
        expanded = zlib.decompressobj().decompress(data, size * steps.itemsize + 1)
        if len(expanded) == size * steps.itemsize:
            steps.frombytes(expanded)
            found = array("i", accumulate(steps))
            # Each part is named for its lowest rank.
            named = min(found) >= 0 and all(map(le, found, range(size)))
            if named and all(found[lowest] == lowest for lowest in set(found)):
                return found
    raise RendezvousError(f"{data[:80]!r} does not say which of {size} ranks share a host")


def directories(size: int) -> range:
    """Return the ranks that know all addresses: far from each other, for hosts to fail alone."""
    return range(0, size, -(-size // MOST_DIRECTORIES))


def first_contacts(rank: int, size: int) -> list[int]:
    """Return the ranks at distances of powers of two, with which trees, rings, recursive doubling
    and dissemination talk."""
    distances = [1 << step for step in range((size - 1).bit_length())]
    return sorted({(rank + sign * each) % size for each in distances for sign in (1, -1)} - {rank})


def exchange(
    store: MembershipStore, rank: int, ranks: Sequence[int], address: bytes, domain: bytes
) -> Peers | None:
    """Give this rank's address and domain to the others; return what it has to know of them.

    Args:
        store: A part of the store for this alone.
        rank: This process's rank in the group; `ranks` are the members' global ranks.
        address: b"": it has none.
        domain: Equal on ranks that may share memory; b"": this rank will not.

    Returns None on all ranks if one has no address. Raises RendezvousError on all ranks if
    addresses do not fit together, or if what this rank was told makes no sense, and as
    MembershipStore.digest.
    """
    size = len(ranks)
    all_addresses: list[bytes] = []

    def make(words: list[bytes]) -> bytes:
        pairs = [word.partition(_SEPARATOR) for word in words]
        all_addresses.extend(found for found, _, _ in pairs)
        if not all(all_addresses):
            return b""
        peers = decoded(all_addresses)
        if size > MOST_DIRECTORIES:
            store.set("addresses", _SEPARATOR.join(all_addresses))
        parts = (
            encode_partition(partition_of(peer.host for peer in peers)),
            encode_partition(partition_of(word for _, _, word in pairs)),
        )
        few = (all_addresses[each] for each in directories(size))
        return _SIZES.pack(*map(len, parts)) + b"".join(parts) + _SEPARATOR.join(few)

    told = store.digest("peers", ranks[rank], ranks, address + _SEPARATOR + domain, make)
    if not told:
        return None
    with _read_by(ranks[rank]):
        return _learnt(store, rank, ranks, told, all_addresses)


@contextlib.contextmanager
def _read_by(rank: int) -> Iterator[None]:
    """Let an error about what this rank was told, or was not, name it."""
    try:
        yield
    except StoreTimeoutError as error:
        raise StoreTimeoutError(
            f"rank {rank} did not find all that it has to know in the ranks' store: {error}",
            answered=error.answered,
        ) from error
    except RendezvousError as error:
        raise RendezvousError(
            f"rank {rank} cannot use what it was told in the ranks' store: {error}. Start the job "
            "where only its own ranks, of the same version of cydist, can write",
            ranks=error.ranks,
        ) from None


def _learnt(
    store: MembershipStore,
    rank: int,
    ranks: Sequence[int],
    told: bytes,
    all_addresses: Sequence[bytes],
) -> Peers:
    """Return what this rank has to know, by what all were `told` and by some addresses more.

    Args:
        all_addresses: Where they are known already.
    """
    size = len(ranks)
    peers = _told(told, size)
    if rank not in directories(size):
        wanted = [
            each for each in first_contacts(rank, size)
            if each not in peers.known and peers.domains[each] != peers.domains[rank]
        ]  # fmt: skip
        if wanted:
            words = store.multi_get([f"peers/{ranks[each]}" for each in wanted])
            peers.learn(word.partition(_SEPARATOR)[0] for word in words)
    elif size > MOST_DIRECTORIES:
        peers.learn(all_addresses or store.get("addresses").split(_SEPARATOR))
        if missing := sorted(set(range(size)) - peers.known.keys()):
            raise RendezvousError(f"no address of {listed('rank', missing)}")
    return peers


def name_of_links(store: MembershipStore, rank: int) -> str:
    """Return the name that all connections of this group's links have, and no others.

    Args:
        rank: This process's rank in the group, of which rank 0 chooses the name.
    """
    if rank == 0:
        store.set("job", os.urandom(16).hex())
    # The meeting's name, which rank 0 has signed, refuses a rank that was shown an earlier meeting.
    return f"{store.nonce.decode()} {store.get('job').decode()}"


def decoded(addresses: Sequence[bytes]) -> list[Address]:
    """Return the addresses of all ranks, in rank order. Raises RendezvousError if they do not fit
    together."""
    peers = []
    for rank, data in enumerate(addresses):
        try:
            peers.append(Address.decode(data))
        except RendezvousError as error:
            raise RendezvousError(f"the address of rank {rank}: {error}", ranks=(rank,)) from None
    for rank, peer in enumerate(peers):
        if peer.rank != rank:
            raise RendezvousError(
                f"expected the addresses of ranks 0 to {len(peers) - 1}, and in place of rank "
                f"{rank}'s is one of rank {peer.rank}",
                ranks=(rank,),
            )
        if len(peer.lanes) != len(peers[0].lanes):
            raise RendezvousError(
                f"rank 0 uses {counted(len(peers[0].lanes), 'network interface')} and rank "
                f"{peer.rank} {len(peer.lanes)}; set {config.INTERFACES.names[0]} alike",
                ranks=(0, peer.rank),
            )
    check_reachable(peers)
    return peers


def of_all(addresses: Sequence[bytes]) -> Peers:
    """Return what a rank knows if it knows all addresses. Raises RendezvousError as `decoded`."""
    peers = decoded(addresses)
    return Peers(
        partition_of(peer.host for peer in peers), range(len(peers)), dict(enumerate(peers))
    )


def _told(data: bytes, size: int) -> Peers:
    """Return what `exchange` has made. Raises RendezvousError for anything else."""
    if len(data) < _SIZES.size:
        raise RendezvousError(f"{data[:80]!r} does not say where ranks are")
    hosts, domains = _SIZES.unpack_from(data)
    middle, end = _SIZES.size + hosts, _SIZES.size + hosts + domains
    parts = data[_SIZES.size : middle], data[middle:end]
    first = decode_partition(parts[0], size)
    second = first if parts[0] == parts[1] else decode_partition(parts[1], size)
    peers = Peers(first, second, {})
    peers.learn(data[end:].split(_SEPARATOR))
    if list(peers.known) != list(directories(size)):
        raise RendezvousError(f"expected the addresses of the directories, not of {[*peers.known]}")
    return peers


# Asking a directory


def lookup(
    peer: int, peers: Peers, ask: Callable[[Address, bytes], bytes], rank: int, deadline: float
) -> Address:
    """Return the address of a peer, from the first directory that answers. After one that does
    not, others on its host come last: the host may have vanished.

    Args:
        ask: Sends a claim to the rank at an address, and returns its answer.

    Raises DistNetworkError, which names the directories, if none gives it.
    """
    known = peers.known.get(peer)
    if known is not None:
        return known
    size = len(peers.hosts)
    # Each rank begins with another one, so that all have their share of questions.
    order = sorted(directories(size), key=lambda each: (each - rank) % size)
    failed: dict[int, Exception] = {}
    while order and time.monotonic() < deadline:
        tried = {peers.hosts[rank_asked] for rank_asked in failed}
        each = next((other for other in order if peers.hosts[other] not in tried), order[0])
        order.remove(each)
        try:
            answer = ask(peers.known[each], CLAIM.pack(rank, each, peer))
            peers.learn(answer.split(_SEPARATOR))
            return peers.known[peer]
        except KeyError:
            failed[each] = RendezvousError("its answer is about other ranks")
        except (OSError, DistError) as error:
            failed[each] = error
    asked = ", ".join(map(str, failed))
    last = next(reversed(failed.values()), "no time was left")
    raise DistNetworkError(
        f"the address of rank {peer} is not known: rank {rank} asked ranks {asked or 'of none'}, "
        f"which know all addresses, and none told it: {last}",
        ranks=(peer,),
    )


def answer(claim: bytes, rank: int, peers: Peers) -> bytes:
    """Return the addresses from the requested rank on, as many as an answer has room for; b"": this
    rank is not a directory, or the claim is not for it."""
    if len(claim) != CLAIM.size:
        return b""
    _, destination, first = CLAIM.unpack(claim)
    size = len(peers.hosts)
    if destination != rank or first >= size or rank not in directories(size):
        return b""
    found: list[bytes] = []
    nbytes = 0
    for each in range(first, size):
        data = peers.known[each].encode()
        nbytes += len(data) + len(_SEPARATOR)
        if found and nbytes > MOST_ANSWER_BYTES:
            break
        found.append(data)
    return _SEPARATOR.join(found)

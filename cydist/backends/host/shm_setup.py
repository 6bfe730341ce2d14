"""Find the ranks that can share memory, by sharing it, not by host names.

Candidates have the same boot, process namespace and user. The lowest of them makes the memory and
publishes its process and descriptor. The others open it through /proc, which admits only this
user's processes, and look for a random token in it. A rank that cannot do so uses sockets, as does
every group that it is in.

What they publish must be signed in a store that others can write (MembershipStore.sign): otherwise
a rank would map another job's memory, or read and write the memory of any process of this user as a
peer's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cydist import config
from cydist._native import PAGE_BYTES, SharedMemory, ShmLink
from cydist.backends.host.directory import members
from cydist.errors import RendezvousError, listed
from cydist.logs import DEBUG, Log
from cydist.net.interfaces import boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cydist._native import Link, MpiLink, TcpLink
    from cydist.stores import MembershipStore

_log = Log("connections")

BYTES_PER_RANK = 64 << 20  # for the windows of some sixty groups; untouched pages cost nothing
MOST_ADDRESSES = 1 << 40  # most bytes of all ranks' arrays together
TOKEN_BYTES = SharedMemory.token_bytes


def offer(messages: str) -> bytes:
    """Return this rank's memory domain, which ranks compare before `share_memory`; b"": it shares
    nothing.

    Args:
        messages: Transport of its link: "tcp" or "mpi".

    Raises ValueError as `transport_of`.
    """
    return b"" if transport_of(messages) == messages else memory_domain()


def share_memory(
    store: MembershipStore,
    link: TcpLink | MpiLink,
    domains: Sequence[int],
    ranks: Sequence[int],
    messages: str = "tcp",
) -> Link:
    """Return `link` itself, or a link with windows for groups whose members all share memory.

    Args:
        domains: For each rank of the link the lowest rank that offered the same domain, or itself.
        ranks: Their global ranks.
        messages: Transport of the link: "tcp" or "mpi".

    Raises RendezvousError if CYDIST_TRANSPORT is "shm" and some rank cannot share, and as
    MembershipStore.digest.
    """
    rank, size = link.rank, link.size
    alike = members(domains, domains[rank])
    shared: Link = link
    together = [rank]
    why = ""
    if len(alike) > 1:
        memory = None
        try:
            memory = _memory(store, rank, alike)
        except _NotShared as error:
            why = str(error)
        # The lowest of them reads all answers, and the others one list.
        answers = store.digest(
            f"shares/{alike[0]}", ranks[rank], [ranks[peer] for peer in alike],
            b"no" if memory is None else b"%d" % os.getpid(), b" ".join,
        )  # fmt: skip
        found = zip(alike, answers.split(b" "), strict=True)
        sharers = {peer: int(answer) for peer, answer in found if answer != b"no"}
        if memory is not None and len(sharers) > 1:
            shared = ShmLink(link, memory, sharers)
            together = list(sharers)
    if _log.shows(DEBUG):
        _log.debug("%s", _outcome(together, alike, rank, why))
    if transport() == "shm" and len(together) != size:
        others = sorted(set(range(size)) - set(together))
        if not set(others) <= set(alike):
            why = (
                "they are on other hosts, in other containers, of other users, or were told to use "
                f"{messages}"
            )
        raise RendezvousError(
            f"{config.TRANSPORT.names[0]}=shm, but rank {rank} cannot share memory with "
            f"{listed('rank', others)}: {why or f'they cannot open the memory of rank {alike[0]}'}",
            ranks=tuple(others),
        )
    return shared


def _outcome(together: Sequence[int], alike: Sequence[int], rank: int, why: str) -> str:
    """Return with which ranks of a link a rank shares memory, or why with none, for logs."""
    others = [each for each in together if each != rank]
    if others:
        return f"shares memory with {listed('rank', others)} of the link"
    if len(alike) > 1:
        return f"shares no memory: {why or 'the other ranks of this host could not open it'}"
    if transport() in ("tcp", "mpi"):
        return f"shares no memory: {config.TRANSPORT.names[0]}={transport()}"
    return "shares no memory: no other rank has the same boot, process namespace and user"


def transport() -> str:
    """Return CYDIST_TRANSPORT: auto, shm, tcp or mpi. Raises ValueError for anything else."""
    wanted = config.TRANSPORT.get().strip().lower() or "auto"
    if wanted not in ("auto", "shm", "tcp", "mpi"):
        raise ValueError(f"{config.TRANSPORT.names[0]}={wanted!r} is none of auto, shm, tcp, mpi")
    return wanted


def transport_of(messages: str) -> str:
    """As `transport`, for the backend "tcp" or "mpi". Also raises ValueError for the other
    backend's value."""
    wanted = transport()
    if wanted in ("tcp", "mpi") and wanted != messages:
        raise ValueError(
            f"{config.TRANSPORT.names[0]}={wanted} is for backend {wanted!r}, and this one is "
            f"{messages!r}: call init_process_group({wanted!r}), or set auto, shm or {messages}"
        )
    return wanted


def memory_domain() -> bytes:
    """Return the properties that are equal on ranks that may share memory."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
        return f"{boot_id()}/{space}/{os.geteuid()}".encode()
    except OSError:
        return b""


class _NotShared(Exception):
    """This rank does not share memory; the text says why."""


def _memory(store: MembershipStore, rank: int, alike: list[int]) -> SharedMemory:
    """Return the memory that these ranks share. Raises _NotShared if this rank cannot share it."""
    first = alike[0]
    key = f"memory/{first}"
    if rank == first:
        token = os.urandom(TOKEN_BYTES)
        try:
            memory = _new_memory(len(alike), token)
        except OSError as error:
            reason = f"rank {first} has no memory to share: {error}"
            store.set(key, f"none {reason}")
            raise _NotShared(reason) from None
        store.set(key, f"{os.getpid()} {memory.fd} {token.hex()}")
        return memory
    found = store.get(key)
    if found.startswith(b"none "):
        raise _NotShared(found[5:].decode(errors="replace"))
    try:
        pid, number, word = found.split()
        fd = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        return SharedMemory.attach(fd, bytes.fromhex(word.decode()))
    except (OSError, ValueError) as error:
        raise _NotShared(f"rank {first}'s memory cannot be opened here: {error}") from None


def _new_memory(ranks: int, token: bytes) -> SharedMemory:
    """Allocate memory for this number of ranks. Raises OSError if there is none.

    The address space lets each rank fill the host's memory with arrays. If it is limited (ulimit
    -v), there is no room for arrays.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(MOST_ADDRESSES, memory_bytes) // ranks // PAGE_BYTES * PAGE_BYTES
    try:
        part = min(memory_bytes // PAGE_BYTES * PAGE_BYTES, most)
        return SharedMemory.create(ranks, BYTES_PER_RANK * ranks, token, part)
    except OSError:
        return SharedMemory.create(ranks, BYTES_PER_RANK * ranks, token, 0)

"""Ranks for processes that have none: they agree in a store that all can write."""

from __future__ import annotations

import os
import socket

from cydist.errors import (
    AuthenticationError,
    PeerFailedError,
    RendezvousError,
    StoreTimeoutError,
    listed,
)
from cydist.rendezvous import launcher_env
from cydist.rendezvous.init_arguments import InitArguments, check_size
from cydist.stores import MembershipStore, PrefixStore, Store
from cydist.stores.membership_store import close_on_error


def size_of(call: InitArguments) -> int:
    """Return the number of processes, which must be given. Raises ValueError."""
    if call.world_size is None or call.world_size < 1:
        raise ValueError("giving out ranks takes world_size, the number of processes")
    if call.rank is not None and not 0 <= call.rank < call.world_size:
        raise ValueError(f"rank must be from 0 to {call.world_size - 1}, not {call.rank}")
    check_size(call.world_size)
    return call.world_size


def assign_rank(store: Store, rank: int | None, size: int, call: InitArguments) -> int:
    """Assign ranks: processes that requested a rank get it, the others get the remaining ones in
    the order of their arrival.

    Every process computes the same from all requests, of which the first one makes a list.
    """
    with close_on_error(store):
        return _assigned_rank(
            PrefixStore(f"cydist/{call.group_name}/seats", store), rank, size, call
        )


def _assigned_rank(namespace: PrefixStore, rank: int | None, size: int, call: InitArguments) -> int:
    assert call.url is not None
    where = call.url.geturl()
    ticket = namespace.add("tickets", 1) - 1
    number, place = divmod(ticket, size)
    table = MembershipStore(str(number), namespace, range(size), noun="process number")
    table.join(place)
    table.sign(f"seats {call.group_name} {number}", place, where, launcher_env.job_id())
    table.set_timeout(call.remaining)
    noted = MembershipStore("sizes", namespace, range(size))
    noted.sign(f"sizes {call.group_name}", place, where, launcher_env.job_id())

    def compare_sizes() -> None:
        """Raise RendezvousError if a process was told another world size: it may wait for more."""
        first = noted.compare_set("first", b"", str(size)).decode()
        if first != str(size):
            noted.set("other", str(size))
        elif noted.check(["other"]):
            first = noted.get("other").decode()
        if first != str(size):
            both = sorted({int(first), size})
            raise RendezvousError(
                f"the processes were given different world sizes: {both}. Give all the same, or "
                f"end processes of an earlier start that still use {where}"
            )

    # The random word shows this process that the list is of this start.
    own = f"{-1 if rank is None else rank} {size} {os.urandom(8).hex()}"
    try:
        compare_sizes()
        answer = table.digest("wanted", place, range(size), own, b"\n".join, compare_sizes)
    except PeerFailedError as error:
        raise RendezvousError(str(error)) from None  # this process had no rank yet
    except StoreTimeoutError as error:
        keys = [f"wanted/{other}" for other in range(size)]
        here = [key for key in keys if table.check([key])]
        wanted = {_wanted(word.decode())[0] for word in table.multi_get(here)}
        # A process without a requested rank may get any of the remaining ones.
        missing = () if -1 in wanted else tuple(r for r in range(size) if r not in wanted)
        names = f", missing: {listed('rank', missing)}" if missing else ""
        raise RendezvousError(
            f"rendezvous: timeout with {len(here)} of {size} processes here{names}. If all were "
            f"started, processes of an earlier job may still use {where}: end them, or give "
            "another",
            ranks=missing,
        ) from error
    told = answer.decode().split("\n")
    asked = [_wanted(word) for word in told]
    sizes = {their_size for _, their_size in asked}
    if sizes != {size}:
        raise RendezvousError(f"the processes were given different world sizes: {sorted(sizes)}")
    if told[place] != own:
        raise AuthenticationError(
            f"process number {place} on {socket.gethostname()} found another note of its own in "
            f"{where} than it wrote: somebody repeats there what an earlier start wrote. Start the "
            "job where only its own ranks can write"
        )
    fixed = [wanted for wanted, _ in asked if wanted >= 0]
    twice = sorted({each for each in fixed if fixed.count(each) > 1})
    if twice:
        raise RendezvousError(f"rank {twice[0]} was asked for by two processes", ranks=(twice[0],))
    if rank is not None:
        return rank
    free = [each for each in range(size) if each not in fixed]
    automatic = [other for other, (wanted, _) in enumerate(asked) if wanted < 0]
    return free[automatic.index(place)]


def _wanted(word: str) -> tuple[int, int]:
    """Return the rank, or -1, and the world size for which a process has asked."""
    wanted, size, _ = word.split(" ")
    return int(wanted), int(size)

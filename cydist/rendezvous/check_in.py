"""Check-in: every rank announces itself in one store, and learns which ranks are missing, if any.

An error at the timeout names the missing ranks. A rank number that two processes use is detected. A
second check-in in the same store is independent of the first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from cydist._native import failpoint
from cydist.errors import (
    AuthenticationError,
    DistStoreError,
    PeerFailedError,
    RendezvousError,
    StoreTimeoutError,
    counted,
    listed,
)
from cydist.logs import Log, use_rank
from cydist.rendezvous import launcher_env
from cydist.stores import MembershipStore, PrefixStore
from cydist.stores.membership_store import others_can_write, printable, served_by

# Rank 0 writes one of these: all ranks are here, followed by the world size and the random name of
# the check-in; ranks are missing; or the ranks do not fit together, followed by why.
_COMPLETE, _FAILED, _DIFFER = b"+", b"-", b"!"

# When a rank is lost, rank 0 stays this long for ranks that have not come yet: they learn of it
# from the store, which may end with rank 0.
LATECOMERS_SECONDS = 0.5

_log = Log("rendezvous")

MOST_LOOKING = 16  # most ranks that ask one late rank; further ranks wait with them


class StaleCheckIn(Exception):
    """The store still belongs to another meeting, which rank 0 has not left. Its text says why, if
    that is known."""


def check_in(
    store: Any,
    rank: int,
    world_size: int,
    *,
    deadline: float,
    group_name: str = "",
    holder: int | None = None,
    backend: str = "",
) -> tuple[MembershipStore, int, int]:
    """Check in and wait for all others. Returns the meeting's own part of `store`.

    A rank's n-th check-in belongs to the n-th meeting, so no rank sees keys of an earlier meeting.

    Args:
        holder: The rank that serves the store, for one meeting; None: another process does.
        backend: The backend of the group that all ranks will make.

    Raises StaleCheckIn if that one meeting is a different one, or if this rank has been in it. On
    every rank, raises RendezvousError after the first rank's deadline, which lists the missing
    ranks, or if the ranks ask for different backends, which lists those. Raises PeerFailedError at
    once when a rank that was here is lost (MembershipStore).
    """
    if holder is not None:
        _find_the_same(store, rank, holder, f"{world_size} {group_name}", deadline)
    namespace = PrefixStore(f"cydist/{group_name}", store)
    with served_by(holder, "rendezvous"):
        number = namespace.add(f"arrivals/{rank}", 1)
    me = f"process {os.getpid()} on {socket.gethostname()}"
    last = number - 1 if holder is None else 1  # a store that a rank holds is for one meeting
    before = _came_before(namespace, last, rank, me) if number > 1 else ""
    if holder is not None and number > 1:
        raise StaleCheckIn(before)
    ranks_store = MembershipStore(f"{number}", namespace, range(world_size), holder=holder)
    ranks_store.join(rank)
    ranks_store.sign(f"check-in {number} {group_name}", rank, job=launcher_env.job_id())
    with ranks_store.report_error(rank, late=True):
        failpoint("rendezvous")
        word = f"{os.urandom(8).hex() if ranks_store.signs else ''} {me}"
        use_rank(rank)
        _log.debug("rank %d of %d checks in to meeting %d", rank, world_size, number)
        ranks_store.set(f"here/{rank}", f"{word}\n{backend}")
        if rank == 0:
            _await_all(ranks_store, world_size, deadline, number)
        else:
            _await_verdict(ranks_store, rank, world_size, deadline, number, before)
            if ranks_store.signs:
                _check_fresh(ranks_store, rank, word, deadline)
    _log.debug("all %d ranks are here", world_size)
    return ranks_store, rank, world_size


def _find_the_same(store: Any, rank: int, holder: int, what: str, deadline: float) -> None:
    """Check that the store serves the one meeting that `holder` opened it for."""
    namespace = MembershipStore("cydist", store, (), holder=holder)
    if rank == holder:
        namespace.set("serves", what)
        return
    try:
        (served,) = namespace.multi_get(["serves"], max(0.0, deadline - time.monotonic()))
    except StoreTimeoutError as error:
        raise _unresponsive(error, holder) from error
    if served != what.encode():
        theirs, ours = served.decode(errors="replace").split(" ")[0], what.split(" ")[0]
        raise StaleCheckIn(
            f"rank {holder} was told a world_size of {printable(theirs.encode())}, and rank {rank} "
            f"one of {ours}"
            if theirs != ours
            else ""
        )


def _came_before(namespace: PrefixStore, number: int, rank: int, me: str) -> str:
    """Return which other process has this rank in meeting `number`; "" if none is known.

    If that meeting is not complete, its ranks are told that the rank came twice. Where others can
    write, whatever stands there says nothing.
    """
    if others_can_write(namespace):
        return ""
    earlier = PrefixStore(f"{number}", namespace)
    with contextlib.suppress(DistStoreError):  # rank 0 may leave that meeting now, with the store
        if not earlier.check([f"here/{rank}"]):
            return ""
        words = printable(earlier.get(f"here/{rank}")).partition("\n")[0]
        other = words.partition(" ")[2]
        if not other or other == me:
            return ""
        if not earlier.check(["job"]):
            earlier.set("twice", f"Rank {rank} was started twice, as {other} and as {me}")
        return f"{other} has rank {rank}"
    return ""


def _twice(ranks_store: MembershipStore) -> str:
    """Return which rank two processes have, if one was noticed."""
    below = PrefixStore(ranks_store.prefix, ranks_store.underlying_store)
    with contextlib.suppress(RuntimeError):  # of any store; other errors come first
        if not ranks_store.signs and below.check(["twice"]):
            return f". {printable(below.get('twice'))}: give each process its own rank"
    return ""


def _await_all(ranks_store: MembershipStore, world_size: int, deadline: float, number: int) -> None:
    """On rank 0: wait until all ranks are here, and report that, or the missing ranks."""
    all_ranks = [f"here/{rank}" for rank in range(world_size)]
    try:
        here = ranks_store.awaited(
            all_ranks, deadline, lambda seconds: _notice(ranks_store, world_size, seconds)
        )
    except PeerFailedError as error:
        _apply_verdict(_verdict(ranks_store), world_size, number)  # a rank that timed out has left
        others = [f"here/{rank}" for rank in range(world_size) if rank not in error.ranks]
        with contextlib.suppress(DistStoreError):
            PrefixStore.wait(ranks_store, others, LATECOMERS_SECONDS)  # other ranks may be lost too
        raise
    except AuthenticationError as error:
        if ranks_store.signs:  # a note is forged; otherwise the store's connection is changed
            ranks_store.set("job", _DIFFER + str(error).encode())
        raise AuthenticationError(f"rendezvous, rank 0: {error}") from None
    except RuntimeError as error:  # of any store: torch's raises it for a timeout
        missing = ranks_store.missing("here", range(world_size))
        if not missing:
            raise
        failed = _failed(ranks_store, missing, world_size, number, "")
        raise RendezvousError(f"{failed}{_refused(ranks_store)}", ranks=missing) from error
    _apply_verdict(_verdict(ranks_store), world_size, number)
    words, _, asked = zip(*(text.partition(b"\n") for text in here), strict=True)
    if wrong := differences(asked, range(world_size), "rendezvous"):
        ranks_store.set("job", _DIFFER + wrong.encode())
        raise RendezvousError(wrong)
    name = os.urandom(16).hex()
    ranks_store.set("job", _COMPLETE + f"{world_size} {name}".encode())
    _begin(ranks_store, 0, name)
    if ranks_store.signs:
        for rank in range(1, world_size):
            ranks_store.set(f"fresh/{rank}", words[rank])


def _begin(ranks_store: MembershipStore, rank: int, name: str) -> None:
    """Begin the meeting of this name. What the ranks sign from now on is about it and no other."""
    ranks_store.nonce = name.encode()
    ranks_store.sign(f"meeting {name}", rank, job=launcher_env.job_id())


def _check_fresh(ranks_store: MembershipStore, rank: int, word: str, deadline: float) -> None:
    """Check that rank 0 has read this rank's note of this start. Otherwise a process that repeats
    the notes of an earlier start could lead this rank to the ranks of that one."""
    (found,) = ranks_store.multi_get([f"fresh/{rank}"], max(0.0, deadline - time.monotonic()) + 0.1)
    if found != word.encode():
        raise AuthenticationError(
            f"rendezvous: rank 0 has read another note of rank {rank} in the ranks' store than "
            f"rank {rank} has written: somebody repeats there what an earlier start wrote, or two "
            "processes have the same rank. Start the job where only its own ranks can write",
            ranks=(0,),
        )


def _notice(ranks_store: MembershipStore, world_size: int, seconds: float) -> str:
    """Return what rank 0 says while it waits."""
    absent = set(ranks_store.absent([f"here/{rank}" for rank in range(world_size)]))
    missing = [rank for rank in range(world_size) if f"here/{rank}" in absent]
    here = world_size - len(missing)
    return (
        f"cydist: rank 0 on {socket.gethostname()} has waited {seconds:.0f} s for "
        f"{listed('rank', missing)}: {here} of {world_size} ranks "
        f"{'is' if here == 1 else 'are'} here"
        f"{_refused(ranks_store)}{_twice(ranks_store)}"
    )


def _refused(ranks_store: MembershipStore) -> str:
    """Return which connections the store refused: missing ranks may have made them."""
    refusals = "; ".join(ranks_store.refusals())
    return f". A missing rank may be one that was refused: {refusals}" if refusals else ""


def _await_verdict(
    ranks_store: MembershipStore,
    rank: int,
    world_size: int,
    deadline: float,
    number: int,
    before: str,
) -> None:
    """On other ranks: wait for rank 0's verdict, a moment longer than rank 0 waits for the
    ranks."""
    limit = max(0.0, deadline - time.monotonic()) + 0.1
    try:
        (verdict,) = ranks_store.multi_get(["job"], limit)
    except PeerFailedError:
        raise
    except AuthenticationError as error:
        held_by = () if ranks_store.holder is None else (ranks_store.holder,)
        raise AuthenticationError(f"rendezvous, rank {rank}: {error}", ranks=held_by) from None
    except RuntimeError as error:
        if isinstance(error, DistStoreError) and not error.answered:
            raise _unresponsive(error, ranks_store.holder) from error
        missing = ranks_store.missing("here", range(world_size))
        raise _failed(ranks_store, missing, world_size, number, before) from error
    _apply_verdict(verdict, world_size, number)
    size, _, name = verdict.removeprefix(_COMPLETE).decode().partition(" ")
    if int(size) != world_size:
        raise RendezvousError(
            f"rendezvous: rank 0 has met {counted(int(size), 'rank')}, and rank {rank} was told a "
            f"world of {world_size}: tell all ranks the same world_size (WORLD_SIZE)",
            ranks=(0,),
        )
    _begin(ranks_store, rank, name)


def _failed(
    ranks_store: MembershipStore,
    missing: tuple[int, ...],
    world_size: int,
    number: int,
    before: str,
) -> RendezvousError:
    """Make all ranks give up, because this rank's time is up."""
    twice = _twice(ranks_store)
    ranks_store.set("job", _FAILED + f"{','.join(map(str, missing))}\n{twice}".encode())
    return _missing_error(missing, world_size, number, twice, before)


def _verdict(ranks_store: PrefixStore) -> bytes:
    """Return rank 0's verdict so far; b"": none yet."""
    return ranks_store.get("job") if ranks_store.check(["job"]) else b""


def _apply_verdict(verdict: bytes, world_size: int, number: int) -> None:
    """Raise RendezvousError if rank 0's verdict is that the check-in failed."""
    if verdict[:1] == _FAILED:
        numbers, _, twice = verdict[1:].partition(b"\n")
        told = set(numbers.split(b","))
        missing = tuple(rank for rank in range(world_size) if b"%d" % rank in told)
        raise _missing_error(missing, world_size, number, printable(twice))
    if verdict[:1] == _DIFFER:
        raise RendezvousError(printable(verdict[1:]))


def agree_on_backend(
    part: MembershipStore, rank: int, ranks: Sequence[int], backend: str, what: str,
    elsewhere: Callable[[Sequence[int]], dict[int, str]],
) -> None:  # fmt: skip
    """Check that all these ranks, which are about to make a group in this part of a store, ask for
    the same backend.

    Args:
        elsewhere: Returns the ranks that will not come here, because their request needs no
            meeting, each with that request.

    Raises RendezvousError, which lists the ranks by backend, on every rank that comes. A rank that
    found ranks that do not come lists those in the error's `ranks`. Also raises as
    MembershipStore.meet.
    """

    looking: list[int] = []  # this rank's number among the ranks that look, once it does

    def look() -> None:
        """Query the ranks that this rank waits for. The first rank queries all others. A limited
        number of others query the first, since queries of all would delay it."""
        if not looking:
            looking.append(part.add("asks/looking", 1))
        if rank != ranks[0] and looking[0] > MOST_LOOKING:
            return
        awaited = ranks if rank == ranks[0] else ranks[:1]
        absent = set(part.absent([f"asks/{each}" for each in awaited]))
        others = elsewhere([each for each in awaited if f"asks/{each}" in absent])
        if not others:
            return
        absent = set(part.absent([f"asks/{each}" for each in ranks]))
        here = [each for each in ranks if f"asks/{each}" not in absent]
        words = part.multi_get([f"asks/{each}" for each in here])
        asked = dict(zip(here, words, strict=True))
        asked |= {each: spec.encode() for each, spec in others.items()}
        wrong = differences([asked[each] for each in sorted(asked)], sorted(asked), what)
        if wrong:
            error = RendezvousError(wrong, ranks=tuple(others))
            # Ranks that come raise it without `ranks`: those concern the rank that asked.
            part.refuse("asks", RendezvousError(wrong))
            raise error

    part.meet("asks", rank, ranks, backend, lambda asked: differences(asked, ranks, what), look)


def differences(asked: Sequence[bytes], ranks: Sequence[int], what: str) -> str:
    """Return the error text if the ranks ask for different backends, each of which would wait only
    for its own ranks; "" if they agree."""
    who: dict[bytes, list[int]] = {}
    for rank, backend in zip(ranks, asked, strict=True):
        who.setdefault(backend, []).append(rank)
    if len(who) == 1:
        return ""
    texts = [
        f"{backend.decode(errors='replace')!r} on {listed('rank', own)}"
        for backend, own in who.items()
    ]
    return (
        f"{what}: the ranks ask for different backends: {'; '.join(texts)}. Ask for the same on "
        "all; None stands for what a process finds, by its launcher, cupy and GPUs"
    )


def _unresponsive(error: DistStoreError, holder: int | None) -> RendezvousError:
    """Return the error for a store that does not answer.

    Asking it for the missing ranks would take as long again.
    """
    whose = "" if holder is None else f", which is on rank {holder},"
    ranks = () if holder is None else (holder,)
    return RendezvousError(f"rendezvous: the store{whose} does not answer: {error}", ranks=ranks)


_CHECKS = (
    ". Check that they were started, and that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same "
    "on all ranks"
)


def _missing_error(
    missing: tuple[int, ...], world_size: int, number: int, twice: str, before: str = ""
) -> RendezvousError:
    """Return the error that lists the missing ranks.

    Args:
        twice: What is said of a rank that came twice to this meeting.
        before: Who has this rank in the meeting before.
    """
    doubt = (
        f". This is meeting number {number} in this store"
        + (f", and in the one before {before}" if before else "")
        + ": if it is the first of this job, two processes have the same rank, or the store is "
        "left from an earlier job"
        if number > 1
        else ""
    )
    what = f"missing: {listed('rank', missing)}" if missing else "rank 0 has not opened the meeting"
    return RendezvousError(
        f"rendezvous: timeout with {world_size - len(missing)} of {world_size} ranks here, "
        f"{what}{doubt or _CHECKS}{twice}",
        ranks=missing,
    )

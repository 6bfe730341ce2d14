"""The meeting: every rank checks in, in one store, and learns that all others did, or who did not.

Who is missing at the timeout is known by rank, a rank that is taken twice is found, and a second
meeting in the same store sees nothing of the first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

from cydist._native import failpoint
from cydist.errors import DistStoreError, PeerFailedError, RendezvousError, StoreTimeoutError
from cydist.stores import MembersStore, PrefixStore
from cydist.stores.members import served_by

# What rank 0 writes to say that everybody is here, followed by the meeting's random name, or
# that somebody is missing.
_COMPLETE, _FAILED = b"+", b"-"

# When a rank is lost, rank 0 stays for so long for those who have not come yet: they hear of it
# from the store, which may go with rank 0.
LATECOMERS_SECONDS = 0.5


class EarlierMeeting(Exception):
    """The store is still that of another meeting, which rank 0 has not left."""


def meet(
    store: Any,
    rank: int,
    world_size: int,
    *,
    deadline: float,
    group_name: str = "",
    holder: int | None = None,
) -> tuple[MembersStore, int, int]:
    """Check in and wait for all others. Returns the meeting's own part of `store`.

    The n-th time that a rank checks in belongs to the n-th meeting, so no rank meets keys
    that were left by an earlier one.

    holder   the rank that serves the store, for one meeting; None: somebody else does

    Raises EarlierMeeting where that one meeting is another one, or this rank has been in it; on
    every rank RendezvousError that lists the missing ranks after the first rank's deadline, and
    PeerFailedError at once when one that was here is lost (MembersStore).
    """
    if holder is not None:
        _find_the_same(store, rank, holder, f"{world_size} {group_name}", deadline)
    hall = PrefixStore(f"cydist/{group_name}", store)
    with served_by(holder, "rendezvous"):
        number = hall.add(f"arrivals/{rank}", 1)
    if holder is not None and number > 1:
        raise EarlierMeeting
    meeting = MembersStore(f"{number}", hall, range(world_size), holder=holder)
    meeting.join(rank)
    with meeting.told_on_error(rank, late=True):
        failpoint("rendezvous")
        meeting.set(f"here/{rank}", f"{socket.gethostname()} (process {os.getpid()})")
        if rank == 0:
            _gather(meeting, world_size, deadline, number)
        else:
            _attend(meeting, world_size, deadline, number)
    return meeting, rank, world_size


def _find_the_same(store: Any, rank: int, holder: int, what: str, deadline: float) -> None:
    """The store serves the meeting that `holder` opened it for, and no other."""
    hall = PrefixStore("cydist", store)
    with served_by(holder, "rendezvous"):
        if rank == holder:
            hall.set("serves", what)
            return
        try:
            hall.wait(["serves"], max(0.0, deadline - time.monotonic()))
        except StoreTimeoutError as error:
            raise _silent(error, holder) from error
        if hall.get("serves") != what.encode():
            raise EarlierMeeting


def _gather(meeting: MembersStore, world_size: int, deadline: float, number: int) -> None:
    """Rank 0: wait until everybody is here, and say so; or who is not."""
    everybody = [f"here/{rank}" for rank in range(world_size)]
    try:
        meeting.wait(everybody, max(0.0, deadline - time.monotonic()))
    except PeerFailedError as error:
        _heed(meeting, world_size, number)  # one whose time was up has gone
        others = [f"here/{rank}" for rank in range(world_size) if rank not in error.ranks]
        with contextlib.suppress(DistStoreError):
            PrefixStore.wait(meeting, others, LATECOMERS_SECONDS)  # whoever else is lost
        raise
    except RuntimeError as error:  # of any store: torch's raises it for a timeout
        missing = _missing(meeting, world_size)
        if not missing:
            raise
        raise _failed(meeting, missing, world_size, number) from error
    _heed(meeting, world_size, number)
    meeting.set("job", _COMPLETE + os.urandom(16).hex().encode())


def _attend(meeting: MembersStore, world_size: int, deadline: float, number: int) -> None:
    """Other ranks: wait for rank 0's word, a moment longer than it waits for the others."""
    limit = max(0.0, deadline - time.monotonic()) + 0.1
    try:
        meeting.wait(["job"], limit)
    except PeerFailedError:
        raise
    except RuntimeError as error:
        if isinstance(error, DistStoreError) and not error.answered:
            raise _silent(error, meeting.holder) from error
        raise _failed(meeting, _missing(meeting, world_size), world_size, number) from error
    _heed(meeting, world_size, number)


def _failed(
    meeting: PrefixStore, missing: tuple[int, ...], world_size: int, number: int
) -> RendezvousError:
    """This rank's time is up: all others give up, too."""
    meeting.set("job", _FAILED + ",".join(map(str, missing)).encode())
    return _absent(missing, world_size, number)


def _heed(meeting: PrefixStore, world_size: int, number: int) -> None:
    """Raise RendezvousError if the meeting has failed."""
    word = meeting.get("job") if meeting.check(["job"]) else b""
    if word[:1] == _FAILED:
        missing = tuple(int(each) for each in word[1:].split(b",") if each)
        raise _absent(missing, world_size, number)


def _silent(error: DistStoreError, holder: int | None) -> RendezvousError:
    """The store itself did not answer: asking it who is missing would take as long again."""
    whose = "" if holder is None else f", which is on rank {holder},"
    ranks = () if holder is None else (holder,)
    return RendezvousError(f"rendezvous: the store{whose} does not answer: {error}", ranks=ranks)


def _missing(meeting: PrefixStore, world_size: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world_size) if not meeting.check([f"here/{rank}"]))


def _absent(missing: tuple[int, ...], world_size: int, number: int) -> RendezvousError:
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    doubt = (
        f". This is meeting number {number} in this store: if it is the first of this job, two "
        "processes have the same rank, or the store is left from an earlier job"
        if number > 1
        else ""
    )
    what = f"missing: rank {shown}" if missing else "rank 0 has not opened the meeting"
    return RendezvousError(
        f"rendezvous: timeout with {world_size - len(missing)} of {world_size} ranks here, "
        f"{what}{doubt}",
        ranks=missing,
    )

"""monitored_barrier: a barrier that names the ranks that did not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cydist import _native
from cydist.api.dispatch import Timeout, run_on_backend
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.errors import DistTimeoutError
from cydist.groups.process_group import COLLECTIVE_TAG, Call, ProcessGroup
from cydist.waiting import seconds

if TYPE_CHECKING:
    from cydist.work import Work


def monitored_barrier(
    group: AnyGroup = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """A barrier through rank 0 of the group, which names the ranks that are late.

    timeout             seconds or a timedelta; None: the group's
    wait_all_ranks      rank 0 waits for all and names every rank that is missing; without it
                        the first missing one (by rank) ends the wait

    Raises DistTimeoutError, whose `ranks` are the missing global ranks, on rank 0; the others
    are told by a DistTimeoutError that rank 0 knows more. The group has failed then.
    """
    if (chosen := usable_group(group, "monitored_barrier")) is None:
        return

    def body(backend: ProcessGroup, call: Call) -> None:
        backend.announce_call(call)
        limit = seconds(timeout)
        limit_ms = 1000 * (backend.timeout if limit is None else limit)
        if backend.rank() == 0:
            _collect(backend, call, limit_ms, wait_all_ranks)
        else:
            _report(backend, call)

    run_on_backend(chosen.as_host_group(), "monitored_barrier", None, body, None, False, timeout)


def _collect(group: ProcessGroup, call: Call, limit_ms: float, wait_all: bool) -> None:
    """Rank 0: receive from all ranks, then release all of them."""
    others = range(1, group.size())
    token = _native.empty(1)
    arriving: list[Work] = [group.irecv(_native.empty(1), peer, COLLECTIVE_TAG) for peer in others]
    missing: list[int] = []
    for peer, work in zip(others, arriving, strict=True):
        try:
            call.wait(work)
        except DistTimeoutError:
            missing.append(group.ranks[peer])
            if not wait_all:
                break
    if missing:
        who = "Ranks " if wait_all else "Rank "
        raise DistTimeoutError(
            f"[Rank 0]: {who}{', '.join(map(str, missing))} failed to pass monitoredBarrier in "
            f"{limit_ms:.0f} ms (group {group.group_name!r})",
            op=call.name,
            seq=call.seq,
            group=group.group_name,
            ranks=tuple(missing),
        )
    leaving = [group.isend(token, peer, COLLECTIVE_TAG) for peer in others]
    for work in leaving:
        call.wait(work)


def _report(group: ProcessGroup, call: Call) -> None:
    """Every other rank: tell rank 0, and wait until it has heard from all."""
    here = group.ranks[group.rank()]
    try:
        call.wait(group.isend(_native.empty(1), 0, COLLECTIVE_TAG))
        call.wait(group.irecv(_native.empty(1), 0, COLLECTIVE_TAG))
    except DistTimeoutError as error:
        raise DistTimeoutError(
            f"Rank {here} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank. "
            f"Original exception: {error}",
            op=call.name,
            seq=call.seq,
            group=group.group_name,
            ranks=(group.ranks[0],),
        ) from error

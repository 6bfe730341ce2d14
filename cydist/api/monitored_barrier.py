"""monitored_barrier: a barrier that names the missing ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cydist import _native
from cydist._native import CallRecord
from cydist.api.dispatch import Prepared, Timeout
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.errors import DistTimeoutError, PeerFailedError
from cydist.groups.process_group import DERIVED_TAG, ProcessGroup
from cydist.waiting import seconds

if TYPE_CHECKING:
    from cydist.work import Work


def monitored_barrier(
    group: AnyGroup = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Run a barrier through rank 0 of the group, which names the late ranks.

    Args:
        group: A group from `new_group`; None is the default group.
        timeout: Seconds or a timedelta for this call; None takes the group's.
        wait_all_ranks: Rank 0 waits for all ranks and names every missing one. False: the first
            missing rank ends the wait.

    Raises:
        ValueError: The arguments are wrong on this rank. The group stays usable.
        DistTimeoutError: Ranks are missing. On rank 0 its `ranks` are their global ranks; the error
            of the other ranks refers to rank 0. The group has failed then.
        PeerFailedError: A rank died before it came, likewise, and at once.
        DistError: The call failed otherwise. The group has failed then.

    Examples:
        >>> dist.monitored_barrier(timeout=10, wait_all_ranks=True)
    """
    if (chosen := usable_group(group, "monitored_barrier")) is None:
        return
    prepared = Prepared(chosen.as_host_group(), "monitored_barrier")

    def body(call: CallRecord) -> None:
        backend = prepared.group
        backend.announce_call(call)
        limit = seconds(timeout)
        limit_ms = 1000 * (backend.timeout if limit is None else limit)
        if backend.rank() == 0:
            _collect(backend, call, limit_ms, wait_all_ranks)
        else:
            _report(backend, call)

    prepared.run(body, None, False, timeout)


def _collect(group: ProcessGroup, call: CallRecord, limit_ms: float, wait_all: bool) -> None:
    """On rank 0: receive from all ranks, then release all of them."""
    others = range(1, group.size())
    token = _native.empty(1)
    arriving: list[Work] = [group.irecv(_native.empty(1), peer, DERIVED_TAG) for peer in others]
    missing: list[int] = []
    for peer, work in zip(others, arriving, strict=True):
        try:
            call.wait(work)
        except DistTimeoutError:
            missing.append(group.ranks[peer])
            if not wait_all:
                break
        except PeerFailedError as error:  # of this rank or of another
            dead = error.ranks or (group.ranks[peer],)
            raise PeerFailedError(
                f"{_missed(group, dead, limit_ms, len(dead) > 1)}. Original exception: {error}",
                op=call.name, seq=call.seq, group=group.group_name, ranks=dead,
            ) from error  # fmt: skip
    if missing:
        raise DistTimeoutError(
            _missed(group, missing, limit_ms, wait_all),
            op=call.name, seq=call.seq, group=group.group_name, ranks=tuple(missing),
        )  # fmt: skip
    leaving = [group.isend(token, peer, DERIVED_TAG) for peer in others]
    for work in leaving:
        call.wait(work)


def _missed(group: ProcessGroup, missing: Sequence[int], limit_ms: float, several: bool) -> str:
    """Return rank 0's text about ranks that did not come, whose beginning is torch's."""
    who = "Ranks " if several else "Rank "
    return (
        f"[Rank 0]: {who}{', '.join(map(str, missing))} failed to pass monitoredBarrier in "
        f"{limit_ms:.0f} ms ({group.title})"
    )


def _report(group: ProcessGroup, call: CallRecord) -> None:
    """On every other rank: notify rank 0, and wait until it has received from all."""
    here = group.ranks[group.rank()]
    try:
        call.wait(group.isend(_native.empty(1), 0, DERIVED_TAG))
        call.wait(group.irecv(_native.empty(1), 0, DERIVED_TAG))
    except (DistTimeoutError, PeerFailedError) as error:
        ranks = (group.ranks[0],) if isinstance(error, DistTimeoutError) else error.ranks
        raise type(error)(
            f"Rank {here} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank. "
            f"Original exception: {error}",
            op=call.name, seq=call.seq, group=group.group_name, ranks=ranks,
        ) from error  # fmt: skip

"""shrink_group: the ranks that are left go on without those that died."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from operator import index
from typing import Any

from cydist.api.dispatch import Timeout
from cydist.api.nonmember import NonMember
from cydist.api.process_groups import AnyGroup, GroupMember, replace, usable_group
from cydist.errors import DistBackendError, GroupFailedError
from cydist.groups.process_group import ProcessGroup

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def shrink_group(
    ranks_to_exclude: Iterable[int] | None = None,
    group: AnyGroup = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
    *,
    timeout: Timeout = None,
) -> ProcessGroup | NonMember:
    """A new group of those members that are neither excluded nor dead, in place of `group`.

    ranks_to_exclude    ranks of `group`; None: only those that turn out to be dead, which may
                        be none
    group               None: the default group; then the new one becomes the default group
    shrink_flags        SHRINK_ABORT first ends all calls under way on `group` with an error;
                        with SHRINK_DEFAULT they end when the new group is there
    pg_options          for the backend
    timeout             seconds or a timedelta for the others to call this too; None: the
                        group's

    Every member that goes on calls this; the group may have failed. They agree on who is
    left: whoever is in the list of one of them, or is found dead by one of them before the new
    group is there, is out. A barrier on the new group ends the call.

    The old group is destroyed. All other groups stay as they are, with the global ranks that
    they were made with. When the default group is shrunk, its ranks are numbered anew from 0:
    get_rank, get_world_size, new_group, and global ranks in calls on the new groups mean the
    new numbers.

    Raises ValueError when the list is empty, names a rank twice, one that is none, or all of
    them, and for a group of one rank; UnsupportedError where the backend cannot (nothing has
    happened then); DistBackendError where this rank is excluded, by its own list or another's;
    DistTimeoutError that names those who neither called nor died. After a timeout it can be
    called again.
    """
    if (chosen := usable_group(group, "shrink_group")) is None:
        return GroupMember.NON_GROUP_MEMBER
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"shrink_group: shrink_flags must be SHRINK_DEFAULT ({SHRINK_DEFAULT}) or "
            f"SHRINK_ABORT ({SHRINK_ABORT}), not {shrink_flags!r}"
        )
    excluded = () if ranks_to_exclude is None else _checked(ranks_to_exclude, chosen)
    if chosen.size() < 2:
        raise ValueError(
            f"shrink_group: group {chosen.group_name!r} has one rank, and at least one must remain"
        )
    if chosen.rank() in excluded:
        raise DistBackendError(
            f"shrink_group: this rank ({chosen.rank()} of group {chosen.group_name!r}) is in "
            "ranks_to_exclude: only those call it that go on",
            op="shrink_group", group=chosen.group_name,
            ranks=(chosen.ranks[chosen.rank()],),
        )  # fmt: skip
    with contextlib.suppress(GroupFailedError):  # a failed group is what this is for
        chosen.check_usable("shrink_group")
    made = chosen.shrink(
        excluded, chosen.deadline(timeout, "shrink_group"), abort=shrink_flags == SHRINK_ABORT,
        pg_options=pg_options,
    )  # fmt: skip
    replace(chosen, made)
    return made


def _checked(ranks: Iterable[int], group: ProcessGroup) -> tuple[int, ...]:
    """The list as integers. Raises TypeError and ValueError."""
    try:
        excluded = tuple(index(rank) for rank in ranks)
    except TypeError:
        raise TypeError(
            f"shrink_group: ranks_to_exclude must be a list of ranks of the group, or None, not "
            f"{ranks!r}"
        ) from None
    if not excluded:
        raise ValueError(
            "shrink_group: ranks_to_exclude is empty: None excludes those that are dead"
        )
    for rank in excluded:
        if not 0 <= rank < group.size():
            raise ValueError(
                f"shrink_group: ranks_to_exclude has {rank}, and group {group.group_name!r} has "
                f"ranks 0 to {group.size() - 1}"
            )
    if len(set(excluded)) != len(excluded):
        raise ValueError(f"shrink_group: ranks_to_exclude names a rank twice: {list(excluded)}")
    if len(excluded) == group.size():
        raise ValueError("shrink_group: ranks_to_exclude has all ranks; at least one must remain")
    return excluded

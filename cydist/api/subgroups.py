"""Several groups at once: the world or a group in parts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import index
from typing import Any

from cydist.api.process_groups import (
    AnyGroup,
    GroupMember,
    NonMember,
    current_world,
    get_process_group_ranks,
    new_group,
    usable_group,
)
from cydist.errors import UnsupportedError
from cydist.groups import registry
from cydist.groups.process_group import ProcessGroup
from cydist.rendezvous import launcher_env
from cydist.waiting import seconds

Groups = tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]


def new_subgroups(
    group_size: int | None = None,
    group: AnyGroup = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Groups:
    """Make groups of neighbours: the first `group_size` ranks, the next, and so on.

    Every rank of the world calls it.

    Args:
        group_size: Ranks of each group; the size of `group` is a multiple of it. None: as many as
            the launcher says that each host has.
        group: The group to divide, one of all ranks; None is the default group.
        timeout: As `new_group`.
        backend: As `new_group`.
        pg_options: As `new_group`.
        group_desc: What messages call the groups.

    Returns:
        This rank's group, and all of them in order. A group that this rank is not in is
        GroupMember.NON_GROUP_MEMBER.

    Raises:
        ValueError: The sizes do not fit, the group has other ranks than the world, or the launcher
            does not say how many ranks a host has.
            Nothing has happened, and you can call it again.
        RendezvousError: The ranks ask for different backends.

    Examples:
        >>> mine, groups = dist.new_subgroups(1)
        >>> assert mine.ranks == (rank,) and len(groups) == 2
    """
    ranks = get_process_group_ranks(group)
    if sorted(ranks) != list(range(current_world().size)):
        raise ValueError(
            "new_subgroups: the group must have all ranks of the world: let the members of another "
            "one call split_group"
        )
    size = _ranks_of_a_host() if group_size is None else index(group_size)
    if size < 1 or len(ranks) % size:
        raise ValueError(
            f"new_subgroups: {len(ranks)} ranks cannot be divided into groups of {size}"
        )
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def _ranks_of_a_host() -> int:
    local_size = launcher_env.placement().local_size
    if local_size is None:
        raise ValueError(
            "new_subgroups: the launcher does not say how many ranks a host has "
            "(LOCAL_WORLD_SIZE): give group_size"
        )
    return local_size


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Groups:
    """Make a group of each of these lists of ranks.

    Every rank of the world calls it, also one that is in none of them.

    Args:
        ranks_per_subgroup_list: Global ranks of each group. No rank is in two of them.
        timeout: As `new_group`.
        backend: As `new_group`.
        pg_options: As `new_group`.
        group_desc: What messages call the groups.

    Returns:
        This rank's group, and all of them in order. A group that this rank is not in is
        GroupMember.NON_GROUP_MEMBER, also as the first result.

    Raises:
        ValueError: There is no list, a rank is in two, or `new_group` would not take one of them.
            Nothing has happened, and you can call it again.
        RendezvousError: The ranks ask for different backends.

    Examples:
        >>> mine, groups = dist.new_subgroups_by_enumeration([[1], [0]])
        >>> assert mine is groups[1 - rank]
    """
    world = current_world()
    parts = [[index(rank) for rank in part] for part in ranks_per_subgroup_list]
    members = [rank for part in parts for rank in part]
    if not members or not all(parts) or len(set(members)) != len(members):
        raise ValueError(
            "new_subgroups_by_enumeration needs lists of ranks, each with a rank and none of them "
            f"in two, not {ranks_per_subgroup_list!r}"
        )
    if wrong := [rank for rank in members if not 0 <= rank < world.size]:
        raise ValueError(
            f"new_subgroups_by_enumeration: there are ranks 0 to {world.size - 1}, not {wrong[0]}"
        )
    mine: ProcessGroup | NonMember = GroupMember.NON_GROUP_MEMBER
    groups: list[ProcessGroup | NonMember] = []
    for part in parts:
        made = new_group(
            part, timeout, backend, pg_options, group_desc=group_desc, sort_ranks=False
        )
        groups.append(made)
        if world.rank in part:
            mine = made
    return mine, groups


def split_group(
    parent_pg: AnyGroup = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: float | timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into parts. Only the members of `parent_pg` call it.

    On backend "nccl" all of them call it, also those in no part, with the same `split_ranks`.

    Args:
        parent_pg: The group to split; None is the default group.
        split_ranks: Ranks of `parent_pg` for each part. No rank is in two of them; one may be in
            none.
        timeout: As `new_group`; None takes the parent's.
        pg_options: Accepted for compatibility with torch: backends that split take none.
        group_desc: What messages call the group. Its name by default.
        backend: The parent's backend, "tcp" or "cpu:tcp" for example; None: the same.

    Returns:
        This rank's part; None if it is in none, or, after one warning, not in the parent.

    Raises:
        ValueError: The parts are missing, empty or overlap, or name a rank that the parent does not
            have. Or the backend is not the parent's. Nothing has happened, and you can call it
            again.
        UnsupportedError: The parent's backend cannot make a group without the other ranks of the
            world. All of cydist's own can.
        DistError: The parent has failed.

    Examples:
        >>> pair = dist.new_group([1, 0], sort_ranks=False)
        >>> alone = dist.split_group(pair, [[0], [1]])
        >>> assert alone.ranks == (rank,)
    """
    parent = usable_group(parent_pg, "split_group")
    if parent is None:
        return None
    parts = [[index(rank) for rank in part] for part in split_ranks or ()]
    members = [rank for part in parts for rank in part]
    if not parts or not all(parts) or len(set(members)) != len(members):
        raise ValueError(
            "split_group: split_ranks needs lists of ranks, none of them empty and no rank in two, "
            f"not {split_ranks!r}"
        )
    if wrong := [rank for rank in members if not 0 <= rank < parent.size()]:
        raise ValueError(
            f"split_group: {parent.title} has ranks 0 to {parent.size() - 1}, not {wrong[0]}"
        )
    if backend is not None:
        _check_same_backend(parent, backend)
    if not (parent.splits_without_peers or parent.splits_with_all):
        raise UnsupportedError(
            f"split_group: backend {parent.backend!r} cannot make a group without the other ranks "
            "of the world: let every rank call new_subgroups_by_enumeration, or use backend 'tcp' "
            "or 'mpi'",
            group=parent.group_name,
        )
    limit = seconds(timeout, "split_group")
    parent.check_usable("split_group")
    limit = parent.timeout if limit is None else limit
    return current_world().split(parent, parts, limit, group_desc)


def _check_same_backend(parent: ProcessGroup, backend: str) -> None:
    """Raise ValueError if a part would have another backend than its parent for some device."""
    has = registry.parse(parent.backend)
    for device, name in registry.parse(str(backend)).items():
        if device not in has or registry.find(name).create is not registry.find(has[device]).create:
            raise ValueError(
                f"split_group: a part has the backend of its parent, which is {parent.backend!r}, "
                f"not {name!r} for arrays on {device}: make a group of {name!r} with new_group"
            )

"""One rank's view of its job: its groups, how they are made, and what they share.

Members of a new group meet in the job's store. A backend makes some things once for all ranks, such
as a link or MPI's communicator. Its groups share them, and their parent group owns them. The parent
is the default group or, if that has another backend, a hidden group of all ranks.

If the default group's backend can split a group off, its members do not meet. They announce that to
ranks that ask for a different backend and would otherwise wait for them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cydist import config
from cydist.errors import (
    DistError,
    DistNetworkError,
    MismatchError,
    RendezvousError,
    listed,
    warn_user,
)
from cydist.group_names import DEFAULT_GROUP, GroupName, group_title
from cydist.groups import registry
from cydist.groups.device_router import DeviceRouter
from cydist.groups.process_group import ProcessGroup
from cydist.groups.registry import BackendOptions
from cydist.logs import INFO, Log, use_rank

if TYPE_CHECKING:
    from cydist.stores import MembershipStore

MOST_ASKED = 16  # ranks that are asked at a time for their requests

_log = Log("group")


@contextlib.contextmanager
def typed_errors(doing: str, rank: int) -> Iterator[None]:
    """Turn an OSError of this host, such as a missing descriptor, into an error that names rank and
    call.

    Args:
        rank: -1: not known yet.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, DistError):  # some are OSErrors too
            raise
        from cydist.net.acceptor import with_remedy

        who = "this rank" if rank < 0 else f"rank {rank}"
        raise DistNetworkError(f"{doing}, {who}: {with_remedy(error)}") from error


class World:
    """One rank's view of the job: its store, its default group, the groups made since."""

    def __init__(
        self,
        store: MembershipStore,
        rank: int,
        size: int,
        timeout: float,
        spec: str,
        *,
        owns_store: bool = False,
    ) -> None:
        self.store = store
        self.owns_store = owns_store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.spec = spec
        self.groups: dict[str, ProcessGroup] = {}
        # Parent groups of all ranks, by backend, where the default group has no part of that
        # backend.
        self.parent_groups: dict[str, ProcessGroup] = {}
        # Groups split off for ranks that asked for no other backend. A call on one tells them if
        # others did.
        self.conflicting: list[ProcessGroup] = []
        self.made = 0  # calls of new_group, members or not: the same on every rank
        self.named: dict[tuple[str, tuple[int, ...]], int] = {}  # calls of members_name
        self.prefix = ""  # in the names of groups: tells worlds before and after a shrink apart
        self.allow_pickle = True
        self.ends_with: list[Callable[[], None]] = []  # called before the groups are destroyed

    @cached_property
    def object_key(self) -> bytes:
        """Return the key of the tags of objects: of this start of the job and no other."""
        from cydist.net import auth  # jobs on one host without sockets need no secret

        return auth.hkdf(auth.secret(), self.store.nonce, b"objects")

    def end(self) -> None:
        """Destroy all groups, the last one first, even if one raises, and leave the job."""
        with contextlib.ExitStack() as leaving:
            leaving.callback(self.release)
            now = time.monotonic()
            for each in (*self.parent_groups.values(), *self.conflicting, *self.groups.values()):
                each.leave_job(now)
                leaving.callback(each.destroy)
            for end in self.ends_with:
                leaving.callback(end)

    def split(
        self,
        parent: ProcessGroup,
        parts: Sequence[Sequence[int]],
        timeout: float,
        description: str | None = None,
    ) -> ProcessGroup | None:
        """Make this rank's part of `parent`, of these lists of its group ranks; None: it is in
        none. Asks no rank if the backend can do without."""
        members = next((part for part in parts if parent.rank() in part), None)
        if members is None:
            if parent.splits_with_all:
                parent.split(parts, "", timeout)
            return None
        name = GroupName(self.members_name(f"{parent.group_name}/split", members), description)
        if parent.splits_with_all:
            made = parent.split(parts, name, timeout)
        else:
            made = parent.subgroup(members, name, timeout)
        assert made is not None
        self._keep(name, made)
        return made

    def _keep(self, name: str, group: ProcessGroup) -> None:
        """Enter a new group, which may use the job's store from now on."""
        self.groups[name] = group
        group.job_store = self.store
        if _log.shows(INFO):
            for part in group.backend_groups():
                _log.info("%s", self._choices(part))

    def _choices(self, group: ProcessGroup) -> str:
        """Return what was chosen for a group, for logs."""
        from cydist.net import secret  # imported with the rendezvous
        from cydist.rendezvous import launcher_env

        words = {
            **group.chosen(),
            "encryption": "on" if config.ENCRYPT.is_on() else "off",
            "secret from": secret.source(),
            "launcher": launcher_env.launcher() or "none",
            "timeout": f"{group.timeout:g} s",
        }
        return (
            f"{group.title} of {listed('rank', group.ranks)}, backend "
            f"{group.backend}: " + "; ".join(f"{what}: {word}" for what, word in words.items())
        )

    def members_name(self, prefix: str, members: Sequence[int]) -> str:
        """Return a new name for a group of these members. Each gets the same one, and asks no rank:
        they make such groups in the same order."""
        from hashlib import sha256  # slow to import and rarely needed

        key = prefix, tuple(members)
        count = self.named[key] = self.named.get(key, 0) + 1
        return f"{prefix}-{sha256(repr(key[1]).encode()).hexdigest()[:16]}-{count}"

    def release(self) -> None:
        """Leave the job's store at the end of the job. If the store is the user's, leave the
        meeting only."""
        from cydist.stores.membership_store import release  # imported with the store

        if self.owns_store:
            release(self.store)
        else:
            self.store.unregister()

    def make(
        self, ranks: Sequence[int], name: str, spec: str, timeout: float, pg_options: object
    ) -> ProcessGroup:
        """Make a group of these global ranks, which include this one."""
        devices = registry.parse(spec)
        ranks_store = self.store.part(name, ranks, f"making {group_title(name)}", timeout)
        parts: dict[str, ProcessGroup] = {}
        try:
            with (
                ranks_store.report_error(self.rank),
                typed_errors(f"making {group_title(name)}", self.rank),
            ):
                parent = self.groups.get(DEFAULT_GROUP)
                alike = parent is not None and parent.backend == spec
                if parent is not None and not (alike and parent.splits_without_peers):
                    # A group with options shares nothing with a parent: its members meet.
                    held = [found for each in devices.values() if (found := self.parent(each))]
                    alone = pg_options is None or all(each.splits_without_peers for each in held)
                    asked = spec if alone else f"{spec} with pg_options"
                    self._agree_on_backend(ranks_store, ranks, name, asked, timeout)
                    self.make_parents(devices.values(), name, timeout)
                elif parent is not None:
                    parent.announce_request(name, spec)
                for backend in dict.fromkeys(devices.values()):
                    parts[backend] = self.make_one(
                        ranks_store, ranks, name, backend, timeout, pg_options
                    )
        except BaseException:
            for made in parts.values():
                made.destroy()
            raise
        if pg_options is not None and all(part.splits_without_peers for part in parts.values()):
            warn_user(f"backend {spec!r} has no options: pg_options is ignored, {pg_options!r:.80}")
        group = next(iter(parts.values()))
        if len(parts) > 1:
            by_device = {device: parts[backend] for device, backend in devices.items()}
            group = DeviceRouter(by_device, name)
        self._keep(name, group)
        return group

    def _agree_on_backend(
        self,
        ranks_store: MembershipStore,
        ranks: Sequence[int],
        name: str,
        asked: str,
        timeout: float,
    ) -> None:
        """Check that these ranks ask for the same backend. Raises RendezvousError if they do not.
        Ranks that did not meet, because their group is split off the default group, then learn it
        in a call on that group.
        """
        from cydist.rendezvous.check_in import agree_on_backend

        default = self.groups[DEFAULT_GROUP]
        try:
            agree_on_backend(
                ranks_store, self.rank, ranks, asked, "new_group", self._nonmembers(name)
            )
        except RendezvousError as error:
            shared = default.subgroup(ranks, name, timeout) if error.ranks else None
            if shared is not None:
                self.conflicting.append(shared)
                call = f"new_group of backend {asked!r} in place of {default.backend!r}"
                shared.fail(MismatchError(str(error), ranks=error.ranks), call)
            raise

    def _nonmembers(self, name: str) -> Callable[[Sequence[int]], dict[int, str]]:
        """Return the ranks that do not make the group of this name with the others, each with what
        it asked for instead."""

        def subset(ranks: Sequence[int]) -> dict[int, str]:
            from random import sample  # slow to import and rarely needed

            asked = sample(ranks, min(len(ranks), MOST_ASKED))
            return self.groups[DEFAULT_GROUP].peer_requests(name, asked) if asked else {}

        return subset

    def parent(self, backend: str) -> ProcessGroup | None:
        """Return the parent group of this backend's groups, if there is one."""
        default = self.groups.get(DEFAULT_GROUP)
        parts = () if default is None else default.backend_groups()
        found = (part for part in parts if part.backend == backend)
        return next(found, None) or self.parent_groups.get(backend)

    def make_parents(self, backends: Iterable[str], name: str, timeout: float) -> None:
        """Make the parent groups that these backends need. Called on every rank of the world."""
        from cydist.rendezvous.check_in import agree_on_backend

        others, all_ranks = self._nonmembers(name), range(self.size)
        name = f"{name}/all"
        for backend in dict.fromkeys(backends):
            if registry.find(backend).of_all and self.parent(backend) is None:
                ranks_store = self.store.part(
                    name, all_ranks, f"making {group_title(name)}", timeout
                )
                with ranks_store.report_error(self.rank):
                    agree_on_backend(
                        ranks_store, self.rank, all_ranks, backend, "new_group", others
                    )
                    made = self.make_one(ranks_store, all_ranks, name, backend, timeout, None)
                self.parent_groups[backend] = made

    def make_one(
        self, ranks_store: MembershipStore, ranks: Sequence[int], name: str, backend: str,
        timeout: float, pg_options: object,
    ) -> ProcessGroup:  # fmt: skip
        """Make the part of a group that one backend serves."""
        parent = self.parent(backend)
        if parent is not None and (pg_options is None or parent.splits_without_peers):
            shared = parent.subgroup(ranks, name, timeout)
            if shared is not None:
                return shared
        options = BackendOptions(
            ranks_store.part(backend, ranks, f"making {group_title(name)}", timeout),
            list(ranks).index(self.rank),
            len(ranks),
            timeout,
            name,
            list(ranks),
        )
        made = registry.create(backend, options, pg_options)
        try:  # an error on one rank after the meeting still fails all
            ranks_store.meet(f"made/{backend}", self.rank, ranks)
        except BaseException:
            made.destroy()
            raise
        return made

    def replace(self, old: ProcessGroup, new: ProcessGroup) -> None:
        """Replace `old`, which ends, by `new`. A new default group renumbers the ranks."""
        if old is self.groups[DEFAULT_GROUP]:
            self._keep(DEFAULT_GROUP, new)
            self._shrink_parent_groups(new)
            self.rank, self.size = new.rank(), new.size()
            use_rank(self.rank)
            self.store.renumber(new.ranks)
            new.renumber(range(new.size()))
            # Ranks may have made different numbers of groups when one of them died.
            self.prefix = f"{new.group_name}/"
            self.made = 0
        else:
            self.groups.pop(old.group_name, None)
            self._keep(new.group_name, new)
        old.destroy()

    def _shrink_parent_groups(self, new: ProcessGroup) -> None:
        """Shrink the parent groups to the ranks of the new default group, given by their old
        numbers."""
        for backend, old in self.parent_groups.items():
            made = old.subgroup(new.ranks, f"{old.group_name}:{new.group_name}", self.timeout)
            assert made is not None
            made.renumber(range(new.size()))
            self.parent_groups[backend] = made
            old.destroy()

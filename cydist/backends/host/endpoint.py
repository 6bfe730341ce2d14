"""A process's end of a link, and the groups that share it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from cydist import config
from cydist.backends.host.peer_report import GONE, PeerReport, gather
from cydist.errors import DistError, listed

if TYPE_CHECKING:
    from cydist._native import InprocLink, Link
    from cydist.backends.host.connections import Connections
    from cydist.backends.host.group import HostGroup


# Most seconds from the end of a group here until its other members' last calls have been compared.
DRAIN_SECONDS = 1.0
REMEMBERED = 1000  # groups that this rank made, or is not part of, without meeting others
ASKED_FOR = "asking for backend "
MADE_OF = "in a group of this name, of "

# The ranks that are threads of this process, by hub and rank. A weak dictionary runs Python when it
# drops an entry, and would swallow a Ctrl-C at that moment.
_threads: dict[tuple[str, int], ref[Endpoint]] = {}


opened: WeakSet[Endpoint] = WeakSet()  # of this process and, before a fork, of its parent


class Endpoint:
    """This process's end of a link, shared by groups and closed by the last of them.

    Args:
        connections: Makes the link's connections; None: ranks are threads.
        hosts: For each of the link's peers the lowest one on its host; (): unknown.

    Attributes:
        query: Queries what a peer does in the group with an id; None: peers are not queried.
    """

    def __init__(
        self, link: Link, close: Callable[[], None], connections: Connections | None = None,
        hosts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.link = link
        self.hosts = hosts
        self._close = close
        self.groups: dict[int, ref[HostGroup]] = {}
        self.own_process = connections is not None
        self.query: Callable[[int, int, float], PeerReport] | None = None
        self._backends: dict[int, str] = {}
        # By a hash of a group's name: its global ranks here, none if this rank is not one of them.
        self._members: dict[int, Sequence[int]] = {}
        self.listens: Callable[[], str] = lambda: ""
        self.host_of: Callable[[int], str] = lambda peer: ""
        self.peer_error: Callable[[int], str] = lambda peer: ""
        # Of peers on other hosts; see TcpLink and Connections.
        self.vanished: Callable[[int], bool] = lambda peer: False
        self.silence: Callable[[], str] = lambda: ""
        self.ranks_beside: Callable[[int], list[int]] = lambda peer: [peer]
        self.traffic: Callable[[int], tuple[int, int, float, float] | None] = lambda peer: None
        if connections is not None:
            connections.report_of = self.report
            self.listens = connections.places
            self.host_of = connections.host_of
            self.peer_error = connections.connect_error
            self.vanished = connections.link.vanished
            self.silence = connections.link.silence
            self.ranks_beside = connections.ranks_beside
            self.traffic = connections.link.traffic
            if not config.INSECURE.is_on():
                self.query = connections.query
        self.drain_until = math.inf  # set at the process's end: how long its groups wait
        self._users = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        opened.add(self)

    def report(self, comm_id: int) -> PeerReport:
        """Return this rank's report on the group with this id."""
        if (backend := self._backends.get(comm_id)) is not None:
            return PeerReport(ASKED_FOR + backend, "")
        if (ranks := self._members.get(comm_id)) is not None:
            return PeerReport(MADE_OF + _members_text(ranks), "")
        known = self.groups.get(comm_id)
        group = None if known is None else known()
        if group is None:
            return GONE
        return group.report()

    def announce_request(self, name: str, peers: Sequence[int], backend: str) -> None:
        """As HostGroup.announce_request, for the link's peers."""
        with self._lock:
            _remember(self._backends, comm_id_of(f"{name}:asked", peers), backend)
            _remember(self._members, _members_id(name), ())

    def note_members(self, name: str, ranks: Sequence[int]) -> None:
        """Note of which global ranks this rank has made the group of this name."""
        with self._lock:
            _remember(self._members, _members_id(name), ranks)

    def absence(self, peer: int, name: str, ranks: Sequence[int], deadline: float) -> PeerReport:
        """Return why a peer is not in the group of these global ranks: it may have been given other
        ranks for the group of this name."""
        query, here = self.query, _members_text(ranks)
        if query is not None:
            with contextlib.suppress(TimeoutError, DistError, OSError):
                said = query(peer, _members_id(name), deadline).state
                before, made, there = said.partition(MADE_OF)
                if made and not before:
                    return PeerReport(
                        "not in the group: it has destroyed it"
                        if there == here
                        else f"not in this group: there group {name!r} is of {there}, and here of "
                        f"{here}. Give all ranks the same lists, in the same order",
                        "",
                    )
        return PeerReport(
            f"not in the group of {here}: it has not made it, was given other ranks for it, or "
            "destroyed it",
            "",
        )

    def peer_requests(
        self, name: str, peers: Sequence[int], ranks: Sequence[int]
    ) -> dict[int, str]:
        """As HostGroup.peer_requests, for some ranks, given as indices in `peers`."""
        query, what = self.query, comm_id_of(f"{name}:asked", peers)
        if query is None:
            return {}
        found = gather(lambda rank, deadline: query(peers[rank], what, deadline), ranks)
        said = {rank: report.state.partition(ASKED_FOR) for rank, report in found.items()}
        return {rank: backend for rank, (before, it, backend) in said.items() if it and not before}

    def end_together(self, patience: float = DRAIN_SECONDS) -> None:
        """End all groups, because the process ends. Together they wait no longer than one group for
        ranks that have not made their last calls."""
        self.drain_until = min(self.drain_until, time.monotonic() + patience)

    def drains_at_exit(self) -> bool:
        """Return whether groups that still exist at exit compare their last calls.

        A forked child leaves that to its parent.
        """
        return self._pid == os.getpid()

    def share(self) -> Endpoint:
        """Add a group that uses this endpoint."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Remove a group that has ended."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._close()


def _remember(known: dict[int, Any], key: int, value: object) -> None:
    """Keep a value, and the last REMEMBERED others."""
    known[key] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def _members_id(name: str) -> int:
    return comm_id_of(f"{name}:members", ())


def _members_text(ranks: Sequence[int]) -> str:
    """Return a group's ranks for messages; if they are many, with a hash, which tells lists
    apart."""
    if not ranks:
        return "other ranks"
    more = f" (list {comm_id_of('', ranks) % 10**6})" if len(ranks) > 16 else ""
    return f"{listed('rank', ranks)}{more}"


def of_threads(link: InprocLink, key: str) -> Endpoint:
    """Return the endpoint of a rank that is a thread of this process; `key` is its hub's."""

    def close() -> None:
        _threads.pop((key, link.rank), None)
        link.close()

    def query(peer: int, comm_id: int, deadline: float) -> PeerReport:
        known = _threads.get((key, peer))
        endpoint = None if known is None else known()
        return GONE if endpoint is None else endpoint.report(comm_id)

    endpoint = Endpoint(link, close)
    endpoint.query = query
    _threads[key, link.rank] = ref(endpoint)
    return endpoint


def comm_id_of(name: str, peers: Sequence[int]) -> int:
    """Return a number for a group's messages, the same on all members and for no other group.

    The id is never reused on a link: a rank that left a group drops messages for its id, and tells
    peers that still wait for it. The same peers use a name once.
    """
    digest = hashlib.sha256(f"{name}/{tuple(peers)}".encode()).digest()
    return int.from_bytes(digest[:8], "little")

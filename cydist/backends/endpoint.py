"""A process's end of a link, and the groups that share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from cydist import config
from cydist.backends.reports import GONE, Report

if TYPE_CHECKING:
    from cydist._native import Link
    from cydist.backends.connections import Connections
    from cydist.backends.host import HostGroup


class Endpoint:
    """This process's end of a link, shared by groups and closed by the last of them.

    connections     what makes the link's connections; None: ranks are threads
    """

    def __init__(
        self, link: Link, close: Callable[[], None], connections: Connections | None = None
    ) -> None:
        self.link = link
        self._close = close
        self.groups: dict[int, ref[HostGroup]] = {}
        self.own_process = connections is not None
        self.ask: Callable[[int, int, float], Report] | None = None
        self.host_of: Callable[[int], str] = lambda peer: ""
        self.trouble: Callable[[int], str] = lambda peer: ""
        if connections is not None:
            connections.reporter = self.report
            self.host_of = connections.host_of
            self.trouble = connections.trouble
            if not config.INSECURE.on():
                self.ask = connections.ask
        self._users = 0
        self._lock = threading.Lock()

    def report(self, context: int) -> Report:
        """What this rank is doing in the group of this context."""
        known = self.groups.get(context)
        group = None if known is None else known()
        if group is None:
            return GONE
        return group.report()

    def share(self) -> Endpoint:
        """One more group uses it."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """A group has ended."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._close()

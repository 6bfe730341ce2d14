"""A process's end of a communicator that its groups share, and the process's departure from it.

A process leaves when its last group ends, when it exits, or when the program finalizes MPI.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist.backends.host.endpoint import Endpoint
from cydist.backends.mpi.communicators import Communicators
from cydist.backends.mpi.runtime import ExitGuard, MpiThreads, call_before_the_end, wait_until
from cydist.errors import MismatchError
from cydist.waiting import wait_for

if TYPE_CHECKING:
    from cydist.backends.host.connections import Connections

LOOK_SECONDS = 0.05  # between checks whether MPI has to carry anything by now


class MpiEndpoint(Endpoint):
    """This process's end of one communicator, shared by groups and closed by the last.

    Args:
        messages: The link over the communicator, or the part that carries its messages.
        reports: Sockets to query late ranks; None: late ranks are not queried.
        hosts: The name of each rank's host.
        by_mpi: For each rank whether its CYDIST_TRANSPORT leaves all to MPI.
        domains: For each rank the lowest one with which it may share memory.
    """

    def __init__(
        self, MPI: Any, comm: Any, link: _native.Link, messages: _native.MpiLink,
        hosts: Sequence[str], by_mpi: Sequence[bool], reports: Connections | None = None,
        domains: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(link, self._leave, reports, domains)
        self.MPI = MPI
        self._reports = reports
        self.host_of = hosts.__getitem__
        self.by_mpi = by_mpi
        self.comm = comm
        self.messages = messages
        self.threads = MpiThreads(MPI)
        self.peer_error = self._peer_error
        self._guard = ExitGuard(MPI, self.leave_at_exit)
        _open.append(self)

    def poll_hook(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait for an event that a background call sets, since the thread of that call may not call
        MPI."""
        messages = self.messages
        if not messages.thread_may_call():
            return wait_for(event, timeout)

        def done() -> bool:
            if messages.is_needed():  # one may begin at any time
                messages.progress()
                return event.is_set()
            return event.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))

        deadline = math.inf if timeout is None else time.monotonic() + timeout
        return wait_until(done, deadline)

    def _peer_error(self, peer: int) -> str:
        code = self.messages.error
        return f"MPI: {self.MPI.Get_error_string(code)}" if code else ""

    def _leave(self) -> None:
        """Leave the communicator after its last group has ended. MPI may reuse the communicator's
        number when it is freed, and the new one must not receive messages that are still under
        way."""
        self._guard.remove()
        _open.remove(self)
        if self._reports is not None:
            self._reports.close()
        self.link.close()
        _closing.append(self)
        end_left_links()

    def leave_at_exit(self) -> None:
        """At the end of the process, notify all members, and leave when they do.

        MPI's own finalization would wait for them without answering their queries. And without this
        notice they would wait for this rank until their deadlines. Raises MismatchError as `drain`.
        """
        self.end_together()
        with ExitStack() as leaving:  # all of them, even if one raises
            leaving.callback(self._wait_for_others)
            leaving.callback(self.link.close)
            for known in tuple(self.groups.values()):
                group: Any = known()
                if group is not None:
                    leaving.callback(group.drain)

    def drains_at_exit(self) -> bool:
        return False  # its guard calls it, while MPI still works

    def _wait_for_others(self) -> None:
        wait_until(self.messages.advance)  # without a deadline, as MPI's finalization
        self.messages.end()

    def mpi_is_finalized(self) -> bool:
        """Return whether MPI is finalized."""
        return bool(self.MPI.Is_finalized())

    def end(self) -> None:
        """Wait until all ranks have left and no request is in flight that may still complete."""
        if self.messages.end() and not self.mpi_is_finalized():
            self.comm.Free()


_open: list[MpiEndpoint] = []
_closing: list[MpiEndpoint] = []


def end_left_links() -> None:
    """End the communicators that every rank has left by now."""
    for each in tuple(_closing):
        if each.messages.advance():
            _closing.remove(each)
            each.end()


def _end_all(MPI: Any) -> None:
    """End all groups when MPI is finalized, while it still works."""
    for endpoint in tuple(_open):
        endpoint.end_together()
        for known in tuple(endpoint.groups.values()):
            if (group := known()) is not None:
                try:
                    group.destroy()
                except MismatchError as error:  # MPI would not show its callback's exception
                    print(f"cydist: {error}", file=sys.stderr, flush=True)
    _leave_all(os.getpid())
    if not Communicators.all_made():
        print(
            f"cydist: rank {MPI.COMM_WORLD.Get_rank()} of MPI aborts the job: a group's first call "
            "was given up while MPI made the group's communicator. MPI still does, and may crash "
            "when it ends meanwhile",
            file=sys.stderr,
        )
        ExitGuard.abort(MPI, 1)


def _leave_all(pid: int) -> None:
    if os.getpid() == pid and not ExitGuard.aborting:
        for each in _closing:
            if not each.MPI.Is_finalized():
                each.leave_at_exit()
        _closing.clear()


@cache
def leave_with(MPI: Any) -> None:
    """Make sure that all communicators are left when the process or MPI ends."""
    atexit.register(_leave_all, os.getpid())
    call_before_the_end(MPI, partial(_end_all, MPI))

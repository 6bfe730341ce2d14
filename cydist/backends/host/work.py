"""The handle of a send or a receive on a host group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cydist import _native
from cydist._native import MESSAGE_TAGS
from cydist.errors import DistError, DistTimeoutError, from_call_error
from cydist.executor import THREADS
from cydist.groups.process_group import DERIVED_TAG
from cydist.waiting import LONGEST_TIMEOUT
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Message
    from cydist.backends.host.group import HostGroup


# Tags of messages that are not the user's; abi.pxd explains each.
NOTES_TAG, FAILURE_TAG = MESSAGE_TAGS["NOTES"], MESSAGE_TAGS["FAILURE"]
UNSENT_TAG = MESSAGE_TAGS["UNSENT"]
PIECE_TAG = MESSAGE_TAGS["PIECE"]  # and up, to that of derived collectives


def wire_tag(tag: int) -> int:
    """Return a tag's value on the wire. The tag of derived collectives is above all user tags."""
    return MESSAGE_TAGS["DERIVED"] if tag == DERIVED_TAG else tag


def timed_out(group: HostGroup, name: str, peer: int, waited: float) -> DistError:
    """Return the error of a message that did not complete within `timeout` seconds."""
    return from_call_error(
        _native.CallError("timeout", peer),
        name,
        group.group_name,
        group.ranks,
        waited=waited,
        why=group.peer_error(peer),
        title=group.title,
    )


class P2PWork(Work):
    """A send or receive that was posted."""

    def __init__(self, group: HostGroup, name: str, peer: int, message: Message) -> None:
        super().__init__()
        self._group = group
        self._name = name
        self._peer = peer
        self._message = message
        self.due(group.timeout)

    def _wait(self, timeout: float | None) -> None:
        if self._error is None and not self._message.over:
            self._block(LONGEST_TIMEOUT if timeout is None else timeout)
        self._keep_outcome()
        if self._error is not None:
            raise self._error

    def _block(self, limit: float) -> None:
        self._group.check_process(self._name)
        deadline = time.monotonic() + limit
        self._group.waiting = (self._name, self._peer)
        try:
            over = self._message.wait(int(deadline * 1e9))
        finally:
            self._group.waiting = None
        if not over:
            raise timed_out(self._group, self._name, self._peer, limit)

    def _expire(self, late: DistTimeoutError) -> None:
        """End the message, and fail the group."""
        given = self._group.timeout if self._allowed is None else self._allowed
        self._message.cancel()
        self._error = self._group.late_message(self._name, self._peer, given)

    def _poll(self) -> bool:
        if not self._message.over:
            self._group.check_process(self._name)
            if not self._message.test():
                return False
        self._keep_outcome()
        return True

    def _keep_outcome(self) -> None:
        """Store the result of a completed message."""
        self._group.forget_message(self._message)
        if self._error is None:
            self._error = self._group.failed_message(self._name, self._message, self._due_at)
        source = self._message.source
        if self._name == "recv" and self._source is None and source >= 0:
            self._source = self._group.ranks[source]

    def _on_thread(self, task: Callable[[], None]) -> None:
        if self._poll() or self._group.poll_hook is not None:
            task()
        else:
            THREADS.run(task)

"""Messages over a torch group, with headers, because gloo's have none.

gloo silently accepts a message that is shorter than its receive, and ends the process when it is
longer. So a header is sent first, which carries a short message. Only a wait shows whether a gloo
message is complete, and nothing can interrupt it, so a thread waits.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cydist import _native
from cydist.errors import DistError, DistTimeoutError, MismatchError, UnsupportedError
from cydist.executor import TaskWork
from cydist.groups.process_group import DERIVED_TAG
from cydist.waiting import LONGEST_TIMEOUT, wait_for

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.torch.group import TorchGroup

HEADER = struct.Struct("<qq80s")  # the tag, the message's number, and its description
RECORD_BYTES = 512
ROOM = RECORD_BYTES - HEADER.size
TAGS = 2**30 - 1  # gloo has 2**31 tags, and a message takes two
GRACE = 5.0  # seconds that torch waits longer: cydist reports first, then torch cuts connections


def tensor_of(blocks: Array | Sequence[Array], dtype: Any = torch.uint8) -> Any:
    """Return the memory of an array, or of adjacent blocks, as a torch tensor."""
    parts = [blocks] if isinstance(blocks, _native.Array) else list(blocks)
    nbytes = sum(part.nbytes for part in parts)
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    start = min(part.address for part in parts if part.nbytes)
    memory = (ctypes.c_char * nbytes).from_address(start)
    memory.owners = parts  # type: ignore[attr-defined]  # they live as long as the tensor
    return torch.frombuffer(memory, dtype=dtype)


def torch_timeout(seconds: float) -> timedelta:
    """Return a timeout for torch, for which 0 means none."""
    return timedelta(seconds=max(0.001, seconds))


def describe_array(array: Array) -> str:
    """Return a message's description, equal on both ends."""
    return f"{array.size} {array.dtype_name} ({array.nbytes} bytes)"[:80]


def header_tag(tag: int) -> int:
    """Return torch's tag for the header of a message."""
    return 2 * (TAGS if tag == DERIVED_TAG else tag % TAGS)


def content_tag(number: int) -> int:
    """Return torch's tag for the data after the header, which threads receive in any order."""
    return 2 * (number % TAGS) + 1


class PostedMessage(Protocol):
    """A message that was passed to torch.

    Attributes:
        peer: Group rank; None: any rank.
        over: It was sent, or has arrived.
    """

    name: str
    peer: int | None
    over: bool

    def finish(self, deadline: float) -> None:
        """Wait until it is over, or time.monotonic() is `deadline`. Raises torch's exception, and
        MismatchError."""


class SentMessage:
    """A message to group rank `peer`.

    Args:
        number: Unique among this rank's messages in the group.
    """

    name = "send"

    def __init__(self, c10d: Any, array: Array, peer: int, tag: int, number: int) -> None:
        self.peer: int | None = peer
        self.over = False
        self._array = array
        record = bytearray(RECORD_BYTES)
        HEADER.pack_into(record, 0, tag, number, describe_array(array).encode())
        inside = array.nbytes <= ROOM
        if inside:
            record[HEADER.size : HEADER.size + array.nbytes] = memoryview(array)
        header = torch.frombuffer(record, dtype=torch.uint8)
        self._works = [c10d.send([header], peer, header_tag(tag))]
        if not inside:
            self._works.append(c10d.send([tensor_of(array)], peer, content_tag(number)))

    def finish(self, deadline: float) -> None:
        for work in self._works:
            work.wait(torch_timeout(deadline - time.monotonic()))
        self.over = True


class ExpectedMessage:
    """A message expected from group rank `peer`, or from any rank."""

    name = "recv"

    def __init__(self, c10d: Any, array: Array, peer: int | None, tag: int) -> None:
        self.peer = peer
        self.over = False
        self._c10d = c10d
        self._array = array
        self._tag = tag
        self._record = bytearray(RECORD_BYTES)
        record = [torch.frombuffer(self._record, dtype=torch.uint8)]
        if peer is None:
            self._work = c10d.recv_anysource(record, header_tag(tag))
        else:
            self._work = c10d.recv(record, peer, header_tag(tag))

    def finish(self, deadline: float) -> None:
        self._work.wait(torch_timeout(deadline - time.monotonic()))
        if self.peer is None:
            self.peer = int(self._work._source_rank())
        tag, number, text = HEADER.unpack_from(self._record)
        ours, theirs = describe_array(self._array), text.rstrip(b"\0").decode("utf-8", "replace")
        if tag != self._tag:
            raise UnsupportedError(
                f"tag {self._tag}: a message with tag {tag} came in its place; backend 'torch' "
                f"cannot tell tags apart that differ by a multiple of {TAGS}"
            )
        if ours != theirs:
            raise MismatchError(
                f"the ranks are in different calls. This rank: a message of {ours}. The sender: "
                f"a message of {theirs}"
            )
        array = self._array
        if array.nbytes <= ROOM:
            memoryview(array)[:] = self._record[HEADER.size : HEADER.size + array.nbytes]
        else:
            payload = self._c10d.recv([tensor_of(array)], self.peer, content_tag(number))
            payload.wait(torch_timeout(deadline - time.monotonic()))
        self.over = True


class TorchMessage(TaskWork):
    """The handle of a send or a receive."""

    def __init__(self, group: TorchGroup, posted: PostedMessage) -> None:
        self.sends = posted.name == "send"
        super().__init__(posted.name, self._finish, None)
        self._group = group
        self._posted = posted
        self.due(group.timeout)

    def _finish(self) -> int | None:
        """Complete the message, on a thread of its own; return a receive's source."""
        group, posted = self._group, self._posted
        try:
            with group.failures(posted.name, None, math.inf, posted):
                # The thread that waits for this one keeps the deadline, and then cuts the
                # connections.
                posted.finish(time.monotonic() + LONGEST_TIMEOUT)
        except BaseException as error:
            group.fail(error, posted.name)
            raise
        if posted.name == "send" or posted.peer is None:
            return None
        return group.ranks[posted.peer]

    def _wait(self, timeout: float | None) -> None:
        if not self._poll() and not wait_for(self._done, timeout):
            raise self._late(timeout or 0.0)
        if self._error is not None:
            raise self._error

    def _late(self, waited: float) -> DistError:
        posted = self._posted
        return self._group.timeout_error(posted.name, None, waited, posted.peer)

    def _expire(self, late: DistTimeoutError) -> None:
        """End the message, and fail the group."""
        error = self._late(self._group.timeout if self._allowed is None else self._allowed)
        self.end(error)
        self._group.fail(error, self._posted.name)

"""Compare the ranks' calls while they run.

NCCL does not compare calls: ranks that disagree hang, or get wrong numbers. So each rank notes its
calls. The watchdog sends the notes to the next rank, and compares those of the previous rank with
its own. If any two ranks differ, two neighbours do.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from cydist import _native
from cydist.backends.host.work import NOTES_TAG
from cydist.errors import DistError
from cydist.groups.consistency import describe

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

Note = str | tuple[Any, ...]  # a text; or the arguments of `describe`, until it is read
LENGTH = struct.Struct("<q")
LEAVING = -1  # in place of a length: that rank destroys its group normally


class NoteChannel(Protocol):
    """The connection to the next rank, and from the previous one. Its methods do not block."""

    def send(self, data: bytes) -> bool:
        """Send notes; return False if the last ones are still being sent."""

    def receive(self) -> bytes | None:
        """Return notes of the previous rank, or None. Raises DistError if it is lost; b"" is its
        last message before it leaves."""

    def send_goodbye(self, seconds: float) -> None:
        """Notify the next rank that this one leaves; may block for `seconds`."""


class HostNoteChannel:
    """Neighbours over a group of CPU memory with the same ranks. The tag is used for nothing
    else."""

    def __init__(self, host: ProcessGroup) -> None:
        self._host = host
        self._next = (host.rank() + 1) % host.size()
        self._before = (host.rank() - 1) % host.size()
        self._sent: list[Work] = []
        self._length = _native.empty(LENGTH.size)
        self._data: _native.Array | None = None
        self._coming: Work | None = None

    def send(self, data: bytes) -> bool:
        if not all(work.is_completed() for work in self._sent):
            return False
        self._sent = [self._isend(LENGTH.pack(len(data))), self._isend(data)]
        return True

    def send_goodbye(self, seconds: float) -> None:
        """Notify the next rank that this one leaves."""
        self._sent.append(self._isend(LENGTH.pack(LEAVING)))
        for work in self._sent:
            work.wait(seconds)

    def _isend(self, data: bytes) -> Work:
        array = _native.empty(len(data))
        memoryview(array)[:] = data
        return _without_deadline(self._host.isend(array, self._next, NOTES_TAG))

    def receive(self) -> bytes | None:
        if self._coming is None:
            self._coming = _without_deadline(
                self._host.irecv(self._length, self._before, NOTES_TAG)
            )
        if not self._coming.is_completed():
            return None
        error = self._coming.exception()
        if error is not None:
            raise error
        self._coming = None
        if self._data is not None:
            found, self._data = bytes(memoryview(self._data)), None
            return found
        (nbytes,) = LENGTH.unpack(memoryview(self._length))
        if nbytes == LEAVING:
            return b""
        self._data = _native.empty(nbytes)
        self._coming = _without_deadline(self._host.irecv(self._data, self._before, NOTES_TAG))
        return self.receive()


def _without_deadline(work: Work) -> Work:
    """Remove the deadline of notes: a rank may be idle for longer than a call may take, and hanging
    calls have their own deadlines."""
    work.due(None)
    return work


class CallsDiffer(Exception):
    """The previous rank made a different call: the call's number in the group, this rank's call and
    theirs."""

    def __init__(self, seq: int, ours: str, theirs: str) -> None:
        super().__init__(seq, ours, theirs)
        self.seq = seq
        self.ours = ours
        self.theirs = theirs


@lru_cache(1024)
def _text(note: Note) -> str:
    return note if isinstance(note, str) else describe(*note)


class CallCheck:
    """Compares this rank's notes with those of the previous rank. A note is a line: a number and a
    text."""

    def __init__(self, neighbours: NoteChannel) -> None:
        self._channel = neighbours
        self._noted: deque[tuple[int, Note]] = deque()  # appended by threads that make calls
        self._unsent: list[str] = []
        self._ours: list[str] = []
        self._theirs: list[str] = []
        self.before_left = False
        self.lost: DistError | None = None
        self.before_reached = 0  # the last known call of the previous rank

    def note(self, seq: int, note: Note) -> None:
        """Note a call of this rank. Cheap, and allowed on any thread."""
        self._noted.append((seq, note))

    def send_goodbye(self, seconds: float) -> None:
        """Send the last message to the next rank, after all notes. Best effort."""
        if self.lost is not None:
            return
        end = time.monotonic() + seconds
        try:
            while (self._noted or self._unsent) and time.monotonic() < end:
                self._send()
                time.sleep(0.001)
            self._channel.send_goodbye(max(0.0, end - time.monotonic()))
        except DistError as error:
            self.lost = error

    @property
    def pending(self) -> bool:
        """Return whether there is anything to send, or to wait for."""
        left = self._noted or self._unsent or self._ours
        return bool(left) and not (self.before_left or self.lost)

    def poll(self) -> None:
        """Send and receive without blocking. Raises CallsDiffer."""
        try:
            self._send()
            self._receive()
        except DistError as error:
            self.lost = error
        count = min(len(self._ours), len(self._theirs))
        if self._ours[:count] == self._theirs[:count]:  # the usual case, compared at once
            del self._ours[:count], self._theirs[:count]
        else:
            self._compare()

    def _compare(self) -> None:
        """Compare notes by number, since captured calls have none. Raises CallsDiffer."""
        theirs = {line.partition(" ")[0]: line for line in self._theirs}
        for line in self._ours:
            number = line.partition(" ")[0]
            other = theirs.get(number, line)
            if line != other:
                raise CallsDiffer(int(number), *(each.partition(" ")[2] for each in (line, other)))
        same = set(self._ours) & set(self._theirs)
        self._ours = [line for line in self._ours if line not in same]
        self._theirs = [line for line in self._theirs if line not in same]

    def _send(self) -> None:
        lines = [f"{seq} {_text(note)}" for seq, note in self._take_notes()]
        self._ours += lines
        self._unsent += lines
        if not self._unsent or self.lost is not None:
            return
        if self._channel.send("\n".join(self._unsent).encode()):
            self._unsent = []

    def _take_notes(self) -> list[tuple[int, Note]]:
        """Return and clear the notes made until now."""
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def _receive(self) -> None:
        while not self.before_left and self.lost is None:
            found = self._channel.receive()
            if found is None:
                return
            if not found:
                self.before_left = True
            lines = found.decode(errors="replace").splitlines()
            self._theirs += lines
            if lines:
                self.before_reached = int(lines[-1].partition(" ")[0])

"""Pass a worker's output to the console: whole lines, prefixed with the rank.

Bytes are never decoded. Lines of different ranks never mix. A line with carriage returns, such as a
progress bar's, is reduced to its last state; on a terminal the bar is live.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from collections.abc import Callable
from functools import partial

from cydist.launch.console import Console, consoles

# Longer lines are cut, so that output without line ends cannot fill the memory.
LONGEST_LINE_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
TRACEBACK = b"Traceback (most recent call last)"
# A process that printed a traceback this long ago goes on: the traceback was only logged.
RECENT_SECONDS = 5.0
# So does a process that still writes to stderr this long after it began a traceback.
WRITES_ON_SECONDS = 1.0


class LogFile:
    """A file of mode 0600, to which only the launcher and its worker append."""

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)

    def write(self, data: bytes) -> None:
        """Append `data`; a full disk loses the log, not the job."""
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self.fd, data) :]

    def end(self) -> bytes:
        """Return the last bytes of the file."""
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, TAIL_BYTES, max(0, size - TAIL_BYTES))

    def close(self) -> None:
        os.close(self.fd)


class Tail:
    """The end of a stream, and the time when a traceback last began in it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.traceback_at: float | None = None

    def add(self, data: bytes, now: float) -> None:
        if TRACEBACK in bytes(self._data[-len(TRACEBACK) :]) + data:
            self.traceback_at = now
        self._data += data
        if len(self._data) > 2 * TAIL_BYTES:
            del self._data[:-TAIL_BYTES]

    def bytes(self) -> bytes:
        return bytes(self._data[-TAIL_BYTES:])


class Lines:
    """Cuts one worker's stream into lines and hands them to a console.

    Args:
        holds: Whether a traceback waits until its process has ended, or seems to go on. If the
            process ends by it, the launcher shows it, or says what it was.

    Attributes:
        shown: Whether the last traceback was passed on because its process seemed to go on.
    """

    def __init__(self, prefix: bytes, console: Console, *, holds: bool = False) -> None:
        self._prefix = prefix
        self._console = console
        self._rest = b""
        self._holds = holds
        self._held = b""  # lines from the beginning of a traceback
        self._held_since = 0.0
        self._ended = False  # the process, so what is held waits for the launcher's decision
        self.shown = False

    def add(self, data: bytes) -> None:
        """Pass on the lines that `data` completes."""
        data = self._rest + data
        whole, newline, self._rest = data.rpartition(b"\n")
        if newline:
            self._write(whole)
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._end_line()
        self._console.draft(self, self._prefix, b"" if self._held else self._rest)

    def end(self) -> None:
        """Pass on a last line that has no line end. What is held stays so."""
        self._end_line()
        self._console.draft(self, self._prefix, b"")

    def _end_line(self) -> None:
        if self._rest:
            self._write(self._rest)
            self._rest = b""

    def _write(self, whole: bytes) -> None:
        """Pass on whole lines, or hold them."""
        if self._held_for(WRITES_ON_SECONDS) <= time.monotonic():
            self._pass_on_as_logged()
        if self._held:
            self._held += b"\n" + whole
            if len(self._held) > TAIL_BYTES:
                self._pass_on_as_logged()
            return
        start = _traceback_at(whole) if self._holds else -1
        if start >= 0:
            self._held, self._held_since, self.shown = whole[start:], time.monotonic(), False
        if start:
            self._console.write(self._prefixed(whole if start < 0 else whole[: start - 1]))

    @property
    def held(self) -> list[bytes]:
        """Return the lines that are held."""
        return self._held.split(b"\n") if self._held else []

    def release_if_due(self) -> float:
        """Pass on what was held for its longest time; return the monotonic time at which more is
        due, inf if none is."""
        if self._held_for(RECENT_SECONDS) <= time.monotonic():
            self._pass_on_as_logged()
        return self._held_for(RECENT_SECONDS)

    def _held_for(self, seconds: float) -> float:
        """Return when something will have been held for this long. inf: nothing is held, or it
        waits for `release` or `drop`."""
        return self._held_since + seconds if self._held and not self._ended else math.inf

    def _pass_on_as_logged(self) -> None:
        self.release()
        self.shown = True

    def release(self) -> None:
        """Pass on what is held."""
        held = self._held
        self.drop()
        if held:
            self._console.write(self._prefixed(held))
            self._console.draft(self, self._prefix, self._rest)

    def drop(self) -> None:
        """Forget what is held, because the launcher has shown it."""
        self._held = b""

    def process_ended(self) -> None:
        """Hold what is held, and a traceback that is still read, until `release` or `drop`."""
        self._ended = True

    def stop_holding(self) -> None:
        """Pass on what is held, and from now on everything at once."""
        self._holds = False
        self.release()

    def _prefixed(self, whole: bytes) -> bytes:
        if b"\r" in whole:
            whole = b"\n".join(map(last_state, whole.split(b"\n")))
        return self._prefix + whole.replace(b"\n", b"\n" + self._prefix) + b"\n"


def _traceback_at(whole: bytes) -> int:
    """Return where in these lines a traceback begins; -1: there is none."""
    if whole.startswith(TRACEBACK):
        return 0
    return whole.find(b"\n" + TRACEBACK) + 1 or -1


def last_state(line: bytes) -> bytes:
    """Return the last state of a line that is rewritten after each \r."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class OutputStream:
    """One pipe of one worker, with the destinations of its bytes."""

    def __init__(
        self,
        fd: int,
        sinks: list[Callable[[bytes], None]],
        lines: Lines | None,
        console: Console,
        *,
        logged: bool,
    ) -> None:
        self.fd = fd
        self.console = console
        self._logged = logged
        self._sinks = sinks
        self._lines = lines

    @property
    def held(self) -> bool:
        """Return whether the worker must wait because the console cannot take more."""
        return self._lines is not None and self.console.full

    @property
    def unwanted(self) -> bool:
        """Return whether this output has no reader left. Closing the pipe notifies the worker."""
        return self.console.closed and self._lines is not None and not self._logged

    def read(self) -> bool | None:
        """Pass on the available bytes; return False if there are none now, None at the stream's
        end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return None
        if not data:
            return None
        for sink in self._sinks:
            sink(data)
        if self._lines is not None:
            self._lines.add(data)
        return True

    def release_if_due(self) -> float:
        """Pass on lines that were held long enough; return when others are due."""
        return math.inf if self._lines is None else self._lines.release_if_due()

    def close(self) -> None:
        """Pass on the last, unfinished line."""
        if self._lines is not None:
            self._lines.end()
        os.close(self.fd)


class OutputStreams:
    """All pipes of one launcher, whose output goes to its consoles.

    Args:
        selector: Of the launcher's loop: the data of a key is the function to call.

    A pipe is read only while its console takes more.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.consoles = consoles()
        self._selector = selector
        self._streams: dict[int, OutputStream] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._streams

    def add(self, stream: OutputStream) -> None:
        """Start reading from a pipe, which is closed at its end."""
        self._streams[stream.fd] = stream
        self._read_when_ready(stream.fd)

    def read(self, fd: int) -> bool:
        """Pass on a pipe's output; return False if there is none at the moment."""
        if (stream := self._streams.get(fd)) is None:
            return False
        state = stream.read()
        if state is None or stream.unwanted:
            self.close(fd)
            return False
        return state

    def read_all(self, fd: int) -> None:
        """Pass on the pipe's present contents, and no more than a pipe holds."""
        for _ in range(64):
            if not self.read(fd):
                return

    def close(self, fd: int) -> None:
        """Pass on the last, unfinished line, and close the pipe."""
        if (stream := self._streams.pop(fd, None)) is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            stream.close()

    def finish(self) -> None:
        """Pass on what all pipes contain, and close them."""
        for fd in list(self._streams):
            self.read_all(fd)
            self.close(fd)

    def hold_back(self) -> float | None:
        """Read only from pipes whose console takes more; return until when the others must wait."""
        registered = self._selector.get_map()
        waits = []
        for fd, stream in self._streams.items():
            if stream.held and fd in registered:
                self._selector.unregister(fd)
            elif not stream.held and fd not in registered:
                self._read_when_ready(fd)
            if stream.held:
                waits.append(stream.console.stalls_at)
            if (due := stream.release_if_due()) < math.inf:
                waits.append(due)
        for console in set(self.consoles.values()):
            waiting = console.fileno() in registered
            if console.pending and not waiting:
                self._selector.register(console.fileno(), selectors.EVENT_WRITE, console.flush)
            elif waiting and not console.pending:
                self._selector.unregister(console.fileno())
        return min(waits, default=None)

    def print(self, text: str) -> None:
        """Print the launcher's own text to stderr, in whole lines."""
        self.consoles[2].write(text.encode(errors="replace"), must=True)

    def drain(self, interrupt: int, patience: float | None) -> None:
        """Write what the consoles have queued; see Console.drain."""
        for console in set(self.consoles.values()):
            console.drain(interrupt, patience)

    def _read_when_ready(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ, partial(self.read, fd))

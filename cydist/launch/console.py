"""The launcher's own stdout and stderr, written without waiting for their reader.

Output that cannot be written at once is queued. A slow reader gets everything: when the queue is
full, the launcher stops reading from the workers, which then wait. A stalled reader (a terminal
after Ctrl-S, a pager) must not stop the job: after `STALL_SECONDS` the queue drops further lines,
the workers go on, and a message later reports the number of dropped lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time

from cydist import config
from cydist.errors import counted
from cydist.waiting import countdown, one_wait

QUEUE_BYTES = 8 << 20
STALL_SECONDS = 5.0
_CHUNK_BYTES = 1 << 16
_CLEAR_LINE = b"\r\x1b[K"
_COLOURS = (36, 33, 35, 32, 34, 31)


class Console:
    """One of the launcher's output streams, or both if they are the same terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = _unblocked(fd)
        # Without an open file of its own, it polls before each write and writes only what surely
        # fits.
        self._ask = self._fd == fd and not _is_regular(fd)
        self._queue = bytearray()
        self._moved = time.monotonic()
        self._dropped = 0
        self._draft: tuple[object, bytes] | None = None
        self.closed = False
        self.terminal = os.isatty(fd) and config.TERM.get() != "dumb"
        self.colour = self.terminal and not config.NO_COLOR.get()

    @property
    def full(self) -> bool:
        """Return whether writers should wait."""
        return len(self._queue) > QUEUE_BYTES and not self._stalled

    @property
    def pending(self) -> bool:
        """Return whether queued output may still be written."""
        return bool(self._queue)

    @property
    def stalls_at(self) -> float:
        """Return the monotonic time from which the reader counts as stalled."""
        return self._moved + STALL_SECONDS

    @property
    def _stalled(self) -> bool:
        return time.monotonic() >= self.stalls_at

    def prefix(self, rank: int) -> bytes:
        """Return the prefix of each line of `rank`."""
        text = b"[%d]" % rank
        if self.colour:
            text = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], text)
        return text + b" "

    def write(self, lines: bytes, *, must: bool = False) -> None:
        """Write whole lines, or queue them. Drop them if the reader has stalled, unless `must` is
        set."""
        if self.closed:
            return
        if len(self._queue) > QUEUE_BYTES and self._stalled and not must:
            self._dropped += lines.count(b"\n")
            return
        if not self._queue:
            self._moved = time.monotonic()
        if self._draft is not None:
            lines = _CLEAR_LINE + lines + self._draft[1]
        self._queue += lines
        self.flush()

    def draft(self, writer: object, prefix: bytes, rest: bytes) -> None:
        """On a terminal, show `rest`, an unfinished line of `writer` (a prompt, a progress bar)."""
        if not self.terminal or self.closed or self.full:
            return
        if rest:
            state = next((part for part in reversed(rest.split(b"\r")) if part), b"")
            text = state[-4096:].decode(errors="replace")[: self._columns() - len(prefix) - 1]
            self._draft = (writer, prefix + text.encode(errors="replace"))
            self._queue += _CLEAR_LINE + self._draft[1]
        elif self._draft is not None and self._draft[0] is writer:
            self._draft = None
            self._queue += _CLEAR_LINE
        self.flush()

    def flush(self) -> bool:
        """Write as much as the reader takes now; return True when nothing is left."""
        while self._queue and not self.closed:
            try:
                done = self._write()
            except BlockingIOError:
                return False
            except OSError:
                # The reader is gone, so drop the queue.
                self.closed = True
                break
            if not done:
                return False
            self._moved = time.monotonic()
            del self._queue[:done]
            if self._dropped and len(self._queue) < QUEUE_BYTES:
                lines = counted(self._dropped, "line")
                text = f"cydistrun: dropped {lines} here, which had no reader\n"
                self._queue += text.encode()
                self._dropped = 0
        if self.closed:
            self._queue.clear()
        return True

    def _write(self) -> int:
        if not self._ask:
            with memoryview(self._queue) as view:
                return os.write(self._fd, view[:_CHUNK_BYTES])
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        if not poller.poll(0):
            return 0
        with memoryview(self._queue) as view:
            return os.write(self._fd, view[: select.PIPE_BUF])

    def fileno(self) -> int:
        return self._fd

    def drain(self, interrupt: int, patience: float | None) -> None:
        """Write the queue until it is empty, or the descriptor `interrupt` is readable.

        Args:
            patience: Seconds to wait for a stalled reader; None: no limit.
        """
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        poller.register(interrupt, select.POLLIN)
        while not self.flush():
            left = countdown(patience)
            ready: list[tuple[int, int]] = []
            while not ready:
                limit = left()
                ready = poller.poll(None if limit is None else one_wait(limit) * 1000)
                if not ready and not left():
                    return
            if interrupt in (fd for fd, _ in ready):
                return

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._fd).columns or 80
        except OSError:
            return 80


def consoles() -> dict[int, Console]:
    """Return {1: stdout, 2: stderr}; the same object twice if both are one terminal."""
    out = Console(1)
    if out.terminal and os.isatty(2) and os.fstat(1).st_rdev == os.fstat(2).st_rdev:
        return {1: out, 2: out}
    return {1: out, 2: Console(2)}


def _is_regular(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.fstat(fd).st_mode)
    return False


def _unblocked(fd: int) -> int:
    """Return a non-blocking descriptor of the file behind `fd`, or `fd` itself.

    The flag belongs to the open file, which the launcher shares with the shell, so it cannot be set
    on `fd` itself. Pipes and terminals are therefore opened again.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{fd}", flags)
    return fd

"""Find this process's descendants on Linux, and end them all.

The launcher's processes are subreapers: a process whose parent dies becomes their child, even if
it moved to another session or group. So it is found here and cannot be left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# Of /proc/PID/stat, after the name: where the memory of the arguments begins and ends.
_ARGUMENTS = slice(45, 47)


@cache  # made before the first fork, because each child would copy its memory
def _prctl() -> Callable[..., Any]:
    import ctypes  # slow, and needed only by processes that start others

    return ctypes.CDLL(None).prctl


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of `parent` that started it ends.

    Call it first in a child. If the parent is already dead, the child ends here.
    """
    _prctl()(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def rename(name: str, command_line: str) -> None:
    """Give this process another name and command line, as `ps` and `pkill` see them.

    The name has at most 15 bytes. The command line is cut to the length of the present one.
    """
    import ctypes

    _prctl()(_PR_SET_NAME, name.encode(), 0, 0, 0)
    # The kernel shows the memory that held the arguments at the start. The interpreter has copies.
    start, end = (int(field) for field in _stat_fields("self")[_ARGUMENTS])
    if 0 < start < end:  # 0: a kernel that hides it
        room = end - start
        ctypes.memmove(start, command_line.encode()[: room - 1].ljust(room, b"\0"), room)


class Process(NamedTuple):
    """One process, as in /proc. `started` (clock ticks) distinguishes it from a later process with
    its pid."""

    pid: int
    parent: int
    group: int
    state: str
    started: int

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    def send(self, number: int) -> None:
        """Signal this process. If it is gone, a later process with its pid is left alone."""
        with contextlib.suppress(OSError):
            handle = pidfd(self.pid)
            try:
                now = _read(self.pid)
                if now is None or now.started != self.started:
                    return
                if handle is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(handle, number)
            finally:
                if handle is not None:
                    os.close(handle)


def pidfd(pid: int) -> int | None:
    """Return a descriptor of a process; None if the system has none, as under gVisor, or if a
    container forbids them. Raises OSError for other errors, such as an unknown process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return None


def _stat_fields(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    # The name is in parentheses and may itself contain parentheses and spaces.
    return text[text.rindex(b")") + 2 :].split()


def _read(pid: int) -> Process | None:
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), fields[0].decode(), int(fields[19]))


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None: it is not known."""
    process = _read(pid)
    return None if process is None or process.parent <= 0 else process.parent


def started_at(pid: int) -> int | None:
    """Return when a process began, in clock ticks; None: there is none with this pid."""
    process = _read(pid)
    return None if process is None or process.zombie else process.started


def descendants(besides: Collection[int] = ()) -> list[Process]:
    """Return every living or unreaped process below this one, parents first.

    Leaves out the pids in `besides` and their descendants.
    """
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := _read(int(name))) is not None:
            children.setdefault(process.parent, []).append(process)
    found = []
    queue = [os.getpid()]
    while queue:
        below = [each for each in children.pop(queue.pop(), []) if each.pid not in besides]
        found += below
        queue += [process.pid for process in below]
    return found


def own_children() -> set[int]:
    """Return the pids of this process's children; cheaper than `descendants`."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return {process.pid for process in descendants()}


def signal_descendants(number: int, *, besides: Collection[int] = ()) -> bool:
    """Signal all descendants except those in and below `besides`; return whether any was alive."""
    living = [process for process in descendants(besides) if not process.zombie]
    for process in living:
        process.send(number)
    return bool(living)


def kill_descendants(seconds: float, *, besides: Collection[int] = ()) -> list[int]:
    """Kill and reap everything below this process; return the pids that are still there at the end.

    Returns after `seconds` at the latest, since a process in an uninterruptible wait cannot be
    killed. Every child is reaped, so call it when no exit status is needed any more. Processes in
    and below `besides` are left alone.
    """
    deadline = time.monotonic() + seconds
    while True:
        signal_descendants(signal.SIGKILL, besides=besides)
        left = [process for process in descendants(besides) if not _reaped(process)]
        remaining = deadline - time.monotonic()
        if not left:
            return []
        if remaining <= 0:
            return [process.pid for process in left]
        _wait_for_exit([process for process in left if not process.zombie], min(remaining, 0.05))


def _reaped(process: Process) -> bool:
    """Reap `process` if it is an ended child of this process."""
    if process.parent != os.getpid():
        return False
    try:
        return os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    except ChildProcessError:
        return True


def _wait_for_exit(processes: Collection[Process], seconds: float) -> None:
    """Wait until one of `processes` exits, or `seconds` have passed."""
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        for process in processes:
            with contextlib.suppress(OSError):
                if (handle := pidfd(process.pid)) is not None:
                    stack.callback(os.close, handle)
                    poller.register(handle, select.POLLIN)
        poller.poll(seconds * 1000)


def pretty_signal(number: int) -> str:
    """Return a signal's name, or its number in words."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def pretty_exit(code: int) -> str:
    """Return an exit status as subprocess gives it (negative: a signal), in words."""
    return f"exit code {code}" if code >= 0 else f"killed by {pretty_signal(-code)} ({-code})"


def exit_code(code: int) -> int:
    """Return the exit code that a shell would report for this exit status."""
    return code if code >= 0 else 128 - code

"""Three processes, any one of which ends the job when the other two are killed.

    outer process -> guard -> inner process -> workers

Each is the parent of the next. The outer process forwards signals, as bytes, through the lifeline:
a pipe whose end of file tells the inner process that the outer one is dead. The guard only waits
for the inner process, and ends what that one left behind. It has another name and command line than
the other two, so that who kills those by name or pattern misses it. Guard and inner process have
sessions of their own. So signals that a terminal or a shell sends to the whole job, SIGKILL
included, reach the outer process only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import NoReturn

from cydist.launch.failures import remove_files
from cydist.launch.processes import (
    become_subreaper,
    exit_code,
    kill_descendants,
    own_children,
    pidfd,
    pretty_exit,
    rename,
)

# How long the end may take if processes cannot be killed (uninterruptible waits).
FINAL_WAIT_SECONDS = 5.0
LOOK_MS = 50  # between checks of a process without a descriptor


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: a handler for signals whose number arrives through a descriptor. exec resets
    it."""


def run_supervised(
    inner: Callable[[int, str], int], signals: Sequence[int], orders: int | None = None
) -> int:
    """Run `inner(lifeline, files)` in a child of the guard, and return its result, the exit code.

    Args:
        orders: Descriptor from which bytes are forwarded like signals; its end of file is a
            SIGTERM.

    Call it while this process has one thread. Each of `signals` is forwarded as one byte in
    `lifeline`. Signals that are ignored now (nohup, shells' background jobs) stay ignored here and
    in all children. SIGTSTP (Ctrl-Z) is forwarded too, and SIGCONT after it. `files` is a new
    directory, which is removed at the end, or "" if there is no place to write.
    """
    forwarded = {
        number
        for number in (*signals, signal.SIGTSTP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    files = ""
    with contextlib.suppress(OSError):  # a container whose root is read-only
        files = tempfile.mkdtemp(prefix="cydistrun-")
    # A shell that replaced itself by this program (exec) may have left children here.
    outsiders = own_children()
    become_subreaper()
    lifeline, forward = os.pipe()
    wake_read, wake_write = os.pipe()
    for fd in (forward, wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in forwarded:
        signal.signal(number, ignore_signal)
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals are blocked: one between fork and the child's set_wakeup_fd would count twice.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in (forward, wake_read, wake_write):
            os.close(fd)
        _run_in_child(lambda: _guard(inner, lifeline, files))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(lifeline)
    status = _forward_until_exit(child, wake_read, forward, forwarded, orders)
    return _clear("guard", status, files, besides=outsiders)


def _run_in_child(run: Callable[[], int]) -> NoReturn:
    """In a new process: call `run` in a session of its own, and exit with its result."""
    code = 1
    try:
        os.setsid()
        become_subreaper()
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        kill_descendants(FINAL_WAIT_SECONDS)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _guard(inner: Callable[[int, str], int], lifeline: int, files: str) -> int:
    """Run the inner process to its end, and return its exit code."""
    child = os.fork()
    if child == 0:
        _run_in_child(lambda: inner(lifeline, files))
    os.close(lifeline)
    rename("job-guard", f"guard of process {os.getppid()}")
    _, status = os.waitpid(child, 0)
    return _clear("inner process", os.waitstatus_to_exitcode(status), files)


def _clear(who: str, status: int, files: str, *, besides: Collection[int] = ()) -> int:
    """End what is left of the job after the exit of this process's child; return the exit code.

    Args:
        status: Of the child, as subprocess gives it.
        besides: Children of this process that are none of the job's.
    """
    # A child that was not killed has done this itself.
    left = kill_descendants(FINAL_WAIT_SECONDS, besides=besides) if status < 0 else []
    remove_files(files)
    if status < 0:
        _print(f"cydistrun: the launcher's {who} was {pretty_exit(status)}; the job is over")
    if left:
        _print(f"cydistrun: these processes cannot be killed: {', '.join(map(str, left))}")
    return exit_code(status)


def _forward_until_exit(
    child: int, wake: int, forward: int, forwarded: set[int], orders: int | None
) -> int:
    """Forward signals until `child` exits; return its exit status as subprocess gives it."""
    handle = pidfd(child)
    poller = select.poll()
    if handle is not None:
        poller.register(handle, select.POLLIN)
    poller.register(wake, select.POLLIN)
    if orders is not None:
        poller.register(orders, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll(LOOK_MS if handle is None else None)}
        if wake in ready:
            numbers = bytes(number for number in os.read(wake, 4096) if number in forwarded)
            with contextlib.suppress(OSError):
                os.write(forward, numbers)
                if signal.SIGTSTP in numbers:
                    os.kill(os.getpid(), signal.SIGSTOP)
                    os.write(forward, bytes([signal.SIGCONT]))
        if orders is not None and orders in ready:
            numbers = os.read(orders, 4096)
            if not numbers:
                poller.unregister(orders)
            with contextlib.suppress(OSError):
                os.write(forward, numbers or bytes([signal.SIGTERM]))
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if handle is not None:
                os.close(handle)
            return os.waitstatus_to_exitcode(status)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)

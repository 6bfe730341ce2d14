"""Two processes that guard each other, so that no death of either leaves workers behind.

The outer process forwards signals, as bytes, through the lifeline: a pipe whose end of file tells
the inner process that the outer one is dead. The inner process has a session of its own. So signals
that a terminal or a shell sends to the whole job, SIGKILL included, reach the outer process only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from cydist.launch.processes import (
    become_subreaper,
    exit_code,
    kill_descendants,
    own_children,
    pidfd,
    pretty_exit,
)

# How long the end may take if processes cannot be killed (uninterruptible waits).
FINAL_WAIT_SECONDS = 5.0
LOOK_MS = 50  # between checks of a process without a descriptor


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: a handler for signals whose number arrives through a descriptor. exec resets
    it."""


def run_supervised(
    inner: Callable[[int], int], signals: Sequence[int], orders: int | None = None
) -> int:
    """Run `inner(lifeline)` in a child, wait for it, and return its result, the exit code.

    orders      descriptor from which bytes are forwarded like signals; its end of file is a SIGTERM

    Call it while this process has one thread. Each of `signals` is forwarded as one byte in
    `lifeline`. Signals that are ignored now (nohup, shells' background jobs) stay ignored here and
    in all children. SIGTSTP (Ctrl-Z) is forwarded too, and SIGCONT after it.
    """
    forwarded = {
        number
        for number in (*signals, signal.SIGTSTP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
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
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for fd in (forward, wake_read, wake_write):
                os.close(fd)
            os.setsid()
            become_subreaper()
            code = inner(lifeline)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            kill_descendants(FINAL_WAIT_SECONDS)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(lifeline)
    code = _forward_until_exit(child, wake_read, forward, forwarded, orders)
    if code < 0:
        _print(f"cydistrun: the launcher's inner process was {pretty_exit(code)}; the job is over")
        left = kill_descendants(FINAL_WAIT_SECONDS, besides=outsiders)
    if code < 0 and left:
        _print(f"cydistrun: these processes cannot be killed: {', '.join(map(str, left))}")
    return exit_code(code)


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

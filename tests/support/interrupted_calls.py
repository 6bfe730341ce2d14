"""Exceptions that signal handlers raise, at any point of a call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

DEADLINE = 30.0  # seconds for what takes none
MOST_POINTS = 10_000  # far more than any call here has


class CtrlC(BaseException):
    """What a signal handler raises; not KeyboardInterrupt, by which pytest would end."""


def interrupted_at(point: int, call: Callable[[], Any], kind: type[BaseException] = CtrlC) -> bool:
    """Run `call`; raise such an exception in it at its n-th point: False if it has fewer.

    The points are those at which Python runs signal handlers: when a function begins, and
    when a compiled one has returned. Not those in callbacks of the garbage collector, where
    Python swallows what is raised.
    """
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and argument is not sys.setprofile:
            count += 1
            if count == point:
                raise kind

    gc.disable()
    sys.setprofile(watch)
    try:
        call()
    except kind:
        return True
    except (KeyError, RuntimeError) as error:
        # CPython's Thread.start raises one in place of what is raised once its thread has ended,
        # the other while it has let go of the lock with which it waits for its thread to begin.
        if not isinstance(error.__context__, kind):
            raise
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False

"""A breakpoint on one rank, and the level of the checks that a program asks for."""

from __future__ import annotations

import multiprocessing
import os
import sys
from enum import IntEnum
from typing import IO, TYPE_CHECKING

from cydist import config
from cydist.api.collectives import barrier
from cydist.api.dispatch import Timeout
from cydist.api.process_groups import current_world
from cydist.errors import UnsupportedError
from cydist.waiting import seconds

if TYPE_CHECKING:
    from types import FrameType

_passed: dict[tuple[str, int], int] = {}  # skipped calls of breakpoint, by their line


class DebugLevel(IntEnum):
    """A level of checks of calls: OFF and INFO while they run, DETAIL also before.

    Examples:
        >>> dist.DebugLevel.DETAIL > dist.DebugLevel.INFO
        True
    """

    __module__ = "cydist"

    OFF = 0
    INFO = 1
    DETAIL = 2


def get_debug_level() -> DebugLevel:
    """Return the level that groups made now get.

    Returns:
        What set_debug_level has set; else CYDIST_DEBUG or TORCH_DISTRIBUTED_DEBUG, by default OFF.

    Raises:
        ValueError: The variable is none of OFF, INFO and DETAIL.

    Examples:
        >>> dist.get_debug_level().name
        'OFF'
    """
    return DebugLevel[config.debug_level()]


def set_debug_level(level: DebugLevel) -> None:
    """Set the level of groups that this process makes from now on.

    All ranks set the same level. Groups that exist keep theirs.

    Args:
        level: DebugLevel.OFF, INFO or DETAIL; torch's DebugLevel too.

    Raises:
        TypeError: It is no level.

    Examples:
        >>> dist.set_debug_level(dist.DebugLevel.DETAIL)
        >>> compared = dist.new_group()  # its collectives are compared before they run
        >>> dist.set_debug_level_from_env()
    """
    name = getattr(level, "name", None)
    if isinstance(level, int | str) and not isinstance(level, DebugLevel):
        name = None
    if name not in config.DEBUG_LEVELS:
        raise TypeError(f"set_debug_level: {level!r} is no level: use DebugLevel.DETAIL, for one")
    config.choose_debug_level(name)


def set_debug_level_from_env() -> None:
    """Take the level from CYDIST_DEBUG or TORCH_DISTRIBUTED_DEBUG, as at the start.

    Raises:
        ValueError: The variable is none of OFF, INFO and DETAIL.

    Examples:
        >>> dist.set_debug_level_from_env()
    """
    config.choose_debug_level(None)
    config.debug_level()


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: Timeout = 3600) -> None:
    """Stop in pdb on one rank, at the line that calls this; the others wait until it goes on.

    Every rank of the job calls this. `continue` releases the other ranks. So do `next` and `step`,
    which go on at the program's next line. `quit` ends the rank by bdb.BdbQuit.

    Args:
        rank: The global rank that stops. It needs an input to read commands from. `cydistrun` gives
            the terminal to the first rank of each host.
        skip: How many calls at this line pass first.
        timeout_s: Seconds or a timedelta that the others wait; None: the group's timeout.

    Raises:
        ValueError: There is no such rank, or the timeout is wrong. The group stays usable.
        UnsupportedError: This rank should stop, and its input is empty. The others learn of it when
            this rank ends.
        DistError: A rank was lost, or the wait was too long. The group has failed then.

    Examples:
        >>> dist.breakpoint(skip=1)  # the first call passes
    """
    world = current_world()
    if not 0 <= rank < world.size:
        raise ValueError(f"breakpoint: rank must be from 0 to {world.size - 1}, not {rank}")
    seconds(timeout_s, "breakpoint")
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    passed = _passed.get(place, 0)
    if passed < skip:
        _passed[place] = passed + 1
        return
    if world.rank != rank:
        barrier(timeout=timeout_s)
        return
    _stop(caller, timeout_s)


def _stop(caller: FrameType, timeout: Timeout) -> None:
    """Take commands at the caller's line, then release the other ranks."""
    import bdb
    import pdb  # both are slow to import

    stdin = _commands()
    debugger = pdb.Pdb(stdin=stdin, stdout=None if stdin is None else sys.stdout)
    debugger.reset()
    debugger.botframe = caller
    while debugger.botframe.f_back is not None:
        debugger.botframe = debugger.botframe.f_back
    # Commands are taken here, rather than at the next event of a trace as by Pdb.set_trace, which
    # would come only after the barrier.
    debugger.interaction(caller, None)
    if debugger.quitting:
        raise bdb.BdbQuit
    barrier(timeout=timeout)
    if debugger.stoplineno != -1 or debugger.breaks:  # `next`, `step`, or a breakpoint was set
        frame: FrameType | None = caller
        while frame is not None:
            frame.f_trace = debugger.trace_dispatch
            frame = frame.f_back
        sys.settrace(debugger.trace_dispatch)


def _commands() -> IO[str] | None:
    """Return where commands come from; None: pdb's default. Raises UnsupportedError if that is
    empty."""
    try:
        empty = os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:
        empty = True  # it is closed
    if empty:
        raise UnsupportedError(
            f"breakpoint: rank {current_world().rank} has no input to take commands from: stop at "
            "the first rank of a host, which the launcher gives its own input, and start that "
            "launcher on a terminal",
            op="breakpoint",
        )
    # multiprocessing gives a child's sys.stdin nothing, and leaves it the descriptor.
    return None if multiprocessing.parent_process() is None else open(0, closefd=False)

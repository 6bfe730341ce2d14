"""The way the default group was made: as a process group, or for a master and its workers."""

from __future__ import annotations

from typing import Final
from weakref import WeakSet

from cydist.api import process_groups
from cydist.groups.world import World

INITIALIZED_PG: Final = 1
INITIALIZED_MW: Final = 2

# Worlds that init_master_worker joined. They take no collectives.
master_worker: WeakSet[World] = WeakSet()


def mode() -> int:
    """Return 0 without a default group, or how it was made."""
    if not process_groups.is_initialized():
        return 0
    return INITIALIZED_MW if process_groups.current_world() in master_worker else INITIALIZED_PG


def check_joined() -> None:
    """Raise AssertionError without a default group."""
    assert mode(), "call init_process_group first"


def check_process_group() -> None:
    """Raise AssertionError without a default group that takes collectives."""
    assert mode() == INITIALIZED_PG, "collective only supported in process-group mode"

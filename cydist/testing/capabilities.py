"""Find a backend's optional capabilities, by inspection and by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cydist as dist
from cydist._native import COLLECTIVE_NAMES
from cydist.api import process_groups
from cydist.errors import StoreTimeoutError
from cydist.groups.process_group import ProcessGroup

COLLECTIVES = tuple(name for name in COLLECTIVE_NAMES if hasattr(ProcessGroup, f"run_{name}"))
PATIENCE = 2.0  # seconds within which an asynchronous call must return


class Capabilities(NamedTuple):
    """The optional capabilities of a backend.

    Attributes:
        devices: Kinds of memory that it takes.
        own: Collectives that it does not derive from messages.
        any_source: Receives from the rank that sends first.
        asynchronous: An asynchronous collective returns before all ranks have come.
        subgroups: Groups of some ranks share their parent's resources.
        shrinks: shrink_group.
        shares: Its collectives need not copy the memory that empty_shared gives.
        aborts: Ends calls under way before their timeouts.
        tells: Its ranks learn of each other's errors.
    """

    devices: tuple[str, ...]
    own: tuple[str, ...]
    any_source: bool
    asynchronous: bool
    subgroups: bool
    shrinks: bool
    shares: bool
    aborts: bool
    tells: bool

    def lines(self) -> list[str]:
        """Return a description for users, one capability per line."""
        derived = [name for name in COLLECTIVES if name not in self.own]
        said = {
            "memory": ", ".join(self.devices),
            "collectives of its own": ", ".join(self.own) or "none",
            "derived from messages": ", ".join(derived) or "none",
            "receives from any source": yes(self.any_source),
            "asynchronous collectives": yes(self.asynchronous),
            "groups share connections": yes(self.subgroups),
            "shrink_group": yes(self.shrinks),
            "shared arrays": yes(self.shares),
            "abort ends calls under way": yes(self.aborts),
            "tells ranks of errors": yes(self.tells),
        }
        return [f"{what:28}{words}" for what, words in said.items()]


def yes(can: bool) -> str:
    """Return "yes" or "no"."""
    return "yes" if can else "no"


def find(run: Callable[[Callable[[int], Any]], list[Any]]) -> Capabilities:
    """Return the capabilities of a job's backend. `run` is the method of a job of two ranks."""
    return Capabilities(*run(_body)[0])


def _body(rank: int) -> tuple[Any, ...]:
    """Return a plain tuple, which can be sent between processes."""
    found = dist.group.WORLD
    assert found is not None
    group = found.for_device("cpu")

    def overrides(name: str) -> bool:
        mine = getattr(group, name)
        return getattr(mine, "__func__", mine) is not getattr(ProcessGroup, name)

    return (
        group.devices,
        tuple(name for name in COLLECTIVES if overrides(f"run_{name}")),
        _any_source(rank),
        _asynchronous(rank),
        *map(overrides, ("subgroup", "shrink", "share", "abort", "fail")),
    )


def _any_source(rank: int) -> bool:
    if rank == 1:
        dist.send(np.ones(1), 0)
    elif rank == 0:
        try:
            dist.recv(np.zeros(1))
        except dist.UnsupportedError:
            dist.recv(np.zeros(1), 1)
            return False
    return True


def _asynchronous(rank: int) -> bool:
    """Return whether rank 0's call returns before rank 1 joins it. Rank 1 waits for that, or for a
    time limit."""
    store = process_groups.current_world().store
    if rank == 1:
        try:
            store.wait(["capabilities/returned"], PATIENCE)
        except StoreTimeoutError:
            pass
    work: Any = dist.all_reduce(np.ones(1), async_op=True)
    returned = not work.is_completed()
    if rank == 0:
        store.set("capabilities/returned", "")
    work.wait()
    return returned

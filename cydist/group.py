"""ProcessGroup: what a backend implements, and what it gets for free.

A backend implements `isend` and `irecv`; every collective is derived from them. It
overrides whatever it does better. All arrays that reach a backend are `Array` objects:
contiguous memory of one known dtype (strided arrays were packed before), checked, with
the buffer protocol (`memoryview(array)` is its bytes).

Ranks in this module are group ranks. Collectives here block; `execute` decides on whose
thread they run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cydist.errors import DistError, DistTimeoutError, GroupDestroyedError, GroupFailedError
from cydist.work import CompletedWork, Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.types import Op

# The tag of messages that belong to derived collectives. Not a user's tag: those are >= 0.
COLLECTIVE_TAG = -1


@dataclass(slots=True)
class Call:
    """One call on a group, as error messages and hooks see it.

    name        "all_reduce"
    seq         its number among the collectives of the group; 0 for point to point
    deadline    on time.monotonic(), seconds
    """

    name: str
    seq: int
    deadline: float
    peer: int | None = None

    @property
    def deadline_ns(self) -> int:
        """The deadline on CLOCK_MONOTONIC, in nanoseconds, for compiled code."""
        return int(self.deadline * 1e9)

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.deadline - time.monotonic())

"""Handles of calls: how long they wait, by a clock that the test moves."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cydist import asarray, waiting, work
from cydist.api.multigpu import MultiGpuWork
from cydist.errors import DistTimeoutError
from cydist.work import CombinedWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (waiting, work):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


class Slow(Work):
    """A call that takes two seconds more from when somebody waits for it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.given: float | None = math.nan

    def _wait(self, timeout: float | None) -> None:
        self.given = timeout
        self.clock.now += 2


@pytest.mark.parametrize(
    "join",
    [CombinedWork, lambda works: MultiGpuWork(works, [asarray(np.ones(1)) for _ in works], None)],
    ids=["joint", "entries"],
)
def test_several_calls_have_one_deadline(
    clock: Clock, join: Callable[[list[Work]], CombinedWork]
) -> None:
    """A timeout is for all together: each is waited for as long as the ones before have left."""
    works = [Slow(clock) for _ in range(4)]
    joint = join([*works])
    joint.wait(5)
    assert [each.given for each in works] == [5, 3, 1, 0]
    joint.wait()
    assert [each.given for each in works] == [None] * 4


class Late(Work):
    """A call that never ends, and is given another deadline as soon as somebody waits for it."""

    def __init__(self, clock: Clock, first: float, then: float) -> None:
        super().__init__()
        self.clock = clock
        self.waits: list[float | None] = []
        self.due(first)
        self.then = [then]

    def _wait(self, timeout: float | None) -> None:
        if self._error is not None:
            raise self._error
        assert timeout is not None
        self.waits.append(timeout)
        if self.then:
            self.due(self.then.pop())
        self.clock.now += timeout
        raise DistTimeoutError("late")


@pytest.mark.parametrize(
    ("then", "waits"), [(25, [10, 15]), (1, [10, 0])], ids=["later", "earlier"]
)
def test_another_deadline_while_somebody_waits(
    clock: Clock, then: float, waits: list[float]
) -> None:
    """A later one holds for who waits already, too; with an earlier one it waits no longer than it
    would have, and the call has ended then."""
    late = Late(clock, 10, then)
    with pytest.raises(DistTimeoutError):
        late.wait()
    assert late.waits == waits

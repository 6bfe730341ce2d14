"""Faults for a job of threads: ranks that are slow, and ranks that die, by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cydist.api import process_groups
from cydist.groups.process_group import COLLECTIVE_TAG, Call, ProcessGroup
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array


class Killed(BaseException):
    """The end of a rank, as its Faults wanted it; its result in `ThreadJob.run`.

    No Exception, so that what handles errors in the rank does not take it for one.

    rank    which
    call    its number among the calls of the rank, from 1, and
    name    what it was: "all_reduce"
    """

    def __init__(self, rank: int, call: int, name: str) -> None:
        super().__init__(f"rank {rank} was killed in its call {call}, {name}")
        self.rank = rank
        self.call = call
        self.name = name


class Faults:
    """What happens to the ranks of a ThreadJob: with one seed, the same each time.

    seed    of all that is random
    delay   the longest time, in seconds, that a rank is held up before each of its calls
    kill    rank -> the number of the call in which it dies, from 1; or a range of numbers, from
            which the seed takes one

    Calls are counted on each rank over all its groups: collectives, messages, and the several
    calls of which those on objects are made. For the others a killed rank is one whose process
    ended: they get PeerFailedError.
    """

    def __init__(
        self,
        seed: int = 0,
        delay: float = 0.0,
        kill: Mapping[int, int | Sequence[int]] | None = None,
    ) -> None:
        if not delay >= 0:
            raise ValueError(f"Faults: delay must be 0 seconds or more, not {delay}")
        self.seed = seed
        self.delay = delay
        self.kill = dict(kill or {})
        for rank, numbers in self.kill.items():
            if min([numbers] if isinstance(numbers, int) else numbers, default=0) < 1:
                raise ValueError(f"Faults: kill[{rank}] must be call numbers from 1, not {numbers}")

    def __repr__(self) -> str:
        return f"Faults(seed={self.seed}, delay={self.delay}, kill={self.kill})"

    def on(self, rank: int) -> RankFaults:
        """Return the faults of one rank."""
        return RankFaults(self, rank)


# Deprecated: the former name, for tests that use it.
Weather = Faults


class RankFaults:
    """The faults of one rank."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self._random = random.Random(f"{faults.seed} {rank}")
        self._delay = faults.delay
        self._rank = rank
        self._calls = 0
        last = faults.kill.get(rank, 0)
        self._last = last if isinstance(last, int) else self._random.choice(last)

    def affect(self, name: str) -> None:
        """A call begins: hold this rank up, or end it."""
        self._calls += 1
        if self._delay:
            time.sleep(self._random.uniform(0, self._delay))
        if self._calls == self._last:
            process_groups.destroy_process_group()
            raise Killed(self._rank, self._calls, name)

    def affect_this_thread(self) -> None:
        """From now on it affects every call of this thread's groups, and of those made later."""
        mine = process_groups.current_world()
        make = mine.make_one

        def make_exposed(*told: Any, **named: Any) -> ProcessGroup:
            made = make(*told, **named)
            self.expose(made)
            return made

        mine.make_one = make_exposed  # type: ignore[method-assign]
        for group in mine.groups.values():
            self.expose(group.as_host_group())

    def expose(self, group: ProcessGroup) -> None:
        """Groups that this one makes of itself have its class, too."""
        if not isinstance(group, Exposed):
            kind = type(group)
            group.__class__ = type(f"Exposed{kind.__name__}", (Exposed, kind), {"faults": self})


class Exposed(ProcessGroup):
    """A group on which every call meets the faults first."""

    faults: ClassVar[RankFaults]
    fast_calls = fast_messages = False  # the fast path has no faults

    def execute(self, name: str, body: Callable[[Call], None], **options: Any) -> Work | None:
        self.faults.affect(name)
        return super().execute(name, body, **options)

    def isend(self, array: Array, peer: int, tag: int, **options: Any) -> Work:
        if tag != COLLECTIVE_TAG:
            self.faults.affect("send")
        return super().isend(array, peer, tag, **options)

    def irecv(self, array: Array, peer: int | None, tag: int, **options: Any) -> Work:
        if tag != COLLECTIVE_TAG:
            self.faults.affect("recv")
        return super().irecv(array, peer, tag, **options)

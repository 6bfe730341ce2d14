"""Faults for a job of threads: slow ranks and dying ranks, reproducible by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cydist._native import CallRecord
from cydist.api import process_groups
from cydist.groups.process_group import DERIVED_TAG, ProcessGroup
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array


class Killed(BaseException):
    """The death of a rank by its Faults; the rank's result in `ThreadJob.run`.

    It is not an Exception, so that the rank's error handlers do not catch it.

    Args:
        rank: The rank.
        call: The number of the call in which it died, among the rank's calls, from 1.
        name: The name of that call: "all_reduce".

    Examples:
        >>> from cydist.testing import Killed
        >>> survivors = [found for found in (1, 2) if not isinstance(found, Killed)]
    """

    def __init__(self, rank: int, call: int, name: str) -> None:
        super().__init__(f"rank {rank} was killed in its call {call}, {name}")
        self.rank = rank
        self.call = call
        self.name = name


class Faults:
    """Delays and deaths of the ranks of a ThreadJob. The same seed gives the same faults.

    Calls are counted on each rank over all its groups: collectives, messages, and each of the calls
    that an object collective makes. To the other ranks a killed rank looks like an ended process:
    they get PeerFailedError.

    Args:
        seed: Of all random choices.
        delay: The longest delay of a rank before each of its calls, in seconds.
        kill: For a rank the number of the call in which it dies, from 1; or a range of numbers,
            from which the seed chooses one.

    Examples:
        >>> from cydist.testing import Faults
        >>> faults = Faults(seed=7, delay=0.01, kill={1: range(1, 20)})
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
        """Return the faults of one rank.

        Args:
            rank: A rank of the job.

        Returns:
            An object that its thread asks before each call.
        """
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
        """Delay this rank before a call, or end it."""
        self._calls += 1
        if self._delay:
            time.sleep(self._random.uniform(0, self._delay))
        if self._calls == self._last:
            process_groups.destroy_process_group()
            raise Killed(self._rank, self._calls, name)

    def affect_this_thread(self) -> None:
        """Apply the faults to every call of this thread's groups, including groups made later."""
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
        """Apply the faults to a group. Groups that it makes of itself have its class, too."""
        if not isinstance(group, Exposed):
            kind = type(group)
            group.__class__ = type(f"Exposed{kind.__name__}", (Exposed, kind), {"faults": self})


class Exposed(ProcessGroup):
    """A group whose calls apply the faults first."""

    faults: ClassVar[RankFaults]
    fast_calls = fast_messages = False  # the fast path has no faults

    def execute(self, name: str, body: Callable[[CallRecord], None], **options: Any) -> Work | None:
        self.faults.affect(name)
        return super().execute(name, body, **options)

    def isend(self, array: Array, peer: int, tag: int, **options: Any) -> Work:
        if tag != DERIVED_TAG:
            self.faults.affect("send")
        return super().isend(array, peer, tag, **options)

    def irecv(self, array: Array, peer: int | None, tag: int, **options: Any) -> Work:
        if tag != DERIVED_TAG:
            self.faults.affect("recv")
        return super().irecv(array, peer, tag, **options)

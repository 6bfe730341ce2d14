"""Make the communicators of links and groups, and count how many MPI may still make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from cydist.executor import THREADS

LOOK_SECONDS = 0.05  # between checks whether MPI is done
CREATION_TAGS = 16_000  # of groups whose communicators are made at the same time
# Most groups with a communicator at a time; further groups use messages. MPICH has 2,046
# communicators for a process, Open MPI 65,532.
COMMUNICATORS = 1000
WITH_FAILED = 1500  # including those of failed groups; the rest is for the program


class Communicators:
    """Counts the communicators that this process has created for groups.

    MPI's limit is per process, and is not reset between jobs.

    Attributes:
        made: Communicators of groups in use.
        leaked: Communicators of failed or shrunk groups, which are never freed.
        begun: One event per communicator that MPI is making; abandoned ones stay.
    """

    made = 0
    leaked = 0
    begun: ClassVar[list[threading.Event]] = []

    @classmethod
    def may_create(cls) -> bool:
        """Return whether one more communicator may be made."""
        made = cls.made
        return made < COMMUNICATORS and made + cls.leaked + len(cls.begun) < WITH_FAILED

    @classmethod
    def all_made(cls) -> bool:
        """Return whether MPI is making no communicator."""
        return all(each.is_set() for each in cls.begun)

    @classmethod
    def create(cls, MPI: Any, make: Callable[[], Any]) -> Iterator[Any]:
        """Yield None until MPI has made a communicator with `make`, then yield it. Raises its
        exception if it makes none, mostly because it has no more.

        Call this when all members have come. If one fails now, the others may hang in MPI, without
        a deadline or Ctrl-C. So a thread of its own waits for MPI.
        """
        over, found, refused = threading.Event(), [], []

        def begin() -> None:
            try:
                found.append(make())
            except MPI.Exception as error:  # on all members, where there are no more
                refused.append(error)
            over.set()

        cls.begun.append(over)
        THREADS.run(begin)
        while not over.wait(LOOK_SECONDS):
            yield None
        cls.begun.remove(over)
        if refused:
            raise refused[0]
        found[0].Set_errhandler(MPI.ERRORS_RETURN)
        yield found[0]


def payload_tags(MPI: Any) -> int:
    """Return the largest tag of cydist's messages. Larger tags are for making communicators."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)) - CREATION_TAGS


def of_some(MPI: Any, comm: Any, ranks: Sequence[int], number: int) -> Any:
    """Make a communicator of these ranks of `comm`; its other ranks take no part.

    Open MPI sends messages on `comm` with the given tag. So no other message or receive there,
    neither a payload's nor a header's, may have that tag.
    """
    tag = payload_tags(MPI) + 1 + number % CREATION_TAGS
    return comm.Create_group(comm.Get_group().Incl(ranks), tag)

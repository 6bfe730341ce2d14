"""Make the communicators of links and groups, and count how many MPI may still make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from cydist.executor import THREADS

LOOK_SECONDS = 0.05  # between looks whether MPI is done
CREATION_TAGS = 16_000  # of groups whose communicators are made at the same time
# Groups that have a communicator at a time; those beyond use messages. MPICH has 2,046 for all of
# a process, Open MPI 65,532.
COMMUNICATORS = 1000
WITH_FAILED = 1500  # with those of groups that have failed: what is left is the program's own


class Communicators:
    """This process's, of groups: MPI's limit is one for all jobs that it has been in.

    made        of groups that go on
    spent       of groups that had failed or were shrunk, which MPI does not get back
    begun       set when MPI has made one; those that were given up stay here
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
        """Yields None again and again until MPI has made a communicator, by `make`, then that; ends
        where MPI has no more of them.

        All members have come. One that fails now may leave the others in MPI, which has no
        deadline here and hears no Ctrl-C, so a thread of its own waits there.
        """
        over, found = threading.Event(), []

        def begin() -> None:
            with suppress(MPI.Exception):  # on all members
                found.append(make())
            over.set()

        cls.begun.append(over)
        THREADS.run(begin)
        while not over.wait(LOOK_SECONDS):
            yield None
        cls.begun.remove(over)
        for made in found:
            made.Set_errhandler(MPI.ERRORS_RETURN)
            yield made


def payload_tags(MPI: Any) -> int:
    """Return the last of the tags that our messages may have; those above are for making
    communicators."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)) - CREATION_TAGS


def of_some(MPI: Any, comm: Any, ranks: Sequence[int], number: int) -> Any:
    """Make a communicator of these ranks of `comm`; its other ranks take no part.

    Open MPI does it by messages on `comm` with the tag that it is given, which must not be that of
    any other message or receive there: neither a payload's nor a header's.
    """
    tag = payload_tags(MPI) + 1 + number % CREATION_TAGS
    return comm.Create_group(comm.Get_group().Incl(ranks), tag)

"""The communicators of groups: how many MPI may still make."""

from __future__ import annotations

import threading
from typing import ClassVar

CREATION_TAGS = 30_000  # of groups whose communicators are made at the same time
# Groups that have a communicator at a time; those beyond use messages. MPICH has 2,046 for all of
# a process, Open MPI 65,532.
COMMUNICATORS = 1000
WITH_FAILED = 1500  # with those of groups that have failed: what is left is the program's own


class Communicators:
    """This process's, of groups: MPI's limit is one for all jobs that it has been in.

    made        of groups that go on
    spent       of groups that had failed, which MPI does not get back
    begun       set when MPI has made one; those that were given up stay here
    """

    made = 0
    spent = 0
    begun: ClassVar[list[threading.Event]] = []

    @classmethod
    def few(cls) -> bool:
        """May there be one more?"""
        made = cls.made
        return made < COMMUNICATORS and made + cls.spent + len(cls.begun) < WITH_FAILED

    @classmethod
    def all_made(cls) -> bool:
        """Is MPI making none?"""
        return all(each.is_set() for each in cls.begun)

"""Whose turn it is: the calls of a group run one at a time, in the order they were issued."""
from libc.stdint cimport uint32_t

from cydist._native.sync cimport exchange_int, futex_wait, futex_wake

cdef enum:
    FREE = 0
    TAKEN = 1
    AWAITED = 2                     # taken, and somebody may sleep until it is free
    FOR_LONG = 1000000000           # ns; then it looks again


cdef class CallQueue:
    """The calls of a group that run or are queued, and the one that runs.

    All changes are atomic: no signal handler and no thread comes between their steps.
    """

    def __cinit__(self):
        self.queue = []

    cdef bint begin_alone(self) noexcept:
        if not change_alone(&self.outstanding, 0, 1):
            return False
        # A thread whose queued call is over, or was withdrawn, holds it for a moment.
        if change(&self.running, FREE, TAKEN):
            return True
        add_alone(&self.outstanding, -1)
        return False

    cdef void end_alone(self) noexcept:
        self.leave()
        add_alone(&self.outstanding, -1)

    cdef void leave(self) noexcept:
        if exchange_int(&self.running, FREE) == AWAITED:
            futex_wake(<uint32_t *>&self.running)

    def begin(self, object token not None) -> bool:
        """Run now, if nothing runs or is queued. `token` is this call's alone."""
        if not self.begin_alone():
            return False
        self.owner = token
        return True

    def end(self, object token not None) -> None:
        """The call that began with this token is over; without one nothing happens."""
        if self.owner is token:
            self.owner = None
            self.end_alone()

    def push(self, object work not None) -> None:
        """One more call is queued."""
        add_alone(&self.outstanding, 1)
        self.queue.append(work)

    def empty(self) -> bool:
        """Is nothing queued?"""
        return not self.queue

    def pop(self) -> object:
        """The oldest queued call, which has not run yet; None: nothing is queued."""
        return self.queue.pop(0) if self.queue else None

    def withdraw(self, object work not None) -> bool:
        """Take a call out of the queue; False: it has left it."""
        if work not in self.queue:
            return False
        self.queue.remove(work)
        add_alone(&self.outstanding, -1)
        return True

    def over(self) -> None:
        """A call that left the queue has run."""
        add_alone(&self.outstanding, -1)

    def __enter__(self) -> None:
        """A queued call runs: wait until no other does."""
        with nogil:
            while exchange_int(&self.running, AWAITED) != FREE:
                futex_wait(<uint32_t *>&self.running, AWAITED, FOR_LONG)

    def __exit__(self, *error) -> None:
        self.leave()

"""The call queue: the calls of a group run one at a time, in the order they were issued."""
from libc.stdint cimport uint32_t

from cydist._native.sync cimport exchange_int, futex_wait, futex_wake

cdef enum:
    FREE = 0
    TAKEN = 1
    AWAITED = 2                     # taken, and a thread may sleep until it is free
    FOR_LONG = 1000000000           # ns; then it checks again


cdef class CallQueue:
    """The calls of a group that run or are queued, and the running one.

    All changes are atomic: no signal handler and no thread interleaves with their steps.
    """

    def __cinit__(self):
        self.queue = []

    cdef bint try_begin_fast(self) noexcept:
        if not change_with_gil(&self.outstanding, 0, 1):
            return False
        # A thread whose queued call is over, or was withdrawn, holds `running` for a moment.
        if change(&self.running, FREE, TAKEN):
            return True
        add_with_gil(&self.outstanding, -1)
        return False

    cdef void end_fast(self) noexcept:
        self.release()
        add_with_gil(&self.outstanding, -1)

    cdef void release(self) noexcept:
        if exchange_int(&self.running, FREE) == AWAITED:
            futex_wake(<uint32_t *>&self.running)

    def try_begin(self, object token not None) -> bool:
        """Run now if no call runs or is queued; return whether. `token` is this call's alone."""
        if not self.try_begin_fast():
            return False
        self.owner = token
        return True

    def end(self, object token not None) -> None:
        """End the call that began with this token; without one nothing happens."""
        if self.owner is token:
            self.owner = None
            self.end_fast()

    def push(self, object work not None) -> None:
        """Queue one more call."""
        add_with_gil(&self.outstanding, 1)
        self.queue.append(work)

    def empty(self) -> bool:
        """Return whether no call is queued."""
        return not self.queue

    def pop(self) -> object:
        """Return the oldest queued call that has not run yet; None: the queue is empty."""
        return self.queue.pop(0) if self.queue else None

    def withdraw(self, object work not None) -> bool:
        """Take a call out of the queue; False: it has already left the queue."""
        if work not in self.queue:
            return False
        self.queue.remove(work)
        add_with_gil(&self.outstanding, -1)
        return True

    def mark_run(self) -> None:
        """Note that a call that left the queue has run."""
        add_with_gil(&self.outstanding, -1)

    def __enter__(self) -> None:
        """Begin a queued call: wait until no other runs."""
        with nogil:
            while exchange_int(&self.running, AWAITED) != FREE:
                futex_wait(<uint32_t *>&self.running, AWAITED, FOR_LONG)

    def __exit__(self, *error) -> None:
        self.release()

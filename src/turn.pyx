"""Whose turn it is: the calls of a group run one at a time, in the order they were issued."""
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_release_lock, WAIT_LOCK,
)


cdef class Turn:
    """The calls of a group that run or are queued, and the one that runs.

    All changes are atomic: no signal handler and no thread comes between their steps.
    """

    def __cinit__(self):
        self.running = PyThread_allocate_lock()
        self.queue = []
        if self.running == NULL:
            raise MemoryError("no memory for a lock")

    def __dealloc__(self):
        if self.running != NULL:
            PyThread_free_lock(self.running)

    cdef bint begin_alone(self) noexcept:
        if not change(&self.outstanding, 0, 1):
            return False
        # A thread whose queued call is over, or was withdrawn, holds it for a moment.
        if PyThread_acquire_lock(self.running, NOWAIT_LOCK):
            return True
        add(&self.outstanding, -1)
        return False

    cdef void end_alone(self) noexcept:
        PyThread_release_lock(self.running)
        add(&self.outstanding, -1)

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
        add(&self.outstanding, 1)
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
        add(&self.outstanding, -1)
        return True

    def over(self) -> None:
        """A call that left the queue has run."""
        add(&self.outstanding, -1)

    def __enter__(self) -> None:
        """A queued call runs: wait until no other does."""
        with nogil:
            PyThread_acquire_lock(self.running, WAIT_LOCK)

    def __exit__(self, *error) -> None:
        PyThread_release_lock(self.running)

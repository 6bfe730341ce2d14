"""Whether a group takes calls: written by Python, read by the general path and by nccl's fast path.
"""
from posix.unistd cimport getpid


cdef extern from "pthread.h" nogil:
    int pthread_atfork(void *, void *, void (*)() noexcept nogil)

cdef int process = getpid()


cdef void in_child() noexcept nogil:
    global process
    process = getpid()


pthread_atfork(NULL, NULL, in_child)


cdef const int *process_id() noexcept:
    return &process


cdef class GroupState:
    """Whether a group takes calls.

    Attributes:
        pid: The process that made the group.
        error: The error that failed the group; None while it takes calls.
        destroyed: Whether the group was destroyed.
    """

    def __cinit__(self):
        self.pid = process

    cpdef bint is_usable(self) noexcept:
        """Return whether the group takes calls in this process."""
        return self.error is None and not self.destroyed and self.pid == process

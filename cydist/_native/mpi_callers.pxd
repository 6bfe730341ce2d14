"""Which threads may call MPI; see src/transports/mpi/mpi_callers.pyx."""
from cydist._native.linux cimport pthread_t


cdef enum Callers:
    ANYBODY = 0
    FOREGROUND = 1              # all but those that `run_in_background`
    ONE = 2


# Is this thread among them? The one is `one`.
cdef bint is_among(int callers, pthread_t one) noexcept nogil

"""Collectives of two ranks as one message each way: src/algorithms/mpi/mpi_pairwise.pyx."""
from cydist._native.abi cimport Call, Request, Comm


# Return whether this is such a call. Both ranks decide alike for the same call.
cdef bint is_pairwise(const Comm *t, const Call *c) noexcept nogil
# Run the call; when this returns OK, both ranks are in it.
cdef int exchange_pair(Comm *t, Call *c) noexcept nogil
# Wait for `running`, which MPI executes, and query the peer whose message `stray` would explain a
# delay. TIMEOUT: that message has arrived, or the call's deadline has passed.
cdef int wait_with_check(Comm *t, Call *c, Request *running, Request *stray) noexcept nogil

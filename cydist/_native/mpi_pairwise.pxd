"""What two ranks give each other in one message each way: src/transports/mpi/mpi_pairwise.pyx."""
from cydist._native.abi cimport Call, Request, Comm


# Is it such a call? Both ranks say the same of the same call.
cdef bint is_pairs(const Comm *t, const Call *c) noexcept nogil
# Run it; when it returns OK, both are in it.
cdef int swap(Comm *t, Call *c) noexcept nogil
# Wait for what MPI runs, and ask the peer whose word would say why it takes long. TIMEOUT: there is
# its word, or the call's deadline is over.
cdef int wait_beside(Comm *t, Call *c, Request *running, Request *word) noexcept nogil

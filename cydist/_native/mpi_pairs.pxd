"""What two ranks give each other in one message each way: src/transports/mpi_pairs.pyx."""
from cydist._native.abi cimport Call, Transport


# Is it such a call? Both ranks say the same of the same call.
cdef bint is_pairs(const Transport *t, const Call *c) noexcept nogil
# Run it; when it returns OK, both are in it.
cdef int swap(Transport *t, Call *c) noexcept nogil

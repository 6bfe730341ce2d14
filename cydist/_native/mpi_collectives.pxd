"""MPI's own collectives; see src/transports/mpi_collectives.pyx."""
from cydist._native.abi cimport Call, Transport

# A view's function; its link is a Net, its comm a communicator of the members.
cdef int collective(Transport *t, Call *c) noexcept nogil

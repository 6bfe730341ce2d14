"""Collectives of the MPI library; see src/transports/mpi/mpi_collectives.pyx."""
from cydist._native.abi cimport Call, Fingerprint, Request, Comm


ctypedef struct Check:          # the exchange of a fingerprint with a neighbour
    Request request
    Fingerprint fingerprint     # this rank's, for comparison


ctypedef struct Checks:         # the state of one view
    Check of[2]                 # of the last two calls, alternating
    int calls


# A view's functions; its link is a Net, its comm a communicator of the members.
cdef int collective(Comm *t, Call *c) noexcept nogil
cdef int compare(Comm *t, Call *c) noexcept nogil
# The group ends in order: compare its last call with the others until the deadline. Returns OK also
# if they have not arrived; fills in the call's fingerprint.
cdef int drain(Comm *t, Call *c) noexcept nogil

"""MPI's own collectives; see src/transports/mpi/mpi_collectives.pyx."""
from cydist._native.abi cimport Call, Fingerprint, Request, Comm


ctypedef struct Check:          # a neighbour's fingerprint, on its way or not
    Request request
    Fingerprint fingerprint     # what it is compared with


ctypedef struct Checks:         # a view's own
    Check of[2]                 # the last calls', by turns
    int turn


# A view's functions; its link is a Net, its comm a communicator of the members.
cdef int collective(Comm *t, Call *c) noexcept nogil
cdef int compare(Comm *t, Call *c) noexcept nogil
# The group ends in order: compare its last call with others, until the deadline. OK, also where
# they have not come; fills in the call's fingerprint.
cdef int settle(Comm *t, Call *c) noexcept nogil

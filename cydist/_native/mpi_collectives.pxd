"""Collectives of the MPI library; see src/transports/mpi/mpi_collectives.pyx."""
from cydist._native.abi cimport Call, Fingerprint, Request, Comm


ctypedef struct FingerprintExchange:    # the exchange of a fingerprint with a neighbour
    Request request
    Fingerprint fingerprint     # this rank's, for comparison


ctypedef struct FingerprintExchanges:         # the state of one comm
    FingerprintExchange of[2]   # of the last two calls, alternating
    int calls


# A comm's functions; its link is a Net, its `library_comm` a communicator of the members.
cdef int collective(Comm *t, Call *c) noexcept nogil
cdef int compare_last_call(Comm *t, Call *c) noexcept nogil
# The group ends in order: compare its last call with the others until the deadline. Returns OK also
# if they have not arrived; fills in the call's fingerprint.
cdef int drain(Comm *t, Call *c) noexcept nogil

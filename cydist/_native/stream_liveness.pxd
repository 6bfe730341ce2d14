"""Which peers have left or died; see stream.pxd for the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Comm
from cydist._native.stream cimport Net

cdef enum:
    MOST_LANES = 64             # a farewell has a bit for each

cdef extern from *:
    const uint64_t ALL_LANES "UINT64_MAX"


# Will a receive from this peer, or from anybody, never complete?
cdef bint hopeless(const Net *net, const Comm *t, int peer, uint64_t tag) noexcept nogil
# A member, by group rank, that was lost and did not leave on purpose; or -1.
cdef int who_died(const Net *net, const Comm *t) noexcept nogil
# Tell a rank that waits for us in a group which we have left; behind all that we sent.
cdef void say_farewell(Net *net, int peer, uint64_t context) noexcept nogil
# A peer has left a group, and said so behind what it sent by these lanes: receives that only it
# could answer end.
cdef void hear_farewell(Net *net, int peer, uint64_t context, uint64_t lanes) noexcept nogil
# End the posted receives that wait in vain now that this peer left or died.
cdef void end_hopeless(Net *net, int peer) noexcept nogil

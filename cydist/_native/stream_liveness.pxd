"""Departed and dead peers; see stream.pxd for the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Comm
from cydist._native.stream cimport Net

cdef enum:
    MOST_LANES = 64             # a departure notice has a bit for each

cdef extern from *:
    const uint64_t ALL_LANES "UINT64_MAX"


# Return whether a receive from this peer, or from any source, can never complete.
cdef bint cannot_arrive(const Net *net, const Comm *t, int peer, uint64_t tag) noexcept nogil
# Return the group rank of a member that was lost without leaving on purpose, or -1.
cdef int dead_member(const Net *net, const Comm *t) noexcept nogil
# Send a departure notice to a rank that waits in a group which this rank has left. It follows all
# messages sent before.
cdef void send_farewell(Net *net, int peer, uint64_t comm_id) noexcept nogil
# Record a peer's departure notice for a group, sent after its messages on these lanes. Receives
# that only this peer could match end.
cdef void on_farewell(Net *net, int peer, uint64_t comm_id, uint64_t lanes) noexcept nogil
# Return the status of requests that a lost peer ends: NO_MEMORY if this rank is to blame.
cdef int status_of_loss(const Net *net, int peer) noexcept nogil
# End the posted receives that can never complete now that this peer left or died.
cdef void end_stranded(Net *net, int peer) noexcept nogil

"""Peers come and go: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport uint64_t

from cydist._native.stream cimport Connection, Net


# Take over a connected socket. Returns OK, or why it is not taken (CLOSED, PEER_LOST,
# NO_MEMORY, or MISMATCH: there is one already).
cdef int adopt(Net *net, int peer, int lane, int fd) noexcept nogil
# The stream is over. A peer that left on purpose is gone when all its lanes are.
cdef void end(Connection *c, int how) noexcept nogil
# The peer is lost for good: every request that involves it ends, now and later.
cdef void lose(Net *net, int peer, int how) noexcept nogil
# A group is gone: drop what arrived for it.
cdef void drop_context(Net *net, uint64_t context) noexcept nogil
# This rank leaves: end all requests with CLOSED, say goodbye, close every connection.
cdef void leave(Net *net) noexcept nogil
# Free all memory; nobody is using it any more.
cdef void free_connections(Net *net) noexcept nogil

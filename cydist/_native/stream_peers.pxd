"""Peers come and go: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Comm
from cydist._native.stream cimport Connection, Net

# Take over a connected socket. Returns OK, or why it is not taken (CLOSED, PEER_LOST,
# NO_MEMORY, or MISMATCH: there is one already).
cdef int adopt(Net *net, int peer, int lane, int fd) noexcept nogil
# The stream is over. A peer that left on purpose is gone when all its lanes are.
cdef void end(Connection *c, int how) noexcept nogil
# A near peer writes no more: read the rest first.
cdef void end_near(Connection *c, int how) noexcept nogil
# Who waits for a rank learns of its death from now on: by its process, or by a connection,
# the one that messages of this tag take.
cdef void watch(Net *net, int peer, uint64_t tag) noexcept nogil
# Has this connection through rings something to read, or to find out?
cdef bint unread_by(Connection *c) noexcept nogil
# Look at what changed among those who share memory.
cdef void hear_news(Net *net) noexcept nogil
# The peer is lost for good: every request that involves it ends, now and later.
cdef void lose(Net *net, int peer, int how) noexcept nogil
# A group is gone: drop what arrived for it.
cdef void drop_context(Net *net, uint64_t context) noexcept nogil
# This rank leaves: end all requests with CLOSED, say goodbye, close every connection.
cdef void leave(Net *net) noexcept nogil
# Free all memory; nobody is using it any more.
cdef void free_connections(Net *net) noexcept nogil

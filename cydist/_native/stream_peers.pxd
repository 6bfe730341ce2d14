"""Connect, lose and leave peers: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Comm
from cydist._native.stream cimport Connection, Net
from cydist._native.cipher cimport Cipher

# Take over a connected socket with the keys of its directions, 32 bytes each, and its cipher
# (NULL: not encrypted), which is the caller's again if the socket is not taken. Returns OK, or why
# it is not taken (CLOSED, PEER_LOST, NO_MEMORY, or MISMATCH: there is one already).
cdef int adopt(Net *net, int peer, int lane, int fd, const char *sending,
               const char *receiving, Cipher *cipher) noexcept nogil
# Overwrite the keys of a connection that has ended, and free its cipher.
cdef void forget_keys(Connection *c) noexcept nogil
# The stream is over. A peer that left on purpose is gone when all its lanes are.
cdef void end_connection(Connection *c, int how) noexcept nogil
# A local peer writes no more: read the rest first.
cdef void close_local(Connection *c, int how) noexcept nogil
# From now on a rank that waits for this peer learns of its death: through its process, or through
# the connection that messages of this tag take.
cdef void watch_peer(Net *net, int peer, uint64_t tag) noexcept nogil
# Return whether this connection through rings has bytes to read or a change to examine.
cdef bint has_unread(Connection *c) noexcept nogil
# Handle changes among the ranks that share memory.
cdef void on_peer_events(Net *net) noexcept nogil
# End the connections to hosts that have been silent for too long. Looks at most once in a period.
cdef void look_for_silence(Net *net, int64_t now) noexcept nogil
# Return whether the peer's host has answered lately, on a connection to any of its ranks.
cdef bint host_answers(const Net *net, int peer) noexcept nogil
# The peer is lost for good: every request that involves it ends, now and later. With its host all
# its ranks are lost, but for those whose connection is still answered.
cdef void mark_lost(Net *net, int peer, int how) noexcept nogil
# A group is gone: drop what arrived for it.
cdef void drop_comm(Net *net, uint64_t comm_id) noexcept nogil
# This rank leaves: end all requests with CLOSED, send departure notices, close every connection.
cdef void leave_link(Net *net) noexcept nogil
# Free all memory; no thread uses it any more.
cdef void free_connections(Net *net) noexcept nogil

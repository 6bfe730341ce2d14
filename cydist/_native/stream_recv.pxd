"""Reading: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.matching cimport Item
from cydist._native.stream cimport Connection, Net


# Post a receive. Returns OK, or why it is not posted.
cdef int post_recv(Net *net, Comm *t, Request *r) noexcept nogil
cdef void withdraw_recv(Net *net, Item *item) noexcept nogil
# Send from this rank to itself: the message is always kept.
cdef int send_to_self(Net *net, Comm *t, Request *r) noexcept nogil

# Read what is there. Returns OK, or a Loss when the stream is over.
cdef int on_readable(Connection *c) noexcept nogil
# For `c.coop_item`, a message that both sides copy: copy some pieces, or give up.
cdef bint advance_coop_copy(Connection *c) noexcept nogil
cdef void abandon_coop_copy(Connection *c) noexcept nogil

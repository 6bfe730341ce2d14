"""Reading: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.matching cimport Item
from cydist._native.stream cimport Connection, Net
from cydist._native.wire cimport MAGIC, Header


# Post a receive. Returns OK, or why it is not posted.
cdef int post_recv(Net *net, Comm *t, Request *r) noexcept nogil
cdef void withdraw_recv(Net *net, Item *item) noexcept nogil
# Send from this rank to itself: the message is always kept.
cdef int send_to_self(Net *net, Comm *t, Request *r) noexcept nogil

# Read what is there. Returns OK, or a Loss when the stream is over.
cdef int on_readable(Connection *c) noexcept nogil

# What both readers of frames, this one and stream_inline.pyx, do with a header.

cdef inline bint is_from_peer(const Connection *c, const Header *h) noexcept nogil:
    """Return whether the header is one that a peer sends now on this connection."""
    return (h.magic == MAGIC and h.lane == c.lane and not c.said_goodbye
            and c.sent - h.released <= c.sent - c.credited)

cdef inline void take_credit(Connection *c, const Header *h) noexcept nogil:
    """Note how many eager bytes the peer has handed to receives."""
    c.credited = h.released     # not less than before: see is_from_peer

cdef inline bint has_room(const Connection *c, const Header *h) noexcept nogil:
    """Return whether the peer may send this eager message, or must announce it."""
    return c.received + sizeof(Header) + h.nbytes - c.released <= c.net.held_limit

# Return where a message in a cell is; NULL: no peer sends such a message.
cdef const char *find_cell(const Connection *c, const Header *h) noexcept nogil
# Own the cell of a message, all of which has been read.
cdef void own_cell(Connection *c, const Header *h) noexcept nogil

# For `c.coop_item`, a message that both sides copy: copy some pieces, or give up.
cdef bint advance_coop_copy(Connection *c) noexcept nogil
cdef void abandon_coop_copy(Connection *c) noexcept nogil

"""Tags of frames on sockets, by which a rank knows that its peer sent them, and sent them next.

Each direction of a connection has keys of its own, made in its handshake (cydist/net/auth.py), and
a counter that does not travel. The tag of a header covers the counter and the whole header, so a
frame that was dropped, repeated, reordered, reflected or taken from another connection ends the
connection, and so does a changed length. A control message carries the tag of its bytes in `other`,
which the header's tag covers. The bytes of arrays have no tag: they are as safe as the network.

Frames in rings have no tags, since only this user's processes reach that memory.

The tag is SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). A forged
one is right once in 2^64 attempts, and the first wrong one ends the connection.
"""
from libc.stdint cimport uint64_t

from cydist._native.stream cimport Connection
from cydist._native.wire cimport Header


# Give the next frame's header its tag.
cdef void seal_header(Connection *c, Header *h) noexcept nogil
# Let the header of a control message, not sealed yet, carry the tag of its bytes.
cdef void seal_payload(Connection *c, Header *h, const char *data, size_t nbytes) noexcept nogil
# Return whether the peer sent `c.header`, and sent it next.
cdef bint header_is_authentic(Connection *c) noexcept nogil
# Return whether these are a control message's bytes, by the tag in `other` of its header.
cdef bint payload_is_authentic(const Connection *c, uint64_t tag, const char *data,
                               size_t nbytes) noexcept nogil

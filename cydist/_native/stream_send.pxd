"""Writing: see stream.pxd for the protocol and the lock."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport COLLECTIVE_TAG, SEQUENCE_MASK, SEQUENCE_SHIFT, Comm, Request
from cydist._native.stream cimport Connection, Net, Outgoing
from cydist._native.wire cimport Header


# Post a send to another rank. Returns OK, or why it is not posted.
cdef int post_send(Net *net, Comm *t, Request *r) noexcept nogil
cdef void withdraw_send(Connection *c, Outgoing *out) noexcept nogil
# The receiver has matched or refused what this rank announced.
cdef void on_reply(Connection *c, const Header *h) noexcept nogil

# Write as much of the waiting frames as there is room for.
cdef void on_writable(Connection *c) noexcept nogil
# Write as much of one frame as there is room for; returns how many bytes that was.
cdef size_t write_some(Connection *c, Header *header, size_t header_sent,
                       const char *data, size_t nbytes) noexcept nogil
cdef Header new_header(Connection *c, int kind) noexcept nogil
# Write a frame without bytes, now or later; nothing on a connection that is not live.
cdef void send_control(Connection *c, int kind, int flags, uint64_t id,
                       uint64_t other) noexcept nogil
# A kept message was handed over: its sender may send as much again. c may be NULL.
cdef void return_credit(Connection *c, size_t nbytes) noexcept nogil

# Return the lane of a call's number, or of a tag. Messages that must keep their order share a lane.
cdef inline int lane_of(const Net *net, uint64_t tag) noexcept nogil:
    if tag & COLLECTIVE_TAG:
        tag = (tag >> SEQUENCE_SHIFT) & SEQUENCE_MASK
    return <int>(tag % <uint64_t>net.lanes)


# Return the connection's record, made on first use; NULL: no memory.
cdef Connection *connection(Net *net, int peer, int lane) noexcept nogil
# Return whether messages to this peer go through rings, as far as is known.
cdef bint is_local(const Net *net, int peer) noexcept nogil
# Take over the rings that a pair's word describes, or fall back to sockets.
cdef void attach_rings(Connection *c, uint64_t word) noexcept nogil
# Stop epoll from reporting the end of a local peer's process.
cdef void forget_process(Connection *c) noexcept nogil
# Request the connection that messages of this tag to or from `peer` take.
cdef void request_connection(Net *net, int peer, uint64_t tag) noexcept nogil

# A request is pending from begin() to complete() or forget(), after which nothing here
# touches it again.
cdef void begin_request(Net *net, Request *r) noexcept nogil
cdef void finish_request(Net *net, Request *r, int status) noexcept nogil
cdef void forget_request(Net *net, Request *r) noexcept nogil
# End a frame and the send it belongs to.
cdef void finish_frame(Net *net, Outgoing *out, int status) noexcept nogil
cdef void remove_out(Outgoing **ring, Outgoing *out) noexcept nogil

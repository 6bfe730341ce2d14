"""Short messages that complete at once; see stream_inline.pxd."""
from libc.stddef cimport size_t
from libc.string cimport memcmp, memcpy

from cydist._native.abi cimport OK, PENDING, Comm, Fingerprint, Request
from cydist._native.linux cimport pthread_mutex_trylock, pthread_mutex_unlock
from cydist._native.matching cimport find_arrived, find_posted
from cydist._native.stream_send cimport post_send, return_credit
from cydist._native.stream_peers cimport has_unread
from cydist._native.stream_progress cimport is_slow_poll
from cydist._native.stream_recv cimport find_cell, has_room, is_from_peer, own_cell, take_credit
from cydist._native.shm_ring cimport has_space_for, readable_bytes, advance_read
from cydist._native.stream cimport LIVE, Connection, Net
from cydist._native.wire cimport EAGER, Header
from cydist._native.sync cimport LOOKS, SPINS, load_u32, pause


cdef enum:
    INLINE_BYTES = 16384        # a longer message takes longer than this saves


cdef int at_once(Comm *t, Request *r, bint sending) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Connection *c
    cdef int status = PENDING
    r.link = NULL
    if r.nbytes > INLINE_BYTES or net.shm == NULL or pthread_mutex_trylock(&net.lock) != 0:
        return PENDING
    c = net.connections[t.peers[r.peer] * net.lanes]
    if c != NULL and c.local and c.state == LIVE and c.inbound.control != NULL:
        if nothing_else(net, NULL if sending else c):
            status = send_now(net, c, t, r) if sending else recv_now(net, c, t, r)
    pthread_mutex_unlock(&net.lock)
    return status


cdef inline bint nothing_else(Net *net, const Connection *but) noexcept nogil:
    """Return whether no other message has arrived. A control message may report a failure."""
    cdef Connection *c = net.local
    if (load_u32(&net.shm.members[net.shm.own].events) != net.shm.events_seen
            or is_slow_poll(net, net.tests + 1)):
        return False
    net.tests += 1
    while c != NULL:
        if c != but and c.state == LIVE and c.local and has_unread(c):
            return False
        c = c.next_local
    return True


cdef inline int send_now(Net *net, Connection *c, Comm *t, Request *r) noexcept nogil:
    if c.out != NULL or not has_space_for(net.shm, &c.outbound, sizeof(Header) + r.nbytes):
        return PENDING
    return post_send(net, t, r) or r.status


cdef inline int recv_now(Net *net, Connection *c, Comm *t, Request *r) noexcept nogil:
    cdef Header header
    cdef const char *bytes = NULL
    cdef size_t charge = sizeof(Header) + r.nbytes
    cdef size_t nbytes = 0, in_ring = charge
    cdef int _look, looks = 1 + net.spins // (SPINS // LOOKS)     # few if spinning does not pay
    if (c.header_read != 0 or c.to_read != 0 or c.over != 0
            or find_arrived(&net.queues, t.comm_id, c.peer, r.tag) != NULL
            or find_posted(&net.queues, t.comm_id, c.peer, r.tag) != NULL):
        return PENDING
    for _look in range(looks):
        bytes = readable_bytes(net.shm, &c.inbound, &nbytes)
        if bytes != NULL or nbytes != 0:
            break
        pause()
    if bytes == NULL or nbytes < sizeof(Header):
        return PENDING
    memcpy(&header, bytes, sizeof(Header))      # the writer could change it during the checks
    if not is_for(&header, c, t, r) or (header.flags == 0 and nbytes < charge):
        return PENDING
    bytes += sizeof(Header)
    if header.flags != 0:
        in_ring = sizeof(Header)
        bytes = find_cell(c, &header)
        if bytes == NULL:
            return PENDING      # the general path ends the connection
        own_cell(c, &header)
    take_credit(c, &header)
    memcpy(r.ptr, bytes, r.nbytes)
    advance_read(net.shm, net.shm.place[c.peer], &c.inbound, in_ring)
    c.received += charge
    return_credit(c, charge)
    r.source = r.peer
    r.status = OK
    return OK


cdef inline bint is_for(const Header *h, const Connection *c, const Comm *t,
                        const Request *r) noexcept nogil:
    """Return whether this is a whole message that fits the receive."""
    return (is_from_peer(c, h) and h.kind == EAGER
            and h.comm_id == t.comm_id and h.tag == r.tag and h.nbytes == r.nbytes
            and has_room(c, h) and memcmp(&h.fingerprint, r.expected, sizeof(Fingerprint)) == 0)

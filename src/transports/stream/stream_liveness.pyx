"""Which peers have left or died, and which receives can therefore never complete."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport ANY_SOURCE, NOTICE_TAG, PEER_LOST, Request, Comm, has_left
from cydist._native.matching cimport (
    Item, any_posted, free_item, group_rank, note_farewell, remove,
)
from cydist._native.stream cimport BABBLED, DIED, Net
from cydist._native.stream_send cimport complete, control, lane_of
from cydist._native.wire cimport FAREWELL


cdef inline bint said_farewell(const Net *net, const Comm *t, int rank,
                               uint64_t tag) noexcept nogil:
    """Return whether it has left the group, and all its messages on the lane of this tag are here.

    False for control messages, which use any lane: only lost links end the receive of those.
    """
    return has_left(t, rank) and tag != NOTICE_TAG and t.farewells[rank] >> lane_of(net, tag) & 1


cdef bint nobody_left(const Net *net, const Comm *t, uint64_t tag) noexcept nogil:
    cdef int i
    for i in range(t.size):
        if (t.peers[i] != net.rank and net.lost[t.peers[i]] == 0
                and not said_farewell(net, t, i, tag)):
            return False
    return t.size > 1


cdef int who_died(const Net *net, const Comm *t) noexcept nogil:
    cdef int i
    for i in range(t.size):
        if net.lost[t.peers[i]] == DIED or net.lost[t.peers[i]] == BABBLED:
            return i
    return -1


cdef bint hopeless(const Net *net, const Comm *t, int peer, uint64_t tag) noexcept nogil:
    cdef int rank
    if peer == ANY_SOURCE:
        return (tag != NOTICE_TAG and who_died(net, t) >= 0) or nobody_left(net, t, tag)
    if net.lost[peer] != 0:
        return True
    if not has_left(t, t.rank) or peer == net.rank:     # no member has left
        return False
    rank = group_rank(t, peer)
    return rank >= 0 and said_farewell(net, t, rank, tag)


ctypedef struct Peer:
    const Net *net
    int rank


cdef bint waits_in_vain(const Item *item, const void *context) noexcept nogil:
    return hopeless((<const Peer *>context).net, item.view, item.peer, item.tag)


cdef void hear_farewell(Net *net, int peer, uint64_t context, uint64_t lanes) noexcept nogil:
    if note_farewell(&net.queues, context, peer, lanes) != NULL:
        end_hopeless(net, peer)


cdef void say_farewell(Net *net, int peer, uint64_t context) noexcept nogil:
    cdef int lane
    for lane in range(net.lanes):
        if net.connections[peer * net.lanes + lane] != NULL:
            control(net.connections[peer * net.lanes + lane], FAREWELL, 0, context, 0)


cdef void end_hopeless(Net *net, int peer) noexcept nogil:
    cdef Peer lost = Peer(net, peer)
    cdef Item *item
    cdef Request *r
    while True:
        item = any_posted(&net.queues, waits_in_vain, &lost)
        if item == NULL:
            break
        r = item.request
        r.source = group_rank(item.view, peer)
        remove(item)
        free_item(item)
        complete(net, r, PEER_LOST)

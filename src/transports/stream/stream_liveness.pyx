"""Departed and dead peers, and the receives that can therefore never complete."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport (
    ANY_SOURCE, CONTROL_TAG, NO_MEMORY, PEER_LOST, Request, Comm, farewell_of, has_left,
)
from cydist._native.matching cimport (
    Item, any_posted, free_item, group_rank, note_farewell, remove,
)
from cydist._native.stream cimport LEFT, STARVED, Net
from cydist._native.stream_send cimport finish_request, send_control, lane_of
from cydist._native.wire cimport FAREWELL


cdef inline bint has_departed(const Net *net, const Comm *t, int rank,
                              uint64_t tag) noexcept nogil:
    """Return whether it has left the group, and all its messages on the lane of this tag are here.

    False for control messages, which use any lane: only lost links end the receive of those.
    """
    return tag != CONTROL_TAG and farewell_of(t, rank) >> lane_of(net, tag) & 1


cdef int status_of_loss(const Net *net, int peer) noexcept nogil:
    return NO_MEMORY if net.lost[peer] == STARVED else PEER_LOST


cdef bint all_have_left(const Net *net, const Comm *t, uint64_t tag) noexcept nogil:
    cdef int i
    for i in range(t.size):
        if (t.peers[i] != net.rank and net.lost[t.peers[i]] == 0
                and not has_departed(net, t, i, tag)):
            return False
    return t.size > 1


cdef int dead_member(const Net *net, const Comm *t) noexcept nogil:
    cdef int i
    for i in range(t.size):
        if net.lost[t.peers[i]] != 0 and net.lost[t.peers[i]] != LEFT:
            return i
    return -1


cdef bint cannot_arrive(const Net *net, const Comm *t, int peer, uint64_t tag) noexcept nogil:
    cdef int rank
    if peer == ANY_SOURCE:
        return (tag != CONTROL_TAG and dead_member(net, t) >= 0) or all_have_left(net, t, tag)
    if net.lost[peer] != 0:
        return True
    if not has_left(t, t.rank) or peer == net.rank:     # no member has left
        return False
    rank = group_rank(t, peer)
    return rank >= 0 and has_departed(net, t, rank, tag)


ctypedef struct Peer:
    const Net *net
    int rank


cdef bint is_stranded(const Item *item, const void *argument) noexcept nogil:
    return cannot_arrive((<const Peer *>argument).net, item.comm, item.peer, item.tag)


cdef void on_farewell(Net *net, int peer, uint64_t comm_id, uint64_t lanes) noexcept nogil:
    if note_farewell(&net.queues, comm_id, peer, lanes) != NULL:
        end_stranded(net, peer)


cdef void send_farewell(Net *net, int peer, uint64_t comm_id) noexcept nogil:
    cdef int lane
    for lane in range(net.lanes):
        if net.connections[peer * net.lanes + lane] != NULL:
            send_control(net.connections[peer * net.lanes + lane], FAREWELL, 0, comm_id, 0)


cdef void end_stranded(Net *net, int peer) noexcept nogil:
    cdef Peer lost = Peer(net, peer)
    cdef Item *item
    cdef Request *r
    while True:
        item = any_posted(&net.queues, is_stranded, &lost)
        if item == NULL:
            break
        r = item.request
        r.source = group_rank(item.comm, peer)
        remove(item)
        free_item(item)
        finish_request(net, r, status_of_loss(net, peer))

"""Lanes, of a long all_reduce: stretch by stretch, so that the hosts talk all the time.

    all_reduce  bytes between hosts per host 2 n (h-1)/h

Each stretch of the array is reduced inside the hosts, goes round a ring of hosts in the lanes of
lanes.pyx, and is shared inside the hosts. While one is between hosts, the ranks of each reduce the
next, and share an earlier one. Each lane cuts its block of a stretch into a part for each host. A
part's sum grows round the ring, h-1 hops, and the whole sum is passed on for as many.

Hop 0 of a stretch, hop 1 of the one before, and so on are under way at once:

    reduce here   stretch 0    1     2     3
    hop 0                   0     1     2     3
    hop 1                         0     1     2    3          of two hosts
    share here                          0     1    2    3

All ranks take these steps in the same order, and each posts all of a row before it waits for any.
So a rank waits only for what others have posted a row earlier, and none wait in a circle.

Partial sums of hosts travel in the array's dtype, and round once for each host.
"""
from libc.stdlib cimport calloc, malloc

from cydist._native.abi cimport (
    NO_MEMORY, OK, SEQUENCE_SHIFT, Block, Call, Comm, Request, patiently,
)
from cydist._native.hierarchy cimport (
    PART_BYTES, Hosts, call_like, free_scratch, gather_here, hosts_of, is_host_sum, lane_blocks,
    member_at, reduce_here,
)
from cydist._native.pipeline cimport (
    block_of, combine, complete, conclude, post_recv, post_send, segment_of, segment_size,
    segments_in, withdraw,
)


ctypedef struct Stretches:
    size_t nbytes               # of each; the last may be shorter
    size_t count
    int hops                    # 2 (h-1)
    int before, after           # the lane's ranks on those hosts; -1: in no lane
    size_t segment              # bytes of a message, at most
    size_t per_hop              # messages of a part, at most
    size_t room                 # bytes of a part, at most
    Request *receives           # [hop][message]
    Request *sends
    char *arriving              # [hop] sums over the hosts before
    bint alone                  # what the rank contributes is its host's sum


cdef size_t stretch_bytes(const Comm *t, const Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = c.inputs[0].nbytes, unit = c.op.itemsize
    # One for each lane and host: with less a ring of many hosts is not worth its steps, as in the
    # rows of the tuning table.
    cdef size_t parts = <size_t>h.lanes * <size_t>h.count
    # So that all hops of all stretches have less than half of the steps.
    cdef size_t least = nbytes // (1 << (SEQUENCE_SHIFT - 2)) * 2 * <size_t>h.count
    return max(max(<size_t>STRETCH_BYTES, parts * PART_BYTES), least) // unit * unit


cdef bint has_stretches(const Comm *t, const Call *c) noexcept nogil:
    return c.inputs[0].nbytes > stretch_bytes(t, c)


cdef int all_reduce_in_stretches(Comm *t, Call *c) noexcept nogil:
    cdef Stretches s
    cdef size_t i
    cdef int status, k
    patiently(c)
    status = open_stretches(t, c, &s)
    for i in range(s.count + s.hops):
        if status == OK and i < s.count:
            status = reduce_stretch(t, c, &s, i)
        for k in range(s.hops - 1, -1, -1):
            if status == OK and <size_t>k < i <= <size_t>k + s.count:
                status = take_hop(t, c, &s, i - 1 - k, k)
            if status == OK and k + 1 < s.hops and <size_t>k < i <= <size_t>k + s.count:
                status = post_hop(t, c, &s, i - 1 - k, k + 1)
        if status == OK and i < s.count:
            status = post_hop(t, c, &s, i, 0)
        if status == OK and i >= <size_t>s.hops:
            status = share_stretch(t, c, &s, i - s.hops)
    return close_stretches(t, c, &s, status)


cdef int open_stretches(Comm *t, Call *c, Stretches *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, hop
    cdef Block stretch
    cdef Call between = call_like(c)
    s.nbytes = stretch_bytes(t, c)
    s.count = segments_in(c.inputs[0].nbytes, s.nbytes)
    s.hops = 2 * (h.count - 1)
    s.before = s.after = -1
    s.alone = is_host_sum(h, c.op)
    if place < h.lanes:
        s.before = member_at(h, (h.here - 1 + h.count) % h.count, place)
        s.after = member_at(h, (h.here + 1) % h.count, place)
    stretch = block_of(Block(NULL, s.nbytes), 0, h.lanes, c.op.itemsize)
    s.room = block_of(stretch, 0, h.count, c.op.itemsize).nbytes
    between.segment_bytes = h.across.segment_bytes
    # Four times: hops there and back, and messages that are not full.
    s.segment = segment_size(&between, c.op.itemsize, c.inputs[0].nbytes // h.lanes, 4)
    s.per_hop = segments_in(s.room, s.segment)
    hop = s.hops if s.before >= 0 else 0
    s.receives = <Request *>calloc(2 * hop * s.per_hop + 1, sizeof(Request))
    s.sends = s.receives + hop * s.per_hop
    s.arriving = <char *>malloc(hop // 2 * s.room + 1)
    return OK if s.receives != NULL and s.arriving != NULL else NO_MEMORY


cdef int close_stretches(Comm *t, Call *c, Stretches *s, int status) noexcept nogil:
    cdef int count = <int>(s.hops * s.per_hop) if s.before >= 0 else 0
    if s.receives != NULL:
        if status == OK:
            status = complete(t, c, s.sends, count)
        if status != OK:
            withdraw(t, s.receives, 2 * count)
    free_scratch(t, c, s.receives)
    free_scratch(t, c, s.arriving)
    return status


cdef int reduce_stretch(Comm *t, Call *c, Stretches *s, size_t i) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block given = segment_of(c.inputs[0], i, s.nbytes), own
    cdef Block *blocks
    cdef int status = NO_MEMORY
    if s.alone:
        return OK
    blocks = lane_blocks(h, given, c.op.itemsize)
    if blocks != NULL:
        own = blocks[h.local.comm.rank]
        own.ptr = c.outputs[0].ptr + (own.ptr - c.inputs[0].ptr)
        status = reduce_here(t, c, blocks, &own, given.nbytes)
    free_scratch(t, c, blocks)
    return status


cdef int share_stretch(Comm *t, Call *c, Stretches *s, size_t i) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block sum = segment_of(c.outputs[0], i, s.nbytes)
    cdef Block *blocks = lane_blocks(h, sum, c.op.itemsize)
    cdef int status = NO_MEMORY
    if blocks != NULL:
        status = gather_here(t, c, &blocks[h.local.comm.rank], blocks, sum.nbytes)
    free_scratch(t, c, blocks)
    return status


cdef Block part_at(const Comm *t, const Call *c, const Stretches *s, Block whole, size_t i,
                   int hop) noexcept nogil:
    """Return the part of an array that is sent in a hop of a stretch; that of hop + 1 arrives."""
    cdef Hosts *h = hosts_of(t)
    cdef Block lane = block_of(segment_of(whole, i, s.nbytes), h.local.comm.rank, h.lanes,
                               c.op.itemsize)
    return block_of(lane, (h.here + 2 * h.count - 1 - hop) % h.count, h.count, c.op.itemsize)


cdef int post_hop(Comm *t, Call *c, Stretches *s, size_t i, int hop) noexcept nogil:
    cdef size_t step = (i * s.hops + hop) * s.per_hop, first = hop * s.per_hop, k
    cdef Block out, into, some
    cdef int status
    if s.before < 0:
        return OK
    into = part_at(t, c, s, c.outputs[0], i, hop + 1)
    if hop < s.hops // 2:
        into.ptr = s.arriving + hop * s.room
    for k in range(segments_in(into.nbytes, s.segment)):
        some = segment_of(into, k, s.segment)
        post_recv(t, c, &s.receives[first + k], some.ptr, some.nbytes, s.before, <int>(step + k))
    status = complete(t, c, &s.sends[first], <int>s.per_hop)    # of the stretch before
    if status != OK:
        return status
    out = part_at(t, c, s, c.inputs[0] if s.alone and hop == 0 else c.outputs[0], i, hop)
    for k in range(segments_in(out.nbytes, s.segment)):
        some = segment_of(out, k, s.segment)
        post_send(t, c, &s.sends[first + k], some.ptr, some.nbytes, s.after, <int>(step + k))
    return OK


cdef int take_hop(Comm *t, Call *c, Stretches *s, size_t i, int hop) noexcept nogil:
    """Wait for what a hop brings, and add what this host has to it."""
    cdef Block sum, own
    cdef int status
    if s.before < 0:
        return OK
    status = complete(t, c, &s.receives[hop * s.per_hop], <int>s.per_hop)
    if status == OK and hop < s.hops // 2:
        sum = part_at(t, c, s, c.outputs[0], i, hop + 1)
        own = part_at(t, c, s, c.inputs[0] if s.alone else c.outputs[0], i, hop + 1)
        combine(c.op, sum.ptr, s.arriving + hop * s.room, own.ptr, sum.nbytes)
        if hop + 1 == s.hops // 2:
            conclude(c.op, sum.ptr, sum.nbytes)
    return status

"""Binomial tree: p ranks in ceil(log2 p) rounds.

    broadcast   bytes sent per rank up to n log2 p (the root)
    reduce      bytes sent per rank n

n is the array. It is cut into segments that follow each other down and up the tree. Best for short
messages, and for medium ones at many ranks.

Ranks are numbered from the root: v = (rank - root) mod p. The parent of v is v without its lowest
bit, so the subtree of v is the range of ranks from v on. So reduce combines neighbouring ranges,
lower with higher. If the reduction does not commute, rank 0 is the top of the tree, so that the
ranges are in rank order. Rank 0 then sends the result to the root. Partial sums travel in the
array's dtype: 16- and 8-bit floats round once per level.

Three ranks, root 0 (reduce reverses the arrows):

    v=0 --> v=1         round 0: 0 -> 2
     |                  round 1: 0 -> 1
     +----> v=2

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    BROADCAST, NO_MEMORY, OK, RANK_BITS, REDUCE, Block, Call, Comm, Request,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    EARLY_BYTES, Pipe, combine, complete, conclude, contribute, exchange, release_buffer,
    pipe_close, pipe_open, pipe_post, pipe_take, post_recv, post_send, segment_of, segment_size,
    segments_in, withdraw,
)


ctypedef struct TreePosition:   # of this rank in the tree
    int parent                  # group rank; -1 at the root
    int children[RANK_BITS]     # group ranks: v+1, v+2, v+4, ...
    int children_count
    int v                       # number in the tree


cdef void find_place(Comm *t, int root, TreePosition *place) noexcept nogil:
    cdef int p = t.size
    cdef int bit = 1
    place.v = (t.rank - root + p) % p
    place.parent = -1
    place.children_count = 0
    while bit < p and place.v & bit == 0:
        if place.v + bit < p:
            place.children[place.children_count] = (place.v + bit + root) % p
            place.children_count += 1
        bit <<= 1
    if place.v != 0:
        place.parent = ((place.v - bit) + root) % p


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    cdef Block whole = c.outputs[0], part
    cdef size_t segment = segment_size(c, 1, whole.nbytes, 1)
    cdef size_t total = segments_in(whole.nbytes, segment)
    cdef Request sends[RANK_BITS]
    cdef int child, posted = 0
    cdef size_t i, taken
    cdef TreePosition place
    cdef Pipe pipe              # of the segments from the parent
    find_place(t, c.root, &place)
    pipe_open(&pipe, c, total)
    for i in range(total + pipe.depth - 1):
        part = segment_of(whole, i, segment)
        if i < total and pipe_post(t, c, &pipe, i, part, -1, part, place.parent) != OK:
            break
        if i + 1 < pipe.depth:
            continue
        taken = i + 1 - pipe.depth
        if pipe_take(t, c, &pipe, taken) != OK:
            break
        pipe.status = complete(t, c, sends, posted)
        if pipe.status != OK:
            break
        part = segment_of(whole, taken, segment)
        # Serve the child with the largest subtree first.
        for posted in range(place.children_count):
            child = place.children[place.children_count - 1 - posted]
            post_send(t, c, &sends[posted], part.ptr, part.nbytes, child, <int>taken)
        posted = place.children_count
    if pipe.status == OK:
        pipe.status = complete(t, c, sends, posted)
    else:
        withdraw(t, sends, posted)
    return pipe_close(t, c, &pipe)


cdef bint has_siblings(Comm *t, const TreePosition *place) noexcept nogil:
    """Return whether the parent of this rank has other children, and so more to do than this."""
    # The first child of u is u+1. The next one is u+2, if u has neither of the two lowest bits.
    return place.v & 1 == 0 or (place.v & 2 == 0 and place.v + 1 < t.size)


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    cdef int top = c.root if c.op.commutative else 0
    cdef Block own = c.inputs[0], result
    cdef size_t segment = segment_size(c, c.op.itemsize, own.nbytes, 1)
    cdef int last_step = <int>segments_in(own.nbytes, segment)
    cdef TreePosition place
    cdef char *buffers
    cdef int status
    find_place(t, top, &place)
    # Two banks of segments: one from each child and one of this rank. Also the result, if rank 0
    # collects for another root.
    buffers = <char *>malloc(
        2 * segment * (place.children_count + 1) + (0 if t.rank == c.root else own.nbytes)
    )
    if buffers == NULL:
        return NO_MEMORY
    result.nbytes = own.nbytes
    result.ptr = buffers + 2 * segment * (place.children_count + 1)
    if t.rank == c.root:
        result = c.outputs[0]
    status = climb(t, c, &place, segment, result, buffers)
    c.most_early = 0
    if status == OK and top != c.root:
        status = exchange(t, c, last_step,
                          result.ptr, own.nbytes, c.root if t.rank == top else -1,
                          result.ptr, own.nbytes, top if t.rank == c.root else -1)
    release_buffer(t, buffers)
    return status


cdef int climb(Comm *t, Call *c, const TreePosition *place, size_t segment, Block result,
               char *buffers) noexcept nogil:
    """Reduce towards the top of the tree, which gets `result`."""
    cdef size_t total = segments_in(result.nbytes, segment)
    cdef int children = place.children_count
    cdef char *sums = buffers + 2 * segment * children
    cdef Request receives[2 * RANK_BITS]
    cdef Request sends[2]
    cdef Block part, own
    cdef size_t i, bank
    cdef int child, status = OK
    c.most_early = EARLY_BYTES if place.children_count == 0 and has_siblings(t, place) else 0
    for child in range(2 * RANK_BITS):
        receives[child].status = OK
    sends[0].status = OK
    sends[1].status = OK
    for i in range(total + 1):
        if i < total:
            bank = i % 2 * children
            part = segment_of(result, i, segment)
            for child in range(children):
                post_recv(t, c, &receives[bank + child], buffers + (bank + child) * segment,
                          part.nbytes, place.children[child], <int>i)
        if i > 0:
            bank = (i - 1) % 2
            status = complete(t, c, &receives[bank * children], children)
            if status == OK:
                status = complete(t, c, &sends[bank], 1)
            if status != OK:
                break
            part = segment_of(result, i - 1, segment)
            own = segment_of(c.inputs[0], i - 1, segment)
            if place.parent >= 0:
                part.ptr = sums + bank * segment
            if place.parent >= 0 and children == 0 and c.op.prepare == NULL:
                part = own
            else:
                add_up(c, own, part, buffers + bank * children * segment, children, segment)
            if place.parent >= 0:
                post_send(t, c, &sends[bank], part.ptr, part.nbytes, place.parent, <int>i - 1)
            else:
                conclude(c.op, part.ptr, part.nbytes)
    if status == OK:
        status = complete(t, c, sends, 2)
    if status != OK:
        withdraw(t, receives, 2 * RANK_BITS)
        withdraw(t, sends, 2)
    return status


cdef inline void add_up(Call *c, Block own, Block acc, const char *arrived, int children,
                        size_t segment) noexcept nogil:
    """Compute acc = own op the results of v+1, v+2, v+4, ...: ranges of ranks, in order."""
    cdef int child
    if children == 0 or c.op.prepare != NULL:
        contribute(c.op, acc.ptr, own.ptr, own.nbytes)
        own.ptr = acc.ptr
    for child in range(children):
        combine(c.op, acc.ptr, acc.ptr if child > 0 else own.ptr, arrived + child * segment,
                acc.nbytes)


implement(b"tree", BROADCAST, broadcast)
implement(b"tree", REDUCE, reduce)

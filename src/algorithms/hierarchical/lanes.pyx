"""Lanes: all ranks of a host talk to the other hosts at once, each about its part of the data.

    all_reduce      bytes between hosts per host 2 n (h-1)/h
    reduce          n
    broadcast       n for each host that one sends to
    all_gather      what its ranks give, to each other host
    reduce_scatter  what goes to the other hosts, reduced here

h is the number of hosts: each byte crosses once for each host that needs it, wherever the ranks
are placed. Lane k is the k-th rank of every host; an array is cut into as many blocks as the host
with the fewest ranks has, and further ranks have none. Lists of blocks need no cutting: a rank
sends its own block, and the ranks of the receiving host share the receiving. Best for long calls,
where one rank alone does not keep the wire busy. Partial sums of hosts travel in the array's dtype;
reductions must commute.

Two hosts of two ranks, all_reduce of blocks 0 and 1:

    host 0   rank 0 a0 a1    ab0  .      abcd0  .        abcd0 abcd1
             rank 1 b0 b1     .  ab1       .  abcd1      abcd0 abcd1
    host 1   rank 2 c0 c1    cd0  .      abcd0  .        abcd0 abcd1
             rank 3 d0 d1     .  cd1       .  abcd1      abcd0 abcd1
                       reduce_scatter  all_reduce   all_gather
                       inside a host   of a lane    inside a host

Source: J. L. Traeff and S. Hunold, "Decomposing MPI collectives for exploiting multi-lane
communication", IEEE CLUSTER 2020.
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, BROADCAST, GATHER, NO_MEMORY, OK, REDUCE, REDUCE_SCATTER, Block, Call,
    Comm, Reduction, Request, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    Hosts, across_at, call_like, free_scratch, hosts_of, member_at, members_on, prepared, run_part,
    unfinished,
)
from cydist._native.pipeline cimport (
    block_of, complete, largest, post_recv, post_send, withdraw,
)


# One array, cut into a block for each lane

cdef Block *cut(const Hosts *h, Block whole, size_t unit) noexcept nogil:
    """Return the blocks of this host's ranks, empty for those that are in no lane."""
    cdef Block *blocks = <Block *>malloc(h.local.comm.size * sizeof(Block))
    cdef int k
    if blocks != NULL:
        for k in range(h.local.comm.size):
            blocks[k] = Block(whole.ptr + whole.nbytes, 0)
            if k < h.lanes:
                blocks[k] = block_of(whole, k, h.lanes, unit)
    return blocks


cdef int reduce_here(Comm *t, Call *c, const Block *given, Block *own,
                     size_t nbytes) noexcept nogil:
    """Reduce this host's contributions to a block on each of its ranks."""
    cdef Hosts *h = hosts_of(t)
    cdef Reduction partial = unfinished(c.op)
    cdef Call inner = call_like(c)
    inner.op = &partial
    inner.inputs = given
    inner.outputs = own
    return run_part(&h.local, c, &inner, REDUCE_SCATTER, nbytes)


cdef int gather_here(Comm *t, Call *c, const Block *own, const Block *blocks,
                     size_t nbytes) noexcept nogil:
    """Give this rank's block to all ranks of this host, and get theirs."""
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    inner.inputs = own
    inner.outputs = blocks
    return run_part(&h.local, c, &inner, ALL_GATHER, nbytes)


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef size_t nbytes = c.inputs[0].nbytes
    cdef Block *given = cut(h, c.inputs[0], c.op.itemsize)
    cdef Block *sums = cut(h, c.outputs[0], c.op.itemsize)
    cdef Reduction finishing = prepared(c.op)
    cdef Call inner
    cdef int status = NO_MEMORY
    patiently(c)
    if given != NULL and sums != NULL:
        status = reduce_here(t, c, given, &sums[place], nbytes)
    if status == OK and place < h.lanes:
        inner = call_like(c)
        inner.op = &finishing
        inner.inputs = &sums[place]
        inner.outputs = &sums[place]
        status = run_part(across_at(t, place, -1), c, &inner, ALL_REDUCE, sums[0].nbytes)
    if status == OK:
        status = gather_here(t, c, &sums[place], sums, nbytes)
    free_scratch(t, c, given)
    free_scratch(t, c, sums)
    return status


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef bint here = h.host[c.root] == h.here
    cdef Block *blocks = cut(h, c.outputs[0], 1)
    cdef Call inner
    cdef int status = OK
    if blocks == NULL:
        return NO_MEMORY
    patiently(c)
    if here:
        inner = call_like(c)
        inner.root = h.place[c.root]
        inner.inputs = c.outputs
        inner.outputs = c.outputs
        status = run_part(&h.local, c, &inner, BROADCAST, c.outputs[0].nbytes)
    if status == OK and place < h.lanes:
        inner = call_like(c)
        inner.root = h.host[c.root]
        inner.inputs = &blocks[place]
        inner.outputs = &blocks[place]
        status = run_part(across_at(t, place, -1), c, &inner, BROADCAST, blocks[0].nbytes)
    if status == OK and not here:
        status = gather_here(t, c, &blocks[place], blocks, c.outputs[0].nbytes)
    free_scratch(t, c, blocks)
    return status


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef Block *given = cut(h, c.inputs[0], c.op.itemsize)
    cdef char *memory = NULL
    cdef Block own
    cdef int status = NO_MEMORY
    patiently(c)
    if given != NULL:
        own.nbytes = given[place].nbytes
        memory = <char *>malloc(own.nbytes)
        own.ptr = memory
    if memory != NULL:
        status = reduce_here(t, c, given, &own, c.inputs[0].nbytes)
    if status == OK:
        status = reduce_lanes(t, c, &own, given[0].nbytes)
    free_scratch(t, c, given)
    free_scratch(t, c, memory)
    return status


cdef int reduce_lanes(Comm *t, Call *c, Block *own, size_t longest) noexcept nogil:
    """Reduce the blocks of the hosts' sums to the root's host, and gather them at the root."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef bint here = h.host[c.root] == h.here
    cdef Reduction finishing = prepared(c.op)
    cdef Block *blocks = NULL
    cdef Call inner
    cdef int status = OK
    if place < h.lanes:
        inner = call_like(c)
        inner.op = &finishing
        inner.root = h.host[c.root]
        inner.inputs = own
        inner.outputs = own if here else NULL
        status = run_part(across_at(t, place, -1), c, &inner, REDUCE, longest)
    if status != OK or not here:
        return status
    inner = call_like(c)
    inner.root = h.place[c.root]
    inner.inputs = own
    if t.rank == c.root:
        blocks = cut(h, c.outputs[0], c.op.itemsize)
        inner.outputs = blocks
        if blocks == NULL:
            return NO_MEMORY
    status = run_part(&h.local, c, &inner, GATHER, 0)
    free_scratch(t, c, blocks)
    return status


# A block for each rank

cdef int receiver(const Hosts *h, int host, int place) noexcept nogil:
    """Return the rank of `host` that deals with the block of a rank at this place of another."""
    return member_at(h, host, place % members_on(h, host))


cdef size_t blocks_on(const Hosts *h, int host, int round_, int size, const Block *blocks,
                      Block *some) noexcept nogil:
    """Return the bytes of the blocks that `size` ranks deal with at once, after `round_` rounds."""
    cdef size_t nbytes = 0
    cdef int k, place
    for k in range(size):
        place = round_ * size + k
        some[k] = blocks[member_at(h, host, min(place, members_on(h, host) - 1))]
        if place >= members_on(h, host):
            some[k].nbytes = 0
        nbytes += some[k].nbytes
    return nbytes


cdef inline int rounds_of(const Hosts *h, int host) noexcept nogil:
    """Return how many rounds of blocks of a host the ranks of this one deal with."""
    return (members_on(h, host) - 1) // h.local.comm.size + 1


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Request *requests = <Request *>malloc((t.size + h.count) * sizeof(Request))
    cdef Block *some = <Block *>malloc(h.local.comm.size * sizeof(Block))
    cdef int status = NO_MEMORY
    patiently(c)
    if requests != NULL and some != NULL:
        status = gather_blocks(t, c, requests, some)
    free_scratch(t, c, requests)
    free_scratch(t, c, some)
    return status


cdef int gather_blocks(Comm *t, Call *c, Request *requests, Block *some) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, size = h.local.comm.size
    cdef int d, host, k, rank, posted = 0, status
    cdef size_t nbytes
    for d in range(1, h.count):
        host = (h.here - d + h.count) % h.count
        for k in range(rounds_of(h, host)):
            if k * size + place < members_on(h, host):
                rank = member_at(h, host, k * size + place)
                post_recv(t, c, &requests[posted], c.outputs[rank].ptr, c.outputs[rank].nbytes,
                          rank, 0)
                posted += 1
    for d in range(1, h.count):
        rank = receiver(h, (h.here + d) % h.count, place)
        post_send(t, c, &requests[posted], c.inputs[0].ptr, c.inputs[0].nbytes, rank, 0)
        posted += 1
    # While these move, the ranks of this host exchange their own.
    nbytes = blocks_on(h, h.here, 0, size, c.outputs, some)
    status = gather_here(t, c, c.inputs, some, nbytes)
    if status != OK:
        withdraw(t, requests, posted)
        return status
    status = complete(t, c, requests, posted)
    for d in range(1, h.count):
        host = (h.here - d + h.count) % h.count
        for k in range(rounds_of(h, host)):
            if status == OK:
                nbytes = blocks_on(h, host, k, size, c.outputs, some)
                status = gather_here(t, c, &some[place], some, nbytes)
    return status


ctypedef struct Partials:       # of the hosts' sums of blocks, while they move
    Request *requests
    int posted
    Block *some
    const void **sources        # the partial sums of this rank's block, host after host
    char *arriving              # those of the other hosts
    char *leaving               # what this rank sends to them
    size_t room                 # bytes for each of these, and at `own` for this host's
    char *own


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int size = h.local.comm.size
    cdef int sent = t.size // size + h.count    # at most
    cdef Partials s
    cdef char *memory
    cdef int status
    s.room = largest(c.inputs, t.size)
    s.posted = 0
    s.requests = <Request *>malloc((sent + h.count) * sizeof(Request) + size * sizeof(Block)
                                   + h.count * sizeof(void *))
    memory = <char *>malloc((sent + h.count) * s.room)
    if s.requests == NULL or memory == NULL:
        free_scratch(t, c, s.requests)
        free_scratch(t, c, memory)
        return NO_MEMORY
    s.some = <Block *>(s.requests + sent + h.count)
    s.sources = <const void **>(s.some + size)
    s.own = memory
    s.arriving = s.own + s.room
    s.leaving = s.arriving + (h.count - 1) * s.room
    patiently(c)
    status = exchange_partials(t, c, &s)
    if status != OK:
        withdraw(t, s.requests, s.posted)
    free_scratch(t, c, memory)
    free_scratch(t, c, s.requests)
    return status


cdef int exchange_partials(Comm *t, Call *c, Partials *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, size = h.local.comm.size
    cdef size_t mine = c.inputs[t.rank].nbytes
    cdef Reduction finishing = prepared(c.op)
    cdef Block sum
    cdef int d, host, k, status = OK
    for d in range(1, h.count):
        host = (h.here - d + h.count) % h.count
        s.sources[host] = s.arriving + (d - 1) * s.room
        post_recv(t, c, &s.requests[s.posted], <void *>s.sources[host], mine,
                  receiver(h, host, place), 0)
        s.posted += 1
    sum.ptr = s.leaving
    for d in range(1, h.count):
        host = (h.here + d) % h.count
        for k in range(rounds_of(h, host)):
            if status == OK:
                status = reduce_blocks(t, c, s, host, k, &sum)
            if status == OK and k * size + place < members_on(h, host):
                post_send(t, c, &s.requests[s.posted], sum.ptr, sum.nbytes,
                          member_at(h, host, k * size + place), 0)
                s.posted += 1
                sum.ptr += s.room
    sum.ptr = s.own
    if status == OK:
        status = reduce_blocks(t, c, s, h.here, 0, &sum)
    s.sources[h.here] = s.own
    if status == OK:
        status = complete(t, c, s.requests, s.posted)
    if status == OK:
        finishing.combine_all(&finishing, c.outputs[0].ptr, s.sources, h.count,
                              mine // c.op.itemsize)
    return status


cdef int reduce_blocks(Comm *t, Call *c, Partials *s, int host, int round_,
                       Block *sum) noexcept nogil:
    """Reduce some blocks of a host's ranks here, this rank's share of them into `sum`."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = blocks_on(h, host, round_, h.local.comm.size, c.inputs, s.some)
    sum.nbytes = s.some[h.local.comm.rank].nbytes
    return reduce_here(t, c, s.some, sum, nbytes)


implement(b"lanes", BROADCAST, broadcast)
implement(b"lanes", ALL_REDUCE, all_reduce)
implement(b"lanes", REDUCE, reduce)
implement(b"lanes", ALL_GATHER, all_gather)
implement(b"lanes", REDUCE_SCATTER, reduce_scatter)

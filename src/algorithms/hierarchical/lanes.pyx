"""Lanes: all ranks of a host talk to the other hosts at once, each about its part of the data.

    all_reduce      bytes between hosts per host 2 n (h-1)/h
    reduce          n
    broadcast       n for each host that one sends to
    all_gather      what its ranks give, to each other host
    reduce_scatter  what goes to the other hosts, reduced here

h is the number of hosts: each byte crosses once for each host that needs it, wherever the ranks
are placed. Lane k is the k-th rank of every host; there are as many as the host with the fewest
ranks has, and further ranks are in none. An array is cut into a block for each lane. Of lists, lane
k carries the blocks of every host's ranks k, k + lanes, and so on, from host to host in a ring: a
block of all_gather is passed on as it is, and a sum of reduce_scatter grows at each host. Best for
long calls, where one rank alone does not keep the wire busy. Partial sums of hosts travel in the
array's dtype, and round once for each host; reductions must commute.

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
    block_of, combine, complete, conclude, copy, largest, post_recv, post_send, withdraw,
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


# A block for each rank. The hosts form a ring: a lane gets the blocks of all other hosts from the
# host before, and sends to the next one. So a rank has two connections to other hosts, however many
# there are. A message's step is the rank whose block it carries.

ctypedef struct Ring:           # the messages of a lane
    int before, after           # its ranks on the hosts before and after this one; -1: in no lane
    Request *receives           # as many as there are blocks that this lane gets
    Request *sends
    int expected, arrived, sent


cdef void open_ring(const Hosts *h, Ring *ring, Request *requests, int most) noexcept nogil:
    cdef int place = h.local.comm.rank
    ring.before = ring.after = -1
    if place < h.lanes:
        ring.before = member_at(h, host_before(h, 1), place)
        ring.after = member_at(h, (h.here + 1) % h.count, place)
    ring.receives = requests
    ring.sends = requests + most
    ring.expected = ring.arrived = ring.sent = 0


cdef inline int host_before(const Hosts *h, int distance) noexcept nogil:
    return (h.here - distance + h.count) % h.count


cdef inline int rounds_of(const Hosts *h, int host) noexcept nogil:
    """Return how many rounds the lanes need for the blocks of a host, one for each lane."""
    return (members_on(h, host) - 1) // h.lanes + 1


cdef inline int member_in_round(const Hosts *h, int host, int round_) noexcept nogil:
    """Return the rank whose block this rank's lane carries in a round; -1: none."""
    cdef int place = round_ * h.lanes + h.local.comm.rank
    if h.local.comm.rank >= h.lanes or place >= members_on(h, host):
        return -1
    return member_at(h, host, place)


cdef inline int most_blocks(const Comm *t) noexcept nogil:
    """Return how many blocks a lane carries, at most."""
    return t.size // hosts_of(t).lanes + hosts_of(t).count


cdef void pass_on(Comm *t, Call *c, Ring *ring, const void *ptr, size_t nbytes,
                  int rank) noexcept nogil:
    post_send(t, c, &ring.sends[ring.sent], ptr, nbytes, ring.after, rank)
    ring.sent += 1


cdef void expect(Comm *t, Call *c, Ring *ring, void *ptr, size_t nbytes, int rank) noexcept nogil:
    post_recv(t, c, &ring.receives[ring.expected], ptr, nbytes, ring.before, rank)
    ring.expected += 1


cdef int close_ring(Comm *t, Call *c, Ring *ring, int status) noexcept nogil:
    """Wait for the sends; after a failure withdraw everything."""
    if status == OK:
        status = complete(t, c, ring.sends, ring.sent)
    if status != OK:
        withdraw(t, ring.receives, ring.expected)
        withdraw(t, ring.sends, ring.sent)
    return status


cdef size_t blocks_on(const Hosts *h, int host, int round_, int at_once, const Block *blocks,
                      Block *some) noexcept nogil:
    """Return the bytes of the blocks that ranks here deal with in a round, one for each of the
    first `at_once`. The other ranks' are empty."""
    cdef size_t nbytes = 0
    cdef int k, place
    for k in range(h.local.comm.size):
        place = round_ * at_once + k
        some[k] = blocks[member_at(h, host, min(place, members_on(h, host) - 1))]
        if k >= at_once or place >= members_on(h, host):
            some[k].nbytes = 0
        nbytes += some[k].nbytes
    return nbytes


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int most = most_blocks(t)
    cdef Request *requests = <Request *>malloc(2 * most * sizeof(Request))
    cdef Block *some = <Block *>malloc(h.local.comm.size * sizeof(Block))
    cdef Ring ring
    cdef int status = NO_MEMORY
    patiently(c)
    if requests != NULL and some != NULL:
        open_ring(h, &ring, requests, most)
        status = close_ring(t, c, &ring, gather_blocks(t, c, &ring, some))
    free_scratch(t, c, requests)
    free_scratch(t, c, some)
    return status


cdef int gather_blocks(Comm *t, Call *c, Ring *ring, Block *some) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int d, k, rank, host, status
    cdef size_t nbytes
    for d in range(1, h.count):
        host = host_before(h, d)
        for k in range(rounds_of(h, host)):
            rank = member_in_round(h, host, k)
            if rank >= 0:
                expect(t, c, ring, c.outputs[rank].ptr, c.outputs[rank].nbytes, rank)
    if ring.after >= 0:
        pass_on(t, c, ring, c.inputs[0].ptr, c.inputs[0].nbytes, t.rank)
    # While these move, the ranks of this host exchange their own.
    nbytes = blocks_on(h, h.here, 0, h.local.comm.size, c.outputs, some)
    status = gather_here(t, c, c.inputs, some, nbytes)
    for k in range(1, rounds_of(h, h.here) if status == OK else 0):
        rank = member_in_round(h, h.here, k)    # which is in no lane itself
        if rank >= 0:
            pass_on(t, c, ring, c.outputs[rank].ptr, c.outputs[rank].nbytes, rank)
    for d in range(1, h.count):
        if status == OK:
            status = take_blocks(t, c, ring, some, host_before(h, d))
    return status


cdef int take_blocks(Comm *t, Call *c, Ring *ring, Block *some, int host) noexcept nogil:
    """Take the blocks of a host, pass them on unless the next host has them, and give them to the
    ranks of this one meanwhile."""
    cdef Hosts *h = hosts_of(t)
    cdef int k, rank, status = OK
    cdef size_t nbytes
    for k in range(rounds_of(h, host)):
        rank = member_in_round(h, host, k)
        if rank >= 0 and status == OK:
            status = complete(t, c, &ring.receives[ring.arrived], 1)
            ring.arrived += 1
        if rank >= 0 and status == OK and host != (h.here + 1) % h.count:
            pass_on(t, c, ring, c.outputs[rank].ptr, c.outputs[rank].nbytes, rank)
        if status == OK:
            nbytes = blocks_on(h, host, k, h.lanes, c.outputs, some)
            status = gather_here(t, c, &some[h.local.comm.rank], some, nbytes)
    return status


ctypedef struct Partials:       # of the hosts' sums of blocks, while they move
    Ring ring
    Block *some
    char *arriving              # sums over the hosts before
    char *leaving               # the same with this host's contributions
    char *own                   # the results of a round, if some ranks are in no lane
    size_t room                 # bytes for each


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int most = most_blocks(t) if h.local.comm.rank < h.lanes else 1
    cdef Partials s
    cdef Request *requests = <Request *>malloc(
        2 * most * sizeof(Request) + h.local.comm.size * sizeof(Block))
    cdef int status = NO_MEMORY
    s.room = largest(c.inputs, t.size)
    s.arriving = <char *>malloc((2 * most + h.lanes) * s.room + 1)
    patiently(c)
    if requests != NULL and s.arriving != NULL:
        open_ring(h, &s.ring, requests, most)
        s.some = <Block *>(requests + 2 * most)
        s.leaving = s.arriving + most * s.room
        s.own = s.leaving + most * s.room
        status = close_ring(t, c, &s.ring, reduce_round(t, c, &s))
    free_scratch(t, c, s.arriving)
    free_scratch(t, c, requests)
    return status


cdef int reduce_round(Comm *t, Call *c, Partials *s) noexcept nogil:
    """Begin with the blocks of the host before, whose sums go the whole way round, and end with
    those of this host."""
    cdef Hosts *h = hosts_of(t)
    cdef int d, k, rank, host, status = OK
    for d in range(2, h.count + 1):
        host = host_before(h, d)
        for k in range(rounds_of(h, host)):
            rank = member_in_round(h, host, k)
            if rank >= 0:
                expect(t, c, &s.ring, s.arriving + s.ring.expected * s.room,
                       c.inputs[rank].nbytes, rank)
    for d in range(1, h.count + 1):
        host = host_before(h, d)
        for k in range(rounds_of(h, host)):
            if status == OK:
                status = add_blocks(t, c, s, host, k)
    return status


cdef int add_blocks(Comm *t, Call *c, Partials *s, int host, int round_) noexcept nogil:
    """Reduce some blocks of a host's ranks here, add the sums over the hosts before, and pass them
    on to the next host, or to the ranks here if they are theirs."""
    cdef Hosts *h = hosts_of(t)
    cdef int rank = member_in_round(h, host, round_)
    cdef size_t nbytes = blocks_on(h, host, round_, h.lanes, c.inputs, s.some)
    cdef Block sum = Block(s.leaving + s.ring.sent * s.room, s.some[h.local.comm.rank].nbytes)
    cdef bint handed_out = host == h.here and h.lanes < h.local.comm.size
    cdef char *into = c.outputs[0].ptr if host == h.here and not handed_out else sum.ptr
    cdef int status = reduce_here(t, c, s.some, &sum, nbytes)
    if status == OK and rank >= 0 and host != host_before(h, 1):
        status = complete(t, c, &s.ring.receives[s.ring.arrived], 1)
        if status == OK:
            combine(c.op, into, s.arriving + s.ring.arrived * s.room, sum.ptr, sum.nbytes)
        s.ring.arrived += 1
    if status != OK:
        return status
    if rank >= 0 and host != h.here:
        pass_on(t, c, &s.ring, sum.ptr, sum.nbytes, rank)
    elif rank >= 0:
        conclude(c.op, into, sum.nbytes)
    return hand_out(t, c, s, round_, sum, nbytes) if handed_out else OK


cdef int hand_out(Comm *t, Call *c, Partials *s, int round_, Block result,
                  size_t nbytes) noexcept nogil:
    """Give the lanes' results of a round to the ranks here, of which some are in no lane. `some`
    has the sizes."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, k, status
    for k in range(h.lanes):
        s.some[k].ptr = s.own + k * s.room
    status = gather_here(t, c, &result, s.some, nbytes)
    if status == OK and place // h.lanes == round_:
        copy(c.outputs[0].ptr, s.some[place % h.lanes].ptr, c.outputs[0].nbytes)
    return status


implement(b"lanes", BROADCAST, broadcast)
implement(b"lanes", ALL_REDUCE, all_reduce)
implement(b"lanes", REDUCE, reduce)
implement(b"lanes", ALL_GATHER, all_gather)
implement(b"lanes", REDUCE_SCATTER, reduce_scatter)

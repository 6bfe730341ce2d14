"""Ordered: whole contributions are reduced in rank order, with one rounding.

    all_reduce "ordered"            steps 1     bytes sent per rank n (p-1)
    all_reduce "ordered_scatter"    steps 2     bytes sent per rank 2 n (p-1)/p
    reduce                          steps 1     bytes sent per rank n
    reduce_scatter                  steps 1     bytes sent per rank n (p-1)/p
    scan, exscan                    steps 1     bytes sent per rank up to n (p-1)

n is the whole array (reduce_scatter: all blocks). Every rank sends each contribution directly to
the rank that needs it. That rank collects p segments and reduces them in one pass: 16- and 8-bit
floats accumulate in float32 and round once, and the bits equal those of "flat" on any transport. So
these serve CYDIST_DETERMINISTIC, reductions that do not commute, and very short messages.
"ordered_scatter" does this with one block per rank, then sends the results to all; it
is the one for long messages. A rank needs memory for 2 p segments, at most about 64 MiB.

Three ranks, all_reduce (reduce: only the root collects):

    rank 0   a -> 1, 2      a + b + c
    rank 1   b -> 0, 2      a + b + c
    rank 2   c -> 0, 1      a + b + c

Source: the reproducible mode of Intel MPI and the linear algorithms of Open MPI's "basic"
component work this way; no paper.
"""
from libc.stdlib cimport free, malloc

from cydist._native.abi cimport (
    ALL_REDUCE, EXSCAN, NO_MEMORY, OK, REDUCE, REDUCE_SCATTER, SCAN, Block, Call, Comm, Request,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    EARLY_BYTES, Pipe, block_of, complete, contribute, largest, release_buffer, pipe_close,
    pipe_open, pipe_post, pipe_take, post_recv, post_send, segment_of, segment_size, segments_in,
    withdraw,
)


cdef enum:
    SPACE_BYTES = 16777216      # of each of the up to four banks of p segments


ctypedef struct PairExchange:   # which ranks get which contributions, and what this rank collects
    const Block *given          # contributions; the one for rank r is given[r * stride]
    int stride                  # 1, or 0: the same for all
    int to_first, to_end        # sent to these ranks (not to this one)
    Block result
    int from_first, from_end    # and reduced from these; none: nothing is collected
    size_t longest              # bytes of the longest block, the same on every rank


ctypedef struct ExchangeBuffers:  # the memory of one meeting
    size_t segment
    char *arrived               # two banks of p segments
    char *prepared              # two banks of p segments; NULL if nothing is prepared
    Request *requests           # two banks of 2 p
    int posted[2]
    const void **sources


cdef size_t exchange_segment(const Comm *t, const Call *c, size_t longest) noexcept nogil:
    cdef size_t unit = c.op.itemsize
    cdef size_t segment = segment_size(c, unit, longest, 1)
    cdef size_t most = SPACE_BYTES // <size_t>t.size // unit * unit
    if segment > most:
        segment = most if most > 0 else unit
    return segment


cdef int run_exchange(Comm *t, Call *c, const PairExchange *m) noexcept nogil:
    cdef size_t p = t.size
    cdef ExchangeBuffers buffers
    cdef size_t bank_bytes, fixed_bytes
    cdef char *memory
    cdef int status
    buffers.segment = exchange_segment(t, c, m.longest)
    bank_bytes = p * buffers.segment
    fixed_bytes = 4 * p * sizeof(Request) + p * sizeof(void *)
    memory = <char *>malloc(fixed_bytes + (2 if c.op.prepare == NULL else 4) * bank_bytes)
    if memory == NULL:
        return NO_MEMORY
    buffers.requests = <Request *>memory
    buffers.sources = <const void **>(buffers.requests + 4 * p)
    buffers.arrived = memory + fixed_bytes
    buffers.prepared = NULL if c.op.prepare == NULL else buffers.arrived + 2 * bank_bytes
    status = all_segments(t, c, m, &buffers)
    release_buffer(t, memory)
    return status


cdef int all_segments(Comm *t, Call *c, const PairExchange *m,
                      ExchangeBuffers *buffers) noexcept nogil:
    """Reduce segment i - 1 while segment i travels."""
    cdef size_t total = segments_in(m.longest, buffers.segment)
    cdef size_t i
    cdef int bank, status = OK
    buffers.posted[0] = 0
    buffers.posted[1] = 0
    for i in range(total + 1):
        if i < total:
            post_segment(t, c, m, buffers, i)
        if i > 0:
            bank = (i - 1) % 2
            status = complete(t, c, buffers.requests + bank * 2 * t.size, buffers.posted[bank])
            if status != OK:
                break
            reduce_segment(t, c, m, buffers, i - 1)
    if status != OK:
        for bank in range(2):
            withdraw(t, buffers.requests + bank * 2 * t.size, buffers.posted[bank])
    return status


cdef Block outgoing(Comm *t, Call *c, const PairExchange *m, ExchangeBuffers *buffers, size_t i,
                    int peer) noexcept nogil:
    """Return segment i of this rank's contribution to a peer, in memory that post_segment fills."""
    cdef Block part = segment_of(m.given[peer * m.stride], i, buffers.segment)
    if buffers.prepared != NULL:
        part.ptr = buffers.prepared + (i % 2 * t.size + peer * m.stride) * buffers.segment
    return part


cdef void post_segment(Comm *t, Call *c, const PairExchange *m, ExchangeBuffers *buffers,
                       size_t i) noexcept nogil:
    cdef Request *requests = buffers.requests + i % 2 * 2 * t.size
    cdef Block part
    cdef int peer, posted = 0
    for peer in range(m.from_first, m.from_end):
        if peer != t.rank:
            part = segment_of(m.result, i, buffers.segment)
            post_recv(t, c, &requests[posted],
                      buffers.arrived + (i % 2 * t.size + peer) * buffers.segment,
                      part.nbytes, peer, <int>i)
            posted += 1
    if buffers.prepared != NULL:
        for peer in range(t.size if m.stride > 0 else 1):
            part = segment_of(m.given[peer * m.stride], i, buffers.segment)
            contribute(c.op, outgoing(t, c, m, buffers, i, peer).ptr, part.ptr, part.nbytes)
    for peer in range(m.to_first, m.to_end):
        if peer != t.rank:
            part = outgoing(t, c, m, buffers, i, peer)
            post_send(t, c, &requests[posted], part.ptr, part.nbytes, peer, <int>i)
            posted += 1
    buffers.posted[i % 2] = posted


cdef void reduce_segment(Comm *t, Call *c, const PairExchange *m, ExchangeBuffers *buffers,
                         size_t i) noexcept nogil:
    cdef Block result
    cdef int peer
    if m.from_first == m.from_end:
        return
    for peer in range(m.from_first, m.from_end):
        if peer == t.rank:
            buffers.sources[peer] = outgoing(t, c, m, buffers, i, peer).ptr
        else:
            buffers.sources[peer] = buffers.arrived + (i % 2 * t.size + peer) * buffers.segment
    result = segment_of(m.result, i, buffers.segment)
    c.op.combine_all(c.op, result.ptr, buffers.sources + m.from_first, m.from_end - m.from_first,
                     result.nbytes // c.op.itemsize)


cdef PairExchange exchange_with_all(Comm *t, const Block *given, int stride, Block result,
                                    size_t longest) noexcept nogil:
    cdef PairExchange m
    m.given = given
    m.stride = stride
    m.to_first = 0
    m.to_end = t.size
    m.result = result
    m.from_first = 0
    m.from_end = t.size
    m.longest = longest
    return m


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef PairExchange m = exchange_with_all(t, c.inputs, 0, c.outputs[0], c.inputs[0].nbytes)
    return run_exchange(t, c, &m)


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    cdef Block result = c.inputs[0]
    cdef PairExchange m
    if t.rank == c.root:
        result = c.outputs[0]
    m = exchange_with_all(t, c.inputs, 0, result, result.nbytes)
    if t.rank == c.root:
        m.to_end = 0
    else:
        m.to_first = c.root
        m.to_end = c.root + 1
        m.from_end = 0
        c.most_early = EARLY_BYTES if t.size > 2 else 0   # the root takes what several ranks send
    return run_exchange(t, c, &m)


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef PairExchange m = exchange_with_all(t, c.inputs, 1, c.outputs[0], largest(c.inputs, t.size))
    return run_exchange(t, c, &m)


cdef int scan(Comm *t, Call *c) noexcept nogil:
    cdef PairExchange m = exchange_with_all(t, c.inputs, 0, c.outputs[0], c.inputs[0].nbytes)
    m.to_first = t.rank + 1
    m.from_end = t.rank + 1
    c.most_early = EARLY_BYTES if t.size > 2 else 0   # the later a rank is, the more it has to take
    return run_exchange(t, c, &m)


cdef int exscan(Comm *t, Call *c) noexcept nogil:
    cdef PairExchange m = exchange_with_all(t, c.inputs, 0, c.outputs[0], c.inputs[0].nbytes)
    m.to_first = t.rank + 1
    m.from_end = t.rank
    c.most_early = EARLY_BYTES if t.size > 2 else 0
    return run_exchange(t, c, &m)


cdef int ordered_scatter(Comm *t, Call *c) noexcept nogil:
    cdef Block *blocks = <Block *>malloc(t.size * sizeof(Block))
    cdef Block result
    cdef PairExchange m
    cdef int r, status
    if blocks == NULL:
        return NO_MEMORY
    for r in range(t.size):
        blocks[r] = block_of(c.inputs[0], r, t.size, c.op.itemsize)
    result = block_of(c.outputs[0], t.rank, t.size, c.op.itemsize)
    m = exchange_with_all(t, blocks, 1, result, blocks[0].nbytes)
    status = run_exchange(t, c, &m)
    free(blocks)
    if status == OK:
        status = scatter_back(t, c, segments_in(m.longest, exchange_segment(t, c, m.longest)))
    return status


cdef int scatter_back(Comm *t, Call *c, size_t first_step) noexcept nogil:
    """Send this rank's block of the result to all ranks, and receive theirs."""
    cdef size_t p = t.size
    cdef size_t i, to, source
    cdef Pipe pipe
    pipe_open(&pipe, c, p - 1)
    pipe.first_step = first_step
    for i in range(p + pipe.depth - 2):
        to = (t.rank + 1 + i) % p
        source = (t.rank + 2 * p - 1 - i) % p
        if i + 1 < p and pipe_post(
            t, c, &pipe, i, block_of(c.outputs[0], t.rank, p, c.op.itemsize), <int>to,
            block_of(c.outputs[0], source, p, c.op.itemsize), <int>source,
        ) != OK:
            break
        if i + 1 >= pipe.depth and pipe_take(t, c, &pipe, i + 1 - pipe.depth) != OK:
            break
    return pipe_close(t, c, &pipe)


implement(b"ordered", ALL_REDUCE, all_reduce)
implement(b"ordered_scatter", ALL_REDUCE, ordered_scatter)
implement(b"ordered", REDUCE, reduce)
implement(b"ordered", REDUCE_SCATTER, reduce_scatter)
implement(b"ordered", SCAN, scan)
implement(b"ordered", EXSCAN, exscan)

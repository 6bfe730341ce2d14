"""Direct: ranks read and write each other's arrays in place: one copy, not two.

    broadcast       steps 2     bytes moved per rank n (p-1)/p: the others pull, the root pushes
    all_gather      2           n, of which n/p are its own
    gather          1 or 3      n/p: all ranks push; the root its own
    scatter         1 or 3      n/p: all ranks pull; the root its own
    all_to_all      2           n, of which n/p are its own
    reduce_scatter  2           n (p-1)/p
    all_reduce      2           2 n (p-1)/p
    reduce          2           n
    scan, exscan    2           2 n (p-1)/p

n is the whole array, or all blocks together. In step 1 every rank publishes where its blocks are.
The others may access them from then until step 2, which is the end of the call. In the reductions
rank r pulls all ranks' block r segment by segment into free slots of its window. It reduces them
there in rank order in one pass, and pushes the result while it is in the cache: 8- and 16-bit
floats accumulate in float32 and round once, and reductions need not commute. The bits are those of
"flat". A scan does so for each rank's sum, the last rank's first, which needs the most
contributions. With in-place arrays a sum may then overwrite its rank's contribution.
Arrays in memory that the ranks share (cydist.empty_shared) are read and written in place.
A gather or scatter exchanges sizes in a step before, which carries short blocks; see
size_exchange.pyx.

Three ranks, all_reduce in place (B1 is the sum of block 1):

    rank 0 [a0 a1 a2]    rank 1 pulls a1 and c1, makes B1      [A0 B1 C2]
    rank 1 [b0 b1 b2]    and pushes it over a1 and c1, which   [A0 B1 C2]
    rank 2 [c0 c1 c2]    no other rank reads                   [A0 B1 C2]

Where that is impossible, `exposure` runs the call's fallback instead. The same algorithms under the
name "adaptive" also do that if it is faster, which one rank measures as the job runs.

Source: H. Jin, S. Sur, L. Chai and D. Panda, "LiMIC: support for high-performance MPI intra-node
communication on Linux cluster", ICPP 2005.
"""
from libc.stdlib cimport free, malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EXSCAN, GATHER, NO_MEMORY, OK, PAGE, REDUCE,
    REDUCE_SCATTER, SCAN, SCATTER, Block, Call, Comm,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    block_of, block_start, copy, copy_block, segment_of, segments_in,
)
from cydist._native.exposure cimport (
    Access, begin_access_to_all, check_size, end_access_to_all, fetch, check_call, parts_of, pull,
    push, run_exposed, published_blocks, mapped_address,
)
from cydist._native.size_exchange cimport BlockMove, exchange_sizes, gather_move, scatter_move
from cydist._native.window_protocol cimport FEW_RANKS, part_bytes, slot_of


cdef enum:
    CACHED_BYTES = 4096         # fits into the nearest cache from several ranks
    ACCESS_PIECES = 256         # in a row: a megabyte between two checks of the clock


# Blocks that move

cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.outputs, 1, NULL, 0, NULL, broadcast_body)


cdef int broadcast_body(Comm *t, Call *c, Access *a) noexcept nogil:
    """Move equal amounts on all ranks: the root pushes the end of the array, the others pull the
    rest."""
    cdef Block head = c.outputs[0]
    cdef Block tail
    cdef int k, peer, status = OK
    tail.nbytes = head.nbytes // t.size // PAGE * PAGE
    head.nbytes -= tail.nbytes
    tail.ptr = head.ptr + head.nbytes
    if t.rank != c.root:
        return pull(t, c, a, c.root, head, published_blocks(t, c.root, a)[0].ptr)
    for k in range(1, t.size):
        peer = (t.rank + k) % t.size
        if status == OK:
            status = push(t, c, a, peer, published_blocks(t, peer, a)[0].ptr + head.nbytes, tail)
    return status


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, 1, NULL, 0, keep_input, all_gather_body)


cdef int all_gather_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef int k, peer, status = OK
    for k in range(1, t.size):
        peer = (t.rank + k) % t.size
        if status == OK:
            status = pull(t, c, a, peer, c.outputs[peer], published_blocks(t, peer, a)[0].ptr)
    return status


cdef void keep_input(Comm *t, Call *c) noexcept nogil:
    copy_block(c.outputs[t.rank].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)


cdef int gather(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = gather_move(t, c)
    cdef bint over
    cdef int status = exchange_sizes(t, c, &m, &over)
    if status != OK or over:
        return status
    if t.rank == c.root:
        return run_exposed(t, c, c.outputs, t.size, NULL, 0, keep_input, gather_body)
    return run_exposed(t, c, c.inputs, 1, NULL, 0, NULL, gather_body)


cdef int gather_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef char *place = published_blocks(t, c.root, a)[t.rank].ptr
    return push(t, c, a, c.root, place, c.inputs[0]) if t.rank != c.root else OK


cdef int scatter(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = scatter_move(t, c)
    cdef bint over
    cdef int status = exchange_sizes(t, c, &m, &over)
    if status != OK or over:
        return status
    if t.rank == c.root:
        return run_exposed(t, c, c.inputs, t.size, NULL, 0, keep_share, scatter_body)
    return run_exposed(t, c, c.outputs, 1, NULL, 0, NULL, scatter_body)


cdef int scatter_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef char *place = published_blocks(t, c.root, a)[t.rank].ptr
    return pull(t, c, a, c.root, c.outputs[0], place) if t.rank != c.root else OK


cdef void keep_share(Comm *t, Call *c) noexcept nogil:
    copy_block(c.outputs[0].ptr, c.inputs[t.rank].ptr, c.outputs[0].nbytes)


cdef int all_to_all(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, t.size, NULL, 0, keep_block, all_to_all_body)


cdef int all_to_all_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef const Block *given
    cdef int k, peer, status
    for k in range(1, t.size):
        peer = (t.rank + k) % t.size
        given = published_blocks(t, peer, a) + t.rank
        status = check_size(t, c, a, peer, given.nbytes, c.outputs[peer].nbytes)
        if status == OK:
            status = pull(t, c, a, peer, c.outputs[peer], given.ptr)
        if status != OK:
            return status
    return OK


cdef void keep_block(Comm *t, Call *c) noexcept nogil:
    copy_block(c.outputs[t.rank].ptr, c.inputs[t.rank].ptr, c.outputs[t.rank].nbytes)


# Blocks that are reduced

ctypedef struct BlockSum:       # one block, to which every rank exposes a contribution
    Block own
    int entry                   # which of a peer's blocks holds its contribution,
    size_t offset               # and how many bytes into it
    char *result                # destination of the sum; NULL: none on this rank
    int to_entry                # which of a peer's blocks gets it, at the same offset
    int to_first, to_end        # peers that get the sum


cdef inline const void **two_for_each(const Comm *t, const void **few) noexcept nogil:
    """Return room for two pointers per rank, to be freed unless it is `few`; NULL: no memory."""
    return few if t.size <= FEW_RANKS else <const void **>malloc(2 * t.size * sizeof(void *))


cdef inline char *scratch_of(Comm *t, const Access *a, int peer, size_t part) noexcept nogil:
    """Return where the `part` bytes that are pulled from a peer go."""
    cdef int k = (peer - t.rank - 1 + t.size) % t.size
    return slot_of(t, t.rank, a.step + 1 + k % a.scratch) + k // a.scratch * part


cdef int reduce_block(Comm *t, Call *c, Access *a, const BlockSum *m) noexcept nogil:
    cdef size_t part = part_bytes(t, c, parts_of(t, a.scratch), c.op.itemsize)
    cdef const void *few[2 * FEW_RANKS]
    cdef const void **sources = two_for_each(t, few)
    cdef char **results
    cdef size_t i
    cdef int status = OK
    if sources == NULL:
        return NO_MEMORY
    results = <char **>(sources + t.size)
    if lies_here(t, a, m, sources, results):
        status = reduce_here(t, c, a, m, sources, results)
    else:
        for i in range(segments_in(m.own.nbytes, part)):
            if status == OK:
                status = reduce_segment(
                    t, c, a, m, segment_of(m.own, i, part), part, sources)
    if sources != few:
        free(sources)
    return status


cdef bint lies_here(Comm *t, const Access *a, const BlockSum *m, const void **sources,
                    char **results) noexcept nogil:
    """Find a sum's contributions and destinations; False: not all of them are mapped here."""
    cdef int peer
    for peer in range(t.size):
        results[peer] = m.result if peer == t.rank else NULL
        sources[peer] = mapped_address(t, peer,
                                       published_blocks(t, peer, a)[m.entry].ptr + m.offset,
                                       m.own.nbytes)
        if sources[peer] == NULL:
            return False
        if peer != t.rank and m.to_first <= peer < m.to_end:
            results[peer] = mapped_address(t, peer,
                                           published_blocks(t, peer, a)[m.to_entry].ptr + m.offset,
                                           m.own.nbytes)
            if results[peer] == NULL:
                return False
    return True


cdef int reduce_here(Comm *t, Call *c, Access *a, const BlockSum *m, const void **sources,
                     char **results) noexcept nogil:
    """Sum contributions that are mapped here, and copy the sum piece by piece from the cache.

    Every other call begins at the end, where the previous one stopped. If a program reduces the
    same array again, the caches still hold that part.
    """
    cdef size_t pieces = segments_in(m.own.nbytes, CACHED_BYTES)
    cdef size_t start, i, at = 0
    cdef bint backwards = c.fingerprint.seq % 2 != 0
    cdef int first = t.rank, status = OK
    while results[first] == NULL:       # only one rank's output gets the sum
        first = (first + 1) % t.size
    for i in range(pieces):
        if i % ACCESS_PIECES == 0:
            status = begin_access_to_all(t, c, a)
            if status != OK:
                return status
        start = (pieces - 1 - i if backwards else i) * CACHED_BYTES
        advance(t, <ptrdiff_t>(start - at), sources, results)
        at = start
        reduce_piece(t, c, min(<size_t>CACHED_BYTES, m.own.nbytes - at), first, sources, results)
        if i % ACCESS_PIECES == ACCESS_PIECES - 1 or i == pieces - 1:
            status = end_access_to_all(t, c, a)
            if status == OK:
                status = check_call(t, c, a, -1)
            if status != OK:
                return status
    return OK


cdef inline void advance(const Comm *t, ptrdiff_t nbytes, const void **sources,
                         char **results) noexcept nogil:
    cdef int peer
    for peer in range(t.size):
        sources[peer] = <const char *>sources[peer] + nbytes
        if results[peer] != NULL:
            results[peer] += nbytes


cdef inline void reduce_piece(Comm *t, Call *c, size_t nbytes, int first,
                              const void **sources, char **results) noexcept nogil:
    cdef int peer
    c.op.combine_all(c.op, results[first], sources, t.size, nbytes // c.op.itemsize)
    for peer in range(t.size):
        if results[peer] != NULL and peer != first:
            copy(results[peer], results[first], nbytes)


cdef int reduce_segment(Comm *t, Call *c, Access *a, const BlockSum *m, Block segment,
                        size_t part, const void **sources) noexcept nogil:
    cdef size_t start = segment.ptr - m.own.ptr
    cdef Block into
    cdef int k, peer, status
    into.nbytes = segment.nbytes
    sources[t.rank] = segment.ptr
    for k in range(t.size - 1):
        peer = (t.rank + 1 + k) % t.size
        into.ptr = scratch_of(t, a, peer, part)
        status = fetch(t, c, a, peer, into,
                       published_blocks(t, peer, a)[m.entry].ptr + m.offset + start,
                       &sources[peer])
        if status != OK:
            return status
    # A rank without a destination for the sum overwrites the segment that was pulled first.
    into.ptr = m.result + start if m.result != NULL else slot_of(t, t.rank, a.step + 1)
    status = begin_access_to_all(t, c, a)  # some sources may be in place
    if status == OK:
        c.op.combine_all(c.op, into.ptr, sources, t.size, into.nbytes // c.op.itemsize)
        status = end_access_to_all(t, c, a)
    if status != OK:
        return status
    for k in range(m.to_end - m.to_first):
        peer = m.to_first + (k + t.rank) % (m.to_end - m.to_first)
        if peer != t.rank:
            status = push(t, c, a, peer,
                          published_blocks(t, peer, a)[m.to_entry].ptr + m.offset + start, into)
            if status != OK:
                return status
    return OK


cdef BlockSum part_of_sum(Comm *t, Call *c, char *result) noexcept nogil:
    """Return block r of an array that all ranks reduce. A peer's table lists its input, then its
    output."""
    cdef BlockSum m
    m.own = block_of(c.inputs[0], t.rank, t.size, c.op.itemsize)
    m.entry = 0
    m.offset = m.own.ptr - c.inputs[0].ptr
    m.result = result + m.offset if result != NULL else NULL
    m.to_entry = 1
    m.to_first = 0
    m.to_end = t.size
    return m


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, 1, c.outputs, 1, NULL, all_reduce_body)


cdef int all_reduce_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef BlockSum m = part_of_sum(t, c, c.outputs[0].ptr)
    return reduce_block(t, c, a, &m)


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, 1, c.outputs, 1 if t.rank == c.root else 0, NULL,
                       reduce_body)


cdef int reduce_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef BlockSum m = part_of_sum(t, c, c.outputs[0].ptr if t.rank == c.root else NULL)
    m.to_first = c.root
    m.to_end = c.root + 1
    return reduce_block(t, c, a, &m)


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, t.size, NULL, 0, NULL, reduce_scatter_body)


cdef int reduce_scatter_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef BlockSum m
    m.own = c.inputs[t.rank]
    m.entry = t.rank
    m.offset = 0
    m.result = c.outputs[0].ptr
    m.to_entry = m.to_first = m.to_end = 0
    return reduce_block(t, c, a, &m)


# Scans

ctypedef struct PrefixSums:     # of one block: one sum for each rank
    Block own
    int own_too                 # 1: a rank's sum includes its own contribution; 0: it does not
    int lowest                  # the first rank that gets a sum


cdef int scan(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, 1, c.outputs, 1, keep_first, scan_body)


cdef void keep_first(Comm *t, Call *c) noexcept nogil:
    """Copy the first rank's contribution: it is its sum."""
    if t.rank == 0 and c.op.finish == NULL:
        copy_block(c.outputs[0].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)


cdef int scan_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef PrefixSums m
    m.own_too = 1
    m.lowest = 1 if c.op.finish == NULL else 0
    return sum_block(t, c, a, &m)


cdef int exscan(Comm *t, Call *c) noexcept nogil:
    return run_exposed(t, c, c.inputs, 1, c.outputs, 1, NULL, exscan_body)


cdef int exscan_body(Comm *t, Call *c, Access *a) noexcept nogil:
    cdef PrefixSums m
    m.own_too = 0
    m.lowest = 1
    return sum_block(t, c, a, &m)


cdef Block own_share(Comm *t, Call *c) noexcept nogil:
    """Return block r, whose sums this rank makes for all ranks. The first rank pushes all sums that
    it makes, the others keep one. So it gets 1 share less than the 2 p shares of each other."""
    cdef Block block = c.inputs[0]
    cdef size_t count = block.nbytes // c.op.itemsize
    cdef size_t each = 2 * t.size
    cdef size_t first = t.rank * each - (1 if t.rank > 0 else 0)
    cdef size_t start = block_start(first, t.size * each - 1, count)
    block.nbytes = block_start((t.rank + 1) * each - 1, t.size * each - 1, count)
    block.nbytes = (block.nbytes - start) * c.op.itemsize
    block.ptr += start * c.op.itemsize
    return block


cdef int sum_block(Comm *t, Call *c, Access *a, PrefixSums *m) noexcept nogil:
    cdef size_t part = part_bytes(t, c, parts_of(t, a.scratch), c.op.itemsize)
    cdef const void *few[2 * FEW_RANKS]
    cdef const void **sources = two_for_each(t, few)
    cdef size_t i
    cdef int status = OK
    if sources == NULL:
        return NO_MEMORY
    m.own = own_share(t, c)
    for i in range(segments_in(m.own.nbytes, part)):
        if status == OK:
            status = sum_segment(t, c, a, m, segment_of(m.own, i, part), part, sources)
    if sources != few:
        free(sources)
    return status


cdef int sum_segment(Comm *t, Call *c, Access *a, const PrefixSums *m, Block segment, size_t part,
                     const void **sources) noexcept nogil:
    cdef char **results = <char **>(sources + t.size)
    cdef size_t offset = segment.ptr - c.inputs[0].ptr
    cdef Block sum = segment
    cdef int k, peer, status
    sources[t.rank] = segment.ptr
    results[t.rank] = c.outputs[0].ptr + offset
    for k in range(1, t.size):
        peer = (t.rank + k) % t.size
        sum.ptr = scratch_of(t, a, peer, part)
        results[peer] = mapped_address(t, peer, published_blocks(t, peer, a)[1].ptr + offset,
                                       sum.nbytes)
        if results[peer] == NULL:
            results[peer] = sum.ptr     # no lower rank's sum includes its contribution
        if peer < t.size - 1 + m.own_too:
            status = fetch(t, c, a, peer, sum, published_blocks(t, peer, a)[0].ptr + offset,
                           &sources[peer])
            if status != OK:
                return status
    status = begin_access_to_all(t, c, a)  # some of these may be in place
    if status != OK:
        return status
    for peer in range(t.size - 1, m.lowest - 1, -1):
        c.op.combine_all(c.op, results[peer], sources, peer + m.own_too,
                         sum.nbytes // c.op.itemsize)
    status = end_access_to_all(t, c, a)
    for k in range(1, t.size):
        peer = (t.rank + k) % t.size
        if status == OK and peer >= m.lowest:
            sum.ptr = results[peer]
            status = push(t, c, a, peer, published_blocks(t, peer, a)[1].ptr + offset, sum)
    return status


cdef int implement_all(const char *name) except -1:
    implement(name, BROADCAST, broadcast)
    implement(name, ALL_GATHER, all_gather)
    implement(name, ALL_TO_ALL, all_to_all)
    implement(name, ALL_REDUCE, all_reduce)
    implement(name, REDUCE, reduce)
    implement(name, REDUCE_SCATTER, reduce_scatter)
    implement(name, SCAN, scan)
    return implement(name, EXSCAN, exscan)


implement(b"direct", GATHER, gather)
implement(b"direct", SCATTER, scatter)
implement_all(b"direct")
implement_all(b"adaptive")        # identical but for its trait, which `exposure` reads

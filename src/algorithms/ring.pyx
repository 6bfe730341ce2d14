"""Ring: every rank sends to the next rank and receives from the previous one, and to no other.

    all_reduce      steps 2(p-1)      bytes sent per rank 2 n (p-1)/p     commutative ops
    reduce_scatter  steps p-1         bytes sent per rank n (p-1)/p       commutative ops
    all_gather      steps p-1         bytes sent per rank n (p-1)/p
    broadcast       steps p-1         bytes sent per rank n (the last one: 0)

n is the whole array: all_reduce's, all blocks of reduce_scatter's input or all_gather's output.
Every step is cut into segments, and a rank forwards a segment as soon as it has arrived. So the
transfers of all steps overlap. Best for long messages; latency grows with p. Long blocks of
reduce_scatter go round in stretches, so that partial sums take 4 MiB at most.

The reductions run in ring order, starting at another rank for each block. Partial sums travel
in the array's dtype: 16- and 8-bit floats round once per step. Each block is completed by one
rank and then copied, so every rank has the same bits.

Three ranks, all_reduce of blocks a b c (a0 is rank 0's contribution to a):

    rank 0   a0 b0 c0      c0 -> 1      b2+b0 -> 1      A -> 1      C -> 1
    rank 1   a1 b1 c1      a1 -> 2      c0+c1 -> 2      B -> 2      A -> 2
    rank 2   a2 b2 c2      b2 -> 0      a1+a2 -> 0      C -> 0      B -> 0
             reduce_scatter: after two steps rank 0 owns A, 1 owns B, 2 owns C    all_gather

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009). The broadcast is the pipelined chain of
J. Watts and R. van de Geijn, "A pipelined broadcast for multidimensional meshes" (1995).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, BROADCAST, NO_MEMORY, OK, REDUCE_SCATTER, Block, Call, Comm, Reduction,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    PIPE_DEPTH, Pipe, block_of, chain_segment, combine, conclude, contribute, copy, largest,
    release_buffer, pipe_close, pipe_open, pipe_post, pipe_ready, pipe_take, segment_of,
    segment_size, segments_in,
)


cdef enum:
    STRETCH_BYTES = 2097152


ctypedef struct RingSegments:   # the layout of a ring's messages, by number
    size_t p
    size_t segment              # bytes
    # Messages in each step: segments in the longest block, or in the longest stretch of it.
    size_t per_step


# Step k of a ring: a rank sends block (rank - 1 - k), which it completed in the step before,
# and receives block (rank - 2 - k). After p-1 steps it holds block `rank`, complete. With the
# same formula the complete blocks then go round.
cdef inline size_t block_sent(Comm *t, size_t step) noexcept nogil:
    return (<size_t>t.rank + 2 * <size_t>t.size - 1 - step) % <size_t>t.size


cdef inline size_t block_received(Comm *t, size_t step) noexcept nogil:
    return block_sent(t, step + 1)


cdef inline int next_rank(Comm *t) noexcept nogil:
    return (t.rank + 1) % t.size


cdef inline int rank_before(Comm *t) noexcept nogil:
    return (t.rank - 1 + t.size) % t.size


cdef inline Block piece(Block whole, size_t block, const RingSegments *cut, size_t i,
                        size_t unit) noexcept nogil:
    """Return the part of a block of `whole`, cut into p blocks, that message i carries."""
    return segment_of(block_of(whole, block, cut.p, unit), i % cut.per_step, cut.segment)


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef Block own = c.inputs[0], result = c.outputs[0]
    cdef size_t longest = block_of(own, 0, t.size, op.itemsize).nbytes
    cdef RingSegments cut
    cdef char *arriving
    cdef int status
    if t.size == 1 or op.prepare != NULL:
        contribute(op, result.ptr, own.ptr, own.nbytes)
        own = result
    if t.size == 1:
        conclude(op, result.ptr, result.nbytes)
        return OK
    cut.p = t.size
    cut.segment = segment_size(c, op.itemsize, longest, 2 * cut.p)
    cut.per_step = segments_in(longest, cut.segment)
    arriving = <char *>malloc(PIPE_DEPTH * cut.segment)
    if arriving == NULL:
        return NO_MEMORY
    status = reduce_round(t, c, &cut, own, result, arriving)
    release_buffer(t, arriving)
    return status


cdef int reduce_round(Comm *t, Call *c, const RingSegments *cut, Block own, Block result,
                      char *arriving) noexcept nogil:
    """Run both rounds of all_reduce as one stream of messages."""
    cdef size_t unit = c.op.itemsize
    cdef size_t half = (cut.p - 1) * cut.per_step
    cdef size_t i, taken, block
    cdef Block out, into
    cdef Pipe pipe
    pipe_open(&pipe, c, cut.per_step)
    for i in range(2 * half + pipe.depth - 1):
        if i < 2 * half:
            out = piece(own if i < cut.per_step else result,
                        block_sent(t, i // cut.per_step), cut, i, unit)
            into = piece(result, block_received(t, i // cut.per_step), cut, i, unit)
            if i < half:
                into.ptr = arriving + i % pipe.depth * cut.segment
            if pipe_post(t, c, &pipe, i, out, next_rank(t), into, rank_before(t)) != OK:
                break
        if i + 1 >= pipe.depth:
            taken = i + 1 - pipe.depth
            if pipe_take(t, c, &pipe, taken) != OK:
                break
            if taken < half:
                block = block_received(t, taken // cut.per_step)
                into = piece(result, block, cut, taken, unit)
                combine(c.op, into.ptr, arriving + taken % pipe.depth * cut.segment,
                        piece(own, block, cut, taken, unit).ptr, into.nbytes)
                if taken >= half - cut.per_step:
                    conclude(c.op, into.ptr, into.nbytes)
    return pipe_close(t, c, &pipe)


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef size_t longest = largest(c.inputs, t.size)
    cdef size_t segments, stretches
    cdef RingSegments cut
    cdef char *partial
    cdef int status
    if t.size == 1:
        contribute(op, c.outputs[0].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
        conclude(op, c.outputs[0].ptr, c.outputs[0].nbytes)
        return OK
    cut.p = t.size
    cut.segment = segment_size(c, op.itemsize, longest, cut.p)
    segments = segments_in(longest, cut.segment)
    stretches = (segments - 1) // max(STRETCH_BYTES // cut.segment, <size_t>1) + 1
    cut.per_step = (segments - 1) // stretches + 1
    # Partial sums of two steps, and segments of this rank if contributions are prepared.
    partial = <char *>malloc((2 * cut.per_step + PIPE_DEPTH + 1) * cut.segment)
    if partial == NULL:
        return NO_MEMORY
    status = scatter_round(t, c, &cut, stretches, partial,
                           partial + 2 * cut.per_step * cut.segment)
    release_buffer(t, partial)
    return status


cdef inline size_t step_of(const RingSegments *cut, size_t i) noexcept nogil:
    return i // cut.per_step % (cut.p - 1)


cdef inline Block share(Block block, const RingSegments *cut, size_t i) noexcept nogil:
    """Return the part of a block that message i of reduce_scatter carries."""
    cdef size_t stretch = i // cut.per_step // (cut.p - 1)
    return segment_of(block, stretch * cut.per_step + i % cut.per_step, cut.segment)


cdef inline Block landing(Comm *t, Call *c, const RingSegments *cut, char *partial,
                          size_t i) noexcept nogil:
    """Return where message i lands: in the output if it completes this rank's block."""
    cdef size_t k = step_of(cut, i)
    cdef Block into = share(c.inputs[block_received(t, k)], cut, i)
    if k + 2 == cut.p and c.outputs[0].ptr != c.inputs[t.rank].ptr:
        return share(c.outputs[0], cut, i)
    into.ptr = partial + i % (2 * cut.per_step) * cut.segment
    return into


cdef int scatter_round(Comm *t, Call *c, const RingSegments *cut, size_t stretches, char *partial,
                       char *prepared) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef size_t total = stretches * (cut.p - 1) * cut.per_step
    cdef size_t i, taken
    cdef Block out, into, own
    cdef Pipe pipe
    pipe_open(&pipe, c, cut.per_step)
    for i in range(total + pipe.depth - 1):
        if i < total:
            if pipe_ready(t, c, &pipe, i) != OK:
                break
            if step_of(cut, i) > 0:
                out = landing(t, c, cut, partial, i - cut.per_step)
            else:
                out = share(c.inputs[block_sent(t, 0)], cut, i)
                if op.prepare != NULL:
                    own = out
                    out.ptr = prepared + i % pipe.depth * cut.segment
                    contribute(op, out.ptr, own.ptr, own.nbytes)
            into = landing(t, c, cut, partial, i)
            if pipe_post(t, c, &pipe, i, out, next_rank(t), into, rank_before(t)) != OK:
                break
        if i + 1 >= pipe.depth:
            taken = i + 1 - pipe.depth
            if pipe_take(t, c, &pipe, taken) != OK:
                break
            into = landing(t, c, cut, partial, taken)
            own = share(c.inputs[block_received(t, step_of(cut, taken))], cut, taken)
            if op.prepare != NULL:
                contribute(op, prepared + PIPE_DEPTH * cut.segment, own.ptr, own.nbytes)
                own.ptr = prepared + PIPE_DEPTH * cut.segment
            if step_of(cut, taken) + 2 < cut.p:
                combine(op, into.ptr, into.ptr, own.ptr, into.nbytes)
            else:
                out = share(c.outputs[0], cut, taken)
                combine(op, out.ptr, into.ptr, own.ptr, into.nbytes)
                conclude(op, out.ptr, out.nbytes)
    return pipe_close(t, c, &pipe)


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef size_t p = t.size
    cdef size_t longest = largest(c.outputs, t.size)
    cdef size_t segment = segment_size(c, 1, longest, p)
    cdef size_t per_step = segments_in(longest, segment)
    cdef size_t total = (p - 1) * per_step
    cdef size_t i
    cdef Pipe pipe
    copy(c.outputs[t.rank].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
    pipe_open(&pipe, c, per_step)
    for i in range(total + pipe.depth - 1):
        # One step ahead of reduce_scatter's numbering: the first block sent is this rank's.
        if i < total and pipe_post(
            t, c, &pipe, i,
            segment_of(c.outputs[block_sent(t, i // per_step + p - 1)], i % per_step, segment),
            next_rank(t),
            segment_of(c.outputs[block_received(t, i // per_step + p - 1)], i % per_step, segment),
            rank_before(t),
        ) != OK:
            break
        if i + 1 >= pipe.depth and pipe_take(t, c, &pipe, i + 1 - pipe.depth) != OK:
            break
    return pipe_close(t, c, &pipe)


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    """Send segments along a chain from the root to the rank before it; each rank forwards them."""
    cdef Block whole = c.outputs[0], part
    cdef size_t segment = chain_segment(c, 1, whole.nbytes)
    cdef size_t total = segments_in(whole.nbytes, segment)
    cdef int source = -1 if t.rank == c.root else rank_before(t)
    cdef int target = -1 if next_rank(t) == c.root else next_rank(t)
    cdef size_t i
    cdef Pipe pipe
    pipe_open(&pipe, c, total)
    for i in range(total + pipe.depth - 1):
        part = segment_of(whole, i, segment)
        if i < total and pipe_post(t, c, &pipe, i, part, -1, part, source) != OK:
            break
        if i + 1 >= pipe.depth:
            part = segment_of(whole, i + 1 - pipe.depth, segment)
            if pipe_take(t, c, &pipe, i + 1 - pipe.depth) != OK:
                break
            if pipe_post(t, c, &pipe, i + 1 - pipe.depth, part, target, part, -1) != OK:
                break
    return pipe_close(t, c, &pipe)


implement(b"ring", ALL_REDUCE, all_reduce)
implement(b"ring", REDUCE_SCATTER, reduce_scatter)
implement(b"ring", ALL_GATHER, all_gather)
implement(b"ring", BROADCAST, broadcast)

"""Chain: each rank adds its contribution to the sum of those before it, and sends that on.

    scan, exscan   steps p-1    bytes sent per rank n (the last one: 0)

The array is cut into segments that follow each other along the chain. So if it is long, all ranks
add and send at once. Best for long arrays; latency grows with p. What arrives is put before a
rank's own, so reductions need not commute. Partial sums travel in the array's dtype: 16- and 8-bit
floats round once per rank.

Three ranks, scan of segments 0 and 1:

    rank 0   a0         a1
    rank 1   b0   -> a0b0    -> a1b1
    rank 2   c0              -> a0b0c0    -> a1b1c1

Source: P. Sanders and J. L. Traeff, "Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI 2006.
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport EXSCAN, NO_MEMORY, OK, SCAN, Block, Call, Comm
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    PIPE_DEPTH, Pipe, chain_segment, combine, conclude, contribute, copy, pipe_close, pipe_open,
    pipe_post, pipe_take, release_buffer, segment_of, segments_in,
)


cdef int scan(Comm *t, Call *c) noexcept nogil:
    return run(t, c, True)


cdef int exscan(Comm *t, Call *c) noexcept nogil:
    return run(t, c, False)


cdef int run(Comm *t, Call *c, bint inclusive) noexcept nogil:
    cdef size_t nbytes = c.inputs[0].nbytes
    cdef size_t segment = chain_segment(c, c.op.itemsize, nbytes)
    cdef size_t total = segments_in(nbytes, segment), i, taken
    cdef int source = t.rank - 1, status
    cdef char *before = <char *>malloc(2 * PIPE_DEPTH * segment + 1)    # sums that arrive
    cdef char *through = before + PIPE_DEPTH * segment      # and with this rank's contribution
    cdef Block arriving
    cdef Pipe pipe
    if before == NULL:
        return NO_MEMORY
    pipe_open(&pipe, c, total)
    for i in range(total + pipe.depth - 1):
        arriving = segment_of(c.inputs[0], i, segment)
        arriving.ptr = before + i % pipe.depth * segment
        if i < total and pipe_post(t, c, &pipe, i, arriving, -1, arriving, source) != OK:
            break
        if i + 1 < pipe.depth:
            continue
        taken = i + 1 - pipe.depth
        if pipe_take(t, c, &pipe, taken) != OK:
            break
        if add_segment(t, c, &pipe, taken, segment, inclusive, before, through) != OK:
            break
    status = pipe_close(t, c, &pipe)
    release_buffer(t, before)
    return status


cdef int add_segment(Comm *t, Call *c, Pipe *pipe, size_t i, size_t segment, bint inclusive,
                     char *before, char *through) noexcept nogil:
    """Add this rank's contribution to what has arrived, and send it on."""
    cdef int target = t.rank + 1 if t.rank + 1 < t.size else -1
    cdef Block own = segment_of(c.inputs[0], i, segment)
    cdef Block result = segment_of(c.outputs[0], i, segment)
    cdef Block sum = result
    before += i % pipe.depth * segment
    if not inclusive or c.op.finish != NULL:    # the result is another
        # The sum that was sent from here before has left: pipe_post waited for it.
        sum.ptr = through + i % pipe.depth * segment
    if inclusive or target >= 0:
        contribute(c.op, sum.ptr, own.ptr, own.nbytes)
        if t.rank > 0:
            combine(c.op, sum.ptr, before, sum.ptr, sum.nbytes)
    if target >= 0 and pipe_post(t, c, pipe, i, sum, target, sum, -1) != OK:
        return pipe.status
    if inclusive and sum.ptr != result.ptr:
        copy(result.ptr, sum.ptr, sum.nbytes)
    elif not inclusive and t.rank > 0:
        copy(result.ptr, before, result.nbytes)
    if inclusive or t.rank > 0:     # exscan leaves rank 0's output unchanged
        conclude(c.op, result.ptr, result.nbytes)
    return OK


implement(b"chain", SCAN, scan)
implement(b"chain", EXSCAN, exscan)

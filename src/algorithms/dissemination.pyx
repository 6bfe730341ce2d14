"""Dissemination: in step k every rank sends to rank + 2**k and receives from rank - 2**k.

    barrier   steps ceil(log2 p)    bytes sent per rank 0, ceil(log2 p) messages
    scan      steps ceil(log2 p)    bytes sent per rank up to n log2 p
    exscan    steps ceil(log2 p)    bytes sent per rank up to n log2 p

After step k of barrier a rank has a message, through others, from the 2**(k+1) - 1 ranks before it.
In a scan the messages do not wrap around: after step k a rank holds the sum of the 2**(k+1) ranks
up to itself. It puts what arrives before its own, so reductions need not commute. Partial sums
travel in the array's dtype: 16- and 8-bit floats round once per step.

Three ranks, scan:

    rank 0   a         a           a
    rank 1   b         ab          ab
    rank 2   c         bc          abc
             step 0: from rank - 1     step 1: from rank - 2

Source: D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", Int. J.
Parallel Programming 17 (1988). Scans: W. D. Hillis and G. L. Steele, "Data parallel algorithms",
Comm. ACM 29 (1986).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    BARRIER, EXSCAN, NO_MEMORY, OK, RANK_BITS, SCAN, Block, Call, Comm,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    combine, conclude, contribute, copy, exchange, release_buffer, segment_of, segment_size,
    segments_in,
)


cdef int barrier(Comm *t, Call *c) noexcept nogil:
    cdef int distance = 1, step = 0, status = OK
    while distance < t.size and status == OK:
        status = exchange(t, c, step, NULL, 0, (t.rank + distance) % t.size,
                          NULL, 0, (t.rank - distance + t.size) % t.size)
        distance *= 2
        step += 1
    return status


cdef int scan(Comm *t, Call *c) noexcept nogil:
    return by_segments(t, c, True)


cdef int exscan(Comm *t, Call *c) noexcept nogil:
    return by_segments(t, c, False)


cdef int by_segments(Comm *t, Call *c, bint inclusive) noexcept nogil:
    cdef Block own = c.inputs[0]
    cdef size_t segment = segment_size(c, c.op.itemsize, own.nbytes, RANK_BITS)
    cdef char *buffers = <char *>malloc(2 * segment)
    cdef int status = OK
    cdef size_t i
    if buffers == NULL:
        return NO_MEMORY
    for i in range(segments_in(own.nbytes, segment)):
        status = scan_segment(
            t, c, <int>i * RANK_BITS, segment_of(own, i, segment), inclusive,
            segment_of(c.outputs[0], i, segment), buffers, buffers + segment,
        )
        if status != OK:
            break
    release_buffer(t, buffers)
    return status


cdef int scan_segment(Comm *t, Call *c, int step, Block own, bint inclusive, Block result,
                      char *sum, char *arrived) noexcept nogil:
    """Scan; `sum` covers this rank and those before it, `result` those before it."""
    cdef int distance = 1, target, source, status
    cdef bint before = False    # has a contribution of an earlier rank arrived?
    contribute(c.op, sum, own.ptr, own.nbytes)
    while distance < t.size:
        target = t.rank + distance if t.rank + distance < t.size else -1
        source = t.rank - distance if t.rank >= distance else -1
        status = exchange(t, c, step, sum, own.nbytes, target, arrived, own.nbytes, source)
        if status != OK:
            return status
        if source >= 0:
            if before and not inclusive:
                combine(c.op, result.ptr, arrived, result.ptr, result.nbytes)
            elif not inclusive:
                copy(result.ptr, arrived, result.nbytes)
            before = True
            combine(c.op, sum, arrived, sum, own.nbytes)
        distance *= 2
        step += 1
    if inclusive:
        copy(result.ptr, sum, result.nbytes)
    if inclusive or before:     # exscan leaves rank 0's output unchanged
        conclude(c.op, result.ptr, result.nbytes)
    return OK


implement(b"dissemination", BARRIER, barrier)
implement(b"dissemination", SCAN, scan)
implement(b"dissemination", EXSCAN, exscan)

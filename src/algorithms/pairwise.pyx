"""Pairwise exchange: in step k every rank sends to rank + k and receives from rank - k.

    all_to_all       steps p-1      bytes sent per rank n (p-1)/p       blocks of any size
    reduce_scatter   steps p-1      bytes sent per rank n (p-1)/p       commutative ops

n is all p blocks. Every block travels once, directly to its destination; a few steps are under
way at once. Best for long blocks. Only whole contributions travel, and reduce_scatter adds
them to its own at the end of each step: 16- and 8-bit floats round once per step.

Three ranks, all_to_all (ab is a's block for b):

    rank a   ab -> b     ac -> c
    rank b   bc -> c     ba -> a
    rank c   ca -> a     cb -> b
             step 1      step 2

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_TO_ALL, NO_MEMORY, OK, REDUCE_SCATTER, Block, Call, Comm, Reduction,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    PIPE_DEPTH, Pipe, combine, conclude, contribute, copy, largest, release_buffer, pipe_close,
    pipe_open,
    pipe_post, pipe_ready, pipe_take, segment_of, segment_size, segments_in,
)


cdef inline int ahead(Comm *t, int distance) noexcept nogil:
    return (t.rank + distance) % t.size


cdef inline int behind(Comm *t, int distance) noexcept nogil:
    return (t.rank - distance + t.size) % t.size


cdef int all_to_all(Comm *t, Call *c) noexcept nogil:
    cdef size_t steps = t.size - 1
    cdef size_t i
    cdef Pipe pipe
    copy(c.outputs[t.rank].ptr, c.inputs[t.rank].ptr, c.inputs[t.rank].nbytes)
    pipe_open(&pipe, c, steps)
    for i in range(steps + pipe.depth - 1):
        if i < steps and pipe_post(
            t, c, &pipe, i, c.inputs[ahead(t, <int>i + 1)], ahead(t, <int>i + 1),
            c.outputs[behind(t, <int>i + 1)], behind(t, <int>i + 1),
        ) != OK:
            break
        if i + 1 >= pipe.depth and pipe_take(t, c, &pipe, i + 1 - pipe.depth) != OK:
            break
    return pipe_close(t, c, &pipe)


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef size_t longest = largest(c.inputs, t.size)
    cdef size_t segment = segment_size(c, op.itemsize, longest, t.size)
    cdef char *buffers = <char *>malloc(2 * PIPE_DEPTH * segment)
    cdef int status
    if buffers == NULL:
        return NO_MEMORY
    contribute(op, c.outputs[0].ptr, c.inputs[t.rank].ptr, c.outputs[0].nbytes)
    status = collect(t, c, segment, segments_in(longest, segment), buffers)
    if status == OK:
        conclude(op, c.outputs[0].ptr, c.outputs[0].nbytes)
    release_buffer(t, buffers)
    return status


cdef int collect(Comm *t, Call *c, size_t segment, size_t per_step,
                 char *buffers) noexcept nogil:
    """Add the peers' contributions to the output; send the peers theirs."""
    cdef size_t total = (t.size - 1) * per_step
    cdef char *prepared = buffers + PIPE_DEPTH * segment
    cdef size_t i, taken
    cdef int distance
    cdef Block own, out, into
    cdef Pipe pipe
    pipe_open(&pipe, c, total)
    for i in range(total + pipe.depth - 1):
        if i < total:
            distance = <int>(i // per_step) + 1
            if pipe_ready(t, c, &pipe, i) != OK:
                break
            own = segment_of(c.inputs[ahead(t, distance)], i % per_step, segment)
            out = own
            if c.op.prepare != NULL:
                out.ptr = prepared + i % pipe.depth * segment
                contribute(c.op, out.ptr, own.ptr, own.nbytes)
            into = segment_of(c.outputs[0], i % per_step, segment)
            into.ptr = buffers + i % pipe.depth * segment
            if pipe_post(t, c, &pipe, i, out, ahead(t, distance), into,
                         behind(t, distance)) != OK:
                break
        if i + 1 >= pipe.depth:
            taken = i + 1 - pipe.depth
            if pipe_take(t, c, &pipe, taken) != OK:
                break
            out = segment_of(c.outputs[0], taken % per_step, segment)
            combine(c.op, out.ptr, out.ptr, buffers + taken % pipe.depth * segment, out.nbytes)
    return pipe_close(t, c, &pipe)


implement(b"pairwise", ALL_TO_ALL, all_to_all)
implement(b"pairwise", REDUCE_SCATTER, reduce_scatter)

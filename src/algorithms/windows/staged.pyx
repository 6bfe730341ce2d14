"""Staged: all_reduce through windows, where each rank reduces 1/p of every segment.

    all_reduce      steps ceil(n / slot) + 2    bytes copied in per rank n + n/p, read n + n

n is the array. In step k a slot holds segment k of the input, followed by this rank's block of
the reduced segment k - 1. Meanwhile the results of segment k - 2 are copied out. One wait per step.
The blocks are reduced in rank order in one pass: 8- and 16-bit floats accumulate in float32 and
round once, and reductions need not commute. The bits are those of "flat". For long arrays. It needs
four slots: a rank may have published that it consumed a step whose results it still copies.

Three ranks, segments s t of blocks 0 1 2 (S1 is the sum of block 1 of segment s):

    window 0 [s   | -- ]    [t   | S0]    [--  | T0]
    window 1 [s   | -- ]    [t   | S1]    [--  | T1]
    window 2 [s   | -- ]    [t   | S2]    [--  | T2]
             step 0         step 1        step 2: all copy S     then T

Source: the shared-memory collectives of R. Graham and G. Shipman, "MPI support for multi-core
architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

from cydist._native.abi cimport ALL_REDUCE, NO_MEMORY, OK, Block, Call, Comm
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport block_of, contribute, copy, segment_of, segments_in
from cydist._native.window_protocol cimport (
    FEW_RANKS, as_given, acquire_slot, consume, wait_for_all, part_bytes, publish, slot_of,
)


ctypedef struct StagedSegments:
    size_t segment              # bytes of input in a slot
    size_t total                # segments
    uint64_t first              # step of segment 0
    const void **sources


cdef int staged(Comm *t, Call *c) noexcept nogil:
    cdef size_t p = t.size
    cdef size_t room = part_bytes(t, c, 1, 3 * c.op.itemsize) // c.op.itemsize
    cdef const void *few[FEW_RANKS]
    cdef StagedSegments s
    cdef size_t k
    cdef int status = OK
    s.sources = few
    if t.size > FEW_RANKS:
        s.sources = <const void **>malloc(p * sizeof(void *))
    if s.sources == NULL or room == 0 or t.windows.slots < 4:
        return NO_MEMORY
    # x elements of input and the longest of their p blocks: x + ceil(x / p) fit into a slot.
    s.segment = (room - 1) * p // (p + 1) * c.op.itemsize
    s.total = segments_in(c.inputs[0].nbytes, s.segment)
    s.first = t.windows.step
    for k in range(s.total + 2):
        status = stage_segment(t, c, &s, k)
        if status != OK:
            break
    t.windows.step += s.total + 1
    if s.sources != few:
        free(s.sources)
    return status


cdef int stage_segment(Comm *t, Call *c, const StagedSegments *s, size_t k) noexcept nogil:
    cdef uint64_t step = s.first + k
    cdef char *slot = slot_of(t, t.rank, step)
    cdef int status = OK
    if k <= s.total:
        status = acquire_slot(t, c, step, t.windows.slot_bytes)
    if status == OK and k < s.total:
        write_contribution(t, c, segment_of(c.inputs[0], k, s.segment), slot)
    if status == OK and k > 0:
        status = wait_for_all(t, c, step - 1)
    if status != OK:
        return status
    if 0 < k <= s.total:
        reduce_own_block(t, c, s, segment_of(c.inputs[0], k - 1, s.segment), step - 1,
                         slot + s.segment)
    if k <= s.total:
        publish(t, c, step, 0)
    if k > 1:
        copy_results(t, c, s, segment_of(c.outputs[0], k - 2, s.segment), step - 1)
    return consume(t, c, step, True) if k > 0 else OK


cdef inline void write_contribution(Comm *t, Call *c, Block segment, char *slot) noexcept nogil:
    """Publish all blocks, or all but this rank's."""
    cdef Block block = block_of(segment, t.rank, t.size, c.op.itemsize)
    cdef size_t before = block.ptr - segment.ptr
    cdef size_t through = before + block.nbytes
    if as_given(c.op):
        contribute(c.op, slot, segment.ptr, before)
        contribute(c.op, slot + through, segment.ptr + through, segment.nbytes - through)
    else:
        contribute(c.op, slot, segment.ptr, segment.nbytes)


cdef inline void reduce_own_block(Comm *t, Call *c, const StagedSegments *s, Block segment,
                                  uint64_t step, char *out) noexcept nogil:
    cdef Block block = block_of(segment, t.rank, t.size, c.op.itemsize)
    cdef int peer
    for peer in range(t.size):
        s.sources[peer] = slot_of(t, peer, step) + (block.ptr - segment.ptr)
    if as_given(c.op):
        s.sources[t.rank] = block.ptr
    c.op.combine_all(c.op, out, s.sources, t.size, block.nbytes // c.op.itemsize)


cdef inline void copy_results(Comm *t, Call *c, const StagedSegments *s, Block segment,
                              uint64_t step) noexcept nogil:
    cdef Block block
    cdef int peer
    for peer in range(t.size):
        block = block_of(segment, peer, t.size, c.op.itemsize)
        copy(block.ptr, slot_of(t, peer, step) + s.segment, block.nbytes)


implement(b"staged", ALL_REDUCE, staged)

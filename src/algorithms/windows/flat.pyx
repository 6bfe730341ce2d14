"""Flat: every rank writes into its own window, and reads directly from the others'.

    every collective    steps ceil(n / slot)    bytes copied in per rank n, read per rank up to p n

n is what one rank contributes; a slot is cut into p parts if every rank gets something else
(scatter, reduce_scatter, all_to_all). The reductions read all windows in rank order in one pass:
8- and 16-bit floats accumulate in float32 and round once, and reductions need not commute.
all_reduce reads p n bytes on every rank, so it is for short arrays; see "staged".

Three ranks, all_reduce:

    window 0 [a]    rank 0, 1 and 2 read a, b and c
    window 1 [b]    and each writes a + b + c to its output
    window 2 [c]

If only some ranks know the sizes (uneven gather, scatter and all_to_all), a first step exchanges
them and carries short blocks; see size_exchange.pyx.

Source: the shared-memory collectives of R. Graham and G. Shipman, "MPI support for multi-core
architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EXSCAN, GATHER, LINE, NO_MEMORY, OK,
    REDUCE, REDUCE_SCATTER, SCAN, SCATTER, TINY_BYTES, Block, Call, Comm,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport contribute, copy, largest, segment_of, segments_in
from cydist._native.size_exchange cimport (
    BlockMove, all_ranks, block_move, exchange_sizes, gather_move, scatter_move,
)
from cydist._native.window_protocol cimport (
    FEW_RANKS, as_given, acquire_slot, wait_for_peer, wait_for_all, mark_consumed, part_bytes,
    place_of, publish,
)


# The parts of a step's data, equal on all ranks
ctypedef struct SlotCut:
    size_t part                 # bytes of each part
    size_t used                 # of all parts
    size_t steps


cdef bint cut_into_slots(Comm *t, Call *c, int parts, size_t unit, size_t longest,
                         SlotCut *out) noexcept nogil:
    """Cut into parts for blocks of up to `longest` bytes; False if not one element fits a slot."""
    cdef size_t part = part_bytes(t, c, parts, unit)
    if part == 0:
        return False
    out.steps = segments_in(longest, part)
    if longest * parts <= TINY_BYTES:
        part = longest
    elif longest + LINE <= part:
        part = (longest + LINE - 1) // LINE * LINE      # adjacent, each on its own lines
    out.part = part
    out.used = parts * part
    return True


cdef inline size_t part_for(const Comm *t, int parts, int writer, int reader) noexcept nogil:
    """Return which part of a slot is for a rank. Two ranks use the same one: see slot_of."""
    return 0 if parts == 1 else <size_t>((reader - writer + t.size) % t.size)


# Blocks that move

cdef int move_blocks(Comm *t, Call *c, const BlockMove *m) noexcept nogil:
    cdef bint waits_for_all = all_ranks(t, m.from_first, m.from_end)
    cdef uint64_t step = t.windows.step
    cdef SlotCut slot
    cdef size_t i
    cdef int status = OK
    if not cut_into_slots(t, c, m.parts, 1, m.longest, &slot):
        return NO_MEMORY
    for i in range(slot.steps):
        status = acquire_slot(t, c, step + i, slot.used)
        if status == OK:
            write(t, c, m, i, &slot, step + i)
            publish(t, c, step + i, slot.used)
            status = read(t, c, m, i, &slot, step + i)
        if status == OK and waits_for_all:
            status = mark_consumed(t, c, step + i)
        if status != OK:
            return status
    t.windows.step += slot.steps
    return OK


cdef void write(Comm *t, const Call *c, const BlockMove *m, size_t i, const SlotCut *slot,
                uint64_t step) noexcept nogil:
    cdef char *place = place_of(t, c, t.rank, step, slot.used)
    cdef Block segment
    cdef int r
    if m.given == NULL:
        return
    for r in range(m.parts):
        if m.parts == 1 or r != t.rank:
            segment = segment_of(m.given[r], i, slot.part)
            copy(place + part_for(t, m.parts, t.rank, r) * slot.part, segment.ptr, segment.nbytes)


cdef int read(Comm *t, Call *c, const BlockMove *m, size_t i, const SlotCut *slot,
              uint64_t step) noexcept nogil:
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef const char *place
    cdef Block segment
    cdef int peer, status
    for peer in range(m.from_first, m.from_end):
        segment = segment_of(m.due[peer - m.from_first], i, slot.part)
        if peer == t.rank:
            copy(segment.ptr, segment_of(m.given[mine], i, slot.part).ptr, segment.nbytes)
            continue
        status = wait_for_peer(t, c, peer, step)
        if status != OK:
            return status
        place = place_of(t, c, peer, step, slot.used)
        copy(segment.ptr, place + part_for(t, m.parts, peer, t.rank) * slot.part, segment.nbytes)
    return OK


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = block_move(1, NULL, c.outputs, c.root, c.root + 1, c.outputs[0].nbytes)
    if t.rank == c.root:
        m.given = c.inputs
        m.from_end = m.from_first
    return move_blocks(t, c, &m)


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = block_move(1, c.inputs, c.outputs, 0, t.size, largest(c.outputs, t.size))
    return move_blocks(t, c, &m)


cdef int gather(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = gather_move(t, c)
    return move_uneven(t, c, &m)


cdef int scatter(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = scatter_move(t, c)
    return move_uneven(t, c, &m)


cdef int all_to_all(Comm *t, Call *c) noexcept nogil:
    cdef BlockMove m = block_move(t.size, c.inputs, c.outputs, 0, t.size, c.outputs[0].nbytes)
    return move_uneven(t, c, &m)


cdef int move_uneven(Comm *t, Call *c, BlockMove *m) noexcept nogil:
    cdef bint over
    cdef int status = exchange_sizes(t, c, m, &over)
    return status if status != OK or over else move_blocks(t, c, m)


cdef int barrier(Comm *t, Call *c) noexcept nogil:
    cdef uint64_t step = t.windows.step
    cdef int status = acquire_slot(t, c, step, 0)
    if status == OK:
        publish(t, c, step, 0)
        status = wait_for_all(t, c, step)
    if status == OK:
        status = mark_consumed(t, c, step)
    t.windows.step += 1
    return status


# Blocks that are reduced

ctypedef struct WindowSum:
    int parts                   # 1, or p: every slot has one for each rank
    const Block *given          # one for each part
    Block result                # of what ranks from_first .. from_end - 1 give
    int from_first, from_end    # no rank: this one collects nothing
    size_t longest              # bytes of the longest block, on every rank


cdef int reduce_windows(Comm *t, Call *c, const WindowSum *m) noexcept nogil:
    cdef bint waits_for_all = all_ranks(t, m.from_first, m.from_end)
    cdef const void *few[FEW_RANKS]
    cdef const void **sources = few
    cdef uint64_t step = t.windows.step
    cdef SlotCut slot
    cdef size_t i
    cdef int status = OK
    if not cut_into_slots(t, c, m.parts, c.op.itemsize, m.longest, &slot):
        return NO_MEMORY
    if t.size > FEW_RANKS:
        sources = <const void **>malloc(t.size * sizeof(void *))
        if sources == NULL:
            return NO_MEMORY
    for i in range(slot.steps):
        status = acquire_slot(t, c, step + i, slot.used)
        if status == OK:
            write_parts(t, c, m, i, &slot, step + i)
            publish(t, c, step + i, slot.used)
            status = reduce_part(t, c, m, i, &slot, step + i, sources)
        if status == OK and waits_for_all:
            status = mark_consumed(t, c, step + i)
        if status != OK:
            break
    t.windows.step += slot.steps
    if sources != few:
        free(sources)
    return status


cdef inline void write_parts(Comm *t, Call *c, const WindowSum *m, size_t i, const SlotCut *slot,
                             uint64_t step) noexcept nogil:
    cdef char *place = place_of(t, c, t.rank, step, slot.used)
    cdef Block segment
    cdef int r
    for r in range(m.parts):
        if m.parts == 1 or r != t.rank or not as_given(c.op):
            segment = segment_of(m.given[r], i, slot.part)
            contribute(c.op, place + part_for(t, m.parts, t.rank, r) * slot.part, segment.ptr,
                       segment.nbytes)


cdef int reduce_part(Comm *t, Call *c, const WindowSum *m, size_t i, const SlotCut *slot,
                     uint64_t step, const void **sources) noexcept nogil:
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef Block segment
    cdef int peer, status
    if m.from_first == m.from_end:
        return OK
    for peer in range(m.from_first, m.from_end):
        status = wait_for_peer(t, c, peer, step)
        if status != OK:
            return status
        sources[peer] = (place_of(t, c, peer, step, slot.used)
                         + part_for(t, m.parts, peer, t.rank) * slot.part)
        if peer == t.rank and as_given(c.op):
            sources[peer] = segment_of(m.given[mine], i, slot.part).ptr
    segment = segment_of(m.result, i, slot.part)
    c.op.combine_all(c.op, segment.ptr, sources + m.from_first, m.from_end - m.from_first,
                     segment.nbytes // c.op.itemsize)
    return OK


cdef WindowSum window_sum(Comm *t, int parts, const Block *given, Block result,
                          size_t longest) noexcept nogil:
    cdef WindowSum m
    m.parts = parts
    m.given = given
    m.result = result
    m.from_first = 0
    m.from_end = t.size
    m.longest = longest
    return m


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef WindowSum m = window_sum(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    return reduce_windows(t, c, &m)


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    cdef WindowSum m = window_sum(t, 1, c.inputs, c.inputs[0], c.inputs[0].nbytes)
    if t.rank == c.root:
        m.result = c.outputs[0]
    else:
        m.from_end = 0
    return reduce_windows(t, c, &m)


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef WindowSum m = window_sum(t, t.size, c.inputs, c.outputs[0], largest(c.inputs, t.size))
    return reduce_windows(t, c, &m)


cdef int scan(Comm *t, Call *c) noexcept nogil:
    cdef WindowSum m = window_sum(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    m.from_end = t.rank + 1
    return reduce_windows(t, c, &m)


cdef int exscan(Comm *t, Call *c) noexcept nogil:
    cdef WindowSum m = window_sum(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    m.from_end = t.rank
    return reduce_windows(t, c, &m)


implement(b"flat", BROADCAST, broadcast)
implement(b"flat", ALL_GATHER, all_gather)
implement(b"flat", GATHER, gather)
implement(b"flat", SCATTER, scatter)
implement(b"flat", ALL_TO_ALL, all_to_all)
implement(b"flat", BARRIER, barrier)
implement(b"flat", ALL_REDUCE, all_reduce)
implement(b"flat", REDUCE, reduce)
implement(b"flat", REDUCE_SCATTER, reduce_scatter)
implement(b"flat", SCAN, scan)
implement(b"flat", EXSCAN, exscan)

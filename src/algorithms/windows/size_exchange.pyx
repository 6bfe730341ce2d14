"""The exchange of block sizes that not all ranks know; see cydist/_native/size_exchange.pxd.

The part of a slot for one rank is the size of its block. If this step carries blocks, the block
follows on lines of its own.
"""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport (
    LINE, MISMATCH, NO_MEMORY, OK, SCATTER, TINY_BYTES, Block, Call, Comm, has_even_blocks,
    head_of,
)
from cydist._native.pipeline cimport copy, largest
from cydist._native.window_protocol cimport (
    call_of, acquire_slot, wait_for_peer, mark_consumed, place_of, publish,
)


cdef enum:
    MOST_CARRIED = 16320        # longest block for which two copies are faster than exposure


cdef BlockMove block_move(int parts, const Block *given, const Block *due, int from_first,
                          int from_end, size_t longest) noexcept nogil:
    cdef BlockMove m
    m.parts = parts
    m.given = given
    m.due = due
    m.from_first = from_first
    m.from_end = from_end
    m.longest = longest
    return m


cdef BlockMove gather_move(Comm *t, Call *c) noexcept nogil:
    return block_move(1, c.inputs, c.outputs, 0, t.size if t.rank == c.root else 0,
                      c.inputs[0].nbytes)


cdef BlockMove scatter_move(Comm *t, Call *c) noexcept nogil:
    return block_move(t.size, c.inputs if t.rank == c.root else NULL, c.outputs, c.root, c.root + 1,
                      c.outputs[0].nbytes)


cdef size_t most_carried(const Comm *t, int parts) noexcept nogil:
    """Return the longest block that fits its part of a slot, with its size; 0: none does."""
    cdef size_t room = t.windows.slot_bytes // parts // LINE * LINE
    return min(<size_t>MOST_CARRIED, room - sizeof(uint64_t)) if room > LINE else 0


cdef inline size_t part_of(size_t longest, size_t most) noexcept nogil:
    """Return the bytes of each part if the longest block has `longest` bytes."""
    if most == 0 or longest > most:
        return sizeof(uint64_t)
    return (sizeof(uint64_t) + longest + LINE - 1) // LINE * LINE


cdef inline char *blocks_at(Comm *t, const Call *c, int rank, uint64_t step,
                            size_t nbytes) noexcept nogil:
    """Return where a rank's first block is if its parts have `nbytes` bytes in all. A block's size
    is the word before it; with short parts the first one is in the head's line."""
    return place_of(t, c, rank, step, TINY_BYTES + nbytes)


cdef int exchange_sizes(Comm *t, Call *c, BlockMove *m, bint *over) noexcept nogil:
    cdef uint64_t step = t.windows.step
    cdef size_t most
    cdef bint from_root = c.collective == SCATTER
    cdef int first = c.root if from_root else 0
    cdef int end = c.root + 1 if from_root else t.size
    cdef int r, status
    over[0] = False
    if has_even_blocks(t, c):
        return OK
    if m.parts * sizeof(uint64_t) > t.windows.slot_bytes:
        return NO_MEMORY
    most = most_carried(t, m.parts)
    status = acquire_slot(t, c, step, t.windows.slot_bytes)  # some rank may need this many
    if status != OK:
        return status
    publish(t, c, step, write(t, c, m, step, most))
    m.longest = 0
    for r in range(first, end):
        status = wait_for_peer(t, c, r, step)
        if status != OK:
            return status
        m.longest = max(m.longest, call_of(t, r, step).note)
    over[0] = most > 0 and m.longest <= most
    status = read(t, c, m, step, most, over[0])
    if status == OK and all_ranks(t, first, end):
        status = mark_consumed(t, c, step)
    t.windows.step += 1
    return status


cdef size_t write(Comm *t, const Call *c, const BlockMove *m, uint64_t step,
                  size_t most) noexcept nogil:
    """Write this rank's sizes, and blocks if they are short; return how many bytes."""
    cdef size_t longest = largest(m.given, m.parts) if m.given != NULL else 0
    cdef size_t part = part_of(longest, most)
    cdef char *place = blocks_at(t, c, t.rank, step, m.parts * part)
    cdef int r
    head_of(t.windows, t.rank, step).call.note = longest
    if m.given == NULL:
        return 0
    for r in range(m.parts):
        (<uint64_t *>(place + r * part) - 1)[0] = m.given[r].nbytes
        if part > sizeof(uint64_t) and (m.parts == 1 or r != t.rank):
            copy(place + r * part, m.given[r].ptr, m.given[r].nbytes)
    return m.parts * part


cdef int read(Comm *t, Call *c, const BlockMove *m, uint64_t step, size_t most,
              bint carried) noexcept nogil:
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef size_t part, size
    cdef char *place
    cdef Block due
    cdef int peer
    for peer in range(m.from_first, m.from_end):
        part = part_of(call_of(t, peer, step).note, most)
        place = blocks_at(t, c, peer, step, m.parts * part) + mine * part
        size = (<uint64_t *>place - 1)[0]
        due = m.due[peer - m.from_first]
        if size != due.nbytes:
            c.failed_peer = peer
            c.failed_step = 0
            c.theirs = call_of(t, peer, step)[0]
            c.theirs.note = 0
            c.theirs_bytes = size
            c.our_bytes = due.nbytes
            return MISMATCH
        if carried and peer == t.rank:
            copy(due.ptr, m.given[mine].ptr, due.nbytes)
        elif carried:
            copy(due.ptr, place, due.nbytes)
    return OK

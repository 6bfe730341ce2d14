"""Flat: every rank writes into its own window, and reads straight out of the others'.

    every collective    steps ceil(n / slot)    bytes copied in per rank n
    all_reduce "staged" steps ceil(n / slot) + 2    bytes copied in per rank n + n/p, read n + n

n is what one rank contributes; a slot is cut into p parts where every rank gets something else
(scatter, reduce_scatter, all_to_all). The reductions read all windows in rank order in one pass:
8- and 16-bit floats accumulate in float32 and round once, and reductions need not commute. "flat"
reads p n bytes on every rank, so it is best for short arrays; "staged" reduces 1/p of each
segment on each rank, writes it beside the next segment, and all copy it from there.

Three ranks, all_reduce:

    window 0 [a]    rank 0, 1 and 2 read a, b and c
    window 1 [b]    and each writes a + b + c to its output
    window 2 [c]

Steps. Every rank takes part in every step of every call, in the same order:

1. claim    wait until all ranks have consumed step s - slots, then the slot may be written again
2. publish  write data, fingerprint and note, then raise `posted` to s + 1
3. read     wait for a peer's `posted`, compare its fingerprint with ours, read its data
4. consumed once every peer's fingerprint of the step is compared and our reading is done

A rank that reads nobody (a broadcast's root) does not wait for step 4: it returns, and compares when
its next call begins, so that a peer in another call is noticed there. No rank is more than `slots`
steps ahead of what all have consumed, so the rank that is farthest behind can always go on.

Where sizes are known only to some (uneven gather, scatter and all_to_all), a first step carries the
sizes, and the longest as its note: so all ranks take the same number of steps.

Source: the shared-memory collectives of R. Graham and G. Shipman, "MPI support for multi-core
architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, Block, Call, EVEN, EXSCAN, Fingerprint,
    Flags, GATHER, MISMATCH, NO_MEMORY, OK, REDUCE, REDUCE_SCATTER, SCAN, SCATTER, TIMEOUT,
    Transport, WINDOWS, Window, add, block_of, contribute, copy, largest, now_ns, segment_of,
    segments_in,
)


cdef extern from * nogil:
    """
    #define CYDIST_PEEK(flag) __atomic_load_n((flag), __ATOMIC_ACQUIRE)
    """
    uint64_t peek "CYDIST_PEEK"(const uint64_t *flag)


cdef enum:
    SUSPICION_NS = 50000000     # after so long a wait, look for a mismatch
    FEW_RANKS = 64              # so many need no malloc


# Steps

cdef inline uint64_t slot_of(Transport *t, uint64_t step) noexcept nogil:
    return step & <uint64_t>(t.windows.slots - 1)


cdef inline char *data_of(Transport *t, int rank, uint64_t step) noexcept nogil:
    return t.windows.of[rank].data + slot_of(t, step) * t.windows.slot_bytes


cdef inline const Fingerprint *call_of(Transport *t, int rank, uint64_t step) noexcept nogil:
    return &t.windows.of[rank].calls[slot_of(t, step)]


cdef int compare(Transport *t, Call *c, int peer, uint64_t step) noexcept nogil:
    """Is the peer in the same call as we are, or were, in this step?"""
    cdef const Fingerprint *ours = call_of(t, t.rank, step)
    cdef const Fingerprint *theirs = call_of(t, peer, step)
    if memcmp(ours, theirs, sizeof(Fingerprint) - sizeof(uint64_t)) == 0:   # all but the note
        return OK
    c.failed_peer = peer
    c.failed_step = <int>(step - t.windows.step)
    c.theirs = theirs[0]
    c.fingerprint = ours[0]     # the step may belong to a call that has returned
    c.theirs.note = 0
    c.fingerprint.note = 0
    return MISMATCH


cdef int suspect(Transport *t, Call *c) noexcept nogil:
    """Having waited for long: is any peer in another call than we are?"""
    cdef const Flags *own = t.windows.of[t.rank].flags
    cdef uint64_t step, posted
    cdef int peer
    for peer in range(t.size):
        posted = peek(&t.windows.of[peer].flags.posted)
        for step in range(own.consumed, posted if posted < own.posted else own.posted):
            if compare(t, c, peer, step) != OK:
                return MISMATCH
    return OK


cdef int reach(Transport *t, Call *c, int peer, uint64_t *flag, uint64_t value,
               uint64_t step) noexcept nogil:
    """Wait in a step for a peer's flag."""
    cdef int64_t until
    cdef int status
    while peek(flag) < value:
        until = now_ns() + SUSPICION_NS
        if until > c.deadline_ns:
            until = c.deadline_ns
        status = t.wait_flag(t, flag, value, until)
        if status == TIMEOUT:
            # Whoever found a mismatch has stopped: the peer we wait for may never come.
            if suspect(t, c) != OK:
                return MISMATCH
            if now_ns() < c.deadline_ns:
                continue
        if status != OK:
            c.failed_peer = peer
            c.failed_step = <int>(step - t.windows.step)
            return status
    return OK


cdef int hear(Transport *t, Call *c, int peer, uint64_t step) noexcept nogil:
    """Wait until a peer's data of this step can be read."""
    cdef int status = OK
    if peer != t.rank:
        status = reach(t, c, peer, &t.windows.of[peer].flags.posted, step + 1, step)
        if status == OK:
            status = compare(t, c, peer, step)
    return status


cdef int hear_all(Transport *t, Call *c, uint64_t step) noexcept nogil:
    cdef int peer, status
    for peer in range(t.size):
        status = hear(t, c, peer, step)
        if status != OK:
            return status
    return OK


cdef bint all_posted(Transport *t, uint64_t steps) noexcept nogil:
    cdef int peer
    for peer in range(t.size):
        if peek(&t.windows.of[peer].flags.posted) < steps:
            return False
    return True


cdef int consume(Transport *t, Call *c, uint64_t steps, bint patient) noexcept nogil:
    """Having read all steps before `steps`: compare what nobody compared, then say so.

    Not patient: only as far as all ranks have come."""
    cdef uint64_t *own = &t.windows.of[t.rank].flags.consumed
    cdef uint64_t step = own[0]
    cdef int status = OK
    while step < steps:
        if not patient and not all_posted(t, step + 1):
            break
        status = hear_all(t, c, step)
        if status != OK:
            break
        step += 1
    if step > own[0]:
        t.raise_flag(t, own, step)
    return status


cdef inline void note_released(Transport *t) noexcept nogil:
    """Keep what the flags say, so that most claims need not look at them."""
    cdef uint64_t least = peek(&t.windows.of[0].flags.consumed)
    cdef uint64_t consumed
    cdef int peer
    for peer in range(1, t.size):
        consumed = peek(&t.windows.of[peer].flags.consumed)
        if consumed < least:
            least = consumed
    t.windows.released = least


cdef int claim(Transport *t, Call *c, uint64_t step) noexcept nogil:
    """Wait until all ranks are done with what this step's slot holds."""
    cdef uint64_t needed = step + 1 - <uint64_t>t.windows.slots
    cdef int peer, status = OK
    if step == t.windows.step:      # the call begins: was everybody in the last one?
        status = consume(t, c, step, True)
    if status != OK or step < <uint64_t>t.windows.slots or t.windows.released >= needed:
        return status
    status = consume(t, c, needed, True)
    for peer in range(t.size):
        if status == OK and peer != t.rank:
            status = reach(t, c, peer, &t.windows.of[peer].flags.consumed, needed, step)
    if status == OK:
        note_released(t)
    return status


cdef inline void publish(Transport *t, Call *c, uint64_t step, uint64_t note) noexcept nogil:
    cdef Window *own = &t.windows.of[t.rank]
    own.calls[slot_of(t, step)] = c.fingerprint
    own.calls[slot_of(t, step)].note = note
    t.raise_flag(t, &own.flags.posted, step + 1)


cdef inline size_t part_bytes(Transport *t, Call *c, size_t parts, size_t unit) noexcept nogil:
    """Bytes of a slot for each of `parts`, whole elements; 0 if not even one fits."""
    cdef size_t nbytes = t.windows.slot_bytes
    if c.segment_bytes > 0 and c.segment_bytes < nbytes:
        nbytes = c.segment_bytes
    if nbytes // parts < unit:      # a small segment must not make it impossible
        nbytes = t.windows.slot_bytes
    return nbytes // parts // unit * unit


# Blocks that move

ctypedef struct Move:
    int parts                   # 1, or p: part r of every slot is for rank r
    const Block *given          # one for each part; NULL where this rank gives nothing
    const Block *due            # due[0] comes from rank from_first, and so on
    int from_first, from_end
    size_t longest              # bytes of the longest block, on every rank


cdef int move(Transport *t, Call *c, const Move *m) noexcept nogil:
    cdef size_t part = part_bytes(t, c, m.parts, 1)
    cdef uint64_t step = t.windows.step
    cdef size_t i, total
    cdef int status = OK
    if part == 0:
        return NO_MEMORY
    total = segments_in(m.longest, part)
    for i in range(total):
        status = claim(t, c, step + i)
        if status == OK:
            write(t, m, i, part, step + i)
            publish(t, c, step + i, 0)
            status = read(t, c, m, i, part, step + i)
        if status == OK:
            status = consume(t, c, step + i + 1, False)
        if status != OK:
            return status
    t.windows.step += total
    return OK


cdef void write(Transport *t, const Move *m, size_t i, size_t part, uint64_t step) noexcept nogil:
    cdef char *slot = data_of(t, t.rank, step)
    cdef Block segment
    cdef int r
    if m.given == NULL:
        return
    for r in range(m.parts):
        if m.parts == 1 or r != t.rank:
            segment = segment_of(m.given[r], i, part)
            copy(slot + r * part, segment.ptr, segment.nbytes)


cdef int read(Transport *t, Call *c, const Move *m, size_t i, size_t part,
              uint64_t step) noexcept nogil:
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef Block segment
    cdef int peer, status
    for peer in range(m.from_first, m.from_end):
        segment = segment_of(m.due[peer - m.from_first], i, part)
        if peer == t.rank:
            copy(segment.ptr, segment_of(m.given[mine], i, part).ptr, segment.nbytes)
            continue
        status = hear(t, c, peer, step)
        if status != OK:
            return status
        copy(segment.ptr, data_of(t, peer, step) + mine * part, segment.nbytes)
    return OK


cdef int agree(Transport *t, Call *c, Move *m) noexcept nogil:
    """A step in which every rank says how much it has for whom, where not everybody knows."""
    cdef uint64_t step = t.windows.step
    cdef uint64_t *sizes = <uint64_t *>data_of(t, t.rank, step)
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef size_t due
    cdef int r, status
    if c.fingerprint.flags & EVEN != 0:
        return OK
    if m.parts * sizeof(uint64_t) > t.windows.slot_bytes:
        return NO_MEMORY
    status = claim(t, c, step)
    if status != OK:
        return status
    for r in range(m.parts):
        sizes[r] = m.given[r].nbytes if m.given != NULL else 0
    publish(t, c, step, largest(m.given, m.parts) if m.given != NULL else 0)
    status = hear_all(t, c, step)
    if status != OK:
        return status
    m.longest = 0
    for r in range(t.size):
        if call_of(t, r, step).note > m.longest:
            m.longest = call_of(t, r, step).note
        if m.from_first <= r < m.from_end:
            due = m.due[r - m.from_first].nbytes
            sizes = <uint64_t *>data_of(t, r, step)
            if sizes[mine] != due:
                c.failed_peer = r
                c.failed_step = 0
                c.theirs = call_of(t, r, step)[0]
                c.theirs.note = 0
                c.theirs_bytes = sizes[mine]
                c.our_bytes = due
                return MISMATCH
    status = consume(t, c, step + 1, True)
    t.windows.step += 1
    return status


cdef Move moving(int parts, const Block *given, const Block *due, int from_first, int from_end,
                 size_t longest) noexcept nogil:
    cdef Move m
    m.parts = parts
    m.given = given
    m.due = due
    m.from_first = from_first
    m.from_end = from_end
    m.longest = longest
    return m


cdef int broadcast(Transport *t, Call *c) noexcept nogil:
    cdef Move m = moving(1, NULL, c.outputs, c.root, c.root + 1, c.outputs[0].nbytes)
    if t.rank == c.root:
        m.given = c.inputs
        m.from_end = m.from_first
    return move(t, c, &m)


cdef int all_gather(Transport *t, Call *c) noexcept nogil:
    cdef Move m = moving(1, c.inputs, c.outputs, 0, t.size, largest(c.outputs, t.size))
    return move(t, c, &m)


cdef int gather(Transport *t, Call *c) noexcept nogil:
    cdef Move m = moving(1, c.inputs, c.outputs, 0, 0, c.inputs[0].nbytes)
    cdef int status
    if t.rank == c.root:
        m.from_end = t.size
    status = agree(t, c, &m)
    return move(t, c, &m) if status == OK else status


cdef int scatter(Transport *t, Call *c) noexcept nogil:
    cdef Move m = moving(t.size, NULL, c.outputs, c.root, c.root + 1, c.outputs[0].nbytes)
    cdef int status
    if t.rank == c.root:
        m.given = c.inputs
    status = agree(t, c, &m)
    return move(t, c, &m) if status == OK else status


cdef int all_to_all(Transport *t, Call *c) noexcept nogil:
    cdef Move m = moving(t.size, c.inputs, c.outputs, 0, t.size, c.outputs[0].nbytes)
    cdef int status = agree(t, c, &m)
    return move(t, c, &m) if status == OK else status


cdef int barrier(Transport *t, Call *c) noexcept nogil:
    cdef uint64_t step = t.windows.step
    cdef int status = claim(t, c, step)
    if status == OK:
        publish(t, c, step, 0)
        status = consume(t, c, step + 1, True)
    t.windows.step += 1
    return status


# Blocks that are reduced

ctypedef struct Sum:
    int parts                   # 1, or p: part r of every slot is for rank r
    const Block *given          # one for each part
    Block result                # of what ranks from_first .. from_end - 1 give
    int from_first, from_end    # no rank: this one collects nothing
    size_t longest              # bytes of the longest block, on every rank


cdef int reduce_windows(Transport *t, Call *c, const Sum *m) noexcept nogil:
    cdef size_t part = part_bytes(t, c, m.parts, c.op.itemsize)
    cdef const void *few[FEW_RANKS]
    cdef const void **sources = few
    cdef uint64_t step = t.windows.step
    cdef size_t i, total
    cdef int status = OK
    if t.size > FEW_RANKS:
        sources = <const void **>malloc(t.size * sizeof(void *))
    if part == 0 or sources == NULL:
        return NO_MEMORY
    total = segments_in(m.longest, part)
    for i in range(total):
        status = claim(t, c, step + i)
        if status == OK:
            write_parts(t, c, m, i, part, step + i)
            publish(t, c, step + i, 0)
            status = reduce_part(t, c, m, i, part, step + i, sources)
        if status == OK:
            status = consume(t, c, step + i + 1, False)
        if status != OK:
            break
    t.windows.step += total
    if sources != few:
        free(sources)
    return status


cdef inline void write_parts(Transport *t, Call *c, const Sum *m, size_t i, size_t part,
                             uint64_t step) noexcept nogil:
    cdef char *slot = data_of(t, t.rank, step)
    cdef Block segment
    cdef int r
    for r in range(m.parts):
        segment = segment_of(m.given[r], i, part)
        contribute(c.op, slot + r * part, segment.ptr, segment.nbytes)


cdef int reduce_part(Transport *t, Call *c, const Sum *m, size_t i, size_t part, uint64_t step,
                     const void **sources) noexcept nogil:
    cdef int mine = t.rank if m.parts > 1 else 0
    cdef Block segment
    cdef int peer, status
    if m.from_first == m.from_end:
        return OK
    for peer in range(m.from_first, m.from_end):
        status = hear(t, c, peer, step)
        if status != OK:
            return status
        sources[peer] = data_of(t, peer, step) + mine * part
    segment = segment_of(m.result, i, part)
    c.op.combine_all(c.op, segment.ptr, sources + m.from_first, m.from_end - m.from_first,
                     segment.nbytes // c.op.itemsize)
    return OK


cdef Sum summing(Transport *t, int parts, const Block *given, Block result,
                 size_t longest) noexcept nogil:
    cdef Sum m
    m.parts = parts
    m.given = given
    m.result = result
    m.from_first = 0
    m.from_end = t.size
    m.longest = longest
    return m


cdef int all_reduce(Transport *t, Call *c) noexcept nogil:
    cdef Sum m = summing(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    return reduce_windows(t, c, &m)


cdef int reduce(Transport *t, Call *c) noexcept nogil:
    cdef Sum m = summing(t, 1, c.inputs, c.inputs[0], c.inputs[0].nbytes)
    if t.rank == c.root:
        m.result = c.outputs[0]
    else:
        m.from_end = 0
    return reduce_windows(t, c, &m)


cdef int reduce_scatter(Transport *t, Call *c) noexcept nogil:
    cdef Sum m = summing(t, t.size, c.inputs, c.outputs[0], largest(c.inputs, t.size))
    return reduce_windows(t, c, &m)


cdef int scan(Transport *t, Call *c) noexcept nogil:
    cdef Sum m = summing(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    m.from_end = t.rank + 1
    return reduce_windows(t, c, &m)


cdef int exscan(Transport *t, Call *c) noexcept nogil:
    cdef Sum m = summing(t, 1, c.inputs, c.outputs[0], c.inputs[0].nbytes)
    m.from_end = t.rank
    return reduce_windows(t, c, &m)


# Staged all_reduce. In step k a slot holds segment k of the input and, behind it, this rank's
# block of the reduced segment k - 1; meanwhile the results of segment k - 2 are copied out.

ctypedef struct Stage:
    size_t segment              # bytes of input in a slot
    size_t total                # segments
    uint64_t first              # step of segment 0
    const void **sources


cdef int staged(Transport *t, Call *c) noexcept nogil:
    cdef size_t p = t.size
    cdef size_t room = part_bytes(t, c, 1, 3 * c.op.itemsize) // c.op.itemsize
    cdef const void *few[FEW_RANKS]
    cdef Stage s
    cdef size_t k
    cdef int status = OK
    s.sources = few
    if t.size > FEW_RANKS:
        s.sources = <const void **>malloc(p * sizeof(void *))
    if s.sources == NULL or room == 0 or t.windows.slots < 2:
        return NO_MEMORY
    # x elements of input and the longest of their p blocks: x + ceil(x / p) fit into a slot.
    s.segment = (room - 1) * p // (p + 1) * c.op.itemsize
    s.total = segments_in(c.inputs[0].nbytes, s.segment)
    s.first = t.windows.step
    for k in range(s.total + 2):
        status = stage(t, c, &s, k)
        if status != OK:
            break
    t.windows.step += s.total + 1
    if s.sources != few:
        free(s.sources)
    return status


cdef int stage(Transport *t, Call *c, const Stage *s, size_t k) noexcept nogil:
    cdef uint64_t step = s.first + k
    cdef char *slot = data_of(t, t.rank, step)
    cdef Block segment
    cdef int status = OK
    if k <= s.total:
        status = claim(t, c, step)
    if status == OK and k < s.total:
        segment = segment_of(c.inputs[0], k, s.segment)
        contribute(c.op, slot, segment.ptr, segment.nbytes)
    if status == OK and k > 0:
        status = hear_all(t, c, step - 1)
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


cdef inline void reduce_own_block(Transport *t, Call *c, const Stage *s, Block segment,
                                  uint64_t step, char *out) noexcept nogil:
    cdef Block block = block_of(segment, t.rank, t.size, c.op.itemsize)
    cdef int peer
    for peer in range(t.size):
        s.sources[peer] = data_of(t, peer, step) + (block.ptr - segment.ptr)
    c.op.combine_all(c.op, out, s.sources, t.size, block.nbytes // c.op.itemsize)


cdef inline void copy_results(Transport *t, Call *c, const Stage *s, Block segment,
                              uint64_t step) noexcept nogil:
    cdef Block block
    cdef int peer
    for peer in range(t.size):
        block = block_of(segment, peer, t.size, c.op.itemsize)
        copy(block.ptr, data_of(t, peer, step) + s.segment, block.nbytes)


add(b"flat", BROADCAST, WINDOWS, broadcast)
add(b"flat", ALL_GATHER, WINDOWS, all_gather)
add(b"flat", GATHER, WINDOWS, gather)
add(b"flat", SCATTER, WINDOWS, scatter)
add(b"flat", ALL_TO_ALL, WINDOWS, all_to_all)
add(b"flat", BARRIER, WINDOWS, barrier)
add(b"flat", ALL_REDUCE, WINDOWS, all_reduce)
add(b"staged", ALL_REDUCE, WINDOWS, staged)
add(b"flat", REDUCE, WINDOWS, reduce)
add(b"flat", REDUCE_SCATTER, WINDOWS, reduce_scatter)
add(b"flat", SCAN, WINDOWS, scan)
add(b"flat", EXSCAN, WINDOWS, exscan)

"""The steps of windows; cydist/_native/window_protocol.pxd explains the protocol."""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from cydist._native.abi cimport (
    Call, Fingerprint, Head, MISMATCH, OK, PEER_LOST, Request, TIMEOUT, TINY_BYTES, Comm,
    Windows, has_left, head_of, note_wait_for, note_waited_for, now_ns, patiently,
)
from cydist._native.sync cimport has_reached, load_u64 as peek, spin

cdef extern from *:
    """
    /* This memory will be written soon: fetch its lines from other cores in the meantime. */
    static inline void cydist_fetch_to_write(const char *memory, size_t nbytes) {
        for (size_t i = 0; i < nbytes; i += 64)
    #if defined(__x86_64__)
            __asm__ __volatile__("prefetchw %0" : : "m"(memory[i]));    /* where unknown: a nop */
    #else
            __builtin_prefetch(memory + i, 1);
    #endif
    }
    """
    void fetch_to_write "cydist_fetch_to_write"(const char *memory, size_t nbytes) noexcept nogil


cdef enum:
    MOST_AHEAD = 1024           # bytes
    SUSPICION_NS = 50000000     # after a wait this long, look for a mismatch
    LONGEST_SUSPICION_NS = 1600000000


cdef inline bint has_posted(Comm *t, int rank, uint64_t step) noexcept nogil:
    return peek(&head_of(t.windows, rank, step).posted) == step + 1


cdef int compare_step(Comm *t, Call *c, int peer, uint64_t step,
                      const Fingerprint *ours) noexcept nogil:
    """Return OK if the peer was in the same call as this rank in this step, else MISMATCH."""
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


cdef int check_mismatch(Comm *t, Call *c, uint64_t last) noexcept nogil:
    """Look, after a long wait in a step, for a peer in another call than this rank."""
    cdef const Fingerprint *ours
    cdef uint64_t step = t.windows.consumed
    cdef int peer
    while has_reached(last, step) or has_posted(t, t.rank, step):
        # Other ranks may have written steps that this rank has yet to write.
        ours = call_of(t, t.rank, step) if has_posted(t, t.rank, step) else &c.fingerprint
        for peer in range(t.size):
            if has_posted(t, peer, step) and compare_step(t, c, peer, step, ours) != OK:
                return MISMATCH
        step += 1
    return OK


cdef bint has_other_message(Comm *t, Call *c) noexcept nogil:
    """Return whether a peer has sent a message of this call, which uses none on this rank."""
    cdef Request probe
    memset(&probe, 0, sizeof(Request))
    probe.tag = c.tag
    probe.expected = &c.fingerprint
    if t.contradicted == NULL or not t.contradicted(t, &probe):
        return False
    c.failed_peer = probe.source
    c.failed_step = -1
    c.theirs = probe.theirs
    c.theirs_bytes = probe.theirs_bytes
    return True


cdef int await_flag(Comm *t, Call *c, int peer, uint64_t *flag, uint64_t value,
                    uint64_t step) noexcept nogil:
    """Wait in a step for a peer's flag."""
    cdef Windows *w = t.windows
    cdef int status
    if has_reached(peek(flag), value) or spin(flag, value, &w.looks, w.most_looks):
        return OK
    patiently(c)
    if spin(flag, value, &w.spins, w.most_spins):
        return OK
    note_wait_for(t, peer)
    status = sleep_for_flag(t, c, peer, flag, value, step)
    note_waited_for(t)
    return status


cdef int sleep_for_flag(Comm *t, Call *c, int peer, uint64_t *flag, uint64_t value,
                        uint64_t step) noexcept nogil:
    """Wait for a flag that spinning did not see."""
    cdef int64_t until, patience = SUSPICION_NS
    cdef int status
    while not has_reached(peek(flag), value):
        until = now_ns() + patience
        if until > c.deadline_ns:
            until = c.deadline_ns
        status = t.wait_flag(t, flag, value, until)
        if status == TIMEOUT:
            # A rank that found a mismatch has stopped: the peer may never arrive.
            if check_mismatch(t, c, step) != OK or has_other_message(t, c):
                return MISMATCH
            if now_ns() < c.deadline_ns:
                if t.control != NULL:
                    t.control.probe(t, peer)
                if patience < LONGEST_SUSPICION_NS:
                    patience *= 2
                continue
        if status != OK:
            c.failed_peer = peer
            c.failed_step = <int>(step - t.windows.step)
            return status
    return OK


cdef int wait_for_peer(Comm *t, Call *c, int peer, uint64_t step) noexcept nogil:
    cdef int status = OK
    if peer != t.rank:
        status = await_flag(t, c, peer, &head_of(t.windows, peer, step).posted, step + 1, step)
        if status == OK:
            status = compare_step(t, c, peer, step, call_of(t, t.rank, step))
    return status


cdef int wait_for_all(Comm *t, Call *c, uint64_t step) noexcept nogil:
    cdef int peer, status
    for peer in range(t.size):
        status = wait_for_peer(t, c, peer, step)
        if status != OK:
            return status
    return OK


cdef bint all_posted(Comm *t, uint64_t step) noexcept nogil:
    cdef int peer
    for peer in range(t.size):
        if not has_reached(peek(&head_of(t.windows, peer, step).posted), step + 1):
            return False
    return True


cdef int consume(Comm *t, Call *c, uint64_t steps, bint patient) noexcept nogil:
    cdef uint64_t step = t.windows.consumed
    cdef int status = OK
    while not has_reached(step, steps):
        if not patient and not all_posted(t, step):
            break
        status = wait_for_all(t, c, step)
        if status != OK:
            break
        step += 1
    if step != t.windows.consumed:
        release_slots(t, step)
    return status


cdef int find_departed(Comm *t, Call *c) noexcept nogil:
    """Return the status of a rank that left the group before reaching this rank's step, OK if there
    is none. Only called while free slots remain."""
    cdef uint64_t step = t.windows.consumed
    cdef int peer
    for peer in range(t.size):
        # It may have posted before it left.
        if (not has_posted(t, peer, step) and (t.windows.is_gone(t, peer) or has_left(t, peer))
                and not has_posted(t, peer, step)):
            c.failed_peer = peer
            c.failed_step = <int>(step - t.windows.step)
            return PEER_LOST
    return OK


cdef int mark_consumed(Comm *t, Call *c, uint64_t step) noexcept nogil:
    if not has_reached(t.windows.consumed, step):
        return consume(t, c, step + 1, True)
    release_slots(t, step + 1)
    return OK


cdef inline uint64_t slots_in_reserve(const Windows *w) noexcept nogil:
    """Return how many slots the lazily updated `consumed` flag may lag behind."""
    return w.slots // 2 if w.slots > 1 else 1


cdef inline void release_slots(Comm *t, uint64_t steps) noexcept nogil:
    """Record that this rank has consumed `steps` steps, and the others what they published."""
    cdef Windows *w = t.windows
    cdef uint64_t *own = &w.of[t.rank].flags.consumed
    cdef uint64_t there, least = steps
    cdef int peer
    w.consumed = steps
    for peer in range(t.size):
        there = steps - 1 - head_of(w, peer, steps - 1).behind
        if peer != t.rank and not has_reached(there, least):
            least = there
    if not has_reached(w.released, least):
        w.released = least
    # A writer of long data waits for every slot; otherwise the heads mostly tell it in time.
    if steps - w.step > 1 or steps - own[0] >= slots_in_reserve(w):
        t.raise_flag(t, own, steps)


cdef inline void note_released(Comm *t) noexcept nogil:
    cdef uint64_t least = t.windows.consumed
    cdef uint64_t there
    cdef int peer
    for peer in range(t.size):
        there = peek(&t.windows.of[peer].flags.consumed)
        if peer != t.rank and not has_reached(there, least):
            least = there
    t.windows.released = least


cdef int acquire_slot(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil:
    cdef Windows *w = t.windows
    cdef uint64_t ahead = w.slots if nbytes > w.short_bytes else w.heads
    cdef uint64_t needed = step + 1 - ahead
    cdef uint64_t *own = &w.of[t.rank].flags.consumed
    cdef int peer, status = OK
    if step - w.consumed >= slots_in_reserve(w):
        status = consume(t, c, step, False)
        if status == OK and step != w.consumed and (step - w.consumed) % w.slots == 0:
            status = find_departed(t, c)
    if status != OK:
        return status
    if not has_reached(w.consumed, needed):
        status = consume(t, c, needed, True)
    # Before waiting, because others in this step may wait for this flag.
    if status == OK and not has_reached(own[0], needed):
        t.raise_flag(t, own, w.consumed)
    if status != OK or has_reached(w.released, needed):
        return status
    for peer in range(t.size):
        if status == OK and peer != t.rank:
            status = await_flag(t, c, peer, &w.of[peer].flags.consumed, needed, step)
    if status == OK:
        note_released(t)
    return status


cdef void publish(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil:
    cdef Head *own = head_of(t.windows, t.rank, step)
    memcpy(&own.call, &c.fingerprint, sizeof(Fingerprint) - sizeof(uint64_t))     # no note
    own.behind = <uint32_t>(step - t.windows.consumed)
    t.raise_flag(t, &own.posted, step + 1)
    fetch_to_write(<const char *>head_of(t.windows, t.rank, step + 1), sizeof(Head))
    if nbytes > TINY_BYTES:
        fetch_to_write(place_of(t, c, t.rank, step + 1, nbytes),
                       min(nbytes, <size_t>MOST_AHEAD))


cdef size_t part_bytes(Comm *t, Call *c, size_t parts, size_t unit) noexcept nogil:
    cdef size_t nbytes = t.windows.slot_bytes
    if c.segment_bytes > 0 and c.segment_bytes < nbytes:
        nbytes = c.segment_bytes
    if nbytes // parts < unit:      # a small segment size must not make it impossible
        nbytes = t.windows.slot_bytes
    return nbytes // parts // unit * unit

"""Windows, step by step; cydist/_native/steps.pxd says how."""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memset

from cydist._native.abi cimport (
    Call, Fingerprint, Head, MISMATCH, OK, Request, TIMEOUT, Transport, head_of, now_ns,
)
from cydist._native.waiting cimport load_u64 as peek


cdef enum:
    SUSPICION_NS = 50000000     # after so long a wait, look for a mismatch
    LONGEST_SUSPICION_NS = 1600000000


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
    cdef uint64_t first = t.windows.of[t.rank].flags.consumed
    cdef uint64_t step
    cdef int peer
    for step in range(first, first + <uint64_t>t.windows.slots):
        if peek(&head_of(t.windows, t.rank, step).posted) != step + 1:
            break
        for peer in range(t.size):
            if (peek(&head_of(t.windows, peer, step).posted) == step + 1
                    and compare(t, c, peer, step) != OK):
                return MISMATCH
    return OK


cdef bint sent_for_another(Transport *t, Call *c) noexcept nogil:
    """Has anybody sent us a message of this call? It is not made of messages here."""
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


cdef int reach(Transport *t, Call *c, int peer, uint64_t *flag, uint64_t value,
               uint64_t step) noexcept nogil:
    """Wait in a step for a peer's flag."""
    cdef int64_t until, patience = SUSPICION_NS
    cdef int status
    while peek(flag) < value:
        until = now_ns() + patience
        if until > c.deadline_ns:
            until = c.deadline_ns
        status = t.wait_flag(t, flag, value, until)
        if status == TIMEOUT:
            # Whoever found a mismatch has stopped: the peer we wait for may never come.
            if suspect(t, c) != OK or sent_for_another(t, c):
                return MISMATCH
            if now_ns() < c.deadline_ns:
                if t.board != NULL:
                    t.board.ask(t, peer)
                if patience < LONGEST_SUSPICION_NS:
                    patience *= 2
                continue
        if status != OK:
            c.failed_peer = peer
            c.failed_step = <int>(step - t.windows.step)
            return status
    return OK


cdef int hear(Transport *t, Call *c, int peer, uint64_t step) noexcept nogil:
    cdef int status = OK
    if peer != t.rank:
        status = reach(t, c, peer, &head_of(t.windows, peer, step).posted, step + 1, step)
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


cdef bint all_posted(Transport *t, uint64_t step) noexcept nogil:
    cdef int peer
    for peer in range(t.size):
        if peek(&head_of(t.windows, peer, step).posted) <= step:
            return False
    return True


cdef int consume(Transport *t, Call *c, uint64_t steps, bint patient) noexcept nogil:
    cdef uint64_t *own = &t.windows.of[t.rank].flags.consumed
    cdef uint64_t step = own[0]
    cdef int status = OK
    while step < steps:
        if not patient and not all_posted(t, step):
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


cdef void publish(Transport *t, Call *c, uint64_t step, uint64_t note) noexcept nogil:
    cdef Head *own = head_of(t.windows, t.rank, step)
    own.call = c.fingerprint
    own.call.note = note
    t.raise_flag(t, &own.posted, step + 1)


cdef size_t part_bytes(Transport *t, Call *c, size_t parts, size_t unit) noexcept nogil:
    cdef size_t nbytes = t.windows.slot_bytes
    if c.segment_bytes > 0 and c.segment_bytes < nbytes:
        nbytes = c.segment_bytes
    if nbytes // parts < unit:      # a small segment must not make it impossible
        nbytes = t.windows.slot_bytes
    return nbytes // parts // unit * unit

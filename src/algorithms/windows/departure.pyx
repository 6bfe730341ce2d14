"""Parting: the members of a group that ends compare their last call.

In windows a rank publishes how many steps it has taken. It compares the steps that it has not
compared yet with its own. It waits for members that are not as far, but not for their end.

Over messages this is a dissemination, like dissemination.pyx's barrier. In round k a rank sends the
fingerprint of its last call to rank + 2**k and compares that of rank - 2**k. So after the last
round it has compared, through others, with all ranks. A rank whose last call cannot be over before
all members have made it only sends. A rank that has not compared with all ranks before it, because
one was late or has left, says so in the `note` of its later messages: they cover it alone.

    parting   at most ceil(log2 p) messages of no bytes sent and received per rank
"""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memset
from posix.unistd cimport usleep

from cydist._native.abi cimport (
    MISMATCH, NO_CALL, OK, DEPARTURE_TAG, PEER_LOST, PENDING, RANK_BITS, TIMEOUT, Call, Comm,
    Fingerprint, Request, Windows, head_of, now_ns, set_compare_last,
)
from cydist._native.algorithm_table cimport WINDOWS, Entry, row_of
from cydist._native.pipeline cimport complete, withdraw
from cydist._native.window_protocol cimport call_of, consume
from cydist._native.sync cimport PAUSE_US, has_reached, load_int, load_u64, store_u64


cdef enum:
    LOOK_NS = 20000000          # between checks whether a late member has parted
    FLUSH_NS = 50000000         # for messages to ranks without a connection yet
    FOR_ITSELF = 1              # Fingerprint.note: the sender has not compared with all


cdef int compare_last(Comm *t, Call *c, bint known, bint alone) noexcept nogil:
    cdef int status = OK
    if t.windows != NULL:
        status = compare_steps(t, c, alone)
    if status == OK and (t.windows == NULL or not through_windows(&c.fingerprint)):
        status = exchange_last_calls(t, c, known, alone)
    c.failed_step = -1
    return status


cdef bint through_windows(const Fingerprint *call) noexcept nogil:
    cdef const Entry *entry = row_of(call.algorithm)
    return entry != NULL and entry.needs & WINDOWS != 0


# Through windows

cdef inline bint has_posted(Comm *t, int rank, uint64_t step) noexcept nogil:
    return load_u64(&head_of(t.windows, rank, step).posted) == step + 1


cdef void record_difference(Comm *t, Call *c, int peer, uint64_t ours,
                            uint64_t theirs) noexcept nogil:
    """Record that the calls differ after these numbers of steps. A rank without steps has no
    call."""
    if ours != t.windows.first:
        c.fingerprint = call_of(t, t.rank, ours - 1)[0]
    memset(&c.theirs, 0, sizeof(Fingerprint))
    c.theirs.seq = c.fingerprint.seq
    c.theirs.collective = NO_CALL
    if theirs != t.windows.first:
        c.theirs = call_of(t, peer, theirs - 1)[0]
    c.fingerprint.note = 0
    c.theirs.note = 0
    c.failed_peer = peer


cdef bint any_departed(Comm *t, Call *c) noexcept nogil:
    """Return whether a member has ended the group before the step that this rank waits for."""
    cdef Windows *w = t.windows
    cdef uint64_t steps
    cdef int peer
    for peer in range(t.size):
        steps = load_u64(&w.of[peer].flags.departed_after)
        if peer == t.rank or steps == 0:
            continue
        steps += w.first - 1
        if has_reached(w.consumed, steps) and not has_posted(t, peer, w.consumed):
            record_difference(t, c, peer, w.consumed + 1, steps)
            return True
    return False


cdef int compare_steps(Comm *t, Call *c, bint alone) noexcept nogil:
    cdef Windows *w = t.windows
    cdef int64_t deadline = c.deadline_ns
    cdef int status = TIMEOUT
    store_u64(&w.of[t.rank].flags.departed_after, w.step - w.first + 1)
    if alone:
        return OK
    while status == TIMEOUT:
        c.deadline_ns = min(now_ns() + LOOK_NS, deadline)
        status = consume(t, c, w.step, True)
        if (status == TIMEOUT or status == PEER_LOST) and any_departed(t, c):
            status = MISMATCH
        if status != TIMEOUT or now_ns() >= deadline:
            break
        if t.control != NULL and c.failed_peer >= 0:
            t.control.probe(t, c.failed_peer)   # a departed rank answers that it has left
    c.deadline_ns = deadline
    return status


# Over messages

cdef void address(Request *r, const Fingerprint *call, int peer) noexcept nogil:
    memset(r, 0, sizeof(Request))
    r.peer = peer
    r.tag = DEPARTURE_TAG
    r.expected = call


cdef bint same_call(const Fingerprint *a, const Fingerprint *b) noexcept nogil:
    return memcmp(a, b, sizeof(Fingerprint) - sizeof(uint64_t)) == 0       # except the note


cdef bint sends_pending(Comm *t, Request *sends, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        if load_int(&sends[i].status) == PENDING and t.test(t, &sends[i]) == PENDING:
            return True
    return False


cdef int exchange_last_calls(Comm *t, Call *c, bint known, bint alone) noexcept nogil:
    cdef Fingerprint mine = c.fingerprint
    cdef Fingerprint own = c.fingerprint
    cdef Request sends[RANK_BITS]
    cdef Request heard
    cdef bint listens = not (known or alone), of_all = known or not alone
    cdef int status = OK, sent = 0, distance = 1, lost = -1, posted
    cdef int64_t until
    own.note = FOR_ITSELF
    while distance < t.size and status == OK:
        address(&sends[sent], &mine if of_all else &own, (t.rank + distance) % t.size)
        posted = t.send(t, &sends[sent])
        if posted != OK:
            sends[sent].status = posted
        sent += 1
        if listens:
            address(&heard, &mine, (t.rank - distance + t.size) % t.size)
            posted = t.recv(t, &heard)
            if posted != OK:
                heard.status = posted
            status = complete(t, c, &heard, 1)
            if status == MISMATCH and same_call(&c.theirs, &mine):
                of_all, status = False, OK
            elif status == TIMEOUT:
                of_all = listens = False
                status = OK
            elif status == PEER_LOST:
                of_all, status, lost = False, OK, heard.peer
        distance *= 2
    c.theirs.note = 0
    if not known:
        until = now_ns() + FLUSH_NS
        while sends_pending(t, sends, sent) and now_ns() < until:
            usleep(PAUSE_US)
    withdraw(t, sends, sent)
    if status == OK and lost >= 0:
        c.failed_peer, status = lost, PEER_LOST
    return status


set_compare_last(compare_last)

"""A group's control messages, which have a tag of their own; see control_plane.pxd."""
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

from cydist._native.abi cimport (
    ABORTED, ANY_SOURCE, CLOSED, INTERRUPTED, MISMATCH, NOTICE_TAG, OK, PEER_LOST, PENDING,
    RAISED, TIMEOUT, Call, Fingerprint, Request, Comm, now_ns, patiently,
)
from cydist._native.sync cimport (
    exchange_int, load_int, load_u64, sched_yield, store_int, store_u64,
)


cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int)


cdef enum:
    TELL_NS = 50000000
    EXPLAIN_NS = 150000000
    ARRIVE_NS = 500000000       # the longest wait for a control message that was announced
    LAST_WORDS_NS = 10000000
    PAUSE_US = 200

cdef Fingerprint none           # zero: the fingerprint of all control messages


cdef ControlMessage new_notice(int status, int rank, int peer, int step) noexcept nogil:
    cdef ControlMessage notice
    memset(&notice, 0, sizeof(ControlMessage))
    notice.kind = FAILED
    notice.status = status
    notice.teller = rank
    notice.peer = peer
    notice.step = step
    return notice


cdef ControlMessage notice_of(const Call *call, int status, int rank) noexcept nogil:
    cdef ControlMessage notice = new_notice(status, rank, call.failed_peer, call.failed_step)
    notice.ours = call.fingerprint
    notice.our_bytes = call.our_bytes
    notice.theirs = call.theirs
    notice.their_bytes = call.theirs_bytes
    return notice


cdef void lock(ControlPlane *n) noexcept nogil:
    while exchange_int(&n.busy, 1) != 0:
        sched_yield()


cdef void unlock(ControlPlane *n) noexcept nogil:
    store_int(&n.busy, 0)


cdef void address(Request *r, ControlMessage *notice, int peer) noexcept nogil:
    memset(r, 0, sizeof(Request))
    r.ptr = <char *>notice
    r.nbytes = sizeof(ControlMessage)
    r.peer = peer
    r.tag = NOTICE_TAG
    r.expected = &none
    r.status = OK


cdef void listen(ControlPlane *n, Comm *t) noexcept nogil:
    address(&n.receive, &n.inbox, ANY_SOURCE)
    n.listening = t.recv(t, &n.receive) == OK


cdef void open_notices(ControlPlane *n, Comm *t) noexcept nogil:
    n.board.look = look
    n.board.ask = ask
    t.board = &n.board
    if t.size > 1:
        listen(n, t)


cdef void withdraw(Comm *t, Request *r) noexcept nogil:
    if load_int(&r.status) == PENDING:
        t.cancel(t, r)
        r.status = OK


cdef void close_notices(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int i
    cdef Question *question
    lock(n)
    n.closed = True
    if n.listening:
        withdraw(t, &n.receive)
        n.listening = False
    while n.questions != NULL:
        question = n.questions
        n.questions = question.next
        withdraw(t, &question.send)
        free(question)
    if n.tells != NULL:
        for i in range(t.size):
            withdraw(t, &n.tells[i])
        free(n.tells)
        n.tells = NULL
    unlock(n)


# Receiving

cdef int look(Comm *t) noexcept nogil:
    cdef ControlPlane *n = <ControlPlane *>t.board
    # If another thread is at it, that thread handles the messages: no need to wait.
    if exchange_int(&n.busy, 1) == 0:
        if n.listening:
            t.test(t, &n.receive)       # a wait for a flag progresses no messages
        hear(n, t)
        unlock(n)
    return why(n)


cdef int why(ControlPlane *n) noexcept nogil:
    """Return the status that ends a wait on this rank. Another rank's timeout does not mean that
    this rank's deadline has passed, and another rank's signal was not raised here."""
    cdef int failed = load_int(&n.failed)
    return ABORTED if failed == TIMEOUT or failed == INTERRUPTED else failed


cdef void hear(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int status
    while n.listening:
        status = load_int(&n.receive.status)
        if status == PENDING:
            return
        if status == OK and makes_sense(&n.inbox, t, n.receive.source):
            n.inbox.call[CALL_BYTES - 1] = 0
            heed(n, t, &n.inbox)
        if status == OK or status == MISMATCH:
            listen(n, t)
        else:
            n.listening = False         # no member is left to receive from


cdef bint makes_sense(const ControlMessage *notice, const Comm *t, int source) noexcept nogil:
    """Return whether this is a valid message. A broken member may send anything."""
    return (notice.teller == source and 0 <= source < t.size and -1 <= notice.peer < t.size
            and (notice.kind == ASK or (notice.kind == FAILED and notice.status != CLOSED
                                        and RAISED <= notice.status <= TIMEOUT)))


cdef void heed(ControlPlane *n, Comm *t, const ControlMessage *notice) noexcept nogil:
    if notice.kind == FAILED:
        keep(n, notice)
        n.told = True                   # by the rank that found the failure
    elif notice.ours.seq <= n.entered:
        compare(n, t, notice)
    elif n.early_count < EARLY:
        n.early[n.early_count] = notice[0]
        n.early_count += 1


cdef void keep(ControlPlane *n, const ControlMessage *failure) noexcept nogil:
    if n.failed == OK:
        n.failure = failure[0]
        store_int(&n.failed, failure.status)


cdef void compare(ControlPlane *n, Comm *t, const ControlMessage *asked) noexcept nogil:
    """Record a mismatch if this rank is, or was, in another call of the asker's number."""
    cdef const Fingerprint *ours = &n.recent[asked.ours.seq % RECENT]
    cdef ControlMessage found
    if ours.seq != asked.ours.seq or same(ours, &asked.ours):
        return
    found = mismatch(t.rank, asked.teller, ours, &asked.ours)
    keep(n, &found)


cdef ControlMessage mismatch(int rank, int peer, const Fingerprint *ours,
                             const Fingerprint *theirs) noexcept nogil:
    cdef ControlMessage found
    memset(&found, 0, sizeof(ControlMessage))
    found.kind = FAILED
    found.status = MISMATCH
    found.teller = rank
    found.peer = peer
    found.step = -1
    found.ours = ours[0]
    found.theirs = theirs[0]
    return found


cdef void catch_up(ControlPlane *n, Comm *t) noexcept nogil:
    """Receive what has arrived, and wait for what is announced."""
    cdef int64_t until = 0
    while True:
        if n.listening:
            t.test(t, &n.receive)
        hear(n, t)
        if not announced(t) or not n.listening or load_int(&n.failed) != OK:
            return
        if until == 0:
            until = now_ns() + ARRIVE_NS
        elif now_ns() >= until:         # its sender died before it was sent
            store_u64(&t.windows.of[t.rank].flags.told, 0)
        usleep(PAUSE_US)


cdef inline bint announced(Comm *t) noexcept nogil:
    return t.windows != NULL and load_u64(&t.windows.of[t.rank].flags.told) != 0


cdef int hear_now(ControlPlane *n, Comm *t) noexcept nogil:
    lock(n)
    catch_up(n, t)
    unlock(n)
    return load_int(&n.failed)


cdef void contradict(ControlPlane *n, Comm *t, const Fingerprint *call,
                     const Request *stray) noexcept nogil:
    """Record that a peer sent a message of a call that is over on this rank."""
    cdef const Fingerprint *ours = &n.recent[stray.theirs.seq % RECENT]
    cdef ControlMessage found = mismatch(
        t.rank, stray.source, ours if ours.seq == stray.theirs.seq else call, &stray.theirs)
    found.their_bytes = stray.theirs_bytes
    keep(n, &found)


cdef int enter(ControlPlane *n, Comm *t, Call *c) noexcept nogil:
    cdef const Fingerprint *call = &c.fingerprint
    cdef int i, kept = 0
    cdef Request stray
    if exchange_int(&n.busy, 1) != 0:
        patiently(c)
        lock(n)
    # Polling for messages takes a system call; in windows a flag says whether there are any.
    if t.windows == NULL or announced(t):
        patiently(c)
        catch_up(n, t)
        if t.left_over != NULL and t.left_over(t, call.seq, &stray):
            contradict(n, t, call, &stray)
    n.entered = call.seq
    n.recent[call.seq % RECENT] = call[0]
    for i in range(n.early_count):
        if n.early[i].ours.seq <= n.entered:
            compare(n, t, &n.early[i])
        else:
            n.early[kept] = n.early[i]
            kept += 1
    n.early_count = kept
    unlock(n)
    return why(n)


cdef Fingerprint last_call(ControlPlane *n) noexcept nogil:
    cdef Fingerprint last
    lock(n)
    last = n.recent[n.entered % RECENT]
    unlock(n)
    return last


# Sending

cdef bint is_asking(ControlPlane *n, int peer) noexcept nogil:
    """Return whether a question to this peer is on its way. Frees the ones that were taken."""
    cdef Question **place = &n.questions
    cdef Question *question = place[0]
    cdef bint found = False
    while question != NULL:
        if load_int(&question.send.status) == PENDING:
            found = found or question.send.peer == peer
            place = &question.next
        else:
            place[0] = question.next
            free(question)
        question = place[0]
    return found


cdef void ask(Comm *t, int peer) noexcept nogil:
    """Query a peer for its call, but not before it has taken the last query. However long it
    computes, at most one is queued for it."""
    cdef ControlPlane *n = <ControlPlane *>t.board
    cdef Question *question = NULL
    cdef int status
    lock(n)
    if not n.closed and not is_asking(n, peer):
        question = <Question *>calloc(1, sizeof(Question))
    if question != NULL:
        question.notice.kind = ASK
        question.notice.teller = t.rank
        question.notice.ours = n.recent[n.entered % RECENT]
        address(&question.send, &question.notice, peer)
        question.next = n.questions
        n.questions = question
        n.asked += 1
        status = t.send(t, &question.send)
        if status != OK:
            question.send.status = status
    unlock(n)


cdef void explain(ControlPlane *n, Comm *t, ControlMessage *found) noexcept nogil:
    """Make a failure clearer before it is reported.

    Of two ranks in different calls, one took an earlier call for another. The rank that is ahead
    remembers which, so it reports first. A departed rank has often reported why it left, and its
    flags are seen before its messages.
    """
    cdef const Fingerprint *ours = &n.recent[found.theirs.seq % RECENT]
    cdef int64_t until = now_ns() + EXPLAIN_NS
    if found.status == PEER_LOST:
        until = now_ns() + LAST_WORDS_NS
    elif found.status != MISMATCH or found.ours.seq == found.theirs.seq:
        return
    elif found.ours.seq > found.theirs.seq:
        if ours.seq == found.theirs.seq and not same(ours, &found.theirs):
            found.ours = ours[0]
        return
    while hear_now(n, t) == OK and now_ns() < until:
        usleep(PAUSE_US)


cdef inline bint same(const Fingerprint *a, const Fingerprint *b) noexcept nogil:
    return memcmp(a, b, sizeof(Fingerprint)) == 0


cdef void remember(ControlPlane *n, const ControlMessage *failure) noexcept nogil:
    lock(n)
    keep(n, failure)
    unlock(n)


cdef void fail(ControlPlane *n, Comm *t, ControlMessage *failure) noexcept nogil:
    cdef int64_t until
    cdef bint told
    explain(n, t, failure)
    lock(n)
    keep(n, failure)
    told = n.told or n.closed
    n.told = True
    if not told:
        tell(n, t)
    unlock(n)
    if not told:
        until = now_ns() + TELL_NS
        # All waits end at once in a failed group, so poll directly.
        while under_way(n, t) and now_ns() < until:
            usleep(PAUSE_US)


cdef void tell(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int i, status
    n.tells = <Request *>calloc(t.size, sizeof(Request))
    if n.tells == NULL:
        return
    for i in range(t.size):
        if i == t.rank:
            continue
        address(&n.tells[i], &n.failure, i)
        status = t.send(t, &n.tells[i])
        if status != OK:
            n.tells[i].status = status
        if t.windows != NULL:
            store_u64(&t.windows.of[i].flags.told, 1)


cdef bint under_way(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int i
    for i in range(t.size if n.tells != NULL else 0):
        if load_int(&n.tells[i].status) == PENDING and t.test(t, &n.tells[i]) == PENDING:
            return True
    return False

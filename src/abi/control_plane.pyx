"""A group's control messages, which have a tag of their own; see control_plane.pxd."""
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset
from posix.unistd cimport usleep

from cydist._native.abi cimport (
    ABORTED, ANY_SOURCE, CLOSED, INTERRUPTED, MISMATCH, CONTROL_TAG, OK, PEER_LOST, PENDING,
    RAISED, TIMEOUT, Call, Fingerprint, Request, Comm, first_count, now_ns, patiently,
)
from cydist._native.sync cimport (
    PAUSE_US, exchange_int, has_reached, load_int, load_u64, sched_yield, store_int, store_u64,
)


cdef enum:
    SEND_FAILURE_NS = 50000000
    EXPLAIN_NS = 150000000
    ARRIVE_NS = 500000000       # the longest wait for a control message that was announced
    LATE_MESSAGE_NS = 10000000
    LOOK_NS = 20000             # calls that begin within this time look for messages once

cdef Fingerprint none           # zero: the fingerprint of all control messages


cdef ControlMessage failure_message(int status, int rank, int peer, int step) noexcept nogil:
    cdef ControlMessage message
    memset(&message, 0, sizeof(ControlMessage))
    message.kind = FAILED
    message.status = status
    message.teller = rank
    message.peer = peer
    message.step = step
    return message


cdef ControlMessage failure_message_of(const Call *call, int status, int rank) noexcept nogil:
    cdef ControlMessage message = failure_message(status, rank, call.failed_peer, call.failed_step)
    message.ours = call.fingerprint
    message.our_bytes = call.our_bytes
    message.theirs = call.theirs
    message.their_bytes = call.theirs_bytes
    return message


cdef void lock(ControlPlane *n) noexcept nogil:
    while exchange_int(&n.busy, 1) != 0:
        sched_yield()


cdef void unlock(ControlPlane *n) noexcept nogil:
    store_int(&n.busy, 0)


cdef void address(Request *r, ControlMessage *message, int peer) noexcept nogil:
    memset(r, 0, sizeof(Request))
    r.ptr = <char *>message
    r.nbytes = sizeof(ControlMessage)
    r.peer = peer
    r.tag = CONTROL_TAG
    r.expected = &none
    r.status = OK


cdef void listen(ControlPlane *n, Comm *t) noexcept nogil:
    address(&n.receive, &n.inbox, ANY_SOURCE)
    n.listening = t.recv(t, &n.receive) == OK


cdef void open_control_plane(ControlPlane *n, Comm *t) noexcept nogil:
    n.view.peek = peek
    n.view.probe = probe
    t.control = &n.view
    n.entered = n.recent[first_count() % RECENT].seq = first_count()
    if t.size > 1:
        listen(n, t)


cdef void withdraw(Comm *t, Request *r) noexcept nogil:
    if load_int(&r.status) == PENDING:
        t.cancel(t, r)
        r.status = OK


cdef void close_control_plane(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int i
    cdef Probe *sent
    lock(n)
    n.closed = True
    store_int(&n.windows_open, 0)
    if n.listening:
        withdraw(t, &n.receive)
        n.listening = False
    while n.probes != NULL:
        sent = n.probes
        n.probes = sent.next
        withdraw(t, &sent.send)
        free(sent)
    if n.failure_sends != NULL:
        for i in range(t.size):
            withdraw(t, &n.failure_sends[i])
        free(n.failure_sends)
        n.failure_sends = NULL
    unlock(n)


# Receiving

cdef int peek(Comm *t) noexcept nogil:
    cdef ControlPlane *n = <ControlPlane *>t.control
    if t.whole != NULL:
        t = t.whole
    # If another thread is already doing this, it handles the messages, so do not wait.
    if exchange_int(&n.busy, 1) == 0:
        if t.progress != NULL:
            t.progress(t)               # a wait for a flag moves no messages
        poll(n, t)
        unlock(n)
    return wait_status(n)


cdef int wait_status(ControlPlane *n) noexcept nogil:
    """Return the status that ends a wait on this rank. Another rank's timeout does not mean that
    this rank's deadline has passed, and another rank's signal was not raised here."""
    cdef int failed = load_int(&n.failed)
    return ABORTED if failed == TIMEOUT or failed == INTERRUPTED else failed


cdef void poll(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int status
    while n.listening:
        status = load_int(&n.receive.status)
        if status == PENDING:
            return
        if status == OK and is_plausible(&n.inbox, t, n.receive.source):
            n.inbox.call[CALL_BYTES - 1] = 0
            on_message(n, t, &n.inbox)
        if status == OK or status == MISMATCH:
            listen(n, t)
        elif status == PEER_LOST:
            # A member died within its message, and another one may report that. Where no member is
            # left to receive from, this one ends in the same way: so it is tried once each time.
            listen(n, t)
            return
        else:
            n.listening = False


cdef bint is_plausible(const ControlMessage *message, const Comm *t, int source) noexcept nogil:
    """Return whether this is a valid message. A broken member may send anything."""
    if not (0 <= source < t.size and -1 <= message.peer < t.size):
        return False
    if message.kind == PROBE:
        return message.teller == source
    # Another member may have passed it on.
    return (message.kind == FAILED and 0 <= message.teller < t.size and message.teller != t.rank
            and message.status != CLOSED and RAISED <= message.status <= TIMEOUT)


cdef void on_message(ControlPlane *n, Comm *t, const ControlMessage *message) noexcept nogil:
    if message.kind == FAILED:
        record(n, message)
        n.failure_is_known = True       # by the rank that found the failure
    elif has_reached(n.entered, message.ours.seq):
        compare_calls(n, t, message)
    elif n.early_count < EARLY:
        n.early[n.early_count] = message[0]
        n.early_count += 1


cdef void record(ControlPlane *n, const ControlMessage *failure) noexcept nogil:
    if n.failed == OK:
        n.failure = failure[0]
        store_int(&n.failed, failure.status)


cdef void compare_calls(ControlPlane *n, Comm *t, const ControlMessage *asked) noexcept nogil:
    """Record a mismatch if this rank is, or was, in another call of the asker's number."""
    cdef const Fingerprint *ours = &n.recent[asked.ours.seq % RECENT]
    cdef ControlMessage found
    if ours.seq != asked.ours.seq or is_same_call(ours, &asked.ours):
        return
    found = mismatch_message(t.rank, asked.teller, ours, &asked.ours)
    record(n, &found)


cdef ControlMessage mismatch_message(int rank, int peer, const Fingerprint *ours,
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


cdef void drain_inbox(ControlPlane *n, Comm *t) noexcept nogil:
    """Receive what has arrived, and wait for what is announced."""
    cdef int64_t until = 0
    while True:
        if n.listening:
            t.test(t, &n.receive)
        poll(n, t)
        if not failure_announced(t) or not n.listening or load_int(&n.failed) != OK:
            return
        if until == 0:
            until = now_ns() + ARRIVE_NS
        elif now_ns() >= until:         # its sender died before it was sent
            store_u64(&t.windows.of[t.rank].flags.failure_coming, 0)
        usleep(PAUSE_US)


cdef inline bint failure_announced(Comm *t) noexcept nogil:
    # A thread with a message may be the one that did not open the windows.
    return (load_int(&(<ControlPlane *>t.control).windows_open) != 0
            and load_u64(&t.windows.of[t.rank].flags.failure_coming) != 0)


cdef int poll_now(ControlPlane *n, Comm *t) noexcept nogil:
    lock(n)
    drain_inbox(n, t)
    unlock(n)
    return load_int(&n.failed)


cdef void report_mismatch(ControlPlane *n, Comm *t, const Fingerprint *call,
                          const Request *stray) noexcept nogil:
    """Record that a peer sent a message of a call that is over on this rank."""
    cdef const Fingerprint *ours = &n.recent[stray.theirs.seq % RECENT]
    cdef ControlMessage found = mismatch_message(
        t.rank, stray.source, ours if ours.seq == stray.theirs.seq else call, &stray.theirs)
    found.their_bytes = stray.theirs_bytes
    record(n, &found)


cdef int begin_call(ControlPlane *n, Comm *t, Call *c) noexcept nogil:
    cdef const Fingerprint *call = &c.fingerprint
    cdef int i, kept = 0
    cdef int64_t now
    cdef Request stray
    if exchange_int(&n.busy, 1) != 0:
        patiently(c)
        lock(n)
    # Looking for messages takes a system call, so calls that follow each other closely share one.
    # In windows a flag says whether there are any.
    if load_int(&n.windows_open) == 0 or failure_announced(t):
        patiently(c)
        now = now_ns()
        if now >= n.next_look or failure_announced(t):
            n.next_look = now + LOOK_NS
            drain_inbox(n, t)
            if t.left_over != NULL and t.left_over(t, call.seq, &stray):
                report_mismatch(n, t, call, &stray)
    n.entered = call.seq
    n.recent[call.seq % RECENT] = call[0]
    for i in range(n.early_count):
        if has_reached(n.entered, n.early[i].ours.seq):
            compare_calls(n, t, &n.early[i])
        else:
            n.early[kept] = n.early[i]
            kept += 1
    n.early_count = kept
    unlock(n)
    return wait_status(n)


cdef int look_back(ControlPlane *n, Comm *t, const Call *c) noexcept nogil:
    """Look again for messages that no receive took, now that those before this call's own are
    here. Two ranks in different calls may both only send, and learn nothing in those calls."""
    cdef Request stray
    if (load_int(&n.windows_open) != 0 or t.left_over == NULL
            or not t.left_over(t, c.fingerprint.seq + 1, &stray)):
        return OK
    lock(n)
    report_mismatch(n, t, &c.fingerprint, &stray)
    unlock(n)
    return wait_status(n)


cdef int end_calls(ControlPlane *n, Comm *t, Fingerprint *last) noexcept nogil:
    cdef Request stray
    lock(n)
    drain_inbox(n, t)
    last[0] = n.recent[n.entered % RECENT]
    # A slow message may come when its call, and later ones, are over on both sides.
    if t.left_over != NULL and t.left_over(t, last.seq, &stray):
        report_mismatch(n, t, last, &stray)
    unlock(n)
    return load_int(&n.failed)


# Sending

cdef bint is_probing(ControlPlane *n, int peer) noexcept nogil:
    """Return whether a question to this peer is on its way. Frees the ones that were taken."""
    cdef Probe **place = &n.probes
    cdef Probe *sent = place[0]
    cdef bint found = False
    while sent != NULL:
        if load_int(&sent.send.status) == PENDING:
            found = found or sent.send.peer == peer
            place = &sent.next
        else:
            place[0] = sent.next
            free(sent)
        sent = place[0]
    return found


cdef void probe(Comm *t, int peer) noexcept nogil:
    """Query a peer for its call, but not before it has taken the last query. However long it
    computes, at most one is queued for it."""
    cdef ControlPlane *n = <ControlPlane *>t.control
    cdef Probe *sent = NULL
    cdef int status
    if t.whole != NULL:
        peer = t.in_whole[peer]
        t = t.whole
    lock(n)
    if not n.closed and not is_probing(n, peer):
        sent = <Probe *>calloc(1, sizeof(Probe))
    if sent != NULL:
        sent.message.kind = PROBE
        sent.message.teller = t.rank
        sent.message.ours = n.recent[n.entered % RECENT]
        address(&sent.send, &sent.message, peer)
        sent.next = n.probes
        n.probes = sent
        n.probes_sent += 1
        status = t.send(t, &sent.send)
        if status != OK:
            sent.send.status = status
    unlock(n)


cdef void resolve_mismatch(ControlPlane *n, Comm *t, ControlMessage *found) noexcept nogil:
    """Make a failure clearer before it is reported.

    Of two ranks in different calls, one took an earlier call for another. The rank that is ahead
    remembers which, so it reports first. A departed rank has often reported why it left, and its
    flags are seen before its messages.
    """
    cdef const Fingerprint *ours = &n.recent[found.theirs.seq % RECENT]
    cdef int64_t until = now_ns() + EXPLAIN_NS
    if found.status == PEER_LOST:
        until = now_ns() + LATE_MESSAGE_NS
    elif found.status != MISMATCH or found.ours.seq == found.theirs.seq:
        return
    elif has_reached(found.ours.seq, found.theirs.seq):
        if ours.seq == found.theirs.seq and not is_same_call(ours, &found.theirs):
            found.ours = ours[0]
        return
    while poll_now(n, t) == OK and now_ns() < until:
        usleep(PAUSE_US)


cdef inline bint is_same_call(const Fingerprint *a, const Fingerprint *b) noexcept nogil:
    return memcmp(a, b, sizeof(Fingerprint)) == 0


cdef void record_failure(ControlPlane *n, const ControlMessage *failure) noexcept nogil:
    lock(n)
    record(n, failure)
    unlock(n)


cdef void broadcast_failure(ControlPlane *n, Comm *t, ControlMessage *failure) noexcept nogil:
    cdef int64_t until
    cdef bint sends
    resolve_mismatch(n, t, failure)
    if failure.status == PEER_LOST and failure.peer >= 0 and t.host_is_lost != NULL:
        failure.host_lost = t.host_is_lost(t, failure.peer)
    lock(n)
    record(n, failure)
    # A rank that was told of it passes it on: a member that waits for this rank may see it leave
    # before the finder has a connection to that member. Through windows the flags announce it.
    sends = n.failure_sends == NULL and not n.closed
    if sends:
        send_failure(n, t, n.failure_is_known)
    n.failure_is_known = True
    unlock(n)
    if sends:
        until = now_ns() + SEND_FAILURE_NS
        # All waits end at once in a failed group, so poll directly.
        while sends_pending(n, t) and now_ns() < until:
            usleep(PAUSE_US)


cdef void send_failure(ControlPlane *n, Comm *t, bint told) noexcept nogil:
    """Send it to all members; if this rank was told of it, to those that need no new connection."""
    cdef int i, status
    if told and (t.is_connected == NULL or load_int(&n.windows_open) != 0):
        return
    n.failure_sends = <Request *>calloc(t.size, sizeof(Request))
    if n.failure_sends == NULL:
        return
    for i in range(t.size):
        if i == t.rank or (told and (i == n.failure.teller or not t.is_connected(t, i))):
            continue
        address(&n.failure_sends[i], &n.failure, i)
        status = t.send(t, &n.failure_sends[i])
        if status != OK:
            n.failure_sends[i].status = status
        if load_int(&n.windows_open) != 0:
            store_u64(&t.windows.of[i].flags.failure_coming, 1)


cdef bint sends_pending(ControlPlane *n, Comm *t) noexcept nogil:
    cdef int i
    for i in range(t.size if n.failure_sends != NULL else 0):
        if (load_int(&n.failure_sends[i].status) == PENDING
                and t.test(t, &n.failure_sends[i]) == PENDING):
            return True
    return False

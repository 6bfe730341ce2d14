"""The steps that all algorithms share: post, wait and query, complete, withdraw, pipe."""
from libc.stdlib cimport free
from libc.string cimport memcmp, memset

from cydist._native.abi cimport (
    ABORTED, ANY_SOURCE, COLLECTIVE_TAG, MISMATCH, OK, PENDING, TIMEOUT, Fingerprint, Head, head_of,
    note_wait_for, note_waited_for, now_ns,
)
from cydist._native.sync cimport has_reached, load_int, load_u64

cdef enum:
    PATIENCE_NS = 50000000              # before the first query to a peer
    LONGEST_PATIENCE_NS = 1600000000


cdef int wait_and_ask(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    """Wait; query the peer for its call whenever the patience is over.

    Ranks in different calls can all be receiving. If ranks wait for each other in a circle, two
    neighbours in it are in different calls. One of the two queries the other, which finds out.
    """
    cdef int64_t patience = PATIENCE_NS
    cdef int ended, asked = r.peer
    while t.control != NULL and t.size > 1 and now_ns() + patience < deadline_ns:
        ended = t.wait(t, r, now_ns() + patience)
        if ended != TIMEOUT:
            return ended
        if r.tag & COLLECTIVE_TAG and t.windows != NULL and seen_in_window(t, r):
            return MISMATCH
        if r.peer == ANY_SOURCE:        # query all in turn; the wait ends when all have left
            asked = other_member(t, asked)
        t.control.probe(t, asked)
        if patience < LONGEST_PATIENCE_NS:
            patience *= 2
    return t.wait(t, r, deadline_ns)


cdef int other_member(const Comm *t, int rank) noexcept nogil:
    """Return the next rank after `rank` that is not this one. A departed rank may have to repeat
    its notice on a lane that was connected later."""
    rank = (rank + 1) % t.size
    return rank if rank != t.rank else (rank + 1) % t.size


cdef bint seen_in_window(const Comm *t, Request *r) noexcept nogil:
    """Return whether a peer has taken a window step of an earlier call, or of another one with this
    call's number. This rank will never take that step. One of this very call comes later."""
    cdef const Head *head
    cdef const Fingerprint *theirs
    cdef int peer
    for peer in range(t.size):
        head = head_of(t.windows, peer, t.windows.step)
        if peer == t.rank or not has_reached(load_u64(&head.posted), t.windows.step + 1):
            continue
        theirs = &head.call
        if memcmp(theirs, r.expected, sizeof(Fingerprint) - sizeof(uint64_t)) == 0:     # no note
            continue
        if has_reached(r.expected.seq, theirs.seq):
            r.theirs = theirs[0]
            r.theirs.note = 0
            r.theirs_bytes = 0
            r.source = peer
            return True
    return False


cdef int complete(Comm *t, Call *c, Request *requests, int count) noexcept nogil:
    """Wait for all; at the first failure withdraw the rest and record the peer."""
    cdef int i, status = OK, ended
    for i in range(count):
        if status == OK:
            ended = load_int(&requests[i].status)
            if ended == PENDING:
                note_wait_for(t, requests[i].peer)
                ended = wait_and_ask(t, &requests[i], c.deadline_ns)
                note_waited_for(t)
            if ended != OK:
                status = ended
                c.failed_peer = requests[i].peer
                c.failed_step = <int>(requests[i].tag - c.tag)
                if ended == MISMATCH:
                    c.failed_peer = requests[i].source
                    c.theirs = requests[i].theirs
                    c.theirs_bytes = requests[i].theirs_bytes
                    c.our_bytes = 0 if requests[i].or_less else requests[i].nbytes
    if status != OK:
        withdraw(t, requests, count)
    return status


cdef inline void prepare(Call *c, Request *r, char *ptr, size_t nbytes,
                         int peer, int step) noexcept nogil:
    memset(r, 0, sizeof(Request))
    r.ptr = ptr
    r.nbytes = nbytes
    r.peer = peer
    r.tag = c.tag + <uint64_t>step
    r.expected = &c.fingerprint
    r.status = PENDING


cdef void post_send(Comm *t, Call *c, Request *r, const void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil:
    cdef int status
    prepare(c, r, <char *>ptr, nbytes, peer, step)
    r.most_early = c.most_early
    status = t.send(t, r)
    if status != OK:
        r.status = status


cdef void post_recv(Comm *t, Call *c, Request *r, void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil:
    prepare(c, r, <char *>ptr, nbytes, peer, step)
    post_prepared(t, r)


cdef void post_recv_or_less(Comm *t, Call *c, Request *r, void *ptr, size_t most,
                            int peer, int step) noexcept nogil:
    prepare(c, r, <char *>ptr, most, peer, step)
    r.or_less = True
    post_prepared(t, r)


cdef inline void post_prepared(Comm *t, Request *r) noexcept nogil:
    cdef int status = t.recv(t, r)
    if status != OK:
        r.status = status


cdef int exchange(Comm *t, Call *c, int step,
                  const void *out, size_t out_bytes, int to_peer,
                  void *into, size_t into_bytes, int from_peer) noexcept nogil:
    cdef Request both[2]
    cdef int posted = 0
    # Post the receive first: if the peer is early, its bytes then arrive in place.
    if from_peer >= 0:
        post_recv(t, c, &both[0], into, into_bytes, from_peer, step)
        posted = 1
    if to_peer >= 0:
        post_send(t, c, &both[posted], out, out_bytes, to_peer, step)
        posted += 1
    return complete(t, c, both, posted)


cdef void withdraw(Comm *t, Request *requests, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        if load_int(&requests[i].status) == PENDING:
            t.cancel(t, &requests[i])
            if load_int(&requests[i].status) == PENDING:
                requests[i].status = ABORTED    # never cancel it twice


cdef void release_buffer(Comm *t, void *memory) noexcept nogil:
    if memory != NULL and (t.lingers == NULL or not t.lingers(t)):
        free(memory)


cdef void pipe_open(Pipe *pipe, const Call *c, size_t most) noexcept nogil:
    cdef size_t allowed = min(c.depth, <size_t>PIPE_DEPTH) if c.depth != 0 else PIPE_DEPTH
    cdef int slot
    pipe.depth = max(min(most, allowed), <size_t>1)
    pipe.first_step = 0
    pipe.status = OK
    for slot in range(PIPE_DEPTH):
        pipe.sends[slot].status = OK
        pipe.receives[slot].status = OK


cdef int pipe_ready(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil:
    if pipe.status == OK:
        pipe.status = complete(t, c, &pipe.sends[i % pipe.depth], 1)
    return pipe.status


cdef int pipe_post(Comm *t, Call *c, Pipe *pipe, size_t i, Block out, int to_peer,
                   Block into, int from_peer) noexcept nogil:
    cdef size_t slot = i % pipe.depth
    cdef int step = <int>(pipe.first_step + i)
    if pipe_ready(t, c, pipe, i) != OK:
        return pipe.status
    if from_peer >= 0:
        post_recv(t, c, &pipe.receives[slot], into.ptr, into.nbytes, from_peer, step)
    if to_peer >= 0:
        post_send(t, c, &pipe.sends[slot], out.ptr, out.nbytes, to_peer, step)
    return OK


cdef int pipe_take(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil:
    if pipe.status == OK:
        pipe.status = complete(t, c, &pipe.receives[i % pipe.depth], 1)
    return pipe.status


cdef int pipe_close(Comm *t, Call *c, Pipe *pipe) noexcept nogil:
    if pipe.status == OK:
        pipe.status = complete(t, c, pipe.sends, PIPE_DEPTH)
    if pipe.status != OK:
        withdraw(t, pipe.sends, PIPE_DEPTH)
        withdraw(t, pipe.receives, PIPE_DEPTH)
    return pipe.status

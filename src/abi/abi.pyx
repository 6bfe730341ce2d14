"""The table of algorithms, the clock, and the few steps that all algorithms share."""
from libc.stdlib cimport free
from libc.string cimport memset, strcmp
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from cydist._native.sync cimport load_int, load_u64


cdef class Link:
    """One rank's end of a transport: `address()`, `close()`, and what its groups share."""

    cdef int open_view(self, Comm *t) except -1:
        raise NotImplementedError(f"{type(self).__name__} opens no views")

    cdef int open_windows(self, Comm *t) except -1:
        return 0

    cdef void close_view(self, Comm *t) noexcept:
        pass

    def keep(self, one, other):
        """Hold on to objects whose memory what is below may still use."""
        if self.kept is None:
            self.kept = []
        self.kept.append((one, other))

    def close(self):
        """Leave: the others learn that this rank is gone."""

    def lost(self, int peer):
        """Why this peer cannot be reached any more, for people; "" while it can."""
        return ""

    def left(self, int peer):
        """Has this peer left on purpose, by closing its link?"""
        return False


# What Python is told of abi.pxd: it has no copies.

COLLECTIVE_NAMES = (
    "point_to_point", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier", "scan", "exscan", "monitored_barrier",
)   # by Collective
assert len(COLLECTIVE_NAMES) == COLLECTIVES and COLLECTIVE_NAMES[EXSCAN] == "exscan"
FLAG_BITS = {"EVEN": EVEN, "CHUNK": CHUNK, "ASKING": ASKING, "JOINED": JOINED}
NEED_BITS = {
    "WINDOWS": WINDOWS, "COMMUTATIVE": COMMUTATIVE, "POWER_OF_TWO": POWER_OF_TWO,
    "EVEN_BLOCKS": EVEN_BLOCKS, "NATIVE": NATIVE,
}
MESSAGE_TAGS = {
    "NOTES": NOTES_TAG, "ALARM": ALARM_TAG, "NEWS": NEWS_TAG, "WORD": WORD_TAG,
    "PARTING": PARTING_TAG, "PIECE": PIECE_TAG, "DERIVED": DERIVED_TAG,
}
PAGE_BYTES = PAGE


cdef enum:
    TABLE_ROWS = 128
    PATIENCE_NS = 50000000              # before a peer is asked for the first time
    LONGEST_PATIENCE_NS = 1600000000

cdef Entry table[TABLE_ROWS]
cdef int rows = 0
cdef Interrupted interrupted = NULL
cdef Parting parting = NULL


cdef int add(const char *name, int collective, int needs, Algorithm run) except -1:
    global rows
    if find(name, collective) != NULL:
        raise ValueError(f"two algorithms are called {name.decode()!r} for collective {collective}")
    if rows == TABLE_ROWS:
        raise MemoryError(f"the table of algorithms holds {TABLE_ROWS} rows")
    table[rows] = Entry(name, collective, needs, run)
    rows += 1
    return 0


cdef const Entry *find(const char *name, int collective) noexcept nogil:
    cdef int row
    for row in range(rows):
        if table[row].collective == collective and strcmp(table[row].name, name) == 0:
            return &table[row]
    return NULL


cdef int index_of(const Entry *entry) noexcept nogil:
    return <int>(entry - table)


cdef const Entry *row_of(uint32_t index) noexcept nogil:
    return &table[index] if index < <uint32_t>rows else NULL


def algorithms() -> list[tuple[str, int, int]]:
    """Every row of the table: name, collective, needs."""
    return [
        (table[row].name.decode(), table[row].collective, table[row].needs) for row in range(rows)
    ]


cdef int64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


cdef void set_interrupted(Interrupted f) noexcept nogil:
    global interrupted
    interrupted = f


cdef void set_parting(Parting f) noexcept nogil:
    global parting
    parting = f


cdef int part(Comm *t, Call *c, bint known, bint alone) noexcept nogil:
    return parting(t, c, known, alone)


cdef int slice_end(Comm *t, int64_t deadline_ns) noexcept nogil:
    cdef int aborted = load_int(t.aborted)
    if aborted != OK:
        return aborted
    if t.board != NULL:
        aborted = t.board.look(t)
        if aborted != OK:
            return aborted
    if interrupted != NULL and interrupted() != 0:
        return INTERRUPTED
    if now_ns() >= deadline_ns:
        return TIMEOUT
    return OK


cdef int wait_and_ask(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    """Wait; ask the peer what it is doing whenever patience ends.

    Ranks in different calls can all be receiving. Of those who wait in a circle, two that
    follow each other are in different calls: one of them is asked by the other, and knows.
    """
    cdef int64_t patience = PATIENCE_NS
    cdef int ended, asked = r.peer
    while t.board != NULL and t.size > 1 and now_ns() + patience < deadline_ns:
        ended = t.wait(t, r, now_ns() + patience)
        if ended != TIMEOUT:
            return ended
        if t.windows != NULL and seen_in_window(t, r):
            return MISMATCH
        if r.peer == ANY_SOURCE:        # by turns: it ends when all have left
            asked = other_member(t, asked)
        t.board.ask(t, asked)
        if patience < LONGEST_PATIENCE_NS:
            patience *= 2
    return t.wait(t, r, deadline_ns)


cdef int other_member(const Comm *t, int rank) noexcept nogil:
    """The next after this rank that is not ourselves: who has left may have to say so again, by a
    lane that was made since."""
    rank = (rank + 1) % t.size
    return rank if rank != t.rank else (rank + 1) % t.size


cdef bint seen_in_window(const Comm *t, Request *r) noexcept nogil:
    """Has a peer taken a step through its window that belongs to this call, or to one before?

    This rank, which is in a call of messages, will never take it.
    """
    cdef const Head *head
    cdef const Fingerprint *theirs
    cdef int peer
    for peer in range(t.size):
        head = head_of(t.windows, peer, t.windows.step)
        if peer == t.rank or load_u64(&head.posted) <= t.windows.step:
            continue
        theirs = &head.call
        if theirs.seq <= r.expected.seq:
            r.theirs = theirs[0]
            r.theirs.note = 0
            r.theirs_bytes = 0
            r.source = peer
            return True
    return False


cdef int complete(Comm *t, Call *c, Request *requests, int count) noexcept nogil:
    """Wait for all; at the first failure withdraw the rest and say whose it was."""
    cdef int i, status = OK, ended
    for i in range(count):
        if status == OK:
            ended = load_int(&requests[i].status)
            if ended == PENDING:
                ended = wait_and_ask(t, &requests[i], c.deadline_ns)
            if ended != OK:
                status = ended
                c.failed_peer = requests[i].peer
                c.failed_step = <int>(requests[i].tag - c.tag)
                if ended == MISMATCH:
                    c.failed_peer = requests[i].source
                    c.theirs = requests[i].theirs
                    c.theirs_bytes = requests[i].theirs_bytes
                    c.our_bytes = requests[i].nbytes
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
    status = t.send(t, r)
    if status != OK:
        r.status = status


cdef void post_recv(Comm *t, Call *c, Request *r, void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil:
    cdef int status
    prepare(c, r, <char *>ptr, nbytes, peer, step)
    status = t.recv(t, r)
    if status != OK:
        r.status = status


cdef int exchange(Comm *t, Call *c, int step,
                  const void *out, size_t out_bytes, int to_peer,
                  void *into, size_t into_bytes, int from_peer) noexcept nogil:
    cdef Request both[2]
    cdef int posted = 0
    # The receive goes first: the peer may be early, and its bytes then land in place.
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
                requests[i].status = ABORTED    # never cancelled twice


cdef void let_go(Comm *t, void *memory) noexcept nogil:
    if memory != NULL and (t.lingers == NULL or not t.lingers(t)):
        free(memory)


cdef void pipe_open(Pipe *pipe, size_t most) noexcept nogil:
    cdef int slot
    pipe.depth = PIPE_DEPTH if most > PIPE_DEPTH else (most if most > 0 else 1)
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

"""Recordings: run algorithms with a reduction that tracks contributions, and without peers.

`ScheduleRecorder` calls an algorithm on any link. Its elements name the ranks they are made of. So
a test sees which ranks were combined, in which order, and how often an element was
prepared and finished. `Recording` is a link without peers: it records posts and waits and
treats them as done. An algorithm's messages do not depend on its data. So the logs
of all ranks, taken one after another in one thread, are the messages of a whole group of any
size.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, COLLECTIVE_TAG, COLLECTIVES, EVEN,
    EXSCAN, GATHER, NO_MEMORY, OK, REDUCE, REDUCE_SCATTER, SCAN, SCATTER, SEQUENCE_SHIFT,
    Algorithm, Block, Call, Comm, Fingerprint, Link, Reduction, Request,
)
from cydist._native.algorithm_table cimport (
    SIZE_CLASSES, Choice, Entry, choice_of, number_of,
)
from cydist._native.hierarchy cimport free_hosts, hosts_of, place_on_hosts, prepare_parts


# A reduction that tracks contributions

cdef enum:
    MISTAKE = 0xFFFFFFFF        # Part.first

# In a Recording nothing arrives, and elements are added up repeatedly: sums wrap.
ctypedef struct Operand:        # one element
    uint32_t first              # of the ranks in it, or MISTAKE; their sum where the reduction
    uint32_t end                # commutes, and here their number
    uint32_t prepared           # how often its contributions were prepared, in total
    uint32_t finished


cdef void unite(const Reduction *r, Operand *out, const Operand *low,
                const Operand *high) noexcept nogil:
    cdef Operand both
    both.prepared = low.prepared + high.prepared
    both.finished = low.finished + high.finished
    if r.commutative:
        both.first = low.first + high.first
        both.end = low.end + high.end
    else:
        both.first = low.first if low.first != MISTAKE and low.end == high.first else MISTAKE
        both.end = high.end
    out[0] = both


cdef void combine(const Reduction *r, void *acc, const void *low, const void *high,
                  size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        unite(r, <Operand *>acc + i, <const Operand *>low + i, <const Operand *>high + i)


cdef void combine_all(const Reduction *r, void *out, const void *const *sources,
                      int sources_count, size_t count) noexcept nogil:
    cdef Operand sum
    cdef size_t i
    cdef int s
    for i in range(count):
        sum = (<const Operand *>sources[0])[i]
        for s in range(1, sources_count):
            unite(r, &sum, &sum, <const Operand *>sources[s] + i)
        sum.finished += 1
        (<Operand *>out)[i] = sum


cdef void prepare(const Reduction *r, void *out, const void *own, size_t count) noexcept nogil:
    cdef Operand part
    cdef size_t i
    for i in range(count):
        part = (<const Operand *>own)[i]
        part.prepared += 1
        (<Operand *>out)[i] = part


cdef void finish(const Reduction *r, void *acc, size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        (<Operand *>acc)[i].finished += 1


# A link that records

cdef enum:
    SEND = 0
    RECV = 1
    WAIT = 2
    TOGETHER = 3


ctypedef struct LogLine:        # of a log
    int what
    int peer
    int step
    long long nbytes
    size_t request              # number of the line that posted it


ctypedef struct ActionLog:
    LogLine *lines
    size_t count, room


cdef int write(Comm *t, Request *r, int what) noexcept nogil:
    cdef ActionLog *log = <ActionLog *>t.link
    cdef LogLine *line
    if log.count == log.room:
        line = <LogLine *>realloc(log.lines, 2 * (log.room + 32) * sizeof(LogLine))
        if line == NULL:
            return NO_MEMORY
        log.lines = line
        log.room = 2 * (log.room + 32)
    if what != WAIT:
        r.link = <void *>log.count
    line = &log.lines[log.count]
    line.what = what
    line.peer = r.peer if t.whole == NULL or r.peer < 0 else t.in_whole[r.peer]
    line.step = <int>(r.tag & ((1ULL << SEQUENCE_SHIFT) - 1))
    line.nbytes = -<long long>r.nbytes if r.or_less else <long long>r.nbytes
    line.request = <size_t>r.link
    log.count += 1
    return OK


# Collectives of a host's ranks as one line each: through windows they send no messages.

cdef size_t sum_of(const Block *blocks, int count) noexcept nogil:
    cdef size_t total = 0
    cdef int i
    for i in range(count):
        total += blocks[i].nbytes
    return total


cdef int note_together(Comm *t, Call *c, int collective) noexcept nogil:
    cdef Request all
    memset(&all, 0, sizeof(Request))
    all.peer = c.root
    all.tag = <uint64_t>collective
    if collective in (ALL_GATHER, ALL_TO_ALL):
        all.nbytes = sum_of(c.outputs, t.size)
    elif collective == REDUCE_SCATTER:
        all.nbytes = sum_of(c.inputs, t.size)
    elif collective == GATHER:
        all.nbytes = t.size * c.inputs[0].nbytes
    elif collective == SCATTER:
        all.nbytes = t.size * c.outputs[0].nbytes
    elif collective != BARRIER:
        all.nbytes = c.inputs[0].nbytes
    return write(t, &all, TOGETHER)


cdef int broadcast_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, BROADCAST)


cdef int all_reduce_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, ALL_REDUCE)


cdef int reduce_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, REDUCE)


cdef int all_gather_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, ALL_GATHER)


cdef int gather_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, GATHER)


cdef int scatter_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, SCATTER)


cdef int reduce_scatter_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, REDUCE_SCATTER)


cdef int all_to_all_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, ALL_TO_ALL)


cdef int barrier_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, BARRIER)


cdef int scan_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, SCAN)


cdef int exscan_together(Comm *t, Call *c) noexcept nogil:
    return note_together(t, c, EXSCAN)


cdef Entry together[COLLECTIVES]
cdef Choice together_rows[COLLECTIVES][SIZE_CLASSES]


cdef void fill_together(int collective, Algorithm run) noexcept:
    cdef int k
    together[collective].name = b"together"
    together[collective].collective = collective
    together[collective].run = run
    for k in range(SIZE_CLASSES):
        together_rows[collective][k].entry = &together[collective]


fill_together(BROADCAST, broadcast_together)
fill_together(ALL_REDUCE, all_reduce_together)
fill_together(REDUCE, reduce_together)
fill_together(ALL_GATHER, all_gather_together)
fill_together(GATHER, gather_together)
fill_together(SCATTER, scatter_together)
fill_together(REDUCE_SCATTER, reduce_scatter_together)
fill_together(ALL_TO_ALL, all_to_all_together)
fill_together(BARRIER, barrier_together)
fill_together(SCAN, scan_together)
fill_together(EXSCAN, exscan_together)


cdef int send(Comm *t, Request *r) noexcept nogil:
    return write(t, r, SEND)


cdef int recv(Comm *t, Request *r) noexcept nogil:
    r.came_bytes = r.nbytes     # no message has come
    return write(t, r, RECV)


cdef int test(Comm *t, Request *r) noexcept nogil:
    return r.status


cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    r.status = write(t, r, WAIT)
    return r.status


cdef void cancel(Comm *t, Request *r) noexcept nogil:
    r.status = NO_MEMORY        # only a log that cannot grow fails


cdef class Recording(Link):
    """One rank's end of a link without peers."""

    cdef ActionLog log

    def __init__(self, int rank, int size):
        self.rank = rank
        self.size = size

    def __dealloc__(self):
        free(self.log.lines)

    cdef int attach_comm(self, Comm *t) except -1:
        t.link = &self.log
        t.send = send
        t.recv = recv
        t.test = test
        t.wait = wait
        t.cancel = cancel
        return 0

    cdef void detach_comm(self, Comm *t) noexcept:
        pass

    def lines(self):
        """Return the log: (what, peer, step, bytes, request), in the order of the actions.

        Args:
            what: "send" or "recv", posted; "wait"; or "together": a collective of the ranks on this
                host, of which peer is the root's rank among all (-1: it has none), step the number
                of the collective, and bytes the size of the whole array.
            bytes: Less than 0 for a receive that takes at most so many.
            request: The index of the line that posted it.
        """
        cdef size_t i
        cdef LogLine *line
        names = ("send", "recv", "wait", "together")
        found = []
        for i in range(self.log.count):
            line = &self.log.lines[i]
            found.append((names[line.what], line.peer, line.step, line.nbytes, line.request))
        return found


cdef class ScheduleRecorder:
    """A group on a link, whose reductions are made of Parts."""

    cdef Link link
    cdef Comm comm
    cdef int *peers
    cdef int aborted

    def __cinit__(self, Link link not None, hosts=None, choose=None, segment_bytes=None,
                  bint together=False):
        """As _native.Group.place_on_hosts and prepare_parts: for hierarchical algorithms.

        Args:
            together: The ranks of a host share memory: record their collectives as one line each.
        """
        cdef int i
        self.peers = <int *>malloc(link.size * sizeof(int))
        if self.peers == NULL:
            raise MemoryError
        for i in range(link.size):
            self.peers[i] = i
        memset(&self.comm, 0, sizeof(Comm))
        self.comm.rank = link.rank
        self.comm.size = link.size
        self.comm.peers = self.peers
        self.comm.comm_id = 1
        self.comm.aborted = &self.aborted
        cdef int peer = -1
        link.attach_comm(&self.comm)
        self.link = link
        link.open_windows(&self.comm, 0, &peer)
        if hosts is not None:
            place_on_hosts(&self.comm, hosts)
            prepare_parts(hosts_of(&self.comm), choose, segment_bytes)
            if together:
                hosts_of(&self.comm).local.rows = together_rows

    def __dealloc__(self):
        if self.link is not None:
            self.link.detach_comm(&self.comm)
        free_hosts(hosts_of(&self.comm))
        free(self.peers)

    def run(self, int collective, bytes name not None, list inputs, list outputs, *, int root,
            bint commutative, bint even, size_t segment_bytes, uint64_t seq,
            int64_t deadline_ns, bytes fallback=b""):
        """Run an algorithm; return its Status.

        Args:
            inputs, outputs: Contiguous writable buffers; four int32 for each element: first, end
                (if the reduction commutes: sum and number of the ranks in it), how often prepared,
                how often finished.
        """
        cdef Choice choice = choice_of(f"collective {collective}", collective, name, fallback)
        cdef Reduction reducing
        cdef Call call
        cdef Block *blocks
        cdef int status
        memset(&call, 0, sizeof(Call))
        reducing = Reduction(sizeof(Operand), commutative, NULL, self.comm.size, combine,
                             combine_all, prepare, finish)
        blocks = <Block *>calloc(len(inputs) + len(outputs) + 1, sizeof(Block))
        if blocks == NULL:
            raise MemoryError
        fill(blocks, inputs + outputs)
        call.inputs = blocks
        call.outputs = blocks + len(inputs)
        call.op = &reducing
        call.root = root
        call.tag = COLLECTIVE_TAG | (seq << SEQUENCE_SHIFT)
        call.segment_bytes = segment_bytes
        call.deadline_ns = deadline_ns
        call.fingerprint = Fingerprint(
            seq, 0, collective, 0, 0, EVEN if even else 0, root, 0,
            number_of(choice.entry), 0)
        call.collective = collective
        call.fallback = choice.fallback
        with nogil:
            status = choice.entry.run(&self.comm, &call)
        free(blocks)
        return status


cdef int fill(Block *blocks, list buffers) except -1:
    cdef unsigned char[::1] view
    cdef size_t i
    for i, buffer in enumerate(buffers):
        if i > 0 and buffer is buffers[i - 1]:
            blocks[i] = blocks[i - 1]   # a recording has one buffer for thousands of blocks
            continue
        view = buffer
        blocks[i] = Block(NULL, view.shape[0])
        if view.shape[0] > 0:
            blocks[i].ptr = <char *>&view[0]
    return 0

"""Ranks that are threads of one process: messages (mailbox.pyx) and windows."""
import threading
import weakref

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport (
    Fingerprint, Flags, Link, OK, PEER_LOST, Transport, Window, Windows, now_ns, slice_end,
)
from cydist._native.linux cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from cydist._native.mailbox cimport (
    Box, End, cancel, drop_context, free_box, init_box, leave, recv, send, test, wait,
)
from cydist._native.matching cimport count_arrived, count_posted
from cydist._native.waiting cimport (
    SPINS, YIELDS, add_u32, cores, fence, futex_wait, futex_wake, load_int, load_u32, load_u64,
    low_half, pause, sched_yield, slice_until, spins_after, store_int, store_u64,
)

cdef enum:
    LINE = 64                   # bytes of a cache line


# Windows

cdef inline uint32_t *sleepers(uint64_t *flag) noexcept nogil:
    return low_half(flag + 1)


cdef void raise_flag(Transport *t, uint64_t *flag, uint64_t value) noexcept nogil:
    store_u64(flag, value)
    fence()
    if load_u32(sleepers(flag)) != 0:
        futex_wake(low_half(flag))


cdef int wait_flag(Transport *t, uint64_t *flag, uint64_t value,
                   int64_t deadline_ns) noexcept nogil:
    cdef End *end = <End *>t.link
    cdef int i, status
    cdef uint64_t seen
    cdef int64_t now, until
    cdef int spins = load_int(&end.spins)
    for i in range(spins + YIELDS):
        if load_u64(flag) >= value:
            if i > 0 and spins > 0:
                store_int(&end.spins, spins_after(spins, end.most_spins, i < spins))
            return OK
        if i < spins:
            pause()
        else:
            sched_yield()
    store_int(&end.spins, spins_after(spins, end.most_spins, False))
    now = now_ns()
    until = slice_until(now, deadline_ns)
    while True:
        add_u32(sleepers(flag), 1)
        fence()
        seen = load_u64(flag)
        if seen < value:
            futex_wait(low_half(flag), <uint32_t>seen, until - now)
        add_u32(sleepers(flag), <uint32_t>-1)
        if load_u64(flag) >= value:
            return OK
        now = now_ns()
        if now >= until:
            if owner_left(t, flag):
                # It may have raised the flag before it left.
                return OK if load_u64(flag) >= value else PEER_LOST
            status = slice_end(t, deadline_ns)
            if status != OK:
                return status
            now = now_ns()
            until = slice_until(now, deadline_ns)


cdef bint owner_left(const Transport *t, const uint64_t *flag) noexcept nogil:
    cdef End *end = <End *>t.link
    cdef const Flags *flags
    cdef int i
    for i in range(t.size):
        flags = t.windows.of[i].flags
        if flag == &flags.posted or flag == &flags.consumed:
            return load_int(&end.boxes[t.peers[i]].closed) != OK
    return False


# What Python holds

ctypedef struct Segment:        # the windows of one group
    Segment *next
    uint64_t context
    char *memory
    size_t nbytes
    int members
    int left                    # members whose view was closed


cdef Segment *new_segment(uint64_t context, int members, size_t nbytes) noexcept nogil:
    cdef Segment *segment = <Segment *>calloc(1, sizeof(Segment))
    if segment == NULL:
        return NULL
    segment.context = context
    segment.members = members
    segment.nbytes = nbytes
    # Pages that no group touches cost nothing.
    segment.memory = <char *>mmap(
        NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if segment.memory == <char *>MAP_FAILED:
        free(segment)
        return NULL
    return segment


cdef void free_segment(Segment *segment) noexcept nogil:
    munmap(segment.memory, segment.nbytes)
    free(segment)


cdef class Hub:
    """Where the ranks of one world meet; it lives as long as one of their links."""

    cdef readonly str key
    cdef readonly int size
    cdef readonly int slots             # of every group's windows
    cdef readonly size_t slot_bytes
    cdef Box *boxes
    cdef pthread_mutex_t lock           # of the segments
    cdef Segment *segments
    cdef set ranks                      # that have a link
    cdef object __weakref__

    def __cinit__(self, str key, int size, int slots, size_t slot_bytes):
        cdef int i
        self.key = key
        self.size = size
        self.slots = slots
        self.slot_bytes = slot_bytes
        pthread_mutex_init(&self.lock, NULL)
        self.ranks = set()
        self.boxes = <Box *>calloc(size, sizeof(Box))
        if self.boxes == NULL:
            raise MemoryError(f"no memory for {size} ranks")
        for i in range(size):
            if init_box(&self.boxes[i]) != OK:
                raise MemoryError(f"no memory for {size} ranks")

    def __dealloc__(self):
        cdef Segment *segment
        cdef int i
        while self.segments != NULL:
            segment = self.segments
            self.segments = segment.next
            free_segment(segment)
        pthread_mutex_destroy(&self.lock)
        if self.boxes == NULL:
            return
        for i in range(self.size):
            free_box(&self.boxes[i])
        free(self.boxes)

    cdef size_t window_bytes(self):
        cdef size_t calls = self.slots * sizeof(Fingerprint)
        return sizeof(Flags) + (calls + LINE - 1) // LINE * LINE + self.slots * self.slot_bytes

    cdef char *segment(self, uint64_t context, int members) except NULL:
        """The memory of a group's windows, zeroed by whoever asks first."""
        cdef Segment *segment
        pthread_mutex_lock(&self.lock)
        segment = self.segments
        while segment != NULL and segment.context != context:
            segment = segment.next
        if segment == NULL:
            segment = new_segment(context, members, members * self.window_bytes())
            if segment != NULL:
                segment.next = self.segments
                self.segments = segment
        pthread_mutex_unlock(&self.lock)
        if segment == NULL:
            raise MemoryError(f"no memory for the windows of {members} ranks")
        if segment.members != members:
            raise ValueError(
                f"context {context:#x} belongs to a group of {segment.members} ranks, not {members}"
            )
        return segment.memory

    cdef void leave_segment(self, uint64_t context) noexcept:
        cdef Segment **place = &self.segments
        cdef Segment *segment
        pthread_mutex_lock(&self.lock)
        while place[0].context != context:
            place = &place[0].next
        segment = place[0]
        segment.left += 1
        if segment.left == segment.members:     # every member has come and gone
            place[0] = segment.next
            free_segment(segment)
        pthread_mutex_unlock(&self.lock)


hubs = weakref.WeakValueDictionary()
hubs_lock = threading.Lock()


def hub(str key not None, int size, *, int slots=4, size_t slot_bytes=65536):
    """The hub called `key`, made by the first rank that asks.

    slots, slot_bytes   shape of the windows; slots is a power of two, slot_bytes a
                        multiple of 64

    Raises ValueError when another rank asked for another shape.
    """
    if size < 1 or slots < 1 or slots & (slots - 1) or slot_bytes < LINE or slot_bytes % LINE:
        raise ValueError(
            f"a hub needs ranks, 2**k slots, 64*k slot_bytes; not {size}, {slots}, {slot_bytes}"
        )
    with hubs_lock:
        found = hubs.get(key)
        if found is None:
            found = Hub(key, size, slots, slot_bytes)
            hubs[key] = found
        if (found.size, found.slots, found.slot_bytes) != (size, slots, slot_bytes):
            raise ValueError(
                f"hub {key!r} has {found.size} ranks and {found.slots} slots of "
                f"{found.slot_bytes} bytes, not {size}, {slots}, {slot_bytes}"
            )
        return found


# Dealloc needs the hub, so the collector must not clear it before.
@cython.no_gc_clear
cdef class InprocLink(Link):
    """One rank's end of a hub. Raises ValueError when the rank is taken."""

    cdef Hub hub
    cdef End end
    cdef bint closed

    def __init__(self, Hub hub not None, int rank):
        if not 0 <= rank < hub.size:
            raise ValueError(f"rank {rank} of a hub of {hub.size} ranks")
        with hubs_lock:
            if rank in hub.ranks:
                raise ValueError(f"rank {rank} of hub {hub.key!r} has a link already")
            hub.ranks.add(rank)
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        cdef int spins = SPINS if cores() >= hub.size else 0
        self.end = End(rank, hub.size, spins, spins, hub.boxes)

    cdef int open_view(self, Transport *t) except -1:
        cdef size_t each = self.hub.window_bytes()
        cdef char *memory = self.hub.segment(t.context, t.size)
        cdef Windows *windows = <Windows *>calloc(1, sizeof(Windows) + t.size * sizeof(Window))
        cdef int i
        if windows == NULL:
            self.hub.leave_segment(t.context)
            raise MemoryError(f"no memory for the windows of {t.size} ranks")
        windows.slots = self.hub.slots
        windows.slot_bytes = self.hub.slot_bytes
        windows.of = <Window *>(windows + 1)
        for i in range(t.size):
            windows.of[i].flags = <Flags *>(memory + i * each)
            windows.of[i].calls = <Fingerprint *>(memory + i * each + sizeof(Flags))
            windows.of[i].data = memory + (i + 1) * each - self.hub.slots * self.hub.slot_bytes
        t.link = &self.end
        t.windows = windows
        t.send = send
        t.recv = recv
        t.test = test
        t.wait = wait
        t.cancel = cancel
        t.raise_flag = raise_flag
        t.wait_flag = wait_flag
        return 0

    cdef void close_view(self, Transport *t) noexcept:
        if t.windows == NULL:
            return
        with nogil:
            drop_context(&self.end, t.context)
        free(t.windows)
        t.windows = NULL
        self.hub.leave_segment(t.context)

    def close(self):
        """Leave: whoever waits for this rank, now or later, learns that it is lost."""
        if not self.closed:
            self.closed = True
            with nogil:
                leave(&self.end)

    def __dealloc__(self):
        if self.hub is not None and not self.closed:
            leave(&self.end)

    def lost(self, int peer):
        """Why this peer cannot be reached any more, for people; "" while it can."""
        if not 0 <= peer < self.size:
            raise ValueError(f"hub {self.hub.key!r} has no rank {peer}")
        return "it left" if load_int(&self.end.boxes[peer].closed) != OK else ""

    def pending(self):
        """(receives posted, messages nobody has asked for) of this rank."""
        cdef Box *box = &self.end.boxes[self.rank]
        cdef size_t posted, arrived
        # Nothing of Python's under the lock: its collector may cancel requests.
        with nogil:
            pthread_mutex_lock(&box.lock)
            posted, arrived = count_posted(&box.queues), count_arrived(&box.queues)
            pthread_mutex_unlock(&box.lock)
        return posted, arrived

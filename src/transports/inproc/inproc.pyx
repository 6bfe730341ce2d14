"""Ranks that are threads of one process: messages (inproc_mailbox.pyx) and windows."""
import threading
import weakref

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport OK, Comm, Link, Window, Windows
from cydist._native.pipeline cimport copy
from cydist._native.linux cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, getpid, mmap, munmap,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from cydist._native.inproc_mailbox cimport (
    Mailbox, HubEnd, cancel, contradicted, drop_comm, enter_comm, free_box, init_box, leave_hub,
    left_over, recv, send, test, wait,
)
from cydist._native.matching cimport count_arrived, count_posted
from cydist._native.sync cimport LOOKS, SPINS, cores, load_int
from cydist._native.window_flags cimport (
    begin_flags, lay_out, raise_flag, wait_flag, window_bytes,
)


cdef bint is_gone(Comm *t, int peer) noexcept nogil:
    return load_int(&(<HubEnd *>t.link).boxes[t.peers[peer]].closed) != OK


cdef bint process_ended(Comm *t, int peer) noexcept nogil:
    return False                # a thread of this process may always still exist


cdef int pull(Comm *t, int peer, char *into, const char *theirs,
              size_t nbytes) noexcept nogil:
    copy(into, theirs, nbytes)
    return OK


cdef int push(Comm *t, int peer, char *theirs, const char *source,
              size_t nbytes) noexcept nogil:
    copy(theirs, source, nbytes)
    return OK


cdef char *mapped(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil:
    return theirs


# Python's objects

ctypedef struct SharedWindows:  # the windows of one group
    SharedWindows *next
    uint64_t comm_id
    char *memory                # NULL until a rank asks for it
    size_t nbytes
    int members
    int left                    # members whose comm is closed


cdef bint map_segment(SharedWindows *segment, size_t nbytes) noexcept nogil:
    """Map zeroed memory. Pages that no group touches cost nothing."""
    cdef void *memory = mmap(
        NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if memory == MAP_FAILED:
        return False
    segment.memory = <char *>memory
    segment.nbytes = nbytes
    return True


cdef void free_segment(SharedWindows *segment) noexcept nogil:
    if segment.memory != NULL:
        munmap(segment.memory, segment.nbytes)
    free(segment)


cdef class Hub:
    """The state that the ranks of one world share; it lives as long as one of their links."""

    cdef readonly str key
    cdef readonly int size
    cdef readonly int slots             # of every group's windows
    cdef readonly size_t slot_bytes
    cdef Mailbox *boxes
    cdef pthread_mutex_t lock           # of the segments
    cdef SharedWindows *segments
    cdef set ranks                      # of ranks that have a link
    cdef object __weakref__

    def __cinit__(self, str key, int size, int slots, size_t slot_bytes):
        cdef int i
        self.key = key
        self.size = size
        self.slots = slots
        self.slot_bytes = slot_bytes
        pthread_mutex_init(&self.lock, NULL)
        self.ranks = set()
        self.boxes = <Mailbox *>calloc(size, sizeof(Mailbox))
        if self.boxes == NULL:
            raise MemoryError(f"no memory for {size} ranks")
        for i in range(size):
            if init_box(&self.boxes[i]) != OK:
                raise MemoryError(f"no memory for {size} ranks")

    def __dealloc__(self):
        cdef SharedWindows *segment
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

    cdef SharedWindows **place_of(self, uint64_t comm_id) noexcept:
        """Return where the group's segment is, or would be; the lock is held."""
        cdef SharedWindows **place = &self.segments
        while place[0] != NULL and place[0].comm_id != comm_id:
            place = &place[0].next
        return place

    cdef SharedWindows *entered(self, SharedWindows **place, uint64_t comm_id,
                                int members) noexcept:
        """Return the group's segment; the first rank to ask or leave makes it. NULL: no memory."""
        if place[0] == NULL:
            place[0] = <SharedWindows *>calloc(1, sizeof(SharedWindows))
            if place[0] != NULL:
                place[0].comm_id = comm_id
                place[0].members = members
        return place[0]

    cdef char *segment(self, uint64_t comm_id, int members) except NULL:
        """Return the memory of a group's windows, zeroed by the first rank that asks."""
        cdef size_t nbytes = members * window_bytes(self.slots, self.slot_bytes)
        cdef SharedWindows *segment
        pthread_mutex_lock(&self.lock)
        segment = self.entered(self.place_of(comm_id), comm_id, members)
        if segment != NULL and segment.memory == NULL and segment.members == members:
            if map_segment(segment, nbytes):
                begin_flags(segment.memory, members, self.slots, self.slot_bytes)
        pthread_mutex_unlock(&self.lock)
        if segment != NULL and segment.members != members:
            raise ValueError(
                f"comm id {comm_id:#x} belongs to a group of {segment.members} ranks, not {members}"
            )
        if segment == NULL or segment.memory == NULL:
            raise MemoryError(f"no memory for the windows of {members} ranks")
        return segment.memory

    cdef void leave_segment(self, uint64_t comm_id, int members) noexcept:
        """Record that a member leaves, even if it had not asked; the last one frees the memory."""
        cdef SharedWindows **place
        cdef SharedWindows *segment
        pthread_mutex_lock(&self.lock)
        place = self.place_of(comm_id)
        segment = self.entered(place, comm_id, members)
        if segment != NULL:
            segment.left += 1
            if segment.left >= segment.members:
                place[0] = segment.next
                free_segment(segment)
        pthread_mutex_unlock(&self.lock)


hubs = weakref.WeakValueDictionary()
hubs_lock = threading.Lock()


def hub(str key not None, int size, *, int slots=4, size_t slot_bytes=65536):
    """Return the hub called `key`, made by the first rank that asks.

    Args:
        slots, slot_bytes: Shape of the windows; slots is a power of two, slot_bytes a multiple of
            64.

    Raises ValueError if another rank asked for another shape.
    """
    if size < 1 or slots < 1 or slots & (slots - 1) or slot_bytes < 64 or slot_bytes % 64:
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
    """One rank's end of a hub. Raises ValueError if the rank has an end already."""

    cdef Hub hub
    cdef HubEnd end
    cdef bint closed
    cdef int pid                # that made it

    def __init__(self, Hub hub not None, int rank):
        if not 0 <= rank < hub.size:
            raise ValueError(f"rank {rank} of a hub of {hub.size} ranks")
        with hubs_lock:
            if rank in hub.ranks:
                raise ValueError(f"rank {rank} of hub {hub.key!r} has a link already")
            hub.ranks.add(rank)
        self.hub = hub
        self.pid = getpid()
        self.rank = rank
        self.size = hub.size
        cdef int spins = SPINS if cores() >= hub.size else 0
        self.end = HubEnd(rank, hub.size, spins, spins, hub.boxes)

    cdef int attach_comm(self, Comm *t) except -1:
        t.link = &self.end
        t.windows = NULL
        t.send = send
        t.recv = recv
        t.test = test
        t.wait = wait
        t.cancel = cancel
        t.raise_flag = raise_flag
        t.wait_flag = wait_flag
        t.contradicted = contradicted
        t.left_over = left_over
        cdef int status
        with nogil:
            status = enter_comm(&self.end, t)
        if status != OK:
            raise MemoryError("no memory for a group")
        return 0

    cdef int open_windows(self, Comm *t, int64_t deadline_ns, int *peer) except -100:
        cdef char *memory = self.hub.segment(t.comm_id, t.size)
        cdef Windows *windows = <Windows *>calloc(1, sizeof(Windows) + t.size * sizeof(Window))
        if windows == NULL:
            raise MemoryError(f"no memory for the windows of {t.size} ranks")
        windows.of = <Window *>(windows + 1)
        windows.spins = windows.most_spins = self.end.most_spins
        windows.looks = windows.most_looks = LOOKS if self.end.most_spins else 0
        windows.is_gone = is_gone
        windows.process_ended = process_ended
        windows.pull = pull
        windows.push = push
        windows.mapped = mapped
        lay_out(windows, memory, t.size, self.hub.slots, self.hub.slot_bytes, cores())
        t.windows = windows
        return OK

    cdef void detach_comm(self, Comm *t) noexcept:
        with nogil:
            drop_comm(&self.end, t.comm_id)
        free(t.windows)
        t.windows = NULL
        self.hub.leave_segment(t.comm_id, t.size)

    def close(self):
        """Leave: ranks that wait for this one, now or later, learn that it is lost."""
        if not self.closed:
            self.closed = True
            with nogil:
                leave_hub(&self.end)

    def __dealloc__(self):
        if self.hub is not None and not self.closed and self.pid == getpid():
            leave_hub(&self.end)

    def lost(self, int peer):
        """Return why this peer cannot be reached any more, for messages; "" while it can."""
        if not 0 <= peer < self.size:
            raise ValueError(f"hub {self.hub.key!r} has no rank {peer}")
        return "it left" if load_int(&self.end.boxes[peer].closed) != OK else ""

    def left(self, int peer):
        """Return whether this peer has left, by closing its link."""
        return 0 <= peer < self.size and load_int(&self.end.boxes[peer].closed) != OK

    def pending(self):
        """Return (receives posted, messages that no receive has matched) of this rank."""
        cdef Mailbox *box = &self.end.boxes[self.rank]
        cdef size_t posted, arrived
        # Allocate no Python objects under the lock: the collector may cancel requests.
        with nogil:
            pthread_mutex_lock(&box.lock)
            posted, arrived = count_posted(&box.queues), count_arrived(&box.queues)
            pthread_mutex_unlock(&box.lock)
        return posted, arrived

"""Ranks that are threads of one process: messages by one copy, and windows.

Every rank has a box: the receives it has posted and the messages it has not asked for yet.
Whoever comes second, sender or receiver, takes the other's item out of the box under its
lock ("claims" it) and copies straight from the sender's memory to the receiver's after the
lock is released. Messages of at most EAGER_BYTES do not wait for a receiver: they are copied.
"""
import threading
import weakref

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from cydist._native.abi cimport (
    ANY_SOURCE, CLOSED, Fingerprint, Flags, Link, NO_MEMORY, OK, PEER_LOST, PENDING, Request,
    Transport, Window, Windows, now_ns, slice_end,
)
from cydist._native.linux cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from cydist._native.matching cimport (
    Chosen, Item, Queues, add_arrived, add_posted, any_arrived, any_posted, compare, find_arrived,
    count_arrived, count_posted, find_posted, free_item, free_queues, group_rank, init_queues,
    new_item, remove,
)
from cydist._native.waiting cimport (
    SPINS, YIELDS, add_u32, cores, fence, futex_wait, futex_wake, load_int, load_u32, load_u64,
    low_half, pause, sched_yield, slice_until, store_int, store_u64,
)


cdef enum:
    EAGER_BYTES = 65536         # larger messages wait for their receiver
    HELD_BYTES = 67108864       # a box copies no more than this; then small ones wait too
    LINE = 64


ctypedef struct Box:            # what one rank shares with the others
    pthread_mutex_t lock
    Queues queues               # under the lock
    size_t held_bytes           # in messages that were copied; under the lock
    uint32_t bell               # changes whenever a request of this rank completes
    uint32_t sleepers
    int closed                  # OK, or CLOSED once the rank has left


ctypedef struct End:            # one rank's end of a hub
    int rank
    int size
    int spins
    Box *boxes                  # the hub's, one per rank


# Messages

cdef void complete(Box *owner, Request *r, int status) noexcept nogil:
    """The last touch of a request that belongs to another thread."""
    store_int(&r.status, status)
    add_u32(&owner.bell, 1)
    if load_u32(&owner.sleepers) != 0:
        futex_wake(&owner.bell)


cdef int deliver(Request *r, const Transport *view, int sender, const Fingerprint *theirs,
                 const char *data, size_t nbytes) noexcept nogil:
    """Fill a claimed receive; returns the status to complete it with."""
    cdef int status = compare(r, theirs, nbytes)
    r.source = group_rank(view, sender)
    if status == OK and nbytes != 0:
        memcpy(r.ptr, data, nbytes)
    return status


cdef int send(Transport *t, Request *r) noexcept nogil:
    cdef End *end = <End *>t.link
    cdef Box *box = &end.boxes[t.peers[r.peer]]
    cdef Item *message
    cdef Item *item
    cdef Request *receive
    if load_int(&end.boxes[end.rank].closed) != OK:
        return CLOSED
    message = new_item(t, r, end.rank, 0)
    if message == NULL:
        return NO_MEMORY
    r.status = PENDING
    r.link = NULL
    r.place = box
    pthread_mutex_lock(&box.lock)
    if box.closed != OK:
        pthread_mutex_unlock(&box.lock)
        free_item(message)
        return PEER_LOST
    item = find_posted(&box.queues, t.context, end.rank, r.tag)
    if item != NULL:
        receive = item.request
        remove(item)
        receive.link = NULL
        pthread_mutex_unlock(&box.lock)
        complete(box, receive, deliver(receive, item.view, end.rank, &message.fingerprint,
                                       r.ptr, r.nbytes))
        free_item(item)
        free_item(message)
        r.status = OK
        return OK
    if r.nbytes <= EAGER_BYTES and box.held_bytes + r.nbytes <= HELD_BYTES:
        message.data = <char *>malloc(r.nbytes + 1)
    if message.data != NULL:
        memcpy(message.data, r.ptr, r.nbytes)
        message.request = NULL
        box.held_bytes += r.nbytes
        r.status = OK
    else:
        r.link = message
    add_arrived(&box.queues, message)
    pthread_mutex_unlock(&box.lock)
    return OK


cdef int recv(Transport *t, Request *r) noexcept nogil:
    cdef End *end = <End *>t.link
    cdef Box *box = &end.boxes[end.rank]
    cdef int peer = ANY_SOURCE if r.peer == ANY_SOURCE else t.peers[r.peer]
    cdef Item *receive = new_item(t, r, peer, 0)
    cdef Item *item
    cdef int lost
    if receive == NULL:
        return NO_MEMORY
    r.status = PENDING
    r.link = NULL
    r.place = box
    pthread_mutex_lock(&box.lock)
    item = find_arrived(&box.queues, t.context, peer, r.tag)
    if item != NULL:
        free_item(receive)
        remove(item)
        if item.request != NULL:
            item.request.link = NULL
        else:
            box.held_bytes -= item.nbytes
        pthread_mutex_unlock(&box.lock)
        take(end, t, r, item)
        return OK
    lost = CLOSED if box.closed != OK else (PEER_LOST if nobody_left(t, peer) else OK)
    if lost == OK:
        r.link = receive
        add_posted(&box.queues, receive)
    pthread_mutex_unlock(&box.lock)
    if lost != OK:
        free_item(receive)
    return lost


cdef void take(End *end, Transport *t, Request *r, Item *item) noexcept nogil:
    """Receive a message that was claimed from our box, and let its sender go."""
    cdef const char *data = item.request.ptr if item.request != NULL else item.data
    r.status = deliver(r, t, item.peer, &item.fingerprint, data, item.nbytes)
    if item.request != NULL:
        complete(&end.boxes[item.peer], item.request, OK)
    free_item(item)


cdef bint nobody_left(const Transport *t, int peer) noexcept nogil:
    """Has the link peer left, or everybody else of the group for ANY_SOURCE?"""
    cdef End *end = <End *>t.link
    cdef int i
    if peer != ANY_SOURCE:
        return load_int(&end.boxes[peer].closed) != OK
    for i in range(t.size):
        if t.peers[i] != end.rank and load_int(&end.boxes[t.peers[i]].closed) == OK:
            return False
    return t.size > 1


cdef int test(Transport *t, Request *r) noexcept nogil:
    return load_int(&r.status)


cdef int wait(Transport *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef End *end = <End *>t.link
    cdef Box *own = &end.boxes[end.rank]
    cdef int i, status
    cdef uint32_t seen
    cdef int64_t now, until
    for i in range(end.spins + YIELDS):
        status = load_int(&r.status)
        if status != PENDING:
            return status
        if i < end.spins:
            pause()
        else:
            sched_yield()
    now = now_ns()
    until = slice_until(now, deadline_ns)
    while True:
        add_u32(&own.sleepers, 1)
        seen = load_u32(&own.bell)
        status = load_int(&r.status)
        if status == PENDING:
            futex_wait(&own.bell, seen, until - now)
        add_u32(&own.sleepers, <uint32_t>-1)
        status = load_int(&r.status)
        if status != PENDING:
            return status
        now = now_ns()
        if now >= until:
            status = slice_end(t, deadline_ns)
            if status != OK:
                return status
            now = now_ns()
            until = slice_until(now, deadline_ns)


cdef void cancel(Transport *t, Request *r) noexcept nogil:
    cdef Box *box = <Box *>r.place
    cdef Item *item
    pthread_mutex_lock(&box.lock)
    item = <Item *>r.link
    if item != NULL:
        r.link = NULL
        remove(item)
    pthread_mutex_unlock(&box.lock)
    if item != NULL:
        free_item(item)
        return
    # Claimed: the other side is copying, which takes no longer than the memory does.
    while load_int(&r.status) == PENDING:
        sched_yield()


# Leaving

cdef bint of_context(const Item *item, const void *context) noexcept nogil:
    return item.context == (<const uint64_t *>context)[0]


cdef bint any_item(const Item *item, const void *context) noexcept nogil:
    return True


cdef bint sent_in_place(const Item *item, const void *rank) noexcept nogil:
    return item.request != NULL and item.peer == (<const int *>rank)[0]


cdef bint waits_for_nobody(const Item *item, const void *unused) noexcept nogil:
    return nobody_left(item.view, item.peer)


cdef void drop(End *end, Box *box, Chosen chosen, const void *context) noexcept nogil:
    """Empty a box of what `chosen` names: receives of its owner, messages of anybody."""
    cdef Item *item
    while True:
        pthread_mutex_lock(&box.lock)
        item = any_posted(&box.queues, chosen, context)
        if item == NULL:
            item = any_arrived(&box.queues, chosen, context)
        if item != NULL:
            remove(item)
            if item.request != NULL:
                item.request.link = NULL
            else:
                box.held_bytes -= item.nbytes
        pthread_mutex_unlock(&box.lock)
        if item == NULL:
            return
        if item.request != NULL:
            # Ours end because we leave; a sender's, because its receiver does.
            complete_dropped(end, box, item)
        free_item(item)


cdef void complete_dropped(End *end, Box *box, Item *item) noexcept nogil:
    cdef int rank = item.view.peers[item.view.rank]
    complete(&end.boxes[rank], item.request, CLOSED if rank == end.rank else PEER_LOST)


cdef void leave(End *end) noexcept nogil:
    """Nothing is sent to this rank any more, and nobody waits for it."""
    cdef Box *own = &end.boxes[end.rank]
    cdef Item *item
    cdef int i
    pthread_mutex_lock(&own.lock)
    store_int(&own.closed, CLOSED)
    pthread_mutex_unlock(&own.lock)
    drop(end, own, any_item, NULL)
    for i in range(end.size):
        drop(end, &end.boxes[i], sent_in_place, &end.rank)
        while i != end.rank:
            pthread_mutex_lock(&end.boxes[i].lock)
            item = any_posted(&end.boxes[i].queues, waits_for_nobody, NULL)
            if item != NULL:
                remove(item)
                item.request.link = NULL
            pthread_mutex_unlock(&end.boxes[i].lock)
            if item == NULL:
                break
            complete(&end.boxes[i], item.request, PEER_LOST)
            free_item(item)


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
    for i in range(end.spins + YIELDS):
        if load_u64(flag) >= value:
            return OK
        if i < end.spins:
            pause()
        else:
            sched_yield()
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
            pthread_mutex_init(&self.boxes[i].lock, NULL)
        for i in range(size):
            if init_queues(&self.boxes[i].queues) != OK:
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
            free_queues(&self.boxes[i].queues)
            pthread_mutex_destroy(&self.boxes[i].lock)
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
        self.end = End(rank, hub.size, SPINS if cores() >= hub.size else 0, hub.boxes)

    cdef int open_view(self, Transport *t) except -1:
        cdef size_t calls = self.hub.slots * sizeof(Fingerprint)
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
            drop(&self.end, &self.end.boxes[self.end.rank], of_context, &t.context)
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

    def pending(self):
        """(receives posted, messages nobody has asked for) of this rank."""
        cdef Box *box = &self.end.boxes[self.rank]
        pthread_mutex_lock(&box.lock)
        posted, arrived = count_posted(&box.queues), count_arrived(&box.queues)
        pthread_mutex_unlock(&box.lock)
        return posted, arrived

"""Rings in shared memory, and the bells that wake their readers; see rings.pxd."""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from cydist._native.abi cimport NO_MEMORY, OK
from cydist._native.linux cimport close, fstat, stat_t
from cydist._native.memory cimport PORTION, lock, reserve, unlock
from cydist._native.waiting cimport (
    add_u32, fence, load_int, load_u32, load_u64, store_int, store_u32, store_u64,
)

cdef extern from "<fcntl.h>" nogil:
    int open(const char *, int)
    int O_CLOEXEC
    int O_NONBLOCK
    int O_RDWR

cdef extern from "<sys/stat.h>" nogil:
    bint S_ISFIFO(unsigned int)

cdef extern from "<unistd.h>" nogil:
    int pipe2(int *, int)
    ssize_t read(int, void *, size_t)
    ssize_t write(int, const void *, size_t)

cdef enum:
    NOTHING = 256               # read from a bell at once; its bytes say nothing
    SEEN_FULL = 4               # a reader that saw a quarter of its ring in use looks for waiters


cdef Nearby *new_nearby(int size, int places) noexcept nogil:
    cdef Nearby *n = <Nearby *>calloc(1, sizeof(Nearby) + (size + 3 * places) * sizeof(int))
    cdef int i
    if n == NULL:
        return NULL
    n.places = places
    n.place = <int *>(n + 1)
    n.ranks = n.place + size
    n.pids = n.ranks + places
    n.bells = n.pids + places
    n.bell[0] = n.bell[1] = -1
    for i in range(size):
        n.place[i] = -1
    for i in range(places):
        n.bells[i] = -1
    return n


cdef void free_nearby(Nearby *n) noexcept nogil:
    free(n)


# Bells

cdef int hang_bell(Nearby *n) noexcept nogil:
    cdef Member *member = &n.members[n.own]
    cdef stat_t status
    if pipe2(n.bell, O_CLOEXEC | O_NONBLOCK) != 0:
        n.bell[0] = n.bell[1] = -1
        return NO_MEMORY
    if fstat(n.bell[0], &status) != 0:
        return NO_MEMORY
    member.bell_inode = status.st_ino
    store_int(&member.bell, n.bell[0] + 1)
    return OK


cdef void close_bells(Nearby *n) noexcept nogil:
    cdef int i
    for i in range(2):
        if n.bell[i] >= 0:
            close(n.bell[i])
        n.bell[i] = -1
    for i in range(n.places):
        if n.bells[i] >= 0:
            close(n.bells[i])
        n.bells[i] = -1


cdef void open_bell(Nearby *n, int place) noexcept nogil:
    """Where that fails the rank is not woken, but looks by itself when its slice of sleep ends."""
    cdef Member *member = &n.members[place]
    cdef char path[64]
    cdef stat_t status
    cdef int fd, number = load_int(&member.bell) - 1
    if number < 0:
        return
    snprintf(path, sizeof(path), b"/proc/%d/fd/%d", n.pids[place], number)
    # For reading as well: writing to a pipe that nobody reads would be a signal.
    fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC)
    if fd < 0:
        return
    # The process may have ended, and another have its number.
    if fstat(fd, &status) != 0 or not S_ISFIFO(status.st_mode) \
            or status.st_ino != member.bell_inode:
        close(fd)
        return
    n.bells[place] = fd


cdef void ring_bell(Nearby *n, int place) noexcept nogil:
    """Wake this rank, if it sleeps. What it is to see was stored before."""
    cdef Member *member = &n.members[place]
    fence()
    if load_u32(&member.asleep) == 0:
        return
    store_u32(&member.asleep, 0)
    if n.bells[place] < 0:
        open_bell(n, place)
    if n.bells[place] >= 0 and write(n.bells[place], b"", 1) < 0:
        return                      # it is full: the rank will hear it


cdef void fall_asleep(Nearby *n) noexcept nogil:
    n.asleep += 1
    store_u32(&n.members[n.own].asleep, 1)
    fence()


cdef void wake_up(Nearby *n) noexcept nogil:
    n.asleep -= 1
    # Whoever rang may have meant another thread of ours that sleeps.
    store_u32(&n.members[n.own].asleep, n.asleep != 0)
    fence()


cdef void silence_bell(Nearby *n) noexcept nogil:
    cdef char nothing[NOTHING]
    while read(n.bell[0], nothing, NOTHING) == NOTHING:
        pass


cdef void tell_news(Nearby *n, int place) noexcept nogil:
    add_u32(&n.members[place].news, 1)
    ring_bell(n, place)


cdef void spread_news(Nearby *n) noexcept nogil:
    cdef int place
    for place in range(n.places):
        if place != n.own:
            tell_news(n, place)


# Pairs

cdef uint64_t *pair_word(const Nearby *n, int place) noexcept nogil:
    cdef int low = min(n.own, place), high = max(n.own, place)
    return &n.pairs[<size_t>low * n.ranks_of_memory + high]


cdef inline uint64_t each_bytes(const Nearby *n) noexcept nogil:
    return sizeof(Control) + n.ring_bytes


cdef uint64_t make_rings(Nearby *n, int place) noexcept nogil:
    cdef uint64_t *word = pair_word(n, place)
    cdef uint64_t offset = load_u64(word)
    if offset != 0:
        return offset
    lock(n.head)
    offset = load_u64(word)
    if offset == 0:
        offset = reserve(n.head, n.fd, n.limit, 2 * each_bytes(n))
        if offset == 0:
            offset = NO_RINGS
        store_u64(word, offset)
    unlock(n.head)
    tell_news(n, place)
    return offset


cdef bint find_rings(Nearby *n, int place, uint64_t word, Ring *inbound,
                     Ring *outbound) noexcept nogil:
    cdef char *first = n.base + word
    cdef char *second = first + each_bytes(n)
    if word % sizeof(Control) != 0 or word > n.limit or n.limit - word < 2 * each_bytes(n):
        return False
    outbound.control = <Control *>(first if n.own < place else second)
    inbound.control = <Control *>(second if n.own < place else first)
    outbound.data = <char *>(outbound.control + 1)
    inbound.data = <char *>(inbound.control + 1)
    return True


# Writing and reading

cdef inline void put(const Nearby *n, Ring *ring, const char *bytes, size_t nbytes) noexcept nogil:
    cdef size_t place = ring.at & (n.ring_bytes - 1)
    cdef size_t part = min(nbytes, n.ring_bytes - place)
    memcpy(ring.data + place, bytes, part)
    memcpy(ring.data, bytes + part, nbytes - part)
    ring.at += nbytes


cdef inline size_t room_in(const Nearby *n, const Ring *ring) noexcept nogil:
    return n.ring_bytes - (ring.at - ring.seen)


cdef inline bint look_at_head(const Nearby *n, Ring *ring) noexcept nogil:
    """False: it cannot be."""
    ring.seen = load_u64(&ring.control.head)
    if ring.at - ring.seen <= n.ring_bytes:
        return True
    ring.seen = ring.at - n.ring_bytes
    return False


cdef bint has_room(Nearby *n, Ring *ring) noexcept nogil:
    return not look_at_head(n, ring) or room_in(n, ring) >= PORTION


cdef ssize_t write_ring(Nearby *n, int place, Ring *ring, const char *header, size_t header_bytes,
                        const char *data, size_t nbytes) noexcept nogil:
    cdef uint64_t began = ring.at
    cdef size_t part
    cdef bint first = True
    if room_in(n, ring) < header_bytes + nbytes and not look_at_head(n, ring):
        return -1
    part = min(header_bytes, room_in(n, ring))
    put(n, ring, header, part)
    while nbytes != 0:
        part = min(nbytes, min(<size_t>PORTION, room_in(n, ring)))
        if part == 0:
            if not look_at_head(n, ring):
                return -1
            if room_in(n, ring) == 0:
                break
            continue
        put(n, ring, data, part)
        data += part
        nbytes -= part
        if nbytes != 0:
            store_u64(&ring.control.tail, ring.at)
            if first:
                first = False
                ring_bell(n, place)
    if ring.at != began:
        store_u64(&ring.control.tail, ring.at)
        ring_bell(n, place)
    return <ssize_t>(ring.at - began)


cdef bint want_room(Nearby *n, Ring *ring) noexcept nogil:
    store_u32(&ring.control.wants_room, 1)
    fence()
    return not has_room(n, ring)


cdef const char *unread(Nearby *n, Ring *ring, size_t *nbytes) noexcept nogil:
    cdef size_t place = ring.at & (n.ring_bytes - 1)
    cdef uint64_t there = ring.seen - ring.at
    if there == 0:
        ring.seen = load_u64(&ring.control.tail)
        there = ring.seen - ring.at
    nbytes[0] = there > n.ring_bytes
    if there == 0 or there > n.ring_bytes:
        return NULL
    nbytes[0] = min(there, min(<size_t>PORTION, n.ring_bytes - place))
    return ring.data + place


cdef void was_read(Nearby *n, int place, Ring *ring, size_t nbytes) noexcept nogil:
    cdef bint nearly_empty = ring.seen - ring.at < n.ring_bytes // SEEN_FULL
    ring.at += nbytes
    store_u64(&ring.control.head, ring.at)
    # Who waits for room has found less than a PORTION of it, so a reader that has only ever seen
    # a few bytes since then has not read up to there, and will see the rest.
    if nearly_empty:
        return
    fence()
    if load_u32(&ring.control.wants_room) != 0:
        store_u32(&ring.control.wants_room, 0)
        ring_bell(n, place)


cdef void say_over(Nearby *n, int place, Ring *ring, int how) noexcept nogil:
    if ring.control != NULL and load_int(&ring.control.over) == 0:
        store_int(&ring.control.over, how)
        ring_bell(n, place)

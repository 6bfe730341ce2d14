"""Rings in shared memory; see shm_ring.pxd."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport first_count
from cydist._native.pipeline cimport copy
from cydist._native.shm_memory cimport PORTION, give_back, reserve
from cydist._native.shm_peers cimport LocalPeers, ring_doorbell, notify_peer
from cydist._native.sync cimport (
    fence, load_int, load_u32, load_u64, store_int, store_u32, store_u64, compare_swap_u64,
)

cdef enum:
    SEEN_FULL = 4               # a reader that saw 1/SEEN_FULL of its ring in use looks for waiters


# Pairs

cdef uint64_t *pair_entry(const LocalPeers *n, int place) noexcept nogil:
    cdef int low = min(n.own, place), high = max(n.own, place)
    return &n.pairs[<size_t>low * n.ranks_of_memory + high]


cdef inline uint64_t each_bytes(const LocalPeers *n) noexcept nogil:
    return sizeof(Control) + n.ring_bytes + n.cell_bytes


cdef inline void begin_ring(Control *control) noexcept nogil:
    control.tail = control.head = control.withdrawn = first_count()


cdef uint64_t make_rings(LocalPeers *n, int place) noexcept nogil:
    cdef uint64_t *word = pair_entry(n, place)
    cdef uint64_t found = load_u64(word)
    cdef uint64_t offset = 0
    cdef bint raced = True
    while found == 0 and raced:
        offset = reserve(n.head, n.fd, n.limit, 2 * each_bytes(n), &raced)
        if raced:
            found = load_u64(word)
    if found != 0:
        return found
    if offset != 0:
        begin_ring(<Control *>(n.base + offset))
        begin_ring(<Control *>(n.base + offset + each_bytes(n)))
    if not compare_swap_u64(word, &found, NO_RINGS if offset == 0 else offset):
        if offset != 0:         # the other rank was first
            give_back(n.head, offset, 2 * each_bytes(n))
        return found
    notify_peer(n, place)
    return NO_RINGS if offset == 0 else offset


cdef bint find_rings(LocalPeers *n, int place, uint64_t word, Ring *inbound,
                     Ring *outbound) noexcept nogil:
    cdef char *first = n.base + word
    cdef char *second = first + each_bytes(n)
    if word % sizeof(Control) != 0 or word > n.limit or n.limit - word < 2 * each_bytes(n):
        return False
    outbound.control = <Control *>(first if n.own < place else second)
    inbound.control = <Control *>(second if n.own < place else first)
    outbound.data = <char *>(outbound.control + 1)
    inbound.data = <char *>(inbound.control + 1)
    inbound.at = inbound.seen = outbound.at = outbound.seen = first_count()
    return True


# Writing and reading

cdef inline void put(const LocalPeers *n, Ring *ring, const char *bytes,
                     size_t nbytes) noexcept nogil:
    cdef size_t place = ring.at & (n.ring_bytes - 1)
    cdef size_t part = min(nbytes, n.ring_bytes - place)
    copy(ring.data + place, bytes, part)
    copy(ring.data, bytes + part, nbytes - part)
    ring.at += nbytes


cdef inline size_t free_bytes(const LocalPeers *n, const Ring *ring) noexcept nogil:
    return n.ring_bytes - (ring.at - ring.seen)


cdef inline bint refresh_head(const LocalPeers *n, Ring *ring) noexcept nogil:
    """Read the reader's head; False: it is impossible."""
    ring.seen = load_u64(&ring.control.head)
    if ring.at - ring.seen <= n.ring_bytes:
        return True
    ring.seen = ring.at - n.ring_bytes
    return False


cdef bint has_space(LocalPeers *n, Ring *ring) noexcept nogil:
    return not refresh_head(n, ring) or free_bytes(n, ring) >= PORTION


cdef bint has_space_for(LocalPeers *n, Ring *ring, size_t nbytes) noexcept nogil:
    return (free_bytes(n, ring) >= nbytes or not refresh_head(n, ring)
            or free_bytes(n, ring) >= nbytes)


cdef ssize_t write_ring(LocalPeers *n, int place, Ring *ring, const char *header,
                        size_t header_bytes, const char *data, size_t nbytes) noexcept nogil:
    cdef uint64_t began = ring.at
    cdef size_t part
    cdef bint first = True
    if free_bytes(n, ring) < header_bytes + nbytes and not refresh_head(n, ring):
        return -1
    part = min(header_bytes, free_bytes(n, ring))
    put(n, ring, header, part)
    if part < header_bytes:
        nbytes = 0              # new room is for the rest of the header
    while nbytes != 0:
        part = min(nbytes, min(<size_t>PORTION, free_bytes(n, ring)))
        if part == 0:
            if not refresh_head(n, ring):
                return -1
            if free_bytes(n, ring) == 0:
                break
            continue
        put(n, ring, data, part)
        data += part
        nbytes -= part
        if nbytes != 0:
            store_u64(&ring.control.tail, ring.at)
            if first:
                first = False
                ring_doorbell(n, place)
    if ring.at != began:
        store_u64(&ring.control.tail, ring.at)
        ring_doorbell(n, place)
    return <ssize_t>(ring.at - began)


cdef bint request_space(LocalPeers *n, Ring *ring) noexcept nogil:
    store_u32(&ring.control.wants_space, 1)
    fence()
    return not has_space(n, ring)


cdef const char *readable_bytes(LocalPeers *n, Ring *ring, size_t *nbytes) noexcept nogil:
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


cdef void advance_read(LocalPeers *n, int place, Ring *ring, size_t nbytes) noexcept nogil:
    cdef bint nearly_empty = ring.seen - ring.at < n.ring_bytes // SEEN_FULL
    ring.at += nbytes
    store_u64(&ring.control.head, ring.at)
    # A waiting writer has found less than a PORTION of room. A reader that has only seen
    # a few bytes since then has not read up to there, and will see the rest.
    if nearly_empty:
        return
    fence()
    if load_u32(&ring.control.wants_space) != 0:
        store_u32(&ring.control.wants_space, 0)
        ring_doorbell(n, place)


cdef void close_writer(LocalPeers *n, int place, Ring *ring, int how) noexcept nogil:
    if ring.control != NULL and load_int(&ring.control.over) == 0:
        store_int(&ring.control.over, how)
        ring_doorbell(n, place)

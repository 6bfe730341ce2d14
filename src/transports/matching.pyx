"""Posted receives and unexpected messages, in hash buckets by comm id and tag."""
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

from cydist._native.abi cimport (
    ANY_SOURCE, COLLECTIVE_TAG, MISMATCH, CONTROL_TAG, NO_MEMORY, OK, SEQUENCE_SHIFT,
)
from cydist._native.sync cimport has_reached, store_u64

cdef enum:
    ROWS = 64                   # by comm id, so that closing a group searches one row
    COLUMNS = 16                # by tag; both powers of two
    BUCKETS = 1024
    STRAYS = 4                  # items of a bucket that are checked for earlier calls


cdef inline size_t row(uint64_t comm_id) noexcept nogil:
    # Fibonacci hashing, here and below.
    return <size_t>((comm_id * 0x9E3779B97F4A7C15ULL) >> 48) & (ROWS - 1)


cdef inline size_t bucket(uint64_t comm_id, uint64_t tag) noexcept nogil:
    # The sender is not hashed, so that an any-source receive is in one bucket, in order
    # with the other receives.
    cdef size_t column = <size_t>(((tag + (tag >> 24)) * 0x9E3779B97F4A7C15ULL) >> 48)
    return row(comm_id) * COLUMNS + (column & (COLUMNS - 1))


cdef int init_queues(Queues *q) noexcept nogil:
    cdef int i
    q.posted = <Item *>calloc(BUCKETS, sizeof(Item))
    q.arrived = <Item *>calloc(BUCKETS, sizeof(Item))
    q.comms = <Item *>calloc(ROWS, sizeof(Item))
    q.closed = <uint64_t *>calloc(REMEMBERED, sizeof(uint64_t))
    if q.posted == NULL or q.arrived == NULL or q.comms == NULL or q.closed == NULL:
        free(q.posted)
        free(q.arrived)
        free(q.comms)
        free(q.closed)
        q.posted = q.arrived = q.comms = NULL
        q.closed = NULL
        return NO_MEMORY
    for i in range(ROWS):
        q.comms[i].next = q.comms[i].prev = &q.comms[i]
    for i in range(BUCKETS):
        q.posted[i].next = q.posted[i].prev = &q.posted[i]
        q.arrived[i].next = q.arrived[i].prev = &q.arrived[i]
    return OK


cdef void free_lists(Item *heads, int count) noexcept nogil:
    cdef int i
    cdef Item *item
    cdef Item *after
    if heads == NULL:
        return
    for i in range(count):
        item = heads[i].next
        while item != &heads[i]:
            after = item.next
            free_item(item)
            item = after
    free(heads)


cdef void free_queues(Queues *q) noexcept nogil:
    free_lists(q.posted, BUCKETS)
    free_lists(q.arrived, BUCKETS)
    free_lists(q.comms, ROWS)
    free(q.closed)
    q.posted = q.arrived = q.comms = NULL
    q.closed = NULL


cdef Item *blank_item(size_t more_bytes) noexcept nogil:
    cdef Item *item = <Item *>calloc(1, sizeof(Item) + more_bytes)
    if item != NULL:
        item.more = item + 1
    return item


cdef Item *new_item(Comm *t, Request *r, int peer, size_t more_bytes) noexcept nogil:
    cdef Item *item = blank_item(more_bytes)
    if item == NULL:
        return NULL
    item.comm_id = t.comm_id
    item.tag = r.tag
    item.peer = peer
    item.request = r
    item.comm = t
    item.nbytes = r.nbytes
    if r.expected != NULL:
        item.fingerprint = r.expected[0]
    return item


cdef void free_item(Item *item) noexcept nogil:
    free(item.data)
    free(item)


cdef inline void append(Item *head, Item *item) noexcept nogil:
    item.next = head
    item.prev = head.prev
    head.prev.next = item
    head.prev = item


cdef void remove(Item *item) noexcept nogil:
    item.prev.next = item.next
    item.next.prev = item.prev
    item.next = item.prev = NULL


cdef void add_to_ring(Item **ring, Item *item) noexcept nogil:
    if ring[0] == NULL:
        item.next = item.prev = item
        ring[0] = item
    else:
        item.next = ring[0]
        item.prev = ring[0].prev
        item.prev.next = item
        item.next.prev = item


cdef void remove_from_ring(Item **ring, Item *item) noexcept nogil:
    if ring[0] == item:
        ring[0] = NULL if item.next == item else item.next
    item.prev.next = item.next
    item.next.prev = item.prev


cdef void add_posted(Queues *q, Item *item) noexcept nogil:
    append(&q.posted[bucket(item.comm_id, item.tag)], item)


cdef void add_posted_first(Queues *q, Item *item) noexcept nogil:
    append(q.posted[bucket(item.comm_id, item.tag)].next, item)


cdef void add_arrived(Queues *q, Item *item) noexcept nogil:
    append(&q.arrived[bucket(item.comm_id, item.tag)], item)


cdef Item *oldest(Item *head, uint64_t comm_id, int peer, uint64_t tag) noexcept nogil:
    cdef Item *item = head.next
    while item != head:
        if (item.tag == tag and item.comm_id == comm_id
                and (item.peer == peer or item.peer == ANY_SOURCE or peer == ANY_SOURCE)):
            return item
        item = item.next
    return NULL


cdef Item *find_posted(Queues *q, uint64_t comm_id, int peer, uint64_t tag) noexcept nogil:
    return oldest(&q.posted[bucket(comm_id, tag)], comm_id, peer, tag)


cdef Item *find_arrived(Queues *q, uint64_t comm_id, int peer, uint64_t tag) noexcept nogil:
    return oldest(&q.arrived[bucket(comm_id, tag)], comm_id, peer, tag)


cdef Item *any_of(Item *heads, size_t first, size_t past, Chosen chosen,
                  const void *argument) noexcept nogil:
    cdef size_t i
    cdef Item *item
    for i in range(first, past):
        item = heads[i].next
        while item != &heads[i]:
            if chosen(item, argument):
                return item
            item = item.next
    return NULL


cdef Item *any_posted(Queues *q, Chosen chosen, const void *argument) noexcept nogil:
    return any_of(q.posted, 0, BUCKETS, chosen, argument)


cdef Item *any_arrived(Queues *q, Chosen chosen, const void *argument) noexcept nogil:
    return any_of(q.arrived, 0, BUCKETS, chosen, argument)


cdef Item *any_of_comm(Queues *q, uint64_t comm_id, Chosen chosen,
                       const void *argument) noexcept nogil:
    cdef size_t first = row(comm_id) * COLUMNS
    cdef Item *item = any_of(q.arrived, first, first + COLUMNS, chosen, argument)
    if item == NULL:
        item = any_of(q.posted, first, first + COLUMNS, chosen, argument)
    return item


cdef size_t count(const Item *heads) noexcept nogil:
    cdef int i
    cdef size_t items = 0
    cdef const Item *item
    for i in range(BUCKETS):
        item = heads[i].next
        while item != &heads[i]:
            items += item.tag != CONTROL_TAG
            item = item.next
    return items


cdef size_t count_posted(const Queues *q) noexcept nogil:
    return count(q.posted)


cdef size_t count_arrived(const Queues *q) noexcept nogil:
    return count(q.arrived)


cdef int compare_message(Request *r, const Fingerprint *theirs, size_t nbytes) noexcept nogil:
    cdef Fingerprint none
    cdef const Fingerprint *ours = r.expected
    if ours == NULL:
        memset(&none, 0, sizeof(none))
        ours = &none
    if ((nbytes == r.nbytes or (r.or_less and nbytes < r.nbytes))
            and memcmp(ours, theirs, sizeof(Fingerprint)) == 0):
        if r.or_less:
            r.came_bytes = nbytes
        return OK
    r.theirs = theirs[0]
    r.theirs_bytes = nbytes
    return MISMATCH


ctypedef struct ExpectedCall:
    uint64_t comm_id
    const Request *request


cdef bint is_of_other_call(const Item *item, const void *argument) noexcept nogil:
    cdef const ExpectedCall *call = <const ExpectedCall *>argument
    return (item.comm_id == call.comm_id
            and item.tag >> SEQUENCE_SHIFT == call.request.tag >> SEQUENCE_SHIFT
            and memcmp(&item.fingerprint, call.request.expected, sizeof(Fingerprint)) != 0)


cdef bint contradicted(Queues *q, const Comm *t, Request *r) noexcept nogil:
    cdef ExpectedCall call = ExpectedCall(t.comm_id, r)
    cdef Item *item
    if not r.tag & COLLECTIVE_TAG or r.expected == NULL:
        return False
    item = any_arrived(q, is_of_other_call, &call)
    if item == NULL:
        return False
    r.theirs = item.fingerprint
    r.theirs_bytes = item.nbytes
    r.source = group_rank(t, item.peer)
    return True


cdef bint left_over(Queues *q, const Comm *t, uint64_t seq, Request *r) noexcept nogil:
    # The items before a message of an earlier call are received in time, so it reaches the front.
    # Checking all items would slow every call of a rank whose peers are far ahead.
    cdef int _place
    cdef size_t first = row(t.comm_id) * COLUMNS
    cdef size_t i
    cdef const Item *head
    cdef const Item *item
    for i in range(first, first + COLUMNS):
        head = &q.arrived[i]
        item = head.next
        for _place in range(STRAYS):
            if item == head:
                break
            if (item.comm_id == t.comm_id and item.tag & COLLECTIVE_TAG
                    and item.tag != CONTROL_TAG and not has_reached(item.fingerprint.seq, seq)):
                r.theirs = item.fingerprint
                r.theirs_bytes = item.nbytes
                r.source = group_rank(t, item.peer)
                return True
            item = item.next
    return False


cdef int group_rank(const Comm *t, int peer) noexcept nogil:
    cdef int i
    for i in range(t.size):
        if t.peers[i] == peer:
            return i
    return -1


# Groups that have ended on this rank

cdef int open_comm(Queues *q, Comm *t) noexcept nogil:
    cdef Item *item = blank_item(0)
    if item == NULL:
        return NO_MEMORY
    item.comm_id = t.comm_id
    item.comm = t
    append(&q.comms[row(t.comm_id)], item)
    if is_closed(q, t.comm_id):
        q.closed[t.comm_id & (REMEMBERED - 1)] = 0
    return OK


cdef Item *find_open(Queues *q, uint64_t comm_id) noexcept nogil:
    cdef Item *head = &q.comms[row(comm_id)]
    cdef Item *item = head.next
    while item != head and item.comm_id != comm_id:
        item = item.next
    return item if item != head else NULL


cdef void close_comm(Queues *q, uint64_t comm_id) noexcept nogil:
    cdef Item *item = find_open(q, comm_id)
    if item != NULL:
        remove(item)
        free_item(item)
    q.closed[comm_id & (REMEMBERED - 1)] = comm_id


cdef bint is_closed(const Queues *q, uint64_t comm_id) noexcept nogil:
    return comm_id != 0 and q.closed[comm_id & (REMEMBERED - 1)] == comm_id


cdef Comm *note_farewell(Queues *q, uint64_t comm_id, int peer,
                         uint64_t lanes) noexcept nogil:
    cdef Item *item = find_open(q, comm_id)
    if item == NULL or item.comm.farewells == NULL:
        return NULL
    cdef int rank = group_rank(item.comm, peer)
    if rank < 0 or rank == item.comm.rank:
        return NULL
    # Other threads read it without the lock.
    store_u64(&item.comm.farewells[rank], item.comm.farewells[rank] | lanes)
    store_u64(&item.comm.farewells[item.comm.rank], 1)
    return item.comm


cdef bint of_comm(const Item *item, const void *argument) noexcept nogil:
    return item.comm_id == (<const uint64_t *>argument)[0]


cdef bint any_item(const Item *item, const void *nothing) noexcept nogil:
    return True

"""Matching messages with receives: the queues that message transports share.

A receive matches the oldest message of its (comm id, sender, tag), and a message the oldest
receive. So messages of one sender and tag never overtake each other. A transport holds its
own lock around every call. Nothing here copies, completes, or waits.
"""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Fingerprint, Request, Comm


ctypedef struct Item:       # a posted receive, or a message that no receive has taken yet
    Item *next              # neighbours in the bucket, oldest first
    Item *prev
    uint64_t comm_id
    uint64_t tag
    int peer                # link number of the sender; ANY_SOURCE in a receive
    Request *request        # the receive, or the send whose memory holds the bytes; or NULL
    Comm *comm         # the group of `request`
    Fingerprint fingerprint     # of a message
    size_t nbytes
    char *data              # a message's bytes where they were copied; or NULL
    void *more              # the transport's own state, as many bytes as new_item was asked for


cdef enum:
    REMEMBERED = 4096           # a power of two


ctypedef struct Queues:
    Item *posted            # BUCKETS list heads each
    Item *arrived
    Item *comms             # open groups on this rank: ROWS list heads, by comm id
    uint64_t *closed        # comm ids of the last groups that this rank left, by low bits


cdef int init_queues(Queues *q) noexcept nogil          # OK or NO_MEMORY
cdef void free_queues(Queues *q) noexcept nogil         # and every item and its data

# A zeroed item, followed by `more_bytes` for the transport; NULL: no memory.
cdef Item *blank_item(size_t more_bytes) noexcept nogil
# The same, describing request `r` of comm `t`, a receive or a send.
cdef Item *new_item(Comm *t, Request *r, int peer, size_t more_bytes) noexcept nogil
cdef void free_item(Item *item) noexcept nogil          # and its data

cdef void add_posted(Queues *q, Item *item) noexcept nogil
cdef void add_posted_first(Queues *q, Item *item) noexcept nogil    # as if it were the oldest
cdef void add_arrived(Queues *q, Item *item) noexcept nogil
cdef void remove(Item *item) noexcept nogil             # from its queue
# A ring of items that are in no queue; NULL: empty.
cdef void add_to_ring(Item **ring, Item *item) noexcept nogil
cdef void remove_from_ring(Item **ring, Item *item) noexcept nogil

# Return the oldest match, or NULL. It stays in its queue.
cdef Item *find_posted(Queues *q, uint64_t comm_id, int peer, uint64_t tag) noexcept nogil
cdef Item *find_arrived(Queues *q, uint64_t comm_id, int peer, uint64_t tag) noexcept nogil

# Return any item for which `chosen` is true, or NULL; for losing a peer and closing a group.
ctypedef bint (*Chosen)(const Item *item, const void *argument) noexcept nogil
cdef Item *any_posted(Queues *q, Chosen chosen, const void *argument) noexcept nogil
cdef Item *any_arrived(Queues *q, Chosen chosen, const void *argument) noexcept nogil
# The same in both queues; looks only at the buckets that can hold items of this group.
cdef Item *any_of_comm(Queues *q, uint64_t comm_id, Chosen chosen,
                       const void *argument) noexcept nogil
# Two choices: items of the comm id that the argument points to, and any item.
cdef bint of_comm(const Item *item, const void *comm_id) noexcept nogil
cdef bint any_item(const Item *item, const void *nothing) noexcept nogil

# Count without a group's control messages, for which a receive is always posted.
cdef size_t count_posted(const Queues *q) noexcept nogil
cdef size_t count_arrived(const Queues *q) noexcept nogil

# Return OK if a message of `nbytes` and `theirs` fits this receive, else MISMATCH.
# Fills r.theirs on a MISMATCH; sets nothing else.
cdef int compare_message(Request *r, const Fingerprint *theirs, size_t nbytes) noexcept nogil
# For a collective's request that waits for long: return whether a message has arrived whose sender
# takes the call of this number for another. Fills r.theirs and r.source if so. Such a message may
# have a step or a sender that no receive of this rank will name.
cdef bint contradicted(Queues *q, const Comm *t, Request *r) noexcept nogil

# Return whether a message of a collective before call `seq` of this group has arrived that no
# receive took. All receives of that call are over, so its sender took it for another. Fills
# r.theirs and r.source if so.
cdef bint left_over(Queues *q, const Comm *t, uint64_t seq, Request *r) noexcept nogil

# A group begins or has ended on this rank. After its end, a peer's message for it is answered with
# a departure notice. A waiting peer receives that because it repeats its query.
cdef int open_comm(Queues *q, Comm *t) noexcept nogil          # OK or NO_MEMORY
cdef void close_comm(Queues *q, uint64_t comm_id) noexcept nogil
cdef bint is_closed(const Queues *q, uint64_t comm_id) noexcept nogil
# Record a peer's notice that it left a group, which came after its messages on these lanes. Returns
# the group's comm, whose receives from the peer may be hopeless now; NULL: there is none.
cdef Comm *note_farewell(Queues *q, uint64_t comm_id, int peer, uint64_t lanes) noexcept nogil

# The group rank of link peer `peer`, or -1.
cdef int group_rank(const Comm *t, int peer) noexcept nogil

"""Messages between the ranks of one process, with one copy.

Every rank has a box: its posted receives and its messages without a receive. The second of a
sender and a receiver takes the other's item out of the box under its
lock ("claims" it). It copies from the sender's memory to the receiver's after it has
released the lock. Messages of at most EAGER_BYTES do not wait for a receiver: they are copied.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ANY_SOURCE, CLOSED, MISMATCH, CONTROL_TAG, NO_MEMORY, OK, PEER_LOST, PENDING, Comm, Fingerprint,
    Request, first_count, has_left, now_ns, slice_end,
)
from cydist._native.pipeline cimport copy
from cydist._native.linux cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)
from cydist._native.matching cimport (
    Chosen, Item, add_arrived, add_posted, any_arrived, any_item, any_of_comm, any_posted,
    close_comm, compare_message, contradicted as contradicted_in, find_arrived, find_posted,
    free_item, free_queues, group_rank, init_queues, is_closed, left_over as left_over_in, new_item,
    note_farewell, of_comm, open_comm, remove,
)
from cydist._native.sync cimport (
    YIELDS, add_u32, futex_wait, futex_wake, load_int, load_u32, pause, sched_yield, slice_until,
    spins_after, store_int,
)

cdef enum:
    EAGER_BYTES = 65536         # larger messages wait for their receiver
    HELD_BYTES = 67108864       # limit of copied bytes in a box; beyond it short messages wait too


cdef int init_box(Mailbox *box) noexcept nogil:
    pthread_mutex_init(&box.lock, NULL)
    box.doorbell = <uint32_t>first_count()
    return init_queues(&box.queues)


cdef void free_box(Mailbox *box) noexcept nogil:
    free_queues(&box.queues)
    pthread_mutex_destroy(&box.lock)


cdef void complete(Mailbox *owner, Request *r, int status) noexcept nogil:
    """Complete a request that belongs to another thread, and touch it no more."""
    store_int(&r.status, status)
    add_u32(&owner.doorbell, 1)
    if load_u32(&owner.sleepers) != 0:
        futex_wake(&owner.doorbell)


cdef int deliver(Request *r, const Comm *comm, int sender, const Fingerprint *theirs,
                 const char *data, size_t nbytes) noexcept nogil:
    """Fill a claimed receive; return the status to complete it with."""
    cdef int status = compare_message(r, theirs, nbytes)
    r.source = group_rank(comm, sender)
    if status == OK:
        copy(r.ptr, data, nbytes)
    return status


cdef int send(Comm *t, Request *r) noexcept nogil:
    cdef HubEnd *end = <HubEnd *>t.link
    cdef Mailbox *box = &end.boxes[t.peers[r.peer]]
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
    item = find_posted(&box.queues, t.comm_id, end.rank, r.tag)
    if item == NULL and is_closed(&box.queues, t.comm_id):
        pthread_mutex_unlock(&box.lock)
        free_item(message)
        if r.tag == CONTROL_TAG:
            on_farewell(end, t.peers[r.peer], t.comm_id)
        elif r.nbytes > EAGER_BYTES:
            return PEER_LOST
        r.status = OK               # as if it were copied and then never received
        return OK
    if item != NULL:
        receive = item.request
        remove(item)
        receive.link = NULL
        pthread_mutex_unlock(&box.lock)
        complete(box, receive, deliver(receive, item.comm, end.rank, &message.fingerprint,
                                       r.ptr, r.nbytes))
        free_item(item)
        free_item(message)
        r.status = OK
        return OK
    if r.nbytes <= EAGER_BYTES and box.held_bytes + r.nbytes <= HELD_BYTES:
        message.data = <char *>malloc(r.nbytes + 1)
    if message.data != NULL:
        copy(message.data, r.ptr, r.nbytes)
        message.request = NULL
        box.held_bytes += r.nbytes
        r.status = OK
    else:
        r.link = message
    add_arrived(&box.queues, message)
    pthread_mutex_unlock(&box.lock)
    return OK


cdef int recv(Comm *t, Request *r) noexcept nogil:
    cdef HubEnd *end = <HubEnd *>t.link
    cdef Mailbox *box = &end.boxes[end.rank]
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
    item = find_arrived(&box.queues, t.comm_id, peer, r.tag)
    if item != NULL:
        free_item(receive)
        remove(item)
        if item.request != NULL:
            item.request.link = NULL
        else:
            box.held_bytes -= item.nbytes
        pthread_mutex_unlock(&box.lock)
        match_receive(end, t, r, item)
        return OK
    lost = CLOSED if box.closed != OK else (PEER_LOST if all_have_left(t, peer) else OK)
    if lost == OK:
        r.link = receive
        add_posted(&box.queues, receive)
    pthread_mutex_unlock(&box.lock)
    if lost != OK:
        free_item(receive)
    return lost


cdef void on_farewell(HubEnd *end, int peer, uint64_t comm_id) noexcept nogil:
    """Record a peer's departure from a group: receives that only it could match end."""
    cdef Mailbox *own = &end.boxes[end.rank]
    pthread_mutex_lock(&own.lock)
    note_farewell(&own.queues, comm_id, peer, 1)
    pthread_mutex_unlock(&own.lock)
    end_stranded(end, own)


cdef void end_stranded(HubEnd *end, Mailbox *box) noexcept nogil:
    cdef Item *item
    while True:
        pthread_mutex_lock(&box.lock)
        item = any_posted(&box.queues, has_no_sender, NULL)
        if item != NULL:
            remove(item)
            item.request.link = NULL
        pthread_mutex_unlock(&box.lock)
        if item == NULL:
            return
        complete(box, item.request, PEER_LOST)
        free_item(item)


cdef void match_receive(HubEnd *end, Comm *t, Request *r, Item *item) noexcept nogil:
    """Receive a message that was claimed from this rank's box, and complete its send."""
    cdef const char *data = item.request.ptr if item.request != NULL else item.data
    r.status = deliver(r, t, item.peer, &item.fingerprint, data, item.nbytes)
    if item.request != NULL:
        complete(&end.boxes[item.peer], item.request, OK)
    free_item(item)


cdef bint all_have_left(const Comm *t, int peer) noexcept nogil:
    """Return whether the link peer has left; for ANY_SOURCE, whether all other members have."""
    cdef HubEnd *end = <HubEnd *>t.link
    cdef int i
    if peer != ANY_SOURCE:
        return (load_int(&end.boxes[peer].closed) != OK
                or (has_left(t, t.rank) and peer != end.rank
                    and has_left(t, group_rank(t, peer))))
    for i in range(t.size):
        if (t.peers[i] != end.rank and load_int(&end.boxes[t.peers[i]].closed) == OK
                and not has_left(t, i)):
            return False
    return t.size > 1


cdef int test(Comm *t, Request *r) noexcept nogil:
    return load_int(&r.status)


cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef HubEnd *end = <HubEnd *>t.link
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef int i, status
    cdef uint32_t seen
    cdef int64_t now, until
    cdef int spins = load_int(&end.spins)
    for i in range(spins + YIELDS):
        status = load_int(&r.status)
        if status != PENDING:
            if i > 0 and spins > 0:
                store_int(&end.spins, spins_after(spins, end.most_spins, i < spins))
            return status
        if i < spins:
            pause()
        else:
            sched_yield()
    store_int(&end.spins, spins_after(spins, end.most_spins, False))
    now = now_ns()
    until = slice_until(now, deadline_ns)
    while True:
        add_u32(&own.sleepers, 1)
        seen = load_u32(&own.doorbell)
        status = load_int(&r.status)
        if status == PENDING:
            futex_wait(&own.doorbell, seen, until - now)
        add_u32(&own.sleepers, <uint32_t>-1)
        status = load_int(&r.status)
        if status != PENDING:
            return status
        now = now_ns()
        if now >= until:
            status = slice_end(t, deadline_ns)
            if status == OK and contradicted(t, r):
                status = MISMATCH
            if status != OK:
                return status
            now = now_ns()
            until = slice_until(now, deadline_ns)


cdef bint contradicted(Comm *t, Request *r) noexcept nogil:
    cdef HubEnd *end = <HubEnd *>t.link
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef bint found
    pthread_mutex_lock(&own.lock)
    found = contradicted_in(&own.queues, t, r)
    pthread_mutex_unlock(&own.lock)
    return found


cdef bint left_over(Comm *t, uint64_t seq, Request *r) noexcept nogil:
    cdef HubEnd *end = <HubEnd *>t.link
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef bint found
    pthread_mutex_lock(&own.lock)
    found = left_over_in(&own.queues, t, seq, r)
    pthread_mutex_unlock(&own.lock)
    return found


cdef void cancel(Comm *t, Request *r) noexcept nogil:
    cdef Mailbox *box = <Mailbox *>r.place
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
    # Claimed: the other side is copying, which takes only as long as the copy.
    while load_int(&r.status) == PENDING:
        sched_yield()


# Leaving

cdef int enter_comm(HubEnd *end, Comm *t) noexcept nogil:
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef int status
    pthread_mutex_lock(&own.lock)
    status = open_comm(&own.queues, t)
    pthread_mutex_unlock(&own.lock)
    return status


cdef bint sent_in_place(const Item *item, const void *rank) noexcept nogil:
    return item.request != NULL and item.peer == (<const int *>rank)[0]


cdef bint has_no_sender(const Item *item, const void *unused) noexcept nogil:
    return all_have_left(item.comm, item.peer)


cdef void drop(HubEnd *end, Mailbox *box, const uint64_t *only, Chosen chosen,
               const void *argument) noexcept nogil:
    """Remove the items that `chosen` selects from a box: its owner's receives, any rank's messages.

    `only`          their context, if it is known
    """
    cdef Item *item
    while True:
        pthread_mutex_lock(&box.lock)
        if only != NULL:
            item = any_of_comm(&box.queues, only[0], chosen, argument)
        else:
            item = any_posted(&box.queues, chosen, argument)
            if item == NULL:
                item = any_arrived(&box.queues, chosen, argument)
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
            # This rank's requests end because it leaves, a sender's because its receiver does.
            complete_dropped(end, box, item)
        free_item(item)


ctypedef struct CommOfRank:
    int rank
    uint64_t comm_id


cdef bint is_own_in_comm(const Item *item, const void *argument) noexcept nogil:
    cdef const CommOfRank *mine = <const CommOfRank *>argument
    return (item.request != NULL and item.comm_id == mine.comm_id
            and item.comm.peers[item.comm.rank] == mine.rank)


cdef void drop_comm(HubEnd *end, uint64_t comm_id) noexcept nogil:
    cdef CommOfRank mine = CommOfRank(end.rank, comm_id)
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef int i
    pthread_mutex_lock(&own.lock)
    close_comm(&own.queues, comm_id)
    pthread_mutex_unlock(&own.lock)
    drop(end, &end.boxes[end.rank], &comm_id, of_comm, &comm_id)
    for i in range(end.size):
        drop(end, &end.boxes[i], &comm_id, is_own_in_comm, &mine)


cdef void complete_dropped(HubEnd *end, Mailbox *box, Item *item) noexcept nogil:
    cdef int rank = item.comm.peers[item.comm.rank]
    complete(&end.boxes[rank], item.request, CLOSED if rank == end.rank else PEER_LOST)


cdef void leave_hub(HubEnd *end) noexcept nogil:
    """Leave: from now on no rank can send to this rank, or waits for it."""
    cdef Mailbox *own = &end.boxes[end.rank]
    cdef int i
    pthread_mutex_lock(&own.lock)
    store_int(&own.closed, CLOSED)
    pthread_mutex_unlock(&own.lock)
    drop(end, own, NULL, any_item, NULL)
    for i in range(end.size):
        drop(end, &end.boxes[i], NULL, sent_in_place, &end.rank)
        if i != end.rank:
            end_stranded(end, &end.boxes[i])

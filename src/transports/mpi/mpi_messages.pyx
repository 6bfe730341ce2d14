"""Transfers of a link through MPI; see mpi_messages.pxd. The lock is held throughout.

Every message begins with a header of its own, under one MPI tag. A small payload follows in the
same MPI message. For others the header names their tag, and the receive that matches the header
receives them in place. So MPI matches only senders, and a receive can be withdrawn until its
message has arrived. A message of another kind than expected is found.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from cydist._native.abi cimport (
    CLOSED, NOTICE_TAG, NO_MEMORY, OK, PEER_LOST, PENDING, Comm, Request, now_ns,
)
from cydist._native.pipeline cimport copy
from cydist._native.libmpi cimport SUCCESS, Handle, find_dead, is_among, is_done, lib
from cydist._native.linux cimport pthread_mutex_lock, pthread_mutex_unlock, usleep
from cydist._native.matching cimport (
    Item, add_arrived, blank_item, compare, find_posted, free_item, group_rank, is_closed, remove,
)
from cydist._native.stream_send cimport begin, complete, forget, is_near
from cydist._native.stream_peers cimport lose
from cydist._native.stream_liveness cimport ALL_LANES, hear_farewell
from cydist._native.stream cimport BEYOND, DIED, LEFT, Incoming, incoming

cdef enum:
    HEADER_TAG = 0              # MPI's tag of all headers; payloads have the others
    GRACE_NS = 1000000000       # a message to a rank that has left may still complete
    PATIENCE_NS = 50000000      # how long a withdrawn message may take to complete
    PAUSE_US = 20
    QUESTIONS = 8               # unfinished requests that are tested before anything else is done
    TURNS = 2                   # while requests are pending, headers are polled this rarely


cdef void init_mpi(Mpi *mpi) noexcept nogil:
    mpi.moves.next = mpi.moves.prev = &mpi.moves
    mpi.far.progress = progress
    mpi.far.allowed = may_call
    mpi.far.send = begin_send
    mpi.far.take = take
    mpi.far.refuse = refuse_item
    mpi.far.withdraw = withdraw
    mpi.far.give_up = give_up
    mpi.far.leave = send_goodbyes


# A thread that may not call MPI postpones requests: the next one that polls MPI begins them.

cdef bint may_call(const Net *net) noexcept nogil:
    return is_among(mpi_of(net).callers, mpi_of(net).one)


cdef int postpone(Mpi *mpi, Request *r, int peer, int later,
                  const MpiHeader *header) noexcept nogil:
    cdef MpiRequest *move = new_move(mpi, r, header.context, peer, 0)
    if move == NULL:
        return NO_MEMORY
    move.later = later
    move.header = header[0]
    return OK


cdef void begin_postponed(Mpi *mpi, MpiRequest *move) noexcept nogil:
    cdef Request *r = move.request
    cdef int later = move.later, peer = move.peer, status
    cdef MpiHeader header = move.header
    move.request = NULL
    end_move(mpi, move, OK)
    if later == TO_RECEIVE:
        status = pull(mpi, r, header.context, peer, header.under, r.ptr if r != NULL else NULL,
                      header.nbytes)
        if status != OK and r != NULL:
            complete(mpi.net, r, status)
    elif r != NULL:
        forget(mpi.net, r)
        status = send(mpi, r, peer, &header)
        if status != PENDING:
            begin(mpi.net, r)
            complete(mpi.net, r, status)


# Requests under way in MPI

cdef inline void join_ring(MpiRequest *move, MpiRequest *following) noexcept nogil:
    move.next = following
    move.prev = following.prev
    move.prev.next = move.next.prev = move


cdef inline void leave_ring(MpiRequest *move) noexcept nogil:
    move.prev.next = move.next
    move.next.prev = move.prev


cdef MpiRequest *new_move(Mpi *mpi, Request *r, uint64_t context, int peer,
                          int room) noexcept nogil:
    cdef MpiRequest *move = <MpiRequest *>calloc(1, sizeof(MpiRequest) + room * sizeof(Handle))
    if move == NULL:
        return NULL
    move.request = r
    move.context = context
    move.peer = peer
    join_ring(move, &mpi.moves)
    if r != NULL:
        r.link = move
        r.place = mpi
    return move


cdef void end_move(Mpi *mpi, MpiRequest *move, int status) noexcept nogil:
    cdef Request *r = move.request
    leave_ring(move)
    mpi.lingering -= move.lingers
    free(move.data)
    free(move)
    if r != NULL:
        complete(mpi.net, r, status)


cdef void detach(Mpi *mpi, MpiRequest *move) noexcept nogil:
    """Mark that no thread waits for it any more; MPI goes on."""
    move.request = NULL
    if move.borrows:
        move.lingers = True
        mpi.lingering += 1


cdef int refused(Mpi *mpi, MpiRequest *move, int code) noexcept nogil:
    mpi.error = code
    mark_dead(mpi)
    if move.count > 0:
        detach(mpi, move)
    else:
        move.request = NULL
        end_move(mpi, move, OK)
    return PEER_LOST


cdef int pull(Mpi *mpi, Request *r, uint64_t context, int peer, int under, char *ptr,
              size_t nbytes) noexcept nogil:
    """Begin to receive a payload that a header announced; without a request, to discard it."""
    cdef size_t i, count = pieces(mpi, nbytes)
    cdef int code = SUCCESS
    cdef MpiHeader header
    cdef MpiRequest *move
    if not may_call(mpi.net):
        memset(&header, 0, sizeof(MpiHeader))
        header.context, header.under, header.nbytes = context, under, nbytes
        return postpone(mpi, r, peer, TO_RECEIVE, &header)
    move = new_move(mpi, r, context, peer, <int>count)
    if move == NULL:
        return NO_MEMORY
    move.borrows = r != NULL
    if r == NULL:
        # Without this receive, the sender could not complete.
        move.data = ptr = <char *>malloc(nbytes)
        if ptr == NULL:
            end_move(mpi, move, NO_MEMORY)
            return NO_MEMORY
    if r != NULL and r.layout != 0:     # then there is one piece, see MpiLink.describes
        code = added(move, lib.irecv(ptr, 1, r.layout, peer, under, mpi.comm, next_of(move)))
        count = 0
    for i in range(count):
        if code == SUCCESS:
            code = added(move, lib.irecv(
                ptr + i * mpi.piece_bytes, piece(mpi, nbytes, i), mpi.byte, peer, under, mpi.comm,
                next_of(move)))
    return OK if code == SUCCESS else refused(mpi, move, code)


cdef bint ended(Mpi *mpi, MpiRequest *move) noexcept nogil:
    """Return whether MPI has done all of it, and free it then."""
    while move.done < move.count and is_done(&move.handles[move.done], &move.error):
        move.done += 1
    if move.done < move.count:
        return False
    if move.error != SUCCESS:
        mpi.error = move.error
        mark_dead(mpi)
    end_move(mpi, move, OK if move.error == SUCCESS else PEER_LOST)
    return True


cdef bint end_some(Mpi *mpi) noexcept nogil:
    """End finished requests. Testing an unfinished one costs as much as all of MPI's progress, so
    only QUESTIONS of them are tested per call, in turn."""
    cdef MpiRequest *move = mpi.moves.next
    cdef MpiRequest *following
    cdef int asked = 0
    cdef bint moved = False
    while move != &mpi.moves and asked < QUESTIONS:
        following = move.next
        if move.later != NOTHING:
            begin_postponed(mpi, move)
        elif ended(mpi, move):
            moved = True
        else:
            asked += 1
        move = following
    if move != &mpi.moves and asked != 0:
        leave_ring(&mpi.moves)
        join_ring(&mpi.moves, move)     # the next call begins here
    return moved


cdef bint progress(Net *net) noexcept nogil:
    cdef Mpi *mpi = mpi_of(net)
    cdef Slot *slot
    cdef Handle awaited
    cdef int error = SUCCESS
    if not may_call(net):
        return False
    cdef bint moved = end_some(mpi)     # messages before the departure notice that follows them
    mpi.turn += 1
    if mpi.moves.next != &mpi.moves and mpi.turn % TURNS != 0:
        return moved
    slot = &mpi.slots[mpi.slot]
    awaited = slot.request
    while slot.request != 0 and is_done(&slot.request, &error):
        if error == SUCCESS:
            arrived(mpi, &slot.header, slot.data)
            moved = True
        else:
            mpi.error = error
            mark_dead(mpi)
            if slot.request == awaited:     # from any source: MPI goes on with it
                break
        listen(mpi, slot)
        mpi.slot = (mpi.slot + 1) % SLOTS
        slot = &mpi.slots[mpi.slot]
        awaited = slot.request
        if error != SUCCESS:
            break
    return moved


cdef void listen(Mpi *mpi, Slot *slot) noexcept nogil:
    cdef int _time
    for _time in range(2):
        if lib.irecv(&slot.header, sizeof(MpiHeader) + INLINE_BYTES, mpi.byte, mpi.any_source,
                     HEADER_TAG, mpi.comm, &slot.request) == SUCCESS:
            return
        slot.request = 0
        mark_dead(mpi)


# Sending

cdef int begin_send(Net *net, const Comm *t, Request *r) noexcept nogil:
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiHeader header
    cdef int status
    memset(&header, 0, sizeof(MpiHeader))
    header.context = t.context
    header.tag = r.tag
    header.nbytes = r.nbytes
    header.peer = net.rank
    if r.expected != NULL:
        header.fingerprint = r.expected[0]
    if not may_call(net):
        status = postpone(mpi, r, t.peers[r.peer], TO_SEND, &header)
        if status == OK:
            begin(net, r)
        return status
    status = send(mpi, r, t.peers[r.peer], &header)
    if status == OK:
        r.status = OK
    return OK if status == PENDING else status


cdef int send(Mpi *mpi, Request *r, int peer, MpiHeader *header) noexcept nogil:
    """Send a message. OK: it is complete; PENDING: its request will report completion."""
    if r.nbytes <= INLINE_BYTES:
        return send_whole(mpi, r, peer, header)
    # A tag is reused after all others. A payload that was not received by then would be taken for
    # the later one.
    header.under = mpi.under[peer] = mpi.under[peer] % mpi.largest_tag + 1
    return send_apart(mpi, r, peer, header)


cdef int send_whole(Mpi *mpi, Request *r, int peer, const MpiHeader *header) noexcept nogil:
    """Copy a small message into one buffer with its header and send it. It is complete only when
    MPI reports so: MPI may keep it until the next MPI call, which no thread makes for a completed
    send. A control message is complete only when the receiver's MPI has it, because a query would
    be repeated otherwise. Without a request the header goes alone."""
    cdef size_t nbytes = sizeof(MpiHeader) + (r.nbytes if r != NULL else 0)
    cdef int code, error = SUCCESS
    cdef Handle sending = 0
    cdef MpiRequest *move
    if mpi.outbox == NULL:
        mpi.outbox = <char *>malloc(sizeof(MpiHeader) + INLINE_BYTES)
        if mpi.outbox == NULL:
            return NO_MEMORY
    memcpy(mpi.outbox, header, sizeof(MpiHeader))
    if r != NULL:
        copy(mpi.outbox + sizeof(MpiHeader), r.ptr, r.nbytes)
    code = (lib.issend if header.tag == NOTICE_TAG else lib.isend)(
        mpi.outbox, <int>nbytes, mpi.byte, peer, HEADER_TAG, mpi.comm, &sending)
    if code != SUCCESS or is_done(&sending, &error):
        mpi.error = error if code == SUCCESS else code
        return OK if code == SUCCESS and error == SUCCESS else PEER_LOST
    move = new_move(mpi, NULL, header.context, peer, 1)
    if move == NULL:
        mpi.outbox = NULL       # MPI owns it now
        return NO_MEMORY
    move.handles[0], move.count = sending, 1
    move.data, mpi.outbox = mpi.outbox, NULL
    if r == NULL:
        return OK
    attach(mpi, move, r)
    return PENDING


cdef int send_apart(Mpi *mpi, Request *r, int peer, const MpiHeader *header) noexcept nogil:
    cdef size_t i, count = pieces(mpi, r.nbytes)
    cdef int code
    cdef MpiRequest *move = new_move(mpi, NULL, header.context, peer, 1 + <int>count)
    if move == NULL:
        return NO_MEMORY
    move.data = <char *>malloc(sizeof(MpiHeader))
    if move.data == NULL:
        end_move(mpi, move, OK)
        return NO_MEMORY
    memcpy(move.data, header, sizeof(MpiHeader))
    code = added(move, lib.isend(move.data, sizeof(MpiHeader), mpi.byte, peer, HEADER_TAG, mpi.comm,
                                 next_of(move)))
    if code == SUCCESS and r.layout != 0:
        code = added(move, lib.isend(r.ptr, 1, r.layout, peer, header.under, mpi.comm,
                                     next_of(move)))
        count = 0
    for i in range(count):
        if code == SUCCESS:
            code = added(move, lib.isend(
                r.ptr + i * mpi.piece_bytes, piece(mpi, r.nbytes, i), mpi.byte, peer, header.under,
                mpi.comm, next_of(move)))
    move.borrows = move.count > 1       # pieces beyond the header
    if code != SUCCESS:
        return refused(mpi, move, code)
    attach(mpi, move, r)
    return PENDING


cdef void attach(Mpi *mpi, MpiRequest *move, Request *r) noexcept nogil:
    move.request = r
    r.status = PENDING
    r.link = move
    r.place = mpi
    begin(mpi.net, r)


# Messages that have arrived

cdef void arrived(Mpi *mpi, const MpiHeader *header, const char *data) noexcept nogil:
    cdef Net *net = mpi.net
    cdef Item *item
    cdef Request *r
    if header.under == GOODBYE:
        on_goodbye(mpi, header.peer)
        return
    if header.under == FAREWELL:
        hear_farewell(net, header.peer, header.context, ALL_LANES)
        return
    item = find_posted(&net.queues, header.context, header.peer, header.tag)
    if item != NULL:
        r = item.request
        r.source = group_rank(item.view, header.peer)
        remove(item)
        free_item(item)
        deliver(mpi, r, header, data, compare(r, &header.fingerprint, header.nbytes))
    elif net.closed or is_closed(&net.queues, header.context):
        refuse(mpi, header)
        if header.tag == NOTICE_TAG and not net.closed:
            send_goodbye(mpi, header.peer, FAREWELL, header.context)
    else:
        keep(net, header, data)


cdef void keep(Net *net, const MpiHeader *header, const char *data) noexcept nogil:
    """Keep a message that no receive has asked for yet."""
    cdef Item *item = blank_item(sizeof(Incoming))
    if item == NULL:
        return
    item.context = header.context
    item.tag = header.tag
    item.peer = header.peer
    item.nbytes = header.nbytes
    item.fingerprint = header.fingerprint
    incoming(item).stage = BEYOND
    incoming(item).id = header.under
    if header.under == 0 and header.nbytes > 0:
        item.data = <char *>malloc(header.nbytes)
        if item.data != NULL:
            memcpy(item.data, data, header.nbytes)
    add_arrived(&net.queues, item)


cdef void deliver(Mpi *mpi, Request *r, const MpiHeader *header, const char *data,
                  int fit) noexcept nogil:
    """Fill a receive that is in no queue, or begin to."""
    cdef int status = fit
    if fit != OK:
        refuse(mpi, header)
    elif header.under == 0:
        copy(r.ptr, data, header.nbytes)
    else:
        status = pull(mpi, r, header.context, header.peer, header.under, r.ptr, header.nbytes)
        if status == OK:
            return
    complete(mpi.net, r, status)


cdef void take(Net *net, Item *item, Request *r, int fit) noexcept nogil:
    cdef MpiHeader header = header_of(item)
    deliver(mpi_of(net), r, &header, item.data, fit)


cdef void refuse(Mpi *mpi, const MpiHeader *header) noexcept nogil:
    if header.under > 0:
        pull(mpi, NULL, header.context, header.peer, header.under, NULL, header.nbytes)


cdef void refuse_item(Net *net, Item *item) noexcept nogil:
    cdef MpiHeader header = header_of(item)
    refuse(mpi_of(net), &header)


cdef MpiHeader header_of(const Item *item) noexcept nogil:
    cdef MpiHeader header
    header.context, header.tag, header.nbytes = item.context, item.tag, item.nbytes
    header.peer, header.under = item.peer, <int>incoming(item).id
    header.fingerprint = item.fingerprint
    return header


# Giving up

cdef void withdraw(Net *net, Request *r) noexcept nogil:
    """Give a request that MPI has started a short time to complete. Control messages are not waited
    for; MPI owns their memory from now on."""
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiRequest *move
    cdef int64_t until = 0 if r.tag == NOTICE_TAG else now_ns() + PATIENCE_NS
    while (r.status == PENDING and r.link != NULL and (<MpiRequest *>r.link).later == NOTHING
           and now_ns() < until):
        progress(net)
        pthread_mutex_unlock(&net.lock)
        usleep(PAUSE_US)
        pthread_mutex_lock(&net.lock)
    move = <MpiRequest *>r.link
    if r.status == PENDING and move != NULL:
        forget(net, r)
        detach(mpi, move)


cdef void give_up(Net *net, Request *r) noexcept nogil:
    """End a message whose other side left a while ago."""
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiRequest *move = <MpiRequest *>r.link
    if (move != NULL and move.peer >= 0 and mpi.left_at[move.peer] != 0
            and now_ns() > mpi.left_at[move.peer] + GRACE_NS
            and (move.later != NOTHING or not may_call(net) or not ended(mpi, move))):
        detach(mpi, move)
        complete(net, r, PEER_LOST)


cdef void drop_moves(Mpi *mpi, uint64_t context) noexcept nogil:
    cdef MpiRequest *move = mpi.moves.next
    cdef Request *r
    while move != &mpi.moves:
        r = move.request
        if r != NULL and move.context == context:
            detach(mpi, move)
            complete(mpi.net, r, CLOSED)
        move = move.next


# Departures, announced by a notice or through death

cdef void mark_dead(Mpi *mpi) noexcept nogil:
    """Give up the ranks that died, if any, after MPI has reported an error."""
    cdef int i, count, peer
    cdef int *dead = <int *>malloc(mpi.net.size * sizeof(int))
    if dead == NULL:
        return
    count = find_dead(mpi.comm, mpi.net.size, dead)
    for i in range(count):
        peer = dead[i]
        if 0 <= peer < mpi.net.size and mpi.left_at[peer] == 0:
            mpi.left += 1
            mpi.left_at[peer] = now_ns()
            if not is_near(mpi.net, peer):
                lose(mpi.net, peer, DIED)
    free(dead)


cdef void on_goodbye(Mpi *mpi, int peer) noexcept nogil:
    if mpi.left_at[peer] == 0:
        mpi.left += 1
        mpi.left_at[peer] = now_ns()
    # The end of a local peer comes after the bytes it wrote to its ring.
    if not is_near(mpi.net, peer):
        lose(mpi.net, peer, LEFT)


cdef void send_goodbyes(Net *net) noexcept nogil:
    """Send every peer a departure notice. Requests that have begun go on while MPI is polled."""
    cdef Mpi *mpi = mpi_of(net)
    cdef int peer
    for peer in range(net.size):
        if peer != net.rank:
            send_goodbye(mpi, peer, GOODBYE, 0)
    progress(net)


cdef void send_goodbye(Mpi *mpi, int peer, int what, uint64_t context) noexcept nogil:
    """Send a header without a message: GOODBYE or FAREWELL, after all that was sent before."""
    cdef MpiHeader header
    memset(&header, 0, sizeof(MpiHeader))
    header.context = context
    header.peer = mpi.net.rank
    header.under = what
    send_whole(mpi, NULL, peer, &header)

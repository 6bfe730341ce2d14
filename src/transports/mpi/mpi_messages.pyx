"""Transfers of a link through MPI; see mpi_messages.pxd. The lock is held throughout.

Every message begins with a header of its own, under one MPI tag. A small payload follows in the
same MPI message. For others the header names their tag, and the receive that matches the header
receives them in place. So MPI matches only senders, and a receive can be withdrawn until its
message has arrived. A message of another kind than expected is found.

Headers are probed for. Receives from any source, posted before, would save MPI a copy, and
MPICH 5.0 over UCX loses the end of one whose message came before it. (The data are there.)
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from cydist._native.abi cimport (
    CLOSED, CONTROL_TAG, NO_MEMORY, OK, PEER_LOST, PENDING, Comm, Request, now_ns,
)
from cydist._native.pipeline cimport copy
from cydist._native.libmpi cimport (
    STATUS_BYTES, SUCCESS, Handle, find_dead, is_among, is_done, lib,
)
from cydist._native.linux cimport pthread_mutex_lock, pthread_mutex_unlock, usleep
from cydist._native.matching cimport (
    Item, add_arrived, blank_item, compare_message, find_posted, free_item, group_rank, is_closed,
    remove,
)
from cydist._native.stream_send cimport begin_request, finish_request, forget_request, is_local
from cydist._native.stream_peers cimport mark_lost
from cydist._native.stream_liveness cimport ALL_LANES, on_farewell
from cydist._native.stream cimport FOREIGN, DIED, LEFT, STARVED, Incoming, incoming

cdef enum:
    HEADER_TAG = 0              # MPI's tag of all headers; payloads have the others
    PATIENCE_NS = 50000000      # how long a withdrawn message may take to complete
    POLL_US = 20
    QUESTIONS = 8               # unfinished requests that are tested before anything else is done
    POLLS_PER_LOOK = 2          # while requests are pending, headers are polled this rarely


cdef void init_mpi(Mpi *mpi) noexcept nogil:
    mpi.requests.next = mpi.requests.prev = &mpi.requests
    mpi.foreign.progress = progress
    mpi.foreign.allowed = may_call
    mpi.foreign.send = begin_send
    mpi.foreign.take = match_receive
    mpi.foreign.refuse = refuse_item
    mpi.foreign.withdraw = withdraw
    mpi.foreign.give_up = give_up
    mpi.foreign.leave = send_goodbyes


# A thread that may not call MPI postpones requests: the next one that polls MPI begins them.

cdef bint may_call(const Net *net) noexcept nogil:
    return is_among(mpi_of(net).callers, mpi_of(net).one)


cdef int postpone(Mpi *mpi, Request *r, int peer, int later,
                  const MpiHeader *header) noexcept nogil:
    cdef MpiRequest *mpi_request = new_mpi_request(mpi, r, header.comm_id, peer, 0)
    if mpi_request == NULL:
        return NO_MEMORY
    mpi_request.later = later
    mpi_request.header = header[0]
    return OK


cdef void begin_postponed(Mpi *mpi, MpiRequest *mpi_request) noexcept nogil:
    cdef Request *r = mpi_request.request
    cdef int later = mpi_request.later, peer = mpi_request.peer, status
    cdef MpiHeader header = mpi_request.header
    mpi_request.request = NULL
    end_mpi_request(mpi, mpi_request, OK)
    if later == TO_RECEIVE:
        status = receive_payload(mpi, r, header.comm_id, peer, header.under,
                                 r.ptr if r != NULL else NULL,
                                 header.nbytes)
        if status != OK and r != NULL:
            finish_request(mpi.net, r, status)
    elif r != NULL:
        forget_request(mpi.net, r)
        status = send(mpi, r, peer, &header)
        if status != PENDING:
            begin_request(mpi.net, r)
            finish_request(mpi.net, r, status)


# Requests under way in MPI

cdef inline void join_ring(MpiRequest *mpi_request, MpiRequest *following) noexcept nogil:
    mpi_request.next = following
    mpi_request.prev = following.prev
    mpi_request.prev.next = mpi_request.next.prev = mpi_request


cdef inline void leave_ring(MpiRequest *mpi_request) noexcept nogil:
    mpi_request.prev.next = mpi_request.next
    mpi_request.next.prev = mpi_request.prev


cdef MpiRequest *new_mpi_request(Mpi *mpi, Request *r, uint64_t comm_id, int peer,
                                 int room) noexcept nogil:
    cdef MpiRequest *mpi_request = <MpiRequest *>calloc(1,
                                                        sizeof(MpiRequest) + room * sizeof(Handle))
    if mpi_request == NULL:
        return NULL
    mpi_request.request = r
    mpi_request.comm_id = comm_id
    mpi_request.peer = peer
    join_ring(mpi_request, &mpi.requests)
    if r != NULL:
        r.link = mpi_request
        r.place = mpi
    return mpi_request


cdef void end_mpi_request(Mpi *mpi, MpiRequest *mpi_request, int status) noexcept nogil:
    cdef Request *r = mpi_request.request
    leave_ring(mpi_request)
    mpi.lingering -= mpi_request.lingers
    free(mpi_request.data)
    free(mpi_request)
    if r != NULL:
        finish_request(mpi.net, r, status)


cdef void detach(Mpi *mpi, MpiRequest *mpi_request) noexcept nogil:
    """Mark that no thread waits for it any more; MPI goes on."""
    mpi_request.request = NULL
    if mpi_request.borrows:
        mpi_request.lingers = True
        mpi.lingering += 1


cdef int on_error(Mpi *mpi, MpiRequest *mpi_request, int code) noexcept nogil:
    mpi.error = code
    mark_dead(mpi)
    if mpi_request.count > 0:
        detach(mpi, mpi_request)
    else:
        mpi_request.request = NULL
        end_mpi_request(mpi, mpi_request, OK)
    return PEER_LOST


cdef int receive_payload(Mpi *mpi, Request *r, uint64_t comm_id, int peer, int under, char *ptr,
                         size_t nbytes) noexcept nogil:
    """Begin to receive a payload that a header announced; without a request, to discard it."""
    cdef size_t i, count = pieces(mpi, nbytes)
    cdef int code = SUCCESS
    cdef MpiHeader header
    cdef MpiRequest *mpi_request
    if not may_call(mpi.net):
        memset(&header, 0, sizeof(MpiHeader))
        header.comm_id, header.under, header.nbytes = comm_id, under, nbytes
        return postpone(mpi, r, peer, TO_RECEIVE, &header)
    mpi_request = new_mpi_request(mpi, r, comm_id, peer, <int>count)
    if mpi_request == NULL:
        return NO_MEMORY
    mpi_request.borrows = r != NULL
    if r == NULL:
        # Without this receive, the sender could not complete.
        mpi_request.data = ptr = <char *>malloc(nbytes)
        if ptr == NULL:
            end_mpi_request(mpi, mpi_request, NO_MEMORY)
            return NO_MEMORY
    if r != NULL and r.layout != 0:     # then there is one piece, see MpiLink.takes_layout
        code = added(mpi_request,
                     lib.irecv(ptr, 1, r.layout, peer, under, mpi.comm, next_of(mpi_request)))
        count = 0
    for i in range(count):
        if code == SUCCESS:
            code = added(mpi_request, lib.irecv(
                ptr + i * mpi.piece_bytes, piece(mpi, nbytes, i), mpi.byte, peer, under, mpi.comm,
                next_of(mpi_request)))
    return OK if code == SUCCESS else on_error(mpi, mpi_request, code)


cdef bint collect_ended(Mpi *mpi, MpiRequest *mpi_request) noexcept nogil:
    """Return whether MPI has done all of it, and free it then."""
    while (mpi_request.done < mpi_request.count
           and is_done(&mpi_request.handles[mpi_request.done], &mpi_request.error)):
        mpi_request.done += 1
    if mpi_request.done < mpi_request.count:
        return False
    if mpi_request.error != SUCCESS:
        mpi.error = mpi_request.error
        mark_dead(mpi)
    end_mpi_request(mpi, mpi_request, OK if mpi_request.error == SUCCESS else PEER_LOST)
    return True


cdef bint end_some(Mpi *mpi) noexcept nogil:
    """End finished requests. Testing an unfinished one costs as much as all of MPI's progress, so
    only QUESTIONS of them are tested per call, in turn."""
    cdef MpiRequest *mpi_request = mpi.requests.next
    cdef MpiRequest *following
    cdef int asked = 0
    cdef bint moved = False
    while mpi_request != &mpi.requests and asked < QUESTIONS:
        following = mpi_request.next
        if mpi_request.later != NOTHING:
            begin_postponed(mpi, mpi_request)
        elif collect_ended(mpi, mpi_request):
            moved = True
        else:
            asked += 1
        mpi_request = following
    if mpi_request != &mpi.requests and asked != 0:
        leave_ring(&mpi.requests)
        join_ring(&mpi.requests, mpi_request)  # the next call begins here
    return moved


cdef bint progress(Net *net) noexcept nogil:
    cdef Mpi *mpi = mpi_of(net)
    if not may_call(net):
        return False
    cdef bint moved = end_some(mpi)     # messages before the departure notice that follows them
    mpi.polls += 1
    if mpi.requests.next != &mpi.requests and mpi.polls % POLLS_PER_LOOK != 0:
        return moved
    return take_headers(mpi) or moved


cdef bint take_headers(Mpi *mpi) noexcept nogil:
    """Take the next header that has come, behind those that are being received. Return whether
    there were any. No further one is probed for: each probe costs system calls, and what the
    caller waits for may have come."""
    cdef Arriving *oldest
    cdef int _header, error = SUCCESS
    cdef bint moved = False
    find_header(mpi)
    for _header in range(HEADERS):
        oldest = &mpi.arriving[mpi.first]
        if mpi.headers == 0 or not is_done(&oldest.request, &error):
            break
        mpi.first = (mpi.first + 1) % HEADERS
        mpi.headers -= 1
        if error != SUCCESS:
            mpi.error = error
            mark_dead(mpi)
            break
        on_header(mpi, &oldest.header, oldest.data)
        moved = True
    return moved


cdef bint find_header(Mpi *mpi) noexcept nogil:
    """Begin to receive the next header, if one has come and there is room."""
    cdef Arriving *next_one = &mpi.arriving[(mpi.first + mpi.headers) % HEADERS]
    cdef char status[STATUS_BYTES]
    cdef Handle message = 0
    cdef int found = 0, code
    if mpi.headers == HEADERS or mpi.ended:
        return False
    code = lib.improbe(mpi.any_source, HEADER_TAG, mpi.comm, &found, &message, status)
    if code == SUCCESS and found:
        next_one.request = 0
        code = lib.imrecv(&next_one.header, sizeof(MpiHeader) + WITH_HEADER_BYTES, mpi.byte,
                          &message, &next_one.request)
    if code != SUCCESS:
        mpi.error = code
        mark_dead(mpi)
        return False
    mpi.headers += found != 0
    return found != 0


# Sending

cdef int begin_send(Net *net, const Comm *t, Request *r) noexcept nogil:
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiHeader header
    cdef int status
    memset(&header, 0, sizeof(MpiHeader))
    header.comm_id = t.comm_id
    header.tag = r.tag
    header.nbytes = r.nbytes
    header.peer = net.rank
    if r.expected != NULL:
        header.fingerprint = r.expected[0]
    if not may_call(net):
        status = postpone(mpi, r, t.peers[r.peer], TO_SEND, &header)
        if status == OK:
            begin_request(net, r)
        return status
    status = send(mpi, r, t.peers[r.peer], &header)
    if status == OK:
        r.status = OK
    return OK if status == PENDING else status


cdef int send(Mpi *mpi, Request *r, int peer, MpiHeader *header) noexcept nogil:
    """Send a message. OK: it is complete; PENDING: its request will report completion."""
    if r.nbytes <= WITH_HEADER_BYTES:
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
    cdef MpiRequest *mpi_request
    cdef char *whole = <char *>malloc(nbytes)
    if whole == NULL:
        return NO_MEMORY
    memcpy(whole, header, sizeof(MpiHeader))
    if r != NULL:
        copy(whole + sizeof(MpiHeader), r.ptr, r.nbytes)
    code = (lib.issend if header.tag == CONTROL_TAG else lib.isend)(
        whole, <int>nbytes, mpi.byte, peer, HEADER_TAG, mpi.comm, &sending)
    if code != SUCCESS or is_done(&sending, &error):
        free(whole)
        mpi.error = error if code == SUCCESS else code
        return OK if code == SUCCESS and error == SUCCESS else PEER_LOST
    mpi_request = new_mpi_request(mpi, NULL, header.comm_id, peer, 1)
    if mpi_request == NULL:
        return NO_MEMORY        # MPI owns the message now
    mpi_request.handles[0], mpi_request.count = sending, 1
    mpi_request.data = whole
    if r == NULL:
        return OK
    attach(mpi, mpi_request, r)
    return PENDING


cdef int send_apart(Mpi *mpi, Request *r, int peer, const MpiHeader *header) noexcept nogil:
    cdef size_t i, count = pieces(mpi, r.nbytes)
    cdef int code
    cdef MpiRequest *mpi_request = new_mpi_request(mpi, NULL, header.comm_id, peer, 1 + <int>count)
    if mpi_request == NULL:
        return NO_MEMORY
    mpi_request.data = <char *>malloc(sizeof(MpiHeader))
    if mpi_request.data == NULL:
        end_mpi_request(mpi, mpi_request, OK)
        return NO_MEMORY
    memcpy(mpi_request.data, header, sizeof(MpiHeader))
    code = added(mpi_request, lib.isend(mpi_request.data, sizeof(MpiHeader), mpi.byte, peer,
                                        HEADER_TAG, mpi.comm,
                                        next_of(mpi_request)))
    if code == SUCCESS and r.layout != 0:
        code = added(mpi_request, lib.isend(r.ptr, 1, r.layout, peer, header.under, mpi.comm,
                                            next_of(mpi_request)))
        count = 0
    for i in range(count):
        if code == SUCCESS:
            code = added(mpi_request, lib.isend(
                r.ptr + i * mpi.piece_bytes, piece(mpi, r.nbytes, i), mpi.byte, peer, header.under,
                mpi.comm, next_of(mpi_request)))
    mpi_request.borrows = mpi_request.count > 1  # pieces beyond the header
    if code != SUCCESS:
        return on_error(mpi, mpi_request, code)
    attach(mpi, mpi_request, r)
    return PENDING


cdef void attach(Mpi *mpi, MpiRequest *mpi_request, Request *r) noexcept nogil:
    mpi_request.request = r
    r.status = PENDING
    r.link = mpi_request
    r.place = mpi
    begin_request(mpi.net, r)


# Messages that have arrived

cdef void on_header(Mpi *mpi, const MpiHeader *header, const char *data) noexcept nogil:
    cdef Net *net = mpi.net
    cdef Item *item
    cdef Request *r
    if header.under == GOODBYE:
        on_goodbye(mpi, header.peer)
        return
    if header.under == FAREWELL:
        on_farewell(net, header.peer, header.comm_id, ALL_LANES)
        return
    item = find_posted(&net.queues, header.comm_id, header.peer, header.tag)
    if item != NULL:
        r = item.request
        r.source = group_rank(item.comm, header.peer)
        remove(item)
        free_item(item)
        deliver(mpi, r, header, data, compare_message(r, &header.fingerprint, header.nbytes))
    elif net.closed or is_closed(&net.queues, header.comm_id):
        refuse(mpi, header)
        if header.tag == CONTROL_TAG and not net.closed:
            send_goodbye(mpi, header.peer, FAREWELL, header.comm_id)
    else:
        queue_unexpected(net, header, data)


cdef void queue_unexpected(Net *net, const MpiHeader *header, const char *data) noexcept nogil:
    """Keep a message that no receive has asked for yet."""
    cdef Item *item = blank_item(sizeof(Incoming))
    if item == NULL:
        mark_lost(net, header.peer, STARVED)    # its next message would be taken for this one
        return
    item.comm_id = header.comm_id
    item.tag = header.tag
    item.peer = header.peer
    item.nbytes = header.nbytes
    item.fingerprint = header.fingerprint
    incoming(item).stage = FOREIGN
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
    elif header.under == 0 and header.nbytes > 0 and data == NULL:
        status = NO_MEMORY      # when it arrived
    elif header.under == 0:
        copy(r.ptr, data, header.nbytes)
    else:
        status = receive_payload(mpi, r, header.comm_id, header.peer, header.under, r.ptr,
                                 header.nbytes)
        if status == OK:
            return
    finish_request(mpi.net, r, status)


cdef void match_receive(Net *net, Item *item, Request *r, int fit) noexcept nogil:
    cdef MpiHeader header = header_of(item)
    deliver(mpi_of(net), r, &header, item.data, fit)


cdef void refuse(Mpi *mpi, const MpiHeader *header) noexcept nogil:
    if header.under > 0:
        receive_payload(mpi, NULL, header.comm_id, header.peer, header.under, NULL, header.nbytes)


cdef void refuse_item(Net *net, Item *item) noexcept nogil:
    cdef MpiHeader header = header_of(item)
    refuse(mpi_of(net), &header)


cdef MpiHeader header_of(const Item *item) noexcept nogil:
    cdef MpiHeader header
    header.comm_id, header.tag, header.nbytes = item.comm_id, item.tag, item.nbytes
    header.peer, header.under = item.peer, <int>incoming(item).id
    header.fingerprint = item.fingerprint
    return header


# Giving up

cdef void withdraw(Net *net, Request *r) noexcept nogil:
    """Give a request that MPI has started a short time to complete. Control messages are not waited
    for; MPI owns their memory from now on."""
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiRequest *mpi_request
    cdef int64_t until = 0 if r.tag == CONTROL_TAG else now_ns() + PATIENCE_NS
    while (r.status == PENDING and r.link != NULL and (<MpiRequest *>r.link).later == NOTHING
           and now_ns() < until):
        progress(net)
        pthread_mutex_unlock(&net.lock)
        usleep(POLL_US)
        pthread_mutex_lock(&net.lock)
    mpi_request = <MpiRequest *>r.link
    if r.status == PENDING and mpi_request != NULL:
        forget_request(net, r)
        detach(mpi, mpi_request)


cdef void give_up(Net *net, Request *r) noexcept nogil:
    """End a message whose other side left a while ago."""
    cdef Mpi *mpi = mpi_of(net)
    cdef MpiRequest *mpi_request = <MpiRequest *>r.link
    if (mpi_request != NULL and mpi_request.peer >= 0 and mpi.left_at[mpi_request.peer] != 0
            and now_ns() > mpi.left_at[mpi_request.peer] + DEPARTED_NS
            and (mpi_request.later != NOTHING or not may_call(net)
                 or not collect_ended(mpi, mpi_request))):
        detach(mpi, mpi_request)
        finish_request(net, r, PEER_LOST)


cdef void drop_mpi_requests(Mpi *mpi, uint64_t comm_id) noexcept nogil:
    cdef MpiRequest *mpi_request = mpi.requests.next
    cdef Request *r
    while mpi_request != &mpi.requests:
        r = mpi_request.request
        if r != NULL and mpi_request.comm_id == comm_id:
            detach(mpi, mpi_request)
            finish_request(mpi.net, r, CLOSED)
        mpi_request = mpi_request.next


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
            if not is_local(mpi.net, peer):
                mark_lost(mpi.net, peer, DIED)
    free(dead)


cdef void on_goodbye(Mpi *mpi, int peer) noexcept nogil:
    if mpi.left_at[peer] == 0:
        mpi.left += 1
        mpi.left_at[peer] = now_ns()
    # The end of a local peer comes after the bytes it wrote to its ring.
    if not is_local(mpi.net, peer):
        mark_lost(mpi.net, peer, LEFT)


cdef void send_goodbyes(Net *net) noexcept nogil:
    """Send every peer a departure notice. Requests that have begun go on while MPI is polled."""
    cdef Mpi *mpi = mpi_of(net)
    cdef int peer
    for peer in range(net.size):
        if peer != net.rank:
            send_goodbye(mpi, peer, GOODBYE, 0)
    progress(net)


cdef void send_goodbye(Mpi *mpi, int peer, int what, uint64_t comm_id) noexcept nogil:
    """Send a header without a message: GOODBYE or FAREWELL, after all that was sent before."""
    cdef MpiHeader header
    memset(&header, 0, sizeof(MpiHeader))
    header.comm_id = comm_id
    header.peer = mpi.net.rank
    header.under = what
    send_whole(mpi, NULL, peer, &header)

"""What MPI moves for a link, and where it goes; see mpi_moves.pxd. The lock is held throughout."""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from cydist._native.abi cimport (
    ANY_SOURCE, CLOSED, NO_MEMORY, OK, PEER_LOST, PENDING, Request, Transport, copy, now_ns,
)
from cydist._native.libmpi cimport SUCCESS, Handle, is_done, lib
from cydist._native.matching cimport (
    Item, add_arrived, any_arrived, any_of_context, any_posted, blank_item, compare, find_posted,
    free_item, group_rank, remove,
)
from cydist._native.waiting cimport sched_yield, store_int

cdef enum:
    HEADER_TAG = 0              # MPI's tag of all headers; payloads have the others
    PAYLOAD_TAGS = 30000        # MPI promises tags up to 32767
    HELD_LIMIT = 67108864       # bytes of small messages that are copied to be sent
    GOODBYE = -1
    GRACE_NS = 1000000000       # a message to a rank that has left may still complete


# What MPI moves

cdef Move *new_move(Net *net, Request *r, uint64_t context, int peer, int count) noexcept nogil:
    cdef Move *move = <Move *>calloc(1, sizeof(Move) + count * sizeof(Handle))
    if move == NULL:
        return NULL
    move.request = r
    move.context = context
    move.peer = peer
    move.count = count
    move.next = &net.moves
    move.prev = net.moves.prev
    net.moves.prev.next = move
    net.moves.prev = move
    if r != NULL:
        r.link = move
        r.place = net
    return move


cdef void end_move(Net *net, Move *move, int status) noexcept nogil:
    cdef Request *r = move.request
    move.prev.next = move.next
    move.next.prev = move.prev
    net.lingering -= move.lingers
    net.held_bytes -= move.nbytes
    free(move.data)
    free(move)
    if r != NULL:
        r.link = NULL
        store_int(&r.status, status)


cdef void detach(Net *net, Move *move, int status) noexcept nogil:
    """Nobody waits for it any more; MPI goes on."""
    cdef Request *r = move.request
    move.request = NULL
    if move.borrows:
        move.lingers = True
        net.lingering += 1
    r.link = NULL
    if status != PENDING:
        store_int(&r.status, status)


cdef inline size_t pieces(const Net *net, size_t nbytes) noexcept nogil:
    return (nbytes + net.piece_bytes - 1) // net.piece_bytes


cdef inline int piece(const Net *net, size_t nbytes, size_t i) noexcept nogil:
    cdef size_t rest = nbytes - i * net.piece_bytes
    return <int>(rest if rest < net.piece_bytes else net.piece_bytes)


cdef int push(Net *net, Move *move, const Header *header, const char *payload) noexcept nogil:
    """Begin to send a header, and what follows it. Returns OK or PEER_LOST."""
    cdef size_t i
    cdef int code = lib.isend(
        move.data, <int>move.nbytes, net.byte, move.peer, HEADER_TAG, net.comm, &move.handles[0])
    if header.under > 0:
        for i in range(pieces(net, header.nbytes)):
            if code == SUCCESS:
                code = lib.isend(
                    payload + i * net.piece_bytes, piece(net, header.nbytes, i), net.byte,
                    move.peer, header.under, net.comm, &move.handles[1 + i])
    if code != SUCCESS:
        net.error = code
        return PEER_LOST
    return OK


cdef int pull(Net *net, Request *r, uint64_t context, int peer, int under, char *ptr,
              size_t nbytes) noexcept nogil:
    """Begin to receive what a header announced; without a request: into nothing."""
    cdef size_t i, count = pieces(net, nbytes)
    cdef int code = SUCCESS
    cdef Move *move = new_move(net, r, context, peer, <int>count)
    if move == NULL:
        return NO_MEMORY
    move.borrows = r != NULL
    if r == NULL:
        # The sender could not end otherwise.
        move.data = ptr = <char *>malloc(nbytes)
        if ptr == NULL:
            end_move(net, move, NO_MEMORY)
            return NO_MEMORY
    for i in range(count):
        if code == SUCCESS:
            code = lib.irecv(ptr + i * net.piece_bytes, piece(net, nbytes, i), net.byte, peer,
                             under, net.comm, &move.handles[i])
    if code != SUCCESS:
        net.error = code
        move.request = NULL
        end_move(net, move, OK)
        return PEER_LOST
    return OK


cdef void progress(Net *net) noexcept nogil:
    cdef Move *move = net.moves.next
    cdef Move *following
    cdef Slot *slot
    cdef int error = SUCCESS
    # Before a goodbye is heard, that what came before it is over.
    while move != &net.moves:
        following = move.next
        while move.done < move.count and is_done(&move.handles[move.done], &error):
            move.done += 1
        if move.done == move.count:
            if error != SUCCESS:
                net.error = error
            end_move(net, move, OK if error == SUCCESS else PEER_LOST)
        error = SUCCESS
        move = following
    slot = &net.slots[net.slot]
    while slot.request != 0 and is_done(&slot.request, &error):
        slot.request = 0
        if error == SUCCESS:
            take(net, &slot.header, slot.data)
        listen(net, slot)
        net.slot = (net.slot + 1) % SLOTS
        slot = &net.slots[net.slot]


cdef void listen(Net *net, Slot *slot) noexcept nogil:
    slot.request = 0
    if lib.irecv(&slot.header, sizeof(Header) + INLINE_BYTES, net.byte, net.any_source, HEADER_TAG,
                 net.comm, &slot.request) != SUCCESS:
        slot.request = 0


cdef int begin_send(Net *net, const Transport *t, Request *r) noexcept nogil:
    cdef bint inline = r.nbytes <= INLINE_BYTES
    cdef size_t count = 0 if inline else pieces(net, r.nbytes)
    cdef Move *move = new_move(net, r, t.context, t.peers[r.peer], 1 + <int>count)
    cdef Header *header
    cdef int status
    if move == NULL:
        return NO_MEMORY
    move.nbytes = sizeof(Header) + (r.nbytes if inline else 0)
    net.held_bytes += move.nbytes
    move.data = <char *>malloc(move.nbytes)
    if move.data == NULL:
        move.request = NULL
        end_move(net, move, OK)
        return NO_MEMORY
    header = <Header *>move.data
    memset(header, 0, sizeof(Header))
    header.context = t.context
    header.tag = r.tag
    header.nbytes = r.nbytes
    header.peer = net.rank
    if r.expected != NULL:
        header.fingerprint = r.expected[0]
    if inline:
        copy(move.data + sizeof(Header), r.ptr, r.nbytes)
    else:
        move.borrows = True
        net.under += 1
        header.under = 1 + <int>(net.under % PAYLOAD_TAGS)
    status = push(net, move, header, r.ptr)
    if status != OK:
        detach(net, move, PENDING)
    elif inline and net.held_bytes <= HELD_LIMIT:
        move.request = NULL
        r.link = NULL
        r.status = OK
    return status


# Messages that have come

ctypedef struct Awaited:        # behind the Item of a message whose payload is still to come
    int under


cdef void take(Net *net, const Header *header, const char *data) noexcept nogil:
    cdef Item *item
    cdef Request *r
    if header.under == GOODBYE:
        lose(net, header.peer)
        return
    item = find_posted(&net.queues, header.context, header.peer, header.tag)
    if item != NULL:
        r = item.request
        remove(item)
        r.link = NULL
        deliver(net, r, item.view, header, data)
        free_item(item)
        return
    if net.closed:
        refuse(net, header)
        return
    item = blank_item(sizeof(Awaited))
    if item == NULL:
        return
    item.context = header.context
    item.tag = header.tag
    item.peer = header.peer
    item.nbytes = header.nbytes
    item.fingerprint = header.fingerprint
    (<Awaited *>item.more).under = header.under
    if header.under == 0 and header.nbytes > 0:
        item.data = <char *>malloc(header.nbytes)
        if item.data != NULL:
            memcpy(item.data, data, header.nbytes)
    add_arrived(&net.queues, item)


cdef void deliver(Net *net, Request *r, const Transport *view, const Header *header,
                  const char *data) noexcept nogil:
    """Fill a receive, or begin to. `r` stands in no queue."""
    cdef int status = compare(r, &header.fingerprint, header.nbytes)
    r.source = group_rank(view, header.peer)
    if status != OK:
        refuse(net, header)
    elif header.under == 0:
        copy(r.ptr, data, header.nbytes)
    else:
        status = pull(net, r, header.context, header.peer, header.under, r.ptr, header.nbytes)
        if status == OK:
            return
    store_int(&r.status, status)


cdef void refuse(Net *net, const Header *header) noexcept nogil:
    if header.under > 0:
        pull(net, NULL, header.context, header.peer, header.under, NULL, header.nbytes)


cdef Header header_of(const Item *item) noexcept nogil:
    cdef Header header
    header.context = item.context
    header.tag = item.tag
    header.nbytes = item.nbytes
    header.peer = item.peer
    header.under = (<Awaited *>item.more).under
    header.fingerprint = item.fingerprint
    return header


# Ranks that leave

cdef bint nobody_left(const Net *net, const Transport *t, int peer) noexcept nogil:
    cdef int i
    if peer != ANY_SOURCE:
        return net.left_at[peer] != 0
    for i in range(t.size):
        if t.peers[i] != net.rank and net.left_at[t.peers[i]] == 0:
            return False
    return t.size > 1


cdef bint waits_for_nobody(const Item *item, const void *net) noexcept nogil:
    return nobody_left(<const Net *>net, item.view, item.peer)


cdef void lose(Net *net, int peer) noexcept nogil:
    cdef Item *item
    cdef Request *r
    if net.left_at[peer] == 0:
        net.left += 1
        net.left_at[peer] = now_ns()
    item = any_posted(&net.queues, waits_for_nobody, net)
    while item != NULL:
        r = item.request
        remove(item)
        r.link = NULL
        r.source = group_rank(item.view, peer)
        store_int(&r.status, PEER_LOST)
        free_item(item)
        item = any_posted(&net.queues, waits_for_nobody, net)


cdef void give_up(Net *net, Request *r) noexcept nogil:
    """A message whose other side left a while ago does not complete."""
    cdef Move *move
    if r.link == NULL or r.place == NULL:
        return
    move = <Move *>r.link
    if move.peer >= 0 and net.left_at[move.peer] and now_ns() > net.left_at[move.peer] + GRACE_NS:
        detach(net, move, PEER_LOST)


# Leaving

cdef bint of_context(const Item *item, const void *context) noexcept nogil:
    return item.context == (<const uint64_t *>context)[0]


cdef bint any_item(const Item *item, const void *unused) noexcept nogil:
    return True


cdef void drop_context(Net *net, uint64_t context) noexcept nogil:
    cdef Item *item
    cdef Move *move = net.moves.next
    while move != &net.moves:
        if move.request != NULL and move.context == context:
            detach(net, move, CLOSED)
        move = move.next
    item = any_of_context(&net.queues, context, of_context, &context)
    while item != NULL:
        drop_item(net, item)
        item = any_of_context(&net.queues, context, of_context, &context)


cdef void drop_all(Net *net) noexcept nogil:
    cdef Item *item = any_arrived(&net.queues, any_item, NULL)
    while item != NULL:
        drop_item(net, item)
        item = any_arrived(&net.queues, any_item, NULL)


cdef void drop_item(Net *net, Item *item) noexcept nogil:
    cdef Header header
    remove(item)
    if item.request != NULL:
        item.request.link = NULL
        store_int(&item.request.status, CLOSED)
    else:
        header = header_of(item)
        refuse(net, &header)
    free_item(item)


cdef void say_goodbye(Net *net, int peer) noexcept nogil:
    cdef Header *header
    cdef Move *move = new_move(net, NULL, 0, peer, 1)
    if move == NULL:
        return
    move.nbytes = sizeof(Header)
    net.held_bytes += move.nbytes
    move.data = <char *>calloc(1, sizeof(Header))
    if move.data == NULL:
        end_move(net, move, OK)
        return
    header = <Header *>move.data
    header.peer = net.rank
    header.under = GOODBYE
    push(net, move, header, NULL)


cdef void end_slots(Net *net) noexcept nogil:
    """Everybody has said goodbye, so nothing comes any more."""
    cdef int64_t until = now_ns() + GRACE_NS
    cdef int i, error = SUCCESS
    for i in range(SLOTS):
        if net.slots[i].request == 0:
            continue
        lib.cancel(&net.slots[i].request)
        while not is_done(&net.slots[i].request, &error) and now_ns() < until:
            sched_yield()
        net.slots[i].request = 0


cdef bint all_linger(const Net *net) noexcept nogil:
    cdef const Move *move = net.moves.next
    while move != &net.moves:
        if not move.lingers:
            return False
        move = move.next
    return True

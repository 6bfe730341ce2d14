"""Reading: assign bytes to receives, and keep messages for later."""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from cydist._native.abi cimport (
    ANY_SOURCE, CLOSED, CONTROL_TAG, NO_MEMORY, OK, PENDING, Comm, Request,
)
from cydist._native.cipher cimport CIPHER_ENDED, CIPHER_NO_MEMORY, cipher_open, cipher_read
from cydist._native.pipeline cimport copy
from cydist._native.failpoints cimport RECV_MID, reach
from cydist._native.stream_coop_copy cimport (
    FAILED, MOVED, WHOLE, can_coop_copy, open_coop_copy, stop_pulling, pull_pieces,
)
from cydist._native.linux cimport MSG_DONTWAIT, iovec, msghdr, recvmsg
from cydist._native.matching cimport (
    Item, add_arrived, add_posted, add_posted_first, add_to_ring, any_arrived, blank_item,
    compare_message, find_arrived, find_posted, free_item, group_rank, is_closed, new_item, remove,
    remove_from_ring,
)
from cydist._native.shm_memory cimport PORTION
from cydist._native.shm_peers cimport LocalPeers
from cydist._native.stream_send cimport (
    on_reply, begin_request, finish_request, send_control, forget_request, return_credit,
)
from cydist._native.stream_liveness cimport (
    ALL_LANES, on_farewell, cannot_arrive, send_farewell, dead_member, status_of_loss,
)
from cydist._native.shm_ring cimport (
    INBOUND_CELL, OUTBOUND_CELL, advance_read, marks_of, readable_bytes,
)
from cydist._native.stream_auth cimport header_is_authentic, payload_is_authentic
from cydist._native.stream_silence cimport is_silence
from cydist._native.stream cimport (
    ARRIVED, ARRIVING, BABBLED, FOREIGN, CHUNK_BYTES, DIED, FILLING, FORGED, LEFT, POSTED, PULLING,
    RTS_ARRIVED, STAGING_BYTES, STARVED, VANISHED, Connection, Incoming, Net, cell_at, incoming,
    most_eager,
)
from cydist._native.wire cimport (
    CREDIT, CTS, DATA, EAGER, FAREWELL, GONE, GOODBYE, JOIN, REFUSED, RTS, SEND, TAKEN, WITHDRAW,
    Header,
)
from cydist._native.sync cimport load_int

cdef enum:
    READS_AT_ONCE = 8           # before other connections are read again
    PORTIONS_AT_ONCE = 64       # of a ring
    LONG_BYTES = 16384          # more than these had better not be copied


# Receiving

cdef int post_recv(Net *net, Comm *t, Request *r) noexcept nogil:
    cdef int peer = ANY_SOURCE if r.peer == ANY_SOURCE else t.peers[r.peer]
    cdef Item *item
    r.status = PENDING
    r.link = NULL
    r.place = NULL
    if net.closed:
        return CLOSED
    item = find_arrived(&net.queues, t.comm_id, peer, r.tag)
    if item != NULL:
        begin_request(net, r)
        match_receive(net, item, t, r)
        return OK
    if cannot_arrive(net, t, peer, r.tag):
        if peer == ANY_SOURCE:
            r.source = dead_member(net, t)
            peer = t.peers[r.source] if r.source >= 0 else net.rank
        return status_of_loss(net, peer)
    item = new_item(t, r, peer, sizeof(Incoming))
    if item == NULL:
        return NO_MEMORY
    begin_request(net, r)
    post(net, item)
    return OK


cdef void post(Net *net, Item *item) noexcept nogil:
    incoming(item).stage = POSTED
    item.request.link = item
    add_posted(&net.queues, item)


cdef void match_receive(Net *net, Item *item, Comm *t, Request *r) noexcept nogil:
    """Give a message that has arrived, or is arriving, to a receive."""
    cdef Incoming *more = incoming(item)
    cdef int fit = compare_message(r, &item.fingerprint, item.nbytes)
    remove(item)
    r.source = group_rank(t, item.peer)
    item.comm = t
    if more.stage == FOREIGN:
        net.foreign.take(net, item, r, fit)
        free_item(item)
        return
    if more.stage == RTS_ARRIVED:
        if fit == OK:
            request_data(more.connection, item, r)
            return
        send_control(more.connection, CTS, REFUSED, more.id, 0)
    else:
        return_credit(more.connection, more.charged)
    if more.stage == ARRIVING:
        more.stage = FILLING
        if fit == OK:
            redirect(more.connection, item, r)
        else:
            finish_request(net, r, fit)
        return
    if fit == OK:
        copy(r.ptr, item.data, item.nbytes)
        net.copied += item.nbytes
    finish_request(net, r, fit)
    free_item(item)


cdef void redirect(Connection *c, Item *item, Request *r) noexcept nogil:
    """Let the rest of an arriving message go to its receive, after what was kept of it."""
    cdef size_t kept = c.sink - item.data
    copy(r.ptr, item.data, kept)
    c.net.copied += kept
    c.sink = r.ptr + kept
    free(item.data)
    item.data = NULL
    item.request = r
    r.link = item


cdef void request_data(Connection *c, Item *item, Request *r) noexcept nogil:
    """Answer an RTS, so that its bytes are sent."""
    cdef Incoming *more = incoming(item)
    c.net.names += 1
    more.name = c.net.names
    more.stage = PULLING
    item.request = r
    r.link = item
    add_to_ring(&c.pulling, item)
    if can_coop_copy(c, more.theirs, item.nbytes):
        open_coop_copy(c, more.name, more.theirs, r.ptr, item.nbytes)
        c.coop_item = item
        send_control(c, CTS, JOIN, more.id, more.name)
    else:
        send_control(c, CTS, SEND, more.id, more.name)


cdef void abandon_coop_copy(Connection *c) noexcept nogil:
    """Stop the cooperative copy of the message that this rank receives."""
    if not stop_pulling(c):
        c.net.lingering = True
    c.coop_item = NULL


cdef bint advance_coop_copy(Connection *c) noexcept nogil:
    """Copy some of a message that the sender also copies; False: there was nothing to do."""
    cdef Item *item = c.coop_item
    cdef Incoming *more = incoming(item)
    cdef int how = pull_pieces(c)
    if how == WHOLE:
        c.coop_item = NULL
        remove_from_ring(&c.pulling, item)
        send_control(c, CTS, TAKEN, more.id, 0)
        finish_request(c.net, item.request, OK)
        free_item(item)
    elif how == FAILED:
        c.no_coop_copy = True
        abandon_coop_copy(c)
        send_control(c, CTS, SEND, more.id, more.name)
    return how >= MOVED


cdef bint begin_eager(Connection *c, const Header *h) noexcept nogil:
    cdef const char *cell = NULL
    if h.flags != 0:
        cell = find_cell(c, h)
        if cell == NULL:
            return False
    if not find_receive(c, h):
        return False
    if cell != NULL:
        reach(RECV_MID)
        c.to_read = marks_of(h.nbytes)
        c.in_cell = h.nbytes
        c.cell = cell
        take_portions(c, 1)
    return True


cdef void take_portions(Connection *c, size_t count) noexcept nogil:
    """Copy the next portions of a message in a cell. With the last one the cell is this rank's."""
    cdef size_t part = min(count * PORTION, c.in_cell)
    if c.sink != NULL:
        copy(c.sink, c.cell, part)
        c.sink += part
    c.cell += part
    c.in_cell -= part
    if c.in_cell == 0:
        own_cell(c, &c.header)
        c.cell = NULL


cdef inline int cell_of(const Header *h) noexcept nogil:
    """Return the cell of a message as this rank names it."""
    return INBOUND_CELL if h.flags == OUTBOUND_CELL else OUTBOUND_CELL


cdef void own_cell(Connection *c, const Header *h) noexcept nogil:
    c.cells |= cell_of(h)
    c.newest_cell = cell_of(h)


cdef const char *find_cell(const Connection *c, const Header *h) noexcept nogil:
    """Return where a message in a cell is. NULL: the message is not one that a peer sends."""
    if (not c.local or h.flags not in (OUTBOUND_CELL, INBOUND_CELL) or c.cells & cell_of(h)
            or h.nbytes > c.net.shm.cell_bytes):
        return NULL
    return cell_at(c, cell_of(h))


cdef bint find_receive(Connection *c, const Header *h) noexcept nogil:
    """Find where the bytes of an eager message go. False: it is not one that a peer sends."""
    cdef Item *item
    cdef Request *r
    cdef int fit
    if h.nbytes > most_eager(c) or not has_room(c, h):
        return False
    c.received += h.nbytes + sizeof(Header)
    c.to_read = h.nbytes
    item = find_posted(&c.net.queues, h.comm_id, c.peer, h.tag)
    if item == NULL and is_closed(&c.net.queues, h.comm_id):
        return_credit(c, h.nbytes + sizeof(Header))  # no receive will take it
        if h.tag == CONTROL_TAG:
            send_farewell(c.net, c.peer, h.comm_id)
        return True
    if item == NULL:
        item = queue_unexpected(c, h, ARRIVING)
        if item == NULL:
            return False
        c.filling = item
        c.sink = item.data
        return True
    r = item.request
    remove(item)
    return_credit(c, h.nbytes + sizeof(Header))
    r.source = group_rank(item.comm, c.peer)
    fit = compare_message(r, &h.fingerprint, h.nbytes)
    if fit != OK:
        finish_request(c.net, r, fit)
        free_item(item)
        return True
    incoming(item).stage = FILLING
    incoming(item).connection = c
    item.nbytes = h.nbytes
    c.filling = item
    c.sink = r.ptr
    return True


cdef Item *queue_unexpected(Connection *c, const Header *h, int stage) noexcept nogil:
    """Keep a message, or an RTS, that no receive has asked for."""
    cdef Item *item = blank_item(sizeof(Incoming))
    if item == NULL:
        c.starved = True
        return NULL
    if stage == ARRIVING:
        item.data = <char *>malloc(h.nbytes + 1)
        if item.data == NULL:
            c.starved = True
            free_item(item)
            return NULL
        incoming(item).charged = h.nbytes + sizeof(Header)
    item.comm_id = h.comm_id
    item.tag = h.tag
    item.peer = c.peer
    item.nbytes = h.nbytes
    item.fingerprint = h.fingerprint
    incoming(item).stage = stage
    incoming(item).connection = c
    incoming(item).id = h.id
    incoming(item).theirs = h.other
    add_arrived(&c.net.queues, item)
    return item


cdef bint begin_rts(Connection *c, const Header *h) noexcept nogil:
    cdef Item *item = find_posted(&c.net.queues, h.comm_id, c.peer, h.tag)
    cdef Request *r
    cdef int fit
    if item == NULL and is_closed(&c.net.queues, h.comm_id):
        send_control(c, CTS, GONE, h.id, 0)
        if h.tag == CONTROL_TAG:    # it is announced only if its sender's credit is used up
            send_farewell(c.net, c.peer, h.comm_id)
        return True
    if item == NULL:
        return queue_unexpected(c, h, RTS_ARRIVED) != NULL
    r = item.request
    remove(item)
    r.source = group_rank(item.comm, c.peer)
    fit = compare_message(r, &h.fingerprint, h.nbytes)
    if fit != OK:
        send_control(c, CTS, REFUSED, h.id, 0)
        finish_request(c.net, r, fit)
        free_item(item)
        return True
    item.nbytes = h.nbytes
    incoming(item).connection = c
    incoming(item).id = h.id
    incoming(item).theirs = h.other
    request_data(c, item, r)
    return True


cdef int send_to_self(Net *net, Comm *t, Request *r) noexcept nogil:
    cdef Item *item = find_posted(&net.queues, t.comm_id, net.rank, r.tag)
    cdef Item *message
    cdef Request *receive
    message = new_item(t, r, net.rank, sizeof(Incoming))
    if message == NULL:
        return NO_MEMORY
    message.request = NULL
    message.data = <char *>malloc(r.nbytes + 1)
    if message.data == NULL:
        free_item(message)
        return NO_MEMORY
    copy(message.data, r.ptr, r.nbytes)
    incoming(message).stage = ARRIVED
    add_arrived(&net.queues, message)
    r.status = OK
    if item != NULL:
        receive = item.request
        t = item.comm
        remove(item)
        free_item(item)
        match_receive(net, message, t, receive)
    return OK


cdef void withdraw_recv(Net *net, Item *item) noexcept nogil:
    forget_request(net, item.request)
    item.request = NULL
    if incoming(item).stage == POSTED:
        remove(item)
        free_item(item)
    elif incoming(item).connection.coop_item == item:
        # The missing bytes are sent and discarded.
        abandon_coop_copy(incoming(item).connection)
        send_control(incoming(item).connection, CTS, SEND, incoming(item).id, incoming(item).name)
    elif incoming(item).connection.filling == item:
        incoming(item).connection.sink = NULL


cdef bint begin_data(Connection *c, const Header *h) noexcept nogil:
    cdef Item *item = c.pulling
    while item != NULL and incoming(item).name != h.other:
        item = NULL if item.next == c.pulling else item.next
    if item == NULL or h.nbytes > CHUNK_BYTES or h.nbytes > item.nbytes - incoming(item).got \
            or (h.nbytes == 0) != (item.nbytes == 0):
        return False
    c.to_read = h.nbytes
    c.filling = item
    c.sink = NULL if item.request == NULL else item.request.ptr + incoming(item).got
    return True


cdef bint is_rts(const Item *item, const void *argument) noexcept nogil:
    cdef const Connection *c = <const Connection *>argument
    return (incoming(item).stage == RTS_ARRIVED and incoming(item).connection == c
            and incoming(item).id == c.header.id)


cdef void on_withdrawn(Connection *c, const Header *h) noexcept nogil:
    cdef Item *item = any_arrived(&c.net.queues, is_rts, c)
    if item != NULL:
        remove(item)
        free_item(item)
        return
    item = c.pulling
    while item != NULL and incoming(item).id != h.id:
        item = NULL if item.next == c.pulling else item.next
    if item == NULL:
        return          # all of it was sent before
    if c.coop_item == item:
        abandon_coop_copy(c)
    remove_from_ring(&c.pulling, item)
    if item.request == NULL:
        free_item(item)
    else:
        repost(c.net, item)


cdef void repost(Net *net, Item *item) noexcept nogil:
    """Post a receive again, in its former place, because its message was withdrawn."""
    cdef Comm *t = item.comm
    cdef Request *r = item.request
    cdef Item *other
    item.peer = ANY_SOURCE if r.peer == ANY_SOURCE else t.peers[r.peer]
    item.comm_id = t.comm_id
    item.tag = r.tag
    other = find_arrived(&net.queues, item.comm_id, item.peer, item.tag)
    if other != NULL:
        free_item(item)
        match_receive(net, other, t, r)
    else:
        incoming(item).stage = POSTED
        incoming(item).got = 0
        add_posted_first(&net.queues, item)


# Reading

cdef bint begin_frame(Connection *c) noexcept nogil:
    """Act on a header. False: the frame is not one that a peer sends."""
    cdef const Header *h = &c.header
    cdef int kind = h.kind
    if not c.local and not header_is_authentic(c):
        c.forged = True
        return False
    if not is_from_peer(c, h):
        return False
    take_credit(c, h)
    if kind == EAGER:
        return begin_eager(c, h)
    if kind == RTS:
        return begin_rts(c, h)
    if kind == DATA:
        return begin_data(c, h)
    if kind == CTS:
        on_reply(c, h)
    elif kind == WITHDRAW:
        c.withdrawals += 1
        on_withdrawn(c, h)
    elif kind == GOODBYE:
        c.said_goodbye = True
    elif kind == FAREWELL:
        on_farewell(c.net, c.peer, h.id, ALL_LANES if c.local else <uint64_t>1 << c.lane)
    return CREDIT >= kind >= CTS or kind == GOODBYE or kind == FAREWELL


cdef bint is_authentic(Connection *c, const Item *item, uint64_t tag) noexcept nogil:
    """Check the bytes of a message that is complete, before a request can see them."""
    cdef const char *data = item.data
    if data == NULL and item.request != NULL:
        data = item.request.ptr
    if c.local or item.tag != CONTROL_TAG or data == NULL:
        return True
    c.forged = not payload_is_authentic(c, tag, data, item.nbytes)
    return not c.forged


cdef bint end_frame(Connection *c) noexcept nogil:
    """Account for a whole frame. False: its bytes are not the ones that the peer sent."""
    cdef Item *item = c.filling
    cdef Incoming *more
    if item == NULL:
        c.sink = NULL
        return True
    more = incoming(item)
    if more.stage == PULLING:
        more.got += c.header.nbytes
        if more.got == item.nbytes and not is_authentic(c, item, more.theirs):
            return False
    elif not is_authentic(c, item, c.header.other):
        return False
    c.filling = NULL
    c.sink = NULL
    if more.stage == ARRIVING:
        more.stage = ARRIVED
        return True
    if more.stage == PULLING:
        if more.got != item.nbytes:
            return True
        remove_from_ring(&c.pulling, item)
    if item.request != NULL:
        finish_request(c.net, item.request, OK)
    free_item(item)
    return True


cdef bint parse(Connection *c, const char *data, size_t nbytes) noexcept nogil:
    """Take bytes in the order they were sent. False: a frame is not one that a peer sends."""
    cdef size_t part
    while nbytes != 0:
        if c.to_read != 0:
            part = min(nbytes, c.to_read)
            if not on_bytes_read(c, data, part):
                return False
        else:
            part = min(nbytes, sizeof(Header) - c.header_read)
            memcpy(<char *>&c.header + c.header_read, data, part)
            c.header_read += part
            if c.header_read == sizeof(Header):
                c.header_read = 0
                if not begin_frame(c) or (c.to_read == 0 and not end_frame(c)):
                    return False
        data += part
        nbytes -= part
    return True


cdef bint on_bytes_read(Connection *c, const char *data, size_t nbytes) noexcept nogil:
    """Take bytes of a message, or marks of one in a cell. NULL: they are in place."""
    c.to_read -= nbytes
    if c.cell != NULL:
        take_portions(c, nbytes)
    elif c.sink != NULL:
        if data != NULL:
            copy(c.sink, data, nbytes)
        c.sink += nbytes
    return c.to_read != 0 or end_frame(c)


cdef bint leaves_early(Connection *c) noexcept nogil:
    """Leave many bytes in the socket, once, if no receive has asked for them: a call that begins
    looks for control messages before it posts its receive. The bytes would be copied, out of memory
    that is new to this process. A rank that looks again gets control messages from behind them.
    An encrypted record is read as a whole."""
    if (not c.net.glancing or c.left_early or c.to_read <= LONG_BYTES or c.filling == NULL
            or incoming(c.filling).stage != ARRIVING):
        return False
    c.left_early = True
    return True


cdef inline void expect_early(Connection *c) noexcept nogil:
    """Let the next look leave bytes, if this reads for a wait: looks alone, of a rank that receives
    nothing, leave bytes once, however many messages lie before a control message."""
    if not c.net.glancing:
        c.left_early = False


cdef int on_readable(Connection *c) noexcept nogil:
    if c.local:
        return read_ring(c)
    return read_socket(c) if c.cipher == NULL else read_sealed(c)


cdef int read_ring(Connection *c) noexcept nogil:
    cdef LocalPeers *n = c.net.shm
    cdef int place = n.place[c.peer], over = 0
    cdef int _turn
    cdef size_t nbytes
    cdef const char *bytes
    if c.inbound.control != NULL:
        # Load this before the tail: then all bytes written before it are seen.
        over = load_int(&c.inbound.control.over)
    if over == 0:
        over = c.over
    if not 0 <= over <= BABBLED or c.over == BABBLED:
        return BABBLED
    if c.inbound.control == NULL:
        return over
    for _turn in range(PORTIONS_AT_ONCE):
        bytes = readable_bytes(n, &c.inbound, &nbytes)
        if bytes == NULL and nbytes == 0:
            return over
        if bytes == NULL or not parse(c, bytes, nbytes):
            return STARVED if c.starved else BABBLED
        advance_read(n, place, &c.inbound, nbytes)
        if c.to_read != 0:
            reach(RECV_MID)
    return OK


cdef int read_socket(Connection *c) noexcept nogil:
    cdef iovec parts[2]
    cdef msghdr message
    cdef ssize_t got
    cdef size_t direct, room
    cdef uint64_t finished = c.net.finished
    cdef int _turn
    expect_early(c)
    for _turn in range(READS_AT_ONCE):
        if leaves_early(c):
            return OK
        # Read bytes whose place is known in place; the rest, and what follows, through staging.
        direct = c.to_read if c.sink != NULL else 0
        parts[0].iov_base = c.sink
        parts[0].iov_len = direct
        parts[1].iov_base = c.net.staging
        parts[1].iov_len = STAGING_BYTES
        memset(&message, 0, sizeof(message))
        message.msg_iov = &parts[0 if direct != 0 else 1]
        message.msg_iovlen = 2 if direct != 0 else 1
        room = direct + STAGING_BYTES
        got = recvmsg(c.fd, &message, MSG_DONTWAIT)
        if got < 0 and errno == EINTR:
            continue
        if got < 0 and errno == EAGAIN:
            return OK
        if got <= 0 and c.said_goodbye:
            return LEFT
        if got <= 0:
            return VANISHED if got < 0 and is_silence(errno) else c.over or DIED
        if direct != 0:
            direct = min(direct, <size_t>got)
            if not on_bytes_read(c, NULL, direct):
                return FORGED
        if not parse(c, c.net.staging, <size_t>got - direct):
            return FORGED if c.forged else STARVED if c.starved else BABBLED
        if c.to_read != 0:
            reach(RECV_MID)
        # The next message may belong to a receive that is posted now that this one is complete.
        if <size_t>got < room or c.net.finished != finished:
            return OK
    return OK


cdef int read_sealed(Connection *c) noexcept nogil:
    cdef const char *plain
    cdef size_t direct
    cdef ssize_t got
    cdef int more, _turn
    expect_early(c)
    for _turn in range(READS_AT_ONCE):
        if leaves_early(c):
            return OK
        more = cipher_read(c.cipher)
        if more == CIPHER_ENDED and c.said_goodbye:
            return LEFT
        if more == CIPHER_ENDED:
            return VANISHED if is_silence(c.cipher.error) else c.over or DIED
        if more < 0:
            return STARVED
        while True:
            direct = c.to_read if c.sink != NULL else 0
            got = cipher_open(c.cipher, c.sink, direct, &plain)
            if got == 0:
                break
            if got < 0:
                return STARVED if got == CIPHER_NO_MEMORY else FORGED
            if direct >= <size_t>got:       # in place
                if not on_bytes_read(c, NULL, <size_t>got):
                    return FORGED
            elif not parse(c, plain, <size_t>got):
                return FORGED if c.forged else STARVED if c.starved else BABBLED
            if c.to_read != 0:
                reach(RECV_MID)
        if not more:
            return OK
    return OK

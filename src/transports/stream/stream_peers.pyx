"""Connect, lose and leave peers: sockets and rings are taken over, lost, and closed."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from cydist._native.abi cimport CLOSED, MISMATCH, NO_MEMORY, OK, PEER_LOST, Request
from cydist._native.cipher cimport Cipher, cipher_free
from cydist._native.stream_recv cimport abandon_coop_copy, on_readable, withdraw_recv
from cydist._native.stream_coop_copy cimport stop_pushing
from cydist._native.linux cimport (
    EPOLLIN, EPOLL_CTL_ADD, EPOLL_CTL_DEL, MSG_DONTWAIT, SHUT_WR, close, epoll_ctl, epoll_event,
    iovec, msghdr, recvmsg, shutdown,
)
from cydist._native.matching cimport (
    Item, any_arrived, any_item, any_of_comm, any_posted, close_comm, free_item, of_comm,
    remove, remove_from_ring,
)
from cydist._native.stream_send cimport (
    attach_rings, begin_request, finish_request, connection, send_control, finish_frame,
    forget_process, new_header,
    return_credit, remove_out, request_connection, withdraw_send, on_writable, write_some,
)
from cydist._native.shm_memory cimport SILENT
from cydist._native.shm_peers cimport LocalPeers, has_ended, notify_all
from cydist._native.shm_ring cimport NO_RINGS, pair_entry, close_writer
from cydist._native.stream cimport (
    ARRIVING, FOREIGN, DIED, ENDED, FILLING, LEFT, LIVE, RTS_ARRIVED, POSTED, PULLING, STARVED,
    STAGING_BYTES, VANISHED, Connection, FrameKeys, Incoming, Net, Outgoing, incoming,
)
from cydist._native.stream_liveness cimport end_stranded, status_of_loss
from cydist._native.stream_silence cimport (
    SILENT as SILENT_KERNEL, Traffic, look, reset_on_close, traffic_of,
)
from cydist._native.wire cimport CTS, GONE, GOODBYE, Header
from cydist._native.sync cimport load_int, load_u32, load_u64, store_int

cdef enum:
    DISCARDS = 128              # most reads of unwanted bytes when this rank leaves


cdef int adopt(Net *net, int peer, int lane, int fd, const char *sending,
               const char *receiving, Cipher *cipher) noexcept nogil:
    cdef Connection *c
    cdef epoll_event event
    if net.closed:
        return CLOSED
    if net.lost[peer] != 0:
        return PEER_LOST
    on_peer_events(net)         # the peer may have found no memory for rings
    c = connection(net, peer, lane)
    if c == NULL:
        return NO_MEMORY
    if c.state == LIVE:
        return MISMATCH
    if c.state == ENDED:
        return PEER_LOST
    event.events = EPOLLIN
    event.data.ptr = c
    if epoll_ctl(net.epoll, EPOLL_CTL_ADD, fd, &event) != 0:
        return NO_MEMORY
    c.fd = fd
    c.cipher = cipher
    memcpy(c.sending.header, sending, sizeof(c.sending.header))
    memcpy(c.sending.payload, sending + sizeof(c.sending.header), sizeof(c.sending.payload))
    memcpy(c.receiving.header, receiving, sizeof(c.receiving.header))
    memcpy(c.receiving.payload, receiving + sizeof(c.receiving.header),
           sizeof(c.receiving.payload))
    c.state = LIVE
    net.live += 1
    net.made += 1
    on_writable(c)
    return OK


cdef void forget_keys(Connection *c) noexcept nogil:
    memset(&c.sending, 0, sizeof(FrameKeys))
    memset(&c.receiving, 0, sizeof(FrameKeys))
    cipher_free(c.cipher)
    c.cipher = NULL


cdef void close_socket(Connection *c) noexcept nogil:
    cdef epoll_event unused
    if c.state == LIVE:
        if c.fd >= 0:
            epoll_ctl(c.net.epoll, EPOLL_CTL_DEL, c.fd, &unused)
            close(c.fd)
            c.fd = -1
            forget_keys(c)
        if c.local:
            forget_process(c)
            close_writer(c.net.shm, c.net.shm.place[c.peer], &c.outbound, DIED)
        else:
            c.net.live -= 1
    c.state = ENDED


cdef void fail_requests(Connection *c, int status) noexcept nogil:
    """End all requests that need this connection."""
    cdef Net *net = c.net
    cdef Outgoing *out
    cdef Item *item = c.filling
    c.filling = NULL
    c.sink = NULL
    c.to_read = c.header_read = 0
    c.cell = NULL
    if c.coop_item != NULL:
        abandon_coop_copy(c)
    if c.coop_out != NULL:
        stop_pushing(c)
    if item != NULL and incoming(item).stage != PULLING:
        if incoming(item).stage == ARRIVING:
            remove(item)
        elif item.request != NULL:
            finish_request(net, item.request, status)
        free_item(item)
    while c.pulling != NULL:
        item = c.pulling
        remove_from_ring(&c.pulling, item)
        if item.request != NULL:
            finish_request(net, item.request, status)
        free_item(item)
    while c.out != NULL:
        out = c.out
        remove_out(&c.out, out)
        finish_frame(net, out, status)
    while c.unanswered_rts != NULL:
        out = c.unanswered_rts
        remove_out(&c.unanswered_rts, out)
        finish_frame(net, out, status)


cdef void end_connection(Connection *c, int how) noexcept nogil:
    """End a connection. A peer that left on purpose is gone when all its lanes are."""
    cdef Net *net = c.net
    cdef Connection *other
    cdef int lane
    close_socket(c)
    fail_requests(c, NO_MEMORY if how == STARVED else PEER_LOST)
    if how == LEFT:
        for lane in range(net.lanes):
            other = net.connections[c.peer * net.lanes + lane]
            if other != NULL and other.state == LIVE:
                return
    mark_lost(net, c.peer, how)


cdef bint unfinished_from(const Item *item, const void *argument) noexcept nogil:
    return (item.peer == (<const int *>argument)[0]
            and (incoming(item).stage == RTS_ARRIVED or incoming(item).stage == ARRIVING))


cdef void look_for_silence(Net *net, int64_t now) noexcept nogil:
    cdef Connection *c
    cdef int i
    if net.live == 0 or net.patience.limit_ns == 0 or now < net.next_look:
        return
    net.next_look = now + net.patience.period_ns
    for i in range(net.size * net.lanes):
        c = net.connections[i]
        if (c != NULL and c.state == LIVE and not c.local
                and look(c.fd, &c.silence, &net.patience, now) == SILENT_KERNEL):
            reset_on_close(c.fd)
            end_connection(c, VANISHED)


cdef bint answers(const Net *net, int peer) noexcept nogil:
    cdef const Connection *c
    cdef Traffic traffic
    cdef int lane
    for lane in range(net.lanes):
        c = net.connections[peer * net.lanes + lane]
        if (c != NULL and c.state == LIVE and not c.local and traffic_of(c.fd, &traffic)
                and traffic.since_heard_ns < net.patience.owed_ns):
            return True
    return False


cdef bint on_one_host(const Net *net, int one, int other) noexcept nogil:
    return net.hosts != NULL and net.hosts[one] == net.hosts[other]


cdef bint host_answers(const Net *net, int peer) noexcept nogil:
    cdef int other
    for other in range(net.size):
        if (other == peer or on_one_host(net, other, peer)) and answers(net, other):
            return True
    return False


cdef void mark_lost(Net *net, int peer, int how) noexcept nogil:
    cdef int other
    mark_one_lost(net, peer, how)
    if how == VANISHED and not on_one_host(net, peer, net.rank):
        for other in range(net.size):
            if on_one_host(net, other, peer) and not answers(net, other):
                mark_one_lost(net, other, VANISHED)


cdef void mark_one_lost(Net *net, int peer, int how) noexcept nogil:
    cdef Connection *c
    cdef Item *item
    cdef int lane
    if net.lost[peer] != 0:
        return
    net.lost[peer] = <uint8_t>how
    for lane in range(net.lanes):
        c = net.connections[peer * net.lanes + lane]
        if c != NULL:
            if how == VANISHED and c.fd >= 0:
                reset_on_close(c.fd)
            close_socket(c)
            fail_requests(c, status_of_loss(net, peer))
    while True:
        item = any_arrived(&net.queues, unfinished_from, &peer)
        if item == NULL:
            break
        remove(item)
        free_item(item)
    end_stranded(net, peer)


cdef void close_local(Connection *c, int how) noexcept nogil:
    """End a local peer's connection: read what it has written, and how it ended."""
    cdef int seen = OK
    if c.over == 0:
        c.over = how
    while seen == OK:
        seen = on_readable(c)
    end_connection(c, seen)


cdef bint has_unread(Connection *c) noexcept nogil:
    return c.over != 0 or (c.inbound.control != NULL and (
        c.inbound.seen != c.inbound.at or load_u64(&c.inbound.control.tail) != c.inbound.at
        or load_int(&c.inbound.control.over) != 0))


cdef void watch_peer(Net *net, int peer, uint64_t tag) noexcept nogil:
    cdef Connection *c
    request_connection(net, peer, tag)
    c = net.connections[peer * net.lanes]
    if c != NULL and c.local and c.state == LIVE:
        if c.over != 0 or has_ended(net.shm, net.shm.place[peer]):
            close_local(c, DIED)


cdef void on_peer_events(Net *net) noexcept nogil:
    cdef LocalPeers *n = net.shm
    cdef uint32_t news
    cdef int place
    if n == NULL:
        return
    news = load_u32(&n.members[n.own].events)
    if news != n.events_seen and not net.closed:
        n.events_seen = news
        for place in range(n.places):
            if place != n.own and net.lost[n.ranks[place]] == 0:
                on_peer_event(net, n, place)


cdef void on_peer_event(Net *net, LocalPeers *n, int place) noexcept nogil:
    """Handle rings that another rank made for this pair, and the peer's departure."""
    cdef int rank = n.ranks[place]
    cdef bint left = load_int(&n.members[place].left) == SILENT
    cdef uint64_t word = load_u64(pair_entry(n, place))
    cdef Connection *c = net.connections[rank * net.lanes]
    if c == NULL and word > NO_RINGS:
        c = connection(net, rank, 0)
    if c != NULL and c.local and c.state == LIVE and c.inbound.control == NULL and word != 0:
        attach_rings(c, word)
    if word == NO_RINGS and net.foreign != NULL:
        net.foreign.needed = True
    if not left:
        return
    if c != NULL and c.local and c.state == LIVE:
        close_local(c, LEFT)
    elif c == NULL and word == 0:
        mark_lost(net, rank, LEFT)


cdef void drop_item(Net *net, Item *item) noexcept nogil:
    """Take a posted receive or a kept message out of its queue, and end what depends on it."""
    cdef Incoming *more = incoming(item)
    remove(item)
    if more.stage == POSTED:
        finish_request(net, item.request, CLOSED)
    elif more.stage == RTS_ARRIVED:
        send_control(more.connection, CTS, GONE, more.id, 0)
    elif more.stage == FOREIGN:
        if net.foreign != NULL:
            net.foreign.refuse(net, item)
    else:
        return_credit(more.connection, more.charged)
    if more.stage == ARRIVING:
        more.stage = FILLING        # the remaining bytes are discarded
    else:
        free_item(item)


cdef void drop_comm(Net *net, uint64_t comm_id) noexcept nogil:
    cdef Item *item
    cdef int i
    close_comm(&net.queues, comm_id)
    while True:
        item = any_of_comm(&net.queues, comm_id, of_comm, &comm_id)
        if item == NULL:
            break
        drop_item(net, item)
    for i in range(net.size * net.lanes):
        if net.connections[i] != NULL:
            close_requests(net.connections[i], comm_id)


cdef void close_requests(Connection *c, uint64_t comm_id) noexcept nogil:
    """End what a closed group still has under way here."""
    cdef Outgoing *out = first_of_comm(c.out, comm_id)
    cdef Item *item = c.filling
    while out != NULL:
        close_send(c, out)
        out = first_of_comm(c.out, comm_id)
    out = first_of_comm(c.unanswered_rts, comm_id)
    while out != NULL:
        close_send(c, out)
        out = first_of_comm(c.unanswered_rts, comm_id)
    if item != NULL and item.request != NULL and item.comm_id == comm_id:
        close_receive(c, item)
    item = c.pulling
    while item != NULL:
        if item.request != NULL and item.comm_id == comm_id:
            close_receive(c, item)
        item = NULL if item.next == c.pulling else item.next


cdef Outgoing *first_of_comm(Outgoing *ring, uint64_t comm_id) noexcept nogil:
    cdef Outgoing *out = ring
    while out != NULL:
        if out.request != NULL and out.header.comm_id == comm_id:
            return out
        out = NULL if out.next == ring else out.next
    return NULL


cdef void close_send(Connection *c, Outgoing *out) noexcept nogil:
    cdef Request *r = out.request
    begin_request(c.net, r)
    withdraw_send(c, out)
    finish_request(c.net, r, CLOSED)


cdef void close_receive(Connection *c, Item *item) noexcept nogil:
    cdef Request *r = item.request
    begin_request(c.net, r)
    withdraw_recv(c.net, item)
    finish_request(c.net, r, CLOSED)


cdef void leave_link(Net *net) noexcept nogil:
    cdef Connection *c
    cdef Item *item
    cdef Header header
    cdef int i
    while True:
        item = any_arrived(&net.queues, any_item, NULL)
        if item == NULL:
            item = any_posted(&net.queues, any_item, NULL)
        if item == NULL:
            break
        drop_item(net, item)
    net.closed = True
    for i in range(net.size * net.lanes):
        c = net.connections[i]
        if c == NULL:
            continue
        if c.local:
            close_writer(net.shm, net.shm.place[c.peer], &c.outbound,
                         DIED if c.out != NULL or c.broken else LEFT)
        elif c.state == LIVE and c.out == NULL and not c.broken:
            header = new_header(c, GOODBYE)
            write_some(c, &header, 0, NULL, 0)
            shutdown(c.fd, SHUT_WR)
            # Unread bytes would turn the close into a reset, which destroys this rank's bytes.
            free_connection(c)
        close_socket(c)
        fail_requests(c, CLOSED)
    net.wanted = NULL
    if net.shm != NULL:
        store_int(&net.shm.members[net.shm.own].left, SILENT)
        notify_all(net.shm)
    if net.foreign != NULL:
        net.foreign.leave(net)


cdef void free_connection(Connection *c) noexcept nogil:
    cdef iovec part
    cdef msghdr message
    cdef int _turn
    part.iov_base = c.net.staging
    part.iov_len = STAGING_BYTES
    memset(&message, 0, sizeof(message))
    message.msg_iov = &part
    message.msg_iovlen = 1
    for _turn in range(DISCARDS):
        if recvmsg(c.fd, &message, MSG_DONTWAIT) <= 0:
            return


cdef void free_connections(Net *net) noexcept nogil:
    cdef int i
    for i in range(net.size * net.lanes):
        free(net.connections[i])
    free(net.connections)
    net.connections = NULL

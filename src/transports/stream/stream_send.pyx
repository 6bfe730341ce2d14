"""Writing: frames that wait for room, and sends that wait for an answer."""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from cydist._native.abi cimport (
    CLOSED, COLLECTIVE_TAG, CONTROL_TAG, NO_MEMORY, OK, PEER_LOST, PENDING, Comm, Request,
    first_count,
)
from cydist._native.cipher cimport cipher_write
from cydist._native.failpoints cimport SEND_MID, armed, reach
from cydist._native.pipeline cimport copy
from cydist._native.stream_coop_copy cimport (
    COOP_BYTES, join_coop_copy, stop_pushing, withdraw_coop_copy,
)
from cydist._native.linux cimport (
    EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, MSG_DONTWAIT, MSG_NOSIGNAL,
    SHUT_RDWR, epoll_ctl, epoll_event, eventfd_write, iovec, msghdr, pthread_cond_broadcast,
    send as system_send, sendmsg, shutdown,
)
from cydist._native.shm_memory cimport PORTION
from cydist._native.shm_peers cimport OVER, LocalPeers, open_doorbell
from cydist._native.shm_ring cimport (
    LEAST_CELL_BYTES, MOST_MARKS, NO_RINGS, OUTBOUND_CELL, find_rings, has_space_for,
    make_rings, marks_of, pair_entry, request_space, write_ring,
)
from cydist._native.stream_auth cimport seal_header, seal_payload
from cydist._native.stream_liveness cimport status_of_loss
from cydist._native.stream_silence cimport is_silence
from cydist._native.stream cimport (
    BABBLED, CHUNK_BYTES, DIED, ENDED, LIVE, UNUSED, VANISHED, WANTED, Connection, Net, Outgoing,
    cell_at, most_eager,
)
from cydist._native.wire cimport CREDIT, DATA, EAGER, GONE, JOIN, MAGIC, RTS, SEND, WITHDRAW, Header
from cydist._native.sync cimport glance_int, load_u64, store_int


cdef enum:
    SHORT_BYTES = 256           # up to so many the system takes in one piece sooner than in two

cdef char[MOST_MARKS] MARKS     # one each for a further portion in a cell; their values say nothing

# Circular lists, whose head is their oldest member.

cdef void add_out(Outgoing **ring, Outgoing *out) noexcept nogil:
    if ring[0] == NULL:
        out.next = out.prev = out
        ring[0] = out
    else:
        out.next = ring[0]
        out.prev = ring[0].prev
        out.prev.next = out
        out.next.prev = out


cdef void remove_out(Outgoing **ring, Outgoing *out) noexcept nogil:
    if ring[0] == out:
        ring[0] = NULL if out.next == out else out.next
    out.prev.next = out.next
    out.next.prev = out.prev


# Completion

cdef void begin_request(Net *net, Request *r) noexcept nogil:
    if r.tag & COLLECTIVE_TAG:
        store_int(&net.in_calls, net.in_calls + (r.tag != CONTROL_TAG))
    elif not r.awaited:
        net.in_flight += 1


cdef void forget_request(Net *net, Request *r) noexcept nogil:
    if r.tag & COLLECTIVE_TAG:
        store_int(&net.in_calls, net.in_calls - (r.tag != CONTROL_TAG))
    elif not r.awaited:
        net.in_flight -= 1
    r.link = NULL


cdef void finish_request(Net *net, Request *r, int status) noexcept nogil:
    forget_request(net, r)
    net.finished += 1
    store_int(&r.status, status)
    if net.sleepers != 0:
        pthread_cond_broadcast(&net.changed)
    if net.polling:
        eventfd_write(net.wake, 1)


cdef void finish_frame(Net *net, Outgoing *out, int status) noexcept nogil:
    if out.request != NULL:
        finish_request(net, out.request, status)
    else:
        net.in_flight -= 1
    free(out.owned)
    free(out)


# Writing

cdef void watch_writable(Connection *c, bint on) noexcept nogil:
    """Let epoll report, or not, when there is room to write."""
    cdef epoll_event event
    if c.local or c.armed == on or c.fd < 0:
        return
    c.armed = on
    event.events = EPOLLIN | (EPOLLOUT if on else 0)
    event.data.ptr = c
    epoll_ctl(c.net.epoll, EPOLL_CTL_MOD, c.fd, &event)


cdef void break_off(Connection *c) noexcept nogil:
    """Stop writing. The bytes that have arrived are read, and then the connection ends."""
    if not c.broken:
        c.broken = True
        if c.local:
            c.over = DIED
        else:
            shutdown(c.fd, SHUT_RDWR)


cdef size_t write_some(Connection *c, Header *header, size_t header_sent,
                       const char *data, size_t nbytes) noexcept nogil:
    """Write as much of one frame as there is room for; return how many bytes."""
    cdef ssize_t written
    cdef size_t header_bytes = sizeof(Header) - header_sent
    cdef bint halved = glance_int(&armed) == SEND_MID
    if header_sent == 0:
        header.released = c.reported = c.released
        if not c.local:
            seal_header(c, header)
    if halved and nbytes != 0:
        nbytes = (nbytes + 1) // 2      # so that a frame ends, if the process does not before
    elif halved:
        header_bytes = (header_bytes + 1) // 2
    if c.local:
        written = write_ring(c.net.shm, c.net.shm.place[c.peer], &c.outbound,
                             <char *>header + header_sent, header_bytes, data, nbytes)
    elif c.cipher != NULL:
        written = cipher_write(c.cipher, <char *>header + header_sent, header_bytes, data, nbytes)
    else:
        written = write_socket(c.fd, <char *>header + header_sent, header_bytes, data, nbytes)
    if written < 0:
        if not c.local and is_silence(errno):
            c.over = VANISHED
        break_off(c)
        if c.local:
            c.over = BABBLED
        return 0
    if not c.local:
        c.net.sent_to[c.peer] += <size_t>written
    if header_sent == 0 and written != 0:
        c.sending.number += 1
    if halved and written != 0:
        reach(SEND_MID)
    return <size_t>written


cdef ssize_t write_socket(int fd, char *header, size_t header_bytes,
                          const char *data, size_t nbytes) noexcept nogil:
    """Return how many bytes the socket took; -1: its connection has ended."""
    cdef char[SHORT_BYTES] copied
    cdef iovec parts[2]
    cdef msghdr message
    cdef bint is_short = header_bytes + nbytes <= SHORT_BYTES
    cdef ssize_t written
    if is_short:
        memcpy(copied, header, header_bytes)
        if nbytes != 0:
            memcpy(copied + header_bytes, data, nbytes)
    else:
        parts[0].iov_base = header
        parts[0].iov_len = header_bytes
        parts[1].iov_base = <char *>data
        parts[1].iov_len = nbytes
        memset(&message, 0, sizeof(message))
        message.msg_iov = &parts[0]
        message.msg_iovlen = 2
    while True:
        if is_short:
            written = system_send(fd, copied, header_bytes + nbytes, MSG_NOSIGNAL | MSG_DONTWAIT)
        else:
            written = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
        if written >= 0 or errno != EINTR:
            return 0 if written < 0 and errno == EAGAIN else written


cdef void advance(Outgoing *out, size_t written) noexcept nogil:
    cdef size_t of_header = min(written, sizeof(Header) - out.header_sent)
    cdef size_t of_data = written - of_header
    out.header_sent += of_header
    out.data += of_data
    out.frame_left -= of_data
    out.left -= of_data


cdef void on_writable(Connection *c) noexcept nogil:
    cdef Outgoing *out
    while c.out != NULL and not c.broken:
        out = c.out
        if out.header_sent == 0 and not c.local:
            seal_payload(c, &out.header, out.data, out.left)
        advance(out, write_some(c, &out.header, out.header_sent, out.data, out.frame_left))
        if out.header_sent < sizeof(Header) or out.frame_left != 0:
            # A thread that falls asleep asks for room; one asleep already has not seen this frame.
            if (c.local and not c.broken and c.net.shm.asleep != 0
                    and not request_space(c.net.shm, &c.outbound)):
                continue
            watch_writable(c, not c.broken)
            return
        remove_out(&c.out, out)
        frame_written(c, out)
    watch_writable(c, False)


cdef void enqueue(Connection *c, Outgoing *out) noexcept nogil:
    """Queue a frame for which there was no room, or that must follow others."""
    add_out(&c.out, out)
    if c.local:
        on_writable(c)
    else:
        watch_writable(c, not c.broken)


cdef void frame_written(Connection *c, Outgoing *out) noexcept nogil:
    """Continue after a frame: the next bytes, an answer, a withdrawal, or nothing."""
    cdef int kind = out.header.kind
    if out.withdrawn and (kind == RTS or kind == DATA):
        out.header.kind = WITHDRAW
        out.header.nbytes = out.header_sent = 0
        add_out(&c.out, out)
    elif kind == RTS:
        add_out(&c.unanswered_rts, out)
    elif kind == DATA and out.left != 0:
        next_chunk(out)
        add_out(&c.out, out)
    else:
        finish_frame(c.net, out, OK)


cdef void next_chunk(Outgoing *out) noexcept nogil:
    out.header.kind = DATA
    out.header_sent = 0
    out.frame_left = out.header.nbytes = min(out.left, <size_t>CHUNK_BYTES)


cdef Header new_header(Connection *c, int kind) noexcept nogil:
    cdef Header header
    memset(&header, 0, sizeof(header))
    header.magic = MAGIC
    header.kind = <uint8_t>kind
    header.lane = <uint8_t>c.lane
    return header


cdef void send_control(Connection *c, int kind, int flags, uint64_t id,
                       uint64_t other) noexcept nogil:
    """Write a frame without bytes."""
    cdef Header header = new_header(c, kind)
    cdef Outgoing *out
    cdef size_t written = 0
    if c.state != LIVE or c.broken:
        return
    header.flags = flags
    header.id = id
    header.other = other
    if c.out == NULL:
        written = write_some(c, &header, 0, NULL, 0)
    if written == sizeof(Header) or c.broken:
        return
    out = <Outgoing *>calloc(1, sizeof(Outgoing))
    if out == NULL:
        break_off(c)
        return
    out.header = header
    out.header_sent = written
    c.net.in_flight += 1
    enqueue(c, out)


cdef void return_credit(Connection *c, size_t nbytes) noexcept nogil:
    """Account for a kept message that was handed over; its sender may send as much again."""
    if c == NULL:
        return
    c.released += nbytes
    if c.released - c.reported >= c.net.held_limit // 4:
        send_control(c, CREDIT, 0, 0, 0)


# Sending

cdef Connection *connection(Net *net, int peer, int lane) noexcept nogil:
    cdef Connection **place = &net.connections[peer * net.lanes + lane]
    cdef Connection *c = place[0]
    if c == NULL:
        c = place[0] = <Connection *>calloc(1, sizeof(Connection))
        if c != NULL:
            c.net = net
            c.peer = peer
            c.lane = lane
            c.fd = -1
            c.sending.number = c.receiving.number = first_count()
            c.sent = c.credited = c.received = c.released = c.reported = first_count()
            c.withdrawals = first_count()
            if lane == 0 and is_local(net, peer):
                attach_shared_memory(c)
    return c


cdef bint is_local(const Net *net, int peer) noexcept nogil:
    cdef int place = -1 if net.shm == NULL else net.shm.place[peer]
    return place >= 0 and load_u64(pair_entry(net.shm, place)) != NO_RINGS


cdef void attach_shared_memory(Connection *c) noexcept nogil:
    """Begin a local connection. Rings are made at the first write; epoll watches the process."""
    cdef int process = process_of(c)
    cdef epoll_event event
    c.local = True
    c.state = LIVE
    c.next_local = c.net.local
    c.net.local = c
    event.events = EPOLLIN
    event.data.ptr = c
    if process >= 0:
        epoll_ctl(c.net.epoll, EPOLL_CTL_ADD, process, &event)
    elif process == OVER:
        c.over = DIED


cdef void forget_process(Connection *c) noexcept nogil:
    cdef int process = process_of(c)
    cdef epoll_event unused
    if process >= 0:
        epoll_ctl(c.net.epoll, EPOLL_CTL_DEL, process, &unused)


cdef inline int process_of(const Connection *c) noexcept nogil:
    return c.net.shm.watched[c.net.shm.place[c.peer]]


cdef void attach_rings(Connection *c, uint64_t word) noexcept nogil:
    """Take over the rings of make_rings; without memory for them messages go over sockets."""
    cdef LocalPeers *n = c.net.shm
    cdef int place = n.place[c.peer]
    if word == NO_RINGS:
        c.local = False
        c.state = UNUSED
        forget_process(c)
    elif find_rings(n, place, word, &c.inbound, &c.outbound):
        c.cells = c.newest_cell = OUTBOUND_CELL
        open_doorbell(n, place)
    else:
        c.broken = True
        c.over = BABBLED


cdef Connection *route_to(Net *net, int peer, uint64_t tag) noexcept nogil:
    """Return the connection that a message takes; NULL: no memory."""
    cdef Connection *c
    if net.shm != NULL and net.shm.place[peer] >= 0:
        c = connection(net, peer, 0)
        if c == NULL:
            return NULL
        if c.local and c.outbound.control == NULL and c.state == LIVE and not c.broken:
            attach_rings(c, make_rings(net.shm, net.shm.place[peer]))
        if c.local:
            return c
    return connection(net, peer, lane_of(net, tag))


cdef void queue_wanted(Connection *c) noexcept nogil:
    if c.state == UNUSED:
        c.state = WANTED
        c.next_wanted = c.net.wanted
        c.net.wanted = c
        eventfd_write(c.net.wanted_event, 1)


cdef void request_connection(Net *net, int peer, uint64_t tag) noexcept nogil:
    cdef Connection *c
    if peer != net.rank and not net.closed and net.lost[peer] == 0:
        c = connection(net, peer, 0)
        if c == NULL or not c.local:
            c = connection(net, peer, lane_of(net, tag))
        if c != NULL and net.foreign == NULL:
            queue_wanted(c)


cdef inline int cell_for(Connection *c, size_t nbytes) noexcept nogil:
    """Return the cell in which to send a message that can be sent at once; 0: in none."""
    if (c.cells == 0 or not LEAST_CELL_BYTES <= nbytes <= c.net.shm.cell_bytes
            or not has_space_for(c.net.shm, &c.outbound, sizeof(Header) + marks_of(nbytes))):
        return 0
    return c.newest_cell if c.cells & c.newest_cell else c.cells


cdef inline void begin_cell(Connection *c, int cell, const Request *r) noexcept nogil:
    """Put the first portion of a message into a cell, which its receiver then owns."""
    c.cells &= ~cell
    copy(cell_at(c, cell), r.ptr, min(r.nbytes, <size_t>PORTION))


cdef void fill_cell(Connection *c, int cell, const Request *r, bint marked) noexcept nogil:
    """Put the other portions there, and unless the marks follow, one for each into the ring."""
    cdef char *into = cell_at(c, cell)
    cdef size_t at = PORTION
    while at < r.nbytes:
        copy(into + at, r.ptr + at, min(r.nbytes - at, <size_t>PORTION))
        reach(SEND_MID)
        if marked:              # cell_for has found room for them
            write_ring(c.net.shm, c.net.shm.place[c.peer], &c.outbound, &MARKS[0], 1, NULL, 0)
        at += PORTION


cdef int post_send(Net *net, Comm *t, Request *r) noexcept nogil:
    cdef int peer = t.peers[r.peer]
    cdef Connection *c
    cdef Outgoing *out
    cdef Header header
    cdef size_t charge = r.nbytes + sizeof(Header)
    cdef size_t written = 0, in_frame
    cdef bint eager, at_once
    cdef int cell = 0
    r.status = PENDING
    if net.closed:
        return CLOSED
    if net.lost[peer] != 0:
        return status_of_loss(net, peer)
    c = route_to(net, peer, r.tag)
    if c == NULL:
        return NO_MEMORY
    if net.foreign != NULL and not c.local:
        net.foreign.needed = True
        return net.foreign.send(net, t, r)
    if c.state == ENDED:
        return PEER_LOST
    at_once = c.state == LIVE and c.out == NULL and not c.broken
    eager = r.nbytes <= most_eager(c) and c.sent - c.credited + charge <= net.held_limit
    eager = eager and not (0 < r.most_early < r.nbytes and not c.local)
    if c.local and eager:
        cell = cell_for(c, r.nbytes) if at_once else 0
        eager = cell != 0 or r.nbytes < COOP_BYTES or c.no_coop_copy
    in_frame = r.nbytes if eager and cell == 0 else 0
    header = new_header(c, EAGER if eager else RTS)
    header.comm_id = t.comm_id
    header.tag = r.tag
    header.nbytes = r.nbytes
    if r.expected != NULL:
        header.fingerprint = r.expected[0]
    if not eager:
        net.names += 1
        header.id = net.names
        header.other = <uint64_t>r.ptr if c.local and not c.no_coop_copy else 0
    if at_once:
        if not c.local:
            seal_payload(c, &header, r.ptr, r.nbytes)
        elif cell != 0:
            header.flags = <uint16_t>cell
            begin_cell(c, cell, r)
        written = write_some(c, &header, 0, r.ptr, in_frame)
        if cell != 0:
            fill_cell(c, cell, r, written == sizeof(Header))
        if eager and written == sizeof(Header) + in_frame:
            c.sent += charge
            r.status = OK
            return OK
    out = <Outgoing *>calloc(1, sizeof(Outgoing))
    if out == NULL:
        if written != 0:
            break_off(c)
        return NO_MEMORY
    out.header = header
    out.request = r
    out.data = &MARKS[0] if cell != 0 else r.ptr
    out.left = marks_of(r.nbytes) if cell != 0 else r.nbytes
    out.frame_left = out.left if cell != 0 else in_frame
    advance(out, written)
    if eager:
        c.sent += charge
    r.link = out
    r.place = c
    begin_request(net, r)
    if not eager and written == sizeof(Header):
        add_out(&c.unanswered_rts, out)
    else:
        enqueue(c, out)
        queue_wanted(c)
    return OK


cdef void withdraw_send(Connection *c, Outgoing *out) noexcept nogil:
    cdef bint started = out.header_sent != 0
    cdef int kind = out.header.kind
    forget_request(c.net, out.request)
    out.request = NULL
    c.net.in_flight += 1
    if kind == RTS and out.header_sent == sizeof(Header):
        remove_out(&c.unanswered_rts, out)
        if c.coop_out == out:
            stop_pushing(c)
        withdraw_coop_copy(c)
        out.withdrawn = True
        frame_written(c, out)
        on_writable(c)
    elif not started and kind != DATA:
        if kind == EAGER:
            c.sent -= out.left + sizeof(Header)
        remove_out(&c.out, out)
        finish_frame(c.net, out, OK)
    elif not started:
        withdraw_coop_copy(c)
        out.frame_left = out.left = 0
        out.header.kind = WITHDRAW
        out.header.nbytes = 0
    else:
        # The frame is half written: copy the rest, so that the stream stays intact.
        if kind != EAGER:
            withdraw_coop_copy(c)
        out.withdrawn = True
        out.owned = <char *>malloc(out.frame_left + 1)
        if out.owned == NULL:
            out.frame_left = 0
            break_off(c)
            return
        memcpy(out.owned, out.data, out.frame_left)
        out.data = out.owned
        out.left = out.frame_left


cdef void on_reply(Connection *c, const Header *h) noexcept nogil:
    cdef Outgoing *out = c.unanswered_rts
    while out != NULL and out.header.id != h.id:
        out = NULL if out.next == c.unanswered_rts else out.next
    if out == NULL:
        return          # withdrawn in the meantime
    if h.flags == JOIN:
        if c.local and c.coop_out == NULL:
            join_coop_copy(c, out, h.other)
        return
    remove_out(&c.unanswered_rts, out)
    if c.coop_out == out:
        stop_pushing(c)
    if h.flags != SEND:
        finish_frame(c.net, out, PEER_LOST if h.flags == GONE else OK)
        return
    out.header.other = h.other
    next_chunk(out)
    add_out(&c.out, out)
    if not c.armed:
        on_writable(c)

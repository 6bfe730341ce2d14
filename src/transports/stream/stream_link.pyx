"""Messages between processes: the functions of a comm, and a link's Python class.

A link has one epoll and at most one thread, however many groups share it; see stream_progress.pyx.
"""
import os

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport CLOCK_MONOTONIC

from cydist._native.abi cimport (
    CONTROL_TAG, NO_MEMORY, OK, PENDING, Comm, Link, Request, first_count, now_ns,
)
from cydist._native.cipher cimport Cipher, CipherHandle, cipher_free, free_buffers
from cydist._native.stream_inline cimport at_once
from cydist._native.failpoints cimport LEAVE, reach
from cydist._native.stream_fork cimport abandon_net, close_descriptors, unregister_net, register_net
from cydist._native.stream_recv cimport post_recv, send_to_self, withdraw_recv
from cydist._native.linux cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, SIOCOUTQ, SIOCOUTQNSD,
    epoll_create1, epoll_ctl, epoll_event, eventfd, eventfd_read, eventfd_write, getpid, ioctl,
    pthread_cond_destroy, pthread_cond_init, pthread_condattr_destroy, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock, usleep,
)
from cydist._native.matching cimport (
    Item, contradicted, count_arrived, count_posted, free_queues, init_queues,
    left_over as left_over_in, open_comm,
)
from cydist._native.shm_peers cimport LocalPeers, LocalPeersHandle, create_doorbell
from cydist._native.stream_send cimport is_local, post_send, withdraw_send
from cydist._native.stream_peers cimport (
    adopt, drop_comm, free_connections, host_answers, leave_link, look_for_silence, mark_lost,
)
from cydist._native.stream_silence cimport Traffic, patience_of, traffic_of
from cydist._native.stream_liveness cimport MOST_LANES
from cydist._native.stream_progress cimport (
    ensure_background, poll_once, progress, stop_background, wait,
)
from cydist._native.stream cimport (
    BABBLED, DIED, FORGED, LEFT, LIVE, STAGING_BYTES, STARVED, VANISHED, WANTED, Connection, Net,
    Outgoing,
)
from cydist._native.sync cimport PAUSE_US, SPINS, cores, cores_online, load_int

cdef enum:
    HELD_LIMIT = 67108864       # bytes of short messages that a peer may have under way to it
    TESTS_PER_FOREIGN = 4
    TESTS_PER_LOOK = 64
    KEY_BYTES = 32              # of one direction of a connection
    LINGER_NS = 1000000000      # the longest that close() waits for its last bytes to arrive

cdef set counted_elsewhere = set()      # addresses of Nets whose counts are not their own memory


# The functions of a comm

cdef int send(Comm *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int status
    pthread_mutex_lock(&net.lock)
    if t.peers[r.peer] == net.rank:
        status = send_to_self(net, t, r)
    else:
        status = post_send(net, t, r)
    if net.in_flight != 0:
        ensure_background(net)
    pthread_mutex_unlock(&net.lock)
    return status


cdef int recv(Comm *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int status
    pthread_mutex_lock(&net.lock)
    status = post_recv(net, t, r)
    if net.in_flight != 0:
        ensure_background(net)
    pthread_mutex_unlock(&net.lock)
    return status


cdef int test(Comm *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    if load_int(&r.status) == PENDING:
        pthread_mutex_lock(&net.lock)
        net.tests += 1
        # Calls look for control messages often; only waits poll the library each time, which
        # costs much.
        if (net.foreign == NULL or not net.foreign.needed or r.tag != CONTROL_TAG
                or net.tests % TESTS_PER_FOREIGN == 0):
            net.glancing = r.tag == CONTROL_TAG
            poll_once(net, net.tests)
            net.glancing = False
        if net.tests % TESTS_PER_LOOK == 0:
            look_for_silence(net, now_ns())
        if net.foreign != NULL and r.status == PENDING and r.place == net.foreign:
            net.foreign.give_up(net, r)
        pthread_mutex_unlock(&net.lock)
    return load_int(&r.status)


cdef bint progress_all(Comm *t) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef bint moved = False
    if pthread_mutex_trylock(&net.lock) != 0:
        return False            # the thread that holds it moves them
    if not net.closed:
        net.glancing = True
        moved = progress(net)
        net.glancing = False
        look_for_silence(net, now_ns())
    pthread_mutex_unlock(&net.lock)
    return moved


cdef bint is_contradicted(Comm *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    cdef bint found = contradicted(&net.queues, t, r)
    pthread_mutex_unlock(&net.lock)
    return found


cdef bint left_over(Comm *t, uint64_t seq, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    cdef bint found = left_over_in(&net.queues, t, seq, r)
    pthread_mutex_unlock(&net.lock)
    return found


cdef void cancel(Comm *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    if r.link != NULL:
        if net.foreign != NULL and r.place == net.foreign:
            net.foreign.withdraw(net, r)
        elif r.place != NULL:
            withdraw_send(<Connection *>r.place, <Outgoing *>r.link)
        else:
            withdraw_recv(net, <Item *>r.link)
    pthread_mutex_unlock(&net.lock)


cdef bint lingers(Comm *t) noexcept nogil:
    return (<Net *>t.link).lingering


cdef bint host_vanished(const Net *net, int peer) noexcept nogil:
    """Return whether the peer's host is silent on all connections, not on this one only."""
    cdef int other
    if net.lost[peer] != VANISHED:
        return False
    for other in range(net.size if net.hosts != NULL else 0):
        if net.hosts[other] == net.hosts[peer] and net.lost[other] == 0:
            return False
    return True


cdef bint host_is_lost(const Comm *t, int rank) noexcept nogil:
    return host_vanished(<Net *>t.link, t.peers[rank])


cdef bint is_connected(const Comm *t, int rank) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Connection *c
    cdef bint found
    pthread_mutex_lock(&net.lock)
    c = net.connections[t.peers[rank] * net.lanes]
    found = is_local(net, t.peers[rank]) or (c != NULL and c.state == LIVE and not c.local)
    pthread_mutex_unlock(&net.lock)
    return found


cdef uint64_t unsent(const Comm *t, int rank, uint64_t *written) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Connection *c
    cdef int lane, queued
    cdef uint64_t total = 0
    pthread_mutex_lock(&net.lock)
    written[0] = net.sent_to[t.peers[rank]]
    for lane in range(net.lanes):
        c = net.connections[t.peers[rank] * net.lanes + lane]
        if (c != NULL and c.state == LIVE and not c.local and not c.broken
                and ioctl(c.fd, SIOCOUTQNSD, &queued) == 0):
            total += <uint64_t>queued
    pthread_mutex_unlock(&net.lock)
    return total


# Leaving

cdef bint flushed(Net *net) noexcept nogil:
    """Return whether every peer's host has received all that this rank wrote."""
    cdef Connection *c
    cdef int i, queued
    for i in range(net.size * net.lanes):
        c = net.connections[i]
        if c == NULL or c.state != LIVE or c.broken:
            continue
        if c.local and c.out == NULL:
            continue            # the memory outlives this process
        if c.out != NULL or (ioctl(c.fd, SIOCOUTQ, &queued) == 0 and queued != 0):
            return False
    return True


cdef bint is_flushing(Net *net, int64_t until) noexcept nogil:
    """Make progress on this rank's last bytes; return whether to try again."""
    cdef bint over
    pthread_mutex_lock(&net.lock)
    over = flushed(net) or now_ns() >= until
    if not over:
        progress(net)
    pthread_mutex_unlock(&net.lock)
    if not over:
        usleep(PAUSE_US)
    return not over


cdef void close_net(Net *net) noexcept nogil:
    pthread_mutex_lock(&net.lock)
    reach(LEAVE)
    leave_link(net)
    # Nothing is left to wait for. Once the polling thread has noticed, no thread uses the
    # descriptors.
    while net.polling:
        eventfd_write(net.wake, 1)
        pthread_mutex_unlock(&net.lock)
        usleep(PAUSE_US)
        pthread_mutex_lock(&net.lock)
    close_descriptors(net)
    pthread_mutex_unlock(&net.lock)


# Dealloc needs the memory, so the collector must not clear it before.
@cython.no_gc_clear
cdef class MessageLink(Link):
    """One rank's end of the connections of a world; all groups of the process share it.

    Args:
        rank, size: This process among the world's.
    """

    def __cinit__(self, int rank, int size, *rest, **more):
        cdef epoll_event event
        cdef pthread_condattr_t attributes
        if not 0 <= rank < size:
            raise ValueError(f"no link for rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.net = <Net *>calloc(1, sizeof(Net))
        if self.net == NULL:
            raise MemoryError("no memory for a link")
        self.net.rank = rank
        self.net.size = size
        self.net.lanes = 1
        self.net.held_limit = HELD_LIMIT
        self.net.pid = getpid()
        self.net.names = first_count()
        self.net.tests = <unsigned int>first_count()
        pthread_mutex_init(&self.net.lock, NULL)
        pthread_condattr_init(&attributes)
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
        pthread_cond_init(&self.net.changed, &attributes)
        pthread_cond_init(&self.net.resume, &attributes)
        pthread_condattr_destroy(&attributes)
        self.net.epoll = epoll_create1(EPOLL_CLOEXEC)
        self.net.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        self.net.wanted_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        self.net.connections = <Connection **>calloc(size, sizeof(Connection *))
        self.net.lost = <uint8_t *>calloc(size, 1)
        self.net.sent_to = <uint64_t *>calloc(size, sizeof(uint64_t))
        self.net.staging = <char *>malloc(STAGING_BYTES)
        event.events = EPOLLIN
        event.data.ptr = NULL
        if self.net.epoll < 0 or self.net.wake < 0 or self.net.wanted_event < 0:
            raise OSError(errno, f"no descriptors for a link: {os.strerror(errno)}")
        if (self.net.connections == NULL or self.net.lost == NULL or self.net.sent_to == NULL
                or self.net.staging == NULL or init_queues(&self.net.queues) != OK
                or epoll_ctl(self.net.epoll, EPOLL_CTL_ADD, self.net.wake, &event) != 0):
            raise MemoryError("no memory for a link")
        register_net(self.net)

    def __dealloc__(self):
        cdef Net *net = self.net
        cdef int64_t until
        if net == NULL:
            return
        unregister_net(net)
        if net.pid == getpid():
            if net.queues.posted != NULL and not net.closed:     # else it was never created
                stop_background(net)
                until = now_ns() + LINGER_NS
                while is_flushing(net, until):
                    pass
                close_net(net)
            close_descriptors(net)
            pthread_mutex_destroy(&net.lock)
            pthread_cond_destroy(&net.changed)
            pthread_cond_destroy(&net.resume)
        else:
            abandon_net(net)
        if net.connections != NULL:
            free_connections(net)
        if net.queues.posted != NULL:
            free_queues(&net.queues)
        free(net.lost)
        # At the end of the process the set may be gone.
        if counted_elsewhere is not None and <size_t>net in counted_elsewhere:
            counted_elsewhere.discard(<size_t>net)
        elif counted_elsewhere is not None:
            free(net.sent_to)
        free(net.hosts)
        free(net.staging)
        free_buffers(&net.sealed)
        free(net)

    cdef int attach_comm(self, Comm *t) except -1:
        cdef int status
        t.link = self.net
        t.windows = NULL
        t.send = send
        t.recv = recv
        t.at_once = at_once
        t.test = test
        t.progress = progress_all
        t.in_calls = &self.net.in_calls
        t.wait = wait
        t.cancel = cancel
        t.contradicted = is_contradicted
        t.left_over = left_over
        t.lingers = lingers
        t.host_is_lost = host_is_lost
        t.is_connected = is_connected
        t.unsent = unsent
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            status = open_comm(&self.net.queues, t)
            pthread_mutex_unlock(&self.net.lock)
        if status != OK:
            raise MemoryError("no memory for a group")
        return 0

    cdef void detach_comm(self, Comm *t) noexcept:
        if self.net.pid == getpid():
            with nogil:
                pthread_mutex_lock(&self.net.lock)
                drop_comm(self.net, t.comm_id)
                pthread_mutex_unlock(&self.net.lock)

    def share(self, LocalPeersHandle peers_handle not None):
        """Send messages to these ranks through rings in the memory that they share.

        Call this before anything is sent. Raises OSError if there are no descriptors for the
        doorbell.
        """
        cdef LocalPeers *n = peers_handle.table
        cdef epoll_event event
        event.events = EPOLLIN
        event.data.ptr = self.net
        if (create_doorbell(n) != OK
                or epoll_ctl(self.net.epoll, EPOLL_CTL_ADD, n.doorbell[0], &event) != 0):
            raise OSError(errno, f"no descriptors for a bell: {os.strerror(errno)}")
        self.peers_handle = peers_handle
        self.net.shm = n
        self.net.spins = self.net.most_spins = SPINS if n.cores >= n.places else 0

    def close(self):
        """Leave: send every peer a departure notice and end pending requests with CLOSED.

        A signal handler that raises ends only the wait for this rank's last bytes to arrive.
        """
        cdef Net *net = self.net
        cdef int64_t until = now_ns() + LINGER_NS
        cdef bint flushing = True
        if net.pid != getpid():
            abandon_net(net)
        elif not net.closed:
            with nogil:
                stop_background(net)
            try:
                while flushing:
                    with nogil:
                        flushing = is_flushing(net, until)
                    PyErr_CheckSignals()
            finally:
                with nogil:
                    close_net(net)

    def share_cores(self, int ranks):
        """Set how many ranks share this host's cores; return whether waits may spin.

        Where the others may run is not known here. If this process is bound to some cores, they are
        taken to be bound to others. If they are not, spinning does not pay and is soon given up.
        """
        cdef int own = cores(), online = cores_online()
        cdef bint enough = ranks <= own or (own < online and ranks <= online)
        self.net.spins = self.net.most_spins = SPINS // 5 if enough else 0
        return enough

    def statistics(self):
        """Return counts: connections (live now), made (ever), posted, arrived, moving, in_calls:
        requests of collectives, threads, copied: bytes, ever, of messages that came before their
        receive, and spins: looks at the sockets before a wait yields its core."""
        cdef Net *net = self.net
        cdef size_t posted, arrived, moving
        cdef uint64_t copied
        cdef int live, made, threads, spins, in_calls
        with nogil:
            pthread_mutex_lock(&net.lock)
            live, made, threads = net.live, net.made, net.background_runs
            posted, arrived = count_posted(&net.queues), count_arrived(&net.queues)
            moving, copied, spins = net.in_flight, net.copied, net.spins
            in_calls = net.in_calls
            pthread_mutex_unlock(&net.lock)
        return {
            "connections": live, "made": made, "posted": posted, "arrived": arrived,
            "moving": moving, "in_calls": in_calls, "threads": threads, "copied": copied,
            "spins": spins,
        }

    def lost(self, int peer):
        """Return why this peer cannot be reached any more, for messages; "" while it can."""
        if not 0 <= peer < self.size or peer == self.rank:
            return ""
        cdef uint8_t how
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            how = self.net.lost[peer]
            pthread_mutex_unlock(&self.net.lock)
        if how == LEFT:
            return "it closed its connections and left"
        if how == DIED:
            return ("its connection ended without a goodbye: it was killed, it failed, it ended "
                    "without destroy_process_group, or it was cut off")
        if how == BABBLED:
            return ("it sent what no rank sends, so its connection was closed: its bytes were "
                    "damaged on the way, or it runs another version of cydist")
        if how == FORGED:
            return (f"its connection was closed, because it was tampered with: a frame from rank "
                    f"{peer} to rank {self.rank} is not the one that was sent. Somebody between "
                    "the two, who does not know the job's secret, drops, adds or changes frames, "
                    "or the network damaged one")
        if how == STARVED:
            return "this rank had no memory for a message from it, and closed the connection"
        if how == VANISHED:
            return self.silence() if host_vanished(self.net, peer) else (
                f"nothing has come on its connection for {self.net.patience.seconds:g} s "
                "(CYDIST_PEER_TIMEOUT), though its host answers on others: the network drops what "
                "is sent to it, such as large packets (MTU)")
        return ""

    def silence(self):
        """Return what is known of a host that is silent, for messages."""
        return (f"it has not answered for {self.net.patience.seconds:g} s (CYDIST_PEER_TIMEOUT), "
                "not even its kernel: it is switched off or paused, or the network to it is cut, "
                "or drops large packets (MTU), or a firewall drops packets to its ranks' ports")

    def left(self, int peer):
        """Return whether this peer has left on purpose, by closing its link."""
        return 0 <= peer < self.size and self.net.lost[peer] == LEFT


@cython.no_gc_clear
cdef class TcpLink(MessageLink):
    """A link that reaches ranks through sockets.

    Args:
        lanes: Connections per peer that calls use in turn, at most 64; the same on all ranks.
        held_limit: Bytes of short messages that one peer may send ahead of their receives.

    It opens no connection itself. `wanted_fd` becomes readable when `wanted` is not empty,
    and `adopt` or `refuse` answers. See cydist/backends/host/connections.py.
    """

    cdef dict refused                       # peer -> why

    def __cinit__(self, int rank, int size, int lanes=1, size_t held_limit=HELD_LIMIT):
        cdef Connection **connections = NULL
        if not 1 <= lanes <= MOST_LANES:
            raise ValueError(f"no link for rank {rank} of {size} with {lanes} lanes")
        connections = <Connection **>calloc(size * lanes, sizeof(Connection *))
        if connections == NULL:
            raise MemoryError("no memory for a link")
        free(self.net.connections)
        self.net.connections = connections
        self.net.lanes = lanes
        self.net.held_limit = held_limit
        self.refused = {}
        self.share_cores(size)

    @property
    def wanted_fd(self):
        """Return a descriptor that is readable when `wanted` has connections to report."""
        return self.net.wanted_event

    def wanted(self):
        """Return the connections requested since the last call: a list of (peer, lane)."""
        cdef Connection *c
        cdef uint64_t unused
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            eventfd_read(self.net.wanted_event, &unused)
            c = self.net.wanted
            self.net.wanted = NULL
            pthread_mutex_unlock(&self.net.lock)
        # No other thread touches a chain that was taken off. Release the lock first, because
        # Python's allocation may start its collector, which may cancel requests.
        asked = []
        while c != NULL:
            if c.state == WANTED:
                asked.append((c.peer, c.lane))
            c = c.next_wanted
        return asked

    def adopt(self, int peer, int lane, int fd, bytes sending not None, bytes receiving not None,
              CipherHandle cipher=None):
        """Take over a connected, authenticated, non-blocking socket, and the keys of its frames.

        Args:
            sending, receiving: 32 bytes each, this side's and the peer's; the peer has them
                swapped.
            cipher: Of the connection; None: the bytes are not encrypted.

        Returns whether the link took it; otherwise the caller closes it: there is a
        connection for this peer and lane already, the peer is lost, or the link is closed.
        """
        cdef int status
        cdef const char *ours = sending
        cdef const char *theirs = receiving
        cdef Cipher *taken = NULL
        self.check(peer, lane)
        if len(sending) != KEY_BYTES or len(receiving) != KEY_BYTES:
            raise ValueError(f"keys of {len(sending)} and {len(receiving)} bytes, not {KEY_BYTES}")
        if cipher is not None:
            taken = cipher.detach(fd, &self.net.sealed)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            status = adopt(self.net, peer, lane, fd, ours, theirs, taken)
            pthread_mutex_unlock(&self.net.lock)
        if status != OK:
            cipher_free(taken)
        if status == NO_MEMORY:
            raise MemoryError(f"no memory for the connection to rank {peer}")
        return status == OK

    def refuse(self, int peer, str reason not None):
        """Declare the peer unreachable: ranks that wait for it, now or later, learn why."""
        self.check(peer, 0)
        self.refused.setdefault(peer, reason)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            mark_lost(self.net, peer, DIED)
            pthread_mutex_unlock(&self.net.lock)

    def know_hosts(self, hosts, double seconds):
        """Learn the hosts of all ranks, and how long they may be silent.

        Args:
            hosts: For each rank a number, equal on ranks of one host.
            seconds: inf: for ever.
        """
        cdef int *numbers = <int *>calloc(self.size, sizeof(int))
        cdef int *before
        if numbers == NULL:
            raise MemoryError("no memory for the numbers of hosts")
        for i, number in enumerate(hosts):
            if i < self.size:
                numbers[i] = number
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            before, self.net.hosts = self.net.hosts, numbers
            self.net.patience = patience_of(seconds)
            pthread_mutex_unlock(&self.net.lock)
        free(before)

    def host_answers(self, int peer):
        """Return whether the peer's host has answered lately, on a connection to any of its
        ranks."""
        cdef bint found
        self.check(peer, 0)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            found = host_answers(self.net, peer)
            pthread_mutex_unlock(&self.net.lock)
        return found

    def vanish(self, int peer):
        """Declare the peer's host silent: it, and its ranks that do not answer, are lost."""
        self.check(peer, 0)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            mark_lost(self.net, peer, VANISHED)
            pthread_mutex_unlock(&self.net.lock)

    def vanished(self, int peer):
        """Return whether the peer was lost together with its host, which is silent."""
        return 0 <= peer < self.size and host_vanished(self.net, peer)

    def count_sent_in(self, uint64_t[::1] counts not None) -> None:
        """Count the bytes that sockets take for each peer, from now on, in this memory: messages
        with their headers, before encryption. Bytes through shared memory do not count.

        Args:
            counts: One for each peer. Must stay in its place as long as the process lives.
        """
        if counts.shape[0] < self.size:
            raise ValueError("too few counts")
        cdef uint64_t *into = &counts[0]
        cdef uint64_t *own
        cdef int peer
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            own, self.net.sent_to = self.net.sent_to, into
            for peer in range(self.net.size):
                into[peer] = own[peer]
            pthread_mutex_unlock(&self.net.lock)
        if <size_t>self.net not in counted_elsewhere:
            free(own)
        counted_elsewhere.add(<size_t>self.net)

    def traffic(self, int peer):
        """Return what a peer's connections have carried, or None if it has none through sockets.

        Bytes that have come, bytes that its kernel has acknowledged, and the seconds since bytes
        came, and since anything did.
        """
        cdef Traffic one, whole = Traffic(0, 0, 0, 0)
        cdef Connection *c
        cdef int lane
        cdef bint found = False
        if peer == self.rank:
            return None
        self.check(peer, 0)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            for lane in range(self.net.lanes):
                c = self.net.connections[peer * self.net.lanes + lane]
                if c == NULL or c.state != LIVE or c.local or not traffic_of(c.fd, &one):
                    continue
                whole.since_got_ns = (min(whole.since_got_ns, one.since_got_ns) if found
                                      else one.since_got_ns)
                whole.since_heard_ns = (min(whole.since_heard_ns, one.since_heard_ns) if found
                                        else one.since_heard_ns)
                whole.got += one.got
                whole.taken += one.taken
                found = True
            pthread_mutex_unlock(&self.net.lock)
        if not found:
            return None
        return whole.got, whole.taken, whole.since_got_ns * 1e-9, whole.since_heard_ns * 1e-9

    def lost(self, int peer):
        """Return why this peer cannot be reached any more, for messages; "" while it can."""
        if peer == self.rank:
            return ""
        self.check(peer, 0)
        return self.refused.get(peer) or MessageLink.lost(self, peer)

    cdef int check(self, int peer, int lane) except -1:
        if not 0 <= peer < self.size or peer == self.rank or not 0 <= lane < self.net.lanes:
            raise ValueError(f"rank {self.rank} of {self.size} has no lane {lane} to rank {peer}")
        return 0

    def lane_is_live(self, int peer, int lane):
        """Return whether there is a connection to this peer on this lane."""
        cdef Connection *c
        self.check(peer, lane)
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            c = self.net.connections[peer * self.net.lanes + lane]
            pthread_mutex_unlock(&self.net.lock)
        return c != NULL and c.state == LIVE and not c.local

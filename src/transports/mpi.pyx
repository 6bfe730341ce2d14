"""Messages over one MPI communicator: any context and tag, checked, with deadlines.

Every message begins with a header of its own, under one MPI tag. A small payload is behind it;
of others it names the tag that they follow under, and the receive that takes the header receives
them in place. So MPI matches nothing but senders, a receive can be withdrawn until its message has
come, and a message of another kind than expected is found.

MPI moves things when it is called. Whoever waits does so for all groups of the link.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport (
    ANY_SOURCE, CLOSED, Link, MISMATCH, NO_MEMORY, OK, PEER_LOST, PENDING, Request, Transport,
    now_ns, slice_end,
)
from cydist._native.failpoints cimport LEAVE, WAIT, reach
from cydist._native.linux cimport (
    getpid, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    usleep,
)
from cydist._native.matching cimport (
    Item, add_posted, contradicted, find_arrived, free_item, free_queues, init_queues,
    left_over as left_over_in, new_item, remove,
)
from cydist._native.mpi_collectives cimport collective
from cydist._native.mpi_moves cimport (
    Header, Move, Net, SLOTS, Slot, all_linger, begin_send, deliver, detach, drop_all,
    drop_context, end_slots, give_up, header_of, listen, nobody_left, progress, say_goodbye,
)
from cydist._native.waiting cimport (
    SPINS, YIELD_NS, cores, load_int, sched_yield, slice_until, spins_after, store_int,
)

cdef enum:
    PIECE_BYTES = 1073741824    # counts are 32-bit integers
    PATIENCE_NS = 50000000      # how long a message that is withdrawn may take to complete
    DOZE_NS = 1000000000        # how long a wait sleeps in short slices
    SHORT_SLEEP_US = 20
    LONG_SLEEP_US = 1000


# What a group's view calls

cdef int send(Transport *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int status
    r.status = PENDING
    r.link = NULL
    pthread_mutex_lock(&net.lock)
    if net.closed:
        status = CLOSED
    elif net.left_at[t.peers[r.peer]] != 0:
        status = PEER_LOST
    else:
        status = begin_send(net, t, r)
    pthread_mutex_unlock(&net.lock)
    return status


cdef int recv(Transport *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int peer = ANY_SOURCE if r.peer == ANY_SOURCE else t.peers[r.peer]
    cdef int status = OK
    cdef Header header
    cdef Item *item
    r.status = PENDING
    r.link = r.place = NULL
    pthread_mutex_lock(&net.lock)
    item = find_arrived(&net.queues, t.context, peer, r.tag)
    if item != NULL:
        remove(item)
        header = header_of(item)
        deliver(net, r, t, &header, item.data)
        free_item(item)
    elif net.closed:
        status = CLOSED
    elif nobody_left(net, t, peer):
        status = PEER_LOST
    else:
        item = new_item(t, r, peer, 0)
        if item == NULL:
            status = NO_MEMORY
        else:
            r.link = item
            add_posted(&net.queues, item)
    pthread_mutex_unlock(&net.lock)
    return status


cdef int test(Transport *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    if load_int(&r.status) == PENDING:
        pthread_mutex_lock(&net.lock)
        progress(net)
        if r.status == PENDING:
            give_up(net, r)
        pthread_mutex_unlock(&net.lock)
    return load_int(&r.status)


cdef int wait(Transport *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int status, spins = load_int(&net.spins)
    cdef int looks = 0
    cdef int64_t now = 0, started = 0, until = 0
    while True:
        pthread_mutex_lock(&net.lock)
        if r.status == PENDING:
            progress(net)
        status = r.status
        pthread_mutex_unlock(&net.lock)
        if status != PENDING:
            if looks > 0 and spins > 0:
                store_int(&net.spins, spins_after(spins, net.most_spins, looks < spins))
            return status
        looks += 1
        if looks < spins:
            continue
        reach(WAIT)
        now = now_ns()
        if started == 0:
            started = now
            until = slice_until(now, deadline_ns)
        if now >= until:
            status = end_of_slice(net, t, r, deadline_ns)
            if status != OK:
                return status
            until = slice_until(now_ns(), deadline_ns)
        elif now - started < YIELD_NS:
            sched_yield()
        else:
            usleep(SHORT_SLEEP_US if now - started < DOZE_NS else LONG_SLEEP_US)


cdef int end_of_slice(Net *net, Transport *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef int status = slice_end(t, deadline_ns)
    pthread_mutex_lock(&net.lock)
    if r.status == PENDING:
        give_up(net, r)
    if r.status != PENDING:
        status = r.status
    elif status == OK and contradicted(&net.queues, t, r):
        status = MISMATCH
    pthread_mutex_unlock(&net.lock)
    return status


cdef bint is_contradicted(Transport *t, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    cdef bint found = contradicted(&net.queues, t, r)
    pthread_mutex_unlock(&net.lock)
    return found


cdef bint left_over(Transport *t, uint64_t seq, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    cdef bint found = left_over_in(&net.queues, t, seq, r)
    pthread_mutex_unlock(&net.lock)
    return found


cdef void cancel(Transport *t, Request *r) noexcept nogil:
    """A posted receive is taken back; what MPI has begun gets a moment to complete."""
    cdef Net *net = <Net *>t.link
    cdef Item *item
    cdef int64_t until = now_ns() + PATIENCE_NS
    pthread_mutex_lock(&net.lock)
    if r.link != NULL and r.place == NULL:
        item = <Item *>r.link
        r.link = NULL
        remove(item)
        free_item(item)
    while r.status == PENDING and r.link != NULL and now_ns() < until:
        progress(net)
        pthread_mutex_unlock(&net.lock)
        usleep(SHORT_SLEEP_US)
        pthread_mutex_lock(&net.lock)
    if r.status == PENDING and r.link != NULL:
        detach(net, <Move *>r.link, PENDING)
    pthread_mutex_unlock(&net.lock)


cdef bint lingers(Transport *t) noexcept nogil:
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    if net.lingering != 0:
        progress(net)
    cdef bint found = net.lingering != 0
    pthread_mutex_unlock(&net.lock)
    return found


cdef class MpiLink(Link):
    """One rank's end of a communicator that nobody else uses.

    rank, size      this process among its members
    comm, byte      MPI's handles of the communicator, and of the datatype BYTE
    any_source      MPI's constant
    here            ranks on this host: they share its cores
    """

    cdef Net *net
    cdef bint ended             # MPI uses none of it any more

    def __cinit__(self, int rank, int size, size_t comm, size_t byte, int any_source, int here):
        cdef int i
        if not 0 <= rank < size:
            raise ValueError(f"no link for rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.net = <Net *>calloc(1, sizeof(Net))
        if self.net == NULL:
            raise MemoryError("no memory for a link")
        self.net.rank = rank
        self.net.size = size
        self.net.comm = comm
        self.net.byte = byte
        self.net.any_source = any_source
        self.net.piece_bytes = PIECE_BYTES
        self.net.pid = getpid()
        self.net.moves.next = self.net.moves.prev = &self.net.moves
        self.net.spins = self.net.most_spins = SPINS // 10 if cores() >= here else 0
        pthread_mutex_init(&self.net.lock, NULL)
        self.net.left_at = <int64_t *>calloc(size, sizeof(int64_t))
        self.net.slots = <Slot *>calloc(SLOTS, sizeof(Slot))
        if (self.net.left_at == NULL or self.net.slots == NULL
                or init_queues(&self.net.queues) != OK):
            raise MemoryError("no memory for a link")
        for i in range(SLOTS):
            listen(self.net, &self.net.slots[i])

    def __dealloc__(self):
        # What MPI may still write to stays.
        if self.net != NULL and self.ended:
            free_queues(&self.net.queues)
            free(self.net.left_at)
            free(self.net.slots)
            pthread_mutex_destroy(&self.net.lock)
            free(self.net)

    cdef int open_view(self, Transport *t) except -1:
        t.link = self.net
        t.windows = NULL
        t.send = send
        t.recv = recv
        t.test = test
        t.wait = wait
        t.cancel = cancel
        t.contradicted = is_contradicted
        t.left_over = left_over
        t.lingers = lingers
        t.collective = collective
        return 0

    cdef void close_view(self, Transport *t) noexcept:
        if self.net.pid == getpid():
            with nogil:
                pthread_mutex_lock(&self.net.lock)
                drop_context(self.net, t.context)
                pthread_mutex_unlock(&self.net.lock)

    def share(self, memory, sharers) -> None:
        """MPI has its own ways between ranks of one host."""

    def close(self):
        """Leave: say goodbye to every peer. What has begun goes on while `advance` is called."""
        cdef Net *net = self.net
        cdef int peer
        if net.pid != getpid() or net.closed:
            return
        with nogil:
            pthread_mutex_lock(&net.lock)
            reach(LEAVE)
            net.closed = True
            for peer in range(net.size):
                if peer != net.rank:
                    say_goodbye(net, peer)
            drop_all(net)
            progress(net)
            pthread_mutex_unlock(&net.lock)

    def advance(self) -> bool:
        """Move things on. Has every other rank left, and is nothing under way that may end?"""
        cdef Net *net = self.net
        cdef bint over
        with nogil:
            pthread_mutex_lock(&net.lock)
            progress(net)
            over = net.left >= net.size - 1 and all_linger(net)
            pthread_mutex_unlock(&net.lock)
        return over

    def end(self) -> bool:
        """After `close`, and when `advance` says so. Does MPI use nothing of this any more? A
        collective that not every rank has come to is never over."""
        if not self.ended:
            with nogil:
                end_slots(self.net)
            self.ended = self.net.lingering == 0
        return self.ended

    def lost(self, int peer):
        """Why this peer cannot be reached any more, for people; "" while it can."""
        return "it closed its connections and left" if self.net.left_at[peer] != 0 else ""

    @property
    def error(self):
        """The last error code that MPI gave; 0: none."""
        return self.net.error

    @property
    def piece_bytes(self):
        """One call of MPI moves no more; the same on every rank."""
        return self.net.piece_bytes

    @piece_bytes.setter
    def piece_bytes(self, size_t nbytes):
        self.net.piece_bytes = nbytes

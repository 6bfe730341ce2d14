"""Ranks of one host: windows in memory that they share, and a link for messages."""
cimport cython
from libc.errno cimport ESRCH, errno
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc

from cydist._native.abi cimport Link, OK, PEER_LOST, Transport, UNREACHABLE, Window, Windows
from cydist._native.linux cimport (
    POLLIN, close, getpid, iovec, pidfd_open, poll, pollfd, process_vm_readv, process_vm_writev,
)
from cydist._native.memory cimport LEAVING, Member, SharedMemory, whole_pages
from cydist._native.waiting cimport (
    LOOKS, SPINS, cores, exchange_int, load_int, sched_yield, store_int,
)
from cydist._native.windows cimport lay_out, raise_flag, wait_flag, window_bytes

cdef enum:
    SLOTS = 8                   # of every group's windows
    SLOT_BYTES = 131072


ctypedef struct Neighbours:     # who shares the memory, by the link's numbers
    int *place                  # of each peer in `members`; -1: not there
    int *pids
    int *watched                # descriptors of their processes; -1: not open yet
    int busy                    # with them: one thread at a time
    bint over                   # they are closed
    Member *members
    char *base                  # of the memory, as it is mapped here
    uint64_t first, end         # between them lie the ranks' arrays


ctypedef struct View:           # what t.windows points to
    Windows windows             # first
    Neighbours *neighbours


cdef bint gone(Transport *t, int peer) noexcept nogil:
    """Has this rank said goodbye, or has its process ended?"""
    cdef Neighbours *n = (<View *>t.windows).neighbours
    cdef int rank = t.peers[peer]
    return load_int(&n.members[n.place[rank]].left) != 0 or has_ended(n, rank)


cdef bint ended(Transport *t, int peer) noexcept nogil:
    return has_ended((<View *>t.windows).neighbours, t.peers[peer])


cdef void lock_watched(Neighbours *n) noexcept nogil:
    while exchange_int(&n.busy, 1) != 0:
        sched_yield()


cdef bint has_ended(Neighbours *n, int rank) noexcept nogil:
    """Is the process of this rank of the link gone? False also where that cannot be told."""
    cdef bint ended
    lock_watched(n)
    ended = not n.over and look_at_process(n, rank)
    store_int(&n.busy, 0)
    return ended


cdef bint look_at_process(Neighbours *n, int rank) noexcept nogil:
    cdef pollfd ended
    if n.watched[rank] < 0:
        n.watched[rank] = pidfd_open(n.pids[rank])
        if n.watched[rank] < 0:
            # Without a descriptor, or where there are none of processes, the other link tells.
            return errno == ESRCH
    ended.fd = n.watched[rank]
    ended.events = POLLIN
    return poll(&ended, 1, 0) == 1


cdef int reach_into(Transport *t, int peer, char *ours, char *theirs, size_t nbytes,
                    bint writing) noexcept nogil:
    """Copy between the memories of two processes."""
    cdef Neighbours *n = (<View *>t.windows).neighbours
    cdef int pid = n.pids[t.peers[peer]]
    cdef iovec here = iovec(ours, nbytes)
    cdef iovec there = iovec(theirs, nbytes)
    cdef ssize_t done
    while True:
        if writing:
            done = process_vm_writev(pid, &here, 1, &there, 1, 0)
        else:
            done = process_vm_readv(pid, &here, 1, &there, 1, 0)
        if done < 0 and errno == ESRCH:
            return PEER_LOST
        if done == <ssize_t>here.iov_len:
            return OK
        if done <= 0:
            return UNREACHABLE
        here = iovec(<char *>here.iov_base + done, here.iov_len - done)
        there = iovec(<char *>there.iov_base + done, here.iov_len)


cdef int pull(Transport *t, int peer, char *into, const char *theirs,
              size_t nbytes) noexcept nogil:
    return reach_into(t, peer, into, <char *>theirs, nbytes, False)


cdef int push(Transport *t, int peer, char *theirs, const char *source,
              size_t nbytes) noexcept nogil:
    return reach_into(t, peer, <char *>source, theirs, nbytes, True)


cdef char *mapped(Transport *t, int peer, char *theirs, size_t nbytes) noexcept nogil:
    cdef Neighbours *n = (<View *>t.windows).neighbours
    cdef uint64_t offset = <uint64_t>theirs - n.members[n.place[t.peers[peer]]].base
    if n.first <= offset < n.end and nbytes <= n.end - offset:
        return n.base + offset
    return NULL


# Dealloc needs the memory, so the collector must not clear it before.
@cython.no_gc_clear
cdef class ShmLink(Link):
    """A link whose groups have windows where all members share memory.

    messages    the link that carries messages, through rings in the same memory
    memory      shared with the ranks in `sharers`, in this order on all of them
    sharers     the process of each
    heap        gives arrays out of this rank's part of it
    """

    cdef readonly Link messages
    cdef readonly SharedMemory memory
    cdef readonly object heap
    cdef Neighbours neighbours
    cdef bint closed
    cdef int most_spins

    def __init__(self, Link messages not None, SharedMemory memory not None, sharers):
        cdef int i, rank
        self.messages = messages
        self.memory = memory
        self.rank = messages.rank
        self.size = messages.size
        if self.rank not in sharers or len(sharers) > memory.head.ranks:
            raise ValueError(f"rank {self.rank} shares no memory with {sharers}")
        self.neighbours.place = <int *>malloc(3 * self.size * sizeof(int))
        if self.neighbours.place == NULL:
            raise MemoryError(f"no memory for {self.size} ranks")
        self.neighbours.watched = self.neighbours.place + self.size
        self.neighbours.pids = self.neighbours.watched + self.size
        self.neighbours.members = memory.members
        self.neighbours.base = memory.base
        self.neighbours.first = memory.head.limit
        self.neighbours.end = memory.nbytes
        for i in range(self.size):
            self.neighbours.place[i] = self.neighbours.watched[i] = -1
        for i, (rank, pid) in enumerate(sharers.items()):
            self.neighbours.place[rank] = i
            self.neighbours.pids[rank] = pid
        self.heap = memory.heap(self.neighbours.place[self.rank])
        messages.share(memory, sharers)
        self.most_spins = SPINS if cores() >= len(sharers) else 0
        memory.members[self.neighbours.place[self.rank]].base = <uint64_t>memory.base

    def __dealloc__(self):
        if self.neighbours.watched != NULL:
            self.close_watched()
        free(self.neighbours.place)

    cdef void close_watched(self) noexcept:
        cdef int i
        # In a forked child whoever was busy with them is not there to end.
        cdef bint alone = self.memory is None or getpid() != self.memory.pid
        if not alone:
            with nogil:
                lock_watched(&self.neighbours)
        self.neighbours.over = True
        for i in range(self.size):
            if self.neighbours.watched[i] >= 0:
                close(self.neighbours.watched[i])
                self.neighbours.watched[i] = -1
        if not alone:
            store_int(&self.neighbours.busy, 0)

    cdef int open_view(self, Transport *t) except -1:
        return self.messages.open_view(t)

    cdef int open_windows(self, Transport *t) except -1:
        cdef size_t nbytes = t.size * window_bytes(SLOTS, SLOT_BYTES)
        cdef uint64_t offset
        cdef View *view
        cdef int i
        for i in range(t.size):
            if self.neighbours.place[t.peers[i]] < 0:
                return 0
        nbytes = whole_pages(nbytes)
        view = <View *>calloc(1, sizeof(View) + t.size * sizeof(Window))
        if view == NULL:
            raise MemoryError(f"no memory for the windows of {t.size} ranks")
        with nogil:
            offset = self.memory.open(t.context, t.size, nbytes)
        if offset == 0:
            free(view)
            return 0
        view.neighbours = &self.neighbours
        view.windows.of = <Window *>(view + 1)
        view.windows.spins = view.windows.most_spins = self.most_spins
        view.windows.looks = view.windows.most_looks = LOOKS if self.most_spins else 0
        view.windows.gone = gone
        view.windows.ended = ended
        view.windows.pull = pull
        view.windows.push = push
        if self.neighbours.first < self.neighbours.end:
            view.windows.mapped = mapped
        lay_out(&view.windows, self.memory.base + offset, t.size, SLOTS, SLOT_BYTES)
        t.raise_flag = raise_flag
        t.wait_flag = wait_flag
        t.windows = &view.windows
        return 0

    cdef void close_view(self, Transport *t) noexcept:
        self.messages.close_view(t)
        if getpid() == self.memory.pid:     # a forked child leaves nobody's group
            with nogil:
                self.memory.leave(t.context)
        free(t.windows)
        t.windows = NULL

    def close(self):
        """Leave: whoever waits for this rank's windows learns that it is gone."""
        if not self.closed:
            self.closed = True
            self.close_watched()
            if getpid() == self.memory.pid:
                store_int(
                    &self.memory.members[self.neighbours.place[self.rank]].left, LEAVING)
        self.messages.close()

    def lost(self, int peer):
        """Why this peer cannot be reached any more, for people; "" while it can."""
        cdef Member *member
        if 0 <= peer < self.size and peer != self.rank and self.neighbours.place[peer] >= 0:
            member = &self.memory.members[self.neighbours.place[peer]]
            if load_int(&member.left):
                return "it closed its connections and left"
            reason = self.messages.lost(peer)
            if (not reason and getpid() == self.memory.pid
                    and has_ended(&self.neighbours, peer)):
                return "its process ended without a goodbye: it died"
            return reason
        return self.messages.lost(peer)

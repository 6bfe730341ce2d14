"""The ranks that share memory with this one: their processes, and the doorbells that wake them."""
import os

cimport cython
from libc.errno cimport EMFILE, ENFILE, ENOMEM, ESRCH, errno
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport NO_MEMORY, OK
from cydist._native.linux cimport (
    POLLIN, close, fstat, getpid, pidfd_open, poll, pollfd, stat_t,
)
from cydist._native.sync cimport (
    add_u32, cores_of, exchange_int, fence, load_int, load_u32, sched_yield, store_int, store_u32,
)

cdef extern from "<signal.h>" nogil:
    int kill(int, int)

cdef extern from "<fcntl.h>" nogil:
    int open(const char *, int)
    int O_CLOEXEC
    int O_NONBLOCK
    int O_RDWR

cdef extern from "<sys/stat.h>" nogil:
    bint S_ISFIFO(unsigned int)

cdef extern from "<unistd.h>" nogil:
    int pipe2(int *, int)
    ssize_t read(int, void *, size_t)
    ssize_t write(int, const void *, size_t)

cdef enum:
    NOTHING = 256               # bytes read from a doorbell at once; they mean nothing


# A link that ends needs the memory, so the collector must not clear it before.
@cython.no_gc_clear
cdef class LocalPeersHandle:
    """The ranks of a link that share memory, and how each of them is reached.

    Args:
        rank, size: Of the link.
        sharers: The process of each of them, by rank, in the order of their places in the memory;
            this rank is among them.

    Raises OSError when there are no descriptors for their processes.
    """

    def __cinit__(self, SharedMemory memory not None, int rank, int size, sharers not None):
        cdef LocalPeers *n
        cdef int i, place, peer, pid
        if rank not in sharers or len(sharers) > memory.ranks:
            raise ValueError(f"rank {rank} shares no memory with {sharers}")
        n = new_local_peers(size, len(sharers))
        if n == NULL:
            raise MemoryError(f"no memory for {size} ranks")
        self.table = n
        self.memory = memory
        n.head, n.members, n.pairs = memory.head, memory.members, memory.pairs
        n.base, n.limit, n.nbytes, n.fd = memory.base, memory.limit, memory.nbytes, memory.fd
        n.ring_bytes, n.cell_bytes = memory.ring_bytes, memory.cell_bytes
        n.ranks_of_memory, n.pid = memory.ranks, memory.pid
        for place, (peer, pid) in enumerate(sharers.items()):
            n.ranks[place], n.pids[place], n.place[peer] = peer, pid, place
        n.own = n.place[rank]
        n.cores = cores_of(n.pids, n.places)
        for i in range(n.places):
            if not watch_process(n, i):
                raise OSError(errno, f"no descriptors for {n.places} processes that share memory: "
                              f"{os.strerror(errno)}")
        n.members[n.own].base = <uint64_t>memory.base

    def __dealloc__(self):
        if self.table != NULL:
            close_local_peers(self.table)
        free(self.table)


cdef LocalPeers *new_local_peers(int size, int places) noexcept nogil:
    cdef size_t nbytes = sizeof(LocalPeers) + (size + 4 * places) * sizeof(int)
    cdef LocalPeers *n = <LocalPeers *>calloc(1, nbytes)
    cdef int i
    if n == NULL:
        return NULL
    n.places = places
    n.place = <int *>(n + 1)
    n.ranks = n.place + size
    n.pids = n.ranks + places
    n.watched = n.pids + places
    n.doorbells = n.watched + places
    n.doorbell[0] = n.doorbell[1] = -1
    for i in range(size):
        n.place[i] = -1
    for i in range(places):
        n.watched[i] = UNWATCHED
        n.doorbells[i] = -1
    return n


# Processes

cdef bint watch_process(LocalPeers *n, int place) noexcept nogil:
    """Open a descriptor of a process. False: there are too few descriptors."""
    if n.pids[place] == n.pid:
        return True                 # a thread of this process
    n.watched[place] = pidfd_open(n.pids[place])
    if n.watched[place] >= 0:
        return True
    n.watched[place] = OVER if errno == ESRCH else UNWATCHED
    return errno != EMFILE and errno != ENFILE and errno != ENOMEM


cdef void lock_watched(LocalPeers *n) noexcept nogil:
    while exchange_int(&n.busy, 1) != 0:
        sched_yield()


cdef bint has_ended(LocalPeers *n, int place) noexcept nogil:
    cdef pollfd process
    cdef bint ended
    lock_watched(n)
    process.fd = n.watched[place]
    process.events = POLLIN
    if process.fd >= 0:
        ended = poll(&process, 1, 0) == 1
    else:
        ended = process.fd == OVER or (
            process.fd == UNWATCHED and kill(n.pids[place], 0) != 0 and errno == ESRCH)
    store_int(&n.busy, 0)
    return ended


cdef void close_local_peers(LocalPeers *n) noexcept nogil:
    cdef int i
    # In a forked child the thread that held `busy` does not exist.
    if n.pid == getpid():
        lock_watched(n)
    for i in range(2):
        close_one(&n.doorbell[i])
    for i in range(n.places):
        close_one(&n.doorbells[i])
        close_one(&n.watched[i])
        n.watched[i] = CLOSED
    store_int(&n.busy, 0)


cdef void close_one(int *fd) noexcept nogil:
    if fd[0] >= 0:
        close(fd[0])
        fd[0] = -1


# Doorbells

cdef int create_doorbell(LocalPeers *n) noexcept nogil:
    cdef Member *member = &n.members[n.own]
    cdef stat_t status
    if pipe2(n.doorbell, O_CLOEXEC | O_NONBLOCK) != 0:
        n.doorbell[0] = n.doorbell[1] = -1
        return NO_MEMORY
    if fstat(n.doorbell[0], &status) != 0:
        return NO_MEMORY
    member.doorbell_inode = status.st_ino
    store_int(&member.doorbell, n.doorbell[0] + 1)
    return OK


cdef void open_doorbell(LocalPeers *n, int place) noexcept nogil:
    """Open a rank's doorbell. If that fails, the rank wakes when its slice of sleep ends."""
    cdef Member *member = &n.members[place]
    cdef char path[64]
    cdef stat_t status
    cdef int fd, number = load_int(&member.doorbell) - 1
    if number < 0 or n.doorbells[place] >= 0:
        return
    snprintf(path, sizeof(path), b"/proc/%d/fd/%d", n.pids[place], number)
    # For reading as well: writing to a pipe without readers would raise a signal.
    fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC)
    if fd < 0:
        return
    # The process may have ended, and another one have its pid.
    if fstat(fd, &status) != 0 or not S_ISFIFO(status.st_mode) \
            or status.st_ino != member.doorbell_inode:
        close(fd)
        return
    n.doorbells[place] = fd


cdef void ring_doorbell(LocalPeers *n, int place) noexcept nogil:
    cdef Member *member = &n.members[place]
    fence()
    if load_u32(&member.asleep) == 0:
        return
    store_u32(&member.asleep, 0)
    open_doorbell(n, place)
    if n.doorbells[place] >= 0 and write(n.doorbells[place], b"", 1) < 0:
        return                      # the pipe is full: the rank will wake


cdef void announce_sleep(LocalPeers *n) noexcept nogil:
    n.asleep += 1
    store_u32(&n.members[n.own].asleep, 1)
    fence()


cdef void end_sleep(LocalPeers *n) noexcept nogil:
    n.asleep -= 1
    # The sender may have meant another sleeping thread of this rank.
    store_u32(&n.members[n.own].asleep, n.asleep != 0)
    fence()


cdef void drain_doorbell(LocalPeers *n) noexcept nogil:
    cdef char nothing[NOTHING]
    while read(n.doorbell[0], nothing, NOTHING) == NOTHING:
        pass


cdef void notify_peer(LocalPeers *n, int place) noexcept nogil:
    add_u32(&n.members[place].events, 1)
    ring_doorbell(n, place)


cdef void notify_all(LocalPeers *n) noexcept nogil:
    cdef int place
    for place in range(n.places):
        if place != n.own:
            notify_peer(n, place)

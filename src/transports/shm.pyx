"""Ranks of one host: windows in memory that they share; messages go over another link.

The memory is one sealed memfd, which has no name and is gone with the last process that maps it.
A group takes its windows out of it when its first collective begins: whoever asks first decides,
under a lock that survives its holder's death, for all members. When the memory is spent, later
groups get none, and their calls go over messages.
"""
import os

cimport cython
from libc.errno cimport ESRCH, errno
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from cydist._native.abi cimport Link, Transport, Window, Windows
from cydist._native.linux cimport (
    F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, MAP_FAILED, MAP_SHARED,
    MFD_ALLOW_SEALING, MFD_CLOEXEC, POLLIN, PROT_READ, PROT_WRITE, PTHREAD_MUTEX_ROBUST,
    PTHREAD_PROCESS_SHARED, close, fchmod, fcntl, fstat, ftruncate, getpid, memfd_create, mmap,
    munmap, pidfd_open, poll, pollfd, posix_fallocate, pthread_mutex_consistent,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    pthread_mutexattr_destroy, pthread_mutexattr_init, pthread_mutexattr_setpshared,
    pthread_mutexattr_setrobust, pthread_mutexattr_t, stat_t,
)
from cydist._native.waiting cimport (
    SPINS, cores, exchange_int, load_int, sched_yield, store_int, store_u64,
)
from cydist._native.windows cimport lay_out, raise_flag, wait_flag, window_bytes

cdef extern from "<errno.h>" nogil:
    int EOWNERDEAD

cdef enum:
    SLOTS = 8                   # of every group's windows
    SLOT_BYTES = 131072
    TOKEN_BYTES = 32
    PLOTS = 1024                # groups that can have windows at a time
    PAGE = 4096
    SEALS = 7                   # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


ctypedef struct Plot:           # the windows of one group
    uint64_t context
    uint64_t offset
    uint64_t nbytes             # 0: the members have no windows
    int members
    int left                # members that have gone; all of them: free, with its memory


ctypedef struct Member:
    int pid                     # 0: nobody has joined under this number
    int left                    # it said goodbye


ctypedef struct Head:           # of the memory; behind it one Member for each rank
    char token[TOKEN_BYTES]     # random: who reads the same shares the memory
    pthread_mutex_t lock        # of what follows
    uint64_t used               # bytes given out so far
    int32_t ranks
    int32_t plots               # in use, or once in use
    int32_t spent               # no plot was left once: contexts without one get no windows
    Plot plot[PLOTS]


cdef void lock(Head *head) noexcept nogil:
    if pthread_mutex_lock(&head.lock) == EOWNERDEAD:
        # Its holder died between two stores. Each of them leaves the table whole, in the order
        # in which they stand: where it matters, they are releases.
        pthread_mutex_consistent(&head.lock)


cdef inline bint is_free(const Plot *plot) noexcept nogil:
    return plot.left >= plot.members


cdef Plot *find(Head *head, uint64_t context) noexcept nogil:
    cdef int i
    for i in range(head.plots):
        if not is_free(&head.plot[i]) and head.plot[i].context == context:
            return &head.plot[i]
    return NULL


cdef Plot *take(Head *head, int fd, uint64_t limit, uint64_t nbytes) noexcept nogil:
    """A plot of so many bytes: one that is free again, or new memory, or one without any."""
    cdef Plot *plot
    cdef Plot *bare = NULL
    cdef int i
    for i in range(head.plots):
        plot = &head.plot[i]
        if is_free(plot) and plot.nbytes == nbytes:
            return plot
        if is_free(plot) and plot.nbytes == 0:
            bare = plot
    if bare == NULL and head.plots < PLOTS:
        bare = &head.plot[head.plots]
        head.plots += 1
    if bare == NULL:
        head.spent = 1
        return NULL
    if nbytes <= limit - head.used and posix_fallocate(fd, head.used, nbytes) == 0:
        bare.offset = head.used
        # First: memory that belongs to no plot is lost, memory of two plots is two groups'.
        store_u64(&head.used, head.used + nbytes)
        store_u64(&bare.nbytes, nbytes)
    return bare


cdef void occupy(Plot *plot, uint64_t context, int size) noexcept nogil:
    """A free plot belongs to a group of so many members from now on."""
    plot.context = context
    store_int(&plot.members, 0)
    store_int(&plot.left, 0)
    store_int(&plot.members, size)


cdef class SharedMemory:
    """One host's memory of a job, as one rank has it.

    ranks       how many may join
    nbytes      its size; pages that nobody touches cost nothing
    """

    cdef Head *head
    cdef Member *members
    cdef char *base
    cdef uint64_t nbytes
    cdef int pid
    cdef readonly int fd

    def __cinit__(self):
        self.fd = -1
        self.pid = getpid()

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.nbytes)
        if self.fd >= 0:
            close(self.fd)

    @staticmethod
    def create(int ranks, uint64_t nbytes, bytes token not None) -> SharedMemory:
        """New memory, sealed. Raises OSError when there is none, ValueError for a bad size."""
        cdef SharedMemory memory = SharedMemory.__new__(SharedMemory)
        cdef uint64_t first = head_bytes(ranks)
        if ranks < 1 or nbytes < first or nbytes % PAGE or len(token) != TOKEN_BYTES:
            raise ValueError(f"no shared memory of {nbytes} bytes for {ranks} ranks")
        memory.fd = memfd_create(b"cydist", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        # A memfd begins with mode 0777, and /proc lets others in by the mode.
        if (memory.fd < 0 or fchmod(memory.fd, 0o600) != 0 or ftruncate(memory.fd, nbytes) != 0
                or fcntl(memory.fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0):
            raise OSError(errno, f"no shared memory: {os.strerror(errno)}")
        if posix_fallocate(memory.fd, 0, first) != 0:
            raise OSError(errno, "no memory to share")
        memory.map(nbytes)
        memory.head.ranks = ranks
        memory.head.used = first
        init_lock(&memory.head.lock)
        memcpy(memory.head.token, <const char *>token, TOKEN_BYTES)
        return memory

    @staticmethod
    def attach(int fd, bytes token not None) -> SharedMemory:
        """The memory behind a descriptor, which belongs to the result from now on.

        Raises OSError when it cannot be mapped, ValueError when it is not sealed or is not the
        memory that the token belongs to.
        """
        cdef SharedMemory memory = SharedMemory.__new__(SharedMemory)
        cdef stat_t status
        memory.fd = fd
        if fstat(fd, &status) != 0:
            raise OSError(errno, os.strerror(errno))
        if fcntl(fd, F_GET_SEALS) & SEALS != SEALS or status.st_size < <long>head_bytes(1):
            raise ValueError("this is no sealed memory of ours: it could shrink under us")
        memory.map(status.st_size)
        if (len(token) != TOKEN_BYTES
                or memcmp(memory.head.token, <const char *>token, TOKEN_BYTES) != 0
                or memory.nbytes < head_bytes(memory.head.ranks)):
            raise ValueError("this memory belongs to another job")
        return memory

    cdef int map(self, uint64_t nbytes) except -1:
        cdef void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, self.fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"cannot map shared memory: {os.strerror(errno)}")
        self.base = <char *>base
        self.nbytes = nbytes
        self.head = <Head *>base
        self.members = <Member *>(self.base + sizeof(Head))
        return 0

    def used(self):
        """Bytes that were given to groups, or are kept for the next ones."""
        return self.head.used

    cdef uint64_t open(self, uint64_t context, int size, uint64_t nbytes) noexcept nogil:
        """Where the windows of a group lie, zeroed by whoever asks first; 0: it has none."""
        cdef uint64_t offset = 0
        cdef Plot *plot
        lock(self.head)
        plot = find(self.head, context)
        if plot == NULL and not self.head.spent:
            plot = take(self.head, self.fd, self.nbytes, nbytes)
            if plot != NULL:
                if plot.nbytes != 0:
                    memset(self.base + plot.offset, 0, plot.nbytes)
                occupy(plot, context, size)
        if plot != NULL and plot.members == size and plot.nbytes == nbytes:
            offset = plot.offset
        pthread_mutex_unlock(&self.head.lock)
        return offset

    cdef void leave(self, uint64_t context) noexcept nogil:
        """A member's view was closed; the last one's frees the plot."""
        cdef Plot *plot
        lock(self.head)
        plot = find(self.head, context)
        if plot != NULL:
            plot.left += 1
        pthread_mutex_unlock(&self.head.lock)


cdef uint64_t head_bytes(int ranks) noexcept nogil:
    cdef uint64_t nbytes = sizeof(Head) + ranks * sizeof(Member)
    return (nbytes + PAGE - 1) // PAGE * PAGE


cdef void init_lock(pthread_mutex_t *mutex) noexcept nogil:
    cdef pthread_mutexattr_t attributes
    pthread_mutexattr_init(&attributes)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
    pthread_mutex_init(mutex, &attributes)
    pthread_mutexattr_destroy(&attributes)


ctypedef struct Neighbours:     # who shares the memory, by the link's numbers
    int *place                  # of each peer in `members`; -1: not there
    int *watched                # descriptors of their processes; -1: not open yet
    int busy                    # with them: one thread at a time
    bint over                   # they are closed
    Member *members


ctypedef struct View:           # what t.windows points to
    Windows windows             # first
    Neighbours *neighbours


cdef bint gone(Transport *t, int peer) noexcept nogil:
    """Has this rank said goodbye, or has its process ended?"""
    cdef Neighbours *n = (<View *>t.windows).neighbours
    cdef int rank = t.peers[peer]
    return load_int(&n.members[n.place[rank]].left) != 0 or has_ended(n, rank)


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
    cdef int pid = load_int(&n.members[n.place[rank]].pid)
    cdef pollfd ended
    if n.watched[rank] < 0:
        if pid == 0:
            return False        # it has not come yet
        n.watched[rank] = pidfd_open(pid)
        if n.watched[rank] < 0:
            # Without a descriptor, or where there are none of processes, the other link tells.
            return errno == ESRCH
    ended.fd = n.watched[rank]
    ended.events = POLLIN
    return poll(&ended, 1, 0) == 1


# Dealloc needs the memory, so the collector must not clear it before.
@cython.no_gc_clear
cdef class ShmLink(Link):
    """A link whose groups have windows where all members share memory.

    messages    the link that carries messages
    memory      shared with the ranks in `sharers`, in this order on all of them
    """

    cdef readonly Link messages
    cdef readonly SharedMemory memory
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
        self.neighbours.place = <int *>malloc(self.size * sizeof(int))
        self.neighbours.watched = <int *>malloc(self.size * sizeof(int))
        if self.neighbours.place == NULL or self.neighbours.watched == NULL:
            raise MemoryError(f"no memory for {self.size} ranks")
        self.neighbours.members = memory.members
        for i in range(self.size):
            self.neighbours.place[i] = self.neighbours.watched[i] = -1
        for i, rank in enumerate(sharers):
            self.neighbours.place[rank] = i
        self.most_spins = SPINS if cores() >= len(sharers) else 0
        store_int(&memory.members[self.neighbours.place[self.rank]].pid, memory.pid)

    def __dealloc__(self):
        if self.neighbours.watched != NULL:
            self.close_watched()
        free(self.neighbours.place)
        free(self.neighbours.watched)

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
        nbytes = (nbytes + PAGE - 1) // PAGE * PAGE
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
        view.windows.gone = gone
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
                store_int(&self.memory.members[self.neighbours.place[self.rank]].left, 1)
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

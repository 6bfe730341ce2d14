"""The memory that ranks of one host share, and its allocation.

It is one sealed memfd, which has no name and is gone with the last process that maps it.
A group takes its windows from it when its first collective begins. The first rank that asks decides
for all members, under a lock that survives its holder's death. When the memory is used up, later
groups get no windows, and their calls go over messages.
"""
import os

from libc.errno cimport EBUSY, EINTR, errno
from libc.stdint cimport uintptr_t
from libc.string cimport memcmp, memcpy, memset

from cydist._native.linux cimport (
    F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, MAP_FAILED, MAP_SHARED,
    COMMIT_BYTES, MFD_ALLOW_SEALING, MFD_CLOEXEC, PROT_READ, PROT_WRITE, PTHREAD_MUTEX_ROBUST,
    PTHREAD_PROCESS_SHARED, close, fchmod, fcntl, fstat, ftruncate, geteuid, getpid, memfd_create,
    mmap, munmap, posix_fallocate, pthread_mutex_consistent, pthread_mutex_init, pthread_mutex_t,
    pthread_mutex_trylock, pthread_mutex_unlock, pthread_mutexattr_destroy, pthread_mutexattr_init,
    pthread_mutexattr_setpshared, pthread_mutexattr_setrobust, pthread_mutexattr_t, stat_t,
    take_pages, usleep,
)
from cydist._native.failpoints cimport TABLE, ZERO, reach
from cydist._native.sync cimport (
    and_u64, compare_swap_u64, load_int, load_u64, or_u64, store_int, store_u64,
)

from cydist._native.shm_heap import Heap

cdef extern from "<errno.h>" nogil:
    int EOWNERDEAD

cdef enum:
    RING_BYTES = 262144         # of a ring's data, if there is enough memory
    CELL_BYTES = 524288         # of a cell, too; at most MOST_MARKS portions
    TRIES = 100                 # to take the lock, which is held for microseconds
    PAUSE_US = 20               # between two tries
    SEALS = 7                   # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW

cdef uint64_t MOST_ADDRESSES = 1ULL << 46    # a process has twice this many


cdef bint try_lock(SegmentHead *head, int tries) noexcept nogil:
    cdef int status = pthread_mutex_trylock(&head.lock)
    while status == EBUSY and tries > 1:
        tries -= 1
        usleep(PAUSE_US)
        status = pthread_mutex_trylock(&head.lock)
    if status == EOWNERDEAD:
        # Its holder died between two stores. Every store leaves the table consistent, in program
        # order: where it matters, they are releases.
        pthread_mutex_consistent(&head.lock)
    return status == 0 or status == EOWNERDEAD


cdef void unlock(SegmentHead *head) noexcept nogil:
    pthread_mutex_unlock(&head.lock)


cdef uint64_t reserve(SegmentHead *head, int fd, uint64_t limit, uint64_t nbytes,
                      bint *raced) noexcept nogil:
    cdef uint64_t offset = load_u64(&head.used), done = 0, piece
    cdef int error
    raced[0] = False
    if offset > limit or nbytes > limit - offset:
        return 0
    while done < nbytes:
        # All ranks of a group come here at once; when the first is done the others stop.
        if load_u64(&head.used) != offset:
            raced[0] = True
            return 0
        piece = min(nbytes - done, <uint64_t>COMMIT_BYTES)
        error = posix_fallocate(fd, offset + done, piece)
        if error == 0:
            done += piece
        elif error != EINTR:
            # Allocated pages stay, for the next rank that asks. Another rank may be filling the
            # same range, or may have received it by now.
            return 0
    # Advance `used` before any rank records the memory as its own. A death in between then only
    # loses memory; the other order could give it to two groups. If another rank received this
    # range meanwhile, these pages serve that rank.
    if compare_swap_u64(&head.used, &offset, offset + nbytes):
        return offset
    raced[0] = True
    return 0


cdef bint give_back(SegmentHead *head, uint64_t offset, uint64_t nbytes) noexcept nogil:
    cdef uint64_t end = offset + nbytes
    return compare_swap_u64(&head.used, &end, offset)


cdef class SharedMemory:
    """One host's memory of a job, as one rank maps it.

    `ranks` may join. `nbytes` is the limit for groups, whose untouched pages cost nothing, and
    `part` the limit for each rank's arrays.
    """

    token_bytes = TOKEN_BYTES

    def __cinit__(self):
        self.fd = -1
        self.pid = getpid()

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.nbytes)
        if self.fd >= 0:
            close(self.fd)

    @staticmethod
    def create(int ranks, uint64_t nbytes, bytes token not None, uint64_t part=0) -> SharedMemory:
        """Make new, sealed memory. Raises OSError if there is none, ValueError for a bad size."""
        cdef SharedMemory memory = SharedMemory.__new__(SharedMemory)
        cdef uint64_t first = head_bytes(ranks)
        cdef uint64_t whole = nbytes + ranks * part
        if (ranks < 1 or nbytes < first or nbytes % PAGE or part % PAGE
                or part > MOST_ADDRESSES // ranks or len(token) != TOKEN_BYTES):
            raise ValueError(f"no shared memory of {nbytes} bytes for {ranks} ranks")
        memory.fd = memfd_create(b"cydist", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        # A memfd begins with mode 0777, and /proc grants access by the mode.
        if (memory.fd < 0 or fchmod(memory.fd, 0o600) != 0 or ftruncate(memory.fd, whole) != 0
                or fcntl(memory.fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0):
            raise OSError(errno, f"no shared memory: {os.strerror(errno)}")
        if take_pages(memory.fd, 0, first) != 0:
            raise OSError(errno, "no memory to share")
        memory.map(whole)
        memory.head.layout = LAYOUT
        memory.head.ranks = ranks
        memory.head.ring_bytes = ring_size(ranks, nbytes)
        memory.head.cell_bytes = cell_size(ranks, nbytes, memory.head.ring_bytes)
        memory.head.used = first
        memory.head.limit = nbytes
        memory.head.part = part
        init_lock(&memory.head.lock)
        memcpy(memory.head.token, <const char *>token, TOKEN_BYTES)
        memory.copy_constants()
        return memory

    @staticmethod
    def attach(int fd, bytes token not None) -> SharedMemory:
        """Map the memory of a descriptor, which the result owns from now on.

        Raises OSError if it cannot be mapped, ValueError if it is not sealed, was laid out by
        another version, or is not the memory that the token belongs to.
        """
        cdef SharedMemory memory = SharedMemory.__new__(SharedMemory)
        cdef stat_t status
        memory.fd = fd
        if fstat(fd, &status) != 0:
            raise OSError(errno, os.strerror(errno))
        if fcntl(fd, F_GET_SEALS) & SEALS != SEALS or status.st_size < <long>head_bytes(1):
            raise ValueError("this is not cydist's sealed memory: it could shrink while in use")
        if status.st_uid != geteuid() or status.st_mode & 0o077:
            raise ValueError("this memory belongs to another user, or is open to others")
        memory.map(status.st_size)
        if memory.head.layout != LAYOUT:
            raise ValueError("another version of cydist has laid this memory out")
        if (len(token) != TOKEN_BYTES
                or memcmp(memory.head.token, <const char *>token, TOKEN_BYTES) != 0
                or memory.head.limit < head_bytes(memory.head.ranks)
                or memory.nbytes != memory.head.limit + memory.head.ranks * memory.head.part):
            raise ValueError("this memory belongs to another job")
        memory.copy_constants()
        return memory

    cdef int map(self, uint64_t nbytes) except -1:
        cdef void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, self.fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"cannot map shared memory: {os.strerror(errno)}")
        self.base = <char *>base
        self.nbytes = nbytes
        self.head = <SegmentHead *>base
        return 0

    cdef void copy_constants(self) noexcept:
        """Copy the values that other processes must not change for this one."""
        self.ranks = self.head.ranks
        self.limit = self.head.limit
        self.ring_bytes = self.head.ring_bytes
        self.cell_bytes = self.head.cell_bytes
        self.members = <Member *>(self.base + members_at())
        self.pairs = <uint64_t *>(self.members + self.ranks)
        self.words = <int>bitmap_words(self.ranks)
        self.present = self.pairs + <size_t>self.ranks * self.ranks
        self.dead = self.present + <size_t>REGIONS * self.words

    def heap(self, uint64_t place):
        """Return the heap of the rank with this number among those who joined."""
        cdef uint64_t start = self.head.limit + place * self.head.part
        return Heap(self, self.fd, <uintptr_t>(self.base + start), start, self.head.part)

    def holds(self, uintptr_t address, uint64_t nbytes) -> bool:
        """Return whether these bytes are in the memory."""
        cdef uint64_t offset = address - <uintptr_t>self.base
        return address >= <uintptr_t>self.base and offset + nbytes <= self.nbytes

    def used(self):
        """Return the bytes that groups have, or that are kept for the next ones."""
        return self.head.used

    cdef uint64_t open_region(self, uint64_t comm_id, const int *peers, const int *place, int size,
                              int own, uint64_t nbytes, uint64_t *fresh, int *holder,
                              BeginMemory begin) noexcept nogil:
        cdef uint64_t offset = 0
        cdef bint raced = True, zero = False
        cdef WindowRegion *region = NULL
        cdef int i
        holder[0] = -1
        if not try_lock(self.head, TRIES):
            return BUSY
        reach(TABLE)
        i = self.find_region(comm_id)
        while (i < 0 and raced and fresh[0] == 0 and not self.head.spent
               and self.find_free_region(nbytes) < 0):
            # Not under the lock: it takes a while, and a rank that is stopped meanwhile would stop
            # all other ranks of the host.
            unlock(self.head)
            fresh[0] = reserve(self.head, self.fd, self.head.limit, nbytes, &raced)
            if not try_lock(self.head, TRIES):
                return BUSY
            i = self.find_region(comm_id)
        if i < 0 and not self.head.spent:
            i = self.take_region(nbytes, REGIONS)
            if i < 0:
                self.head.spent = 1
            else:
                region = &self.head.region[i]
                zero = region.nbytes != 0
                if not zero and fresh[0] != 0:
                    region.offset, fresh[0] = fresh[0], 0
                    store_u64(&region.nbytes, nbytes)
                zero = zero or begin != NULL
                store_int(&region.zeroing, 1 + own if zero else 0)
                self.assign_region(i, comm_id, peers, place, size)
        if i >= 0:
            region = &self.head.region[i]
            if region.members == size and region.nbytes == nbytes:
                offset = region.offset
                holder[0] = load_int(&region.zeroing) - 1
                if not zero and holder[0] >= 0 and self.is_dead(holder[0]):
                    store_int(&region.zeroing, 1 + own)
                    zero = True
        if fresh[0] != 0 and (give_back(self.head, fresh[0], nbytes)
                              or self.free_region(fresh[0], nbytes)):
            fresh[0] = 0    # another rank of the group was first
        unlock(self.head)
        if zero and offset != 0:
            # Not under the lock, for the same reason. Other members wait for it.
            reach(ZERO)
            memset(self.base + offset, 0, nbytes)
            if begin != NULL:
                begin(self.base + offset, size)
            store_int(&region.zeroing, 0)
        elif holder[0] >= 0:
            return BUSY
        return offset

    cdef bint leave_region(self, uint64_t comm_id, const int *peers, const int *place, int size,
                           int own, bint patient) noexcept nogil:
        # While this rank's bit is set no other group gets the `WindowRegion`, so clearing the bit
        # takes no lock.
        cdef int i = self.find_region(comm_id)
        if i < 0 and size > 1:
            # A member that asks later finds no windows, which no other member would use. Without
            # a free `WindowRegion` to say so, it keeps windows of its own until all members'
            # processes have ended.
            if not try_lock(self.head, TRIES if patient else 1):
                return False
            i = self.find_region(comm_id)
            if i < 0:
                i = self.take_region(0, REGIONS // 2)
                if i >= 0:
                    store_int(&self.head.region[i].zeroing, 0)
                    self.assign_region(i, comm_id, peers, place, size)
            unlock(self.head)
        if i >= 0:
            self.drop_member(i, own)
        return True

    cdef void leave_late(self, uint64_t comm_id, int own) noexcept nogil:
        cdef int i = self.find_region(comm_id)
        if i >= 0:
            self.drop_member(i, own)

    cdef void mark_dead(self, int place) noexcept nogil:
        cdef int i
        # In this order: `assign_region` stores a group's members before it looks who is dead.
        or_u64(&self.dead[place // 64], 1ULL << (place % 64))
        for i in range(load_int(&self.head.regions)):
            self.drop_member(i, place)

    cdef bint is_dead(self, int place) noexcept nogil:
        return load_u64(&self.dead[place // 64]) >> (place % 64) & 1

    # Called under the lock, except `is_free`, `find_region` and `drop_member`. A `WindowRegion` is
    # known by its number.

    cdef bint is_free(self, int i) noexcept nogil:
        cdef const uint64_t *present = self.present + <size_t>i * self.words
        cdef int k
        for k in range(self.words):
            if load_int(&self.head.region[i].members) != 0 and load_u64(&present[k]) != 0:
                return False
        return True

    cdef int find_region(self, uint64_t comm_id) noexcept nogil:
        """Return the group's `WindowRegion`; -1: it has none."""
        cdef int i
        for i in range(load_int(&self.head.regions)):
            if load_u64(&self.head.region[i].comm_id) == comm_id and not self.is_free(i):
                return i
        return -1

    cdef int find_free_region(self, uint64_t nbytes) noexcept nogil:
        """Return a free `WindowRegion` with exactly `nbytes` bytes; -1: none."""
        cdef int i
        for i in range(self.head.regions):
            if self.head.region[i].nbytes == nbytes and self.is_free(i):
                return i
        return -1

    cdef int take_region(self, uint64_t nbytes, int most) noexcept nogil:
        """Return a free `WindowRegion` with `nbytes` bytes, or one without memory.

        -1: none of the first `most` is free.
        """
        cdef int i = self.find_free_region(nbytes)
        if i < 0:
            i = self.find_free_region(0)
        if i < 0 and self.head.regions < most:
            i = self.head.regions
            store_int(&self.head.regions, i + 1)
        return i if i < most else -1

    cdef bint free_region(self, uint64_t offset, uint64_t nbytes) noexcept nogil:
        """Keep memory for the next group that asks for this size. Returns True."""
        cdef int i = self.take_region(0, REGIONS)
        if i >= 0:
            self.head.region[i].offset = offset
            store_u64(&self.head.region[i].nbytes, nbytes)
        return True

    cdef void assign_region(self, int i, uint64_t comm_id, const int *peers, const int *place,
                            int size) noexcept nogil:
        """Assign a free `WindowRegion` to this group."""
        cdef uint64_t *present = self.present + <size_t>i * self.words
        cdef int k, at
        store_int(&self.head.region[i].members, 0)
        store_u64(&self.head.region[i].comm_id, comm_id)
        for k in range(self.words):
            store_u64(&present[k], 0)
        for k in range(size):
            at = place[peers[k]]
            or_u64(&present[at // 64], 1ULL << (at % 64))
        for k in range(self.words):
            and_u64(&present[k], ~load_u64(&self.dead[k]))
        store_int(&self.head.region[i].members, size)

    cdef void drop_member(self, int i, int place) noexcept nogil:
        """Record that this member has left, or will never join."""
        cdef uint64_t *word = self.present + <size_t>i * self.words + place // 64
        cdef uint64_t bit = 1ULL << (place % 64)
        if load_u64(word) & bit:
            and_u64(word, ~bit)


cdef uint64_t head_bytes(int ranks) noexcept nogil:
    return whole_pages(members_at() + ranks * (sizeof(Member) + ranks * sizeof(uint64_t))
                       + (REGIONS + 1) * bitmap_words(ranks) * sizeof(uint64_t))


cdef inline uint64_t bitmap_words(int ranks) noexcept nogil:
    return (ranks + 63) // 64


cdef uint64_t ring_size(int ranks, uint64_t nbytes) noexcept nogil:
    """Return a ring size so that rings of all pairs take at most half of the memory, if possible,
    with cells of half their size.

    A writer waits for room for a PORTION. A reader that has seen less than a quarter of its ring in
    use assumes that no writer waits. So in a ring of less than two PORTIONs both could wait.
    If all pairs communicate and memory is short, the last ones use sockets.
    """
    cdef uint64_t size = RING_BYTES
    while size > 2 * PORTION and 3 * size * ranks * ranks > nbytes:
        size //= 2
    return size


cdef uint64_t cell_size(int ranks, uint64_t nbytes, uint64_t ring) noexcept nogil:
    """Return the size of the cells behind such rings, which may not be half of what they could."""
    cdef uint64_t size = CELL_BYTES
    while 2 * size > ring and 2 * (ring + size) * ranks * ranks > nbytes:
        size //= 2
    return size


cdef void init_lock(pthread_mutex_t *mutex) noexcept nogil:
    cdef pthread_mutexattr_t attributes
    pthread_mutexattr_init(&attributes)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
    pthread_mutex_init(mutex, &attributes)
    pthread_mutexattr_destroy(&attributes)

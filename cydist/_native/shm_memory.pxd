"""The memory that ranks of one host share: its table, and what is given out of it."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from cydist._native.abi cimport LINE, PAGE
from cydist._native.linux cimport pthread_mutex_t


cdef enum:
    LAYOUT = 4                  # version of all that lies in the memory, rings and windows too
    TOKEN_BYTES = 32
    PLOTS = 1024                # groups that can have windows at a time
    PORTION = 16384             # of a ring: copied at once; the other side copies the one before


cdef enum Left:                 # Member.left
    LEAVING = 1                 # it serves its windows no more
    SILENT = 2                  # its last message is written


ctypedef struct Plot:           # the windows of one group
    uint64_t context
    uint64_t offset
    uint64_t nbytes             # 0: the members have no windows
    int members             # 0: free, with its memory; as well when none of them is there


ctypedef struct Member:         # 64 bytes
    int left                    # 0, or a Left
    int bell                    # 1 + the number that its process has for the pipe that wakes it
    uint64_t bell_inode         # of that pipe
    uint32_t asleep             # it wants the bell when something was written to it
    uint32_t news               # goes up when a pair below has changed, or somebody has left
    uint64_t base               # where it has mapped the memory
    uint64_t pad[4]


# Of the memory. Behind it, at members_at(), one Member for each rank, and then, for each pair of
# ranks, a word: 0, NO_RINGS, or where its two rings lie; see shm_ring.pxd. Then, for each plot
# and once more, a bit for each rank: see SharedMemory.
ctypedef struct SegmentHead:
    uint64_t layout             # LAYOUT of who made it
    char token[TOKEN_BYTES]     # random: who reads the same shares the memory
    pthread_mutex_t lock        # of what follows
    uint64_t used               # bytes given out to groups so far
    uint64_t limit              # of them; behind it every rank's part for arrays
    uint64_t part
    int32_t ranks
    int32_t plots               # in use, or once in use
    int32_t spent               # no plot was left once: contexts without one get no windows
    uint64_t ring_bytes         # of each ring's data; a power of two, two PORTIONs or more
    Plot plot[PLOTS]


cdef inline uint64_t whole_pages(uint64_t nbytes) noexcept nogil:
    return (nbytes + PAGE - 1) // PAGE * PAGE


cdef inline uint64_t members_at() noexcept nogil:
    return (sizeof(SegmentHead) + LINE - 1) // LINE * LINE


cdef class SharedMemory:
    cdef SegmentHead *head
    cdef Member *members
    cdef uint64_t *pairs        # [low * ranks + high]
    cdef uint64_t *present      # [plot * words]: members that have not left, a bit for each place
    cdef uint64_t *buried       # [words]: whose process is known to have ended
    cdef int words
    cdef char *base
    cdef uint64_t nbytes
    cdef int ranks
    cdef uint64_t limit         # of what groups may take
    cdef uint64_t ring_bytes
    cdef int pid                # of whoever mapped it
    cdef readonly int fd

    cdef int map(self, uint64_t nbytes) except -1
    cdef void learn(self) noexcept
    # Where the windows of a group lie, zeroed by whoever asks first; 0: it has none.
    # peers, size     the group's members; place[peer] is where each stands in the table
    cdef uint64_t open(self, uint64_t context, const int *peers, const int *place, int size,
                       uint64_t nbytes) noexcept nogil
    # This member's view was closed, whether or not anybody had windows; the last one's frees the
    # plot.
    cdef void leave(self, uint64_t context, const int *peers, const int *place, int size,
                    int own) noexcept nogil
    # The process at this place has ended: it counts as having left whatever it was in.
    cdef void bury(self, int place) noexcept nogil
    cdef bint is_free(self, int i) noexcept nogil
    cdef int find(self, uint64_t context) noexcept nogil
    cdef int find_free(self, uint64_t nbytes) noexcept nogil
    cdef int take(self, uint64_t nbytes, int most) noexcept nogil
    cdef void spare(self, uint64_t offset, uint64_t nbytes) noexcept nogil
    cdef void occupy(self, int i, uint64_t context, const int *peers, const int *place,
                     int size) noexcept nogil
    cdef void strike(self, int i, int place) noexcept nogil

# The table's lock outlives its holder.
cdef void lock(SegmentHead *head) noexcept nogil
cdef void unlock(SegmentHead *head) noexcept nogil
# New memory, zeroed; its offset, or 0: all is given out; or another rank raced, and may have done
# what this one is about. Takes no lock.
cdef uint64_t reserve(SegmentHead *head, int fd, uint64_t limit, uint64_t nbytes,
                      bint *raced) noexcept nogil
# Nobody has touched it: free again, if nothing was reserved since.
cdef bint give_back(SegmentHead *head, uint64_t offset, uint64_t nbytes) noexcept nogil

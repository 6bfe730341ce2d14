"""The memory that ranks of one host share: its table, and its allocation."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from cydist._native.abi cimport LINE, PAGE
from cydist._native.linux cimport pthread_mutex_t


cdef enum:
    LAYOUT = 7                  # version of the memory's whole layout, including rings and windows
    TOKEN_BYTES = 32
    REGIONS = 1024              # groups that can have windows at the same time
    BUSY = 1                    # in place of an offset: ask again
    PORTION = 16384             # of a ring or cell: copied while the other side copies another


cdef enum Departure:            # Member.left
    LEAVING = 1                 # its windows are closed
    SILENT = 2                  # its last message is written


ctypedef struct WindowRegion:   # the window memory of one group
    uint64_t comm_id
    uint64_t offset
    uint64_t nbytes             # 0: the members have no windows
    int members             # 0: free, with its memory; also free when none is present
    int zeroing             # 1 + place of the rank that zeroes the memory; 0: it is zeroed


ctypedef struct Member:         # 64 bytes
    int left                    # 0, or a Departure
    int doorbell                # 1 + the doorbell pipe's descriptor number in its process
    uint64_t doorbell_inode     # of the doorbell's pipe
    uint32_t asleep             # ring its doorbell after writing to it
    uint32_t events             # update counter: a pair below has changed, or a rank has left
    uint64_t base               # where it has mapped the memory
    uint64_t pad[4]


# The head of the memory. At members_at() one Member for each rank follows. After them, for each
# pair of ranks, there is a word: 0, NO_RINGS, or where its two rings are; see shm_ring.pxd. Then
# follows a bit for each rank, per `WindowRegion` and once more: see SharedMemory.
ctypedef struct SegmentHead:
    uint64_t layout             # LAYOUT of the rank that made it
    char token[TOKEN_BYTES]     # random: ranks that read the same token share the memory
    pthread_mutex_t lock        # guards what follows
    uint64_t used               # bytes given out to groups so far
    uint64_t limit              # of those; every rank's part for arrays follows
    uint64_t part
    int32_t ranks
    int regions             # in use, or used before
    int spent               # all regions were in use once: groups without one get no windows
    uint64_t ring_bytes         # of each ring's data; a power of two, two PORTIONs or more
    uint64_t cell_bytes         # of the cell behind each ring; whole PORTIONs
    WindowRegion region[REGIONS]


cdef inline uint64_t whole_pages(uint64_t nbytes) noexcept nogil:
    return (nbytes + PAGE - 1) // PAGE * PAGE


cdef inline uint64_t members_at() noexcept nogil:
    return (sizeof(SegmentHead) + LINE - 1) // LINE * LINE


ctypedef void (*BeginMemory)(char *memory, int size) noexcept nogil


cdef class SharedMemory:
    cdef SegmentHead *head
    cdef Member *members
    cdef uint64_t *pairs        # [low * ranks + high]
    cdef uint64_t *present      # [region * words]: members that have not left, a bit for each place
    cdef uint64_t *dead         # [words]: ranks whose processes are known to have ended
    cdef int words
    cdef char *base
    cdef uint64_t nbytes
    cdef int ranks
    cdef uint64_t limit         # on memory for groups
    cdef uint64_t ring_bytes, cell_bytes
    cdef int pid                # of the process that mapped it
    cdef readonly int fd

    cdef int map(self, uint64_t nbytes) except -1
    cdef void copy_constants(self) noexcept
    # Return where the windows of a group are, zeroed by the first rank that asks; 0: it has none;
    # BUSY: ask again, with the same `fresh`, 0 at first. A rank that does not must give that back.
    # peers, size     the group's members; place[peer] is each one's place in the table
    # holder          with BUSY: the place of the rank that zeroes the windows; -1: the lock is held
    # begin           fills in memory that is zero before any member uses it; NULL: it stays zero
    cdef uint64_t open_region(self, uint64_t comm_id, const int *peers, const int *place, int size,
                              int own, uint64_t nbytes, uint64_t *fresh, int *holder,
                              BeginMemory begin) noexcept nogil
    # This member's comm was closed, whether or not any member had windows. The last one frees the
    # group's `WindowRegion`. False: no member had asked for windows, and the lock was held; call
    # leave_late later. `patient`: try the lock for some milliseconds.
    cdef bint leave_region(self, uint64_t comm_id, const int *peers, const int *place, int size,
                           int own, bint patient) noexcept nogil
    cdef void leave_late(self, uint64_t comm_id, int own) noexcept nogil
    # The process at this place has ended: it counts as departed from all its groups.
    cdef void mark_dead(self, int place) noexcept nogil
    cdef bint is_dead(self, int place) noexcept nogil
    cdef bint is_free(self, int i) noexcept nogil
    cdef int find_region(self, uint64_t comm_id) noexcept nogil
    cdef int find_free_region(self, uint64_t nbytes) noexcept nogil
    cdef int take_region(self, uint64_t nbytes, int most) noexcept nogil
    cdef bint free_region(self, uint64_t offset, uint64_t nbytes) noexcept nogil
    cdef void assign_region(self, int i, uint64_t comm_id, const int *peers, const int *place,
                            int size) noexcept nogil
    cdef void drop_member(self, int i, int place) noexcept nogil

# Take the table's lock, which survives the death of its holder, unless it is held at all `tries`.
cdef bint try_lock(SegmentHead *head, int tries) noexcept nogil
cdef void unlock(SegmentHead *head) noexcept nogil
# Reserve new zeroed memory; its offset, or 0: all is used. `raced`: another rank was concurrent and
# may have done what this one is about to do. Takes no lock.
cdef uint64_t reserve(SegmentHead *head, int fd, uint64_t limit, uint64_t nbytes,
                      bint *raced) noexcept nogil
# Free memory that no rank has touched, if nothing was reserved since.
cdef bint give_back(SegmentHead *head, uint64_t offset, uint64_t nbytes) noexcept nogil

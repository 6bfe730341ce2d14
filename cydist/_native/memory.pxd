"""The memory that ranks of one host share: its table, and what is given out of it."""
from libc.stdint cimport int32_t, uint64_t

from cydist._native.linux cimport pthread_mutex_t


cdef enum:
    TOKEN_BYTES = 32
    PLOTS = 1024                # groups that can have windows at a time
    PAGE = 4096


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
    uint64_t used               # bytes given out to groups so far
    uint64_t limit              # of them; behind it every rank's part for arrays
    uint64_t part
    int32_t ranks
    int32_t plots               # in use, or once in use
    int32_t spent               # no plot was left once: contexts without one get no windows
    Plot plot[PLOTS]


cdef inline uint64_t whole_pages(uint64_t nbytes) noexcept nogil:
    return (nbytes + PAGE - 1) // PAGE * PAGE


cdef class SharedMemory:
    cdef Head *head
    cdef Member *members
    cdef char *base
    cdef uint64_t nbytes
    cdef int pid                # of whoever mapped it
    cdef readonly int fd

    cdef int map(self, uint64_t nbytes) except -1
    # Where the windows of a group lie, zeroed by whoever asks first; 0: it has none.
    cdef uint64_t open(self, uint64_t context, int size, uint64_t nbytes) noexcept nogil
    # A member's view was closed; the last one's frees the plot.
    cdef void leave(self, uint64_t context) noexcept nogil

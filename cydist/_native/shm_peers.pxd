"""The ranks that share memory with this one: one table, which windows and rings use.

A process is known by a descriptor that is opened when the table is made, so that its number, which
another process may have later, is not asked again. A rank that sleeps says so in its Member, and
whoever has something for it then writes a byte to its bell: a pipe in its epoll, opened through
/proc like the memory itself. While nobody sleeps nothing costs a system call.
"""
from libc.stdint cimport uint32_t, uint64_t

from cydist._native.shm_memory cimport SegmentHead, Member, SharedMemory


cdef enum Watched:              # in place of a descriptor
    UNWATCHED = -1              # of this process itself, or the system has none of processes
    OVER = -2                   # it had ended when the table was made
    CLOSED = -3                 # nobody asks any more


ctypedef struct LocalPeers:
    SegmentHead *head                  # of the memory
    Member *members
    uint64_t *pairs
    char *base
    uint64_t limit              # of the memory that rings and windows may take: then arrays follow
    uint64_t nbytes
    uint64_t ring_bytes
    int fd
    int pid                     # of this process
    int places                  # length of `ranks`
    int ranks_of_memory
    int own                     # this rank's place
    int *ranks                  # by place
    int *pids
    int *watched                # descriptors of their processes, or a Watched
    int *bells                  # descriptors of theirs; -1: not open yet
    int *place                  # by rank; -1: shares no memory
    int bell[2]                 # this rank's, both ends
    int asleep                  # threads of this rank that sleep
    uint32_t heard              # of the news, so far
    int busy                    # with the processes' descriptors: one thread at a time


cdef class LocalPeersHandle:
    cdef LocalPeers *table
    cdef readonly SharedMemory memory


# Is the process at this place gone? False also where that cannot be told.
cdef bint has_ended(LocalPeers *n, int place) noexcept nogil
# Close what is open; nobody waits any more.
cdef void close_nearby(LocalPeers *n) noexcept nogil

cdef int hang_bell(LocalPeers *n) noexcept nogil                     # OK, or NO_MEMORY and errno
# From now on waking the rank at this place opens nothing, unless it has no bell yet.
cdef void open_bell(LocalPeers *n, int place) noexcept nogil
# Wake this rank, if it sleeps. What it is to see was stored before.
cdef void ring_bell(LocalPeers *n, int place) noexcept nogil
# Tell all that something in the table of pairs has changed, or that this rank leaves.
cdef void spread_news(LocalPeers *n) noexcept nogil
cdef void tell_news(LocalPeers *n, int place) noexcept nogil

# Around a sleep in which the bell must be heard; look once more after the first.
cdef void fall_asleep(LocalPeers *n) noexcept nogil
cdef void wake_up(LocalPeers *n) noexcept nogil
cdef void silence_bell(LocalPeers *n) noexcept nogil

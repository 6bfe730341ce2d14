"""The ranks that share memory with this one, in one table that windows and rings use.

A process is identified by a descriptor that is opened when the table is made, because another
process may have its pid later. A rank records its sleep in its Member. A rank
that has something for it then writes a byte to its doorbell: a pipe in its epoll, opened through
/proc like the memory itself. While no rank sleeps, this costs no system call.
"""
from libc.stdint cimport uint32_t, uint64_t

from cydist._native.shm_memory cimport SegmentHead, Member, SharedMemory


cdef enum WatchState:           # in place of a descriptor
    UNWATCHED = -1              # this process itself, or the system has no process descriptors
    OVER = -2                   # it had ended when the table was made
    CLOSED = -3                 # closed here: it is not asked any more


ctypedef struct LocalPeers:
    SegmentHead *head                  # of the memory
    Member *members
    uint64_t *pairs
    char *base
    uint64_t limit              # of the memory for rings and windows; memory for arrays follows
    uint64_t nbytes
    uint64_t ring_bytes
    uint64_t cell_bytes
    int fd
    int pid                     # of this process
    int places                  # length of `ranks`
    int cores                   # on which these may run
    int ranks_of_memory
    int own                     # this rank's place
    int *ranks                  # by place
    int *pids
    int *watched                # descriptors of the peers' processes, or a WatchState
    int *doorbells              # descriptors of their doorbells; -1: not open yet
    int *place                  # by rank; -1: it shares no memory
    int doorbell[2]             # this rank's doorbell, both ends
    int asleep                  # threads of this rank that sleep
    uint32_t events_seen        # the last update counter that was handled
    int busy                    # a thread is reading the processes' descriptors; one at a time


cdef class LocalPeersHandle:
    cdef LocalPeers *table
    cdef readonly SharedMemory memory


# Return whether the process at this place is gone. False also if that is unknown.
cdef bint has_ended(LocalPeers *n, int place) noexcept nogil
# Close all descriptors; no thread waits any more.
cdef void close_local_peers(LocalPeers *n) noexcept nogil

cdef int create_doorbell(LocalPeers *n) noexcept nogil               # OK, or NO_MEMORY and errno
# Open the doorbell of the rank at this place in advance, if it has one already.
cdef void open_doorbell(LocalPeers *n, int place) noexcept nogil
# Wake the rank at this place if it sleeps. Store what it is to see before.
cdef void ring_doorbell(LocalPeers *n, int place) noexcept nogil
# Notify all ranks that the table of pairs has changed, or that this rank leaves.
cdef void notify_all(LocalPeers *n) noexcept nogil
cdef void notify_peer(LocalPeers *n, int place) noexcept nogil

# Surround a sleep that the doorbell must end; look once more after the first call.
cdef void announce_sleep(LocalPeers *n) noexcept nogil
cdef void end_sleep(LocalPeers *n) noexcept nogil
cdef void drain_doorbell(LocalPeers *n) noexcept nogil

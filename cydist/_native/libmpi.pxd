"""The MPI library that mpi4py has loaded, without its header: one build serves every MPI.

A handle is a pointer in one MPI and an int in another. Both travel in a word, and an int is
its low half. MPI_Status is never read: cydist's messages carry their sender and size.
"""

from cydist._native.linux cimport pthread_t

ctypedef size_t Handle

cdef enum:
    SUCCESS = 0                 # MPI_SUCCESS, in every MPI
    STATUS_BYTES = 128          # more than any MPI_Status


ctypedef struct MpiLibrary:     # in the order of NAMES in libmpi.pyx
    int (*isend)(const void *, int, Handle, int, int, Handle, Handle *) noexcept nogil
    int (*issend)(const void *, int, Handle, int, int, Handle, Handle *) noexcept nogil
    int (*irecv)(void *, int, Handle, int, int, Handle, Handle *) noexcept nogil
    int (*test)(Handle *, int *, char *) noexcept nogil
    int (*improbe)(int, int, Handle, int *, Handle *, char *) noexcept nogil
    int (*imrecv)(void *, int, Handle, Handle *, Handle *) noexcept nogil
    int (*ibarrier)(Handle, Handle *) noexcept nogil
    int (*ibcast)(void *, int, Handle, int, Handle, Handle *) noexcept nogil
    int (*iallreduce)(const void *, void *, int, Handle, Handle, Handle, Handle *) noexcept nogil
    int (*ireduce)(const void *, void *, int, Handle, Handle, int, Handle,
                   Handle *) noexcept nogil
    int (*iallgather)(const void *, int, Handle, void *, int, Handle, Handle,
                      Handle *) noexcept nogil
    int (*ialltoall)(const void *, int, Handle, void *, int, Handle, Handle,
                     Handle *) noexcept nogil
    int (*ireduce_scatter_block)(const void *, void *, int, Handle, Handle, Handle,
                                 Handle *) noexcept nogil
    # Only in MPIs that survive a rank's death (User-Level Failure Mitigation); NULL in others.
    int (*failure_ack)(Handle) noexcept nogil
    int (*failure_get_acked)(Handle, Handle *) noexcept nogil
    int (*comm_group)(Handle, Handle *) noexcept nogil
    int (*group_size)(Handle, int *) noexcept nogil
    int (*translate_ranks)(Handle, int, const int *, Handle, int *) noexcept nogil
    int (*group_free)(Handle *) noexcept nogil


cdef MpiLibrary lib             # filled in by load()


# Return whether the request is complete or broken. Sets `error` to MPI's code if not SUCCESS.
cdef bint is_done(Handle *request, int *error) noexcept nogil


# Fill `dead` with the ranks of a communicator that MPI knows to have died; return how many. From
# then on MPI probes for any source without them. 0 where MPI does not survive a rank's death.
cdef int find_dead(Handle comm, int size, int *dead) noexcept nogil


cdef enum Callers:              # the threads that may call MPI
    ANY_THREAD = 0
    FOREGROUND = 1              # all but those that `run_in_background`
    ONE = 2


# Return whether this thread may call MPI. `one` is the thread that ONE means.
cdef bint is_among(int callers, pthread_t one) noexcept nogil

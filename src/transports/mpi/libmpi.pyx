"""The MPI library that mpi4py has loaded, and which threads may call it; see libmpi.pxd."""
from libc.stdlib cimport free, malloc

from cydist._native.linux cimport RTLD_NOW, dlopen, dlsym, pthread_equal, pthread_self

cdef extern from *:
    """
    static _Thread_local int cydist_in_background;
    """
    int in_background "cydist_in_background"

# In the order of MpiLibrary
NAMES = (
    b"MPI_Isend", b"MPI_Issend", b"MPI_Irecv", b"MPI_Test", b"MPI_Improbe", b"MPI_Imrecv",
    b"MPI_Ibarrier", b"MPI_Ibcast", b"MPI_Iallreduce", b"MPI_Ireduce", b"MPI_Iallgather",
    b"MPI_Ialltoall", b"MPI_Ireduce_scatter_block",
)
OPTIONAL = (
    b"MPIX_Comm_failure_ack", b"MPIX_Comm_failure_get_acked", b"MPI_Comm_group", b"MPI_Group_size",
    b"MPI_Group_translate_ranks", b"MPI_Group_free",
)


def load(path) -> None:
    """Find MPI's functions through a library that is linked with it, which stays loaded.

    Raises OSError if one is missing.
    """
    cdef void **functions = <void **>&lib
    cdef bytes where = path.encode()
    cdef bytes name
    cdef void *library = dlopen(where, RTLD_NOW)
    if library == NULL:
        raise OSError(f"cannot load {path}")
    for i, name in enumerate(NAMES + OPTIONAL):
        functions[i] = dlsym(library, name)
        if functions[i] == NULL and name in NAMES:
            raise OSError(f"{path} knows no {name.decode()}")
    # MPICH has functions of these names that end the process; it lacks the one of this name.
    if dlsym(library, b"MPIX_Comm_ack_failed") == NULL:
        lib.failure_ack = NULL


cdef bint is_done(Handle *request, int *error) noexcept nogil:
    cdef char status[STATUS_BYTES]
    cdef int done = 0
    cdef int code = lib.test(request, &done, status)
    if code != SUCCESS:
        error[0] = code
    return done != 0 or code != SUCCESS


cdef int find_dead(Handle comm, int size, int *dead) noexcept nogil:
    cdef Handle failed = 0
    cdef int count = 0
    if lib.failure_ack == NULL or lib.failure_get_acked == NULL:
        return 0
    if lib.failure_ack(comm) != SUCCESS or lib.failure_get_acked(comm, &failed) != SUCCESS:
        return 0
    if lib.group_size(failed, &count) != SUCCESS or not 0 < count <= size \
            or not ranks_of(failed, count, comm, dead):
        count = 0
    lib.group_free(&failed)
    return count


cdef bint ranks_of(Handle group, int count, Handle comm, int *ranks) noexcept nogil:
    """Fill in the ranks in `comm` of a group's members; False: MPI does not say."""
    cdef Handle all_ranks = 0
    cdef int *places = <int *>malloc(count * sizeof(int))
    cdef bint known = False
    cdef int i
    if places != NULL and lib.comm_group(comm, &all_ranks) == SUCCESS:
        for i in range(count):
            places[i] = i
        known = lib.translate_ranks(group, count, places, all_ranks, ranks) == SUCCESS
        lib.group_free(&all_ranks)
    free(places)
    return known


# The threads that may call MPI, as it was initialized. If only one thread at a time may, the
# program's own threads take turns, but know nothing of cydist's threads for asynchronous calls.
# So these leave MPI to the others.

def run_in_background() -> None:
    """Declare that this thread runs calls that other threads have begun."""
    global in_background
    in_background = 1


def runs_in_background() -> bool:
    """Return whether `run_in_background` was called on this thread."""
    return in_background != 0


cdef bint is_among(int callers, pthread_t one) noexcept nogil:
    if callers == ANY_THREAD:
        return True
    return pthread_equal(pthread_self(), one) != 0 if callers == ONE else not in_background

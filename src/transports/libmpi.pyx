"""The MPI library that mpi4py has loaded; see libmpi.pxd."""
cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    int RTLD_NOW

# In the order of Library.
NAMES = (
    b"MPI_Isend", b"MPI_Irecv", b"MPI_Test", b"MPI_Cancel", b"MPI_Ibarrier", b"MPI_Ibcast",
    b"MPI_Iallreduce", b"MPI_Ireduce", b"MPI_Iallgather", b"MPI_Ialltoall",
    b"MPI_Ireduce_scatter_block",
)


def load(path) -> None:
    """Find MPI's functions through a library that is linked with it, which stays loaded.

    Raises OSError if one is not there.
    """
    cdef void **functions = <void **>&lib
    cdef bytes where = path.encode()
    cdef bytes name
    cdef void *library = dlopen(where, RTLD_NOW)
    if library == NULL:
        raise OSError(f"cannot load {path}")
    for i, name in enumerate(NAMES):
        functions[i] = dlsym(library, name)
        if functions[i] == NULL:
            raise OSError(f"{path} knows no {name.decode()}")


cdef bint is_done(Handle *request, int *error) noexcept nogil:
    cdef char status[STATUS_BYTES]
    cdef int done = 0
    cdef int code = lib.test(request, &done, status)
    if code != SUCCESS:
        error[0] = code
    return done != 0 or code != SUCCESS

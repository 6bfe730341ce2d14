"""The memory of a plain array: contiguous, on the CPU, of a dtype that has a code."""


ctypedef struct Plain:
    char *ptr
    size_t nbytes
    size_t count                # elements
    int dtype                   # a DT_ code of kernels.h, never DT_OTHER
    int ndim
    bint writable


# Look at a numpy array or a torch tensor, without an Array and without a Python call.
# False, and nothing raised, for everything that is not plain: `asarray` says what it is.
cdef bint look(object obj, Plain *out) except -1

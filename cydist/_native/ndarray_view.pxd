"""The memory of a plain array: contiguous, of a dtype that has a code."""


ctypedef struct NdarrayView:
    char *ptr
    size_t nbytes
    size_t count                # elements
    int dtype                   # a DT_ code of kernels.h, never DT_OTHER
    int ndim
    bint writable


# Look at a numpy array or a torch tensor on the CPU, without an Array and without a Python call.
# Return False, and raise nothing, for all other objects: `asarray` examines those.
cdef bint view_array(object obj, NdarrayView *out) except -1

# The same for a cupy array, or a torch tensor on a GPU, on that device.
cdef bint view_cupy(object obj, NdarrayView *out, int *device) except -1
cdef bint view_torch(object obj, NdarrayView *out, int *device) except -1


cdef inline bint disjoint(const NdarrayView *a, const NdarrayView *b) noexcept:
    return a.ptr + a.nbytes <= b.ptr or b.ptr + b.nbytes <= a.ptr


# Return whether the large array has the dtype and `ranks` times the elements of the small one.
cdef inline bint is_multiple(const NdarrayView *large, const NdarrayView *small,
                             int ranks) noexcept:
    return large.count == small.count * ranks and large.dtype == small.dtype

"""One view of memory, whoever owns it: numpy, torch, ml_dtypes, buffers, DLPack."""
from libc.stdint cimport int64_t, uint32_t


cdef class Array:
    cdef char *ptr                  # first element; may be NULL when size is 0
    cdef readonly int dtype         # a DT_ code of kernels.h; DT_OTHER: moved, never reduced
    cdef readonly str dtype_name    # "float32", "bfloat16", or numpy's str of the dtype
    cdef uint32_t dtype_hash        # of dtype_name, for DT_OTHER; else 0
    cdef readonly size_t itemsize   # bytes per element
    cdef readonly int ndim
    cdef int64_t *shape_            # ndim entries, owned by this object
    cdef int64_t *strides_          # ndim entries in bytes, owned by this object
    cdef readonly size_t size       # elements
    cdef readonly size_t nbytes     # size * itemsize
    cdef readonly bint contiguous   # C order without gaps (dimensions of length 1 ignored)
    cdef readonly bint writable
    cdef readonly str device        # "cpu" or "cuda"
    cdef readonly int device_index
    cdef readonly object owner      # what the user passed; keeps the memory alive
    cdef object keep                # buffers, capsules, temporaries that keep `ptr` valid

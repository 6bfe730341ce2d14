"""One view of memory from any library: numpy, torch, ml_dtypes, buffers, DLPack."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint32_t


cdef class Array:
    cdef char *ptr                  # first element; may be NULL when size is 0
    cdef readonly int dtype         # a DT_ code of kernels.h; DT_OTHER: moved, never reduced
    cdef readonly str dtype_name    # "float32", "bfloat16", or numpy's str of the dtype
    cdef readonly uint32_t dtype_hash   # of dtype_name, for DT_OTHER; else 0; equal on all ranks
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
    cdef object keep                # capsules, memory, parents that keep `ptr` valid
    cdef Py_buffer buffer           # held while this object lives; obj is NULL for none
    cdef int64_t inline_shape[8]    # shape and strides of up to four dimensions
    # A contiguous view of `count` elements from element `start` on, of one dimension.
    cdef Array part(self, size_t start, size_t count)


# Return new contiguous memory for `size` elements of the dtype of `like`, or of uint8.
cpdef Array empty(size_t size, Array like=*)


# For asarray.pyx, which fills an Array in this order: shape and strides (lay_out makes
# room), dtype, ptr, device, writable, owner; then derive_sizes() derives the rest.
cdef int lay_out(Array self, int ndim) except -1
cdef int set_contiguous_strides(Array self) except -1
cdef int set_dtype(Array self, int code, size_t itemsize) except -1
cdef int name_dtype(Array self, str name, size_t itemsize) except -1    # code and hash follow
cdef int derive_sizes(Array self) except -1

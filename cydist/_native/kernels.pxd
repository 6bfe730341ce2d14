"""Loops over elements: reductions by dtype and op, strided packing, flattening."""
from libc.stdint cimport int64_t

from cydist._native.abi cimport Reduction


cdef extern from "kernels/kernels.h" nogil:
    # The order of both enums is part of the wire format (Fingerprint.dtype and .op).
    ctypedef enum cydist_dtype:
        DT_OTHER            # any fixed-size element that is moved, never reduced
        DT_BOOL
        DT_I8
        DT_U8
        DT_I16
        DT_U16
        DT_I32
        DT_U32
        DT_I64
        DT_U64
        DT_F16
        DT_BF16
        DT_F32
        DT_F64
        DT_C64
        DT_C128
        DT_F8E4M3FN
        DT_F8E5M2
        DT_COUNT
    ctypedef enum cydist_op:
        OP_NONE
        OP_SUM
        OP_PRODUCT
        OP_MIN
        OP_MAX
        OP_BAND
        OP_BOR
        OP_BXOR
        OP_AVG
        OP_PREMUL_SUM
        OP_COUNT


# Fill `r` for op on dtype, with the loops of the variant in use. `factor` points to the
# PREMUL_SUM factor (one float64 for real dtypes, two for complex) and must outlive `r`; NULL
# otherwise. `ranks` is AVG's divisor. Returns 0, or -1 when there is no such reduction: BAND on
# floats, MAX on complex, AVG and PREMUL_SUM on bool, a fraction times integers, AVG of 0 ranks;
# kernels.why_not() puts that into words.
#
# 8- and 16-bit floats compute in float32: combine rounds its two-source result to the dtype,
# combine_all and AVG's division round once. A NaN result is always the dtype's positive quiet
# NaN, so bits depend on no machine; combine_all of a single source is a copy.
cdef int reduction(Reduction *r, int dtype, int op, void *factor, int ranks) noexcept nogil

# Copy a strided array of `ndim` dimensions to or from contiguous memory, C order.
# Strides are in bytes and may be zero or negative; ndim 0 is one element.
cdef void pack(char *out, const char *array, int ndim, const int64_t *shape,
               const int64_t *strides, size_t itemsize) noexcept nogil
cdef void unpack(char *array, const char *packed, int ndim, const int64_t *shape,
                 const int64_t *strides, size_t itemsize) noexcept nogil

# Copy `count` blocks of memory to, or from, one contiguous buffer, in order.
cdef void flatten(char *out, const char *const *blocks, const size_t *nbytes,
                  size_t count) noexcept nogil
cdef void unflatten(char *const *blocks, const char *flat, const size_t *nbytes,
                    size_t count) noexcept nogil

"""A long all_reduce of lanes.pyx, which goes stretch by stretch, and how long a stretch is."""

from cydist._native.abi cimport Call, Comm


cdef enum:
    STRETCH_BYTES = 1048576     # at least


# Return whether a call is so long.
cdef bint has_stretches(const Comm *t, const Call *c) noexcept nogil
cdef int all_reduce_in_stretches(Comm *t, Call *c) noexcept nogil

"""A call's failure, as data and as text."""
from cydist._native.abi cimport Call, Fingerprint
from cydist._native.control_plane cimport ControlPlane


# Describe the call of a fingerprint and of a message of `nbytes` bytes, or 0: `all_reduce #12 of
# 1000 float32, op SUM`. `other` is the fingerprint that it disagrees with: for the same call only
# the differences are described. NULL: there is none.
cdef str describe_call(const Fingerprint *f, size_t nbytes, const Fingerprint *other,
                       size_t other_bytes)

# Return the CallError that a group's control messages report, as seen from group rank `rank`.
cdef object recorded_failure(const ControlPlane *control_plane, int rank)

# Keep the arrays of a failed call alive forever if a stopped peer may still write into them.
cdef int keep_still_accessed(const Call *c, object one, object other) except -1

"""How a call failed, as data and in words."""
from cydist._native.abi cimport Call, Fingerprint
from cydist._native.control_plane cimport ControlPlane


# A fingerprint, and the size of the message that it was part of or 0, in words:
# `all_reduce #12 of 1000 float32, op SUM`. Of two that differ, `other` is the other one: of one
# call only that is said in which they differ. NULL: there is none.
cdef str described(const Fingerprint *f, size_t nbytes, const Fingerprint *other,
                   size_t other_bytes)

# The Failure that a group's notices know of, as seen from group rank `rank`.
cdef object told_failure(const ControlPlane *notices, int rank)

# A call failed: hold on to its arrays for ever where a peer that was stopped may still write.
cdef int keep_visited(const Call *c, object one, object other) except -1

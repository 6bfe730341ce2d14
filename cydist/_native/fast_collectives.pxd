"""The fast path of a call; see the body. 0: take the general path, nothing has happened."""
from cydist._native.group cimport Group

cdef enum:
    DONE = 1
    FAILED = 2                  # the caller raises kept_failure()

cpdef int all_reduce(object tensor, object op, object group) except -1
cpdef int broadcast(object tensor, object src, object group) except -1
cpdef int all_gather_into_tensor(object output, object input, object group) except -1
cpdef int reduce_scatter_tensor(object output, object input, object op, object group) except -1
cpdef int all_to_all_single(object output, object input, object group) except -1
cpdef int reduce(object tensor, object dst, object op, object group) except -1
cpdef int scan(object tensor, object op, object group) except -1
cpdef int exscan(object tensor, object op, object group) except -1
cpdef int gather(object tensor, object arrays, object dst, object group) except -1
cpdef int scatter(object tensor, object arrays, object src, object group) except -1
cpdef int barrier(object group) except -1

# Also for messages: a call's group; the group's compiled half if it can run a call now, or None;
# the group rank of a global rank, or -1; the value of a non-negative Python int, or -1.
cdef object resolve_group(object group)
cdef bint has_fast_messages(object group) except -1
cdef Group native_of(object group)
cdef int group_rank_of(object group, Group native, object given) except -2
cdef long small_int(object given) except? -1

# Also for calls on streams: a group's fast path for arrays on GPUs, or None; the class of
# ReduceOp's members.
cdef object enqueuer_of(object group)
cdef object operations_class()

# What the caller of a failed call raises; and how a function keeps it, to return FAILED.
cdef object kept_failure()
cdef int keep_failure(object error) except -1

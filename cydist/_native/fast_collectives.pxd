"""The fast path of a call; see the body. False: take the general path, nothing has happened."""
from cydist._native.group cimport Group

cpdef bint all_reduce(object tensor, object op, object group) except -1
cpdef bint broadcast(object tensor, object src, object group) except -1
cpdef bint all_gather_into_tensor(object output, object input, object group) except -1
cpdef bint reduce_scatter_tensor(object output, object input, object op, object group) except -1
cpdef bint all_to_all_single(object output, object input, object group) except -1
cpdef bint reduce(object tensor, object dst, object op, object group) except -1
cpdef bint scan(object tensor, object op, object group) except -1
cpdef bint exscan(object tensor, object op, object group) except -1
cpdef bint gather(object tensor, object arrays, object dst, object group) except -1
cpdef bint scatter(object tensor, object arrays, object src, object group) except -1
cpdef bint barrier(object group) except -1

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

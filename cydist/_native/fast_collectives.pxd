"""The short way of a call; see the body. False: take the long way, nothing has happened."""
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

# What messages need, too. The group that a call means; its compiled half, if that can run a call
# now, or None; the group rank of a global one, or -1; what an int says, or -1 for what is none.
cdef object chosen_of(object group)
cdef bint sends_short(object group) except -1
cdef Group native_of(object group)
cdef int member(object group, Group native, object given) except -2
cdef long number(object given) except? -1

# What calls on streams need, too. The short way of a group for arrays on GPUs, or None; is this
# process another than that one; the class of ReduceOp's members.
cdef object streams_of(object group)
cdef bint forked(int pid) noexcept
cdef object operations_class()

"""The short way of a call; see the body. False: take the long way, nothing has happened."""

cpdef bint all_reduce(object tensor, object op, object group) except -1
cpdef bint broadcast(object tensor, object src, object group) except -1
cpdef bint all_gather_into_tensor(object output, object input, object group) except -1
cpdef bint reduce_scatter_tensor(object output, object input, object op, object group) except -1
cpdef bint all_to_all_single(object output, object input, object group) except -1
cpdef bint barrier(object group) except -1
cpdef bint send(object tensor, object dst, object group, object tag) except -1
cpdef bint recv(object tensor, object src, object group, object tag) except -1

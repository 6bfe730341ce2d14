"""The fast path of a call on a GPU's stream; see the body. NOT_FAST: nothing has happened."""

cdef object NOT_FAST

cdef object all_reduce(object tensor, object op, object group, bint async_op)
cdef object reduce(object tensor, object dst, object op, object group, bint async_op)
cdef object broadcast(object tensor, object src, object group, bint async_op)
cdef object all_gather_into_tensor(object output, object input, object group, bint async_op)
cdef object reduce_scatter_tensor(object output, object input, object op, object group,
                                  bint async_op)
cdef object all_to_all_single(object output, object input, object group, bint async_op)
cdef object send(object tensor, object dst, object group, object tag, bint async_op)
cdef object recv(object tensor, object src, object group, object tag, bint async_op)

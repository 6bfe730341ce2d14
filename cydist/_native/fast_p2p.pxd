"""The fast path of a message; it returns what fast_collectives.pxd says."""

cpdef int send(object tensor, object dst, object group, object tag) except -1
cpdef int recv(object tensor, object src, object group, object tag) except -1

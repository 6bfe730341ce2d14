"""The fast path of a message; see the body. False: take the general path, nothing has happened."""

cpdef bint send(object tensor, object dst, object group, object tag) except -1
cpdef bint recv(object tensor, object src, object group, object tag) except -1

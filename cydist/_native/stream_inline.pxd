"""A short send or receive through a ring that completes at once: no queue, no memory, and no state
of a wait. All unusual cases are left to the functions that can wait."""
from cydist._native.abi cimport Request, Comm


# A comm's function; see abi.pxd.
cdef int at_once(Comm *t, Request *r, bint sending) noexcept nogil

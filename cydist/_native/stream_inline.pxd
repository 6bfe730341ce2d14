"""A send or a receive of few bytes through a ring that waits for nobody: no queue, no memory, and
none of what a wait needs. Whatever is unusual is left to the functions that can wait."""
from cydist._native.abi cimport Request, Comm


# A view's function; see abi.pxd.
cdef int at_once(Comm *t, Request *r, bint sending) noexcept nogil

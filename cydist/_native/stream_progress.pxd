"""Who moves messages on: see stream.pxd for the lock, stream_progress.pyx for the rules."""
from libc.stdint cimport int64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.stream cimport Net


cdef enum:
    LOOKS_PER_POLL = 20         # looks at rings cost so much less than one at the sockets


# Do what can be done at once; the lock is held. Was there anything?
cdef bint progress(Net *net) noexcept nogil
# The same for somebody who asks again and again: at the rings each time, and in some turns at
# what costs a system call.
cdef bint move(Net *net, unsigned int turn) noexcept nogil
# Is this one of those turns?
cdef bint is_costly(const Net *net, unsigned int turn) noexcept nogil
# A view's function; see abi.pxd.
cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
# Something is pending and its caller has left; without memory for a thread, waits do it.
cdef void ensure_background(Net *net) noexcept nogil
# For good, and wait until it has ended. Without the lock.
cdef void stop_background(Net *net) noexcept nogil

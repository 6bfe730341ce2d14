"""Progress of messages: see stream.pxd for the lock, stream_progress.pyx for the rules."""
from libc.stdint cimport int64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.stream cimport Net


cdef enum:
    LOOKS_PER_POLL = 20         # this many looks at rings cost as much as one at the sockets


# Make all progress that is possible without blocking, with the lock held; return whether any.
cdef bint progress(Net *net) noexcept nogil
# The same for callers that poll repeatedly: the rings each time, and on some turns
# what costs a system call.
cdef bint poll_once(Net *net, unsigned int iteration) noexcept nogil
# Return whether this is one of those turns.
cdef bint is_slow_poll(const Net *net, unsigned int iteration) noexcept nogil
# A comm's function; see abi.pxd.
cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
# A pending request's caller has left: run a background thread. Without memory for it, waits do it.
cdef void ensure_background(Net *net) noexcept nogil
# Stop it permanently and wait until it has ended. Without the lock.
cdef void stop_background(Net *net) noexcept nogil

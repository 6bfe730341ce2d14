"""Who moves messages over TCP on: see stream.pxd for the lock, progress.pyx for the rules."""
from libc.stdint cimport int64_t

from cydist._native.linux cimport pthread_cond_t, pthread_mutex_t
from cydist._native.stream cimport Net


# Do what can be done at once; the lock is held.
cdef void progress(Net *net) noexcept nogil
# Sleep until something can be done, without the lock, and do it with the lock.
cdef void poll(Net *net, int64_t timeout_ns) noexcept nogil
# Wait for a condition until this time, on CLOCK_MONOTONIC.
cdef void sleep_until(pthread_cond_t *condition, pthread_mutex_t *lock,
                      int64_t until) noexcept nogil
# Something is pending and its caller has left; without memory for a thread, waits do it.
cdef void ensure_background(Net *net) noexcept nogil
# For good, and wait until it has ended. Without the lock.
cdef void stop_background(Net *net) noexcept nogil

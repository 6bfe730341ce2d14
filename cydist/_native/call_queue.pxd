"""The calls of a group: the record of each, and their queue."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.recent_calls cimport RecentCall


cdef extern from *:
    """
    static inline int cydist_change(int *p, int from, int to) {
        return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }
    /* With the GIL held; where there is a GIL, no other thread can interleave. */
    static inline int cydist_change_alone(int *p, int from, int to) {
    #ifdef Py_GIL_DISABLED
        return cydist_change(p, from, to);
    #else
        int ready = *p == from;
        if (ready)
            *p = to;
        return ready;
    #endif
    }
    static inline void cydist_add_alone(int *p, int value) {
    #ifdef Py_GIL_DISABLED
        __atomic_add_fetch(p, value, __ATOMIC_ACQ_REL);
    #else
        *p += value;
    #endif
    }
    """
    bint change "cydist_change"(int *p, int before, int after) noexcept nogil
    bint change_with_gil "cydist_change_alone"(int *p, int before, int after) noexcept
    void add_with_gil "cydist_add_alone"(int *p, int value) noexcept


cdef class CallRecord:              # one call; the body describes the fields
    cdef readonly str name
    cdef public uint64_t seq
    cdef public double deadline
    cdef public double began
    cdef public uint32_t sizes
    cdef public bint agreed
    cdef public bint begun
    cdef public bint over
    cdef public bint asynchronous
    cdef int64_t issued_ns              # on CLOCK_MONOTONIC
    cdef RecentCall *recent             # its entry in the ring, once it has begun; or NULL
    cdef uint64_t version               # of that entry, while it is this call's
    cdef int64_t deadline_in_ns(self) noexcept


cdef class CallQueue:
    cdef readonly uint64_t seq          # number of the group's last collective
    cdef CallRecord last                # None: it was on the fast path, or there was none
    cdef str fast_name                  # of the last call on the fast path
    cdef bint fast_over
    cdef int outstanding                # calls that run or are queued
    cdef int running                    # whether a call is running; see the body
    cdef list queue                     # calls that have not begun, oldest first
    cdef public int group_number        # of the group, in the ring of recent calls
    cdef RecentCall *current            # the general path's running call, there; or NULL
    cdef int status                     # the Status with which the engine ended it
    # Begin a call if no other runs or is queued; return whether. Callers run no signal handler
    # between this and the end.
    cdef bint try_begin(self) noexcept
    cdef void end(self) noexcept
    cdef void release(self) noexcept
    cpdef number(self, CallRecord call)
    cdef void take_number(self, CallRecord call) noexcept
    # Begin a call on the fast path; return its number.
    cdef uint64_t number_fast(self, str name) noexcept
    cpdef run_call(self, object group, CallRecord call, object body)

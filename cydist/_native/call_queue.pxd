"""The queue of a group's calls."""


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


cdef class CallQueue:
    cdef int outstanding                # calls that run or are queued
    cdef int running                    # whether a call is running; see the body
    cdef list queue                     # calls that have not begun, oldest first
    cdef object owner                   # token of the call that began without queueing
    # Like begin and end, for callers that run no signal handler between their steps.
    cdef bint try_begin_fast(self) noexcept
    cdef void end_fast(self) noexcept
    cdef void release(self) noexcept

"""Ctrl-C and other signals: Python's handlers run inside every wait below the API.

Every wait of a call ends each slice of waiting with `abi.slice_end`, which calls
`run_signal_handlers`. Two loops that are not part of a call check signals themselves, since they
hold the GIL between slices: closing a link (stream_link) and allocating shared memory (shm_heap).
The fast path releases the GIL only when it must wait (fast_collectives), so the wait can take it.
"""
import threading

from cpython.exc cimport PyErr_CheckSignals

from cydist._native.abi cimport set_interrupted

cdef extern from "pthread.h" nogil:
    unsigned long pthread_self()

cdef unsigned long main_thread = threading.main_thread().ident
# The exception that a handler raised inside a wait; only the main thread runs handlers.
cdef object raised_by_handler = None


cdef int run_signal_handlers() noexcept nogil:
    """Run pending handlers; nonzero if one raised, which ends the wait with INTERRUPTED."""
    if pthread_self() != main_thread:
        return 0
    with gil:
        return signal_handler_raised()


cdef int signal_handler_raised() noexcept:
    global raised_by_handler
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        raised_by_handler = error
        return 1
    return 0


cdef bint handler_has_raised():
    return raised_by_handler is not None


cdef object take_raised_by_handler():
    global raised_by_handler
    error, raised_by_handler = raised_by_handler, None
    return error


set_interrupted(run_signal_handlers)

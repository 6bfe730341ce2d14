"""Which threads may call MPI, as it was started.

Where one thread at a time may, the program's own threads take turns with each other, and know
nothing of those on which cydist runs asynchronous calls: these leave MPI to the others.
"""
from cydist._native.linux cimport pthread_equal, pthread_self

cdef extern from *:
    """
    static _Thread_local int cydist_in_background;
    """
    int in_background "cydist_in_background"


def run_in_background() -> None:
    """From now on this thread runs calls that others have begun."""
    global in_background
    in_background = 1


def runs_in_background() -> bool:
    """Was `run_in_background` called on this thread?"""
    return in_background != 0


cdef bint is_among(int callers, pthread_t one) noexcept nogil:
    if callers == ANYBODY:
        return True
    return pthread_equal(pthread_self(), one) != 0 if callers == ONE else not in_background

"""Which algorithm table.py chose, kept where a call finds it without asking Python."""
from libc.string cimport memset


cdef extern from *:
    int clzll "__builtin_clzll"(unsigned long long) nogil

cdef dict known = {}            # (ranks, windows, native) -> Choices


cdef int size_class(size_t nbytes) noexcept nogil:
    if nbytes <= 1:
        return 0
    return 64 - clzll(nbytes - 1)


cdef class ChosenAlgorithms:
    """The choices for groups of one size, with or without windows and a library."""


cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native):
    cdef ChosenAlgorithms found = known.get((ranks, windows, native))
    if found is None:
        found = known[ranks, windows, native] = ChosenAlgorithms()
    return found


def forget_choices():
    """The settings have changed: table.py will choose again."""
    cdef ChosenAlgorithms each
    for each in known.values():
        memset(each.rows, 0, sizeof(each.rows))

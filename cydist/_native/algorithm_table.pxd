"""The table of algorithms, and those that tuning/table.py chose for even blocks."""
from libc.stdint cimport uint32_t

from cydist._native.abi cimport COLLECTIVES, Algorithm


cdef enum Needs:            # needs of an algorithm; a set of bits
    MESSAGES = 0
    WINDOWS = 1
    COMMUTATIVE = 2         # only for commutative reductions
    POWER_OF_TWO = 4        # only for 2**k ranks
    EVEN_BLOCKS = 8         # only where all blocks have the same size
    NATIVE = 16             # a library that has the collective itself


ctypedef struct Entry:      # one row of the table of algorithms
    const char *name
    int collective
    int needs
    Algorithm run


# The table. An algorithm module ends in add(b"ring", ALL_REDUCE, MESSAGES, all_reduce).
cdef int add(const char *name, int collective, int needs, Algorithm run) except -1
cdef const Entry *find(const char *name, int collective) noexcept nogil   # NULL: no such row
cdef int index_of(const Entry *entry) noexcept nogil
cdef const Entry *row_of(uint32_t index) noexcept nogil     # NULL: no such row

cdef enum:
    SIZE_CLASSES = 65


# The least k with nbytes <= 2**k: the unit in which table.py counts.
cdef int size_class(size_t nbytes) noexcept nogil


cdef class ChosenAlgorithms:             # shared by groups of one size that offer the same
    cdef const Entry *rows[COLLECTIVES][SIZE_CLASSES]   # NULL: not asked yet
    cdef size_t segment_bytes


cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native)

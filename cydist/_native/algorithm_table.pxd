"""Which algorithm table.py chose for even blocks: what the short way of a call looks up."""
from cydist._native.abi cimport COLLECTIVES, Entry

cdef enum:
    SIZE_CLASSES = 65


# The least k with nbytes <= 2**k: the unit in which table.py counts.
cdef int size_class(size_t nbytes) noexcept nogil


cdef class ChosenAlgorithms:             # shared by groups of one size that offer the same
    cdef const Entry *rows[COLLECTIVES][SIZE_CLASSES]   # NULL: not asked yet
    cdef size_t segment_bytes


cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native)

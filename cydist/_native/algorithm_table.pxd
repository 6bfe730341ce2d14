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
    REACHABLE = 32          # arrays that the other ranks can access
    HOSTS = 64              # several hosts, of which one has several of the group's ranks
    CONSECUTIVE = 128       # and the ranks on each host are consecutive
    # These two may be missing in a single call, which finds that out itself. Such an algorithm then
    # runs Call.fallback.
    FOUND_IN_CALL = NATIVE | REACHABLE


cdef enum Traits:           # a set of bits
    ONE_ROUNDING = 1        # reduces in rank order with one rounding: the same bits everywhere
    ADAPTIVE = 2            # runs Call.fallback also where it measures that this is faster


ctypedef struct Entry:      # one row of the table of algorithms
    const char *name        # NULL: no algorithm has this number
    int collective
    int needs
    int traits
    Algorithm run           # NULL until its module is imported


ctypedef struct Choice:     # what runs a call
    const Entry *entry      # NULL: not chosen yet
    Algorithm fallback      # see Call; NULL: `entry` needs none


# Give a row of the table its function. An algorithm module ends in
# implement(b"ring", ALL_REDUCE, all_reduce).
cdef int implement(const char *name, int collective, Algorithm run) except -1
cdef const Entry *find(const char *name, int collective) noexcept nogil   # NULL: no such row
cdef int number_of(const Entry *entry) noexcept nogil
cdef const Entry *row_of(uint32_t number) noexcept nogil    # NULL: no such row

# Return the algorithm of this name, and its fallback of this name. Raises ValueError if there is no
# such algorithm, or no fallback for one that needs it.
cdef Choice choice_of(str collective, int code, bytes algorithm, bytes fallback) except *

cdef enum:
    SIZE_CLASSES = 65


# The least k with nbytes <= 2**k: the unit in which table.py counts.
cdef int size_class(size_t nbytes) noexcept nogil


cdef class ChosenAlgorithms:             # shared by groups of one size that offer the same
    cdef Choice rows[COLLECTIVES][SIZE_CLASSES]
    cdef size_t segment_bytes
    cdef bint for_parts         # it has all rows that parts of groups need, from the first time on
    cdef bint filled            # and these are of the settings in force


# `placement`: of the ranks on hosts; None: they share none.
cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native, object placement)
# The same for a part of a group (hierarchy.pxd), with all rows that such parts need. `choose` is
# that of Group.prepare_parts.
cdef ChosenAlgorithms choices_for_part(int ranks, bint windows, bint between_hosts, choose,
                                       size_t segment_bytes)

"""Blocks that move through windows, and the step in which ranks say how long theirs are.

Of a gather, a scatter and an uneven all_to_all no rank knows all sizes. So a first step says them,
and the longest as its note: all ranks then know how many steps the call takes. Where the longest is
short the same step carries the blocks, and is the last one.
"""
from cydist._native.abi cimport Block, Call, Comm


ctypedef struct Move:
    int parts                   # 1, or p: part r of every slot is for rank r
    const Block *given          # one for each part; NULL where this rank gives nothing
    const Block *due            # due[0] comes from rank from_first, and so on
    int from_first, from_end
    size_t longest              # bytes of the longest block, on every rank


cdef Move moving(int parts, const Block *given, const Block *due, int from_first, int from_end,
                 size_t longest) noexcept nogil
# Those of a call; the longest block is this rank's, until they agree.
cdef Move gathering(Comm *t, Call *c) noexcept nogil
cdef Move scattering(Comm *t, Call *c) noexcept nogil

# Say the sizes and learn the longest, unless all have one size. MISMATCH, if a peer has another
# number of bytes for this rank than are due. Over: all blocks have been moved.
cdef int agree(Comm *t, Call *c, Move *m, bint *over) noexcept nogil

# Are ranks first .. end - 1 all but, at most, this one?
cdef inline bint everybody(const Comm *t, int first, int end) noexcept nogil:
    return first <= (t.rank == 0) and end >= t.size - (t.rank == t.size - 1)

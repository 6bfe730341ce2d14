"""Blocks that move through windows, and the step in which ranks exchange their sizes.

In a gather, a scatter and an uneven all_to_all no rank knows all sizes. So ranks publish them in a
first step, with the longest as the step's note; then all ranks know how many steps the call takes.
Where the longest is short, the same step carries the blocks and is the last one.
"""
from cydist._native.abi cimport Block, Call, Comm


ctypedef struct BlockMove:
    int parts                   # 1, or p: every slot has one for each rank
    const Block *given          # one for each part; NULL if this rank gives nothing
    const Block *due            # due[0] comes from rank from_first, and so on
    int from_first, from_end
    size_t longest              # bytes of the longest block, on every rank


cdef BlockMove block_move(int parts, const Block *given, const Block *due, int from_first,
                          int from_end, size_t longest) noexcept nogil
# Return the blocks of a call. `longest` is this rank's until the ranks agree.
cdef BlockMove gather_move(Comm *t, Call *c) noexcept nogil
cdef BlockMove scatter_move(Comm *t, Call *c) noexcept nogil

# Publish the sizes and learn the longest, unless all blocks have one size. MISMATCH if a peer's
# block for this rank has another size than is due. `over`: all blocks have been moved.
cdef int exchange_sizes(Comm *t, Call *c, BlockMove *m, bint *over) noexcept nogil

# Return whether ranks first .. end - 1 are all ranks except, at most, this one.
cdef inline bint all_ranks(const Comm *t, int first, int end) noexcept nogil:
    return first <= (t.rank == 0) and end >= t.size - (t.rank == t.size - 1)

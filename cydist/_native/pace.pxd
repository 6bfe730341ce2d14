"""How calls in which all ranks send and receive at once are cut into segments between hosts.

On a slow network a long segment keeps its other users waiting, among them the next host of a ring.
On a fast one each segment costs more than its bytes, and where messages take long to arrive, short
ones leave it idle. So where such calls carry little, rank 0 tries both lengths, and takes what
carried more. In each long call it tells the others: nothing else that ranks remember counts.

A rank also waits for those that are late, which looks the same for both lengths.
"""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Block, Call, Comm, now_ns
from cydist._native.pipeline cimport total

cdef enum:
    FAST_BYTES = 250            # if a host sends so many in a microsecond, segments stay long
    SHORT_SEGMENT_BYTES = 16384
    AGREED_BYTES = 524288       # calls of more agree on a segment
    # How often the length is tried that carried less: each time in vain doubles the calls between.
    FEWEST_BETWEEN = 16
    MOST_BETWEEN = 1024


ctypedef struct Pace:           # of a group
    bint adapts                 # the same on all ranks; of the rest only rank 0's counts
    bint cut_short              # in the last such call
    bint trying                 # the length that had carried less
    int between, left           # calls between two trials, and until the next one
    # Bytes in a microsecond that the last calls carried, with long and with short segments; 0: not
    # known.
    size_t carried[2]


# Return the bytes of all blocks of a call that agrees; 0: it does not.
cdef inline size_t bytes_to_pace(const Pace *p, const Comm *t, const Call *c,
                                 int collective) noexcept nogil:
    cdef size_t nbytes = 0
    if not p.adapts:
        return 0
    if collective == ALL_REDUCE:
        nbytes = c.inputs[0].nbytes
    elif collective == ALL_GATHER:
        nbytes = total(c.outputs, t.size)
    elif collective == REDUCE_SCATTER:
        nbytes = total(c.inputs, t.size)
    return nbytes if nbytes > AGREED_BYTES else 0


# Return what rank 0 tells the others in such a call.
cdef inline uint64_t paced_segment(Pace *p, size_t segment) noexcept nogil:
    cdef size_t long_ones = p.carried[0], short_ones = p.carried[1]
    p.cut_short = p.trying = False
    if 0 < long_ones < FAST_BYTES:
        p.cut_short = short_ones > long_ones
        p.trying = short_ones == 0 or p.left == 0
        p.left -= not p.trying
        p.cut_short ^= p.trying
    return min(segment, <size_t>SHORT_SEGMENT_BYTES) if p.cut_short else segment


# Measure what each of `parts` hosts has sent to the others since then, in a call of so many bytes.
cdef inline void note_exchange(Pace *p, int collective, size_t nbytes, int parts,
                               int64_t began) noexcept nogil:
    cdef size_t sent = nbytes // <size_t>parts * <size_t>(parts - 1)
    cdef size_t *carried = &p.carried[p.cut_short]
    if collective == ALL_REDUCE:        # there and back
        sent *= 2
    sent = sent * 1000 // <size_t>max(now_ns() - began, <int64_t>1) + 1
    carried[0] = max(sent, carried[0] - carried[0] // 8)    # others may have been late
    if p.trying:
        p.between = min(2 * p.between, <int>MOST_BETWEEN)
        if p.between == 0 or carried[0] > p.carried[not p.cut_short]:
            p.between = FEWEST_BETWEEN
        p.left = p.between

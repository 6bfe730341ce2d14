"""How calls in which all ranks send and receive at once are cut into segments between hosts.

On a slow network a long segment keeps its other users waiting, among them the next host of a ring.
On a fast one each segment costs more than its bytes. So each rank measures what such calls carry,
and in each long one rank 0 tells the others how to cut it. Nothing else that ranks remember counts.
"""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Block, Call, Comm, now_ns
from cydist._native.pipeline cimport total

cdef enum:
    SLOW_BYTES = 250            # that a host sends in a microsecond
    SLOW_SEGMENT_BYTES = 16384
    AGREED_BYTES = 1048576      # calls of more agree on a segment


ctypedef struct Pace:           # of a group; the same on all ranks but for `carried`
    bint adapts                 # segments are neither set nor measured
    size_t carried              # bytes in a microsecond, in the last long calls; 0: not known


# Return the bytes of all blocks of a call that agrees; 0: it does not.
cdef inline size_t bytes_to_pace(const Pace *p, const Comm *t, const Call *c,
                                 int collective) noexcept nogil:
    cdef size_t nbytes = 0
    if p.adapts and collective == ALL_REDUCE:
        nbytes = c.inputs[0].nbytes
    elif p.adapts and collective == ALL_GATHER:
        nbytes = total(c.outputs, t.size)
    elif p.adapts and collective == REDUCE_SCATTER:
        nbytes = total(c.inputs, t.size)
    return nbytes if nbytes > AGREED_BYTES else 0


# Return what rank 0 tells the others.
cdef inline uint64_t paced_segment(const Pace *p, size_t segment) noexcept nogil:
    cdef bint slow = 0 < p.carried < SLOW_BYTES
    return min(segment, <size_t>SLOW_SEGMENT_BYTES) if slow else segment


# Measure what each of `parts` hosts has sent to the others since then, in a call of so many bytes.
cdef inline void note_exchange(Pace *p, int collective, size_t nbytes, int parts,
                               int64_t began) noexcept nogil:
    cdef size_t sent = nbytes // <size_t>parts * <size_t>(parts - 1)
    if collective == ALL_REDUCE:
        sent *= 2
    sent = sent * 1000 // <size_t>max(now_ns() - began, <int64_t>1)
    # Others may have been late to this call.
    p.carried = max(sent, p.carried - p.carried // 8)

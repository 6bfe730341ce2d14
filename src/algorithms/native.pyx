"""Native: the collective of the library below the link, where it has one with cydist's semantics.

    broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, barrier

The library determines steps and bytes. It also determines the bits of a sum of floats: the same on
all ranks, and on every run if the library promises that. The library lacks some calls (16- and
8-bit floats, AVG, PREMUL_SUM), and would need a copy for others. These use a cydist algorithm over
its messages, on all ranks alike. All blocks must have one size.

Source: the Message Passing Interface Forum, "MPI: A Message-Passing Interface Standard, Version
4.1" (2023), chapter 6.
"""
from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, ELSEWHERE, REDUCE, REDUCE_SCATTER, Call,
    Comm,
)
from cydist._native.algorithm_table cimport EVEN_BLOCKS, NATIVE, add, find

cdef enum:
    DOUBLING_BYTES = 16384      # limit of cydist's own all_reduce
    SEGMENT_BYTES = 4194304     # at least; of an all_gather, which the library segments again


cdef const char *fallback(const Call *c) noexcept nogil:
    """Return the cydist algorithm for a call that the library does not have."""
    cdef int collective = c.fingerprint.collective
    if collective == ALL_REDUCE:
        return b"doubling" if c.inputs[0].nbytes <= DOUBLING_BYTES else b"ring"
    if collective == BARRIER:
        return b"dissemination"
    if collective == BROADCAST or collective == REDUCE:
        return b"tree"
    return b"ring" if collective == ALL_GATHER else b"pairwise"


cdef int run_in_library(Comm *t, Call *c) noexcept nogil:
    cdef int status = ELSEWHERE
    if t.library_comm != 0 and t.collective != NULL:
        status = t.collective(t, c)
    if status == ELSEWHERE:
        if c.fingerprint.collective == ALL_GATHER:
            c.segment_bytes = max(c.segment_bytes, <size_t>SEGMENT_BYTES)
        status = find(fallback(c), c.fingerprint.collective).run(t, c)
    return status


add(b"native", BROADCAST, NATIVE, run_in_library)
add(b"native", ALL_REDUCE, NATIVE, run_in_library)
add(b"native", REDUCE, NATIVE, run_in_library)
add(b"native", BARRIER, NATIVE, run_in_library)
add(b"native", ALL_GATHER, NATIVE | EVEN_BLOCKS, run_in_library)
add(b"native", REDUCE_SCATTER, NATIVE | EVEN_BLOCKS, run_in_library)
add(b"native", ALL_TO_ALL, NATIVE | EVEN_BLOCKS, run_in_library)

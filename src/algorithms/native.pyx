"""Native: the collective of the library below the link, where it has one with cydist's semantics.

    broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, barrier

The library determines steps and bytes. It also determines the bits of a sum of floats: the same on
all ranks, and on every run if the library promises that. The library lacks some calls (16- and
8-bit floats, AVG, PREMUL_SUM), and would need a copy for others. The call's fallback runs these, on
all ranks alike. All blocks must have one size.

Source: the Message Passing Interface Forum, "MPI: A Message-Passing Interface Standard, Version
4.1" (2023), chapter 6.
"""
from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, ELSEWHERE, REDUCE, REDUCE_SCATTER, Call,
    Comm,
)
from cydist._native.algorithm_table cimport implement

cdef enum:
    SEGMENT_BYTES = 4194304     # at least; of an all_gather, which the library segments again


cdef int run_in_library(Comm *t, Call *c) noexcept nogil:
    cdef int status = ELSEWHERE
    if t.library_comm != 0 and t.collective != NULL:
        status = t.collective(t, c)
    if status == ELSEWHERE:
        if c.fingerprint.collective == ALL_GATHER:
            c.segment_bytes = max(c.segment_bytes, <size_t>SEGMENT_BYTES)
        status = c.fallback(t, c)
    return status


implement(b"native", BROADCAST, run_in_library)
implement(b"native", ALL_REDUCE, run_in_library)
implement(b"native", REDUCE, run_in_library)
implement(b"native", BARRIER, run_in_library)
implement(b"native", ALL_GATHER, run_in_library)
implement(b"native", REDUCE_SCATTER, run_in_library)
implement(b"native", ALL_TO_ALL, run_in_library)

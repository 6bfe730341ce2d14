"""Bruck: short blocks in ceil(log2 p) steps, for any number of ranks.

    all_gather       steps ceil(log2 p)     bytes sent per rank n (p-1)/p
    reduce_scatter   steps ceil(log2 p)     bytes sent per rank n (p-1)/p           commutative ops
    all_to_all       steps ceil(log2 p)     bytes sent per rank about n/2 log2 p    even blocks

n is all p blocks. In step k of all_gather a rank sends all blocks that it holds, up to 2**k, to
rank - 2**k, and appends those from rank + 2**k. reduce_scatter takes these steps backwards: a rank
sends its sums for rank + 2**k and those after it to rank + 2**k, and adds what arrives to the sums
that it keeps, which are half as many after each step. They travel in the array's dtype: 16- and
8-bit floats round once per step. In step k of all_to_all a rank sends to rank + 2**k the blocks
whose remaining distance has bit k set. Blocks are copied to their places at the end, so a rank
needs memory for all blocks, and except in all_gather for as many again.

Three ranks, all_gather:

    rank 0   a        a b        a b c
    rank 1   b        b c        b c a
    rank 2   c        c a        c a b
             step 0: to rank - 1    step 1: one block, to rank - 2

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997). For
reduce_scatter: M. Bernaschi, G. Iannello and M. Lauria, "Efficient implementation of reduce-scatter
in MPI", J. Syst. Archit. 49 (2003).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_TO_ALL, NO_MEMORY, OK, REDUCE_SCATTER, Block, Call, Comm,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    combine, conclude, contribute, copy, exchange, release_buffer,
)


cdef size_t run_of(const Block *blocks, int p, int first, int count) noexcept nogil:
    """Return the bytes of `count` blocks from rank `first` on, cyclically."""
    cdef size_t nbytes = 0
    cdef int i
    for i in range(count):
        nbytes += blocks[(first + i) % p].nbytes
    return nbytes


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef int p = t.size
    cdef int held = 1, step = 0, more, i, status = OK
    cdef size_t offset = c.inputs[0].nbytes
    cdef size_t more_bytes
    cdef Block block
    cdef char *blocks = <char *>malloc(run_of(c.outputs, p, 0, p) + 1)  # of rank, rank + 1, ...
    if blocks == NULL:
        return NO_MEMORY
    copy(blocks, c.inputs[0].ptr, c.inputs[0].nbytes)
    while held < p and status == OK:
        more = held if held <= p - held else p - held
        more_bytes = run_of(c.outputs, p, t.rank + held, more)
        status = exchange(
            t, c, step, blocks, run_of(c.outputs, p, t.rank, more), (t.rank - held + p) % p,
            blocks + offset, more_bytes, (t.rank + held) % p,
        )
        offset += more_bytes
        held += more
        step += 1
    if status == OK:
        offset = 0
        for i in range(p):
            block = c.outputs[(t.rank + i) % p]
            copy(block.ptr, blocks + offset, block.nbytes)
            offset += block.nbytes
    release_buffer(t, blocks)
    return status


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef int p = t.size
    cdef int held = 1, step = 0, i, status = OK
    cdef size_t whole = run_of(c.inputs, p, 0, p)
    cdef size_t kept = 0, sent, added
    cdef char *sums = <char *>malloc(2 * whole + 1)     # for rank, rank + 1, ...
    cdef char *arriving = sums + whole
    cdef Block own
    if sums == NULL:
        return NO_MEMORY
    for i in range(p):
        own = c.inputs[(t.rank + i) % p]
        contribute(c.op, sums + kept, own.ptr, own.nbytes)
        kept += own.nbytes
    while 2 * held < p:
        held *= 2
    while held > 0 and p > 1 and status == OK:
        sent = kept - run_of(c.inputs, p, t.rank, held)
        kept -= sent
        added = run_of(c.inputs, p, t.rank, min(held, p - held))
        status = exchange(t, c, step, sums + kept, sent, (t.rank + held) % p,
                          arriving, added, (t.rank - held + p) % p)
        if status == OK:
            combine(c.op, sums, sums, arriving, added)
        held //= 2
        step += 1
    if status == OK:
        copy(c.outputs[0].ptr, sums, c.outputs[0].nbytes)
        conclude(c.op, c.outputs[0].ptr, c.outputs[0].nbytes)
    release_buffer(t, sums)
    return status


cdef int all_to_all(Comm *t, Call *c) noexcept nogil:
    cdef int p = t.size
    cdef size_t each = c.outputs[0].nbytes
    cdef size_t half = <size_t>(p + 1) // 2 * each  # what one step sends, at most
    cdef int bit = 1, step = 0, i, status = OK
    cdef size_t packed
    cdef char *blocks = <char *>malloc(p * each + 2 * half + 1)
    cdef char *out = blocks + p * each
    cdef char *into = out + half
    if blocks == NULL:
        return NO_MEMORY
    for i in range(p):      # block i has i ranks to go
        copy(blocks + i * each, c.inputs[(t.rank + i) % p].ptr, each)
    while bit < p and status == OK:
        packed = 0
        for i in range(p):
            if i & bit != 0:
                copy(out + packed, blocks + i * each, each)
                packed += each
        status = exchange(t, c, step, out, packed, (t.rank + bit) % p,
                          into, packed, (t.rank - bit + p) % p)
        packed = 0
        for i in range(p):
            if i & bit != 0:
                copy(blocks + i * each, into + packed, each)
                packed += each
        bit *= 2
        step += 1
    if status == OK:
        for i in range(p):      # a block that travelled i ranks is from rank - i
            copy(c.outputs[(t.rank - i + p) % p].ptr, blocks + i * each, each)
    release_buffer(t, blocks)
    return status


implement(b"bruck", ALL_GATHER, all_gather)
implement(b"bruck", REDUCE_SCATTER, reduce_scatter)
implement(b"bruck", ALL_TO_ALL, all_to_all)

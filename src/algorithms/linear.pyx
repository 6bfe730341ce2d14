"""Linear: the root exchanges a message with every rank directly, in one step.

    gather    bytes sent per rank n         blocks of any size
    scatter   bytes sent by the root n (p-1)    blocks of any size

n is one block. No rank needs to know another's size, and every block travels once, so this is also
the best for long blocks. Latency at the root grows with p.

Three ranks, gather to rank 0 (scatter reverses the arrows):

    rank 1 --> rank 0 <-- rank 2

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), where it is the baseline.
"""
from libc.stdlib cimport free, malloc

from cydist._native.abi cimport GATHER, NO_MEMORY, SCATTER, Call, Comm, Request
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    EARLY_BLOCK_BYTES, complete, copy, exchange, post_recv, post_send,
)


cdef int gather(Comm *t, Call *c) noexcept nogil:
    cdef Request *receives
    cdef int peer, posted = 0, status
    if t.rank != c.root:
        if t.size > 2:
            c.most_early = EARLY_BLOCK_BYTES
        return exchange(t, c, 0, c.inputs[0].ptr, c.inputs[0].nbytes, c.root, NULL, 0, -1)
    receives = <Request *>malloc(t.size * sizeof(Request))
    if receives == NULL:
        return NO_MEMORY
    for peer in range(t.size):
        if peer != c.root:
            post_recv(t, c, &receives[posted], c.outputs[peer].ptr, c.outputs[peer].nbytes, peer,
                      0)
            posted += 1
    copy(c.outputs[c.root].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
    status = complete(t, c, receives, posted)
    free(receives)
    return status


cdef int scatter(Comm *t, Call *c) noexcept nogil:
    cdef Request *sends
    cdef int peer, posted = 0, status
    if t.rank != c.root:
        return exchange(t, c, 0, NULL, 0, -1, c.outputs[0].ptr, c.outputs[0].nbytes, c.root)
    sends = <Request *>malloc(t.size * sizeof(Request))
    if sends == NULL:
        return NO_MEMORY
    for peer in range(t.size):
        if peer != c.root:
            post_send(t, c, &sends[posted], c.inputs[peer].ptr, c.inputs[peer].nbytes, peer, 0)
            posted += 1
    copy(c.outputs[0].ptr, c.inputs[c.root].ptr, c.outputs[0].nbytes)
    status = complete(t, c, sends, posted)
    free(sends)
    return status


implement(b"linear", GATHER, gather)
implement(b"linear", SCATTER, scatter)

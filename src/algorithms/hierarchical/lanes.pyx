"""Lanes: all ranks of a host talk to the other hosts at once, each about its part of the data.

    all_reduce  bytes between hosts per host 2 n (h-1)/h
    reduce      n
    broadcast   n for each host that one sends to

h is the number of hosts: each byte crosses once for each host that needs it, wherever the ranks are
placed. Lane k is the k-th rank of every host; there are as many as the host with the fewest ranks
has, and further ranks are in none. Where that is one, a reduce and a broadcast go by leaders, where
the root itself talks to the other hosts, and so does a short reduce_scatter. An array is cut into a
block for each lane; lane_rings.pyx has the collectives of a block for each rank, and
lane_stretches.pyx a long all_reduce. Best for long calls, where one rank alone does not keep the
wire busy. Partial sums of hosts travel in the array's dtype, and round once for each host;
reductions must commute.

Two hosts of two ranks, all_reduce of blocks 0 and 1:

    host 0   rank 0 a0 a1    ab0  .      abcd0  .        abcd0 abcd1
             rank 1 b0 b1     .  ab1       .  abcd1      abcd0 abcd1
    host 1   rank 2 c0 c1    cd0  .      abcd0  .        abcd0 abcd1
             rank 3 d0 d1     .  cd1       .  abcd1      abcd0 abcd1
                       reduce_scatter  all_reduce   all_gather
                       inside a host   of a lane    inside a host

Source: J. L. Traeff and S. Hunold, "Decomposing MPI collectives for exploiting multi-lane
communication", IEEE CLUSTER 2020.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_REDUCE, BARRIER, BROADCAST, GATHER, NO_MEMORY, OK, REDUCE, Block, Call, Comm, Reduction,
    now_ns, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    SCRATCH_BYTES, Hosts, across_at, call_like, free_scratch, gather_here, hosts_of, in_stretches,
    is_host_sum, lane_blocks, prepared, reduce_here, run_part,
)
from cydist._native.lane_stretches cimport (
    STRETCH_BYTES, all_reduce_in_stretches, has_stretches,
)
from cydist._native.leaders cimport broadcast as broadcast_by_leaders, reduce as reduce_by_leaders
from cydist._native.linux cimport usleep
from cydist._native.sync cimport PAUSE_US

cdef enum:
    LONGEST_NS = 50000000       # that a call waits for bytes which the system has yet to send


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef size_t nbytes = c.inputs[0].nbytes
    cdef Block *given
    cdef Block *sums
    cdef Reduction finishing = prepared(c.op)
    cdef bint alone = is_host_sum(h, c.op)
    cdef Call inner
    cdef int status = NO_MEMORY
    if has_stretches(t, c):
        return all_reduce_in_stretches(t, c)
    given = lane_blocks(h, c.inputs[0], c.op.itemsize)
    sums = lane_blocks(h, c.outputs[0], c.op.itemsize)
    patiently(c)
    if given != NULL and sums != NULL:
        status = OK if alone else reduce_here(t, c, given, &sums[place], nbytes)
    if status == OK and place < h.lanes:
        inner = call_like(c)
        inner.op = &finishing
        inner.inputs = &given[place] if alone else &sums[place]
        inner.outputs = &sums[place]
        status = run_part(across_at(t, place, -1), c, &inner, ALL_REDUCE, sums[0].nbytes)
    if status == OK:
        status = gather_here(t, c, &sums[place], sums, nbytes)
    free_scratch(t, c, given)
    free_scratch(t, c, sums)
    return status


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    if h.lanes == 1:
        return broadcast_by_leaders(t, c)
    if h.count > 2:     # some would pass on a stretch only once they have shared the one before
        return broadcast_stretch(t, c)
    return in_stretches(t, c, STRETCH_BYTES, broadcast_stretch)


cdef int broadcast_stretch(Comm *t, Call *c) noexcept nogil:
    """Send it from the root's host, while the other host shares an earlier one."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef bint here = h.host[c.root] == h.here
    cdef Block data = c.outputs[0]
    cdef Block *blocks = lane_blocks(h, data, 1)
    cdef Call inner
    cdef int status = OK
    if blocks == NULL:
        return NO_MEMORY
    patiently(c)
    if here:
        inner = call_like(c)
        inner.root = h.place[c.root]
        inner.inputs = &data
        inner.outputs = &data
        status = run_part(&h.local, c, &inner, BROADCAST, data.nbytes)
    if status == OK and place < h.lanes:
        inner = call_like(c)
        inner.root = h.host[c.root]
        inner.inputs = &blocks[place]
        inner.outputs = &blocks[place]
        status = run_part(across_at(t, place, -1), c, &inner, BROADCAST, blocks[0].nbytes)
    if status == OK and here and h.count > 2:
        status = send_together(t, c)
    if status == OK and not here:
        status = gather_here(t, c, &blocks[place], blocks, data.nbytes)
    free_scratch(t, c, blocks)
    return status


cdef int send_together(Comm *t, Call *c) noexcept nogil:
    """Wait until the system has sent what all lanes of this host have written.

    A rank that is ahead would send bytes of a later call, which delay those that other lanes still
    send of this one. The next host needs all of these before it passes on a later call.
    """
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef Call inner = call_like(c)
    if place < h.lanes:
        await_sent(&across_at(t, place, -1).comm)
    return run_part(&h.local, c, &inner, BARRIER, 0)


cdef void await_sent(Comm *lane) noexcept nogil:
    """Wait until the system has sent what this rank has written for other hosts. A host that reads
    nothing holds it up for a moment only: calls do not depend on it."""
    cdef int64_t until = now_ns() + LONGEST_NS
    cdef uint64_t left, before, written
    cdef unsigned int nap = 10      # microseconds
    cdef int host
    for host in range(lane.size if lane.unsent != NULL else 0):
        left = lane.unsent(lane, host, &before)
        written = before
        while left > written - before and now_ns() < until:     # what is written now comes later
            usleep(nap)
            nap = min(2 * nap, <unsigned int>PAUSE_US)
            left = lane.unsent(lane, host, &written)


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    if hosts_of(t).lanes == 1:
        return reduce_by_leaders(t, c)
    return in_stretches(t, c, SCRATCH_BYTES, reduce_stretch)


cdef int reduce_stretch(Comm *t, Call *c) noexcept nogil:
    """Reduce it here, and then between the hosts."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef Block *given
    cdef char *memory = NULL
    cdef Block own
    cdef int status = NO_MEMORY
    given = lane_blocks(h, c.inputs[0], c.op.itemsize)
    patiently(c)
    if given != NULL:
        own.nbytes = given[place].nbytes
        memory = <char *>malloc(own.nbytes)
        own.ptr = memory
    if memory != NULL:
        status = reduce_here(t, c, given, &own, c.inputs[0].nbytes)
    if status == OK:
        status = reduce_lanes(t, c, &own, given[0].nbytes)
    free_scratch(t, c, given)
    free_scratch(t, c, memory)
    return status


cdef int reduce_lanes(Comm *t, Call *c, Block *own, size_t longest) noexcept nogil:
    """Reduce the blocks of the hosts' sums to the root's host, and gather them at the root."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank
    cdef bint here = h.host[c.root] == h.here
    cdef Reduction finishing = prepared(c.op)
    cdef Block *blocks = NULL
    cdef Call inner
    cdef int status = OK
    if place < h.lanes:
        inner = call_like(c)
        inner.op = &finishing
        inner.root = h.host[c.root]
        inner.inputs = own
        inner.outputs = own if here else NULL
        status = run_part(across_at(t, place, -1), c, &inner, REDUCE, longest)
    if status != OK or not here:
        return status
    inner = call_like(c)
    inner.root = h.place[c.root]
    inner.inputs = own
    if t.rank == c.root:
        blocks = lane_blocks(h, c.outputs[0], c.op.itemsize)
        inner.outputs = blocks
        if blocks == NULL:
            return NO_MEMORY
    status = run_part(&h.local, c, &inner, GATHER, 0)
    free_scratch(t, c, blocks)
    return status


implement(b"lanes", BROADCAST, broadcast)
implement(b"lanes", ALL_REDUCE, all_reduce)
implement(b"lanes", REDUCE, reduce)

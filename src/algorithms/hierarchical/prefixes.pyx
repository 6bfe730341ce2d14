"""Prefixes: each host adds up its ranks, and gets the sum of the hosts before it.

    scan, exscan "leaders"  messages between hosts per host log2 h      bytes per host n log2 h
    scan, exscan "lanes"    n / l / segment for each of l lanes         n

For hosts whose ranks are consecutive: then a prefix crosses only where the host changes. h is the
number of hosts, and l the fewest ranks of one. The last rank of a host has the sum of its host;
with "leaders" the last ranks run an exscan. With "lanes" the ranks of a host each have a block of
that sum. A block goes from host to host in segments, each of which a host adds to and hands on, so
long arrays cross all hosts at once. What is before a host's own sum is on its left, so reductions
need not commute between hosts.

Two hosts of two ranks, scan:

    host 0   rank 0 a     a                 a
             rank 1 b     ab    ab ->       ab
    host 1   rank 2 c     c        ab       abc
             rank 3 d     cd    -> ab       abcd
                       scan   between   broadcast
                              hosts

Source: J. L. Traeff and S. Hunold, "Decomposing MPI collectives for exploiting multi-lane
communication", IEEE CLUSTER 2020.
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, BROADCAST, EXSCAN, NO_MEMORY, OK, REDUCE_SCATTER, SCAN, Block, Call, Comm,
    Reduction, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    LAST_PLACE, SCRATCH_BYTES, Hosts, Part, across_at, call_like, free_scratch, hosts_of,
    in_stretches, run_part, tell_end, unfinished,
)
from cydist._native.pipeline cimport (
    Pipe, block_of, combine, conclude, contribute, copy, pipe_close, pipe_open, pipe_post,
    pipe_take, segment_of, segment_size, segments_in,
)


ctypedef struct Prefix:         # the memory of a call
    char *hosts                 # the sum of the hosts before this one; invalid on the first host
    Block own                   # this host's sum; with "lanes" this rank's block of it
    Block *blocks               # with "lanes": of each rank of this host


ctypedef int (*Cross)(Comm *t, Call *c, Prefix *s, bint inclusive) noexcept nogil


cdef inline Reduction bare(const Reduction *op) noexcept nogil:
    """Return a reduction of sums, which are finished later."""
    cdef Reduction inner = unfinished(op)
    inner.prepare = NULL
    return inner


cdef int run(Comm *t, Call *c, bint inclusive, size_t room, Cross cross) noexcept nogil:
    """Run a scan or exscan whose rank needs `room` bytes for this host's sum."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = c.inputs[0].nbytes
    cdef int size = h.local.comm.size
    cdef Prefix s
    cdef char *memory = <char *>malloc(size * sizeof(Block) + room + nbytes)
    cdef int status
    if memory == NULL:
        return NO_MEMORY
    s.blocks = <Block *>memory
    s.own = Block(<char *>(s.blocks + size), room)
    s.hosts = s.own.ptr + room
    patiently(c)
    status = cross(t, c, &s, inclusive)
    if status == OK:
        finish(t, c, &s, inclusive)
    free_scratch(t, c, memory)
    return status


cdef int scan_here(Comm *t, Call *c, bint inclusive) noexcept nogil:
    """Write the sum of this host's ranks before this one, or up to it, into the result. An exscan
    leaves that of the host's first rank as it is."""
    cdef Hosts *h = hosts_of(t)
    cdef Reduction partial = unfinished(c.op)
    cdef Call inner = call_like(c)
    if h.local.comm.size == 1:
        if inclusive:
            contribute(c.op, c.outputs[0].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
        return OK
    inner.op = &partial
    inner.inputs = c.inputs
    inner.outputs = c.outputs
    return run_part(&h.local, c, &inner, SCAN if inclusive else EXSCAN, c.inputs[0].nbytes)


cdef void finish(Comm *t, Call *c, Prefix *s, bint inclusive) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block result = c.outputs[0]
    if t.rank == 0 and not inclusive:
        return                  # exscan leaves rank 0's output unchanged
    if not inclusive and h.local.comm.rank == 0:
        copy(result.ptr, s.hosts, result.nbytes)
    elif h.here > 0:
        combine(c.op, result.ptr, s.hosts, result.ptr, result.nbytes)
    conclude(c.op, result.ptr, result.nbytes)


cdef int by_leaders(Comm *t, Call *c, Prefix *s, bint inclusive) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Reduction sums = bare(c.op)
    cdef size_t nbytes = c.inputs[0].nbytes
    cdef Block hosts = Block(s.hosts, nbytes)
    cdef int last = h.local.comm.size - 1
    cdef bint is_last = h.local.comm.rank == last
    cdef int status
    cdef Call inner
    if is_last and not inclusive:   # before the result takes its place
        contribute(c.op, s.own.ptr, c.inputs[0].ptr, nbytes)
    status = scan_here(t, c, inclusive)
    if status == OK and is_last:
        if inclusive:
            s.own = c.outputs[0]
        elif last > 0:
            combine(c.op, s.own.ptr, c.outputs[0].ptr, s.own.ptr, nbytes)
        inner = call_like(c)
        inner.op = &sums
        inner.inputs = &s.own
        inner.outputs = &hosts
        status = run_part(across_at(t, LAST_PLACE, -1), c, &inner, EXSCAN, nbytes)
    if status == OK and h.here > 0 and last > 0:
        inner = call_like(c)
        inner.root = last
        inner.inputs = &hosts
        inner.outputs = &hosts
        status = run_part(&h.local, c, &inner, BROADCAST, nbytes)
    return status


cdef void cut(Comm *t, Call *c, char *memory, Block *blocks) noexcept nogil:
    """Cut an array in memory into a block for each lane; ranks beyond have none."""
    cdef Hosts *h = hosts_of(t)
    cdef Block whole = Block(memory, c.inputs[0].nbytes)
    cdef int k
    for k in range(h.local.comm.size):
        blocks[k] = Block(whole.ptr + whole.nbytes, 0)
        if k < h.lanes:
            blocks[k] = block_of(whole, k, h.lanes, c.op.itemsize)


cdef int by_lanes(Comm *t, Call *c, Prefix *s, bint inclusive) noexcept nogil:
    """Sum up what the next host needs, and scan while it travels."""
    cdef Hosts *h = hosts_of(t)
    cdef int status = OK
    if h.here + 1 < h.count:
        cut(t, c, c.inputs[0].ptr, s.blocks)
        s.own.nbytes = s.blocks[h.local.comm.rank].nbytes
        status = sum_here(t, c, s)
    if status == OK and h.here == 0:
        status = hand_on(t, c, s)
    if status == OK:
        status = scan_here(t, c, inclusive)
    if status == OK and h.here > 0:
        status = hand_on(t, c, s)
    if status == OK and h.here > 0 and h.local.comm.size > 1:
        status = gather_prefix(t, c, s, c.inputs[0].nbytes)
    return status


cdef int sum_here(Comm *t, Call *c, Prefix *s) noexcept nogil:
    """Reduce this host's contributions, a block of the sum to each lane."""
    cdef Hosts *h = hosts_of(t)
    cdef Reduction partial = unfinished(c.op)
    cdef Call inner = call_like(c)
    inner.op = &partial
    inner.inputs = s.blocks
    inner.outputs = &s.own
    return run_part(&h.local, c, &inner, REDUCE_SCATTER, c.inputs[0].nbytes)


cdef int hand_on(Comm *t, Call *c, Prefix *s) noexcept nogil:
    """Receive a lane's block of the prefix from the host before, and send it with this host's sum
    to the next one."""
    cdef Hosts *h = hosts_of(t)
    cdef Part *lane = across_at(t, h.local.comm.rank, -1)
    cdef int source = h.here - 1
    cdef int target = h.here + 1 if h.here + 1 < h.count else -1
    cdef size_t segment, total, i, taken
    cdef Block prefix
    cdef Call inner = call_like(c)
    cdef Block own, into
    cdef Pipe pipe
    cdef int status
    cut(t, c, s.hosts, s.blocks)
    if h.local.comm.rank >= h.lanes:
        return OK
    prefix = s.blocks[h.local.comm.rank]
    segment = segment_size(c, c.op.itemsize, prefix.nbytes, 1)
    total = segments_in(prefix.nbytes, segment)
    pipe_open(&pipe, c, total)
    for i in range(total + pipe.depth - 1):
        if i < total and pipe_post(&lane.comm, &inner, &pipe, i, Block(NULL, 0), -1,
                                   segment_of(prefix, i, segment), source) != OK:
            break
        if i + 1 < pipe.depth:
            continue
        taken = i + 1 - pipe.depth
        if pipe_take(&lane.comm, &inner, &pipe, taken) != OK:
            break
        into = segment_of(prefix, taken, segment)
        own = segment_of(s.own, taken, segment)
        if source >= 0 and target >= 0:
            combine(c.op, own.ptr, into.ptr, own.ptr, own.nbytes)
        if target >= 0 and pipe_post(&lane.comm, &inner, &pipe, taken, own, target,
                                     Block(NULL, 0), -1) != OK:
            break
    status = pipe_close(&lane.comm, &inner, &pipe)
    tell_end(lane, c, &inner, status)
    return status


cdef int gather_prefix(Comm *t, Call *c, Prefix *s, size_t nbytes) noexcept nogil:
    """Give the ranks of this host the blocks of the prefix."""
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    inner.inputs = &s.blocks[h.local.comm.rank]
    inner.outputs = s.blocks
    return run_part(&h.local, c, &inner, ALL_GATHER, nbytes)


cdef int stretch_by_leaders(Comm *t, Call *c) noexcept nogil:
    cdef bint inclusive = c.collective == SCAN
    return run(t, c, inclusive, 0 if inclusive else c.inputs[0].nbytes, by_leaders)


cdef int stretch_by_lanes(Comm *t, Call *c) noexcept nogil:
    # The longest block of a lane is the first.
    cdef Block longest = block_of(c.inputs[0], 0, hosts_of(t).lanes, c.op.itemsize)
    return run(t, c, c.collective == SCAN, longest.nbytes, by_lanes)


cdef int leaders(Comm *t, Call *c) noexcept nogil:
    return in_stretches(t, c, SCRATCH_BYTES, stretch_by_leaders)


cdef int lanes(Comm *t, Call *c) noexcept nogil:
    return in_stretches(t, c, SCRATCH_BYTES, stretch_by_lanes)


implement(b"leaders", SCAN, leaders)
implement(b"leaders", EXSCAN, leaders)
implement(b"lanes", SCAN, lanes)
implement(b"lanes", EXSCAN, lanes)

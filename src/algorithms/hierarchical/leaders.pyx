"""Leaders: the ranks of a host meet, and one of them talks to the other hosts for all.

    all_reduce      messages between hosts per host log2 h      bytes per host n log2 h
    reduce          1                                           n
    broadcast       1 for each host that one sends to           n for each of them
    all_gather      log2 h                                      what the other hosts give
    reduce_scatter  log2 h                                      what goes to the other hosts
    barrier         log2 h                                      0

h is the number of hosts; the messages are those of the algorithm that the leaders run among
themselves. The leader of a host is its lowest rank, or the root. Best for short calls, where the
number of messages counts. Inside a host the ranks take what their memory offers; the sums of hosts
are combined in the order of the hosts' lowest ranks, so reductions must commute.

A message costs its sender a system call, the most of a short call's time. So a short broadcast to
few hosts leaves the root's host by several ranks: each sends what it got from the root to one host.

Two hosts of two ranks, all_reduce:

    host 0   rank 0 a     ab    ab <-> cd     abcd    abcd
             rank 1 b                                 abcd
    host 1   rank 2 c     cd    cd <-> ab     abcd    abcd
             rank 3 d                                 abcd
                       reduce   between    broadcast
                                 hosts

Source: T. Kielmann, R. Hofman, H. Bal, A. Plaat and R. Bhoedjang, "MagPIe: MPI's collective
communication operations for clustered wide area systems", PPoPP 1999.
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST, NO_MEMORY, OK, REDUCE, REDUCE_SCATTER, Block, Call,
    Comm, Reduction, Request, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    SCRATCH_BYTES, Hosts, across_at, call_like, free_scratch, hosts_of, in_stretches, is_host_sum,
    member_at, members_on, prepared, run_part, unfinished,
)
from cydist._native.pipeline cimport complete, copy, exchange, post_send, total


cdef enum:                      # of a broadcast in which several ranks send to other hosts
    FEW_HOSTS = 4               # and more than two
    SHORT_BYTES = 8192


cdef inline int leader_place(const Hosts *h, int root) noexcept nogil:
    """Return the place of this host's leader."""
    return h.place[root] if root >= 0 and h.host[root] == h.here else 0


cdef int share(Comm *t, Call *c, Block data) noexcept nogil:
    """Hand the leader's data to the ranks of its host."""
    return share_from(t, c, leader_place(hosts_of(t), c.root), data)


cdef int share_from(Comm *t, Call *c, int place, Block data) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    inner.root = place
    inner.inputs = &data
    inner.outputs = &data
    return run_part(&h.local, c, &inner, BROADCAST, data.nbytes)


cdef int collect(Comm *t, Call *c, const Block *own, const Block *result) noexcept nogil:
    """Reduce the contributions of this host to its leader."""
    cdef Hosts *h = hosts_of(t)
    cdef Reduction partial = unfinished(c.op)
    cdef Call inner = call_like(c)
    inner.op = &partial
    inner.root = leader_place(h, c.root)
    inner.inputs = own
    inner.outputs = result if h.local.comm.rank == inner.root else NULL
    return run_part(&h.local, c, &inner, REDUCE, own.nbytes)


cdef int all_reduce(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Reduction sums = prepared(c.op)
    cdef bint alone = is_host_sum(h, c.op)
    cdef Call inner
    cdef int status = OK
    patiently(c)
    if not alone:
        status = collect(t, c, c.inputs, c.outputs)
    if status == OK and h.local.comm.rank == 0:
        inner = call_like(c)
        inner.op = &sums
        inner.inputs = c.inputs if alone else c.outputs
        inner.outputs = c.outputs
        status = run_part(across_at(t, 0, -1), c, &inner, ALL_REDUCE, c.outputs[0].nbytes)
    return share(t, c, c.outputs[0]) if status == OK else status


cdef bint needs_memory(const Hosts *h, const Call *c) noexcept nogil:
    """Return whether the sum of a host has no place in the result, as it has at the root."""
    cdef int host
    for host in range(h.count):
        if host != h.host[c.root] and (members_on(h, host) > 1 or c.op.prepare != NULL):
            return True
    return False


cdef int reduce(Comm *t, Call *c) noexcept nogil:
    if needs_memory(hosts_of(t), c):
        return in_stretches(t, c, SCRATCH_BYTES, reduce_stretch)
    return reduce_stretch(t, c)


cdef int reduce_stretch(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef bint leads = h.local.comm.rank == leader_place(h, c.root)
    cdef bint alone = is_host_sum(h, c.op)
    cdef Reduction sums = prepared(c.op)
    cdef Block sum = c.inputs[0]
    cdef char *memory = NULL
    cdef Call inner
    cdef int status = OK
    patiently(c)
    if not alone and t.rank == c.root:
        sum = c.outputs[0]
    elif not alone and leads:
        memory = <char *>malloc(sum.nbytes)
        sum.ptr = memory
        if memory == NULL:
            return NO_MEMORY
    if not alone:
        status = collect(t, c, c.inputs, &sum)
    if status == OK and leads:
        inner = call_like(c)
        inner.op = &sums
        inner.root = h.host[c.root]
        inner.inputs = &sum
        inner.outputs = c.outputs if t.rank == c.root else NULL
        status = run_part(across_at(t, 0, c.root), c, &inner, REDUCE, sum.nbytes)
    free_scratch(t, c, memory)
    return status


cdef int broadcast(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner
    cdef int status = OK
    patiently(c)
    if 2 < h.count <= FEW_HOSTS and c.outputs[0].nbytes <= SHORT_BYTES:
        return broadcast_to_few(t, c)
    if h.local.comm.rank == leader_place(h, c.root):
        inner = call_like(c)
        inner.root = h.host[c.root]
        inner.inputs = c.outputs
        inner.outputs = c.outputs
        status = run_part(across_at(t, 0, c.root), c, &inner, BROADCAST, c.outputs[0].nbytes)
    return share(t, c, c.outputs[0]) if status == OK else status


cdef inline int sender_to(const Hosts *h, int root, int host) noexcept nogil:
    """Return the rank beside the root that sends to a host: the root itself to the next one."""
    cdef int source = h.host[root], nth = (host - source - 1 + h.count) % h.count
    return member_at(h, source, (h.place[root] + nth) % members_on(h, source))


cdef inline int receiver_on(const Hosts *h, int root, int host) noexcept nogil:
    """Return the rank of a host that gets what is sent there: that of the sender's lane."""
    return member_at(h, host, h.place[sender_to(h, root, host)] % members_on(h, host))


cdef int broadcast_to_few(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block data = c.outputs[0]
    cdef int source = h.host[c.root], holder = c.root, posted = 0, status = OK, host
    cdef Request sends[FEW_HOSTS]
    if h.here != source:
        holder = receiver_on(h, c.root, h.here)
        if t.rank == holder:
            status = exchange(t, c, 0, NULL, 0, -1, data.ptr, data.nbytes,
                              sender_to(h, c.root, h.here))
    if status == OK:
        status = share_from(t, c, h.place[holder], data)
    if status != OK or h.here != source:
        return status
    for host in range(h.count):
        if host != source and t.rank == sender_to(h, c.root, host):
            post_send(t, c, &sends[posted], data.ptr, data.nbytes, receiver_on(h, c.root, host), 0)
            posted += 1
    return complete(t, c, sends, posted)


cdef int barrier(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    cdef int status
    patiently(c)
    inner = call_like(c)
    status = run_part(&h.local, c, &inner, BARRIER, 0)
    if status == OK and h.local.comm.rank == 0:
        inner = call_like(c)
        status = run_part(across_at(t, 0, -1), c, &inner, BARRIER, 0)
    if status == OK:            # no rank leaves before the leader is back
        inner = call_like(c)
        status = run_part(&h.local, c, &inner, BARRIER, 0)
    return status


# Blocks: the leaders exchange those of a host as one

cdef size_t lay_bundles(Comm *t, const Block *blocks, char *memory, Block *bundles) noexcept nogil:
    """Lay the blocks of all members into memory, host after host; return their bytes."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = 0
    cdef int host, k
    for host in range(h.count):
        bundles[host].ptr = memory + nbytes
        for k in range(h.first[host], h.first[host + 1]):
            nbytes += blocks[h.members[k]].nbytes
        bundles[host].nbytes = memory + nbytes - bundles[host].ptr
    return nbytes


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = total(c.outputs, t.size)
    cdef Block *bundles = <Block *>malloc((h.count + t.size) * sizeof(Block) + nbytes)
    cdef Block whole
    cdef int status
    if bundles == NULL:
        return NO_MEMORY
    patiently(c)
    whole.ptr = <char *>(bundles + h.count + t.size)
    whole.nbytes = lay_bundles(t, c.outputs, whole.ptr, bundles)
    status = gather_bundles(t, c, bundles, bundles + h.count, whole)
    if status == OK:
        unpack(t, c.outputs, whole.ptr)
    free_scratch(t, c, bundles)
    return status


cdef int gather_bundles(Comm *t, Call *c, Block *bundles, Block *here,
                        Block whole) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    cdef char *at = bundles[h.here].ptr
    cdef int k, status
    for k in range(h.local.comm.size):
        here[k] = Block(at, c.outputs[member_at(h, h.here, k)].nbytes)
        at += here[k].nbytes
    inner.inputs = c.inputs
    inner.outputs = here
    status = run_part(&h.local, c, &inner, ALL_GATHER, bundles[h.here].nbytes)
    if status == OK and h.local.comm.rank == 0:
        inner = call_like(c)
        inner.inputs = &bundles[h.here]
        inner.outputs = bundles
        status = run_part(across_at(t, 0, -1), c, &inner, ALL_GATHER, whole.nbytes)
    return share(t, c, whole) if status == OK else status


cdef void unpack(Comm *t, const Block *blocks, const char *memory) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block block
    cdef int k
    for k in range(t.size):
        block = blocks[h.members[k]]
        copy(block.ptr, memory, block.nbytes)
        memory += block.nbytes


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = total(c.inputs, t.size)
    cdef Block *bundles = <Block *>malloc(h.count * sizeof(Block) + 2 * nbytes)
    cdef Block whole
    cdef char *at
    cdef int k, status
    if bundles == NULL:
        return NO_MEMORY
    patiently(c)
    whole = Block(<char *>(bundles + h.count), nbytes)
    at = whole.ptr
    for k in range(t.size):
        copy(at, c.inputs[h.members[k]].ptr, c.inputs[h.members[k]].nbytes)
        at += c.inputs[h.members[k]].nbytes
    lay_bundles(t, c.inputs, at, bundles)
    status = scatter_bundles(t, c, bundles, whole, Block(at, nbytes))
    if status == OK:
        at = bundles[h.here].ptr
        for k in range(h.place[t.rank]):
            at += c.inputs[member_at(h, h.here, k)].nbytes
        copy(c.outputs[0].ptr, at, c.outputs[0].nbytes)
    free_scratch(t, c, bundles)
    return status


cdef int scatter_bundles(Comm *t, Call *c, Block *bundles, Block whole, Block sums) noexcept nogil:
    """Reduce all blocks, and leave those of this host in its bundle on all its ranks."""
    cdef Hosts *h = hosts_of(t)
    cdef Reduction finishing = prepared(c.op)
    cdef Block own = bundles[h.here]
    cdef Call inner
    cdef int status = collect(t, c, &whole, &sums)
    if status == OK and h.local.comm.rank == 0:
        inner = call_like(c)
        inner.op = &finishing
        inner.inputs = bundles
        inner.outputs = &own
        status = run_part(across_at(t, 0, -1), c, &inner, REDUCE_SCATTER, sums.nbytes)
    return share(t, c, own) if status == OK else status


implement(b"leaders", BROADCAST, broadcast)
implement(b"leaders", ALL_REDUCE, all_reduce)
implement(b"leaders", REDUCE, reduce)
implement(b"leaders", ALL_GATHER, all_gather)
implement(b"leaders", REDUCE_SCATTER, reduce_scatter)
implement(b"leaders", BARRIER, barrier)

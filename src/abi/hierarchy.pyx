"""Parts of groups; cydist/_native/hierarchy.pxd explains them."""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, OK, REDUCE_SCATTER, Algorithm, Block, Call, Comm,
)
from cydist._native.algorithm_table cimport (
    ADAPTIVE, Choice, ChosenAlgorithms, choices_for_part, size_class,
)
from cydist._native.pipeline cimport block_of, release_buffer, segment_of, segments_in


ctypedef struct HostsMemory:    # what `new_hosts` allocates, with the arrays behind it
    Hosts hosts                 # must be the first member
    int *across_peers
    int *across_ranks
    int across_place            # for which `across` is filled in; -1: none yet
    int across_root


cdef int place_on_hosts(Comm *t, hosts) except -1:
    cdef int *host_of
    cdef int i
    if not 1 < len(set(hosts)) < t.size:
        return 0
    host_of = <int *>malloc(t.size * sizeof(int))
    if host_of == NULL:
        raise MemoryError
    for i in range(t.size):
        host_of[i] = hosts[i]
    t.hosts = new_hosts(t, host_of)
    free(host_of)
    if t.hosts == NULL:
        raise MemoryError
    return 0


cdef int prepare_parts(Hosts *h, choose, segment_bytes) except -1:
    h.across.between_hosts = True
    prepare_part(&h.local, h.local.comm.size, choose, segment_bytes)
    prepare_part(&h.across, h.count, choose, segment_bytes)
    return 0


cdef int prepare_part(Part *part, int ranks, choose, segment_bytes) except -1:
    cdef bint windows = part.comm.windows != NULL
    cdef ChosenAlgorithms chosen = choices_for_part(ranks, windows, part.between_hosts, choose,
                                                    segment_bytes(ranks, windows))
    part.rows = chosen.rows         # which live as long as the process
    part.segment_bytes = chosen.segment_bytes
    return 0


cdef Hosts *new_hosts(Comm *t, const int *host_of) noexcept nogil:
    cdef int p = t.size
    cdef HostsMemory *made = <HostsMemory *>calloc(
        1, sizeof(HostsMemory) + (7 * <size_t>p + 1) * sizeof(int))
    cdef int *host
    cdef int *place
    cdef int *first
    cdef int *members
    cdef int *peers
    cdef int i, j, k, count = 0
    if made == NULL:
        return NULL
    host = <int *>(made + 1)
    place = host + p
    members = place + p
    peers = members + p
    made.across_peers = peers + p
    made.across_ranks = made.across_peers + p
    first = made.across_ranks + p
    for i in range(p):          # find each rank's host by an earlier member of it
        host[i] = -1
    for i in range(p):
        if host[i] >= 0:
            continue
        made.hosts.lanes = p if count == 0 else made.hosts.lanes
        k = first[count]
        for j in range(i, p):
            if host_of[j] == host_of[i]:
                host[j] = count
                place[j] = k - first[count]
                members[k] = j
                k += 1
        made.hosts.lanes = min(made.hosts.lanes, k - first[count])
        count += 1
        first[count] = k
    made.hosts.count = count
    made.hosts.consecutive = True
    for k in range(p):
        if members[k] != k:
            made.hosts.consecutive = False
    made.hosts.here = host[t.rank]
    made.hosts.host = host
    made.hosts.place = place
    made.hosts.first = first
    made.hosts.members = members
    made.across_place = -1
    for k in range(first[host[t.rank]], first[host[t.rank] + 1]):
        peers[k] = t.peers[members[k]]
    lay_part(&made.hosts.local, t, place[t.rank], members_on(&made.hosts, made.hosts.here),
             peers + first[made.hosts.here], members + first[made.hosts.here])
    return &made.hosts


cdef void lay_part(Part *part, Comm *t, int rank, int size, const int *peers,
                   const int *in_whole) noexcept nogil:
    part.comm = t[0]
    part.comm.whole = t
    part.comm.hosts = NULL
    part.comm.in_whole = in_whole
    part.comm.peers = peers
    part.comm.rank = rank
    part.comm.size = size
    part.comm.windows = NULL
    part.comm.farewells = NULL      # those of the whole count
    part.comm.contradicted = NULL   # whose answer would be a rank of the whole
    part.comm.left_over = NULL
    part.comm.compare = NULL
    part.comm.drain = NULL
    part.comm.library_comm = 0


cdef void free_hosts(Hosts *hosts) noexcept nogil:
    free(hosts)


cdef Part *across_at(Comm *t, int place, int root) noexcept nogil:
    cdef HostsMemory *made = <HostsMemory *>t.hosts
    cdef Hosts *h = &made.hosts
    cdef int host, rank
    if made.across_place == place and made.across_root == root:
        return &h.across
    for host in range(h.count):
        rank = member_at(h, host, members_on(h, host) - 1 if place == LAST_PLACE else place)
        if root >= 0 and h.host[root] == host:
            rank = root
        made.across_ranks[host] = rank
        made.across_peers[host] = t.peers[rank]
    lay_part(&h.across, t, h.here, h.count, made.across_peers, made.across_ranks)
    made.across_place = place
    made.across_root = root
    return &h.across


cdef Call call_like(const Call *c) noexcept nogil:
    cdef Call inner
    memset(&inner, 0, sizeof(Call))
    inner.op = c.op
    inner.root = -1
    inner.tag = c.tag
    inner.deadline_ns = c.deadline_ns
    inner.fingerprint = c.fingerprint
    inner.failed_peer = -1
    inner.failed_step = -1
    return inner


cdef int run_part(Part *part, Call *c, Call *inner, int collective, size_t nbytes) noexcept nogil:
    cdef const Choice *choice = &part.rows[collective][size_class(nbytes)]
    cdef int status
    if inner.segment_bytes == 0:
        inner.segment_bytes = part.segment_bytes
    if part.between_hosts and collective in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        inner.depth = exchange_depth(inner.segment_bytes)
    inner.collective = collective
    inner.fallback = choice.fallback
    inner.adaptive = choice.entry.traits & ADAPTIVE
    status = choice.entry.run(&part.comm, inner)
    tell_end(part, c, inner, status)
    return status


cdef void tell_end(const Part *part, Call *c, const Call *inner, int status) noexcept nogil:
    if status != OK:
        c.failed_peer = inner.failed_peer
        if inner.failed_peer >= 0:
            c.failed_peer = part.comm.in_whole[inner.failed_peer]
        c.failed_step = inner.failed_step
        c.theirs = inner.theirs
        c.theirs_bytes = inner.theirs_bytes
        c.our_bytes = inner.our_bytes
        c.fingerprint = inner.fingerprint
    c.still_accessed = c.still_accessed or inner.still_accessed


cdef int reduce_here(Comm *t, Call *c, const Block *given, Block *own,
                     size_t nbytes) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Reduction partial = unfinished(c.op)
    cdef Call inner = call_like(c)
    inner.op = &partial
    inner.inputs = given
    inner.outputs = own
    return run_part(&h.local, c, &inner, REDUCE_SCATTER, nbytes)


cdef int gather_here(Comm *t, Call *c, const Block *own, const Block *blocks,
                     size_t nbytes) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    inner.inputs = own
    inner.outputs = blocks
    return run_part(&h.local, c, &inner, ALL_GATHER, nbytes)


cdef Block *lane_blocks(const Hosts *h, Block whole, size_t unit) noexcept nogil:
    cdef Block *blocks = <Block *>malloc(h.local.comm.size * sizeof(Block))
    cdef int k
    if blocks != NULL:
        for k in range(h.local.comm.size):
            blocks[k] = Block(whole.ptr + whole.nbytes, 0)
            if k < h.lanes:
                blocks[k] = block_of(whole, k, h.lanes, unit)
    return blocks


cdef int in_stretches(Comm *t, Call *c, size_t nbytes, Algorithm run) noexcept nogil:
    cdef const Block *inputs = c.inputs
    cdef const Block *outputs = c.outputs
    cdef Block given, result
    cdef size_t unit = c.op.itemsize if c.op != NULL else 1, i
    cdef int status = OK
    nbytes = max(nbytes, <size_t>hosts_of(t).lanes * PART_BYTES) // unit * unit
    for i in range(segments_in(inputs[0].nbytes, nbytes)):
        given = segment_of(inputs[0], i, nbytes)
        c.inputs = &given
        if outputs != NULL:
            result = segment_of(outputs[0], i, nbytes)
            c.outputs = &result
        status = run(t, c)
        if status != OK:
            break
    c.inputs = inputs
    c.outputs = outputs
    return status


cdef void free_scratch(Comm *t, const Call *c, void *memory) noexcept nogil:
    if not c.still_accessed:
        release_buffer(t, memory)

"""All-to-all over hosts: short blocks that one host's ranks have for another's are one message.

    all_to_all  messages between two hosts: one each way

Every block crosses once, to the host that needs it. The blocks for a pair of hosts that have more
than BUNDLED_BYTES together go straight from rank to rank: "lanes" sends all so, and "leaders"
bundles all of a call whose size every rank knows. Inside a host the ranks use what their memory
offers. Bundles are best for short blocks, where the number of messages counts.

Which blocks are bundled follows from their sizes. Unless all are known to be even, the ranks of a
host first tell each other theirs, and the other host's ranks find the same sum. Then a bundle is
headed by the sizes of its blocks, so that ranks that disagree about one find that out.

Source: the two-level collectives of T. Kielmann, R. Hofman, H. Bal, A. Plaat and R. Bhoedjang,
"MagPIe: MPI's collective communication operations for clustered wide area systems", PPoPP 1999.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, ALL_TO_ALL, EVEN, GATHER, NO_MEMORY, OK, SCATTER, Block, Call, Comm, Request,
    patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    Hosts, call_like, free_scratch, hosts_of, leader_of, member_at, members_on, run_part, size_at,
    write_size, wrong_size,
)
from cydist._native.pipeline cimport complete, copy, post_recv, post_send, withdraw


cdef enum:
    BUNDLED_BYTES = 8192        # blocks between two hosts up to this many are one message


ctypedef struct Exchange:       # what a call knows and moves
    uint64_t *sizes             # [local rank][0: sent, 1: received][rank]: bytes
    bint *sends_bundle          # [host]
    bint *gets_bundle
    size_t sent, received       # bytes of this host's bundles
    size_t own_sent, own_received   # and of this rank's part of them
    char *outgoing              # bundles, host after host; in one, by rank here, then by rank there
    char *incoming              # the same, by rank there, then by rank here
    char *given                 # the ranks' parts of them, rank after rank
    Block *blocks
    Request *requests
    int posted


cdef int tell_sizes(Comm *t, Call *c, uint64_t *own, uint64_t *all_sizes, int count,
                    Block *blocks) noexcept nogil:
    """Give the ranks of this host some sizes, and get theirs."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = count * sizeof(uint64_t)
    cdef Call inner = call_like(c)
    cdef Block mine = Block(<char *>own, nbytes)
    cdef int k
    for k in range(h.local.comm.size):
        blocks[k] = Block(<char *>(all_sizes + k * count), nbytes)
    inner.inputs = &mine
    inner.outputs = blocks
    return run_part(&h.local, c, &inner, ALL_GATHER, h.local.comm.size * nbytes)


cdef int run_rooted(Comm *t, Call *c, int collective, int root, const Block *inputs,
                    const Block *outputs) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Call inner = call_like(c)
    inner.root = root
    inner.inputs = inputs
    inner.outputs = outputs
    return run_part(&h.local, c, &inner, collective, 0)


cdef inline size_t size_of(Comm *t, const Exchange *s, int k, int direction,
                           int rank) noexcept nogil:
    return s.sizes[(2 * k + direction) * t.size + rank]


cdef size_t between(Comm *t, const Exchange *s, int host, int direction) noexcept nogil:
    """Return the bytes that this host's ranks send to another's, or receive from them."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = 0
    cdef int k, j
    for k in range(h.local.comm.size):
        for j in range(h.first[host], h.first[host + 1]):
            nbytes += size_of(t, s, k, direction, h.members[j])
    return nbytes


cdef inline size_t sizes_between(const Call *c, const Hosts *h, int host) noexcept nogil:
    """Return the bytes of the sizes before a bundle, which not all ranks know."""
    if c.fingerprint.flags & EVEN:
        return 0
    return h.local.comm.size * members_on(h, host) * sizeof(uint64_t)


cdef int all_to_all(Comm *t, Call *c, bint may_bundle) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int size = h.local.comm.size, status
    cdef size_t sizes = 2 * <size_t>size * t.size
    cdef Exchange s
    cdef char *memory = <char *>malloc(
        (sizes + 2 * t.size) * sizeof(uint64_t) + 2 * h.count * sizeof(bint)
        + (t.size + size) * sizeof(Block) + 2 * t.size * sizeof(Request))
    if memory == NULL:
        return NO_MEMORY
    s.requests = <Request *>memory
    s.blocks = <Block *>(s.requests + 2 * t.size)
    s.sizes = <uint64_t *>(s.blocks + t.size + size)
    s.sends_bundle = <bint *>(s.sizes + sizes + 2 * t.size)
    s.gets_bundle = s.sends_bundle + h.count
    s.posted = 0
    s.outgoing = NULL
    patiently(c)
    status = learn_sizes(t, c, &s)
    if status == OK:
        choose_bundles(t, c, &s, may_bundle)
        s.outgoing = <char *>malloc(s.sent + s.received + max(s.sent, s.received)
                                    + s.own_sent + s.own_received + 1)
        status = OK if s.outgoing != NULL else NO_MEMORY
    if status == OK:
        status = cross(t, c, &s)
    if status != OK:
        withdraw(t, s.requests, s.posted)
    free_scratch(t, c, s.outgoing)
    free_scratch(t, c, memory)
    return status


cdef int learn_sizes(Comm *t, Call *c, Exchange *s) noexcept nogil:
    """Fill in the sizes of all blocks that this host's ranks send and receive."""
    cdef Hosts *h = hosts_of(t)
    cdef int size = h.local.comm.size
    cdef size_t count = 2 * <size_t>t.size
    cdef uint64_t *own = s.sizes + size * count
    cdef size_t i
    cdef int rank
    if c.fingerprint.flags & EVEN:
        for i in range(size * count):
            s.sizes[i] = c.inputs[0].nbytes
        return OK
    for rank in range(t.size):
        own[rank] = c.inputs[rank].nbytes
        own[t.size + rank] = c.outputs[rank].nbytes
    return tell_sizes(t, c, own, s.sizes, <int>count, s.blocks)


cdef void choose_bundles(Comm *t, Call *c, Exchange *s, bint may_bundle) noexcept nogil:
    """Decide which hosts exchange bundles with this one: the same on its ranks and on theirs."""
    cdef Hosts *h = hosts_of(t)
    cdef bint always = c.fingerprint.flags & EVEN != 0
    cdef int place = h.local.comm.rank
    cdef size_t sent, received
    cdef bint several
    cdef int host, j
    s.sent = s.received = s.own_sent = s.own_received = 0
    for host in range(h.count):
        sent = between(t, s, host, 0)
        received = between(t, s, host, 1)
        several = (may_bundle and host != h.here
                   and h.local.comm.size * members_on(h, host) > 1)
        s.sends_bundle[host] = several and (always or sent <= BUNDLED_BYTES)
        s.gets_bundle[host] = several and (always or received <= BUNDLED_BYTES)
        for j in range(h.first[host], h.first[host + 1]):
            if s.sends_bundle[host]:
                s.own_sent += size_of(t, s, place, 0, h.members[j])
            if s.gets_bundle[host]:
                s.own_received += size_of(t, s, place, 1, h.members[j])
        if s.sends_bundle[host]:
            s.sent += sizes_between(c, h, host) + sent
        if s.gets_bundle[host]:
            s.received += sizes_between(c, h, host) + received


cdef int cross(Comm *t, Call *c, Exchange *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef bint leads = h.local.comm.rank == 0
    cdef bint sends = False, gets = False
    cdef int host, status = OK
    s.incoming = s.outgoing + s.sent
    s.given = s.incoming + s.received
    for host in range(h.count):
        sends = sends or s.sends_bundle[host]
        gets = gets or s.gets_bundle[host]
    post_direct(t, c, s)
    if leads:
        post_bundles(t, c, s, 1)
    if sends:
        status = collect_bundles(t, c, s)
        if status == OK and leads:
            post_bundles(t, c, s, 0)
    if status == OK:
        status = exchange_here(t, c, s)
    if status == OK:
        status = complete(t, c, s.requests, s.posted)
    if status == OK and gets:
        status = hand_out_bundles(t, c, s)
    return status


cdef void post_direct(Comm *t, Call *c, Exchange *s) noexcept nogil:
    """Post what goes straight from rank to rank of another host, nearest hosts first."""
    cdef Hosts *h = hosts_of(t)
    cdef int d, j, host, rank
    for d in range(1, h.count):
        host = (h.here - d + h.count) % h.count
        for j in range(members_on(h, host) if not s.gets_bundle[host] else 0):
            rank = member_at(h, host, j)
            post_recv(t, c, &s.requests[s.posted], c.outputs[rank].ptr, c.outputs[rank].nbytes,
                      rank, 0)
            s.posted += 1
    for d in range(1, h.count):
        host = (h.here + d) % h.count
        for j in range(members_on(h, host) if not s.sends_bundle[host] else 0):
            rank = member_at(h, host, (j + h.local.comm.rank) % members_on(h, host))
            post_send(t, c, &s.requests[s.posted], c.inputs[rank].ptr, c.inputs[rank].nbytes,
                      rank, 0)
            s.posted += 1


cdef void post_bundles(Comm *t, Call *c, Exchange *s, int direction) noexcept nogil:
    """Post the leader's messages with the other hosts' leaders: 0: sends, 1: receives."""
    cdef Hosts *h = hosts_of(t)
    cdef char *at = s.incoming if direction == 1 else s.outgoing
    cdef size_t nbytes
    cdef int host
    for host in range(h.count):
        if not (s.gets_bundle[host] if direction == 1 else s.sends_bundle[host]):
            continue
        nbytes = sizes_between(c, h, host) + between(t, s, host, direction)
        if direction == 1:
            write_sizes(t, c, s, host, at, 1)   # for a recording, which moves no data
            post_recv(t, c, &s.requests[s.posted], at, nbytes, leader_of(h, host), 0)
        else:
            post_send(t, c, &s.requests[s.posted], at, nbytes, leader_of(h, host), 0)
        s.posted += 1
        at += nbytes


cdef int size_number(const Hosts *h, int host, int direction, int k, int j) noexcept nogil:
    """Return which of a bundle's sizes is of local rank k and rank j of the other host: they stand
    by the rank that sends, then by the one that receives."""
    return (k * members_on(h, host) + j if direction == 0
            else j * h.local.comm.size + k)


cdef void write_sizes(Comm *t, Call *c, const Exchange *s, int host, char *bundle,
                      int direction) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int k, j
    if sizes_between(c, h, host) == 0:
        return
    for k in range(h.local.comm.size):
        for j in range(members_on(h, host)):
            write_size(bundle, size_number(h, host, direction, k, j),
                       size_of(t, s, k, direction, member_at(h, host, j)))


cdef int compare_sizes(Comm *t, Call *c, const Exchange *s, int host,
                       const char *bundle) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef uint64_t theirs, ours
    cdef int k, j
    if sizes_between(c, h, host) == 0:
        return OK
    for k in range(h.local.comm.size):
        for j in range(members_on(h, host)):
            theirs = size_at(bundle, size_number(h, host, 1, k, j))
            ours = size_of(t, s, k, 1, member_at(h, host, j))
            if theirs != ours:
                return wrong_size(c, member_at(h, host, j), theirs, ours)
    return OK


cdef size_t part_bytes(Comm *t, const Exchange *s, int k, int direction) noexcept nogil:
    """Return the bytes of a local rank in all bundles."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t nbytes = 0
    cdef int host, j
    for host in range(h.count):
        if s.gets_bundle[host] if direction == 1 else s.sends_bundle[host]:
            for j in range(h.first[host], h.first[host + 1]):
                nbytes += size_of(t, s, k, direction, h.members[j])
    return nbytes


cdef int collect_bundles(Comm *t, Call *c, Exchange *s) noexcept nogil:
    """Gather the ranks' parts at the leader, and lay them into bundles there."""
    cdef Hosts *h = hosts_of(t)
    cdef char *own = s.given + max(s.sent, s.received)
    cdef char *at = own
    cdef Block mine = Block(own, s.own_sent)
    cdef int host, j, k, rank, status
    for host in range(h.count):
        for j in range(members_on(h, host) if s.sends_bundle[host] else 0):
            rank = member_at(h, host, j)
            copy(at, c.inputs[rank].ptr, c.inputs[rank].nbytes)
            at += c.inputs[rank].nbytes
    at = s.given
    for k in range(h.local.comm.size):
        s.blocks[k] = Block(at, part_bytes(t, s, k, 0))
        at += s.blocks[k].nbytes
    status = run_rooted(t, c, GATHER, 0, &mine, s.blocks)
    if status == OK and h.local.comm.rank == 0:
        at = s.outgoing
        for host in range(h.count):
            if s.sends_bundle[host]:
                write_sizes(t, c, s, host, at, 0)
                at += sizes_between(c, h, host)
            for k in range(h.local.comm.size if s.sends_bundle[host] else 0):
                for j in range(members_on(h, host)):
                    rank = member_at(h, host, j)
                    copy(at, s.blocks[k].ptr, size_of(t, s, k, 0, rank))
                    at += size_of(t, s, k, 0, rank)
                    s.blocks[k].ptr += size_of(t, s, k, 0, rank)
    return status


cdef int exchange_here(Comm *t, Call *c, Exchange *s) noexcept nogil:
    """Exchange the blocks of this host's ranks."""
    cdef Hosts *h = hosts_of(t)
    cdef int size = h.local.comm.size, k
    cdef bint even = c.fingerprint.flags & EVEN != 0
    cdef Call inner = call_like(c)
    for k in range(size):
        s.blocks[k] = c.inputs[member_at(h, h.here, k)]
        s.blocks[size + k] = c.outputs[member_at(h, h.here, k)]
    inner.inputs = s.blocks
    inner.outputs = s.blocks + size
    return run_part(&h.local, c, &inner, ALL_TO_ALL, size * c.inputs[0].nbytes if even else 0)


cdef int hand_out_bundles(Comm *t, Call *c, Exchange *s) noexcept nogil:
    """Scatter the leader's bundles to the ranks that they are for."""
    cdef Hosts *h = hosts_of(t)
    cdef char *own = s.given + max(s.sent, s.received) + s.own_sent
    cdef char *at = s.given
    cdef Block mine = Block(own, s.own_received)
    cdef int host, j, k, rank, status
    for k in range(h.local.comm.size):
        s.blocks[k] = Block(at, part_bytes(t, s, k, 1))
        at += s.blocks[k].nbytes
    if h.local.comm.rank == 0:
        at = s.incoming
        for host in range(h.count):
            if s.gets_bundle[host]:
                status = compare_sizes(t, c, s, host, at)
                if status != OK:
                    return status
                at += sizes_between(c, h, host)
            for j in range(members_on(h, host) if s.gets_bundle[host] else 0):
                rank = member_at(h, host, j)
                for k in range(h.local.comm.size):
                    copy(s.blocks[k].ptr, at, size_of(t, s, k, 1, rank))
                    at += size_of(t, s, k, 1, rank)
                    s.blocks[k].ptr += size_of(t, s, k, 1, rank)
        for k in range(h.local.comm.size):
            s.blocks[k].ptr -= s.blocks[k].nbytes
    status = run_rooted(t, c, SCATTER, 0, s.blocks, &mine)
    at = own
    for host in range(h.count if status == OK else 0):
        for j in range(members_on(h, host) if s.gets_bundle[host] else 0):
            rank = member_at(h, host, j)
            copy(c.outputs[rank].ptr, at, c.outputs[rank].nbytes)
            at += c.outputs[rank].nbytes
    return status


cdef int all_to_all_by_leaders(Comm *t, Call *c) noexcept nogil:
    return all_to_all(t, c, True)


cdef int all_to_all_by_lanes(Comm *t, Call *c) noexcept nogil:
    return all_to_all(t, c, False)


implement(b"leaders", ALL_TO_ALL, all_to_all_by_leaders)
implement(b"lanes", ALL_TO_ALL, all_to_all_by_lanes)

"""Gather and scatter over hosts: short blocks of one host's ranks travel as one message.

    gather      messages to the root's host: one of each other host
    scatter     messages from the root's host: one to each other host

Every block crosses once. A block of at most BUNDLED_BYTES divided by the ranks of its host is in
the bundle that the host's leader, its lowest rank, exchanges with the root. A longer one goes
straight between its rank and the root, which decide alike, since both know its size. A leader does
not: its host's ranks tell it. In a gather they need not wait for each other.

Two hosts of two ranks, gather to rank 0:

    host 0   rank 0 a     a b     <- cd       a b c d
             rank 1 b
    host 1   rank 2 c     c d     cd ->
             rank 3 d
                       to the     between
                       leader      hosts

Source: the two-level collectives of T. Kielmann, R. Hofman, H. Bal, A. Plaat and R. Bhoedjang,
"MagPIe: MPI's collective communication operations for clustered wide area systems", PPoPP 1999.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    GATHER, NO_MEMORY, OK, SCATTER, Block, Call, Comm, Request, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    BUNDLED_BYTES, Hosts, free_scratch, hosts_of, leader_of, member_at, members_on,
)
from cydist._native.pipeline cimport complete, copy, exchange, post_recv, post_send, withdraw


cdef enum:
    RECORD_BYTES = 64           # a block's size and first bytes, from a rank to its leader

cdef enum Step:                 # which message of a call it is
    DIRECT                      # a block, between its rank and the root
    RECORD                      # from a rank to its leader
    REST                        # of a bundled block, between its rank and the leader
    BUNDLE                      # between a leader and the root


ctypedef struct Rooted:         # the memory of a call
    Request *requests
    char *records               # of this host's ranks
    char *bundles
    int posted


cdef int open_rooted(Comm *t, Call *c, Rooted *s, int records, size_t bundled) noexcept nogil:
    patiently(c)
    s.posted = 0
    s.requests = <Request *>malloc(
        (t.size + 1) * sizeof(Request) + records * RECORD_BYTES + bundled)
    if s.requests == NULL:
        return NO_MEMORY
    s.records = <char *>(s.requests + t.size + 1)
    s.bundles = s.records + records * RECORD_BYTES
    return OK


cdef int close_rooted(Comm *t, Call *c, Rooted *s, int status) noexcept nogil:
    if status != OK:
        withdraw(t, s.requests, s.posted)
    free_scratch(t, c, s.requests)
    return status


cdef void send(Comm *t, Call *c, Rooted *s, Block block, int peer, Step step) noexcept nogil:
    post_send(t, c, &s.requests[s.posted], block.ptr, block.nbytes, peer, step)
    s.posted += 1


cdef void receive(Comm *t, Call *c, Rooted *s, Block block, int peer, Step step) noexcept nogil:
    post_recv(t, c, &s.requests[s.posted], block.ptr, block.nbytes, peer, step)
    s.posted += 1


cdef int complete_from(Comm *t, Call *c, Rooted *s, int first) noexcept nogil:
    """Complete the requests from number `first` on, which leaves the earlier ones."""
    cdef int count = s.posted - first
    s.posted = first
    return complete(t, c, s.requests + first, count)


cdef inline bint is_bundled(const Hosts *h, int host, size_t nbytes) noexcept nogil:
    """Return whether a block of a rank on this host, away from the root's, goes by its leader."""
    return members_on(h, host) > 1 and nbytes <= <size_t>(BUNDLED_BYTES // members_on(h, host))


cdef inline uint64_t *size_in(Rooted *s, int k) noexcept nogil:
    """Return the block size in the record of a local rank."""
    return <uint64_t *>(s.records + k * RECORD_BYTES)


cdef size_t bundle_of(const Hosts *h, int host, const Block *blocks, bint *any) noexcept nogil:
    """Return the bytes of a host's bundle; `any`: whether there is one."""
    cdef size_t nbytes = 0
    cdef Block block
    cdef int k
    any[0] = False
    for k in range(members_on(h, host) if host != h.here else 0):
        block = blocks[member_at(h, host, k)]
        if is_bundled(h, host, block.nbytes):
            any[0] = True
            nbytes += block.nbytes
    return nbytes


cdef size_t bundled_bytes(const Hosts *h, const Block *blocks) noexcept nogil:
    """Return the bytes of all bundles at the root."""
    cdef size_t nbytes = 0
    cdef bint _any
    cdef int host
    for host in range(h.count):
        nbytes += bundle_of(h, host, blocks, &_any)
    return nbytes


cdef size_t in_record(size_t nbytes) noexcept nogil:
    """Return how many of a bundled block's bytes its record has."""
    return min(nbytes, RECORD_BYTES - sizeof(uint64_t))


cdef int gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    if t.rank == c.root:
        return gather_all(t, c)
    if h.host[c.root] == h.here:
        patiently(c)
        return exchange(t, c, DIRECT, c.inputs[0].ptr, c.inputs[0].nbytes, c.root, NULL, 0, -1)
    if h.local.comm.rank == 0:
        return gather_bundle(t, c)
    return give(t, c)


cdef int give(Comm *t, Call *c) noexcept nogil:
    """Tell the leader this rank's size. Send it the block, but a long one to the root."""
    cdef Hosts *h = hosts_of(t)
    cdef int leader = leader_of(h, h.here)
    cdef Block own = c.inputs[0]
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 1, 0)
    cdef size_t begun
    if status != OK:
        return status
    size_in(&s, 0)[0] = own.nbytes
    if is_bundled(h, h.here, own.nbytes):
        begun = in_record(own.nbytes)
        copy(s.records + sizeof(uint64_t), own.ptr, begun)
        send(t, c, &s, Block(s.records, RECORD_BYTES), leader, RECORD)
        if own.nbytes > begun:
            send(t, c, &s, Block(own.ptr + begun, own.nbytes - begun), leader, REST)
    else:
        send(t, c, &s, Block(s.records, RECORD_BYTES), leader, RECORD)
        send(t, c, &s, own, c.root, DIRECT)
    return close_rooted(t, c, &s, complete_from(t, c, &s, 0))


cdef int gather_bundle(Comm *t, Call *c) noexcept nogil:
    """Collect what this host's ranks give, and send it to the root on another one."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, h.local.comm.size, BUNDLED_BYTES)
    cdef int first, k
    if status != OK:
        return status
    for k in range(h.local.comm.size):      # the others' until they tell: a recording moves no data
        size_in(&s, k)[0] = c.inputs[0].nbytes
    if not is_bundled(h, h.here, c.inputs[0].nbytes):
        send(t, c, &s, c.inputs[0], c.root, DIRECT)
    first = s.posted
    for k in range(1, h.local.comm.size):
        receive(t, c, &s, Block(s.records + k * RECORD_BYTES, RECORD_BYTES),
                member_at(h, h.here, k), RECORD)
    status = complete_from(t, c, &s, first)
    if status == OK:
        status = send_bundle(t, c, &s)
    return close_rooted(t, c, &s, status)


cdef int send_bundle(Comm *t, Call *c, Rooted *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef char *at = s.bundles
    cdef bint any = False
    cdef int first = s.posted, k, status
    cdef size_t nbytes, begun
    for k in range(h.local.comm.size):
        nbytes = size_in(s, k)[0]
        if not is_bundled(h, h.here, nbytes):
            continue
        any = True
        begun = nbytes if k == 0 else in_record(nbytes)
        copy(at, c.inputs[0].ptr if k == 0 else <char *>(size_in(s, k) + 1), begun)
        if begun < nbytes:
            receive(t, c, s, Block(at + begun, nbytes - begun), member_at(h, h.here, k), REST)
        at += nbytes
    status = complete_from(t, c, s, first)
    if status == OK and any:
        send(t, c, s, Block(s.bundles, at - s.bundles), c.root, BUNDLE)
    return complete_from(t, c, s, 0) if status == OK else status


cdef int gather_all(Comm *t, Call *c) noexcept nogil:
    """Receive all blocks at the root."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, bundled_bytes(h, c.outputs))
    cdef char *at
    cdef size_t nbytes
    cdef bint any
    cdef int host, rank
    if status != OK:
        return status
    at = s.bundles
    for host in range(h.count):
        nbytes = bundle_of(h, host, c.outputs, &any)
        if any:
            receive(t, c, &s, Block(at, nbytes), leader_of(h, host), BUNDLE)
            at += nbytes
    for rank in range(t.size):
        if rank != t.rank and goes_direct(h, rank, c.outputs[rank].nbytes):
            receive(t, c, &s, c.outputs[rank], rank, DIRECT)
    copy(c.outputs[t.rank].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
    status = complete_from(t, c, &s, 0)
    if status == OK:
        move_bundles(h, &s, c.outputs, False)
    return close_rooted(t, c, &s, status)


cdef inline bint goes_direct(const Hosts *h, int rank, size_t nbytes) noexcept nogil:
    """Return whether a block goes straight between a rank and the root, which is on this host."""
    return h.host[rank] == h.here or not is_bundled(h, h.host[rank], nbytes)


cdef void move_bundles(const Hosts *h, Rooted *s, const Block *blocks, bint into) noexcept nogil:
    """Copy the bundled blocks at the root into the bundles, or out of them."""
    cdef char *at = s.bundles
    cdef Block block
    cdef int i, rank
    for i in range(h.first[h.count]):
        rank = h.members[i]
        block = blocks[rank]
        if not goes_direct(h, rank, block.nbytes):
            copy(at if into else block.ptr, block.ptr if into else at, block.nbytes)
            at += block.nbytes


cdef int scatter(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    if t.rank == c.root:
        return scatter_all(t, c)
    if h.host[c.root] == h.here:
        patiently(c)
        return exchange(t, c, DIRECT, NULL, 0, -1, c.outputs[0].ptr, c.outputs[0].nbytes, c.root)
    if h.local.comm.rank == 0:
        return scatter_bundle(t, c)
    return get(t, c)


cdef int get(Comm *t, Call *c) noexcept nogil:
    """Tell the leader this rank's size. Receive the block from it, but a long one from the root."""
    cdef Hosts *h = hosts_of(t)
    cdef int leader = leader_of(h, h.here)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 1, 0)
    if status != OK:
        return status
    size_in(&s, 0)[0] = c.outputs[0].nbytes
    send(t, c, &s, Block(s.records, sizeof(uint64_t)), leader, RECORD)
    if is_bundled(h, h.here, c.outputs[0].nbytes):
        receive(t, c, &s, c.outputs[0], leader, REST)
    else:
        receive(t, c, &s, c.outputs[0], c.root, DIRECT)
    return close_rooted(t, c, &s, complete_from(t, c, &s, 0))


cdef int scatter_bundle(Comm *t, Call *c) noexcept nogil:
    """Receive what the root on another host has for this one's ranks, and hand it on."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, h.local.comm.size, BUNDLED_BYTES)
    cdef int first, k
    if status != OK:
        return status
    for k in range(h.local.comm.size):      # the others' until they tell: a recording moves no data
        size_in(&s, k)[0] = c.outputs[0].nbytes
    if not is_bundled(h, h.here, c.outputs[0].nbytes):
        receive(t, c, &s, c.outputs[0], c.root, DIRECT)
    first = s.posted
    for k in range(1, h.local.comm.size):
        receive(t, c, &s, Block(s.records + k * RECORD_BYTES, sizeof(uint64_t)),
                member_at(h, h.here, k), RECORD)
    status = complete_from(t, c, &s, first)
    if status == OK:
        status = hand_on(t, c, &s)
    return close_rooted(t, c, &s, status)


cdef int hand_on(Comm *t, Call *c, Rooted *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef char *at = s.bundles
    cdef size_t nbytes
    cdef bint any = False
    cdef int first = s.posted, k, status = OK
    for k in range(h.local.comm.size):
        if is_bundled(h, h.here, size_in(s, k)[0]):
            any = True
            at += size_in(s, k)[0]
    if any:
        receive(t, c, s, Block(s.bundles, at - s.bundles), c.root, BUNDLE)
        status = complete_from(t, c, s, first)
    at = s.bundles
    for k in range(h.local.comm.size if status == OK else 0):
        nbytes = size_in(s, k)[0]
        if not is_bundled(h, h.here, nbytes):
            continue
        if k == 0:
            copy(c.outputs[0].ptr, at, nbytes)
        else:
            send(t, c, s, Block(at, nbytes), member_at(h, h.here, k), REST)
        at += nbytes
    return complete_from(t, c, s, 0) if status == OK else status


cdef int scatter_all(Comm *t, Call *c) noexcept nogil:
    """Send all blocks from the root."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, bundled_bytes(h, c.inputs))
    cdef char *at
    cdef size_t nbytes
    cdef bint any
    cdef int host, rank
    if status != OK:
        return status
    move_bundles(h, &s, c.inputs, True)
    at = s.bundles
    for host in range(h.count):
        nbytes = bundle_of(h, host, c.inputs, &any)
        if any:
            send(t, c, &s, Block(at, nbytes), leader_of(h, host), BUNDLE)
            at += nbytes
    for rank in range(t.size):
        if rank != t.rank and goes_direct(h, rank, c.inputs[rank].nbytes):
            send(t, c, &s, c.inputs[rank], rank, DIRECT)
    copy(c.outputs[0].ptr, c.inputs[t.rank].ptr, c.outputs[0].nbytes)
    return close_rooted(t, c, &s, complete_from(t, c, &s, 0))


implement(b"leaders", GATHER, gather)
implement(b"leaders", SCATTER, scatter)

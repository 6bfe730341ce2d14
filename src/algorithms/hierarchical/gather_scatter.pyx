"""Gather and scatter over hosts: short blocks of one host's ranks travel as one message.

    gather      messages to the root's host: one of each other host
    scatter     messages from the root's host: one to each other host

Every block crosses once. A block of at most BUNDLED_BYTES divided by the ranks of its host is in
the bundle that the host's leader, its lowest rank, exchanges with the root. A longer one goes
straight between its rank and the root, which decide alike, since both know its size. A leader does
not: in a gather its host's ranks tell it, and in a scatter the root does. A host of several ranks
has a bundle in each call, with the sizes of all its blocks, and a scatter's leader passes each on
with the block. So ranks that disagree about one find that out, whichever way it goes.

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
from libc.string cimport memset

from cydist._native.abi cimport (
    GATHER, NO_MEMORY, OK, SCATTER, Block, Call, Comm, Request, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    Hosts, free_scratch, hosts_of, leader_of, member_at, members_on, size_at, write_size,
    wrong_size,
)
from cydist._native.pipeline cimport (
    EARLY_BLOCK_BYTES, complete, copy, exchange, post_recv, post_recv_or_less, post_send, withdraw,
)


cdef enum:
    BUNDLED_BYTES = 65536       # blocks of a host up to this many are one message
    RECORD_BYTES = 64           # a block's size and first bytes, from a rank to its leader

cdef enum Step:                 # which message of a call it is
    DIRECT                      # a block, between its rank and the root
    RECORD                      # from a rank to its leader, in a gather
    REST                        # of a block whose record had no room for it, to the leader
    BUNDLE                      # between a leader and the root
    PART                        # of a scatter's bundle, for one rank


ctypedef struct Rooted:         # the memory of a call
    Request *requests
    char *records               # of this host's ranks
    char *bundles
    int posted


cdef int open_rooted(Comm *t, Call *c, Rooted *s, int records, size_t bundled) noexcept nogil:
    cdef int most = t.size + hosts_of(t).count      # the root's: of each rank and each host
    patiently(c)
    s.posted = 0
    s.requests = <Request *>malloc(most * sizeof(Request) + records * RECORD_BYTES + bundled)
    if s.requests == NULL:
        return NO_MEMORY
    s.records = <char *>(s.requests + most)
    s.bundles = s.records + records * RECORD_BYTES
    return OK


cdef int close_rooted(Comm *t, Call *c, Rooted *s, int status) noexcept nogil:
    free_scratch(t, c, s.requests)
    return status


cdef void send(Comm *t, Call *c, Rooted *s, Block block, int peer, Step step) noexcept nogil:
    # A bundle travels at once: to wait made a gather of 64 KiB take three times as long.
    c.most_early = EARLY_BLOCK_BYTES if step == DIRECT and peer == c.root else 0
    post_send(t, c, &s.requests[s.posted], block.ptr, block.nbytes, peer, step)
    s.posted += 1


cdef void receive(Comm *t, Call *c, Rooted *s, Block block, int peer, Step step) noexcept nogil:
    post_recv(t, c, &s.requests[s.posted], block.ptr, block.nbytes, peer, step)
    s.posted += 1


cdef int complete_all(Comm *t, Call *c, Rooted *s) noexcept nogil:
    """Complete the requests that are posted; after a failure they are withdrawn."""
    cdef int count = s.posted
    s.posted = 0
    return complete(t, c, s.requests, count)


cdef inline bint is_bundled(const Hosts *h, int host, size_t nbytes) noexcept nogil:
    """Return whether a rank on this host, away from the root's, leaves its block to the leader."""
    return members_on(h, host) > 1 and nbytes <= <size_t>(BUNDLED_BYTES // members_on(h, host))


cdef inline uint64_t *size_in(Rooted *s, int k) noexcept nogil:
    """Return the block size in the record of a local rank."""
    return <uint64_t *>(s.records + k * RECORD_BYTES)


cdef inline size_t sizes_on(const Hosts *h, int host) noexcept nogil:
    """Return the bytes of the sizes before a host's bundle."""
    return members_on(h, host) * sizeof(uint64_t)


cdef size_t bundle_of(const Hosts *h, int host, const Block *blocks) noexcept nogil:
    """Return the bytes of a host's bundle, with the sizes; 0: it has none."""
    cdef size_t nbytes
    cdef Block block
    cdef int k
    if host == h.here or members_on(h, host) == 1:
        return 0
    nbytes = sizes_on(h, host)
    for k in range(members_on(h, host)):
        block = blocks[member_at(h, host, k)]
        if is_bundled(h, host, block.nbytes):
            nbytes += block.nbytes
    return nbytes


cdef size_t bytes_of_bundles(const Hosts *h, const Block *blocks) noexcept nogil:
    """Return the bytes of all bundles at the root."""
    cdef size_t nbytes = 0
    cdef int host
    for host in range(h.count):
        nbytes += bundle_of(h, host, blocks)
    return nbytes


cdef size_t in_record(size_t nbytes) noexcept nogil:
    """Return how many of a bundled block's bytes its record has."""
    return min(nbytes, RECORD_BYTES - sizeof(uint64_t))


cdef int gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    if t.rank == c.root:
        return gather_all(t, c)
    if h.host[c.root] == h.here or h.local.comm.size == 1:
        patiently(c)
        c.most_early = EARLY_BLOCK_BYTES
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
    memset(s.records, 0, RECORD_BYTES)
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
    return close_rooted(t, c, &s, complete_all(t, c, &s))


cdef int gather_bundle(Comm *t, Call *c) noexcept nogil:
    """Collect what this host's ranks give, and send it to the root on another one."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int k
    cdef int status = open_rooted(t, c, &s, h.local.comm.size, sizes_on(h, h.here) + BUNDLED_BYTES)
    if status != OK:
        return status
    for k in range(h.local.comm.size):      # for a recording, which moves no data
        size_in(&s, k)[0] = c.inputs[0].nbytes
    for k in range(1, h.local.comm.size):
        receive(t, c, &s, Block(s.records + k * RECORD_BYTES, RECORD_BYTES),
                member_at(h, h.here, k), RECORD)
    status = complete_all(t, c, &s)
    if status == OK:
        status = send_bundle(t, c, &s)
    return close_rooted(t, c, &s, status)


cdef int send_bundle(Comm *t, Call *c, Rooted *s) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef char *at = s.bundles + sizes_on(h, h.here)
    cdef int k, status
    cdef size_t nbytes, begun
    for k in range(h.local.comm.size):
        nbytes = size_in(s, k)[0]
        write_size(s.bundles, k, nbytes)
        if not is_bundled(h, h.here, nbytes):
            continue
        begun = nbytes if k == 0 else in_record(nbytes)
        copy(at, c.inputs[0].ptr if k == 0 else <char *>(size_in(s, k) + 1), begun)
        if begun < nbytes:
            receive(t, c, s, Block(at + begun, nbytes - begun), member_at(h, h.here, k), REST)
        at += nbytes
    status = complete_all(t, c, s)
    if status != OK:
        return status
    send(t, c, s, Block(s.bundles, at - s.bundles), c.root, BUNDLE)
    if not is_bundled(h, h.here, c.inputs[0].nbytes):
        send(t, c, s, c.inputs[0], c.root, DIRECT)
    return complete_all(t, c, s)


cdef int gather_all(Comm *t, Call *c) noexcept nogil:
    """Receive all blocks at the root."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, bytes_of_bundles(h, c.outputs))
    cdef char *at
    cdef size_t nbytes
    cdef int host, rank, k
    if status != OK:
        return status
    at = s.bundles
    for host in range(h.count):     # awaited first: their sizes tell which blocks go straight
        nbytes = bundle_of(h, host, c.outputs)
        if nbytes != 0:
            for k in range(members_on(h, host)):        # for a recording, which moves no data
                write_size(at, k, c.outputs[member_at(h, host, k)].nbytes)
            receive(t, c, &s, Block(at, nbytes), leader_of(h, host), BUNDLE)
            at += nbytes
    for rank in range(t.size):
        if rank != t.rank and goes_direct(h, rank, c.outputs[rank].nbytes):
            receive(t, c, &s, c.outputs[rank], rank, DIRECT)
    copy(c.outputs[t.rank].ptr, c.inputs[0].ptr, c.inputs[0].nbytes)
    status = complete_all(t, c, &s)
    if status == OK:
        status = open_bundles(c, h, &s)
    return close_rooted(t, c, &s, status)


cdef inline bint goes_direct(const Hosts *h, int rank, size_t nbytes) noexcept nogil:
    """Return whether a block goes straight between a rank and the root, which is on this host."""
    return h.host[rank] == h.here or not is_bundled(h, h.host[rank], nbytes)


cdef int open_bundles(Call *c, const Hosts *h, Rooted *s) noexcept nogil:
    """Compare the sizes of all blocks, and take those that came in bundles."""
    cdef const char *at = s.bundles
    cdef const char *sizes
    cdef Block block
    cdef int host, k, rank
    for host in range(h.count):
        if bundle_of(h, host, c.outputs) == 0:
            continue
        sizes = at
        at += sizes_on(h, host)
        for k in range(members_on(h, host)):
            rank = member_at(h, host, k)
            if size_at(sizes, k) != c.outputs[rank].nbytes:
                return wrong_size(c, rank, size_at(sizes, k), c.outputs[rank].nbytes)
        for k in range(members_on(h, host)):
            block = c.outputs[member_at(h, host, k)]
            if is_bundled(h, host, block.nbytes):
                copy(block.ptr, at, block.nbytes)
                at += block.nbytes
    return OK


cdef int scatter(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    if t.rank == c.root:
        return scatter_all(t, c)
    if h.host[c.root] == h.here or h.local.comm.size == 1:
        patiently(c)
        return exchange(t, c, DIRECT, NULL, 0, -1, c.outputs[0].ptr, c.outputs[0].nbytes, c.root)
    if h.local.comm.rank == 0:
        return scatter_bundle(t, c)
    return get(t, c)


cdef int get(Comm *t, Call *c) noexcept nogil:
    """Receive the block's size and a short block from the leader, but a long one from the root. The
    leader's message is awaited first: where the root has another size, no long block may come."""
    cdef Hosts *h = hosts_of(t)
    cdef Block own = c.outputs[0]
    cdef bint bundled = is_bundled(h, h.here, own.nbytes)
    cdef size_t most = sizeof(uint64_t) + BUNDLED_BYTES // h.local.comm.size
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, most)
    if status != OK:
        return status
    write_size(s.bundles, 0, own.nbytes)        # for a recording, which moves no data
    post_recv_or_less(t, c, &s.requests[0], s.bundles, most, leader_of(h, h.here), PART)
    s.posted = 1
    if not bundled:
        receive(t, c, &s, own, c.root, DIRECT)
    status = complete(t, c, s.requests, 1)
    if status == OK and (size_at(s.bundles, 0) != own.nbytes or s.requests[0].came_bytes
                         < sizeof(uint64_t) + (own.nbytes if bundled else 0)):
        status = wrong_size(c, c.root, size_at(s.bundles, 0), own.nbytes)
    if status != OK:
        withdraw(t, s.requests, s.posted)
    elif bundled:
        copy(own.ptr, s.bundles + sizeof(uint64_t), own.nbytes)
    else:
        status = complete_all(t, c, &s)
    return close_rooted(t, c, &s, status)


cdef int scatter_bundle(Comm *t, Call *c) noexcept nogil:
    """Receive what the root on another host has for this one's ranks, and hand it on."""
    cdef Hosts *h = hosts_of(t)
    cdef size_t most = sizes_on(h, h.here) + BUNDLED_BYTES, nbytes
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, most)
    cdef char *at
    cdef int _k
    if status != OK:
        return status
    at = s.bundles
    nbytes = c.outputs[0].nbytes
    for _k in range(h.local.comm.size):         # for a recording
        write_size(at, 0, nbytes)
        at += sizeof(uint64_t) + (nbytes if is_bundled(h, h.here, nbytes) else 0)
    post_recv_or_less(t, c, &s.requests[0], s.bundles, most, c.root, BUNDLE)
    status = complete(t, c, s.requests, 1)
    if status == OK:
        status = hand_on(t, c, &s, s.requests[0].came_bytes)
    return close_rooted(t, c, &s, status)


cdef int hand_on(Comm *t, Call *c, Rooted *s, size_t left) noexcept nogil:
    """Send each rank its part of the bundle, which has `left` bytes."""
    cdef Hosts *h = hosts_of(t)
    cdef Block own = c.outputs[0]
    cdef char *at = s.bundles
    cdef size_t nbytes, part
    cdef int k, status = OK
    for k in range(h.local.comm.size):
        nbytes = size_at(at, 0) if left >= sizeof(uint64_t) else 0
        part = sizeof(uint64_t) + (nbytes if is_bundled(h, h.here, nbytes) else 0)
        if part > left:         # it was damaged on the way: arrays carry no tag
            status = wrong_size(c, c.root, nbytes, left)
            break
        if k == 0 and nbytes != own.nbytes:
            status = wrong_size(c, c.root, nbytes, own.nbytes)
            break
        if k > 0:
            send(t, c, s, Block(at, part), member_at(h, h.here, k), PART)
        elif is_bundled(h, h.here, nbytes):
            copy(own.ptr, at + sizeof(uint64_t), nbytes)
        else:
            receive(t, c, s, own, c.root, DIRECT)
        at += part
        left -= part
    if status == OK:
        return complete_all(t, c, s)
    withdraw(t, s.requests, s.posted)
    return status


cdef int scatter_all(Comm *t, Call *c) noexcept nogil:
    """Send all blocks from the root."""
    cdef Hosts *h = hosts_of(t)
    cdef Rooted s
    cdef int status = open_rooted(t, c, &s, 0, bytes_of_bundles(h, c.inputs))
    cdef char *at
    cdef int host, rank
    if status != OK:
        return status
    at = s.bundles
    for host in range(h.count):
        if bundle_of(h, host, c.inputs) != 0:
            at = send_bundle_to(t, c, &s, host, at)
    for rank in range(t.size):
        if rank != t.rank and goes_direct(h, rank, c.inputs[rank].nbytes):
            send(t, c, &s, c.inputs[rank], rank, DIRECT)
    copy(c.outputs[0].ptr, c.inputs[t.rank].ptr, c.outputs[0].nbytes)
    return close_rooted(t, c, &s, complete_all(t, c, &s))


cdef char *send_bundle_to(Comm *t, Call *c, Rooted *s, int host, char *bundle) noexcept nogil:
    """Lay out a host's bundle and send it; return its end. Each block follows its size."""
    cdef Hosts *h = hosts_of(t)
    cdef char *at = bundle
    cdef Block block
    cdef int k
    for k in range(members_on(h, host)):
        block = c.inputs[member_at(h, host, k)]
        write_size(at, 0, block.nbytes)
        at += sizeof(uint64_t)
        if is_bundled(h, host, block.nbytes):
            copy(at, block.ptr, block.nbytes)
            at += block.nbytes
    send(t, c, s, Block(bundle, at - bundle), leader_of(h, host), BUNDLE)
    return at


implement(b"leaders", GATHER, gather)
implement(b"leaders", SCATTER, scatter)

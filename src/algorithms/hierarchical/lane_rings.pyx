"""Lanes, of a block for each rank: from host to host in a ring.

    all_gather      bytes between hosts per host what its ranks give, to each other host
    reduce_scatter  what goes to the other hosts, reduced here

Lane k of lanes.pyx carries the blocks of every host's ranks k, k + lanes, and so on. It gets those
of all other hosts from the host before, and sends to the next one. So a rank has two connections to
other hosts, however many there are. A block of all_gather is passed on as it is, and a sum of
reduce_scatter grows at each host, in the array's dtype; so reductions must commute. Sums need
memory, so long blocks of a reduce_scatter go round part by part.

Blocks travel in segments, which are sent at once: a longer message would ask first, behind the
bytes that all lanes have under way. A few are on their way, as exchange_depth says. Meanwhile the
ranks of a host share, or add, what has arrived.

No ranks wait for each other in a circle. Before a rank waits for others of its host, to share what
arrived, it has sent as much itself. So a rank that waits for a segment waits until the host before
has an earlier one, which waits in the same way.
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_GATHER, NO_MEMORY, OK, REDUCE_SCATTER, Block, Call, Comm, Request, patiently,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.hierarchy cimport (
    PART_BYTES, SCRATCH_BYTES, Hosts, call_like, exchange_depth, free_scratch, gather_here,
    hosts_of, lane_segment, member_at, members_on, reduce_here,
)
from cydist._native.leaders cimport reduce_scatter as reduce_scatter_by_leaders
from cydist._native.pipeline cimport (
    combine, complete, conclude, copy, largest, post_recv, post_send, segment_of, segment_size,
    segments_in, total, withdraw,
)


cdef enum:
    BYTES_OF_ONE_LANE = 131072      # of a reduce_scatter: up to so many, leaders do it faster


ctypedef struct Ring:           # the messages of a lane
    int before, after           # its ranks on the hosts before and after this one; -1: in no lane
    size_t segment              # bytes of a message, at most
    size_t ahead                # how many to send before the first has arrived
    size_t per_block            # messages of the longest block
    # A message's step tells the rank whose block it is of, and the segment.
    Request *receives           # in the order in which they are taken
    Request *sends
    int expected, arrived, sent


ctypedef struct Leaving:        # a block on its way to the next host
    int rank                    # whose it is; -1: there is none
    Block block
    size_t segments
    size_t passed               # how many of them were sent


cdef int open_ring(Comm *t, Call *c, Ring *ring, size_t unit, const Block *blocks) noexcept nogil:
    """Prepare for a lane's share of the blocks of all ranks, cut at multiples of `unit` bytes."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, i
    cdef Call between = call_like(c)
    cdef size_t longest = largest(blocks, t.size), most = 0
    between.segment_bytes = lane_segment(h)
    ring.segment = segment_size(&between, unit, longest, t.size)
    ring.ahead = exchange_depth(ring.segment)
    ring.per_block = segments_in(longest, ring.segment)
    ring.before = ring.after = -1
    ring.expected = ring.arrived = ring.sent = 0
    if place < h.lanes:
        ring.before = member_at(h, host_before(h, 1), place)
        ring.after = member_at(h, (h.here + 1) % h.count, place)
        for i in range(t.size):
            most += segments_in(blocks[i].nbytes, ring.segment)
    ring.receives = <Request *>malloc((2 * most + 1) * sizeof(Request))
    ring.sends = ring.receives + most
    return OK if ring.receives != NULL else NO_MEMORY


cdef inline int host_before(const Hosts *h, int distance) noexcept nogil:
    return (h.here - distance + h.count) % h.count


cdef inline int rounds_of(const Hosts *h, int host) noexcept nogil:
    """Return how many rounds the lanes need for the blocks of a host, one for each lane."""
    return (members_on(h, host) - 1) // h.lanes + 1


cdef inline int member_in_round(const Hosts *h, int host, int round_) noexcept nogil:
    """Return the rank whose block this rank's lane carries in a round; -1: none."""
    cdef int place = round_ * h.lanes + h.local.comm.rank
    if h.local.comm.rank >= h.lanes or place >= members_on(h, host):
        return -1
    return member_at(h, host, place)


cdef void expect(Comm *t, Call *c, Ring *ring, int rank, Block block) noexcept nogil:
    cdef Block part
    cdef size_t i
    for i in range(segments_in(block.nbytes, ring.segment)):
        part = segment_of(block, i, ring.segment)
        post_recv(t, c, &ring.receives[ring.expected], part.ptr, part.nbytes, ring.before,
                  <int>(rank * ring.per_block + i))
        ring.expected += 1


cdef int take(Comm *t, Call *c, Ring *ring) noexcept nogil:
    """Wait for the next segment."""
    ring.arrived += 1
    return complete(t, c, &ring.receives[ring.arrived - 1], 1)


cdef void pass_until(Comm *t, Call *c, Ring *ring, Leaving *leaving, size_t until) noexcept nogil:
    """Send the segments of a block up to that number."""
    cdef Block part
    while leaving.passed < min(until, leaving.segments):
        part = segment_of(leaving.block, leaving.passed, ring.segment)
        post_send(t, c, &ring.sends[ring.sent], part.ptr, part.nbytes, ring.after,
                  <int>(leaving.rank * ring.per_block + leaving.passed))
        ring.sent += 1
        leaving.passed += 1


cdef Leaving leaving_block(const Ring *ring, int rank, Block block) noexcept nogil:
    cdef Leaving leaving
    leaving.rank = rank
    leaving.block = block
    leaving.segments = segments_in(block.nbytes, ring.segment) if rank >= 0 else 0
    leaving.passed = 0
    return leaving


cdef int close_ring(Comm *t, Call *c, Ring *ring, int status) noexcept nogil:
    """Wait for the sends; after a failure withdraw everything."""
    if status == OK:
        status = complete(t, c, ring.sends, ring.sent)
    if status != OK:
        withdraw(t, ring.receives, ring.expected)
        withdraw(t, ring.sends, ring.sent)
    free_scratch(t, c, ring.receives)
    return status


cdef void blocks_on(const Hosts *h, int host, int round_, int at_once, const Block *blocks,
                    Block *some) noexcept nogil:
    """Find the blocks that ranks here deal with in a round, one for each of the first `at_once`.
    The other ranks' are empty."""
    cdef int k, place
    for k in range(h.local.comm.size):
        place = round_ * at_once + k
        some[k] = blocks[member_at(h, host, min(place, members_on(h, host) - 1))]
        if k >= at_once or place >= members_on(h, host):
            some[k].nbytes = 0


cdef size_t pieces_on(const Hosts *h, size_t piece, int host, int round_, int at_once,
                      const Block *blocks, Block *some) noexcept nogil:
    """Return how many pieces the longest of them has."""
    blocks_on(h, host, round_, at_once, blocks, some)
    return segments_in(largest(some, h.local.comm.size), piece)


cdef size_t cut_pieces(const Hosts *h, size_t piece, size_t i, Block *some) noexcept nogil:
    """Leave piece i of each block; return the bytes of all."""
    cdef size_t nbytes = 0
    cdef int k
    for k in range(h.local.comm.size):
        some[k] = segment_of(some[k], i, piece)
        nbytes += some[k].nbytes
    return nbytes


cdef int all_gather(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef Block *some = <Block *>malloc(h.local.comm.size * sizeof(Block))
    cdef Ring ring
    cdef int status = NO_MEMORY
    patiently(c)
    if some != NULL:
        status = open_ring(t, c, &ring, 1, c.outputs)
    if status == OK:
        status = close_ring(t, c, &ring, gather_blocks(t, c, &ring, some))
    free_scratch(t, c, some)
    return status


cdef int gather_blocks(Comm *t, Call *c, Ring *ring, Block *some) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int d, k, rank, status = OK
    for d in range(1, h.count):
        for k in range(rounds_of(h, host_before(h, d))):
            rank = member_in_round(h, host_before(h, d), k)
            if rank >= 0:
                expect(t, c, ring, rank, c.outputs[rank])
    for d in range(1, h.count):
        for k in range(max(rounds_of(h, host_before(h, d - 1)), rounds_of(h, host_before(h, d)))):
            if status == OK:
                status = gather_round(t, c, ring, some, d, k)
    return status


cdef Leaving leaving_in(Comm *t, Call *c, const Ring *ring, int d, int round_) noexcept nogil:
    """Return the block of a round of the host d before the next one, which is sent there."""
    cdef Hosts *h = hosts_of(t)
    cdef int rank = member_in_round(h, host_before(h, d - 1), round_)
    cdef Block block = Block(NULL, 0)
    if rank >= 0:
        block = c.inputs[0] if rank == t.rank else c.outputs[rank]
    return leaving_block(ring, rank, block)


cdef int gather_round(Comm *t, Call *c, Ring *ring, Block *some, int d, int round_) noexcept nogil:
    """Take the blocks of the host d before this one, send on those of the host after that one, and
    share what arrives with the ranks here; in the first round of all also what they give. The first
    segments that arrive are sent on at once."""
    cdef Hosts *h = hosts_of(t)
    cdef int host = host_before(h, d)
    cdef size_t piece = ring.ahead * ring.segment     # that the ranks of a host share at once
    cdef size_t i, j, own = 0, pieces = 0
    cdef Leaving leaving = leaving_in(t, c, ring, d, round_)
    cdef Leaving arriving = leaving_in(t, c, ring, d + 1, round_)
    cdef int status = OK
    if d == 1 and round_ == 0:
        own = pieces_on(h, piece, h.here, 0, h.local.comm.size, c.outputs, some)
    elif d > 1:
        leaving.passed = min(leaving.segments, ring.ahead)
    if round_ < rounds_of(h, host):
        pieces = pieces_on(h, piece, host, round_, h.lanes, c.outputs, some)
    for i in range(max(own, pieces)):
        j = i * ring.ahead
        pass_until(t, c, ring, &leaving, j + ring.ahead)
        if i < own:
            blocks_on(h, h.here, 0, h.local.comm.size, c.outputs, some)
            status = share(t, c, piece, some, c.inputs[0], i)
        while j < min(arriving.segments, (i + 1) * ring.ahead) and status == OK:
            status = take(t, c, ring)
            j += 1
            pass_until(t, c, ring, &leaving, j + ring.ahead)
            if d + 1 < h.count and status == OK:
                pass_until(t, c, ring, &arriving, min(j, ring.ahead))
        if status == OK:        # others need the whole piece before they come to share theirs
            pass_until(t, c, ring, &leaving, (i + 1) * ring.ahead)
        if i < pieces and status == OK:
            blocks_on(h, host, round_, h.lanes, c.outputs, some)
            status = share(t, c, piece, some, some[h.local.comm.rank], i)
        if status != OK:
            return status
    pass_until(t, c, ring, &leaving, leaving.segments)
    return OK


cdef int share(Comm *t, Call *c, size_t piece, Block *some, Block own, size_t i) noexcept nogil:
    """Give this rank's part of piece i of some blocks to the ranks here, and get theirs."""
    cdef size_t nbytes = cut_pieces(hosts_of(t), piece, i, some)
    own = segment_of(own, i, piece)
    return gather_here(t, c, &own, some, nbytes)


ctypedef struct Partials:       # of the hosts' sums of blocks, while they move
    Ring ring
    Block *some
    char *arriving              # sums over the hosts before
    char *leaving               # the same with this host's contributions
    char *own                   # the results of a round, if some ranks are in no lane
    size_t room                 # bytes for each
    int taken                   # blocks of `arriving`
    int passed                  # blocks of `leaving` that had been taken


cdef inline bint some_have_no_lane(const Hosts *h) noexcept nogil:
    """Return whether ranks here wait for their results until the lanes hand them out."""
    return h.lanes < h.local.comm.size


cdef int blocks_carried(const Hosts *h, int host) noexcept nogil:
    """Return how many blocks of a host this rank's lane carries."""
    cdef int k, count = 0
    for k in range(rounds_of(h, host)):
        count += member_in_round(h, host, k) >= 0
    return count


cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil:
    """Reduce one part of all blocks after another: partial sums need memory."""
    cdef const Block *inputs = c.inputs
    cdef const Block *outputs = c.outputs
    cdef size_t longest = largest(inputs, t.size), unit = c.op.itemsize, i
    cdef size_t part = max(SCRATCH_BYTES // <size_t>t.size, <size_t>PART_BYTES) // unit * unit
    cdef Block *parts
    cdef Block own
    cdef int k, status = OK
    if hosts_of(t).lanes == 1 and total(inputs, t.size) <= BYTES_OF_ONE_LANE:
        return reduce_scatter_by_leaders(t, c)
    if longest <= part:
        return reduce_parts(t, c)
    parts = <Block *>malloc(t.size * sizeof(Block))
    if parts == NULL:
        return NO_MEMORY
    for i in range(segments_in(longest, part)):
        for k in range(t.size):
            parts[k] = segment_of(inputs[k], i, part)
        own = segment_of(outputs[0], i, part)
        c.inputs = parts
        c.outputs = &own
        status = reduce_parts(t, c)
        if status != OK:
            break
    c.inputs = inputs
    c.outputs = outputs
    free_scratch(t, c, parts)
    return status


cdef int reduce_parts(Comm *t, Call *c) noexcept nogil:
    cdef Hosts *h = hosts_of(t)
    cdef int arriving = 0, leaving = rounds_of(h, host_before(h, 1)), own = 0, d
    cdef Partials s
    cdef int status = NO_MEMORY
    for d in range(2, h.count):
        arriving += blocks_carried(h, host_before(h, d))
    leaving += arriving
    arriving += blocks_carried(h, h.here)
    if some_have_no_lane(h):
        leaving += blocks_carried(h, h.here)
        own = h.lanes
    s.room = largest(c.inputs, t.size)
    s.taken = s.passed = 0
    s.some = <Block *>malloc(h.local.comm.size * sizeof(Block))
    s.arriving = <char *>malloc((arriving + leaving + own) * s.room + 1)
    patiently(c)
    if s.some != NULL and s.arriving != NULL:
        s.leaving = s.arriving + arriving * s.room
        s.own = s.leaving + leaving * s.room
        status = open_ring(t, c, &s.ring, c.op.itemsize, c.inputs)
    if status == OK:
        status = close_ring(t, c, &s.ring, reduce_blocks(t, c, &s))
    free_scratch(t, c, s.arriving)
    free_scratch(t, c, s.some)
    return status


cdef int reduce_blocks(Comm *t, Call *c, Partials *s) noexcept nogil:
    """Begin with the blocks of the host before, whose sums go the whole way round, and end with
    those of this host."""
    cdef Hosts *h = hosts_of(t)
    cdef char *into = s.arriving
    cdef int d, k, rank, status = OK
    for d in range(2, h.count + 1):
        for k in range(rounds_of(h, host_before(h, d))):
            rank = member_in_round(h, host_before(h, d), k)
            if rank >= 0:
                expect(t, c, &s.ring, rank, Block(into, c.inputs[rank].nbytes))
                into += s.room
    for d in range(2, h.count + 1):
        for k in range(max(rounds_of(h, host_before(h, d - 1)), rounds_of(h, host_before(h, d)))):
            if status == OK:
                status = reduce_round(t, c, s, d, k)
    return status


cdef int reduce_round(Comm *t, Call *c, Partials *s, int d, int round_) noexcept nogil:
    """Add the contributions of the ranks here to the blocks of the host d before this one, and send
    on those of the host after that one; in the first rounds this host's contributions alone."""
    cdef Hosts *h = hosts_of(t)
    cdef int host = host_before(h, d), rank = member_in_round(h, host_before(h, d - 1), round_)
    cdef int first_rounds = rounds_of(h, host_before(h, 1)), place = h.local.comm.rank
    cdef bint handed_out = host == h.here and some_have_no_lane(h)
    cdef size_t i, begun = 0, segments = 0
    cdef Block sum = Block(s.leaving, 0)
    cdef Leaving leaving
    cdef int status = OK
    if rank >= 0:
        sum.ptr += s.room * (round_ if d == 2 else first_rounds + s.passed)
        sum.nbytes = c.inputs[rank].nbytes
        s.passed += d > 2
    leaving = leaving_block(&s.ring, rank, sum)
    rank = member_in_round(h, host, round_)
    if round_ < rounds_of(h, host):
        segments = pieces_on(h, s.ring.segment, host, round_, h.lanes, c.inputs, s.some)
        sum = Block(s.leaving, s.some[place].nbytes)
        if host == h.here and not handed_out:
            sum.ptr = c.outputs[0].ptr
        elif rank >= 0:
            sum.ptr += s.room * (first_rounds + s.taken)
    for i in range(segments):
        if d == 2:
            status = begin_sums(t, c, s, round_, &leaving, &begun, i + s.ring.ahead)
        if status == OK:
            pass_until(t, c, &s.ring, &leaving, i + s.ring.ahead)
            status = add_segments(t, c, s, host, round_, sum, i)
        if status != OK:
            return status
    if d == 2:
        status = begin_sums(t, c, s, round_, &leaving, &begun, <size_t>-1)
    if status != OK:            # there is nothing to send
        return status
    pass_until(t, c, &s.ring, &leaving, leaving.segments)
    s.taken += rank >= 0
    if handed_out and segments != 0:
        status = hand_out(t, c, s, round_, sum)
    return status


cdef int reduce_segments(Comm *t, Call *c, Partials *s, int host, int round_, Block sum,
                         size_t i) noexcept nogil:
    """Reduce segment i of some blocks of a host here; this rank gets that of `sum`."""
    cdef Hosts *h = hosts_of(t)
    cdef Block part = segment_of(sum, i, s.ring.segment)
    blocks_on(h, host, round_, h.lanes, c.inputs, s.some)
    return reduce_here(t, c, s.some, &part, cut_pieces(h, s.ring.segment, i, s.some))


cdef int begin_sums(Comm *t, Call *c, Partials *s, int round_, Leaving *leaving, size_t *begun,
                    size_t until) noexcept nogil:
    """Do that with the host before's blocks, up to that segment. Send each segment before the next
    is reduced, so that the wire is not idle meanwhile."""
    cdef Hosts *h = hosts_of(t)
    cdef int host = host_before(h, 1), status = OK
    if round_ < rounds_of(h, host):
        until = min(until, pieces_on(h, s.ring.segment, host, round_, h.lanes, c.inputs, s.some))
        while begun[0] < until and status == OK:
            status = reduce_segments(t, c, s, host, round_, leaving.block, begun[0])
            begun[0] += 1
            if status == OK:
                pass_until(t, c, &s.ring, leaving, begun[0])
    return status


cdef int add_segments(Comm *t, Call *c, Partials *s, int host, int round_, Block sum,
                      size_t i) noexcept nogil:
    """Do that, and add the sum over the hosts before to this rank's."""
    cdef Hosts *h = hosts_of(t)
    cdef Block part = segment_of(sum, i, s.ring.segment)
    cdef const char *before = s.arriving + s.room * s.taken + (part.ptr - sum.ptr)
    cdef int status = reduce_segments(t, c, s, host, round_, sum, i)
    if (status != OK or member_in_round(h, host, round_) < 0
            or i >= segments_in(sum.nbytes, s.ring.segment)):
        return status
    status = take(t, c, &s.ring)
    if status == OK:
        combine(c.op, part.ptr, before, part.ptr, part.nbytes)
        if host == h.here:
            conclude(c.op, part.ptr, part.nbytes)
    return status


cdef int hand_out(Comm *t, Call *c, Partials *s, int round_, Block result) noexcept nogil:
    """Give the lanes' results of a round to the ranks here, of which some are in no lane."""
    cdef Hosts *h = hosts_of(t)
    cdef int place = h.local.comm.rank, k, status
    cdef size_t nbytes = 0
    blocks_on(h, h.here, round_, h.lanes, c.inputs, s.some)
    for k in range(h.lanes):
        s.some[k].ptr = s.own + k * s.room
        nbytes += s.some[k].nbytes
    status = gather_here(t, c, &result, s.some, nbytes)
    if status == OK and place // h.lanes == round_:
        copy(c.outputs[0].ptr, s.some[place % h.lanes].ptr, c.outputs[0].nbytes)
    return status


implement(b"lanes", ALL_GATHER, all_gather)
implement(b"lanes", REDUCE_SCATTER, reduce_scatter)

"""The hosts of a group, and the parts of it on which hierarchical algorithms run other algorithms.

A part is a comm of its own to an algorithm: the members on this rank's host, or one member of each
host. Its messages are the group's: the same id, tags and control messages. So a rank in another
call is found, and a failure ends the waits of all. Two ranks never share both kinds of part, so
their messages cannot be mistaken for each other's.
"""
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from cydist._native.abi cimport MISMATCH, Algorithm, Block, Call, Comm, Reduction
from cydist._native.algorithm_table cimport SIZE_CLASSES, Choice
from cydist._native.pipeline cimport shorter_segment


ctypedef struct Part:
    Comm comm
    const Choice (*rows)[SIZE_CLASSES]  # [collective][size class] of what runs on it; or NULL
    size_t segment_bytes
    bint between_hosts


cdef enum:
    LAST_PLACE = -2             # to across_at: of the last member of each host
    # A rank that sends and receives at once has sent about so many bytes, or two messages, more
    # than it has received, at most. So neither way fills the queues of a slow network, where
    # acknowledgements of the other would wait. Each hop of an all_reduce in stretches counts alone.
    EXCHANGE_AHEAD = 131072
    # A call that needs memory as long as its array takes so much of the array at once, or
    # PART_BYTES for each lane or block. The allocator takes more than 32 MiB from the system in
    # each call, which takes longer than the call itself.
    SCRATCH_BYTES = 4194304
    PART_BYTES = 65536          # of a lane, at least, where an array is cut


ctypedef struct Hosts:
    int count                   # hosts, numbered by their lowest ranks
    bint consecutive            # the ranks on each host are consecutive
    int here                    # this rank's
    int lanes                   # the fewest members of a host
    const int *host             # [rank] the host of each member
    const int *place            # [rank] how many members of its host are before it
    const int *first            # [host] where its members begin in `members`; first[count]: the end
    const int *members          # host after host, each in the order of ranks
    Part local                  # this host's members, in that order
    Part across                 # one member of each host, by number of the host: see across_at


# Fill in the hosts of a group, given the host of each member as any number, if some members share
# one and some do not.
cdef int place_on_hosts(Comm *t, hosts) except -1
cdef void free_hosts(Hosts *hosts) noexcept nogil
# Choose what runs on the parts; the arguments are those of Group.prepare_parts. Called once the
# windows of the local part are open.
cdef int prepare_parts(Hosts *h, choose, segment_bytes) except -1


# Return how many messages of so many bytes EXCHANGE_AHEAD allows.
cdef inline size_t exchange_depth(size_t segment) noexcept nogil:
    return max(EXCHANGE_AHEAD // segment, <size_t>2)


# Return how long the segments of a block are that a lane carries. Other ranks of its host wait for
# the whole of what the lanes bring, so those of all lanes together are as long as one alone.
cdef inline size_t lane_segment(const Hosts *h) noexcept nogil:
    return shorter_segment(h.across.segment_bytes, h.lanes)


cdef inline Hosts *hosts_of(const Comm *t) noexcept nogil:
    return <Hosts *>t.hosts


cdef inline int members_on(const Hosts *h, int host) noexcept nogil:
    return h.first[host + 1] - h.first[host]


# Return the group rank of the member of a host that stands `place` places after its first.
cdef inline int member_at(const Hosts *h, int host, int place) noexcept nogil:
    return h.members[h.first[host] + place]


# Return the rank that talks to other hosts for all of this host.
cdef inline int leader_of(const Hosts *h, int host) noexcept nogil:
    return member_at(h, host, 0)


# Return the part of the member at this place of every host, but of `root` on its host. This rank is
# one of them. root -1: there is none. place: also LAST_PLACE.
cdef Part *across_at(Comm *t, int place, int root) noexcept nogil


# Return a call like `c` for a part, without blocks and without a root.
cdef Call call_like(const Call *c) noexcept nogil
# Run it on a part; `nbytes` is the size of the whole array, or of all blocks together. Its segments
# are the part's unless it has its own. On failure tell `c` why.
cdef int run_part(Part *part, Call *c, Call *inner, int collective, size_t nbytes) noexcept nogil
# Tell `c` how a call on a part ended.
cdef void tell_end(const Part *part, Call *c, const Call *inner, int status) noexcept nogil

# Reduce this host's contributions to a block on each of its ranks; `nbytes` is that of all blocks.
cdef int reduce_here(Comm *t, Call *c, const Block *given, Block *own, size_t nbytes) noexcept nogil
# Give this rank's block to all ranks of this host, and get theirs.
cdef int gather_here(Comm *t, Call *c, const Block *own, const Block *blocks,
                     size_t nbytes) noexcept nogil

# Return the blocks of this host's ranks if an array is cut into one for each lane, empty for those
# that are in no lane; NULL: no memory. To be freed.
cdef Block *lane_blocks(const Hosts *h, Block whole, size_t unit) noexcept nogil

# Run an algorithm on one stretch of the array after another, of about so many bytes, or of
# PART_BYTES for each lane. Ranks may be in different ones.
cdef int in_stretches(Comm *t, Call *c, size_t nbytes, Algorithm run) noexcept nogil

# Return a reduction without the last step, and one without the first: a group's result is finished
# once, where the parts' results come together.
cdef inline Reduction unfinished(const Reduction *op) noexcept nogil:
    cdef Reduction inner = op[0]
    inner.finish = NULL
    return inner


cdef inline Reduction prepared(const Reduction *op) noexcept nogil:
    cdef Reduction inner = op[0]
    inner.prepare = NULL
    return inner


# Return whether what a rank contributes is the sum of its host: it is alone there.
cdef inline bint is_host_sum(const Hosts *h, const Reduction *op) noexcept nogil:
    return h.local.comm.size == 1 and op.prepare == NULL


# Free memory that a call has used, unless a rank may still read or write there.
cdef void free_scratch(Comm *t, const Call *c, void *memory) noexcept nogil


# Sizes of blocks, one after another, which may lie anywhere.
cdef inline uint64_t size_at(const char *sizes, int k) noexcept nogil:
    cdef uint64_t size
    memcpy(&size, sizes + k * sizeof(uint64_t), sizeof(uint64_t))
    return size


cdef inline void write_size(char *sizes, int k, uint64_t size) noexcept nogil:
    memcpy(sizes + k * sizeof(uint64_t), &size, sizeof(uint64_t))


# Tell `c` that a peer's block has another size than this rank's; return MISMATCH.
cdef inline int wrong_size(Call *c, int peer, size_t theirs, size_t ours) noexcept nogil:
    c.failed_peer = peer
    c.failed_step = 0
    c.theirs = c.fingerprint
    c.theirs_bytes = theirs
    c.our_bytes = ours
    return MISMATCH

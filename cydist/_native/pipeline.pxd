"""The building blocks of algorithms: requests that are posted and completed, blocks cut into
segments, and pipelines of them."""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport SEQUENCE_SHIFT, Block, Call, Comm, Reduction, Request

# For algorithms. A posted request always ends in complete(). When one fails, complete() withdraws
# the unfinished ones and records peer, step and fingerprint. A failure to post is its status.
cdef int complete(Comm *t, Call *c, Request *requests, int count) noexcept nogil
# The part of complete() for one request: wait, and after PATIENCE_NS query the peer for its call.
# MISMATCH fills r.theirs and r.source.
cdef int wait_and_ask(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
cdef void post_send(Comm *t, Call *c, Request *r, const void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil
cdef void post_recv(Comm *t, Call *c, Request *r, void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil
# The same for a message of at most so many bytes. `came_bytes` then has how many it had.
cdef void post_recv_or_less(Comm *t, Call *c, Request *r, void *ptr, size_t most,
                            int peer, int step) noexcept nogil
# Post the receive, post the send, complete both. Either side may be absent: peer -1.
cdef int exchange(Comm *t, Call *c, int step,
                  const void *out, size_t out_bytes, int to_peer,
                  void *into, size_t into_bytes, int from_peer) noexcept nogil

# Return the first element of `block` when `count` elements are cut into `blocks` blocks. The first
# count % blocks blocks hold one element more than the rest.
cdef inline size_t block_start(size_t block, size_t blocks, size_t count) noexcept nogil:
    return block * (count // blocks) + (block if block < count % blocks else count % blocks)


# --- Shared by several algorithms. Sizes are in bytes unless they are called count. ---

# Return how long segments of blocks of up to `nbytes` are: a multiple of `unit` bytes (the size of
# an element), at most a block, and so long that `rounds` rounds of them stay below
# 2**SEQUENCE_SHIFT steps.
cdef inline size_t segment_size(const Call *c, size_t unit, size_t nbytes,
                                size_t rounds) noexcept nogil:
    cdef size_t most = (<size_t>1 << (SEQUENCE_SHIFT - 1)) // (rounds if rounds > 0 else 1)
    cdef size_t least = nbytes // (most if most > 0 else 1) // unit + 1
    cdef size_t wanted = c.segment_bytes // unit
    if wanted > nbytes // unit:
        wanted = nbytes // unit
    return (wanted if wanted > least else least) * unit


# Values of Call.most_early, where the receiver takes what several ranks send.
cdef enum:
    EARLY_BYTES = 65536         # of a segment, which it adds up
    EARLY_BLOCK_BYTES = 32768   # of a block that stays as it is

cdef enum:
    LEAST_SEGMENT_BYTES = 32768     # of shorter segments: each message costs more than its bytes


# Return how long segments are of which `parts` take the place of one.
cdef inline size_t shorter_segment(size_t segment, size_t parts) noexcept nogil:
    return max(segment // parts, min(segment, <size_t>LEAST_SEGMENT_BYTES))


# Return the bytes of the segments that follow each other along a chain of ranks, each of which
# waits for the whole of the first: half of a segment, or an eighth of the array if that is less,
# but no less than LEAST_SEGMENT_BYTES.
cdef inline size_t chain_segment(const Call *c, size_t unit, size_t nbytes) noexcept nogil:
    cdef Call shorter = c[0]
    cdef size_t parts = max(8 * c.segment_bytes // max(nbytes, <size_t>1), <size_t>2)
    shorter.segment_bytes = shorter_segment(c.segment_bytes, parts)
    return segment_size(&shorter, unit, nbytes, 1)


# Return how many segments a block has. An empty block has one empty segment: its message still
# tells a peer which call this is.
cdef inline size_t segments_in(size_t nbytes, size_t segment) noexcept nogil:
    return 1 if nbytes == 0 else (nbytes - 1) // segment + 1


# Segment `index` of a block; empty past the end.
cdef inline Block segment_of(Block block, size_t index, size_t segment) noexcept nogil:
    cdef Block part
    cdef size_t start = index * segment
    if start > block.nbytes:
        start = block.nbytes
    part.ptr = block.ptr + start
    part.nbytes = block.nbytes - start if block.nbytes - start < segment else segment
    return part


# Block `index` of `whole` cut into `blocks` blocks of whole elements.
cdef inline Block block_of(Block whole, size_t index, size_t blocks, size_t unit) noexcept nogil:
    cdef Block part
    cdef size_t count = whole.nbytes // unit
    cdef size_t start = block_start(index, blocks, count)
    part.ptr = whole.ptr + start * unit
    part.nbytes = (block_start(index + 1, blocks, count) - start) * unit
    return part


cdef inline size_t largest(const Block *blocks, int count) noexcept nogil:
    cdef size_t most = 0
    cdef int i
    for i in range(count):
        if blocks[i].nbytes > most:
            most = blocks[i].nbytes
    return most


cdef inline size_t total(const Block *blocks, int count) noexcept nogil:
    cdef size_t nbytes = 0
    cdef int i
    for i in range(count):
        nbytes += blocks[i].nbytes
    return nbytes


cdef extern from "kernels/copy.h" nogil:
    void copy "cydist_copy"(char *out, const char *source, size_t nbytes)

cdef extern from "kernels/nontemporal.h" nogil:
    void stream "cydist_stream"(char *out, const char *source, size_t nbytes)

cdef enum:
    STREAM_BYTES = 4194304      # blocks of at least this size bypass the caches


# The same for memory that is not read again soon.
cdef inline void copy_block(char *out, const char *source, size_t nbytes) noexcept nogil:
    if nbytes >= STREAM_BYTES and out != source:
        stream(out, source, nbytes)
    else:
        copy(out, source, nbytes)


# A rank's own contribution, ready for combine.
cdef inline void contribute(const Reduction *op, char *out, const char *own,
                            size_t nbytes) noexcept nogil:
    if op.prepare != NULL:
        op.prepare(op, out, own, nbytes // op.itemsize)
    else:
        copy(out, own, nbytes)


cdef inline void combine(const Reduction *op, char *acc, const char *low, const char *high,
                         size_t nbytes) noexcept nogil:
    op.combine(op, acc, low, high, nbytes // op.itemsize)


# The last step on a complete block, once, before it is handed on.
cdef inline void conclude(const Reduction *op, char *acc, size_t nbytes) noexcept nogil:
    if op.finish != NULL:
        op.finish(op, acc, nbytes // op.itemsize)


# Free memory of messages. After a failure the transport may still use it: then it is leaked.
cdef void release_buffer(Comm *t, void *memory) noexcept nogil
# Cancel whatever is still pending after another request failed.
cdef void withdraw(Comm *t, Request *requests, int count) noexcept nogil


# A pipeline: messages 0, 1, 2, ... with at most `depth` under way in each direction. Message
# i is step first_step + i of the call. The shape of every use:
#     for i in range(total + pipe.depth - 1):
#         if i < total: pipe_post(t, c, &pipe, i, what to send, to whom, into what, from whom)
#         if i + 1 >= pipe.depth: pipe_take(t, c, &pipe, i + 1 - pipe.depth); use what arrived
#     return pipe_close(t, c, &pipe)
# so that when message i is posted, message i - depth has been sent, and has arrived and been used.
cdef enum:
    PIPE_DEPTH = 4

ctypedef struct Pipe:
    size_t depth                # 1 .. PIPE_DEPTH
    size_t first_step           # 0, unless changed after pipe_open
    int status                  # OK, or the first failure; then every pipe_ call returns it
    Request sends[PIPE_DEPTH]
    Request receives[PIPE_DEPTH]

# Open a pipeline as deep as the call allows, at most `most`.
cdef void pipe_open(Pipe *pipe, const Call *c, size_t most) noexcept nogil
# Wait until message i - depth is sent, so that the memory it was sent from can be written.
cdef int pipe_ready(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil
# Post both halves of message i, after pipe_ready. A peer of -1: no such half.
cdef int pipe_post(Comm *t, Call *c, Pipe *pipe, size_t i, Block out, int to_peer,
                   Block into, int from_peer) noexcept nogil
# Wait until message i has arrived.
cdef int pipe_take(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil
# Wait for the sends; after a failure withdraw everything. Returns the status.
cdef int pipe_close(Comm *t, Call *c, Pipe *pipe) noexcept nogil

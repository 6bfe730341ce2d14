"""The narrow waist: the C types that every compiled module agrees on.

Algorithms are written against these and nothing else, so a new transport or a
new reduction changes nothing above this line, and a new algorithm nothing below.

Everything here is `noexcept nogil` C. Errors are data: a function returns a
`Status`, and the `Call` or `Request` holds what the error message will need.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef enum Status:           # 0, or negative; cydist/errors.py names the class
    OK = 0
    PENDING = 1             # of a Request only: posted, not complete
    ELSEWHERE = 2           # of Transport.collective only: the library has no such call
    TIMEOUT = -1            # the deadline passed
    PEER_LOST = -2          # the connection to a peer ended, or the peer's process did
    NO_MEMORY = -3
    MISMATCH = -4           # a peer is in another call, or sent another size or dtype
    INTERRUPTED = -5        # a signal handler raised; the engine holds the exception
    ABORTED = -6            # the group's abort flag was raised
    CLOSED = -7             # the link was destroyed under the call
    RAISED = -8             # what called the engine raised an exception of its own
    UNREACHABLE = -9        # the memory of a peer can be neither read nor written


cdef enum Collective:       # the order is part of the wire format
    POINT_TO_POINT = 0
    BROADCAST = 1
    ALL_REDUCE = 2
    REDUCE = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SCAN = 10
    EXSCAN = 11
    MONITORED_BARRIER = 12  # made of messages, above the engine
    COLLECTIVES = 13        # how many there are
    NO_CALL = 255           # of a rank that has left the group without the call in question


cdef enum:                  # of the machine, as cydist counts: part of the layout of shared memory
    PAGE = 4096
    LINE = 64               # a cache line


cdef enum:
    ANY_SOURCE = -1         # Request.peer of a receive that takes from anyone
    EVEN = 1                # Fingerprint.flags: all blocks have the same size
    CHUNK = 2               # Fingerprint.flags: one of the calls that a longer one was cut into
    ASKING = 4              # Fingerprint.flags: whose array has gaps, before a long call
    JOINED = 8              # Fingerprint.flags: every rank's blocks lie one behind the other
    # Request.tag: the top bit tells a collective's messages from the user's.
    SEQUENCE_SHIFT = 24     # collective tag = COLLECTIVE_TAG | seq << 24 | step


cdef extern from *:
    """
    #define CYDIST_COLLECTIVE_TAG (1ULL << 63)
    #define CYDIST_SEQUENCE_MASK ((1ULL << 39) - 1)
    #define CYDIST_NOTICE_TAG (~0ULL)
    #define CYDIST_NOTES_TAG (1ULL << 40)
    #define CYDIST_ALARM_TAG (CYDIST_NOTES_TAG + 1)
    #define CYDIST_NEWS_TAG (CYDIST_NOTES_TAG + 2)
    #define CYDIST_WORD_TAG (CYDIST_NOTES_TAG + 3)
    #define CYDIST_PARTING_TAG (CYDIST_NOTES_TAG + 4)
    #define CYDIST_PIECE_TAG (1ULL << 61)
    #define CYDIST_DERIVED_TAG (1ULL << 62)
    """
    const uint64_t COLLECTIVE_TAG "CYDIST_COLLECTIVE_TAG"
    const uint64_t SEQUENCE_MASK "CYDIST_SEQUENCE_MASK"
    # A group's notices (src/abi/control_plane.pyx). A receive of one from ANY_SOURCE goes on though
    # a member has died; it ends when nobody else is left.
    const uint64_t NOTICE_TAG "CYDIST_NOTICE_TAG"
    # Messages that are not the user's, whose tags have 31 bits.
    const uint64_t NOTES_TAG "CYDIST_NOTES_TAG"     # what a rank of backend "nccl" calls
    const uint64_t ALARM_TAG "CYDIST_ALARM_TAG"     # why a group of backend "nccl" failed
    const uint64_t NEWS_TAG "CYDIST_NEWS_TAG"       # never sent, over MPI: see MpiGroup.hear
    const uint64_t WORD_TAG "CYDIST_WORD_TAG"       # which call a rank leaves, over MPI
    const uint64_t PARTING_TAG "CYDIST_PARTING_TAG"     # a rank's last call, as the group ends
    const uint64_t PIECE_TAG "CYDIST_PIECE_TAG"     # and up: of each long message of a GPU's array
    const uint64_t DERIVED_TAG "CYDIST_DERIVED_TAG"     # of collectives made of messages


ctypedef struct Fingerprint:    # 40 bytes: what must be equal on all ranks of a call
    uint64_t seq                # number of the call in its group; 0 for point to point
    uint64_t count              # elements, where the API demands equal counts; else 0
    uint8_t collective          # Collective
    uint8_t dtype               # a code of kernels.h
    uint8_t op                  # a reduction of kernels.h; 0 for none
    uint8_t flags               # EVEN
    int32_t root                # group rank, or -1
    uint32_t detail             # hash of what has no field: a structured dtype, sizes of blocks
    uint32_t algorithm          # index in the table, so that two tuning tables are noticed
    uint64_t note               # zero, but in a window: what the step says beside its data


ctypedef struct Request:        # one posted send or receive; owned by the caller
    char *ptr
    size_t nbytes
    int peer                    # rank within the group; ANY_SOURCE for a receive
    uint64_t tag
    const Fingerprint *expected     # sent with a send; compared by a receive
    size_t layout               # MPI's datatype of memory with gaps from `ptr` on; 0: it has none
    bint attended               # the caller waits for it at once: nobody else needs to move it
    # Set by the transport:
    int status                  # PENDING, then OK or an error
    int source                  # whose message completed a receive, or caused a MISMATCH
    Fingerprint theirs          # of a receive that ended in MISMATCH
    size_t theirs_bytes
    # The transport's own until status leaves PENDING:
    void *link                  # whatever state the transport keeps for it
    void *place                 # where that state is kept


# A word that ranks await (`posted`, `consumed`) is touched by raise_flag and wait_flag only,
# and the word behind it counts those who sleep.

ctypedef struct Flags:          # the head of a window; every word on a line of its own
    uint64_t consumed           # steps that the owner has read from everybody, or fewer
    uint32_t sleepers
    uint32_t pad_consumed[13]
    uint64_t told               # not 0: a notice of a failure is on its way to the owner
    uint64_t parted             # 1 + the steps that the owner has taken, once it ends the group
    uint64_t pad_told[6]
    uint64_t visiting           # 1 + the rank in whose arrays the owner is, ~0: in several, or 0
    uint64_t pad_visiting[7]
    uint64_t barred             # not 0: nobody may begin to read or write the owner's arrays
    uint64_t pad_barred[7]


cdef enum:
    TINY_BYTES = 16             # so few bytes of data travel in the head's own line
    KNOWN_ARRAYS = 8            # of a rank, that others can reach

ctypedef struct Head:           # of a step: one line, right before its data if they are short
    uint64_t posted             # 1 + the step that was written here last, wherever its data lie
    uint32_t sleepers
    uint32_t behind             # steps before that one which its writer had not consumed yet
    Fingerprint call            # that wrote it; its note and what follows may be tiny data
    uint64_t tiny


ctypedef struct Window:         # one rank's shared memory in this group, mapped here
    Flags *flags
    char *heads                 # each a Head, then `short_bytes` of data
    char *slots                 # each `slot_bytes` of data; the word before them is the step's, too


ctypedef struct Comm
ctypedef struct Call


ctypedef struct Windows:
    int heads                   # steps that a window holds; a power of two
    size_t short_bytes          # TINY_BYTES at least
    size_t stride               # from one head to the next
    int slots                   # for long data; a power of two
    size_t slot_bytes, slot_stride
    Window *of                  # one per group rank; of[rank] is writable by its owner
    uint64_t step               # steps this group has taken; the same on every rank
    uint64_t consumed           # steps that this rank has read from everybody
    uint64_t released           # steps that all ranks are known to have consumed
    int looks                   # at a flag before a wait counts as one; see spins_after
    int most_looks
    int spins                   # further looks before it yields
    int most_spins
    bint (*gone)(Comm *t, int peer) noexcept nogil     # has this rank left, or died?
    bint (*ended)(Comm *t, int peer) noexcept nogil    # has its process ended, for certain?
    # Copy from memory that a peer has shown, or into it: OK, PEER_LOST or UNREACHABLE. A peer
    # may be this rank. NULL: the link cannot.
    int (*pull)(Comm *t, int peer, char *into, const char *theirs,
                size_t nbytes) noexcept nogil
    int (*push)(Comm *t, int peer, char *theirs, const char *source,
                size_t nbytes) noexcept nogil
    # Where such memory lies here; NULL, the function too: it does not.
    char *(*mapped)(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil
    # See src/algorithms/windows/direct.pyx:
    int reach                   # may all ranks do so? 0: nobody has tried; then 1 or -1
    const char *known[KNOWN_ARRAYS]     # ends of this rank's arrays that others can reach
    int next_known


# The head that a rank writes in a step.
cdef inline Head *head_of(const Windows *w, int rank, uint64_t step) noexcept nogil:
    return <Head *>(w.of[rank].heads + (step & <uint64_t>(w.heads - 1)) * w.stride)


ctypedef struct ControlView:          # see src/abi/control_plane.pyx
    # OK, or the Status with which another rank has failed the group.
    int (*look)(Comm *t) noexcept nogil
    # Tell `peer`, who is waited for, which call this rank is in.
    void (*ask)(Comm *t, int peer) noexcept nogil


# A group's view of a link. Links are shared by all the groups of a process.
ctypedef struct Comm:
    void *link                  # the link's own state
    int rank                    # of this process in the group
    int size
    const int *peers            # group rank -> the link's peer number
    uint64_t context            # tells this group's messages from another's
    Windows *windows            # NULL where the link has messages only
    volatile int *aborted       # 0, or the Status that ends every wait of this group
    ControlView *board                # what other ranks tell this group; NULL: nothing
    uint64_t *farewells         # see has_left: a bit for each lane by which it came; or NULL

    # Post. The request and its memory stay in place until it is complete or cancelled.
    # Returns OK, or an error (then the request is not posted).
    int (*send)(Comm *t, Request *r) noexcept nogil
    int (*recv)(Comm *t, Request *r) noexcept nogil
    # Try to complete a request to or from a named rank, looking for about a microsecond at most.
    # OK; else it is posted if r.link is not NULL, or nothing has happened. NULL: the link cannot.
    int (*at_once)(Comm *t, Request *r, bint sending) noexcept nogil
    # Move things on without blocking; returns r.status.
    int (*test)(Comm *t, Request *r) noexcept nogil
    # Block until the request is complete or the deadline has passed. Returns r.status if complete,
    # else why the wait ended; it is still posted then, and the caller waits again or cancels.
    int (*wait)(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
    # Withdraw: on return the transport does not touch the request again, nor its memory.
    void (*cancel)(Comm *t, Request *r) noexcept nogil
    # Windows: publish a flag of mine (release), or wait until a peer's flag is at
    # least `value` (acquire). NULL where windows is.
    void (*raise_flag)(Comm *t, uint64_t *flag, uint64_t value) noexcept nogil
    int (*wait_flag)(Comm *t, uint64_t *flag, uint64_t value,
                     int64_t deadline_ns) noexcept nogil
    # Has a message of a collective before call `seq` arrived that no receive has taken? Fills
    # r.theirs and r.source. NULL: the link cannot tell.
    bint (*left_over)(Comm *t, uint64_t seq, Request *r) noexcept nogil
    # Has a message arrived whose sender takes the call of `r`, which names its tag and
    # fingerprint and need not be posted, for another? Fills r.theirs and r.source. NULL as above.
    bint (*contradicted)(Comm *t, Request *r) noexcept nogil
    # May the library below still use the memory of requests that were cancelled? Then it must
    # not be freed. NULL: never.
    bint (*lingers)(Comm *t) noexcept nogil
    # Run a call by the library's own collective, or return ELSEWHERE, on every rank alike.
    # NULL, or `comm` is 0: there is none.
    int (*collective)(Comm *t, Call *c) noexcept nogil
    size_t comm                 # the group in that library
    void *own                   # the link's, of this group
    # Compare that library's last call, which may have returned first: before each call, at the end.
    int (*compare)(Comm *t, Call *c) noexcept nogil
    int (*settle)(Comm *t, Call *c) noexcept nogil


# One rank's end of a transport: what Python holds, and what its groups share. Transports
# derive from it. Peers are numbered 0..size-1; a link exchanges bytes and sees no store.
cdef class Link:
    cdef readonly int rank      # this process among the link's peers
    cdef readonly int size
    cdef list kept              # what `keep` was given
    # Fill in what the link knows of a group's view: link and the functions.
    # rank, size, peers, context and aborted are set before. May raise.
    cdef int open_view(self, Comm *t) except -1
    # Its first collective is about to begin: fill in the windows, if the members can share
    # memory; all of them can, or none.
    cdef int open_windows(self, Comm *t) except -1
    # The group is gone: free its windows, drop what arrived for it, and end with CLOSED
    # what it has under way. Its requests may still be cancelled.
    cdef void close_view(self, Comm *t) noexcept


cdef extern from "kernels/reduction.h" nogil:
    # C because the loops that fill it in are C.
    ctypedef struct Reduction "cydist_reduction":
        size_t itemsize             # bytes per element
        bint commutative
        void *context               # PREMUL_SUM's factor; owned by whoever made this
        int ranks                   # AVG's divisor: the group's size
        # acc[i] = low[i] op high[i]; acc may be low or high. Low is the contribution of
        # the lower ranks, so that every rank computes the same bits.
        void (*combine)(const Reduction *r, void *acc, const void *low, const void *high,
                        size_t count) noexcept nogil
        # out[i] = sources[0][i] op ... op sources[n-1][i], finished: one pass, one rounding.
        # The sources are prepared contributions, in rank order; out may be one of them.
        void (*combine_all)(const Reduction *r, void *out, const void *const *sources,
                            int sources_count, size_t count) noexcept nogil
        # Before the first combine or combine_all, on a rank's own contribution, because each
        # rank has its own factor (PREMUL_SUM); may be NULL. out may be own.
        void (*prepare)(const Reduction *r, void *out, const void *own,
                        size_t count) noexcept nogil
        # After the last combine, on the whole result (AVG); may be NULL. combine_all calls it.
        void (*finish)(const Reduction *r, void *acc, size_t count) noexcept nogil


ctypedef struct Block:
    char *ptr
    size_t nbytes


ctypedef struct Call:           # one collective, as one rank sees it
    # Blocks, by collective (p ranks; memory is contiguous within a block):
    #   broadcast        inputs 1, outputs 1: the same memory on every rank
    #   all_reduce       inputs 1, outputs 1; may be the same memory
    #   reduce           inputs 1, outputs 1 (NULL off the root); may be the same memory
    #   all_gather       inputs 1, outputs p
    #   gather           inputs 1, outputs p (NULL off the root)
    #   scatter          inputs p (NULL off the root), outputs 1
    #   reduce_scatter   inputs p, outputs 1; inputs are not changed
    #   all_to_all       inputs p, outputs p
    #   scan, exscan     inputs 1, outputs 1; may be the same memory
    #   barrier          none
    # Block r of a list belongs to rank r. An input may also be exactly the block of the
    # output that belongs to this rank (in-place all_gather); nothing else overlaps.
    const Block *inputs
    const Block *outputs
    const Reduction *op         # NULL where nothing is reduced
    int root                    # group rank, or -1
    uint64_t tag                # of step 0; step k uses tag + k
    size_t segment_bytes        # unit of pipelining
    int64_t deadline_ns         # monotonic clock; once `before_wait` was called
    # NULL, or to be called (see patiently) before the first wait that takes more than a few looks:
    # it sets the deadline, and lets go of what others may need. Who does not wait needs neither.
    void (*before_wait)(Call *c) noexcept nogil
    Fingerprint fingerprint
    # What an error message needs; set by whoever notices:
    int failed_peer             # group rank, or -1
    int failed_step
    Fingerprint theirs
    size_t theirs_bytes
    size_t our_bytes
    # The call failed, and a peer that does not answer may still write in its arrays, once: they
    # must never be freed.
    bint visited


# Who is about to wait calls this first.
cdef inline void patiently(Call *c) noexcept nogil:
    if c.before_wait != NULL:
        c.before_wait(c)


ctypedef int (*Algorithm)(Comm *t, Call *c) noexcept nogil


cdef enum Needs:            # what an algorithm asks for; a set of bits
    MESSAGES = 0
    WINDOWS = 1
    COMMUTATIVE = 2         # only for commutative reductions
    POWER_OF_TWO = 4        # only for 2**k ranks
    EVEN_BLOCKS = 8         # only where all blocks have the same size
    NATIVE = 16             # a library that has the collective itself


ctypedef struct Entry:      # one row of the table of algorithms
    const char *name
    int collective
    int needs
    Algorithm run


# The table. An algorithm module ends in add(b"ring", ALL_REDUCE, MESSAGES, all_reduce).
cdef int add(const char *name, int collective, int needs, Algorithm run) except -1
cdef const Entry *find(const char *name, int collective) noexcept nogil   # NULL: no such row
cdef int index_of(const Entry *entry) noexcept nogil
cdef const Entry *row_of(uint32_t index) noexcept nogil     # NULL: no such row


# Has this member left the group, while the link goes on? Of ourselves: has any?
cdef inline bint has_left(const Comm *t, int rank) noexcept nogil:
    return t.farewells != NULL and t.farewells[rank] != 0


# The clock of every deadline: CLOCK_MONOTONIC, in nanoseconds.
cdef int64_t now_ns() noexcept nogil

# Every wait calls this when a slice of waiting ends (at most 50 ms after the last time):
# OK, or why the wait must end: the group's abort flag, a signal, the deadline.
cdef int slice_end(Comm *t, int64_t deadline_ns) noexcept nogil

# Set once by the engine: runs pending signal handlers; nonzero if one raised.
ctypedef int (*Interrupted)() noexcept nogil
cdef void set_interrupted(Interrupted f) noexcept nogil


# Set once by src/algorithms/windows/parting.pyx. The group ends here: compare its last call, which
# is the Call's fingerprint, with others until the deadline. `known`: all members are known to have
# made it; `alone`: they do not part now, and nobody waits for them. OK, or why not; MISMATCH as of
# a call, PEER_LOST when a member left before it was heard.
ctypedef int (*Parting)(Comm *t, Call *c, bint known, bint alone) noexcept nogil
cdef void set_parting(Parting f) noexcept nogil
cdef int part(Comm *t, Call *c, bint known, bint alone) noexcept nogil

# For algorithms. A request that was posted always ends in complete(), which withdraws whatever is
# unfinished when one fails, and notes peer, step and fingerprint. A failure to post is its status.
cdef int complete(Comm *t, Call *c, Request *requests, int count) noexcept nogil
# What complete() does for one request: wait, and ask the peer, when patience ends, which call
# it is in. MISMATCH fills r.theirs and r.source.
cdef int wait_and_ask(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
cdef void post_send(Comm *t, Call *c, Request *r, const void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil
cdef void post_recv(Comm *t, Call *c, Request *r, void *ptr, size_t nbytes,
                    int peer, int step) noexcept nogil
# Post the receive, post the send, complete both. Either side may be absent: peer -1.
cdef int exchange(Comm *t, Call *c, int step,
                  const void *out, size_t out_bytes, int to_peer,
                  void *into, size_t into_bytes, int from_peer) noexcept nogil

# Cut `count` elements into `blocks`: the first element of `block`. The first
# count % blocks blocks hold one element more than the rest.
cdef inline size_t block_start(size_t block, size_t blocks, size_t count) noexcept nogil:
    return block * (count // blocks) + (block if block < count % blocks else count % blocks)


# --- What several algorithms share. Sizes are in bytes unless they are called count. ---

# How to cut blocks of up to `nbytes` into segments: whole numbers of `unit` bytes (the size of
# an element), no longer than a block, and so long that `rounds` rounds of them stay below
# 2**SEQUENCE_SHIFT steps.
cdef inline size_t segment_size(const Call *c, size_t unit, size_t nbytes,
                                size_t rounds) noexcept nogil:
    cdef size_t most = (<size_t>1 << (SEQUENCE_SHIFT - 1)) // (rounds if rounds > 0 else 1)
    cdef size_t least = nbytes // (most if most > 0 else 1) // unit + 1
    cdef size_t wanted = c.segment_bytes // unit
    if wanted > nbytes // unit:
        wanted = nbytes // unit
    return (wanted if wanted > least else least) * unit


# How many segments a block has. An empty block has one, empty: its message still tells a
# peer which call this is.
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


cdef extern from "kernels/copy.h" nogil:
    void copy "cydist_copy"(char *out, const char *source, size_t nbytes)

cdef extern from "kernels/nontemporal.h" nogil:
    void stream "cydist_stream"(char *out, const char *source, size_t nbytes)

cdef enum:
    STREAM_BYTES = 4194304      # blocks as long or longer leave the caches to others


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


# Free what messages were sent from or received into; unless, after a failure, what is below may
# still use it: then it is lost.
cdef void let_go(Comm *t, void *memory) noexcept nogil
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

# As deep as allowed, at most `most`.
cdef void pipe_open(Pipe *pipe, size_t most) noexcept nogil
# Wait until message i - depth is sent, so that the memory it was sent from can be written.
cdef int pipe_ready(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil
# Post both halves of message i, after pipe_ready. A peer of -1: no such half.
cdef int pipe_post(Comm *t, Call *c, Pipe *pipe, size_t i, Block out, int to_peer,
                   Block into, int from_peer) noexcept nogil
# Wait until message i has arrived.
cdef int pipe_take(Comm *t, Call *c, Pipe *pipe, size_t i) noexcept nogil
# Wait for the sends; after a failure withdraw everything. Returns the status.
cdef int pipe_close(Comm *t, Call *c, Pipe *pipe) noexcept nogil

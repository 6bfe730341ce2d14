"""The narrow waist: the C types that every compiled module agrees on.

Algorithms use these types and nothing else. So a new transport or reduction changes no
algorithm, and a new algorithm changes nothing below this module.

Everything here is `noexcept nogil` C. Errors are data: a function returns a
`Status`, and the `Call` or `Request` holds what the error message will need.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from cydist._native.recent_calls cimport RecentCall
from cydist._native.sync cimport load_u64


cdef enum Status:           # 0, or negative; cydist/errors.py names the class
    OK = 0
    PENDING = 1             # of a Request only: posted, not complete
    TIMEOUT = -1            # the deadline passed
    PEER_LOST = -2          # the connection to a peer ended, or the peer's process did
    NO_MEMORY = -3
    MISMATCH = -4           # a peer is in another call, or sent another size or dtype
    INTERRUPTED = -5        # a signal handler raised; the engine holds the exception
    ABORTED = -6            # an abort flag was raised on the group
    CLOSED = -7             # the link was destroyed under the call
    RAISED = -8             # code above the engine raised its own exception
    UNREACHABLE = -9        # a peer's memory can be neither read nor written


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
    NO_CALL = 255           # on a rank that left the group without the call in question


cdef extern from "kernels/machine.h" nogil:
    enum:
        PAGE "CYDIST_PAGE"
        LINE "CYDIST_LINE"


cdef enum:
    RANK_BITS = 31          # an algorithm that doubles distances has at most so many rounds
    ANY_SOURCE = -1         # Request.peer of a receive from any rank
    EVEN = 1                # Fingerprint.flags: all blocks have the same size
    CHUNK = 2               # Fingerprint.flags: one of the calls that a longer one was cut into
    PRELIMINARY = 4         # Fingerprint.flags: a vote before a long call on a strided array
    JOINED = 8              # Fingerprint.flags: on every rank the blocks are adjacent in memory
    LARGEST_TAG = 0x7fffffff    # of the user's messages
    # Request.tag: the top bit tells a collective's messages from the user's.
    SEQUENCE_SHIFT = 24     # collective tag = COLLECTIVE_TAG | seq << 24 | step


cdef extern from *:
    """
    #define CYDIST_COLLECTIVE_TAG (1ULL << 63)
    #define CYDIST_SEQUENCE_MASK ((1ULL << 39) - 1)
    #define CYDIST_CONTROL_TAG (~0ULL)
    #define CYDIST_NOTES_TAG (1ULL << 40)
    #define CYDIST_FAILURE_TAG (CYDIST_NOTES_TAG + 1)
    #define CYDIST_UNSENT_TAG (CYDIST_NOTES_TAG + 2)
    #define CYDIST_CHECK_TAG (CYDIST_NOTES_TAG + 3)
    #define CYDIST_DEPARTURE_TAG (CYDIST_NOTES_TAG + 4)
    #define CYDIST_PIECE_TAG (1ULL << 61)
    #define CYDIST_DERIVED_TAG (1ULL << 62)
    """
    const uint64_t COLLECTIVE_TAG "CYDIST_COLLECTIVE_TAG"
    const uint64_t SEQUENCE_MASK "CYDIST_SEQUENCE_MASK"
    # The tag of control messages (src/abi/control_plane.pyx). A receive of one from ANY_SOURCE
    # survives the death of a member; it ends when no other member is left.
    const uint64_t CONTROL_TAG "CYDIST_CONTROL_TAG"
    # Messages that are not the user's, whose tags have 31 bits.
    const uint64_t NOTES_TAG "CYDIST_NOTES_TAG"     # what a rank of backend "nccl" calls
    const uint64_t FAILURE_TAG "CYDIST_FAILURE_TAG"  # why a group of backend "nccl" failed
    # never sent, over MPI: see MpiGroup.raise_pending_failure
    const uint64_t UNSENT_TAG "CYDIST_UNSENT_TAG"
    const uint64_t CHECK_TAG "CYDIST_CHECK_TAG"     # which call a rank leaves, over MPI
    const uint64_t DEPARTURE_TAG "CYDIST_DEPARTURE_TAG"  # a rank's last call, as the group ends
    const uint64_t PIECE_TAG "CYDIST_PIECE_TAG"     # and up: of each long message of a GPU's array
    const uint64_t DERIVED_TAG "CYDIST_DERIVED_TAG"     # of collectives made of messages


ctypedef struct Fingerprint:    # 40 bytes: what must be equal on all ranks of a call
    uint64_t seq                # number of the call in its group; 0 for point to point
    uint64_t count              # elements, where the API demands equal counts; else 0
    uint8_t collective          # Collective
    uint8_t dtype               # a code of kernels.h
    uint8_t op                  # a reduction of kernels.h; 0 for none
    uint8_t flags               # EVEN, CHUNK, PRELIMINARY, JOINED
    int32_t root                # group rank, or -1
    uint32_t detail             # hash of what has no field: a structured dtype, sizes of blocks
    uint32_t algorithm          # index in the table: ranks with different tuning tables notice it
    uint64_t note               # zero, except in a window: what the step announces besides its data


ctypedef struct Request:        # one posted send or receive; owned by the caller
    char *ptr
    size_t nbytes
    int peer                    # rank within the group; ANY_SOURCE for a receive
    uint64_t tag
    const Fingerprint *expected     # sent with a send; compared by a receive
    size_t layout               # MPI's datatype of strided memory from `ptr` on; 0: contiguous
    bint or_less                # of a receive: the message may have fewer bytes
    bint awaited                # the caller waits at once: no other thread needs to progress it
    size_t most_early           # of a send with more bytes: its receiver should not keep it; or 0
    # Set by the transport:
    int status                  # PENDING, then OK or an error
    int source                  # whose message completed a receive, or caused a MISMATCH
    size_t came_bytes           # of the message that completed a receive with `or_less`
    Fingerprint theirs          # of a receive that ended in MISMATCH
    size_t theirs_bytes
    # Owned by the transport until status leaves PENDING:
    void *link                  # the transport's state for it
    void *place                 # where that state is kept


# Only raise_flag and wait_flag access a word that ranks await (`posted`, `consumed`). The word
# after it counts the sleeping ranks.

ctypedef struct Flags:          # the head of a window; each word on its own cache line
    uint64_t consumed           # steps that the owner has read from all ranks, or fewer
    uint32_t sleepers
    uint32_t pad_consumed[13]
    uint64_t failure_coming     # not 0: a failure report is on its way to the owner
    uint64_t departed_after     # 1 + the steps that the owner took, once it ends the group
    uint64_t pad_failure_coming[6]
    uint64_t accessing          # 1 + the rank whose arrays the owner accesses; ~0: several; or 0
    uint64_t pad_accessing[7]
    uint64_t revoked            # not 0: access to the owner's arrays is revoked
    uint64_t pad_revoked[7]


cdef enum:
    TINY_BYTES = 16             # data up to this size travel in the head's own line
    KNOWN_ARRAYS = 8            # of a rank, that others can reach
    CALL_LENGTHS = 14           # classes of them: up to 32 KiB, 64 KiB and so on

ctypedef struct Head:           # of a step: one line, directly before its data if they are short
    uint64_t posted             # 1 + the step that was written here last, wherever its data are
    uint32_t sleepers
    uint32_t behind             # earlier steps that the writer had not consumed yet
    Fingerprint call            # the writer's call; its note and `tiny` may hold tiny data
    uint64_t tiny


ctypedef struct Window:         # one rank's shared memory in this group, mapped here
    Flags *flags
    char *heads                 # each a Head, then `short_bytes` of data
    char *slots                 # each `slot_bytes` of data, after a word of the step's


ctypedef struct Comm
ctypedef struct Call
ctypedef int (*Algorithm)(Comm *t, Call *c) noexcept nogil


ctypedef struct Windows:
    int heads                   # steps that a window holds; a power of two
    size_t short_bytes          # TINY_BYTES at least
    size_t stride               # from one head to the next
    int slots                   # for long data; a power of two
    size_t slot_bytes, slot_stride
    Window *of                  # one per group rank; for who writes, see window_protocol.pxd
    uint64_t first              # what the counts of steps begin with: see first_count
    uint64_t step               # steps this group has taken; the same on every rank
    uint64_t consumed           # steps that this rank has read from all ranks
    uint64_t released           # steps that all ranks are known to have consumed
    int crowd                   # if there are so many ranks, a wait sleeps without yielding
    int looks                   # looks at a flag that do not count as a wait; see spins_after
    int most_looks
    int spins                   # further looks before it yields
    int most_spins
    bint (*is_gone)(Comm *t, int peer) noexcept nogil  # whether this peer has left or died
    # Whether its process is certainly over.
    bint (*process_ended)(Comm *t, int peer) noexcept nogil
    # Copy from memory that a peer has exposed, or into it: OK, PEER_LOST or UNREACHABLE. A peer
    # may be this rank. NULL: the link cannot.
    int (*pull)(Comm *t, int peer, char *into, const char *theirs,
                size_t nbytes) noexcept nogil
    int (*push)(Comm *t, int peer, char *theirs, const char *source,
                size_t nbytes) noexcept nogil
    # Return where such memory is mapped here. NULL (also the function): it is not mapped.
    char *(*mapped)(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil
    # See src/algorithms/windows/direct.pyx:
    int reachable               # 1 if all ranks can do so, else -1; 0: not tried yet
    const char *known[KNOWN_ARRAYS]     # ends of those of this rank's arrays that others can reach
    int next_known
    # How many calls of a collective and length take the fallback without agreement.
    uint8_t[COLLECTIVES][CALL_LENGTHS] fallbacks


# The head that a rank writes in a step.
cdef inline Head *head_of(const Windows *w, int rank, uint64_t step) noexcept nogil:
    return <Head *>(w.of[rank].heads + (step & <uint64_t>(w.heads - 1)) * w.stride)


ctypedef struct ControlView:          # see src/abi/control_plane.pyx
    # Return OK, or the Status with which another rank has failed the group.
    int (*peek)(Comm *t) noexcept nogil
    # Send `peer`, for which this rank waits, the call that this rank is in.
    void (*probe)(Comm *t, int peer) noexcept nogil


# A comm: one group's view of a link. Links are shared by all the groups of a process.
ctypedef struct Comm:
    void *link                  # the link's own state
    int rank                    # of this process in the group
    int size
    const int *peers            # group rank -> the link's peer number
    uint64_t comm_id            # tells this group's messages from another group's
    Windows *windows            # NULL where the link has messages only
    volatile int *aborted       # 0, or the Status that ends all waits of this group
    ControlView *control              # control messages from other ranks; NULL: none
    uint64_t *farewells         # see has_left: a bit for each lane that reported it; or NULL
    # Of a part of a group, on which algorithms run other algorithms (hierarchy.pxd): the comm of
    # all members, and the rank there of each of the part. NULL: this is that comm.
    Comm *whole
    const int *in_whole
    RecentCall *recent          # of the collective that runs, for reports; or NULL
    void *hosts                 # a Hosts (hierarchy.pxd) where some members share a host; or NULL
    # Whether a member was lost together with its host. NULL: the link knows no hosts.
    bint (*host_is_lost)(const Comm *t, int rank) noexcept nogil
    # Whether a message to this member needs no new connection. NULL: none ever does, or unknown.
    bint (*is_connected)(const Comm *t, int rank) noexcept nogil
    # Return how many bytes for this member the system has taken and not sent yet, and in `written`
    # how many it has ever taken. NULL: the link cannot tell.
    uint64_t (*unsent)(const Comm *t, int rank, uint64_t *written) noexcept nogil

    # Post. The request and its memory stay in place until it is complete or cancelled.
    # Returns OK, or an error (then the request is not posted).
    int (*send)(Comm *t, Request *r) noexcept nogil
    int (*recv)(Comm *t, Request *r) noexcept nogil
    # Try to complete a request to or from a named rank within about a microsecond.
    # OK; else it is posted if r.link is not NULL, or nothing has happened. NULL: the link cannot.
    int (*at_once)(Comm *t, Request *r, bint sending) noexcept nogil
    # Make progress without blocking; returns r.status.
    int (*test)(Comm *t, Request *r) noexcept nogil
    # Move what can be moved of all messages, as a wait does, without blocking, and return whether
    # anything did: for waits for flags, which call it again and again while requests of collectives
    # are under way. NULL: messages arrive without it.
    bint (*progress)(Comm *t) noexcept nogil
    const int *in_calls         # the number of those requests; NULL: there never are any
    # Block until the request is complete or the deadline has passed. Returns r.status if complete,
    # else why the wait ended. Then it is still posted: the caller waits again or cancels.
    int (*wait)(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
    # Withdraw: after this returns, the transport touches neither the request nor its memory.
    void (*cancel)(Comm *t, Request *r) noexcept nogil
    # Windows: publish a flag of this rank (release), or wait until a peer's flag is at
    # least `value` (acquire). NULL if `windows` is NULL.
    void (*raise_flag)(Comm *t, uint64_t *flag, uint64_t value) noexcept nogil
    int (*wait_flag)(Comm *t, uint64_t *flag, uint64_t value,
                     int64_t deadline_ns) noexcept nogil
    # Return whether a message of a collective before call `seq` has arrived that no receive took.
    # Fills r.theirs and r.source. NULL: the link cannot tell.
    bint (*left_over)(Comm *t, uint64_t seq, Request *r) noexcept nogil
    # Return whether a message has arrived whose sender takes the call of `r` for another call.
    # `r` names its tag and fingerprint and need not be posted. Fills r.theirs and r.source.
    # NULL: the link cannot tell.
    bint (*contradicted)(Comm *t, Request *r) noexcept nogil
    # Return whether the library below may still use the memory of cancelled requests. Such memory
    # must not be freed. NULL: never.
    bint (*lingers)(Comm *t) noexcept nogil
    size_t library_comm         # the handle of the group in the library below; 0: it has none
    void *own                   # the link's own state for this group
    # Compare the last call that the library's own collectives ran, which may have returned before
    # it was compared. `compare` runs before each call, `drain` at the group's end. NULL: there was
    # no such call; the algorithm sets both.
    int (*compare)(Comm *t, Call *c) noexcept nogil
    int (*drain)(Comm *t, Call *c) noexcept nogil


# One rank's end of a transport: the Python object, and the state that its groups share.
# Transports derive from it. Peers are numbered 0..size-1; a link exchanges bytes and uses no store.
cdef class Link:
    cdef readonly int rank      # this process among the link's peers
    cdef readonly int size
    cdef list kept              # what `keep` was given
    # Fill in what the link knows about a group's comm: `link` and the functions.
    # rank, size, peers, comm_id and aborted are set before. May raise.
    cdef int attach_comm(self, Comm *t) except -1
    # The group's first collective is about to begin: fill in the windows if the members can share
    # memory. All members can, or none.
    cdef int open_windows(self, Comm *t, int64_t deadline_ns, int *peer) except -100
    # Free the windows of a group or of a part of one.
    cdef void close_windows(self, Comm *t) noexcept
    # The group is gone: free its windows, drop messages that arrived for it, and end its
    # pending requests with CLOSED. They may still be cancelled.
    cdef void detach_comm(self, Comm *t) noexcept


cdef extern from "kernels/reduction.h" nogil:
    # C because the loops that fill it in are C.
    ctypedef struct Reduction "cydist_reduction":
        size_t itemsize             # bytes per element
        bint commutative
        void *context               # PREMUL_SUM's factor; owned by the creator of this struct
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
    size_t depth                # messages of a pipeline under way each way, at most; 0: PIPE_DEPTH
    # Over sockets, sends of more bytes wait for their receivers: this rank is faster than those,
    # and would fill their memory with messages that they cannot take yet. 0: none waits.
    size_t most_early
    int64_t deadline_ns         # monotonic clock; valid once `before_wait` was called
    # NULL, or to be called (see patiently) before the first wait of more than a few looks. It sets
    # the deadline and releases what others may need. A call that does not wait needs neither.
    void (*before_wait)(Call *c) noexcept nogil
    Fingerprint fingerprint
    int collective              # which runs; in a part of a group another than the fingerprint's
    # What runs the call in place of an algorithm that finds that it cannot; the same on all ranks.
    # NULL for algorithms that always can.
    Algorithm fallback
    bint adaptive               # the algorithm may run it also where it is faster
    # For the error message; set by the code that notices the failure:
    int failed_peer             # group rank, or -1
    int failed_step
    Fingerprint theirs
    size_t theirs_bytes
    size_t our_bytes
    # The call failed while an unresponsive peer may still write into its arrays, once. They must
    # never be freed.
    bint still_accessed


# Return whether all ranks know that all blocks have the same size. In a part of a group they may
# differ where the group's do not.
cdef inline bint has_even_blocks(const Comm *t, const Call *c) noexcept nogil:
    return c.fingerprint.flags & EVEN != 0 and t.whole == NULL


# Call this before any wait.
cdef inline void patiently(Call *c) noexcept nogil:
    if c.before_wait != NULL:
        c.before_wait(c)


# Return a bit for each lane on which this member said that it left the group while the link goes
# on.
cdef inline uint64_t farewell_of(const Comm *t, int rank) noexcept nogil:
    if t.whole != NULL:
        rank = t.in_whole[rank]
        t = t.whole
    # What the peer did before its notice is seen after this: find_departed looks for it.
    return load_u64(&t.farewells[rank]) if t.farewells != NULL else 0


# Return whether this member left the group while the link goes on; of this rank: whether any did.
cdef inline bint has_left(const Comm *t, int rank) noexcept nogil:
    return farewell_of(t, rank) != 0


# For reports: the collective of this comm waits for `peer` (-1: not known), and has waited. Between
# the two the rank may sleep.
cdef void note_wait_for(Comm *t, int peer) noexcept nogil
cdef void note_waited_for(Comm *t) noexcept nogil


# The clock of every deadline: CLOCK_MONOTONIC, in nanoseconds.
cdef int64_t now_ns() noexcept nogil

# Every wait calls this when a slice of waiting ends (at most 50 ms after the last time):
# OK, or why the wait must end: the group's abort flag, a signal, the deadline.
cdef int slice_end(Comm *t, int64_t deadline_ns) noexcept nogil

# What the counters of groups, windows, rings and connections begin with: 0, but where a test lets
# them pass the end of their words. The same on all ranks.
cdef uint64_t first_count() noexcept nogil

# Set once by the engine: runs pending signal handlers; nonzero if one raised.
ctypedef int (*Interrupted)() noexcept nogil
cdef void set_interrupted(Interrupted f) noexcept nogil


# Set once by src/algorithms/windows/departure.pyx. The group ends here: compare its last call,
# given by the Call's fingerprint, with the others' until the deadline. `known`: all members are
# known to have made it. `alone`: the others do not part now, and this rank waits for none. Returns
# OK, or why not: MISMATCH as of a call, PEER_LOST when a member left before its call was received.
ctypedef int (*CompareLast)(Comm *t, Call *c, bint known, bint alone) noexcept nogil
cdef void set_compare_last(CompareLast f) noexcept nogil
cdef int compare_last(Comm *t, Call *c, bint known, bint alone) noexcept nogil

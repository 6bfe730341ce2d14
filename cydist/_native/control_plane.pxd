"""What the ranks of a group tell each other besides the messages of their calls.

A rank that waits long for a peer tells it which call it is in (ASK). Whoever finds that two
ranks are in different calls, or fails in a call for any other reason, tells all members
(FAILED), and their waits end. So no rank waits for one that has given up, and a mismatch
that leaves everybody receiving is found.
"""
from libc.stdint cimport int32_t, uint64_t

from cydist._native.abi cimport Board, Call, Fingerprint, Request, Transport


cdef enum:
    RECENT = 128                # calls that a rank remembers: more than it may be ahead of others
    EARLY = 8                   # notices kept from those who are ahead; they will ask again
    CALL_BYTES = 64             # of a call's name and number, ended by a zero


cdef enum Kind:
    ASK = 1
    FAILED = 2


ctypedef struct Notice:         # as it travels
    int32_t kind
    int32_t status              # FAILED: why
    int32_t teller              # group rank that says so
    int32_t peer                # FAILED: group rank that it is about, or -1
    int32_t step                # FAILED: of the algorithm, or -1
    int32_t zero
    uint64_t our_bytes
    uint64_t their_bytes
    Fingerprint ours            # the call that the teller is in
    Fingerprint theirs          # FAILED with MISMATCH: what `peer` was doing
    char call[CALL_BYTES]       # FAILED: what the teller was doing, where `ours` does not say


ctypedef struct Question:       # an ASK of ours that a peer has not taken yet
    Request send
    Notice notice
    Question *next


ctypedef struct Notices:
    Board board                 # what a view points to
    int busy                    # one thread at a time
    int failed                  # OK, or the Status of `failure`
    bint told                   # the others know of it
    Notice failure
    Request receive             # for the next notice; always posted
    Notice inbox
    bint listening
    bint closed                 # nothing is posted any more
    uint64_t entered            # number of the current, or last, call
    Fingerprint recent[RECENT]  # calls by their number modulo RECENT
    int early_count
    Notice early[EARLY]
    Question *questions         # on their way: one to each member at most
    uint64_t asked              # how many there have been
    Request *tells              # of `failure`, to each member; NULL: nothing was told from here


# The notice of a failure here: by itself, and of a call.
cdef Notice new_notice(int status, int rank, int peer, int step) noexcept nogil
cdef Notice notice_of(const Call *call, int status, int rank) noexcept nogil

# Attach to a view that was opened; detach before it is closed.
cdef void open_notices(Notices *n, Transport *t) noexcept nogil
cdef void close_notices(Notices *n, Transport *t) noexcept nogil

# Hear what has arrived. OK, or the Status with which the group has failed.
cdef int hear_now(Notices *n, Transport *t) noexcept nogil

# A call begins. OK, or the Status that ends it because the group has failed.
cdef int enter(Notices *n, Transport *t, Call *c) noexcept nogil

# The last call that has begun; zero: there was none.
cdef Fingerprint last_call(Notices *n) noexcept nogil

# The group failed here: keep it, unless another failure is known already, and tell nobody yet.
cdef void remember(Notices *n, const Notice *failure) noexcept nogil
# The group failed here: keep it, unless another failure is known already, and tell all members
# what is known, with `failure` made clearer where it can be. Waits at most TELL_NS for those who
# do not take it at once, such as a rank to which the connection must be made; what is left goes
# on until the group is closed.
cdef void fail(Notices *n, Transport *t, Notice *failure) noexcept nogil

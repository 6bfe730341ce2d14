"""What the ranks of a group tell each other besides the messages of their calls.

A rank that waits long for a peer tells it which call it is in (ASK). Whoever finds that two
ranks are in different calls, or fails in a call for any other reason, tells all members
(FAILED), and their waits end. So no rank waits for one that has given up, and a mismatch
that leaves everybody receiving is found.
"""
from libc.stdint cimport int32_t, uint64_t

from cydist._native.abi cimport ControlView, Call, Fingerprint, Request, Comm


cdef enum:
    RECENT = 128                # calls that a rank remembers: more than it may be ahead of others
    EARLY = 8                   # notices kept from those who are ahead; they will ask again
    CALL_BYTES = 64             # of a call's name and number, ended by a zero


cdef enum Kind:
    ASK = 1
    FAILED = 2


ctypedef struct ControlMessage:         # as it travels
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
    ControlMessage notice
    Question *next


ctypedef struct ControlPlane:
    ControlView board                 # what a view points to
    int busy                    # one thread at a time
    int failed                  # OK, or the Status of `failure`
    bint told                   # the others know of it
    ControlMessage failure
    Request receive             # for the next notice; always posted
    ControlMessage inbox
    bint listening
    bint closed                 # nothing is posted any more
    uint64_t entered            # number of the current, or last, call
    Fingerprint recent[RECENT]  # calls by their number modulo RECENT
    int early_count
    ControlMessage early[EARLY]
    Question *questions         # on their way: one to each member at most
    uint64_t asked              # how many there have been
    Request *tells              # of `failure`, to each member; NULL: nothing was told from here


# The notice of a failure here: by itself, and of a call.
cdef ControlMessage new_notice(int status, int rank, int peer, int step) noexcept nogil
cdef ControlMessage notice_of(const Call *call, int status, int rank) noexcept nogil

# Attach to a view that was opened; detach before it is closed.
cdef void open_notices(ControlPlane *n, Comm *t) noexcept nogil
cdef void close_notices(ControlPlane *n, Comm *t) noexcept nogil

# Hear what has arrived. OK, or the Status with which the group has failed.
cdef int hear_now(ControlPlane *n, Comm *t) noexcept nogil

# A call begins. OK, or the Status that ends it because the group has failed.
cdef int enter(ControlPlane *n, Comm *t, Call *c) noexcept nogil

# The last call that has begun; zero: there was none.
cdef Fingerprint last_call(ControlPlane *n) noexcept nogil

# The group failed here: keep it, unless another failure is known already, and tell nobody yet.
cdef void remember(ControlPlane *n, const ControlMessage *failure) noexcept nogil
# The group failed here: keep it, unless another failure is known already, and tell all members
# what is known, with `failure` made clearer where it can be. Waits at most TELL_NS for those who
# do not take it at once, such as a rank to which the connection must be made; what is left goes
# on until the group is closed.
cdef void fail(ControlPlane *n, Comm *t, ControlMessage *failure) noexcept nogil

"""The control messages that the ranks of a group exchange besides their calls' messages.

A rank that waits long for a peer sends it the call that it is in (PROBE). A rank that finds two
ranks in different calls, or fails for any other reason, reports it to all members (FAILED). Their
waits then end. So no rank waits for one that has given up, and a mismatch
that leaves all ranks receiving is found.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t

from cydist._native.abi cimport ControlView, Call, Fingerprint, Request, Comm


cdef enum:
    RECENT = 128                # calls that a rank remembers: more than it may be ahead of others
    EARLY = 8                   # messages kept from ranks that are ahead; they will ask again
    CALL_BYTES = 64             # of a call's name and number, zero-terminated


cdef enum MessageKind:
    PROBE = 1
    FAILED = 2


ctypedef struct ControlMessage:         # as it is sent
    int32_t kind
    int32_t status              # FAILED: why
    int32_t teller              # group rank that sends it
    int32_t peer                # FAILED: group rank that it is about, or -1
    int32_t step                # FAILED: of the algorithm, or -1
    int32_t host_lost           # FAILED with PEER_LOST: whether the peer's whole host is silent
    uint64_t our_bytes
    uint64_t their_bytes
    Fingerprint ours            # the call that the teller is in
    Fingerprint theirs          # FAILED with MISMATCH: the call that `peer` was in
    char call[CALL_BYTES]       # FAILED: the teller's call, where `ours` does not say it


ctypedef struct Probe:          # a PROBE of this rank that a peer has not taken yet
    Request send
    ControlMessage message
    Probe *next


ctypedef struct ControlPlane:
    ControlView view            # the part that a comm points to
    int busy                    # one thread at a time
    int failed                  # OK, or the Status of `failure`
    bint failure_is_known       # the other members know of it
    ControlMessage failure
    Request receive             # for the next control message; always posted
    ControlMessage inbox
    int windows_open            # the group's windows are there, for all threads of this rank
    bint listening
    bint closed                 # no request is posted any more
    int64_t next_look           # when a call that begins looks for messages again
    uint64_t entered            # number of the current, or last, call
    Fingerprint recent[RECENT]  # calls by their number modulo RECENT
    int early_count
    ControlMessage early[EARLY]
    Probe *probes               # on their way: one to each member at most
    uint64_t probes_sent        # questions sent so far
    Request *failure_sends      # of `failure`, to each member; NULL: this rank reported nothing


# Return the report of a failure on this rank: without a call, and of a call.
cdef ControlMessage failure_message(int status, int rank, int peer, int step) noexcept nogil
cdef ControlMessage failure_message_of(const Call *call, int status, int rank) noexcept nogil

# Attach to a comm that was opened; detach before it is closed.
cdef void open_control_plane(ControlPlane *n, Comm *t) noexcept nogil
cdef void close_control_plane(ControlPlane *n, Comm *t) noexcept nogil

# Process the control messages that have arrived. OK, or the Status that failed the group.
cdef int poll_now(ControlPlane *n, Comm *t) noexcept nogil

# A call begins. OK, or the Status that ends it because the group has failed.
cdef int begin_call(ControlPlane *n, Comm *t, Call *c) noexcept nogil

# A call has ended well. OK, or the Status that failed the group: a peer was in another call.
cdef int look_back(ControlPlane *n, Comm *t, const Call *c) noexcept nogil

# No further call begins. Return the last one, or zero, and OK, or the Status that failed the group.
cdef int end_calls(ControlPlane *n, Comm *t, Fingerprint *last) noexcept nogil

# The group failed here: keep the failure unless another is known already; report it to no rank yet.
cdef void record_failure(ControlPlane *n, const ControlMessage *failure) noexcept nogil
# The group failed here: keep the failure unless another is known already, and report the known one
# to all members. `failure` is made clearer first where it can be. Waits at most SEND_FAILURE_NS for
# members that do not take the report at once, such as one without a connection yet. Unfinished
# sends go on until the group is closed.
cdef void broadcast_failure(ControlPlane *n, Comm *t, ControlMessage *failure) noexcept nogil

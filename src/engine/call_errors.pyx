"""A call's failure, as data and as text."""
from libc.string cimport memcmp

from cydist._native.abi cimport (
    ABORTED, BARRIER, CHUNK, CLOSED, COLLECTIVES, EVEN, INTERRUPTED, JOINED, MISMATCH,
    MONITORED_BARRIER, NO_CALL, NO_MEMORY, OK, PEER_LOST, POINT_TO_POINT, PRELIMINARY, RAISED,
    TIMEOUT, UNREACHABLE, Call, Fingerprint,
)
from cydist._native.algorithm_table cimport Entry, row_of
from cydist._native.control_plane cimport RECENT, ControlMessage, ControlPlane

from cydist._native import kernels
from cydist._native.abi import COLLECTIVE_NAMES

CODES = {name: code for code, name in enumerate(COLLECTIVE_NAMES)}

# The names of Status values, for errors.py.
STATUS_NAMES = {
    OK: "ok", TIMEOUT: "timeout", PEER_LOST: "peer_lost", NO_MEMORY: "no_memory",
    MISMATCH: "mismatch", INTERRUPTED: "interrupted", ABORTED: "aborted", CLOSED: "closed",
    RAISED: "raised", UNREACHABLE: "unreachable",
}
STATUSES = {name: code for code, name in STATUS_NAMES.items()}

DTYPE_NAMES = {code: name for name, code in kernels.DTYPES.items()}
OP_NAMES = {code: name for name, code in kernels.OPS.items()}


class CallError(Exception):
    """The reason for which a call ended early, as data.

    Attributes:
        status: A name of STATUS_NAMES.
        peer: Group rank it was about, or -1.
        step: The algorithm's step, or -1.
        ours, theirs: What this rank and the peer were doing, as text (mismatches only).
        teller: Group rank on which it failed and which reported it, or -1: this one; then `ours` is
            what the teller was doing.
        call: Of a mismatch: the name and the number of the collective in which ranks differ, which
            may be an earlier one; None: of a message, or not known.
        awaited: Of a timeout: what did not happen, if it was not a message or step of `peer`.
        host_lost: Of a lost peer: its whole host is silent, as the teller knows.
    """

    def __init__(self, status, peer=-1, step=-1, ours="", theirs="", teller=-1):
        super().__init__(status, peer, step, ours, theirs, teller)
        self.teller = teller
        self.status = status
        self.peer = peer
        self.step = step
        self.ours = ours
        self.theirs = theirs
        self.call = None
        self.awaited = ""
        self.host_lost = False


IN_CHUNKS = "in chunks, as arrays on a GPU go"


cdef str describe_call(const Fingerprint *f, size_t nbytes, const Fingerprint *other,
                       size_t other_bytes):
    """Describe a fingerprint: `all_reduce #12 of 1000 float32, op SUM`.

    Args:
        other: The fingerprint that it disagrees with: for the same call only the differences are
            described; NULL: there is none.
    """
    cdef bint alone = other == NULL or f.collective != other.collective or f.seq != other.seq
    cdef bint one_call = other != NULL and not alone
    cdef const Entry *row
    cdef str name = COLLECTIVE_NAMES[f.collective] if f.collective < COLLECTIVES else "?"
    if f.collective == NO_CALL:
        return f"it has left the group without its call #{f.seq}"
    if f.flags & PRELIMINARY and f.count == 0:
        return (f"a collective #{f.seq}, the first for which MPI may serve the group: its ranks "
                "ask each other before it")
    if f.collective == POINT_TO_POINT:
        words = f"a message of {f.count} {DTYPE_NAMES.get(f.dtype, 'other')}"
        return f"{words}, {IN_CHUNKS}" if f.flags & CHUNK else f"{words} ({nbytes} bytes)"
    words = f"{name} #{f.seq}"
    if f.collective == MONITORED_BARRIER:
        return words
    size = []
    if f.collective != BARRIER and f.count and (alone or f.count != other.count):
        size.append(str(f.count))
    if f.collective != BARRIER and (alone or f.dtype != other.dtype):
        size.append(DTYPE_NAMES.get(f.dtype, "other"))
    elif size:
        size.append("element" if f.count == 1 else "elements")
    parts = [f"{words} of {' '.join(size)}" if size else words]
    if f.flags & CHUNK and (alone or not other.flags & CHUNK):
        parts.append(IN_CHUNKS)
    if f.flags & JOINED and (alone or not other.flags & JOINED):
        parts.append("on a GPU that MPI reads")
    if f.flags & PRELIMINARY and (alone or not other.flags & PRELIMINARY):
        parts.append("to find ranks with a strided array before a call of more than 16 MiB")
    if f.op and (alone or f.op != other.op):
        parts.append(f"op {OP_NAMES.get(f.op, f.op)}")
    if f.root >= 0 and (alone or f.root != other.root):
        parts.append(f"root {f.root}")
    if one_call and (f.flags ^ other.flags) & EVEN:
        parts.append("all blocks of one size" if f.flags & EVEN else "blocks of any size")
    # The size adds information only if nothing else explains the difference and both are known.
    if nbytes and (alone or (other_bytes and nbytes != other_bytes and not size)):
        parts.append(f"{nbytes} bytes in this message")
    if other == NULL or (one_call and f.algorithm != other.algorithm):
        row = row_of(f.algorithm)
        parts.append(f"algorithm {row.name.decode() if row != NULL else f.algorithm}")
    if one_call and f.detail != other.detail:
        parts.append(
            "a structured dtype's fields, sizes of blocks, sizes of coalesced arrays, and of "
            f"segments (CYDIST_SEGMENT_BYTES) hash to {f.detail:#x}")
    return ", ".join(parts)


cdef object with_call(object failure, const Fingerprint *call):
    """Add this rank's call to a mismatch."""
    if POINT_TO_POINT < call.collective < COLLECTIVES and call.seq:
        failure.call = COLLECTIVE_NAMES[call.collective], call.seq
    return failure


cdef object recorded_failure(const ControlPlane *control_plane, int rank):
    """Return the CallError that the control messages report, as seen from group rank `rank`."""
    cdef const ControlMessage *n = &control_plane.failure
    cdef const Fingerprint *mine = &control_plane.recent[n.ours.seq % RECENT]
    cdef bint mismatch = n.status == MISMATCH
    cdef const Fingerprint *other = &n.theirs if mismatch else NULL
    cdef str status = STATUS_NAMES.get(n.status, f"status {n.status}")
    cdef str words = (<const char *>n.call).decode("utf-8", "replace")
    # A part of a call has words, too.
    if n.teller == rank and ((words and n.ours.seq == 0) or n.status == ABORTED):
        # Another call of this rank failed the group, or abort did.
        return CallError(STATUS_NAMES[ABORTED], ours=words)
    ours = words or describe_call(&n.ours, n.our_bytes, other, n.their_bytes)
    # With words, calls above the engine were compared: only the teller knows how.
    theirs = "" if words else describe_call(&n.theirs, n.their_bytes, &n.ours, n.our_bytes)
    mismatch = mismatch and not words
    # Of two ranks that differ, this rank agrees with one, or is one.
    if n.teller == rank or (mismatch and memcmp(mine, &n.ours, sizeof(Fingerprint)) == 0):
        failure = CallError(status, n.peer, n.step, ours, theirs)
        return with_call(failure, &n.ours) if mismatch else failure
    if mismatch and (n.peer == rank or memcmp(mine, &n.theirs, sizeof(Fingerprint)) == 0):
        return with_call(CallError(status, n.teller, n.step, theirs, ours), &n.theirs)
    if mismatch:
        failure = CallError(status, n.peer, n.step, ours, theirs, n.teller)
        return with_call(failure, &n.ours)
    failure = CallError(status, n.peer, n.step, ours, theirs, n.teller)
    failure.host_lost = n.status == PEER_LOST and n.host_lost != 0
    return failure


cdef list never_freed = []


cdef int keep_still_accessed(const Call *c, object one, object other) except -1:
    """Keep the arrays of a failed call alive if a peer may still write into them."""
    if c.still_accessed:
        never_freed.append((one, other))
    return 0

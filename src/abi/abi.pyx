"""The clock, the end of every slice of waiting, and the base class of links."""
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from cydist._native.recent_calls cimport (
    RecentCall, RecentCalls, begin_ring_at, note_wait, note_waited, recent_calls,
)
from cydist._native.sync cimport load_int


cdef class Link:
    """One rank's end of a transport: `address()`, `close()`, and what its groups share."""

    cdef int attach_comm(self, Comm *t) except -1:
        raise NotImplementedError(f"{type(self).__name__} opens no views")

    cdef int open_windows(self, Comm *t, int64_t deadline_ns, int *peer) except -100:
        return OK

    cdef void close_windows(self, Comm *t) noexcept:
        pass

    cdef void detach_comm(self, Comm *t) noexcept:
        pass

    def keep(self, one, other):
        """Keep objects alive whose memory the transport may still use."""
        if self.kept is None:
            self.kept = []
        self.kept.append((one, other))

    def close(self):
        """Leave: the peers learn that this rank is gone."""

    def lost(self, int peer):
        """Return why this peer cannot be reached any more, for messages; "" while it can."""
        return ""

    def left(self, int peer):
        """Return whether this peer has left on purpose, by closing its link."""
        return False


# The values of abi.pxd that Python uses. It has no copies of them.

COLLECTIVE_NAMES = (
    "point_to_point", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier", "scan", "exscan", "monitored_barrier",
)   # by Collective
assert len(COLLECTIVE_NAMES) == COLLECTIVES and COLLECTIVE_NAMES[EXSCAN] == "exscan"
FLAG_BITS = {"EVEN": EVEN, "CHUNK": CHUNK, "PRELIMINARY": PRELIMINARY, "JOINED": JOINED}
MESSAGE_TAGS = {
    "NOTES": NOTES_TAG, "FAILURE": FAILURE_TAG, "UNSENT": UNSENT_TAG, "CHECK": CHECK_TAG,
    "DEPARTURE": DEPARTURE_TAG, "PIECE": PIECE_TAG, "DERIVED": DERIVED_TAG,
}
PAGE_BYTES = PAGE

cdef const RecentCalls *recent = recent_calls()
cdef Interrupted interrupted = NULL
cdef CompareLast compare_last_hook = NULL
cdef uint64_t counters_begin = 0


cdef int64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


def begin_counters_at(uint64_t count) -> None:
    """Let the counters of this process's groups, connections and rings of calls that are made from
    now on begin with this number instead of 0, for tests."""
    global counters_begin
    if count != counters_begin:
        begin_ring_at(count)
    counters_begin = count


cdef uint64_t first_count() noexcept nogil:
    return counters_begin


cdef void note_wait_for(Comm *t, int peer) noexcept nogil:
    cdef RecentCall *call = t.recent if t.whole == NULL else t.whole.recent
    if call != NULL:
        note_wait(recent, call, peer if t.whole == NULL or peer < 0 else t.in_whole[peer])


cdef void note_waited_for(Comm *t) noexcept nogil:
    cdef RecentCall *call = t.recent if t.whole == NULL else t.whole.recent
    if call != NULL:
        note_waited(recent, call)


cdef void set_interrupted(Interrupted f) noexcept nogil:
    global interrupted
    interrupted = f


cdef void set_compare_last(CompareLast f) noexcept nogil:
    global compare_last_hook
    compare_last_hook = f


cdef int compare_last(Comm *t, Call *c, bint known, bint alone) noexcept nogil:
    return compare_last_hook(t, c, known, alone)


cdef int slice_end(Comm *t, int64_t deadline_ns) noexcept nogil:
    cdef int aborted = load_int(t.aborted)
    if aborted != OK:
        return aborted
    if t.control != NULL:
        aborted = t.control.peek(t)
        if aborted != OK:
            return aborted
    if interrupted != NULL and interrupted() != 0:
        return INTERRUPTED
    if now_ns() >= deadline_ns:
        return TIMEOUT
    return OK

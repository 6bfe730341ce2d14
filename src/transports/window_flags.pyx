"""Windows: flags that one rank raises and the others await.

A wait has spun before it comes here, if there are cores for it. Here it yields, then sleeps on a
futex. So a long wait costs no core, and a short one no system call.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.abi cimport (
    Flags, Head, LINE, OK, PEER_LOST, Comm, Windows, first_count, has_left, now_ns, slice_end,
)
from cydist._native.failpoints cimport SEND_MID, WAIT, reach
from cydist._native.sync cimport (
    YIELD_NS, add_u32, fence, futex_wait_shared, futex_wake_shared, has_reached, load_int, load_u32,
    load_u64, low_half, sched_yield, slice_until, spins_after_yield, swap_u64,
)


cdef enum:
    HEADS = 8                   # for each slot
    HEAD_BYTES = 192            # of short data behind a head, at most
    RANKS_IN_A_CROWD = 16       # for each core
    MOVE_NS = 200000            # the first sleep while messages are under way


cdef size_t window_bytes(int slots, size_t slot_bytes) noexcept nogil:
    return (sizeof(Flags) + slots * HEADS * stride_of(short_bytes_of(slot_bytes))
            + slots * stride_of(slot_bytes))


cdef inline size_t short_bytes_of(size_t slot_bytes) noexcept nogil:
    return min(slot_bytes // 4, <size_t>HEAD_BYTES)


cdef inline size_t stride_of(size_t nbytes) noexcept nogil:
    # Cache lines arrive in pairs: a head and the first line of its data are one pair.
    return (nbytes + 3 * LINE - 1) // (2 * LINE) * (2 * LINE)


cdef void lay_out(Windows *w, char *memory, int size, int slots, size_t slot_bytes,
                  int cores) noexcept nogil:
    cdef size_t each = window_bytes(slots, slot_bytes)
    cdef int i
    w.crowd = RANKS_IN_A_CROWD * cores
    w.heads = slots * HEADS
    w.short_bytes = short_bytes_of(slot_bytes)
    w.stride = stride_of(w.short_bytes)
    w.slots = slots
    w.slot_bytes = slot_bytes
    w.slot_stride = stride_of(slot_bytes)
    w.first = w.step = w.consumed = w.released = first_count()
    for i in range(size):
        w.of[i].flags = <Flags *>(memory + i * each)
        w.of[i].heads = <char *>(w.of[i].flags + 1)
        w.of[i].slots = w.of[i].heads + w.heads * w.stride + sizeof(Head)


cdef void begin_flags(char *memory, int size, int slots, size_t slot_bytes) noexcept nogil:
    cdef uint64_t first = first_count()
    cdef Head *head
    cdef size_t i
    cdef int _rank
    if first == 0:
        return                  # as the memory is
    for _rank in range(size):
        (<Flags *>memory).consumed = first
        for i in range(<size_t>slots * HEADS):
            head = <Head *>(memory + sizeof(Flags) + i * stride_of(short_bytes_of(slot_bytes)))
            head.posted = first
        memory += window_bytes(slots, slot_bytes)


cdef inline uint32_t *sleepers(uint64_t *flag) noexcept nogil:
    return <uint32_t *>(flag + 1)


cdef void raise_flag(Comm *t, uint64_t *flag, uint64_t value) noexcept nogil:
    reach(SEND_MID)
    # The sleeper announces itself and looks again, so one of the two sees the other.
    swap_u64(flag, value)
    if load_u32(sleepers(flag)) != 0:
        futex_wake_shared(low_half(flag))


cdef int wait_flag(Comm *t, uint64_t *flag, uint64_t value,
                   int64_t deadline_ns) noexcept nogil:
    cdef Windows *w = t.windows
    cdef int64_t back, now = now_ns()
    cdef int64_t until = min(now + YIELD_NS, deadline_ns)
    while now < until:
        if has_reached(load_u64(flag), value):
            return OK
        if has_messages(t):
            t.progress(t)
            now = now_ns()
        if t.size >= w.crowd:
            break               # it would only run again after most of them have yielded in vain
        sched_yield()
        back = now_ns()
        w.spins = spins_after_yield(w.spins, w.most_spins, back - now)
        now = back
    return sleep_until_raised(t, flag, value, deadline_ns)


cdef int sleep_until_raised(Comm *t, uint64_t *flag, uint64_t value,
                            int64_t deadline_ns) noexcept nogil:
    cdef int status
    cdef uint64_t seen
    cdef int64_t now = now_ns()
    cdef int64_t until = slice_until(now, deadline_ns)
    while True:
        add_u32(sleepers(flag), 1)
        fence()
        seen = load_u64(flag)
        reach(WAIT)
        if not has_reached(seen, value):
            sleep_while(t, flag, seen, until)
        add_u32(sleepers(flag), <uint32_t>-1)
        if has_reached(load_u64(flag), value):
            return OK
        now = now_ns()
        if now >= until:
            if owner_is_gone(t, flag):
                fence()
                # The owner may have raised the flag before it left.
                return OK if has_reached(load_u64(flag), value) else PEER_LOST
            status = slice_end(t, deadline_ns)
            if status != OK:
                return status
            now = now_ns()
            until = slice_until(now, deadline_ns)


cdef inline bint has_messages(const Comm *t) noexcept nogil:
    """Return whether messages of a call are under way, which other ranks may be waiting for."""
    return t.in_calls != NULL and load_int(<int *>t.in_calls) != 0


cdef void sleep_while(Comm *t, uint64_t *flag, uint64_t seen, int64_t until) noexcept nogil:
    """Sleep while the flag has this value. While messages are under way, wake up to move them, but
    ever more rarely if none moves."""
    cdef int64_t now = now_ns(), nap = MOVE_NS
    while has_messages(t) and load_u64(flag) == seen and now < until:
        futex_wait_shared(low_half(flag), <uint32_t>seen, min(until - now, nap))
        nap = <int64_t>MOVE_NS if t.progress(t) else 2 * nap
        now = now_ns()
    if now < until:
        futex_wait_shared(low_half(flag), <uint32_t>seen, until - now)


cdef bint owner_is_gone(Comm *t, const uint64_t *flag) noexcept nogil:
    cdef Windows *w = t.windows
    cdef size_t distance = <const char *>flag - <const char *>w.of[0].flags
    cdef int rank = <int>(distance // window_bytes(w.slots, w.slot_bytes))
    return w.is_gone(t, rank) or has_left(t, rank)

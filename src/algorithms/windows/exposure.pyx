"""Access to other ranks' arrays during a call; cydist/_native/exposure.pxd explains it."""
from libc.stdint cimport int64_t, uint8_t, uint64_t

from cydist._native.abi cimport (
    BROADCAST, CALL_LENGTHS, COLLECTIVES, KNOWN_ARRAYS, MISMATCH, OK, PEER_LOST, REDUCE,
    UNREACHABLE,
    Block, Call, Comm, Windows, has_even_blocks, head_of, now_ns,
    patiently, slice_end,
)
from cydist._native.pipeline cimport STREAM_BYTES, copy, copy_block, segment_of, segments_in
from cydist._native.failpoints cimport SEND_MID, reach
from cydist._native.window_protocol cimport (
    call_of, acquire_slot, consume, wait_for_peer, wait_for_all, part_bytes, publish, slot_of,
)
from cydist._native.sync cimport (
    GRACE_NS, SLICE_NS, fence, load_int, load_u64, sched_yield, store_int, store_u64, swap_u64,
)


cdef enum:
    NEGOTIATED_BYTES = 65536
    YES = 1                     # the values of a step's note
    NO = 2                      # NO + n, of the rank that decides: nor in the next n calls

cdef uint64_t ALL_RANKS = ~0ULL     # Flags.visiting: several peers


# Whether to expose, and the order of steps

cdef int run_exposed(Comm *t, Call *c, const Block *first, int firsts, const Block *second,
                     int seconds, LocalWork local_work, Body body) noexcept nogil:
    """Expose these blocks, run the body, and return when all ranks are done."""
    cdef Access a
    cdef bint usable = False
    cdef bint early = local_work != NULL and first[0].nbytes >= STREAM_BYTES
    cdef Trial *trial = trial_of(t, c, first, firsts)
    cdef uint8_t *left = fallbacks_left(t, c, first[0].nbytes * firsts)
    cdef int64_t began = now_ns() if trial != NULL else 0
    cdef int i, note, status = OK
    patiently(c)
    if left != NULL and left[0] > 0:
        left[0] -= 1
        status = c.fallback(t, c)
        if trial != NULL and status == OK:
            count_call(trial, FALLBACK, began)
        return status
    a.scratch = scratch_slots(t, c)
    if a.scratch > 0 and t.windows.reachable == 0:
        status = probe_reachability(t, c)
        began = now_ns()        # the first call of all, to which ranks come at any time
    if status != OK:
        return status
    if a.scratch == 0 or (t.windows.reachable < 0 and not should_negotiate(t, c, first[0].nbytes)):
        return c.fallback(t, c)
    a.step = t.windows.step
    a.next_check = now_ns() + SLICE_NS
    note = YES if trial == NULL else way_to_try(trial, a.next_check - SLICE_NS)
    status = publish_blocks(t, c, first, firsts, second, seconds, note)
    if status == OK:
        if early:
            local_work(t, c)
        status = wait_for_all(t, c, a.step)
    if status == OK:
        usable = all_agree(t, a.step)
        if left != NULL:
            left[0] = fallbacks_after(call_of(t, judge_of(t, c), a.step).note)
        if not usable:
            status = consume(t, c, a.step + 1, True)
        else:
            status = acquire_slot(t, c, a.step + <uint64_t>a.scratch, t.windows.slot_bytes)
            if status == OK:
                status = body(t, c, &a)
    if status == OK and usable:
        for i in range(a.scratch):
            publish(t, c, a.step + 1 + i, 0)
        if local_work != NULL and not early:
            local_work(t, c)    # while the others finish
        status = consume(t, c, a.step + 1 + <uint64_t>a.scratch, True)
    if status != OK:
        revoke_access(t, c)
        return status
    t.windows.step += 1 + (a.scratch if usable else 0)
    if not usable:
        status = c.fallback(t, c)
    if trial == NULL or status != OK:
        return status
    if note == YES and not usable:
        end_trial(trial, now_ns(), now_ns() - began)    # another rank cannot
    elif usable or left == NULL:        # else the calls that follow, without agreement, count
        count_call(trial, DIRECT if usable else FALLBACK, began)
    return status


cdef inline bint should_negotiate(const Comm *t, const Call *c, size_t nbytes) noexcept nogil:
    """Return whether to try exposure though ranks cannot access each other: all arrays may be in
    shared memory, and be so long that one more step costs little. The same on all ranks."""
    return (t.windows.mapped != NULL and has_even_blocks(t, c)
            and nbytes >= NEGOTIATED_BYTES)


cdef int scratch_slots(Comm *t, Call *c) noexcept nogil:
    """Return how many slots pulled data need, the same on all ranks; 0: the call cannot run."""
    cdef Windows *w = t.windows
    cdef int slots = 1
    if w.pull == NULL or w.slots < 2 or 2 * t.size * sizeof(Block) > w.slot_bytes:
        return 0
    if c.op == NULL:
        return 1
    if t.size > 2:
        slots = min(t.size, w.slots) - 1
    if c.op.prepare != NULL or part_bytes(t, c, parts_of(t, slots), c.op.itemsize) == 0:
        return 0
    return slots


cdef uint64_t probe_word = now_ns()  # the word that peers try to read


cdef int probe_reachability(Comm *t, Call *c) noexcept nogil:
    """Find whether all ranks can access all ranks' memory, in two steps; all learn the same."""
    cdef uint64_t step = t.windows.step
    cdef uint64_t *published = <uint64_t *>slot_of(t, t.rank, step)
    cdef uint64_t seen
    cdef bint yes = True
    cdef int peer
    cdef int status = acquire_slot(t, c, step, t.windows.slot_bytes)
    if status == OK:
        published[0] = <uint64_t>&probe_word
        published[1] = probe_word
        publish(t, c, step, 0)
        status = wait_for_all(t, c, step)
    for peer in range(t.size):
        if status == OK:
            published = <uint64_t *>slot_of(t, peer, step)
            seen = ~published[1]
            yes = (yes and t.windows.pull(t, peer, <char *>&seen, <char *>published[0],
                                          sizeof(uint64_t)) == OK and seen == published[1]
                   and t.windows.push(t, peer, <char *>published[0], <char *>&seen, 0) == OK)
    if status == OK:
        status = acquire_slot(t, c, step + 1, 0)
    if status == OK:
        vote(t, c, step + 1, YES if yes else NO)
        status = wait_for_all(t, c, step + 1)
    if status == OK:
        t.windows.reachable = 1 if all_agree(t, step + 1) else -1
        status = consume(t, c, step + 2, True)
        t.windows.step += 2
    return status


cdef inline void vote(Comm *t, Call *c, uint64_t step, int note) noexcept nogil:
    head_of(t.windows, t.rank, step).call.note = note
    publish(t, c, step, 0)


cdef bint all_agree(Comm *t, uint64_t step) noexcept nogil:
    cdef int peer
    for peer in range(t.size):
        if call_of(t, peer, step).note != YES:
            return False
    return True


cdef int publish_blocks(Comm *t, Call *c, const Block *first, int firsts, const Block *second,
                        int seconds, int note) noexcept nogil:
    """Publish where these blocks are, and whether this rank agrees to exposure if it can."""
    cdef uint64_t step = t.windows.step
    cdef Block *table = <Block *>slot_of(t, t.rank, step)
    cdef bint yes = True
    cdef int i
    cdef int status = acquire_slot(t, c, step, t.windows.slot_bytes)
    if status != OK:
        return status
    for i in range(firsts + seconds):
        table[i] = first[i] if i < firsts else second[i - firsts]
        # Adjacent blocks are one array.
        if i > 0 and table[i - 1].ptr + table[i - 1].nbytes != table[i].ptr:
            yes = yes and is_cpu_memory(t, table[i - 1])
    yes = yes and is_cpu_memory(t, table[firsts + seconds - 1])
    vote(t, c, step, note if yes else NO)
    return OK


cdef bint is_cpu_memory(Comm *t, Block block) noexcept nogil:
    """Return whether others can access this memory, unlike a device's."""
    cdef Windows *w = t.windows
    cdef const char *last = block.ptr + block.nbytes - 1
    cdef char byte
    cdef int i
    if block.nbytes == 0 or mapped_address(t, t.rank, block.ptr, block.nbytes) != NULL:
        return True
    for i in range(KNOWN_ARRAYS):
        if w.known[i] == last:
            return True
    if w.reachable < 0 or w.pull(t, t.rank, &byte, last, 1) != OK:
        return False
    w.known[w.next_known] = last
    w.next_known = (w.next_known + 1) % KNOWN_ARRAYS
    return True


cdef inline bint is_accessing(const Windows *w, int peer, int rank) noexcept nogil:
    cdef uint64_t accessing = load_u64(&w.of[peer].flags.accessing)
    return accessing == <uint64_t>rank + 1 or accessing == ALL_RANKS


cdef void revoke_access(Comm *t, Call *c) noexcept nogil:
    """Revoke access to this rank's arrays after a failure, and wait for accesses under way."""
    cdef Windows *w = t.windows
    cdef int64_t until = now_ns() + GRACE_NS
    cdef int peer
    swap_u64(&w.of[t.rank].flags.revoked, 1)
    fence()
    for peer in range(t.size):
        # A rank that has announced its departure may have a thread that still copies.
        while peer != t.rank and is_accessing(w, peer, t.rank) and not w.process_ended(t, peer):
            if now_ns() >= until:
                c.still_accessed = True
                break
            sched_yield()


# The choice between exposure and the fallback, for algorithms with the trait ADAPTIVE

cdef enum:
    GROUPS = 16                 # groups whose comm ids agree in four bits share a Trial
    SHORTEST_BYTES = 32768
    CALLS_AHEAD = 32            # without agreement, once the fallback is known to be faster
    MOST_COUNTED = 8            # calls of a series: the first find their memory in no cache
    LEAST_COUNTED = 2
    SERIES_NS = 2000000         # of long calls fewer are a series: as many as begin in this time
    PATIENCE = 32               # the slower way is tried again after this many times its series,
    LONGEST_NS = 10000000000    # at most this long: a stopped rank may have made that time long

cdef enum Way:
    UNDECIDED = 0
    DIRECT = 1
    FALLBACK = 2


ctypedef struct Trial:          # measurements of calls of one collective and length
    int64_t direct_ns           # of a call, each way: the average of a series; 0: not tried
    int64_t fallback_ns
    int64_t again_ns            # when to try the slower way next
    int64_t series_ns           # of the series that is measured,
    int counted                 # its calls so far,
    int way                     # and which Way they went
    int trying                  # Way that calls go only to be measured; UNDECIDED: they do not


cdef Trial trials[GROUPS][COLLECTIVES][CALL_LENGTHS]     # for the calls that this process decides


cdef int judge_of(const Comm *t, const Call *c) noexcept nogil:
    """Return the rank that decides. It needs others' data, so it ends late either way."""
    if c.collective == REDUCE:
        return c.root
    return t.size - 1 if c.root != t.size - 1 else 0


cdef int length_class(size_t nbytes) noexcept nogil:
    cdef int length = 0
    while length < CALL_LENGTHS - 1 and nbytes > <size_t>SHORTEST_BYTES << length:
        length += 1
    return length


cdef uint8_t *fallbacks_left(Comm *t, const Call *c, size_t nbytes) noexcept nogil:
    """Return how many such calls take the fallback without agreement: the same on all ranks. NULL
    for calls whose length not all ranks know: blocks of a part of a group may differ, and one array
    for all does not."""
    if not c.adaptive or not (has_even_blocks(t, c) or c.collective in (BROADCAST, REDUCE)):
        return NULL
    return &t.windows.fallbacks[c.collective][length_class(nbytes)]


cdef Trial *trial_of(Comm *t, const Call *c, const Block *first, int firsts) noexcept nogil:
    """Return the measurements of such calls if this rank decides the way, or NULL."""
    if (t.rank != judge_of(t, c) or not c.adaptive
            or mapped_address(t, t.rank, first[0].ptr, first[0].nbytes) != NULL):
        return NULL
    return &trials[t.comm_id % GROUPS][c.collective][
        length_class(firsts * first[0].nbytes)]


# Two threads of a process may decide at once, for groups that share a Trial.

cdef inline int64_t load_ns(int64_t *ns) noexcept nogil:
    return <int64_t>load_u64(<uint64_t *>ns)


cdef inline void store_ns(int64_t *ns, int64_t value) noexcept nogil:
    store_u64(<uint64_t *>ns, <uint64_t>value)


cdef inline int fallbacks_after(uint64_t note) noexcept nogil:
    """Return how many of the next calls take the fallback without agreement."""
    return <int>min(note - NO, <uint64_t>CALLS_AHEAD) if note > NO else 0


cdef int way_to_try(Trial *trial, int64_t now) noexcept nogil:
    """Return the note that agrees to exposure, or does not: for what was faster, or the other way
    now and then."""
    cdef int64_t direct_ns = load_ns(&trial.direct_ns)
    cdef int64_t fallback_ns = load_ns(&trial.fallback_ns)
    cdef bint direct_is_slower = direct_ns > fallback_ns
    if direct_ns == 0:
        return YES
    if fallback_ns == 0:
        store_int(&trial.trying, FALLBACK)
    elif load_int(&trial.trying) == UNDECIDED:
        if now < load_ns(&trial.again_ns):
            return NO + CALLS_AHEAD if direct_is_slower else YES
        store_int(&trial.trying, DIRECT if direct_is_slower else FALLBACK)
    if load_int(&trial.trying) == DIRECT:
        return YES
    return NO + <int>min(max(SERIES_NS // max(direct_ns, fallback_ns), <int64_t>LEAST_COUNTED),
                         <int64_t>MOST_COUNTED)


cdef void count_call(Trial *trial, int way, int64_t began) noexcept nogil:
    """Count a call of the rank that decides. A series of them is measured: where ranks need not
    agree, some are ahead of others, and a single call may be short or long."""
    cdef int64_t now = now_ns(), series_ns = load_ns(&trial.series_ns)
    cdef int counted = load_int(&trial.counted)
    if load_int(&trial.way) != way:
        store_int(&trial.way, way)
        series_ns = counted = 0
    series_ns += now - began
    counted += 1
    if counted >= MOST_COUNTED or (counted >= LEAST_COUNTED and series_ns >= SERIES_NS):
        record_time(&trial.direct_ns if way == DIRECT else &trial.fallback_ns,
                    series_ns // counted)
        if load_int(&trial.trying) == way:
            end_trial(trial, now, series_ns)
        series_ns = counted = 0
    store_ns(&trial.series_ns, series_ns)
    store_int(&trial.counted, counted)


cdef void end_trial(Trial *trial, int64_t now, int64_t taken) noexcept nogil:
    store_int(&trial.trying, UNDECIDED)
    store_ns(&trial.again_ns, now + min(PATIENCE * taken, <int64_t>LONGEST_NS))


cdef void record_time(int64_t *average_ns, int64_t taken) noexcept nogil:
    """Record a time. A shorter one counts at once; any may be long for any reason."""
    cdef int64_t average = load_ns(average_ns)
    if average != 0 and taken > average:
        taken = average + (min(taken, 2 * average) - average) // 4 + 1
    store_ns(average_ns, max(taken, 1))


# Moving bytes

cdef inline bint is_revoked(Comm *t, int peer) noexcept nogil:
    return load_u64(&t.windows.of[peer].flags.revoked) != 0


cdef inline bint begin_access(Comm *t, int peer) noexcept nogil:
    """Announce an access to a peer's arrays; False: access is revoked."""
    swap_u64(&t.windows.of[t.rank].flags.accessing, <uint64_t>peer + 1)
    fence()
    reach(SEND_MID)
    return not is_revoked(t, peer)


cdef inline bint end_access(Comm *t, int peer) noexcept nogil:
    """End an access. False: the peer did not wait, so the data may not be what it gave."""
    fence()
    cdef bint revoked = is_revoked(t, peer)
    store_u64(&t.windows.of[t.rank].flags.accessing, 0)
    return not revoked


cdef int begin_access_to_all(Comm *t, Call *c, Access *a) noexcept nogil:
    swap_u64(&t.windows.of[t.rank].flags.accessing, ALL_RANKS)
    fence()
    reach(SEND_MID)
    cdef int peer = first_revoked(t)
    if peer < 0:
        return OK
    store_u64(&t.windows.of[t.rank].flags.accessing, 0)
    return access_failed(t, c, a, peer, UNREACHABLE)


cdef int end_access_to_all(Comm *t, Call *c, Access *a) noexcept nogil:
    fence()
    cdef int peer = first_revoked(t)
    store_u64(&t.windows.of[t.rank].flags.accessing, 0)
    return OK if peer < 0 else access_failed(t, c, a, peer, UNREACHABLE)


cdef int first_revoked(Comm *t) noexcept nogil:
    """Return a peer that has revoked access; -1: none."""
    cdef int peer
    for peer in range(t.size):
        if is_revoked(t, peer):
            return peer
    return -1


cdef int check_call(Comm *t, Call *c, Access *a, int peer) noexcept nogil:
    """Check now and then whether the call must end."""
    cdef int64_t now = now_ns()
    cdef int status = OK
    if now >= a.next_check:
        a.next_check = now + SLICE_NS
        status = slice_end(t, c.deadline_ns)
        if status == OK and peer >= 0 and t.windows.process_ended(t, peer):
            status = PEER_LOST      # another process may get its pid, which accesses use
        if status != OK:
            c.failed_peer = peer
    return status


cdef int access_failed(Comm *t, Call *c, const Access *a, int peer, int status) noexcept nogil:
    """Find out why a peer's memory could not be accessed."""
    if is_revoked(t, peer):
        # It has failed and will not reach another call: waiting for that one tells why.
        status = wait_for_peer(t, c, peer, a.step + 1 + <uint64_t>a.scratch)
        if status != OK:
            return status
    c.failed_peer = peer
    c.failed_step = 0
    return PEER_LOST if t.windows.is_gone(t, peer) else status if status != OK else UNREACHABLE


cdef int pull(Comm *t, Call *c, Access *a, int peer, Block into,
              char *theirs) noexcept nogil:
    cdef char *here = mapped_address(t, peer, theirs, into.nbytes)
    cdef size_t most = ACCESS_BYTES if here == NULL else MAPPED_ACCESS_BYTES
    cdef Block piece
    cdef size_t i
    cdef int status
    if into.nbytes == 0:
        return OK
    for i in range(segments_in(into.nbytes, most)):
        piece = segment_of(into, i, most)
        status = OK if begin_access(t, peer) else UNREACHABLE
        if status == OK and here != NULL:
            copy_block(piece.ptr, here + i * most, piece.nbytes)
        elif status == OK:
            status = t.windows.pull(t, peer, piece.ptr, theirs + i * most, piece.nbytes)
        if not end_access(t, peer) or status != OK:
            return access_failed(t, c, a, peer, UNREACHABLE if status == OK else status)
        status = check_call(t, c, a, peer)
        if status != OK:
            return status
    return OK


cdef int push(Comm *t, Call *c, Access *a, int peer, char *theirs,
              Block source) noexcept nogil:
    cdef char *here = mapped_address(t, peer, theirs, source.nbytes)
    cdef Block piece
    cdef size_t i
    cdef int status = OK
    if source.nbytes == 0:
        return OK
    for i in range(segments_in(source.nbytes, ACCESS_BYTES)):
        piece = segment_of(source, i, ACCESS_BYTES)
        status = OK if begin_access(t, peer) else UNREACHABLE
        if status == OK and here != NULL:
            copy(here + i * ACCESS_BYTES, piece.ptr, piece.nbytes)
        elif status == OK:
            status = t.windows.push(t, peer, theirs + i * ACCESS_BYTES, piece.ptr, piece.nbytes)
        if not end_access(t, peer) or status != OK:
            return access_failed(t, c, a, peer, UNREACHABLE if status == OK else status)
        status = check_call(t, c, a, peer)
        if status != OK:
            return status
    return OK


cdef int check_size(Comm *t, Call *c, const Access *a, int peer, size_t theirs,
                    size_t ours) noexcept nogil:
    """Return MISMATCH if a peer gives or takes another number of bytes than this rank."""
    if theirs == ours:
        return OK
    c.failed_peer = peer
    c.failed_step = 0
    c.theirs = call_of(t, peer, a.step)[0]
    c.theirs.note = 0
    c.theirs_bytes = theirs
    c.our_bytes = ours
    return MISMATCH


cdef int fetch(Comm *t, Call *c, Access *a, int peer, Block into, char *theirs,
               const void **source) noexcept nogil:
    """Find where a peer's contribution can be read: in place during an access, or pulled."""
    source[0] = mapped_address(t, peer, theirs, into.nbytes)
    if source[0] != NULL:
        return check_call(t, c, a, peer)
    source[0] = into.ptr
    return pull(t, c, a, peer, into, theirs)

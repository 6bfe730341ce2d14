"""Native: MPI's own collective, where it has one with cydist's semantics.

    broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, barrier

MPI determines steps and bytes. It also determines the bits of a sum of floats: the same on all
ranks, and on every run if MPI promises that. MPI lacks some calls (16- and 8-bit floats, AVG,
PREMUL_SUM), and would need a copy for others. The call's fallback runs these, on all ranks alike.
All blocks must have one size. The calls are non-blocking and waited for like messages.

MPI returns wrong numbers, or hangs, when ranks disagree on dtype, operation or count. So every rank
also sends its fingerprint to the next rank and compares that of the rank before it: if all
neighbours agree, all ranks do. A call whose numbers have arrived does not wait for that message, so
no rank waits that would not wait in MPI. The next call of the group waits for it, or the group's
end, briefly. A rank that leaves a call which the rank before it has not entered tells that rank
which call it was. If MPI might write beyond an array while ranks disagree, all agree before it
begins: see `is_length_safe`.
A short broadcast of two ranks travels with the root's fingerprint and not through MPI's broadcast,
which would take another message. Most other exchanges of two ranks are one message each way, see
mpi_pairwise.pyx.

Source: the Message Passing Interface Forum, "MPI: A Message-Passing Interface Standard, Version
4.1" (2023), chapter 6.
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from cydist._native.abi cimport (
    ABORTED, ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, JOINED, MISMATCH, NO_MEMORY,
    OK, PEER_LOST, PENDING, REDUCE, REDUCE_SCATTER, TIMEOUT, CHECK_TAG, Block, Call, Comm,
    Fingerprint, Request, now_ns, patiently, slice_end,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport complete, copy, exchange, post_recv, post_send, withdraw
from cydist._native.libmpi cimport SUCCESS, Handle, lib
from cydist._native.linux cimport pthread_mutex_lock, pthread_mutex_unlock, usleep
from cydist._native.mpi_messages cimport (
    SOON_NS, FingerprintExchanges, FingerprintExchange, Mpi, MpiRequest, added, mpi_of,
    new_mpi_request, next_of, on_error,
)
from cydist._native.mpi_pairwise cimport is_pairwise, exchange_pair, wait_with_check
from cydist._native.stream cimport Net
from cydist._native.sync cimport PAUSE_US, load_int

cdef enum:
    MOST_DTYPES = 64            # more than there are, as is MOST_OPS
    MOST_OPS = 32
    EXPLAIN_NS = 500000000
    SCRATCH_BYTES = 16777216    # limit for packing separate blocks together
    SEGMENT_BYTES = 4194304     # at least; of a fallback's all_gather, which MPI segments again

cdef void *in_place = NULL      # MPI_IN_PLACE
cdef size_t payload_bytes = 0   # limit for a broadcast that travels with a fingerprint
cdef size_t safe_bytes = 0      # limit for an MPI call that ranks may disagree on
cdef Handle types[MOST_DTYPES]
cdef Handle operations[MOST_DTYPES][MOST_OPS]


def use_library(size_t its_in_place, size_t most_payload_bytes, size_t most_safe_bytes) -> None:
    """Set MPI_IN_PLACE; the limit of a two-rank broadcast that travels with the root's fingerprint;
    and the size up to which MPI writes nowhere else when ranks disagree."""
    global in_place, payload_bytes, safe_bytes
    in_place = <void *>its_in_place
    payload_bytes = most_payload_bytes
    safe_bytes = most_safe_bytes


def use_reduction(int dtype, int op, size_t type_handle, size_t op_handle) -> None:
    """Declare that MPI has this op on this dtype (codes of kernels.h), with cydist's semantics."""
    if not 0 <= dtype < MOST_DTYPES or not 0 <= op < MOST_OPS:
        raise ValueError(f"no dtype {dtype}, or no op {op}")
    types[dtype] = type_handle
    operations[dtype][op] = op_handle


ctypedef struct MpiBuffers:     # MPI's arguments: one piece of memory on each side
    char *input
    char *output
    char *scratch               # packing memory if blocks are not adjacent
    char *gathered              # in scratch: to be copied to the outputs


cdef inline bint reduces(const Call *c) noexcept nogil:
    return c.op != NULL


cdef bint is_for_library(const Comm *t, const Call *c) noexcept nogil:
    """Return whether MPI has this call. All ranks decide alike."""
    cdef const Mpi *mpi = mpi_of(<Net *>t.link)
    cdef int collective = c.fingerprint.collective
    if reduces(c) and operations[c.fingerprint.dtype][c.fingerprint.op] == 0:
        return False
    cdef size_t most = mpi.piece_bytes
    if collective != REDUCE_SCATTER and collective != ALL_GATHER and collective != ALL_TO_ALL:
        return True
    # Only this rank knows whether its blocks are adjacent, so blocks above the limit for packing
    # are left to cydist's algorithms.
    if collective != ALL_TO_ALL and c.fingerprint.flags & JOINED == 0:
        most = min(most, <size_t>SCRATCH_BYTES // t.size)
    return c.inputs[0].nbytes <= most


cdef bint are_adjacent(const Block *blocks, int count) noexcept nogil:
    cdef int i
    for i in range(1, count):
        if blocks[i].ptr != blocks[i - 1].ptr + blocks[i - 1].nbytes:
            return False
    return True


cdef int pack_blocks(const Comm *t, const Call *c, MpiBuffers *b) noexcept nogil:
    """Pack lists of blocks that are not adjacent."""
    cdef int collective = c.fingerprint.collective
    cdef int size = t.size, i
    cdef bint many_in = collective == ALL_TO_ALL or collective == REDUCE_SCATTER
    cdef bint many_out = collective == ALL_TO_ALL or collective == ALL_GATHER
    cdef bint packs = many_in and not are_adjacent(c.inputs, size)
    cdef bint unpacks = many_out and not are_adjacent(c.outputs, size)
    cdef size_t total = 0
    memset(b, 0, sizeof(MpiBuffers))
    if c.inputs != NULL:
        b.input = c.inputs[0].ptr
    if c.outputs != NULL:
        b.output = c.outputs[0].ptr
    if packs or unpacks:
        total = size * (c.inputs[0].nbytes if packs else c.outputs[0].nbytes)
        b.scratch = <char *>malloc(packs * total + unpacks * total + 1)
        if b.scratch == NULL:
            return NO_MEMORY
    if packs:
        b.input = b.scratch
        for i in range(size):
            copy(b.input + i * c.inputs[0].nbytes, c.inputs[i].ptr, c.inputs[i].nbytes)
    if unpacks:
        b.output = b.gathered = b.scratch + packs * total
    return OK


cdef void unpack_blocks(const Comm *t, const Call *c, const MpiBuffers *b) noexcept nogil:
    cdef int i
    if b.gathered != NULL:
        for i in range(t.size):
            copy(c.outputs[i].ptr, b.gathered + i * c.outputs[0].nbytes, c.outputs[i].nbytes)


cdef size_t element_bytes(const Call *c) noexcept nogil:
    return c.op.itemsize if reduces(c) else 1


cdef size_t step_bytes(const Mpi *mpi, const Call *c) noexcept nogil:
    """Return how much of an array, if it is cut, one call of MPI handles."""
    return mpi.piece_bytes // element_bytes(c) * element_bytes(c)


cdef int call_count(const Mpi *mpi, const Call *c) noexcept nogil:
    cdef int collective = c.fingerprint.collective
    if collective == BROADCAST or collective == ALL_REDUCE or collective == REDUCE:
        return <int>((c.inputs[0].nbytes + step_bytes(mpi, c) - 1) // step_bytes(mpi, c))
    return 1


cdef int begin_one(const Comm *t, const Call *c, const MpiBuffers *b, size_t start,
                   Handle *request) noexcept nogil:
    """Begin one call of MPI; of an array that is cut, the call from this byte on."""
    cdef const Mpi *mpi = mpi_of(<Net *>t.link)
    cdef int collective = c.fingerprint.collective
    cdef size_t each = c.inputs[0].nbytes if c.inputs != NULL else 0
    cdef Handle kind = types[c.fingerprint.dtype] if reduces(c) else mpi.byte
    cdef Handle op = operations[c.fingerprint.dtype][c.fingerprint.op] if reduces(c) else 0
    cdef void *source = b.input
    cdef int count
    if collective == BARRIER:
        return lib.ibarrier(t.library_comm, request)
    if collective == ALL_GATHER:
        if b.gathered == NULL and b.input == c.outputs[t.rank].ptr:
            source = in_place
        return lib.iallgather(source, <int>each, mpi.byte, b.output, <int>each, mpi.byte,
                              t.library_comm,
                              request)
    if collective == ALL_TO_ALL:
        return lib.ialltoall(source, <int>each, mpi.byte, b.output, <int>each, mpi.byte,
                             t.library_comm,
                             request)
    if collective == REDUCE_SCATTER:
        return lib.ireduce_scatter_block(source, b.output, <int>(each // element_bytes(c)), kind,
                                         op, t.library_comm, request)
    count = <int>(min(each - start, step_bytes(mpi, c)) // element_bytes(c))
    if collective == BROADCAST:
        return lib.ibcast(b.input + start, count, mpi.byte, c.root, t.library_comm, request)
    source = b.input + start
    if b.output == b.input:
        source = in_place
    if collective == ALL_REDUCE:
        return lib.iallreduce(source, b.output + start, count, kind, op, t.library_comm, request)
    if t.rank != c.root:
        return lib.ireduce(b.input + start, NULL, count, kind, op, c.root, t.library_comm, request)
    return lib.ireduce(source, b.output + start, count, kind, op, c.root, t.library_comm, request)


cdef int begin_all(Comm *t, Call *c, const MpiBuffers *b, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Mpi *mpi = mpi_of(net)
    cdef int i, count = call_count(mpi, c), code = SUCCESS, status = OK
    cdef MpiRequest *mpi_request
    if count == 0:
        r.status = OK
        return OK
    pthread_mutex_lock(&net.lock)
    mpi.foreign.needed = True
    mpi_request = new_mpi_request(mpi, r, t.comm_id, -1, count)
    if mpi_request == NULL:
        pthread_mutex_unlock(&net.lock)
        return NO_MEMORY
    mpi_request.borrows = True
    for i in range(count):
        if code == SUCCESS:
            code = added(mpi_request,
                         begin_one(t, c, b, i * step_bytes(mpi, c), next_of(mpi_request)))
    if code != SUCCESS:
        status = on_error(mpi, mpi_request, code)
    pthread_mutex_unlock(&net.lock)
    return status


cdef void release_buffers(Comm *t, Request *r, MpiBuffers *b) noexcept nogil:
    """Cancel a failed call. Memory that MPI may still use lives until MPI is done."""
    cdef Net *net = <Net *>t.link
    pthread_mutex_lock(&net.lock)
    if r.status == PENDING and r.link != NULL:
        (<MpiRequest *>r.link).data = b.scratch
        b.scratch = NULL
    pthread_mutex_unlock(&net.lock)
    t.cancel(t, r)


cdef void record_error(Call *c, const Request *r, int status) noexcept nogil:
    if status == MISMATCH:
        c.failed_peer = r.source
        c.theirs = r.theirs
        c.theirs_bytes = r.theirs_bytes


cdef int lost_member(const Comm *t) noexcept nogil:
    """Return a group rank that has left or died; -1: none."""
    cdef const Net *net = <const Net *>t.link
    cdef int rank
    for rank in range(t.size):
        if net.lost[t.peers[rank]] != 0:
            return rank
    return -1


cdef int find_cause(Comm *t, Call *c, Request *check) noexcept nogil:
    """Find out why MPI reports an error. Ranks mostly disagree, and one that saw how reports it."""
    cdef int status = OK
    cdef int64_t until = now_ns() + EXPLAIN_NS
    while status == OK and now_ns() < until:
        usleep(PAUSE_US)
        status = slice_end(t, c.deadline_ns)
        if load_int(&check.status) == MISMATCH:
            return complete(t, c, check, 1)
    return PEER_LOST if status == OK else status


cdef int await_fingerprint(Comm *t, Call *c, Request *check) noexcept nogil:
    """Wait for a neighbour's fingerprint, and query its call if it does not arrive."""
    cdef int status = complete(t, c, check, 1)
    c.failed_step = -1
    return status


cdef int compare_last_call(Comm *t, Call *c) noexcept nogil:
    """Compare MPI's last call before any call, also before one that cydist's algorithms run."""
    cdef FingerprintExchanges *checks = <FingerprintExchanges *>t.own
    cdef Request *check = &checks.of[(checks.calls + 1) & 1].request
    if load_int(&check.status) == PENDING:
        patiently(c)
    return await_fingerprint(t, c, check)


cdef int await_call(Comm *t, Call *c, Request *running, Request *check) noexcept nogil:
    """Wait for MPI, and after a while also for the neighbour's fingerprint, whichever is first. The
    neighbour may not send one while it waits for what this rank does next."""
    cdef int status = t.wait(t, running, min(now_ns() + SOON_NS, c.deadline_ns))
    if status == TIMEOUT:
        status = wait_with_check(t, c, running, check)
    if status == TIMEOUT:
        status = await_fingerprint(t, c, check)
        if status != OK:
            return status
        status = t.wait(t, running, c.deadline_ns)
    record_error(c, running, status)
    if status == PEER_LOST:
        status = find_cause(t, c, check)
    if status == OK and load_int(&check.status) != PENDING:
        status = await_fingerprint(t, c, check)
    return status


# Leaving

cdef void address(Request *r, const Fingerprint *call, int peer) noexcept nogil:
    """Prepare a message that says which call a rank was in when it left."""
    memset(r, 0, sizeof(Request))
    r.peer = peer
    r.tag = CHECK_TAG
    r.expected = call
    r.awaited = True


cdef int left_after(Comm *t, Call *c) noexcept nogil:
    """Find out whether the next rank had made this call when it left. OK, MISMATCH, or PEER_LOST:
    it has reported no call of this number."""
    cdef Request check
    address(&check, &c.fingerprint, (t.rank + 1) % t.size)
    cdef int status = t.recv(t, &check)
    if status == OK:
        status = load_int(&check.status)
        withdraw(t, &check, 1)
    if status != MISMATCH or check.theirs.seq != c.fingerprint.seq:
        return OK if status == OK else PEER_LOST
    record_error(c, &check, MISMATCH)
    return MISMATCH


cdef int drain(Comm *t, Call *c) noexcept nogil:
    cdef FingerprintExchanges *checks = <FingerprintExchanges *>t.own
    cdef FingerprintExchange *last = &checks.of[(checks.calls + 1) & 1]
    cdef Request check
    cdef int status
    c.fingerprint = last.fingerprint
    status = left_after(t, c)
    if status != MISMATCH:
        status = await_fingerprint(t, c, &last.request)
    if status == ABORTED:                       # withdrawn before: the group has failed
        return OK
    if status == TIMEOUT:
        address(&check, &last.fingerprint, (t.rank + t.size - 1) % t.size)
        if t.send(t, &check) == OK:
            t.wait(t, &check, now_ns() + SOON_NS)
            withdraw(t, &check, 1)
    return OK if status == TIMEOUT or status == PEER_LOST else status


cdef bint carries_payload(const Comm *t, const Call *c) noexcept nogil:
    """Return whether the call's data travel with the fingerprint."""
    return (t.size == 2 and c.fingerprint.collective == BROADCAST
            and c.fingerprint.flags & JOINED == 0       # only MPI reads a GPU's memory
            and c.inputs[0].nbytes <= payload_bytes)


cdef bint is_length_safe(const Comm *t, const Call *c) noexcept nogil:
    """Return whether MPI may begin the call while other ranks may be in another one. Short messages
    do no harm, and a rank may send as many bytes as all its blocks have together."""
    cdef int collective = c.fingerprint.collective
    cdef bint in_blocks = (collective == ALL_GATHER or collective == REDUCE_SCATTER
                           or collective == ALL_TO_ALL)
    return (collective == BARRIER
            or c.inputs[0].nbytes <= safe_bytes // (t.size if in_blocks else 1))


cdef int await_same_call(Comm *t, Call *c) noexcept nogil:
    """Wait until all ranks are known to be in this call, like dissemination.pyx's barrier. Step 0
    is the message that a harmless call sends alongside MPI's, so the two kinds match."""
    cdef int distance = 1, step = 0, status = OK
    while distance < t.size and status == OK:
        status = exchange(t, c, step, NULL, 0, (t.rank + distance) % t.size,
                          NULL, 0, (t.rank - distance + t.size) % t.size)
        distance *= 2
        step += 1
    c.failed_step = -1
    return status


cdef int run_after(Comm *t, Call *c, MpiBuffers *b, Request *running) noexcept nogil:
    """Run MPI's call after all ranks have agreed: without a comparison."""
    cdef Request agreed
    cdef int status = begin_all(t, c, b, running)
    memset(&agreed, 0, sizeof(Request))
    if status == OK:
        status = await_call(t, c, running, &agreed)
        if status != OK:
            release_buffers(t, running, b)
    return status


cdef int run_beside(Comm *t, Call *c, MpiBuffers *b, Request *running) noexcept nogil:
    """Run MPI's call, or a short broadcast, alongside the comparison with the neighbours."""
    cdef FingerprintExchanges *checks = <FingerprintExchanges *>t.own
    cdef FingerprintExchange *check = &checks.of[checks.calls & 1]
    cdef Request sent
    cdef Block out = Block(NULL, 0)     # data that travel with the fingerprints
    cdef Block into = Block(NULL, 0)
    cdef int status = OK
    checks.calls += 1
    t.compare, t.drain = compare_last_call, drain
    check.fingerprint = c.fingerprint
    if not carries_payload(t, c):
        status = begin_all(t, c, b, running)    # begin with this, since it takes longest
    elif t.rank == c.root:
        out, running.status = c.inputs[0], OK
    else:
        into, running.status = c.inputs[0], OK
    post_recv(t, c, &check.request, into.ptr, into.nbytes, (t.rank + t.size - 1) % t.size, 0)
    check.request.expected = &check.fingerprint     # which outlives the call
    post_send(t, c, &sent, out.ptr, out.nbytes, (t.rank + 1) % t.size, 0)
    if status == OK:
        status = complete(t, c, &sent, 1)
        if status == PEER_LOST:
            status = left_after(t, c)
        if status == OK and into.nbytes != 0:
            status = await_fingerprint(t, c, &check.request)
        if status == OK:
            status = await_call(t, c, running, &check.request)
        if status != OK:
            release_buffers(t, running, b)
    if status != OK:
        withdraw(t, &sent, 1)
        withdraw(t, &check.request, 1)
    return status


cdef int run_by_mpi(Comm *t, Call *c) noexcept nogil:
    cdef Request running
    cdef MpiBuffers b
    cdef bint first             # must all ranks agree before MPI begins?
    cdef int status = OK
    first = not is_length_safe(t, c)
    if first:
        status = await_same_call(t, c)
    if status == OK:
        status = pack_blocks(t, c, &b)
    if status != OK:
        return status
    memset(&running, 0, sizeof(Request))
    running.peer = -1
    running.tag = c.tag
    running.expected = &c.fingerprint
    running.status = PENDING
    status = run_after(t, c, &b, &running) if first else run_beside(t, c, &b, &running)
    if status == PEER_LOST and c.failed_peer < 0:
        c.failed_peer = lost_member(t)
    if status == OK:
        unpack_blocks(t, c, &b)
    free(b.scratch)
    return status


cdef int native(Comm *t, Call *c) noexcept nogil:
    if t.library_comm != 0:
        if is_pairwise(t, c) and not carries_payload(t, c):
            return exchange_pair(t, c)
        if is_for_library(t, c):
            return run_by_mpi(t, c)
    if c.fingerprint.collective == ALL_GATHER:
        c.segment_bytes = max(c.segment_bytes, <size_t>SEGMENT_BYTES)
    return c.fallback(t, c)


implement(b"native", BROADCAST, native)
implement(b"native", ALL_REDUCE, native)
implement(b"native", REDUCE, native)
implement(b"native", BARRIER, native)
implement(b"native", ALL_GATHER, native)
implement(b"native", REDUCE_SCATTER, native)
implement(b"native", ALL_TO_ALL, native)

"""A call of two ranks as one MPI message each way, directly from array to array.

Its MPI tag is a hash of the call's fingerprint. So MPI itself compares the calls, and no other
message does: messages of different calls never match. Ranks in different calls find out when one of
them queries the other. The root of a broadcast receives nothing, so it uses a synchronous send,
which completes only when the peer has entered the same call. Two different calls have the same tag
with a chance of one in the number of MPI's tags (2**29 under MPICH, 2**31 under Open MPI).
"""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from cydist._native.abi cimport (
    ALL_GATHER, ALL_TO_ALL, BROADCAST, JOINED, MISMATCH, NO_MEMORY, OK, PEER_LOST, PENDING, TIMEOUT,
    Block, Call, Comm, Fingerprint, Request, has_left, now_ns,
)
from cydist._native.pipeline cimport complete, copy_block, post_recv, withdraw
from cydist._native.libmpi cimport SUCCESS, lib
from cydist._native.linux cimport pthread_mutex_lock, pthread_mutex_unlock
from cydist._native.mpi_messages cimport (
    DEPARTED_NS, SOON_NS, Mpi, MpiRequest, added, mpi_of, new_mpi_request, next_of, on_error,
)
from cydist._native.stream cimport Net
from cydist._native.sync cimport load_int

cdef enum:
    LOOK_NS = 50000000          # between two checks for a message of the other rank
    LONGEST_NS = 1600000000     # between two queries


cdef bint is_pairwise(const Comm *t, const Call *c) noexcept nogil:
    cdef int collective = c.fingerprint.collective
    if t.size != 2 or c.fingerprint.flags & JOINED:     # only MPI reads a GPU's memory
        return False
    return ((collective == BROADCAST or collective == ALL_GATHER or collective == ALL_TO_ALL)
            and c.inputs[0].nbytes <= mpi_of(<Net *>t.link).piece_bytes)


cdef int tag_of(const Fingerprint *call, int largest) noexcept nogil:
    cdef const uint64_t *words = <const uint64_t *>call
    cdef uint64_t mixed = 0
    cdef size_t i
    for i in range(sizeof(Fingerprint) // sizeof(uint64_t)):
        mixed = (mixed ^ words[i]) * 0x9E3779B97F4A7C15ULL
    return <int>((mixed >> 32) % <uint64_t>largest)


cdef bint sends(const Comm *t, const Call *c) noexcept nogil:
    return c.fingerprint.collective != BROADCAST or t.rank == c.root


cdef bint receives(const Comm *t, const Call *c) noexcept nogil:
    return c.fingerprint.collective != BROADCAST or t.rank != c.root


cdef int begin_exchange(Comm *t, Call *c, Request *r) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Mpi *mpi = mpi_of(net)
    cdef int peer = r.peer, tag = tag_of(&c.fingerprint, mpi.largest_tag), code = SUCCESS
    cdef int nbytes = <int>c.inputs[0].nbytes
    cdef char *out = c.inputs[peer if c.fingerprint.collective == ALL_TO_ALL else 0].ptr
    cdef char *into = c.inputs[0].ptr if c.fingerprint.collective == BROADCAST \
        else c.outputs[peer].ptr
    cdef MpiRequest *mpi_request
    cdef int status = OK
    pthread_mutex_lock(&net.lock)
    mpi.foreign.needed = True
    mpi_request = new_mpi_request(mpi, r, t.comm_id, t.peers[peer], sends(t, c) + receives(t, c))
    if mpi_request == NULL:
        pthread_mutex_unlock(&net.lock)
        return NO_MEMORY
    mpi_request.borrows = True
    if receives(t, c):
        code = added(mpi_request, lib.irecv(into, nbytes, mpi.byte, peer, tag, t.library_comm,
                                            next_of(mpi_request)))
        if sends(t, c) and code == SUCCESS:
            code = added(mpi_request, lib.isend(out, nbytes, mpi.byte, peer, tag, t.library_comm,
                                                next_of(mpi_request)))
    else:
        code = added(mpi_request, lib.issend(out, nbytes, mpi.byte, peer, tag, t.library_comm,
                                             next_of(mpi_request)))
    if code != SUCCESS:
        status = on_error(mpi, mpi_request, code)
    pthread_mutex_unlock(&net.lock)
    return status


cdef void copy_own(const Comm *t, const Call *c) noexcept nogil:
    cdef Block own
    if c.fingerprint.collective != BROADCAST:
        own = c.inputs[t.rank if c.fingerprint.collective == ALL_TO_ALL else 0]
        if own.ptr != c.outputs[t.rank].ptr:
            copy_block(c.outputs[t.rank].ptr, own.ptr, own.nbytes)


cdef int why_absent(Comm *t, Call *c, Request *stray) noexcept nogil:
    """Return why the other rank does not enter this call."""
    cdef int status = complete(t, c, stray, 1)
    return status if status != OK else MISMATCH         # such a message belongs to another call


cdef int wait_with_check(Comm *t, Call *c, Request *running, Request *stray) noexcept nogil:
    cdef int64_t patience = SOON_NS, now = now_ns(), asks_at = now
    cdef int status = TIMEOUT
    while status == TIMEOUT and now < c.deadline_ns and load_int(&stray.status) == PENDING:
        if t.control != NULL and now >= asks_at:
            t.control.probe(t, stray.peer)
            patience = min(2 * patience, <int64_t>LONGEST_NS)
            asks_at = now + patience
        # No message of the other rank ends this wait.
        status = t.wait(t, running, min(now + LOOK_NS, c.deadline_ns))
        now = now_ns()
    return status


cdef int wait_for_pair(Comm *t, Call *c, Request *running) noexcept nogil:
    """Wait for the call. If it takes long the other rank may never enter it. So query it, and check
    whether it sends a message of another call, or has left."""
    cdef Request stray
    cdef int status = t.wait(t, running, min(now_ns() + SOON_NS, c.deadline_ns))
    if status != TIMEOUT:
        return status
    post_recv(t, c, &stray, NULL, 0, running.peer, 0)
    status = wait_with_check(t, c, running, &stray)
    if status == TIMEOUT and load_int(&stray.status) == PEER_LOST:
        status = t.wait(t, running, min(now_ns() + DEPARTED_NS, c.deadline_ns))
    if status == TIMEOUT and load_int(&stray.status) != PENDING:
        return why_absent(t, c, &stray)
    withdraw(t, &stray, 1)
    return status


cdef int exchange_pair(Comm *t, Call *c) noexcept nogil:
    cdef Request running, stray
    cdef int status, peer = 1 - t.rank
    if (<Net *>t.link).lost[t.peers[peer]] != 0 or has_left(t, peer):
        # It was never in this call, or gave it up. This rank's message is still to be sent.
        post_recv(t, c, &stray, NULL, 0, peer, 0)
        return why_absent(t, c, &stray)
    memset(&running, 0, sizeof(Request))
    running.peer = peer
    running.tag = c.tag
    running.expected = &c.fingerprint
    running.status = PENDING
    copy_own(t, c)              # before sending, since nothing progresses without calls of MPI
    status = begin_exchange(t, c, &running)
    if status == OK:
        status = wait_for_pair(t, c, &running)
        if status != OK:
            t.cancel(t, &running)
    if status != OK and c.failed_peer < 0:
        c.failed_peer = running.peer
        c.theirs, c.theirs_bytes = running.theirs, running.theirs_bytes
    return status

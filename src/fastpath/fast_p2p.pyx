"""The fast path of a message: a blocking send or receive of a plain array. See
fast_collectives.pyx."""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from cydist._native.abi cimport (
    INTERRUPTED, LARGEST_TAG, OK, PENDING, POINT_TO_POINT, TIMEOUT, Fingerprint, Request, now_ns,
)
from cydist._native.pipeline cimport wait_and_ask
from cydist._native.group cimport Group, failure
from cydist._native.recent_calls cimport (
    OVER, RECEIVING, IN_TURN, SENDING, RecentCall, RecentCalls, claim, note_end, note_wait,
    note_waited, recent_calls,
)
from cydist._native.control_plane cimport poll_now
from cydist._native.ndarray_view cimport NdarrayView, view_array
from cydist._native.p2p cimport ended_message
from cydist._native.fast_collectives cimport (
    DONE, resolve_group, group_rank_of, keep_failure, native_of, small_int, has_fast_messages,
)
from cydist._native.sync cimport load_int

cdef enum:
    SHORT_NS = 20000000         # a longer wait is recorded, for ranks that query it

cdef RecentCalls *recent = recent_calls()

cpdef int send(object tensor, object dst, object group, object tag) except -1:
    """Run cydist.send."""
    return send_or_recv("send", tensor, dst, group, tag, True)


cpdef int recv(object tensor, object src, object group, object tag) except -1:
    """Run cydist.recv from a named rank."""
    return send_or_recv("recv", tensor, src, group, tag, False)


cdef int send_or_recv(str name, object tensor, object peer, object group, object tag,
                      bint sending) except -1:
    cdef NdarrayView p
    cdef Request r
    cdef Fingerprint f
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None or not has_fast_messages(chosen):
        return False
    cdef int rank = group_rank_of(chosen, native, peer)
    cdef long label = small_int(tag)
    if rank < 0 or rank == native.comm.rank:
        return False
    if not 0 <= label <= LARGEST_TAG or not view_array(tensor, &p) or p.count == 0:
        return False
    if not sending and not p.writable:
        return False
    set_request(&r, &f, &p, rank, <uint64_t>label)
    cdef RecentCall *mine = claim(
        recent, native.call_queue.group_number, SENDING if sending else RECEIVING,
        <uint64_t>label, p.nbytes, 0, p.dtype, 0, rank, IN_TURN, -1)
    # A control message that has been received is no longer in any ring.
    if (native.comm.at_once != NULL and load_int(&native.control_plane.receive.status) == PENDING
            and native.comm.at_once(&native.comm, &r, sending) == OK):
        note_end(recent, mine, OVER, False)
        return DONE
    cdef bint group_failed = False
    native.running += 1
    cdef int status = INTERRUPTED
    note_wait(recent, mine, rank)
    try:
        status = run_message(chosen, native, name, &r, sending, &group_failed)
    finally:
        note_waited(recent, mine)
        note_end(recent, mine, status if status != OK else OVER, True)
    if status != OK:
        status = give_up(native, &r, status)
        native.keep_while_used(tensor, None)
    native.running -= 1
    native.leave_comm()
    if status != OK:
        try:
            fail_message(chosen, native, name, &r, &f, status, group_failed)
        except Exception as error:
            return keep_failure(error)
    return DONE


cdef inline void set_request(Request *r, Fingerprint *f, const NdarrayView *p, int rank,
                             uint64_t tag) noexcept:
    memset(r, 0, sizeof(Request))
    f[0] = Fingerprint(0, p.count, POINT_TO_POINT, p.dtype, 0, 0, -1, 0, 0, 0)
    r.ptr = p.ptr
    r.nbytes = p.nbytes
    r.peer = r.source = rank
    r.tag = tag
    r.expected = f
    r.awaited = True
    r.status = PENDING


cdef inline int run_message(object group, Group native, str name, Request *r, bint sending,
                            bint *group_failed) except *:
    """Post the message, unless it is posted, and wait for it; return a Status.

    Args:
        group_failed: Set if it ended because the group has failed.
    """
    cdef bint posted = r.link != NULL
    cdef int64_t now = now_ns()
    cdef int64_t deadline_ns = now + <int64_t>(native.timeout * 1e9)
    cdef int status
    with nogil:
        status = poll_now(&native.control_plane, &native.comm)
        group_failed[0] = status != OK
        if status == OK and not posted:
            status = native.comm.send(&native.comm, r) if sending \
                else native.comm.recv(&native.comm, r)
        if status == OK:
            status = native.comm.wait(&native.comm, r, min(now + SHORT_NS, deadline_ns))
    if status == TIMEOUT:
        try:
            group.waiting = (name, r.peer)
        except BaseException:       # r is on the caller's stack, and must not stay in a queue
            give_up(native, r, INTERRUPTED)
            raise
        with nogil:
            status = wait_and_ask(&native.comm, r, deadline_ns)
        group.waiting = None
    return status


cdef int give_up(Group native, Request *r, int status) noexcept:
    """Withdraw a message that failed; return the Status it ended with."""
    with nogil:
        if r.link != NULL and load_int(&r.status) == PENDING:
            native.comm.cancel(&native.comm, r)
    # While this thread waited for the GIL, another thread's wait may have completed it.
    if status != INTERRUPTED and load_int(&r.status) != PENDING:
        return r.status
    return status


cdef int fail_message(object group, Group native, str name, Request *r, const Fingerprint *f,
                      int status, bint group_failed) except -1:
    """Fail the group as the general path's Work does, and raise the cause."""
    group_failed |= (load_int(&r.status) == PENDING and load_int(&native.aborted) == OK
                     and load_int(&native.control_plane.failed) != OK)
    try:
        if status == INTERRUPTED:
            raise failure(status, r.peer, -1)
        if status == TIMEOUT:
            raise group.late_message(name, r.peer, native.timeout)
        message = ended_message(native, r, f, status, group_failed)
        raise group.failed_message(name, message, now_ns() * 1e-9 + native.timeout)
    except BaseException as error:  # also what a signal handler raised in between
        group.fail(error, name)
        raise

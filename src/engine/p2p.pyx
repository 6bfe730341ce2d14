"""Point-to-point messages, as Python posts them."""
cimport cython
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport getpid

from cydist._native.abi cimport (
    ABORTED, ANY_SOURCE as any_source, CHUNK, CLOSED, COLLECTIVE_TAG, INTERRUPTED,
    LARGEST_TAG as largest_tag, MISMATCH, OK, PENDING, POINT_TO_POINT, Fingerprint, Request,
)
from cydist._native.pipeline cimport wait_and_ask
from cydist._native.array cimport Array
from cydist._native.group cimport Group, failure
from cydist._native.call_errors cimport describe_call, recorded_failure
from cydist._native.failpoints cimport POST, reach
from cydist._native.recent_calls cimport (
    OVER, POSTED, RECEIVING, IN_TURN, SENDING, RecentCalls, claim, note_end, note_wait,
    note_waited, recent_calls,
)
from cydist._native.control_plane cimport ControlMessage, poll_now, failure_message
from cydist._native.sync cimport load_int, load_u64, store_int

cdef RecentCalls *recent = recent_calls()

# What Python knows of them, under the names that they have in C.
ANY_SOURCE = any_source
LARGEST_TAG = largest_tag


@cython.no_gc_clear
cdef class Message:
    """A send or a receive under way. Keeps its array and its group alive."""

    cdef bint has_entry(self) noexcept:
        """Return whether it still has its entry in the ring of recent calls."""
        if self.recent != NULL and load_u64(&self.recent.version) != self.version:
            self.recent = NULL
        return self.recent != NULL

    cdef void note_if_over(self) noexcept:
        """Note its end in the ring of recent calls, once."""
        cdef int status = load_int(&self.request.status)
        if status != PENDING and self.has_entry():
            note_end(recent, self.recent, status if status != OK else OVER, True)
            self.recent = NULL

    def __dealloc__(self):
        cdef bint ours = self.group is not None and self.group.pid == getpid()
        if ours and load_int(&self.request.status) == PENDING:
            self.group.comm.cancel(&self.group.comm, &self.request)
        if ours and load_int(&self.request.status) != OK:
            self.group.keep_while_used(self.array, None)

    @property
    def source(self) -> int:
        """Return the group rank that a completed receive came from."""
        return self.request.source

    @property
    def over(self) -> bool:
        """Return whether it has ended, without making progress."""
        return load_int(&self.request.status) != PENDING

    def test(self) -> bool:
        """Make progress without blocking; return whether it is over."""
        if load_int(&self.request.status) != PENDING:
            return True
        with nogil:
            self.group.comm.test(&self.group.comm, &self.request)
        self.end_with_group()
        self.note_if_over()
        return load_int(&self.request.status) != PENDING

    cdef void end_with_group(self):
        """End a message of a group that was aborted, closed, or failed, though no thread waits."""
        cdef int status = load_int(&self.group.aborted)
        cdef bint intact = status == OK
        if intact:
            status = load_int(&self.group.control_plane.failed)
        if status != OK and load_int(&self.request.status) == PENDING:
            self.withdraw(status)
            self.group_failed = intact and load_int(&self.request.status) == status

    cdef void withdraw(self, int status):
        with nogil:
            self.group.comm.cancel(&self.group.comm, &self.request)
        self.group.keep_while_used(self.array, None)
        if load_int(&self.request.status) == PENDING:
            store_int(&self.request.status, status)

    def wait(self, int64_t deadline_ns) -> bool:
        """Block until it is over (True) or the deadline has passed (False).

        Raises what a signal handler raised. `check` reports how it ended.
        """
        cdef int status = load_int(&self.request.status)
        cdef bint shown = status == PENDING and self.has_entry()
        if status == PENDING:
            if shown:
                self.recent.state = IN_TURN
                note_wait(recent, self.recent, self.request.peer)
            self.group.running += 1     # the wait looks at windows, which must stay
            with nogil:
                status = wait_and_ask(&self.group.comm, &self.request, deadline_ns)
            if shown and self.has_entry():
                note_waited(recent, self.recent)
                self.recent.state = POSTED
            self.group.running -= 1
            self.group.leave_comm()
        self.note_if_over()
        if status == INTERRUPTED:       # though the message may be complete by now
            raise failure(status, self.request.peer, -1)
        self.end_with_group()
        self.note_if_over()
        return load_int(&self.request.status) != PENDING

    def check(self) -> None:
        """Raise the CallError that it ended with, if any."""
        if self.group_failed:
            raise recorded_failure(&self.group.control_plane, self.group.comm.rank)
        if load_int(&self.request.status) < 0:
            raise failure(
                self.request.status, self.peer(), -1,
                describe_call(&self.fingerprint, self.request.nbytes, NULL, 0),
                describe_call(&self.request.theirs, self.request.theirs_bytes, NULL, 0))

    cdef int peer(self) noexcept:
        """Return the peer it is about; of a receive from any source, the rank that was lost."""
        if self.request.status == MISMATCH or self.request.peer == any_source:
            return self.request.source
        return self.request.peer

    def fail(self) -> None:
        """Fail the group with this message: report it to all members, as `Group.fail` does."""
        cdef ControlMessage message = failure_message(
            self.request.status, self.group.comm.rank, self.peer(), -1)
        if message.status >= OK or message.status == CLOSED:
            return
        message.ours = self.fingerprint
        message.our_bytes = self.request.nbytes
        message.theirs = self.request.theirs
        message.their_bytes = self.request.theirs_bytes
        self.group.send_failure(&message)

    def cancel(self) -> None:
        """Withdraw it; the memory is free again on return."""
        if load_int(&self.request.status) == PENDING:
            self.withdraw(ABORTED)
        self.note_if_over()


cdef Message ended_message(Group group, const Request *r, const Fingerprint *f, int status,
                           bint group_failed):
    cdef Message m = Message.__new__(Message)
    m.group = group
    m.fingerprint = f[0]
    m.request = r[0]
    m.request.link = NULL           # no queue of the transport has it
    m.request.expected = &m.fingerprint
    m.request.status = status
    m.group_failed = group_failed
    return m


cdef Message post_message(Group group, Array array, int peer, uint64_t tag, Array about,
                          size_t layout, bint sending):
    cdef Message m = Message.__new__(Message)
    cdef Array subject = array if about is None else about
    cdef int status
    m.group = group
    m.array = array
    m.fingerprint = Fingerprint(
        0, subject.size, POINT_TO_POINT, subject.dtype, 0, 0 if about is None else CHUNK, -1,
        subject.dtype_hash, 0, 0)
    m.request.ptr = array.ptr
    m.request.nbytes = array.nbytes
    m.request.peer = peer
    m.request.tag = tag & ~COLLECTIVE_TAG
    m.request.expected = &m.fingerprint
    m.request.layout = layout
    m.request.status = PENDING
    m.request.source = peer
    if m.request.tag <= <uint64_t>largest_tag:      # not of a collective made of messages
        m.recent = claim(
            recent, group.call_queue.group_number, SENDING if sending else RECEIVING, tag,
            array.nbytes, 0, subject.dtype, 0, peer, POSTED, -1)
        m.version = m.recent.version
    group.running += 1              # this looks at windows, which must stay
    with nogil:
        status = load_int(&group.aborted)
        if status == OK:
            reach(POST)
            status = poll_now(&group.control_plane, &group.comm)
            m.group_failed = status != OK
        if status == OK:
            # The group may have been closed meanwhile, and then takes no message.
            status = load_int(&group.aborted)
        if status == OK:
            if sending:
                status = group.comm.send(&group.comm, &m.request)
            else:
                status = group.comm.recv(&group.comm, &m.request)
    group.running -= 1
    group.leave_comm()
    if status != OK:
        m.request.status = status
    m.note_if_over()
    return m


def isend(Group group not None, Array array not None, int peer, uint64_t tag, *,
          Array about=None, size_t layout=0) -> Message:
    """Post a send to group rank `peer`, of contiguous memory if `layout` is 0.

    Args:
        about: An array that this message announces; other messages carry its bytes.
        layout: MPI's datatype of the array, which only a link that `describes` accepts.
    """
    return post_message(group, array, peer, tag, about, layout, True)


def irecv(Group group not None, Array array not None, int peer, uint64_t tag, *,
          Array about=None, size_t layout=0) -> Message:
    """Post a receive, into contiguous memory if `layout` is 0; peer may be ANY_SOURCE."""
    return post_message(group, array, peer, tag, about, layout, False)

"""The call queue: the calls of a group run one at a time, in the order they were issued."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.abi cimport OK, RAISED, first_count, now_ns
from cydist._native.recent_calls cimport (
    ENQUEUED, OVER, IN_TURN, RecentCall, RecentCalls, claim, note_end, number_of_name, recent_calls,
    ticks, time_call,
)
from cydist._native.sync cimport exchange_int, futex_wait, futex_wake, load_u64

cdef enum:
    FREE = 0
    TAKEN = 1
    AWAITED = 2                     # taken, and a thread may sleep until it is free
    FOR_LONG = 1000000000           # ns; then it checks again

cdef RecentCalls *recent = recent_calls()


cdef class CallRecord:
    """One call on a group, as backends, error messages and hooks see it.

    Attributes:
        name: "all_reduce".
        seq: Its number among the collectives of the group; 0 for point to point.
        deadline: On time.monotonic(), in seconds.
        began: On the same clock.
        agreed: Whether the ranks have compared it (derived collectives).
        sizes: Hash of the sizes of arrays that are sent as one; must be equal on all ranks.
        begun: Whether its turn has come.
        over: Whether it has ended, with or without an error.
        asynchronous: Whether its caller goes on while it runs.
    """

    def __init__(self, str name not None, uint64_t seq, double deadline, bint over=False):
        self.name = name
        self.seq = seq
        self.deadline = deadline
        self.issued_ns = now_ns()
        self.began = self.issued_ns * 1e-9
        self.over = over

    @property
    def deadline_ns(self) -> int:
        """Return the deadline on CLOCK_MONOTONIC, in nanoseconds, for compiled code."""
        return self.deadline_in_ns()

    cdef int64_t deadline_in_ns(self) noexcept:
        return <int64_t>(self.deadline * 1e9)

    def remaining(self) -> float:
        """Return the seconds left; never negative."""
        return max(0.0, self.deadline - now_ns() * 1e-9)

    @staticmethod
    def clock() -> int:
        """Return the time, for `caller_waited`."""
        return ticks(recent)

    def caller_waited(self, uint64_t since) -> None:
        """Record that the caller of an asynchronous call has waited for it.

        Args:
            since: When it began to, by `clock`.
        """
        cdef RecentCall *mine = self.recent
        cdef uint64_t until
        if mine == NULL or load_u64(&mine.version) != self.version or not mine.timed:
            return
        until = ticks(recent)
        if mine.ended != 0 and mine.ended < until:
            until = mine.ended
        if mine.began > since:
            since = mine.began
        if until > since:
            mine.blocked += until - since

    def wait(self, object part) -> None:
        """Wait for a message of this call until the call's deadline; the message has no other."""
        part.due(None)
        part.wait(self.remaining())


cdef class CallQueue:
    """The calls of a group that run or are queued, and the record of the last one that began.

    All changes are atomic: no signal handler and no thread interleaves with their steps.
    """

    def __cinit__(self):
        self.queue = []
        self.seq = first_count()

    # The numbers of calls, and the last one.

    def next_seq(self) -> int:
        """Return the number of the collective that begins."""
        self.seq += 1
        return self.seq

    cpdef number(self, CallRecord call):
        """Give a call its number, and record that it is enqueued on a device. It is the group's
        last call from now on."""
        self.take_number(call)
        claim(recent, self.group_number, number_of_name(call.name), call.seq, 0, 0, 0, 0, -1,
              ENQUEUED, -1)

    cdef void take_number(self, CallRecord call) noexcept:
        self.seq += 1
        call.seq = self.seq
        self.last = call

    def take_back(self, CallRecord call not None) -> None:
        """Give the next call the number of this one, of which no other rank knows."""
        if call.seq == self.seq:
            self.seq -= 1

    def last_call(self) -> CallRecord | None:
        """Return the collective that is running, or ran last."""
        if self.last is not None or self.fast_name is None:
            return self.last
        return CallRecord(self.fast_name, self.seq, 0.0, self.fast_over)

    cdef uint64_t number_fast(self, str name) noexcept:
        self.seq += 1
        if self.last is not None:
            self.last = None
        self.fast_name = name
        self.fast_over = False
        return self.seq

    # Turns.

    cdef bint try_begin(self) noexcept:
        if not change_with_gil(&self.outstanding, 0, 1):
            return False
        # A thread whose queued call is over, or was withdrawn, holds `running` for a moment.
        if change(&self.running, FREE, TAKEN):
            return True
        add_with_gil(&self.outstanding, -1)
        return False

    cdef void end(self) noexcept:
        self.release()
        add_with_gil(&self.outstanding, -1)

    cdef void release(self) noexcept:
        if exchange_int(&self.running, FREE) == AWAITED:
            futex_wake(<uint32_t *>&self.running)

    def run_call_now(self, object group not None, CallRecord call not None,
                     object body not None) -> bool:
        """Run a call as `run_call` does if no other runs or is queued; return whether it ran."""
        if not self.try_begin():
            return False
        try:
            self.run_call(group, call, body)
        finally:
            self.end()
        return True

    cpdef run_call(self, object group, CallRecord call, object body):
        """Run `body(call)`, in the call's turn. An exception goes to the group's `call_failed`
        first: an interrupt of the body, too, must end the other ranks' calls."""
        cdef RecentCall *mine
        cdef RecentCall *outer = self.current
        cdef int status
        call.begun = True
        self.take_number(call)
        mine = claim(recent, self.group_number, number_of_name(call.name), call.seq, 0, 0, 0, 0, -1,
                     IN_TURN, -1)
        time_call(mine)
        mine.queued_ns = <uint64_t>(now_ns() - call.issued_ns)
        mine.asynchronous = call.asynchronous
        call.recent, call.version = mine, mine.version
        self.current = mine
        self.status = OK
        try:
            body(call)
        except BaseException as error:
            status = self.status if self.status != OK else RAISED
            note_end(recent, mine, status, True)    # first, since a failing group writes its calls
            group.call_failed(call, error)
            raise
        else:
            note_end(recent, mine, OVER, True)
        finally:
            call.over = True
            self.current = outer

    def push(self, object work not None) -> None:
        """Queue one more call."""
        add_with_gil(&self.outstanding, 1)
        self.queue.append(work)

    def empty(self) -> bool:
        """Return whether no call is queued."""
        return not self.queue

    def pop(self) -> object:
        """Return the oldest queued call that has not run yet; None: the queue is empty."""
        return self.queue.pop(0) if self.queue else None

    def withdraw(self, object work not None) -> bool:
        """Take a call out of the queue; False: it has already left the queue."""
        if work not in self.queue:
            return False
        self.queue.remove(work)
        add_with_gil(&self.outstanding, -1)
        return True

    def mark_run(self) -> None:
        """Note that a call that left the queue has run."""
        add_with_gil(&self.outstanding, -1)

    def __enter__(self) -> None:
        """Begin a queued call: wait until no other runs."""
        with nogil:
            while exchange_int(&self.running, AWAITED) != FREE:
                futex_wait(<uint32_t *>&self.running, AWAITED, FOR_LONG)

    def __exit__(self, *error) -> None:
        self.release()

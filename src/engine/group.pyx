"""The engine: take arrays, find the named algorithm, run it without the GIL.

It knows everything below it and nothing above. A failure leaves here as a `CallError`, which
the backend turns into an exception of cydist/errors.py.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strncpy
from posix.unistd cimport getpid, usleep

cimport cython

import importlib

from cydist._native.abi cimport (
    ABORTED, ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, CLOSED, COLLECTIVE_TAG, EVEN,
    INTERRUPTED, MISMATCH, MONITORED_BARRIER, NO_CALL, OK, PEER_LOST, POINT_TO_POINT, PRELIMINARY,
    REDUCE_SCATTER, SEQUENCE_MASK, SEQUENCE_SHIFT, TIMEOUT, Block, Call, Fingerprint, Link,
    Reduction, first_count, has_left, now_ns, compare_last, patiently,
)
from cydist._native.array cimport Array
from cydist._native.algorithm_table cimport (
    ADAPTIVE, CONSECUTIVE, HOSTS, WINDOWS, Choice, choice_of, choices_for, number_of,
    size_class,
)
from cydist._native.failpoints cimport ENTER, reach
from cydist._native.call_errors cimport keep_still_accessed, recorded_failure
from cydist._native.hierarchy cimport (
    Part, free_hosts, hosts_of, place_on_hosts, prepare_parts,
)
from cydist._native.interrupts cimport handler_has_raised, take_raised_by_handler
from cydist._native.kernels cimport OP_PREMUL_SUM, reduction
from cydist._native.control_plane cimport (
    CALL_BYTES, ControlMessage, close_control_plane, begin_call, broadcast_failure, poll_now,
    end_calls, failure_message, look_back,
    failure_message_of, open_control_plane, record_failure,
)
from cydist._native.call_queue cimport CallQueue, CallRecord
from cydist._native.recent_calls cimport RecentCall
from cydist._native.sync cimport PAUSE_US, has_reached, load_int, store_int

from cydist._native.call_errors import CODES, OP_NAMES, STATUS_NAMES, STATUSES, CallError

# Importing an algorithm's module gives its rows of the table their functions.
for algorithm in (
    "all_to_all", "bruck", "chain", "departure", "direct", "dissemination", "flat",
    "gather_scatter", "halving_doubling", "lane_rings", "lanes", "leaders", "linear",
    "mpi_collectives", "ordered", "pairwise", "prefixes", "ring", "staged", "tree",
):
    importlib.import_module(f"cydist._native.{algorithm}")

cdef enum:
    LATE_MESSAGE_NS = 50000000  # for a third rank's report of why a rank left

# Collectives that no rank completes before all members have made the same call.
cdef set COMPLETE_ON_ALL = {
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, MONITORED_BARRIER, REDUCE_SCATTER,
}

cdef object failure(int status, int peer, int step, str ours="", str theirs=""):
    if status == INTERRUPTED and handler_has_raised():
        return take_raised_by_handler()
    return CallError(STATUS_NAMES.get(status, f"status {status}"), peer, step, ours, theirs)


# Dealloc needs the link, so the collector must not clear it before.
@cython.no_gc_clear
cdef class Group:
    """A group's compiled half: its comm, and the calls that run on it.

    Args:
        link: The transport's end.
        ranks: The peer number of each group rank.
        comm_id: Distinguishes this group's messages from other groups' on the same link.
    """

    def __cinit__(self, Link link, ranks, int rank, uint64_t comm_id):
        cdef int i, size = len(ranks)
        self.peers = <int *>malloc(max(size, 1) * sizeof(int))
        self.blocks = <Block *>calloc(2 * size + 1, sizeof(Block))
        self.comm.farewells = <uint64_t *>calloc(max(size, 1), sizeof(uint64_t))
        if self.peers == NULL or self.blocks == NULL or self.comm.farewells == NULL:
            raise MemoryError
        for i in range(size):
            self.peers[i] = ranks[i]
        self.link = link
        self.call_queue = CallQueue()
        self.pid = getpid()
        self.compared_after = first_count()
        self.comm.rank = rank
        self.comm.size = size
        self.comm.peers = self.peers
        self.comm.comm_id = comm_id
        self.comm.aborted = &self.aborted
        link.attach_comm(&self.comm)
        self.open = True
        with nogil:
            open_control_plane(&self.control_plane, &self.comm)

    def __dealloc__(self):
        self.close()
        free_hosts(hosts_of(&self.comm))
        free(self.comm.farewells)
        free(self.peers)
        free(self.blocks)

    cpdef close(self):
        """Close the comm: its windows go, and messages that arrived for it are dropped. Idempotent.

        Collectives under way on other threads (or below a signal handler that called this)
        end with the status "closed"; the last of them releases the windows.
        """
        if self.open:
            self.open = False
            store_int(&self.aborted, CLOSED)
            if self.pid == getpid():
                self.leave_comm()

    cdef void leave_comm(self) noexcept:
        if not self.open and self.running == 0 and not self.left:
            self.left = True
            close_control_plane(&self.control_plane, &self.comm)
            if self.comm.hosts != NULL:
                self.link.close_windows(&hosts_of(&self.comm).local.comm)
            self.link.detach_comm(&self.comm)

    def place_on_hosts(self, hosts) -> None:
        """Take the host of each group rank, any number, before the group's first call. Without it
        no rank is known to share one."""
        if len(hosts) != self.comm.size or self.comm.hosts != NULL or self.asked_for_windows:
            raise ValueError(f"{len(hosts)} hosts for {self.comm.size} ranks, or too late")
        self.apart = len(set(hosts)) == self.comm.size
        place_on_hosts(&self.comm, hosts)

    @property
    def hosts(self) -> bool:
        """Return whether the members are on several hosts, and some of them share one."""
        return self.comm.hosts != NULL

    @property
    def consecutive(self) -> bool:
        """Return whether they are, and the ranks on each host are consecutive."""
        return self.comm.hosts != NULL and hosts_of(&self.comm).consecutive

    def prepare_parts(self, choose, segment_bytes) -> None:
        """Choose what hierarchical algorithms run on parts of the group. Called after
        `open_windows` and before `keep_choice` or `run`.

        Args:
            choose: Returns the names of an algorithm and its fallback, given a collective, the
                bytes of all blocks, ranks, whether they have windows, and whether the part has
                one rank of each host.
            segment_bytes: Returns the unit of pipelining, given ranks and windows.
        """
        prepare_parts(hosts_of(&self.comm), choose, segment_bytes)

    cdef object placement(self):
        """Return what the choices of a group on several hosts depend on, besides its size."""
        cdef Part *local
        if self.comm.hosts == NULL:
            return self.apart
        local = &hosts_of(&self.comm).local
        return (hosts_of(&self.comm).count, local.comm.size, local.comm.windows != NULL,
                self.consecutive)

    @property
    def failure_is_known(self) -> bool:
        """Return whether all members already know that the group has failed."""
        return self.control_plane.failure_is_known

    @property
    def probes_sent(self) -> int:
        """Return how often this rank, in a wait, has queried another for its call."""
        return self.control_plane.probes_sent

    def has_left(self, int rank) -> bool:
        """Return whether this member announced that it left the group while the link goes on."""
        return 0 <= rank < self.comm.size and rank != self.comm.rank and has_left(&self.comm, rank)

    @property
    def windows(self) -> bool:
        """Return whether the members share windows. Called before the group's first collective."""
        return self.open_windows(now_ns() + <int64_t>(min(self.timeout or 1e9, 1e9) * 1e9))

    @property
    def spins(self) -> int:
        """Return how often a wait in the windows looks at a flag before it yields its core."""
        return self.comm.windows.spins if self.comm.windows != NULL else 0

    def open_windows(self, int64_t deadline_ns) -> bool:
        """Return whether the members share windows. Called before the group's first collective.

        Raises CallError if that is not known at the deadline: a rank of this host is stopped while
        it changes the table of the shared memory. Also raises what a signal handler raised.
        """
        cdef int status = OK, peer = -1
        if not self.asked_for_windows and self.open:
            self.asked_for_windows = True
            self.running += 1
            try:
                status = self.link.open_windows(&self.comm, deadline_ns, &peer)
                if status == OK and self.comm.hosts != NULL:
                    status = self.open_part(deadline_ns)
            finally:
                self.running -= 1
                self.leave_comm()
            if status != OK:
                self.asked_for_windows = False
                raise self.without_windows(status, peer)
            store_int(&self.control_plane.windows_open, self.comm.windows != NULL)
        return self.comm.windows != NULL

    cdef int open_part(self, int64_t deadline_ns) except -100:
        """Open the windows of the members on this host, if these share memory."""
        cdef Part *local = &hosts_of(&self.comm).local
        cdef int peer = -1
        if local.comm.size == 1 or local.comm.windows != NULL:
            return OK
        return self.link.open_windows(&local.comm, deadline_ns, &peer)

    cdef object without_windows(self, int status, int peer):
        """Return the CallError of a call that got no answer from the table of the shared memory."""
        if status == TIMEOUT:
            ended = CallError("timeout", peer)
            if peer < 0:
                ended.awaited = (
                    "another rank of this host locks the table of the shared memory: it is stopped")
            return ended
        if status == CLOSED or (status == INTERRUPTED and handler_has_raised()):
            return failure(status, peer, -1)
        return recorded_failure(&self.control_plane, self.comm.rank)

    @property
    def library_comm(self) -> int:
        """Return the group's handle in the library below the link; 0: none. With a handle the
        library's own collectives serve the group."""
        return self.comm.library_comm

    @library_comm.setter
    def library_comm(self, size_t handle):
        self.comm.library_comm = handle
        self.choices = None

    def keep_choice(self, str collective, size_t nbytes, bytes algorithm, bytes fallback,
                    size_t segment_bytes):
        """Store the algorithm that table.py chose for even blocks of `nbytes` in all, and its
        fallback; b"": it needs none."""
        cdef int code = CODES[collective]
        if self.choices is None:
            self.choices = choices_for(self.comm.size, self.windows, self.comm.library_comm != 0,
                                       self.placement())
        self.choices.segment_bytes = segment_bytes
        self.choices.rows[code][size_class(nbytes)] = choice_of(
            collective, code, algorithm, fallback)

    @property
    def seq(self) -> int:
        """Return the number of the last collective."""
        return self.call_queue.seq

    def drain(self, int64_t deadline_ns) -> None:
        """Compare the group's last call with others before an orderly close, where a call returns
        before it has been compared. Waits for late ranks until the deadline.

        Raises CallError if another rank made a different call, or if the group failed elsewhere.
        """
        cdef Call call
        cdef ControlMessage message
        cdef int status
        if not self.open or self.running or self.comm.drain == NULL:
            return
        memset(&call, 0, sizeof(Call))
        call.deadline_ns = deadline_ns
        call.failed_peer = -1
        self.running += 1
        with nogil:
            status = self.comm.drain(&self.comm, &call)
            if status != OK:
                message = failure_message_of(&call, status, self.comm.rank)
                broadcast_failure(&self.control_plane, &self.comm, &message)
        self.running -= 1
        self.leave_comm()
        if status != OK:
            raise self.error_of(&call, status)

    def compare_last(self, int64_t deadline_ns, bint alone=False) -> None:
        """Compare the group's last call with others before an orderly close, until the deadline.
        Needed where a call may be over before all members have made it. Runs once per call.

        Args:
            alone: The others do not part now: this rank sends its call, and waits for none.

        Raises CallError if ranks differ; also what a signal handler raised.
        """
        cdef Call call
        cdef ControlMessage message
        cdef int status = OK
        cdef bint known, busy = self.running != 0 or not self.call_queue.try_begin()
        if not self.open or self.comm.size == 1 or (busy and self.comm.windows != NULL):
            status = CLOSED
        memset(&call, 0, sizeof(Call))
        call.deadline_ns = deadline_ns
        call.failed_peer = -1
        self.running += 1
        if status == OK:
            with nogil:
                status = end_calls(&self.control_plane, &self.comm, &call.fingerprint)
                if status == MISMATCH:
                    message = failure_message_of(&call, status, self.comm.rank)
                    broadcast_failure(&self.control_plane, &self.comm, &message)
        if status == OK and not has_reached(self.compared_after, call.fingerprint.seq):
            self.compared_after = call.fingerprint.seq
            known = busy or call.fingerprint.collective in COMPLETE_ON_ALL
            self.assign_number(&call)
            with nogil:
                status = compare_last(&self.comm, &call, known, alone)
            status = self.left_without_it(&call, status)
            if status == MISMATCH:
                message = failure_message_of(&call, status, self.comm.rank)
                with nogil:
                    broadcast_failure(&self.control_plane, &self.comm, &message)
        self.running -= 1
        self.leave_comm()
        if not busy:
            self.call_queue.end()
        if status == INTERRUPTED and handler_has_raised():
            raise failure(status, -1, -1)
        # Only the receiver learns of a message that did not fit its receive.
        if (status != CLOSED and self.control_plane.failed == MISMATCH
                and (self.control_plane.failure.ours.collective != POINT_TO_POINT
                     or self.control_plane.failure.theirs.collective != POINT_TO_POINT)):
            raise recorded_failure(&self.control_plane, self.comm.rank)

    cdef int left_without_it(self, Call *c, int status) except -100:
        """Return MISMATCH if a departed rank left without this rank's last call. A rank that made
        it and left in order would have said so. If it left a failed group, it, or the rank that
        reported the failure, has said that."""
        cdef int64_t until = now_ns() + LATE_MESSAGE_NS
        if status != PEER_LOST or c.failed_peer < 0:
            return status
        with nogil:
            status = poll_now(&self.control_plane, &self.comm)
            while status == OK and now_ns() < until:
                usleep(PAUSE_US)
                status = poll_now(&self.control_plane, &self.comm)
        if status != OK:
            return ABORTED
        if not (has_left(&self.comm, c.failed_peer)
                or self.link.left(self.peers[c.failed_peer])):
            return PEER_LOST
        memset(&c.theirs, 0, sizeof(Fingerprint))
        c.theirs.seq = c.fingerprint.seq
        c.theirs.collective = NO_CALL
        return MISMATCH

    def abort(self) -> None:
        """End every wait of this group with the status "aborted", now and later."""
        if self.open:
            store_int(&self.aborted, ABORTED)

    def fail(self, str status not None, int peer=-1, str call="") -> None:
        """Report a failure above the engine to all members, unless they know of one already. Their
        waits end, or their next call does. A failure that `run` or `Message` remembers is reported
        in place of the arguments.

        Args:
            status: A name of STATUS_NAMES.
            peer: Group rank that it is about, or -1.
            call: What this rank was doing, for messages.
        """
        cdef ControlMessage message = failure_message(STATUSES[status], self.comm.rank, peer, -1)
        cdef bytes words = call.encode()
        strncpy(message.call, words, CALL_BYTES - 1)
        self.send_failure(&message)

    cdef void send_failure(self, ControlMessage *message):
        if self.open:
            self.running += 1
            with nogil:
                broadcast_failure(&self.control_plane, &self.comm, message)
            self.running -= 1
            self.leave_comm()

    def run_as_part_of(self, CallRecord call) -> None:
        """Let collectives be parts of a call from now on: other ranks are told of that if one
        fails.

        Args:
            call: That call; None: collectives are whole calls again.
        """
        cdef bytes words = b"" if call is None else f"{call.name} #{call.seq}".encode()
        self.whole = call
        strncpy(self.part_of, words, CALL_BYTES - 1)

    def announce_call(self, str name not None, uint64_t seq) -> None:
        """Begin a collective that is made of messages: compare it with the calls of other ranks.

        Raises CallError if the group has failed.
        """
        cdef Call call
        cdef ControlMessage message
        cdef int status
        memset(&call, 0, sizeof(Call))
        call.fingerprint.seq = seq
        call.fingerprint.collective = CODES[name]
        call.fingerprint.root = -1
        self.running += 1
        with nogil:
            status = load_int(&self.aborted)
            if status == OK:
                status = begin_call(&self.control_plane, &self.comm, &call)
            if status != OK and status != CLOSED:
                message = failure_message(status, self.comm.rank, -1, -1)
                message.ours = call.fingerprint
                broadcast_failure(&self.control_plane, &self.comm, &message)
        end_control_call(self, status)

    def poll_control(self) -> None:
        """Receive control messages, for a call that waits for something else. Raises CallError if
        the group has failed."""
        cdef int status
        self.running += 1
        with nogil:
            status = load_int(&self.aborted)
            if status == OK:
                status = poll_now(&self.control_plane, &self.comm)
        end_control_call(self, status)

    def explain(self, ended) -> object:
        """Return why a call ended: `ended`; or, if a member was lost, the failure that another rank
        has reported or soon reports, if that says more. A rank that fails the group and leaves
        reports why first, but a third rank's report may arrive later."""
        cdef int status = load_int(&self.aborted)
        cdef int64_t until = now_ns() + LATE_MESSAGE_NS if self.comm.size > 2 else 0
        if ended.status != "peer_lost" or ended.teller >= 0 or status != OK:
            return ended
        self.running += 1
        with nogil:
            status = poll_now(&self.control_plane, &self.comm)
            while status == OK and now_ns() < until:
                usleep(PAUSE_US)
                status = poll_now(&self.control_plane, &self.comm)
        self.running -= 1
        self.leave_comm()
        if (status == OK or status == PEER_LOST
                or self.control_plane.failure.teller == self.comm.rank):
            return ended
        return recorded_failure(&self.control_plane, self.comm.rank)

    def run(self, str collective, list inputs, list outputs, *, bytes algorithm,
            bytes fallback=b"", int64_t deadline_ns, uint64_t seq, int op=0, factor=None,
            int root=-1, size_t count=0, uint32_t sizes=0, int flags=0, size_t segment_bytes=0,
            about=None) -> None:
        """Run one collective; block until it is complete on this rank.

        Args:
            inputs, outputs: Contiguous Arrays, as abi.pxd's Call lists them.
            fallback: The algorithm that runs the call if `algorithm` finds that it cannot; b"" for
                those that always can.
            op: A code of kernels.h; 0 if nothing is reduced.
            count, flags: Values that all ranks must agree on, besides dtype, op and root.
            sizes: Hash of the sizes of the arrays that an array is made of.
            about: (collective, Array, op) of the call that a preliminary vote belongs to; used for
                comparison and in error messages.

        Raises CallError; or what a signal handler raised. The other members then know of the
        failure, except for a timeout, which `Group.fail` reports.
        """
        cdef Choice choice = choice_of(collective, CODES[collective], algorithm, fallback)
        self.run_choice(&choice, collective, inputs, outputs, deadline_ns, seq, op, factor, root,
                        count, sizes, flags, segment_bytes, about)

    def run_as_chosen(self, CallRecord call not None, str collective, list inputs, list outputs,
                      size_t nbytes, int op, object factor, int root, size_t count,
                      int flags) -> bool:
        """Run one collective of `call` as `run` does, with the algorithm that `keep_choice` has
        stored for `nbytes`. Returns False, before anything has happened, if there is none."""
        if self.choices is None:
            return False
        cdef Choice choice = self.choices.rows[CODES[collective]][size_class(nbytes)]
        if choice.entry == NULL:
            return False
        self.run_choice(&choice, collective, inputs, outputs, call.deadline_in_ns(), call.seq, op,
                        factor, root, count, call.sizes, flags, self.choices.segment_bytes, None)
        return True

    cdef int run_choice(self, const Choice *choice, str collective, list inputs, list outputs,
                        int64_t deadline_ns, uint64_t seq, int op, object factor, int root,
                        size_t count, uint32_t sizes, int flags, size_t segment_bytes,
                        object about) except -1:
        """Run one collective with a choice of algorithms; the arguments are those of `run`."""
        if choice.entry.needs & WINDOWS and not self.open_windows(deadline_ns):
            if not self.open:       # another thread has closed it since the algorithm was chosen
                raise failure(CLOSED, -1, -1)
            raise ValueError(f"{choice.entry.name.decode()} needs windows, and this group has none")
        if choice.entry.needs & HOSTS and (self.comm.hosts == NULL
                                           or hosts_of(&self.comm).local.rows == NULL):
            raise ValueError(f"{choice.entry.name.decode()} needs several hosts, one of them with "
                             "several of the group's ranks")
        if choice.entry.needs & CONSECUTIVE and not self.consecutive:
            raise ValueError(f"{choice.entry.name.decode()} needs consecutive ranks on each host")
        cdef double numbers[2]
        cdef Reduction reducing
        cdef Call call
        memset(&call, 0, sizeof(Call))
        cdef Array sample = inputs[0] if inputs else outputs[0] if outputs else None
        cdef int status
        if op:
            if factor is not None:
                numbers[0] = factor.real
                numbers[1] = factor.imag
            elif op == OP_PREMUL_SUM:
                raise ValueError("PREMUL_SUM needs its factor: op=ReduceOp.PREMUL_SUM(0.5)")
            if reduction(&reducing, sample.dtype, op, numbers, self.comm.size) != 0:
                raise TypeError(
                    f"{collective}: {OP_NAMES[op]} makes no sense for {sample.dtype_name}")
            call.op = &reducing
        call.segment_bytes = segment_bytes
        call.deadline_ns = deadline_ns
        call.fingerprint = Fingerprint(
            seq, count, choice.entry.collective, sample.dtype if sample is not None else 0, op,
            flags, root, sizes ^ (sample.dtype_hash if sample is not None else 0),
            number_of(choice.entry), 0)
        if about is not None:
            name, subject, call.fingerprint.op = about
            call.fingerprint.collective = CODES[name]
            call.fingerprint.dtype = (<Array?>subject).dtype
            call.fingerprint.detail = (<Array>subject).dtype_hash
        cdef Block *blocks = <Block *>calloc(len(inputs) + len(outputs) + 1, sizeof(Block))
        if blocks == NULL:
            raise MemoryError
        fill_blocks(blocks, inputs)
        fill_blocks(blocks + len(inputs), outputs)
        call.inputs = blocks if inputs else NULL
        call.outputs = blocks + len(inputs) if outputs else NULL
        agree_on_sizes(&call, len(inputs), len(outputs))
        self.assign_number(&call)
        self.describe(&call, blocks, len(inputs), len(outputs))
        self.running += 1
        with nogil:
            status = self.perform(&call, choice)
        free(blocks)
        self.comm.recent = NULL
        if status != OK:
            self.call_queue.status = status
        error = self.end_call(&call, status, inputs, outputs)
        if error is not None:
            raise error
        return 0

    cdef void describe(self, const Call *c, const Block *blocks, size_t inputs,
                       size_t outputs) noexcept:
        """Complete the entry of the running call in the ring of recent calls. A call of several
        parts shows the bytes of all."""
        cdef RecentCall *recent = self.call_queue.current
        cdef size_t i, into = 0, out = 0
        self.comm.recent = recent
        if recent == NULL or c.fingerprint.flags & PRELIMINARY:
            return
        for i in range(inputs + outputs):
            if i < inputs:
                into += blocks[i].nbytes
            else:
                out += blocks[i].nbytes
        recent.nbytes += max(into, out)
        recent.algorithm = c.fingerprint.algorithm
        recent.dtype = c.fingerprint.dtype
        recent.op = c.fingerprint.op
        recent.root = c.fingerprint.root

    cdef object end_call(self, Call *c, int status, object one, object other):
        self.running -= 1
        self.leave_comm()
        if status == OK:
            return None
        self.keep_while_used(one, other)
        keep_still_accessed(c, one, other)
        return self.error_of(c, status)

    cdef void keep_while_used(self, object one, object other):
        """Keep objects alive after a failed call if the transport may still use their memory."""
        if self.comm.lingers != NULL and self.comm.lingers(&self.comm):
            self.link.keep(one, other)

    cdef object error_of(self, const Call *c, int status):
        if status == CLOSED or (status == INTERRUPTED and handler_has_raised()):
            return failure(status, c.failed_peer, c.failed_step)
        return recorded_failure(&self.control_plane, self.comm.rank)

    cdef void assign_number(self, Call *c) noexcept:
        c.root = c.fingerprint.root
        c.tag = COLLECTIVE_TAG | ((c.fingerprint.seq & SEQUENCE_MASK) << SEQUENCE_SHIFT)
        c.failed_peer = -1
        c.failed_step = -1

    cdef int perform(self, Call *c, const Choice *choice) noexcept nogil:
        cdef ControlMessage message
        cdef int status = load_int(&self.aborted)
        c.collective = choice.entry.collective
        c.fallback = choice.fallback
        c.adaptive = choice.entry.traits & ADAPTIVE
        if status == OK:
            status = begin_call(&self.control_plane, &self.comm, c)
        if status == OK and self.comm.compare != NULL:
            status = self.comm.compare(&self.comm, c)
        if status == OK:
            reach(ENTER)
            status = choice.entry.run(&self.comm, c)
        if status == OK:
            status = look_back(&self.control_plane, &self.comm, c)
        if status != OK and status != CLOSED:
            patiently(c)
            message = failure_message_of(c, status, self.comm.rank)
            if status != MISMATCH:
                memcpy(message.call, self.part_of, CALL_BYTES)
            if status == TIMEOUT:
                record_failure(&self.control_plane, &message)
            else:
                broadcast_failure(&self.control_plane, &self.comm, &message)
        return status


cdef int end_control_call(Group group, int status) except -1:
    """End a call that only compared or received control messages. Raises CallError."""
    group.running -= 1
    group.leave_comm()
    if status == CLOSED:
        raise failure(status, -1, -1)
    if status != OK:
        raise recorded_failure(&group.control_plane, group.comm.rank)
    return 0


cdef void agree_on_sizes(Call *c, size_t inputs, size_t outputs) noexcept:
    """Put into the fingerprint's detail how the ranks cut their data: the sizes of blocks,
    if every rank knows all of them, and of segments. Sums can be equal though sizes differ.
    """
    cdef uint64_t mixed = c.fingerprint.detail
    cdef const Block *blocks = NULL
    cdef size_t i, count = 0
    if c.fingerprint.flags & EVEN == 0:
        if c.fingerprint.collective == ALL_GATHER:
            blocks, count = c.outputs, outputs
        elif c.fingerprint.collective == REDUCE_SCATTER:
            blocks, count = c.inputs, inputs
    for i in range(count):
        mixed = (mixed ^ blocks[i].nbytes) * 0x9E3779B97F4A7C15ULL
    mixed = (mixed ^ c.segment_bytes) * 0x9E3779B97F4A7C15ULL
    c.fingerprint.detail = <uint32_t>(mixed >> 32)


cdef void fill_blocks(Block *blocks, list arrays):
    cdef Array array
    cdef size_t i
    for i, array in enumerate(arrays):
        blocks[i] = Block(array.ptr, array.nbytes)

"""The engine: takes arrays, picks up the named algorithm, runs it without the GIL.

It knows everything below and nothing above: what fails leaves here as a `Failure`, which
the backend turns into an exception of cydist/errors.py.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memset

cimport cython

import importlib
import threading

from cydist._native.abi cimport (
    ABORTED, ALL_GATHER, BARRIER, CLOSED, COLLECTIVE_TAG, COLLECTIVES, EVEN, INTERRUPTED, OK,
    MISMATCH, PENDING, POINT_TO_POINT, REDUCE_SCATTER, SEQUENCE_MASK, SEQUENCE_SHIFT, WINDOWS,
    Block, Call, Entry, Fingerprint, Link, Reduction, Request, Transport, find, index_of,
    set_interrupted,
)
from cydist._native.array cimport Array
from cydist._native.failpoints cimport ENTER, reach
from cydist._native.kernels cimport reduction
from cydist._native.notices cimport (
    FAILED, RECENT, Notice, Notices, close_notices, enter, fail, open_notices,
)
from cydist._native.waiting cimport load_int, store_int

from cydist._native import abi, kernels

# The algorithms enter themselves into the table when they are imported. The order decides
# their numbers, which travel in fingerprints.
for algorithm in (
    "bruck", "dissemination", "flat", "halving_doubling", "linear", "ordered", "pairwise",
    "ring", "staged", "tree",
):
    importlib.import_module(f"cydist._native.{algorithm}")
ALGORITHM_NAMES = dict(enumerate(name for name, _, _ in abi.algorithms()))

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from "pthread.h" nogil:
    unsigned long pthread_self()

# In the order of abi.pxd's Collective.
COLLECTIVE_NAMES = (
    "point_to_point", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier", "scan", "exscan",
)
CODES = {name: code for code, name in enumerate(COLLECTIVE_NAMES)}

# What a Status means, for errors.py.
STATUS_NAMES = {
    0: "ok", -1: "timeout", -2: "peer_lost", -3: "no_memory", -4: "mismatch",
    -5: "interrupted", -6: "aborted", -7: "closed",
}

DTYPE_NAMES = {code: name for name, code in kernels.DTYPES.items()}
OP_NAMES = {code: name for name, code in kernels.OPS.items()}

cdef unsigned long main_thread = threading.main_thread().ident
# What a signal handler raised inside a wait; only the main thread runs handlers.
cdef object raised_by_handler = None


cdef int run_signal_handlers() noexcept nogil:
    """The only place below the API that takes the GIL: Ctrl-C works in every wait."""
    if pthread_self() != main_thread:
        return 0
    with gil:
        return signal_handler_raised()


cdef int signal_handler_raised() noexcept:
    global raised_by_handler
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        raised_by_handler = error
        return 1
    return 0


set_interrupted(run_signal_handlers)


class Failure(Exception):
    """Why a call ended early, as data.

    status          a name of STATUS_NAMES
    peer            group rank it was about, or -1
    step            the algorithm's step, or -1
    ours, theirs    what this rank and the peer were doing, as text (mismatches only)
    teller          group rank on which it failed and which told us, or -1: this one; then
                    `ours` is what the teller was doing
    """

    def __init__(self, status, peer=-1, step=-1, ours="", theirs="", teller=-1):
        super().__init__(status, peer, step, ours, theirs, teller)
        self.teller = teller
        self.status = status
        self.peer = peer
        self.step = step
        self.ours = ours
        self.theirs = theirs


cdef str described(const Fingerprint *f, size_t nbytes, bint with_detail=False):
    """A fingerprint in words: `all_reduce #12 of 1000 float32, op SUM`."""
    cdef str name = COLLECTIVE_NAMES[f.collective] if f.collective < COLLECTIVES else "?"
    if f.collective == POINT_TO_POINT:
        return f"a message of {f.count} {DTYPE_NAMES.get(f.dtype, 'other')} ({nbytes} bytes)"
    words = f"{name} #{f.seq}"
    if f.collective != BARRIER:
        count = f"{f.count} " if f.count else ""
        words += f" of {count}{DTYPE_NAMES.get(f.dtype, 'other')}"
    parts = [words]
    if f.op:
        parts.append(f"op {OP_NAMES.get(f.op, f.op)}")
    if f.root >= 0:
        parts.append(f"root {f.root}")
    algorithm = ALGORITHM_NAMES.get(f.algorithm, f.algorithm)
    size = f"{nbytes} bytes in this message, " if nbytes else ""
    parts.append(f"{size}algorithm {algorithm}")
    if with_detail:
        parts.append(
            "a structured dtype's fields, sizes of blocks, and of segments (CYDIST_SEGMENT_BYTES) "
            f"hash to {f.detail:#x}")
    return ", ".join(parts)


cdef object failure(int status, int peer, int step, str ours="", str theirs=""):
    global raised_by_handler
    if status == INTERRUPTED and raised_by_handler is not None:
        error, raised_by_handler = raised_by_handler, None
        return error
    return Failure(STATUS_NAMES.get(status, f"status {status}"), peer, step, ours, theirs)


cdef object told_failure(const Notices *notices, int rank):
    """The Failure that a group's notices know of, as seen from group rank `rank`."""
    cdef const Notice *n = &notices.failure
    cdef const Fingerprint *mine = &notices.recent[n.ours.seq % RECENT]
    cdef bint mismatch = n.status == MISMATCH
    cdef bint sizes = mismatch and n.ours.detail != n.theirs.detail
    cdef str status = STATUS_NAMES.get(n.status, f"status {n.status}")
    ours = described(&n.ours, n.our_bytes, sizes)
    theirs = described(&n.theirs, n.their_bytes, sizes)
    # Of two ranks that differ this one agrees with one, or is one.
    if n.teller == rank or (mismatch and memcmp(mine, &n.ours, sizeof(Fingerprint)) == 0):
        return Failure(status, n.peer, n.step, ours, theirs)
    if mismatch and memcmp(mine, &n.theirs, sizeof(Fingerprint)) == 0:
        return Failure(status, n.teller, n.step, theirs, ours)
    return Failure(status, n.peer, n.step, ours, theirs, n.teller)


cdef Notice notice_of(const Call *call, int status, int rank) noexcept nogil:
    cdef Notice notice
    memset(&notice, 0, sizeof(Notice))
    notice.kind = FAILED
    notice.status = status
    notice.teller = rank
    notice.peer = call.failed_peer
    notice.step = call.failed_step
    notice.ours = call.fingerprint
    notice.our_bytes = call.our_bytes
    notice.theirs = call.theirs
    notice.their_bytes = call.theirs_bytes
    return notice


# Dealloc needs the link, so the collector must not clear it before.
@cython.no_gc_clear
cdef class Group:
    """A group's compiled half: a view of a link, and the calls that run on it.

    link        the transport's end; ranks[i] is the peer number of group rank i
    context     tells this group's messages from other groups' on the same link
    """

    cdef readonly Link link
    cdef Transport view
    cdef int *peers
    cdef int aborted                # 0, or the Status that ends every wait
    cdef int running                # collectives under way; changed with the GIL held
    cdef bint open
    cdef bint asked_for_windows
    cdef Notices notices

    def __cinit__(self, Link link, ranks, int rank, uint64_t context):
        cdef int i, size = len(ranks)
        self.peers = <int *>malloc(max(size, 1) * sizeof(int))
        if self.peers == NULL:
            raise MemoryError
        for i in range(size):
            self.peers[i] = ranks[i]
        self.link = link
        memset(&self.view, 0, sizeof(Transport))
        self.view.rank = rank
        self.view.size = size
        self.view.peers = self.peers
        self.view.context = context
        self.view.aborted = &self.aborted
        link.open_view(&self.view)
        self.open = True
        with nogil:
            open_notices(&self.notices, &self.view)

    def __dealloc__(self):
        self.close()
        free(self.peers)

    cpdef close(self):
        """End the view: its windows go, and what arrived for it is dropped. Idempotent.

        Collectives under way on other threads (or below a signal handler that called this)
        end with the status "closed"; the last of them lets the windows go.
        """
        if self.open:
            self.open = False
            store_int(&self.aborted, CLOSED)
            self.leave_view()

    cdef void leave_view(self) noexcept:
        if not self.open and self.running == 0:
            close_notices(&self.notices, &self.view)
            self.link.close_view(&self.view)

    @property
    def windows(self) -> bool:
        """Do the members see each other's memory? Asked before the group's first collective."""
        if not self.asked_for_windows and self.open:
            self.asked_for_windows = True
            self.link.open_windows(&self.view)
        return self.view.windows != NULL

    def abort(self) -> None:
        """End every wait of this group with the status "aborted", now and later."""
        if self.open:
            store_int(&self.aborted, ABORTED)

    def run(self, str collective, list inputs, list outputs, *, bytes algorithm,
            int64_t deadline_ns, uint64_t seq, int op=0, factor=None, int root=-1,
            size_t count=0, int flags=0, size_t segment_bytes=0) -> None:
        """Run one collective; block until it is complete on this rank.

        inputs, outputs     contiguous Arrays, as abi.pxd's Call lists them
        op                  a code of kernels.h; 0 where nothing is reduced
        count, flags        what all ranks must agree on besides dtype, op and root

        Raises Failure; or what a signal handler raised.
        """
        cdef int code = CODES[collective]
        cdef const Entry *entry = find(algorithm, code)
        if entry == NULL:
            raise ValueError(f"no algorithm for {collective} is called {algorithm.decode()!r}")
        if entry.needs & WINDOWS and not self.windows:
            raise ValueError(f"{algorithm.decode()} needs windows, and this group has none")
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
            if reduction(&reducing, sample.dtype, op, numbers, self.view.size) != 0:
                raise TypeError(
                    f"{collective}: {OP_NAMES[op]} makes no sense for {sample.dtype_name}")
            call.op = &reducing
        call.root = root
        call.tag = COLLECTIVE_TAG | ((seq & SEQUENCE_MASK) << SEQUENCE_SHIFT)
        call.segment_bytes = segment_bytes
        call.deadline_ns = deadline_ns
        call.failed_peer = -1
        call.failed_step = -1
        call.fingerprint = Fingerprint(
            seq, count, code, sample.dtype if sample is not None else 0, op, flags, root,
            sample.dtype_hash if sample is not None else 0, index_of(entry), 0)
        cdef Block *blocks = <Block *>calloc(len(inputs) + len(outputs) + 1, sizeof(Block))
        if blocks == NULL:
            raise MemoryError
        fill_blocks(blocks, inputs)
        fill_blocks(blocks + len(inputs), outputs)
        call.inputs = blocks if inputs else NULL
        call.outputs = blocks + len(inputs) if outputs else NULL
        agree_on_sizes(&call, len(inputs), len(outputs))
        cdef Notice notice
        self.running += 1
        with nogil:
            status = load_int(&self.aborted)
            if status == OK:
                status = enter(&self.notices, &self.view, &call.fingerprint)
            if status == OK:
                reach(ENTER)
                status = entry.run(&self.view, &call)
            if status != OK and status != CLOSED:
                notice = notice_of(&call, status, self.view.rank)
                fail(&self.notices, &self.view, &notice)
        self.running -= 1
        self.leave_view()
        free(blocks)
        if status == CLOSED or (status == INTERRUPTED and raised_by_handler is not None):
            raise failure(status, call.failed_peer, call.failed_step)
        if status != OK:
            raise told_failure(&self.notices, self.view.rank)

    def isend(self, Array array, int peer, uint64_t tag) -> Message:
        """Post a send of contiguous memory to group rank `peer`; returns its Message."""
        return posted(self, array, peer, tag, True)

    def irecv(self, Array array, int peer, uint64_t tag) -> Message:
        """Post a receive into contiguous memory; peer -1 takes from anyone."""
        return posted(self, array, peer, tag, False)


cdef void agree_on_sizes(Call *c, size_t inputs, size_t outputs):
    """Put into the fingerprint's detail how the ranks cut their data: the sizes of blocks,
    where every rank knows all of them, and of segments. Sums can be equal where sizes are not.
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


@cython.no_gc_clear
cdef class Message:
    """A send or a receive under way. Keeps its array and its group alive."""

    cdef Group group
    cdef Array array
    cdef Request request
    cdef Fingerprint fingerprint
    cdef bint told                  # it ended because the group failed elsewhere

    def __dealloc__(self):
        if load_int(&self.request.status) == PENDING and self.group is not None:
            self.group.view.cancel(&self.group.view, &self.request)

    @property
    def source(self) -> int:
        """Group rank that a completed receive came from."""
        return self.request.source

    @property
    def over(self) -> bool:
        """Has it ended? Moves nothing."""
        return load_int(&self.request.status) != PENDING

    def test(self) -> bool:
        """Is it over? Moves things on; never blocks."""
        if load_int(&self.request.status) != PENDING:
            return True
        with nogil:
            self.group.view.test(&self.group.view, &self.request)
        self.end_with_group()
        return load_int(&self.request.status) != PENDING

    cdef void end_with_group(self):
        """A message of a group that was aborted, closed, or failed is over, though nobody waits."""
        cdef int status = load_int(&self.group.aborted)
        cdef bint told = status == OK
        if told:
            status = load_int(&self.group.notices.failed)
        if status != OK and load_int(&self.request.status) == PENDING:
            self.withdraw(status)
            self.told = told and load_int(&self.request.status) == status

    cdef void withdraw(self, int status):
        with nogil:
            self.group.view.cancel(&self.group.view, &self.request)
        if load_int(&self.request.status) == PENDING:
            store_int(&self.request.status, status)

    def wait(self, int64_t deadline_ns) -> bool:
        """Block until it is over (True) or the deadline has passed (False).

        Raises what a signal handler raised. `check` says how it ended.
        """
        cdef int status = load_int(&self.request.status)
        if status == PENDING:
            with nogil:
                status = self.group.view.wait(&self.group.view, &self.request, deadline_ns)
        if status == INTERRUPTED and load_int(&self.request.status) == PENDING:
            raise failure(status, self.request.peer, -1)
        self.end_with_group()
        return load_int(&self.request.status) != PENDING

    def check(self) -> None:
        """Raise the Failure it ended with, if it did."""
        if self.told:
            raise told_failure(&self.group.notices, self.group.view.rank)
        if load_int(&self.request.status) < 0:
            raise failure(
                self.request.status, self.request.peer, -1,
                described(&self.fingerprint, self.request.nbytes),
                described(&self.request.theirs, self.request.theirs_bytes))

    def cancel(self) -> None:
        """Withdraw it; the memory is free again on return."""
        if load_int(&self.request.status) == PENDING:
            self.withdraw(ABORTED)


cdef Message posted(Group group, Array array, int peer, uint64_t tag, bint sending):
    cdef Message m = Message.__new__(Message)
    cdef int status
    m.group = group
    m.array = array
    m.fingerprint = Fingerprint(
        0, array.size, POINT_TO_POINT, array.dtype, 0, 0, -1, array.dtype_hash, 0, 0)
    m.request.ptr = array.ptr
    m.request.nbytes = array.nbytes
    m.request.peer = peer
    m.request.tag = tag & ~COLLECTIVE_TAG
    m.request.expected = &m.fingerprint
    m.request.status = PENDING
    m.request.source = peer
    with nogil:
        status = load_int(&group.aborted)
        if status == OK:
            status = load_int(&group.notices.failed)
            m.told = status != OK
        if status == OK:
            if sending:
                status = group.view.send(&group.view, &m.request)
            else:
                status = group.view.recv(&group.view, &m.request)
    if status != OK:
        m.request.status = status
    return m

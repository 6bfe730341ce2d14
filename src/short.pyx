"""The short way of a call: a blocking collective of plain arrays on a group at rest, or a message.

Most calls are of this kind, and small ones should cost no more than their checks. So what is
decided once (the group, the algorithm, the reduction's loop) is looked up here and nothing is
allocated. A function returns False when the call is of another kind, or when anything is
wrong with it: then nothing has happened, and the long way runs it, or says what is wrong.

A brief call (few bytes, through windows) keeps the GIL while it waits no longer than a few looks
at a flag take: to let it go and take it back costs more than that. It looks at the clock then, too.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, CLOSED, EVEN, INTERRUPTED, MISMATCH,
    OK, PENDING, POINT_TO_POINT, REDUCE_SCATTER, TIMEOUT, WINDOWS, Block, Call, Entry, Fingerprint,
    Reduction, Request, index_of, now_ns, patiently,
)
from cydist._native.choices cimport size_class
from cydist._native.engine cimport Group, agree_on_sizes, failure
from cydist._native.failures cimport described, keep_visited, told_failure
from cydist._native.kernels cimport OP_NONE, OP_PREMUL_SUM, reduction
from cydist._native.notices cimport Notice, hear_now, new_notice
from cydist._native.plain cimport Plain, look
from cydist._native.waiting cimport load_int

cdef object default_group = None    # the process's, if it is one of ours
cdef Group default_native = None    # its compiled half
cdef bint default_sends = False     # its messages may come this way
cdef object operations = None        # the class of ReduceOp's members


def use_operations(object members) -> None:
    """`op` arguments of this class, an IntEnum, are codes of kernels.h."""
    global operations
    operations = members


def use_default(object group) -> None:
    """The group that None means from now on; None: ask the long way."""
    global default_group, default_native, default_sends
    found = getattr(group, "_native", None)
    default_native = found if isinstance(found, Group) else None
    default_group = None if default_native is None else group
    default_sends = default_group is not None and group.sends_short


cdef extern from "pthread.h" nogil:
    int pthread_atfork(void *, void *, void (*)() noexcept nogil)

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef int process = getpid()     # the system call costs more than all the rest


cdef void in_child() noexcept nogil:
    global process
    process = getpid()


pthread_atfork(NULL, NULL, in_child)


cdef inline bint usable(Group native) noexcept:
    """Is it this process's, open and unharmed?"""
    return (native.pid == process and native.open and load_int(&native.aborted) == OK
            and load_int(&native.notices.failed) == OK)


cdef inline Group native_of(object group):
    """The compiled half of a group that can run a call now, or None."""
    cdef Group native
    if group is default_group:
        return default_native if default_native is not None and usable(default_native) else None
    found = getattr(group, "_native", None)
    if type(found) is not Group:
        return None
    native = <Group>found
    return native if usable(native) else None


cdef extern from "Python.h":
    long as_long "PyLong_AsLongAndOverflow"(object, int *) except? -1


cdef inline long number(object given) except? -1:
    """What an int says, or -1 for others and those that are none of ours."""
    cdef int overflow = 0
    cdef long found
    if type(given) is not int:
        return -1
    found = as_long(given, &overflow)
    return -1 if overflow or found < 0 else found


cdef inline int member(object group, Group native, object given) except -2:
    """The group rank of a global one; -1: the long way knows what is wrong with it."""
    cdef long found = number(given)
    cdef int rank
    if found < 0 or group is default_group:
        return <int>found if found < native.view.size else -1
    for rank in range(native.view.size):
        if number(group.ranks[rank]) == found:
            return rank
    return -1


cdef inline bint apart(const Plain *a, const Plain *b) noexcept:
    return a.ptr + a.nbytes <= b.ptr or b.ptr + b.nbytes <= a.ptr


cdef inline bint operation(object op, int dtype, int ranks, Reduction *r, int *code) except -1:
    """Fill in the reduction; False: the long way knows what is wrong with it."""
    if type(op) is not operations:
        return False
    code[0] = <int>op
    return code[0] != OP_PREMUL_SUM and reduction(r, dtype, code[0], NULL, ranks) == 0


cdef inline const Entry *begin(Group native, int collective, size_t nbytes) noexcept:
    """Take the turn; NULL: somebody has it, or nobody chose an algorithm yet."""
    if native.choices is None:
        return NULL
    cdef const Entry *entry = native.choices.rows[collective][size_class(nbytes)]
    return entry if entry != NULL and native.turn.begin_alone() else NULL


cdef extern from "Python.h" nogil:
    ctypedef struct PyThreadState
    PyThreadState *PyEval_SaveThread()
    void PyEval_RestoreThread(PyThreadState *)

cdef enum:
    BRIEF_BYTES = 16384         # to copy or reduce so many takes about a microsecond


ctypedef struct Brief:          # a call, and what it needs when it waits
    Call call                   # first
    double timeout              # seconds
    PyThreadState *thread       # NULL: it has the GIL


cdef void before_wait(Call *c) noexcept nogil:
    cdef Brief *b = <Brief *>c
    c.before_wait = NULL
    c.deadline_ns = now_ns() + <int64_t>(b.timeout * 1e9)
    b.thread = PyEval_SaveThread()


cdef inline void prepare(Brief *b, Group native) noexcept:
    memset(b, 0, sizeof(Brief))
    b.call.before_wait = before_wait
    b.timeout = native.timeout


cdef bint finish(object group, Group native, str name, const Entry *entry, Brief *b, int dtype,
                 size_t count, int op, int root, size_t nbytes, object one=None,
                 object other=None) except -1:
    """Run the call, whose blocks and reduction are filled in, and give the turn back.

    one, other      the arrays that it is about
    """
    cdef Call *c = &b.call
    cdef int status
    native.seq += 1
    native.short_name = name
    native.short_over = False
    c.segment_bytes = native.choices.segment_bytes
    c.fingerprint = Fingerprint(
        native.seq, count, entry.collective, dtype, op, EVEN, root, 0, index_of(entry), 0)
    agree_on_sizes(c, 0, 0)
    native.number(c)
    native.running += 1
    if nbytes > BRIEF_BYTES or entry.needs & WINDOWS == 0:
        patiently(c)
    status = native.perform(c, entry)
    if b.thread != NULL:
        PyEval_RestoreThread(b.thread)
    native.running -= 1
    native.leave_view()
    native.turn.end_alone()
    try:
        if status != OK:
            native.keep_while_used(one, other)
            keep_visited(c, one, other)
            group.failed_call(name, c.fingerprint.seq, native.failed(c, status))
    finally:
        native.short_over = True
    return True


cdef void cut(Block *blocks, const Plain *whole, int parts) noexcept:
    """Cut an array into equal blocks."""
    cdef size_t each = whole.nbytes // parts
    cdef int i
    for i in range(parts):
        blocks[i] = Block(whole.ptr + i * each, each)


cpdef bint all_reduce(object tensor, object op, object group) except -1:
    """cydist.all_reduce."""
    cdef Plain p
    cdef Reduction r
    cdef int code
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None or not look(tensor, &p) or p.count == 0 or not p.writable:
        return False
    if not operation(op, p.dtype, native.view.size, &r, &code):
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, ALL_REDUCE, p.nbytes)
    if entry == NULL:
        return False
    cdef Block block = Block(p.ptr, p.nbytes)
    b.call.inputs = b.call.outputs = &block
    b.call.op = &r
    return finish(chosen, native, "all_reduce", entry, &b, p.dtype, p.count, code, -1,
                  p.nbytes, tensor)


cpdef bint broadcast(object tensor, object src, object group) except -1:
    """cydist.broadcast."""
    cdef Plain p
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None:
        return False
    cdef int root = member(chosen, native, src)
    if root < 0 or not look(tensor, &p) or p.count == 0:
        return False
    if not p.writable and root != native.view.rank:
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, BROADCAST, p.nbytes)
    if entry == NULL:
        return False
    cdef Block block = Block(p.ptr, p.nbytes)
    b.call.inputs = b.call.outputs = &block
    return finish(chosen, native, "broadcast", entry, &b, p.dtype, p.count, OP_NONE, root,
                  p.nbytes, tensor)


cpdef bint all_gather_into_tensor(object output, object input, object group) except -1:
    """cydist.all_gather_into_tensor."""
    cdef Plain small, large
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None or not look(input, &small) or not look(output, &large):
        return False
    if not times(&large, &small, native.view.size) or not large.writable:
        return False
    if not apart(&small, &large) and small.ptr != large.ptr + native.view.rank * small.nbytes:
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, ALL_GATHER, large.nbytes)
    if entry == NULL:
        return False
    cdef Block block = Block(small.ptr, small.nbytes)
    cut(native.blocks, &large, native.view.size)
    b.call.inputs = &block
    b.call.outputs = native.blocks
    return finish(chosen, native, "all_gather_into_tensor", entry, &b, small.dtype, large.count,
                  OP_NONE, -1, large.nbytes, output, input)


cpdef bint reduce_scatter_tensor(object output, object input, object op, object group) except -1:
    """cydist.reduce_scatter_tensor."""
    cdef Plain small, large
    cdef Reduction r
    cdef int code
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None or not look(output, &small) or not look(input, &large):
        return False
    if not times(&large, &small, native.view.size) or not small.writable:
        return False
    if not apart(&small, &large) or not operation(op, small.dtype, native.view.size, &r, &code):
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, REDUCE_SCATTER, large.nbytes)
    if entry == NULL:
        return False
    cdef Block block = Block(small.ptr, small.nbytes)
    cut(native.blocks, &large, native.view.size)
    b.call.inputs = native.blocks
    b.call.outputs = &block
    b.call.op = &r
    return finish(chosen, native, "reduce_scatter_tensor", entry, &b, small.dtype, large.count,
                  code, -1, large.nbytes, output, input)


cpdef bint all_to_all_single(object output, object input, object group) except -1:
    """cydist.all_to_all_single of vectors that all ranks cut evenly."""
    cdef Plain given, due
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None or not look(input, &given) or not look(output, &due):
        return False
    if (given.count == 0 or given.count != due.count or given.dtype != due.dtype
            or not due.writable or given.ndim != 1 or due.ndim != 1):
        return False
    cdef int size = native.view.size
    if given.count % size != 0 or not apart(&given, &due):
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, ALL_TO_ALL, due.nbytes)
    if entry == NULL:
        return False
    cut(native.blocks, &given, size)
    cut(native.blocks + size, &due, size)
    b.call.inputs = native.blocks
    b.call.outputs = native.blocks + size
    return finish(chosen, native, "all_to_all_single", entry, &b, due.dtype, due.count // size,
                  OP_NONE, -1, due.nbytes, output, input)


cpdef bint barrier(object group) except -1:
    """cydist.barrier."""
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None:
        return False
    cdef Brief b
    prepare(&b, native)
    cdef const Entry *entry = begin(native, BARRIER, 0)
    if entry == NULL:
        return False
    return finish(chosen, native, "barrier", entry, &b, 0, 0, OP_NONE, -1, 0, None, None)


cdef inline bint times(const Plain *large, const Plain *small, int ranks) noexcept:
    """Is the large array `ranks` times the small one, of its dtype?"""
    return (small.count != 0 and large.count == small.count * ranks
            and large.dtype == small.dtype)


# Messages

cdef enum:
    LARGEST_TAG = 0x7fffffff
    SHORT_NS = 20000000         # who waits longer says so to those who ask

cpdef bint send(object tensor, object dst, object group, object tag) except -1:
    """cydist.send."""
    return message("send", tensor, dst, group, tag, True)


cpdef bint recv(object tensor, object src, object group, object tag) except -1:
    """cydist.recv from a rank that is named."""
    return message("recv", tensor, src, group, tag, False)


cdef inline bint sends_short(object group) except -1:
    return default_sends if group is default_group else group.sends_short


cdef bint message(str name, object tensor, object peer, object group, object tag,
                  bint sending) except -1:
    cdef Plain p
    cdef Request r
    cdef Fingerprint f
    chosen = default_group if group is None else group
    cdef Group native = native_of(chosen)
    if native is None or not sends_short(chosen):
        return False
    cdef int rank = member(chosen, native, peer)
    cdef long label = number(tag)
    if rank < 0 or rank == native.view.rank:
        return False
    if not 0 <= label <= LARGEST_TAG or not look(tensor, &p) or p.count == 0:
        return False
    if not sending and not p.writable:
        return False
    describe(&r, &f, &p, rank, <uint64_t>label)
    # A notice that has come stands in no ring any more.
    if (native.view.at_once != NULL and load_int(&native.notices.receive.status) == PENDING
            and native.view.at_once(&native.view, &r, sending) == OK):
        return True
    cdef bint told = False
    native.running += 1
    cdef int status = travel(chosen, native, name, &r, sending, &told)
    if status != OK:
        status = given_up(native, &r, status)
        native.keep_while_used(tensor, None)
    native.running -= 1
    native.leave_view()
    if status != OK:
        fail_message(chosen, native, name, &r, &f, status, told)
    return True


cdef inline void describe(Request *r, Fingerprint *f, const Plain *p, int rank,
                          uint64_t tag) noexcept:
    memset(r, 0, sizeof(Request))
    f[0] = Fingerprint(0, p.count, POINT_TO_POINT, p.dtype, 0, 0, -1, 0, 0, 0)
    r.ptr = p.ptr
    r.nbytes = p.nbytes
    r.peer = r.source = rank
    r.tag = tag
    r.expected = f
    r.attended = True
    r.status = PENDING


cdef inline int travel(object group, Group native, str name, Request *r, bint sending,
                       bint *told) except *:
    """Post the message, if that has not been done, and wait for it; a Status.

    told    set: the group has failed, and that is why
    """
    cdef bint posted = r.link != NULL
    cdef int64_t now = now_ns()
    cdef int64_t deadline_ns = now + <int64_t>(native.timeout * 1e9)
    cdef int status
    with nogil:
        status = hear_now(&native.notices, &native.view)
        told[0] = status != OK
        if status == OK and not posted:
            status = native.view.send(&native.view, r) if sending \
                else native.view.recv(&native.view, r)
        if status == OK:
            status = native.view.wait(&native.view, r, min(now + SHORT_NS, deadline_ns))
    if status == TIMEOUT:
        group.waiting = (name, r.peer)
        with nogil:
            status = native.view.wait(&native.view, r, deadline_ns)
        group.waiting = None
    return status


cdef int given_up(Group native, Request *r, int status) noexcept:
    """Withdraw a message that did not go well; what has become of it, a Status."""
    with nogil:
        if r.link != NULL and load_int(&r.status) == PENDING:
            native.view.cancel(&native.view, r)
    # While this thread came for the GIL, another's wait may have completed it.
    if status != INTERRUPTED and load_int(&r.status) != PENDING:
        return r.status
    return status


cdef int fail_message(object group, Group native, str name, Request *r, const Fingerprint *f,
                      int status, bint told) except -1:
    """Fail the group, as the long way's Work does, and raise why."""
    cdef Notice notice
    cdef int peer = r.source if status == MISMATCH else r.peer
    if status == TIMEOUT:
        raise group.late_message(name, r.peer)
    if status == INTERRUPTED:
        error = failure(status, r.peer, -1)
        group.fail(error, name)
        raise error
    if told or (load_int(&r.status) == PENDING and load_int(&native.aborted) == OK
                and load_int(&native.notices.failed) != OK):
        group.failed_message(name, told_failure(&native.notices, native.view.rank))
    ended = failure(status, peer, -1, described(f, r.nbytes, False),
                    described(&r.theirs, r.theirs_bytes, False))
    if status != CLOSED:
        notice = new_notice(status, native.view.rank, peer, -1)
        notice.ours = f[0]
        notice.our_bytes = r.nbytes
        notice.theirs = r.theirs
        notice.their_bytes = r.theirs_bytes
        native.tell(&notice)
    group.failed_message(name, ended)
    return 0

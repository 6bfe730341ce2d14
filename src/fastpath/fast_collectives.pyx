"""The fast path of a call: a blocking collective of plain arrays on an idle group.

Most calls are of this kind, and small ones should cost no more than their checks. So decisions that
do not change (the group, the algorithm, the reduction's loop) are looked up here, and nothing is
allocated. A function returns 0 for other calls and for erroneous ones. Then nothing has happened,
and the general path runs the call or reports the error. It returns DONE if it has run the call, and
FAILED if that failed: `kept_failure` then returns the exception.

A short call (few bytes, through windows) keeps the GIL as long as it waits no more than a few looks
at a flag: releasing and taking the GIL costs more. Only a longer wait reads the clock.
"""
import sys
from threading import get_ident

from cydist.errors import shorten

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset
from cpython.object cimport PyObject

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EVEN, EXSCAN, GATHER, OK, REDUCE,
    REDUCE_SCATTER, SCAN, SCATTER, Block, Call, Fingerprint, Reduction, now_ns, patiently,
)
from cydist._native.algorithm_table cimport WINDOWS, Choice, Entry, number_of, size_class
from cydist._native.call_queue cimport CallQueue
from cydist._native.group cimport Group, agree_on_sizes
from cydist._native.group_state cimport process_id
from cydist._native.kernels cimport OP_NONE, OP_PREMUL_SUM, reduction
from cydist._native.recent_calls cimport (
    OVER, IN_TURN, RecentCall, RecentCalls, claim, note_end, recent_calls,
)
from cydist._native.ndarray_view cimport NdarrayView, disjoint, view_array, is_multiple
from cydist._native.sync cimport load_int

cdef object default_group = None    # the process's, if it is a cydist group
cdef Group default_native = None    # its compiled half
cdef bint default_fast_messages = False  # whether its messages may use the fast path
cdef object default_streams = None  # its fast path for arrays on GPUs, if it has one
cdef object operations = None        # the class of ReduceOp's members
cdef const int *process = process_id()
cdef RecentCalls *recent = recent_calls()


def use_operations(object members) -> None:
    """Accept `op` arguments of this class, an IntEnum of codes of kernels.h."""
    global operations
    operations = members


def use_default(object group) -> None:
    """Set the group that None means; None: use the general path."""
    global default_group, default_native, default_fast_messages, default_streams
    found = getattr(group, "native", None)
    default_native = found if isinstance(found, Group) else None
    default_group = None if default_native is None else group
    default_fast_messages = default_group is not None and group.fast_messages
    default_streams = getattr(group, "fast_streams", None)


cdef object resolve_group(object group):
    return default_group if group is None else group


cdef object enqueuer_of(object group):
    if observed():
        return None
    return default_streams if group is None else getattr(group, "fast_streams", None)


cdef object operations_class():
    return operations


cdef bint has_fast_messages(object group) except -1:
    """Return whether the group's messages need only the checks of fast_p2p.pyx."""
    return default_fast_messages if group is default_group else group.fast_messages


# Whether torch.profiler runs. While it does, calls leave the fast path, and the general path shows
# them (cydist/groups/profiler_ranges.py). torch announces a profiler only by a variable of a
# module, which is read from the module's dictionary.

cdef extern from "Python.h":
    PyObject *Py_True
    # Of a dictionary with keys of str this raises nothing. The reference is borrowed.
    PyObject *look_up "PyDict_GetItemWithError"(PyObject *, PyObject *) noexcept

cdef str FLAG = "_is_profiler_enabled"
cdef dict profiler_module = None    # None: the program had not imported torch
cdef PyObject *profiler_names = NULL    # the same, to be read fast


cdef int observers = 0              # hooks, and groups that collect calls to make fewer of them


cdef inline bint profiling() noexcept:
    return profiler_names != NULL and look_up(profiler_names, <PyObject *>FLAG) == Py_True


def is_profiling() -> bool:
    """Return whether torch.profiler or another torch profiler runs. From the first call after
    the import of torch on, the fast path sees it too."""
    global profiler_module, profiler_names
    if profiler_names == NULL and (module := sys.modules.get("torch.autograd.profiler")):
        profiler_module = module.__dict__
        profiler_names = <PyObject *>profiler_module
    return profiling()


cdef inline bint observed() noexcept:
    return observers > 0 or profiling()


def is_observed() -> bool:
    """Return whether a profiler runs, there is a hook, or a group collects its calls. Then all
    calls leave the fast path."""
    return observers > 0 or is_profiling()


def observe_calls(int change) -> None:
    """Add `change` to the number of hooks and of groups that collect their calls."""
    global observers
    observers += change


cdef inline bint usable(Group native) noexcept:
    """Return whether it belongs to this process and is open and intact."""
    return (native.pid == process[0] and native.open and load_int(&native.aborted) == OK
            and load_int(&native.control_plane.failed) == OK)


cdef Group native_of(object group):
    """Return the compiled half of a group that can run a call now, or None, also while a profiler
    shows the calls of the general path, or a hook or a group gets them."""
    cdef Group native
    if observed():
        return None
    if group is default_group:
        return default_native if default_native is not None and usable(default_native) else None
    found = getattr(group, "native", None)
    if type(found) is not Group:
        return None
    native = <Group>found
    return native if usable(native) else None


cdef extern from "Python.h":
    long as_long "PyLong_AsLongAndOverflow"(object, int *) except? -1


cdef long small_int(object given) except? -1:
    """Return the value of a non-negative Python int, or -1 for anything else."""
    cdef int overflow = 0
    cdef long found
    if type(given) is not int:
        return -1
    found = as_long(given, &overflow)
    return -1 if overflow or found < 0 else found


cdef int group_rank_of(object group, Group native, object given) except -2:
    """Return the group rank of a global rank; -1: the general path reports the error."""
    cdef long found = small_int(given)
    cdef int rank
    if found < 0 or group is default_group:
        return <int>found if found < native.comm.size else -1
    for rank in range(native.comm.size):
        if small_int(group.ranks[rank]) == found:
            return rank
    return -1


cdef inline bint disjoint_from_all(const NdarrayView *a, const Block *blocks, int count) noexcept:
    cdef int i
    for i in range(count):
        if a.ptr < blocks[i].ptr + blocks[i].nbytes and blocks[i].ptr < a.ptr + a.nbytes:
            return False
    return True


cdef inline bint read_operation(object op, int dtype, int ranks, Reduction *r, int *code) except -1:
    """Fill in the reduction; False: the general path reports the error."""
    if type(op) is not operations:
        return False
    code[0] = <int>op
    return code[0] != OP_PREMUL_SUM and reduction(r, dtype, code[0], NULL, ranks) == 0


cdef inline const Choice *try_start(Group native, int collective, size_t nbytes) noexcept:
    """Begin the call unless another runs or is queued, or no algorithm is chosen: then NULL."""
    if native.choices is None:
        return NULL
    cdef const Choice *choice = &native.choices.rows[collective][size_class(nbytes)]
    return choice if choice.entry != NULL and native.call_queue.try_begin() else NULL


cdef extern from "Python.h" nogil:
    ctypedef struct PyThreadState
    PyThreadState *PyEval_SaveThread()
    void PyEval_RestoreThread(PyThreadState *)

cdef enum:
    GIL_KEPT_BYTES = 16384      # to copy or reduce this much takes about a microsecond


ctypedef struct FastCall:          # a call, and its state for a wait
    Call call                   # must be the first member
    double timeout              # seconds
    PyThreadState *thread       # NULL: this thread has the GIL


cdef void before_wait(Call *c) noexcept nogil:
    cdef FastCall *b = <FastCall *>c
    c.before_wait = NULL
    c.deadline_ns = now_ns() + <int64_t>(b.timeout * 1e9)
    b.thread = PyEval_SaveThread()


cdef inline void prepare(FastCall *b, Group native) noexcept:
    memset(b, 0, sizeof(FastCall))
    b.call.before_wait = before_wait
    b.timeout = native.timeout


cdef int run_call(object group, Group native, str name, const Choice *kept, FastCall *b, int dtype,
                  size_t count, int op, int root, size_t nbytes, object one=None,
                  object other=None) except -1:
    """Run the call, whose blocks and reduction are filled in, and let the next call begin.

    Args:
        one, other: The call's arrays.
    """
    cdef Call *c = &b.call
    cdef Choice choice = kept[0]    # which another thread may drop while this call waits
    cdef const Entry *entry = choice.entry
    cdef int status
    cdef CallQueue queue = native.call_queue
    cdef uint64_t seq = queue.number_fast(name)
    cdef RecentCall *mine
    c.segment_bytes = native.choices.segment_bytes
    # No rank knows all sizes of a gather or scatter.
    c.fingerprint = Fingerprint(
        seq, count, entry.collective, dtype, op,
        0 if entry.collective == GATHER or entry.collective == SCATTER else EVEN,
        root, 0, number_of(entry), 0)
    agree_on_sizes(c, 0, 0)
    native.assign_number(c)
    # The entry's time is the call's only look at a clock, unless it waits.
    mine = claim(recent, queue.group_number, entry.collective, seq, nbytes,
                 c.fingerprint.algorithm, dtype, op, root, IN_TURN, -1)
    native.running += 1
    if nbytes > GIL_KEPT_BYTES or entry.needs & WINDOWS == 0:
        patiently(c)
    native.comm.recent = mine
    status = native.perform(c, &choice)
    if b.thread != NULL:
        PyEval_RestoreThread(b.thread)
    native.comm.recent = NULL
    note_end(recent, mine, status if status != OK else OVER, b.thread != NULL)
    queue.end()
    error = native.end_call(c, status, one, other)
    if error is not None:
        return fail_call(group, queue, name, seq, error)
    queue.fast_over = True
    return DONE


cdef int fail_call(object group, CallQueue queue, str name, uint64_t seq, object error) except -1:
    """Fail the group, and keep the exception."""
    try:
        group.failed_call(name, seq, error)
    except Exception as failed:
        return keep_failure(failed)
    finally:
        queue.fast_over = True
    return DONE


# The exception of a failed call goes past the functions of the fast path to the public one, which
# raises it, so that tracebacks do not show them. A thread raises it before it does anything else.
cdef dict kept_failures = {}        # by thread


cdef int keep_failure(object error) except -1:
    shorten(error, 0)
    kept_failures[get_ident()] = error
    return FAILED


cdef object kept_failure():
    return kept_failures.pop(get_ident())


cdef void cut_blocks(Block *blocks, const NdarrayView *whole, int parts) noexcept:
    """Cut an array into equal blocks."""
    cdef size_t each = whole.nbytes // parts
    cdef int i
    for i in range(parts):
        blocks[i] = Block(whole.ptr + i * each, each)


cdef inline int run_on_array(str name, int collective, object tensor, object given_root, object op,
                             object group) except -1:
    """Run a call on one array that has the same size on all ranks. `root` and `op` mean nothing
    for a call that has none."""
    cdef bint rooted = collective == BROADCAST or collective == REDUCE
    cdef NdarrayView p
    cdef Reduction r
    cdef int code = OP_NONE, root = -1
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None:
        return False
    if rooted:
        root = group_rank_of(chosen, native, given_root)
    if (rooted and root < 0) or not view_array(tensor, &p) or p.count == 0:
        return False
    cdef bint written = not rooted or (native.comm.rank == root) == (collective == REDUCE)
    if written and not p.writable:
        return False
    if collective != BROADCAST and not read_operation(op, p.dtype, native.comm.size, &r, &code):
        return False
    cdef FastCall b
    prepare(&b, native)
    cdef const Choice *choice = try_start(native, collective, p.nbytes)
    if choice == NULL:
        return False
    cdef Block block = Block(p.ptr, p.nbytes)
    b.call.inputs = &block
    b.call.outputs = &block if written or collective == BROADCAST else NULL
    b.call.op = &r if collective != BROADCAST else NULL
    return run_call(chosen, native, name, choice, &b, p.dtype, p.count, code, root, p.nbytes,
                    tensor)


cpdef int all_reduce(object tensor, object op, object group) except -1:
    """Run cydist.all_reduce."""
    return run_on_array("all_reduce", ALL_REDUCE, tensor, None, op, group)


cpdef int broadcast(object tensor, object src, object group) except -1:
    """Run cydist.broadcast."""
    return run_on_array("broadcast", BROADCAST, tensor, src, None, group)


cpdef int reduce(object tensor, object dst, object op, object group) except -1:
    """Run cydist.reduce."""
    return run_on_array("reduce", REDUCE, tensor, dst, op, group)


cpdef int scan(object tensor, object op, object group) except -1:
    """Run cydist.scan."""
    return run_on_array("scan", SCAN, tensor, None, op, group)


cpdef int exscan(object tensor, object op, object group) except -1:
    """Run cydist.exscan."""
    return run_on_array("exscan", EXSCAN, tensor, None, op, group)


cdef enum:
    MOST_LISTED = 64            # arrays of a list: all pairs are compared


cdef int run_on_list(str name, int collective, object tensor, object arrays, object given_root,
                     object group) except -1:
    """Run a call on this rank's array and, on the root, a list with one array per rank."""
    cdef NdarrayView own, each
    cdef Block block
    cdef Block blocks[MOST_LISTED]
    cdef FastCall b
    cdef const Choice *choice
    cdef bint gathers = collective == GATHER
    cdef int rank, root, listed = 0
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None:
        return False
    root = group_rank_of(chosen, native, 0 if given_root is None else given_root)
    if root < 0 or not view_array(tensor, &own) or own.count == 0 or not (gathers or own.writable):
        return False
    if root == native.comm.rank:
        listed = native.comm.size
        if type(arrays) is not list:
            return False
        arrays = tuple(arrays)      # the user may change the list while the call is under way
        if listed > MOST_LISTED or len(arrays) != listed:
            return False
    elif arrays is not None:
        return False
    for rank in range(listed):
        if not view_array(arrays[rank], &each) or each.count == 0 or each.dtype != own.dtype:
            return False
        if gathers and not (each.writable and disjoint_from_all(&each, blocks, rank)):
            return False
        if rank == root and each.nbytes != own.nbytes:
            return False
        if not (disjoint(&own, &each) or (rank == root and own.ptr == each.ptr)):
            return False
        blocks[rank] = Block(each.ptr, each.nbytes)
    prepare(&b, native)
    choice = try_start(native, collective, 0)
    if choice == NULL:
        return False
    block = Block(own.ptr, own.nbytes)
    b.call.inputs = &block
    b.call.outputs = &block
    if gathers:
        b.call.outputs = blocks if listed > 0 else NULL
    else:
        b.call.inputs = blocks if listed > 0 else NULL
    return run_call(chosen, native, name, choice, &b, own.dtype, 0, OP_NONE, root,
                    own.nbytes * native.comm.size, tensor, arrays)


cpdef int gather(object tensor, object arrays, object dst, object group) except -1:
    """Run cydist.gather."""
    return run_on_list("gather", GATHER, tensor, arrays, dst, group)


cpdef int scatter(object tensor, object arrays, object src, object group) except -1:
    """Run cydist.scatter."""
    return run_on_list("scatter", SCATTER, tensor, arrays, src, group)


cpdef int all_gather_into_tensor(object output, object input, object group) except -1:
    """Run cydist.all_gather_into_tensor."""
    cdef NdarrayView small, large
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None or not view_array(input, &small) or not view_array(output, &large):
        return False
    if small.count == 0 or not is_multiple(&large, &small, native.comm.size) or not large.writable:
        return False
    if not disjoint(&small, &large) and small.ptr != large.ptr + native.comm.rank * small.nbytes:
        return False
    cdef FastCall b
    prepare(&b, native)
    cdef const Choice *choice = try_start(native, ALL_GATHER, large.nbytes)
    if choice == NULL:
        return False
    cdef Block block = Block(small.ptr, small.nbytes)
    cut_blocks(native.blocks, &large, native.comm.size)
    b.call.inputs = &block
    b.call.outputs = native.blocks
    return run_call(chosen, native, "all_gather_into_tensor", choice, &b, small.dtype, large.count,
                    OP_NONE, -1, large.nbytes, output, input)


cpdef int reduce_scatter_tensor(object output, object input, object op, object group) except -1:
    """Run cydist.reduce_scatter_tensor."""
    cdef NdarrayView small, large
    cdef Reduction r
    cdef int code
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None or not view_array(output, &small) or not view_array(input, &large):
        return False
    if small.count == 0 or not is_multiple(&large, &small, native.comm.size) or not small.writable:
        return False
    if not disjoint(&small, &large) or not read_operation(op, small.dtype, native.comm.size, &r,
                                                          &code):
        return False
    cdef FastCall b
    prepare(&b, native)
    cdef const Choice *choice = try_start(native, REDUCE_SCATTER, large.nbytes)
    if choice == NULL:
        return False
    cdef Block block = Block(small.ptr, small.nbytes)
    cut_blocks(native.blocks, &large, native.comm.size)
    b.call.inputs = native.blocks
    b.call.outputs = &block
    b.call.op = &r
    return run_call(chosen, native, "reduce_scatter_tensor", choice, &b, small.dtype, large.count,
                    code, -1, large.nbytes, output, input)


cpdef int all_to_all_single(object output, object input, object group) except -1:
    """Run cydist.all_to_all_single of vectors that all ranks cut evenly."""
    cdef NdarrayView given, due
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None or not view_array(input, &given) or not view_array(output, &due):
        return False
    if (given.count == 0 or given.count != due.count or given.dtype != due.dtype
            or not due.writable or given.ndim != 1 or due.ndim != 1):
        return False
    cdef int size = native.comm.size
    if given.count % size != 0 or not disjoint(&given, &due):
        return False
    cdef FastCall b
    prepare(&b, native)
    cdef const Choice *choice = try_start(native, ALL_TO_ALL, due.nbytes)
    if choice == NULL:
        return False
    cut_blocks(native.blocks, &given, size)
    cut_blocks(native.blocks + size, &due, size)
    b.call.inputs = native.blocks
    b.call.outputs = native.blocks + size
    return run_call(chosen, native, "all_to_all_single", choice, &b, due.dtype, due.count // size,
                    OP_NONE, -1, due.nbytes, output, input)


cpdef int barrier(object group) except -1:
    """Run cydist.barrier."""
    chosen = resolve_group(group)
    cdef Group native = native_of(chosen)
    if native is None:
        return False
    cdef FastCall b
    prepare(&b, native)
    cdef const Choice *choice = try_start(native, BARRIER, 0)
    if choice == NULL:
        return False
    return run_call(chosen, native, "barrier", choice, &b, 0, 0, OP_NONE, -1, 0, None, None)

"""The fast path of a call on GPUs: plain cupy or torch arrays, enqueued on a stream at once.

The general path takes a dozen Python functions (arguments.py, collectives.py, and group.py of
backend "nccl"). This does the same in one: the same checks, the same note for the next rank, the
same event after the call. All unusual cases (a capture, a coalesced call, strides, an operation of
several steps, an error) are left to the general path, before anything has happened.
"""
cimport cython

from cydist._native.abi cimport LARGEST_TAG, now_ns

from cydist._native.kernels import DTYPES

from cydist._native.call_queue cimport CallQueue
from cydist._native.kernels cimport OP_PREMUL_SUM
from cydist._native.ndarray_view cimport NdarrayView, disjoint, view_cupy, view_torch, is_multiple
from cydist._native.group_state cimport GroupState
from cydist._native.fast_collectives cimport small_int, operations_class, enqueuer_of

cdef enum:
    NCCL_UINT8 = 1              # ncclDataType_t: data that are only moved go as bytes

cdef object NOT_FAST = object()     # take the general path: nothing has happened
cdef dict names = {code: name for name, code in DTYPES.items()}
UINT8 = NCCL_UINT8                  # for Python


@cython.final
cdef class Enqueuer:
    """The fast path of one group of backend "nccl".

    Args:
        group: The NcclGroup.
        lock: Of the group, held while a call is enqueued.
        stream: The group's own, for asynchronous calls.
        torch: Finds the library of torch's tensors, if they can be on GPUs here.
        at_once: Finds NCCL's names of an operation and a dtype (backends/nccl/reductions.py).
        call, flight, work: Make the objects that record a call.
    """
    cdef CallQueue call_queue   # of the group
    cdef GroupState state, host_state   # of the group, and of its host group
    cdef object group, gpu, lib, comm, binding, watch, lock, stream
    cdef object torch, at_once, new_call, new_flight, new_work
    cdef object owned           # a type whose arrays belong to the GPU's library
    cdef object order           # an event: orders the group's stream after a caller's
    cdef dict operations        # by operation and dtype, as `at_once` returns them
    cdef int rank, size, index
    cdef public bint paused     # calls take the general path, which collects them

    def __init__(self, object group, object comm, object watch, object lock, object stream,
                 object torch, object at_once, object call, object flight, object work):
        self.group = group
        self.call_queue = group.call_queue
        self.state = group.group_state
        self.host_state = group.host.group_state
        self.gpu = group.gpu
        self.lib = self.gpu.lib
        self.comm = comm
        self.binding = group.binding
        self.watch = watch
        self.lock = lock
        self.stream = stream
        self.torch = torch
        self.at_once = at_once
        self.new_call = call
        self.new_flight = flight
        self.new_work = work
        self.operations = {}
        self.rank = group.rank()
        self.size = group.size()
        self.index = self.gpu.index

    cdef object view_array(self, object tensor, NdarrayView *out):
        """Return the library of a plain array on the group's GPU; None for anything else."""
        cdef int device
        library = self.lib
        if type(tensor) is self.owned or not view_torch(tensor, out, &device):
            if not self.owns(tensor) or not view_cupy(tensor, out, &device):
                return None
        else:
            library = self.torch()
        return library if out.count != 0 and device == self.index else None

    cdef bint owns(self, object tensor) except -1:
        if type(tensor) is not self.owned:
            if not self.lib.arrays_like_cupy or not self.lib.owns(tensor):
                return False
            self.owned = type(tensor)
        return True

    cdef int root(self, object given) except -2:
        """Return the group rank of a global rank, or -1."""
        cdef long found = small_int(given)
        cdef int rank
        cdef tuple ranks = self.group.ranks
        for rank in range(self.size):
            if found >= 0 and small_int(ranks[rank]) == found:
                return rank
        return -1

    cdef tuple operation(self, object op, int dtype):
        """Return NCCL's type, its operation, how many of its elements make up one of the user's,
        and the operation's name; None: use the general path."""
        if type(op) is not operations_class() or <int>op == OP_PREMUL_SUM:
            return None
        key = <int>op << 8 | dtype
        try:
            return self.operations[key]
        except KeyError:
            found = self.operations[key] = self.at_once(op, names[dtype])
            return found

    cdef bint usable(self) noexcept:
        """Return whether no special case needs the general path."""
        return self.state.is_usable() and self.host_state.error is None and not self.paused

    cdef object enqueue_if_plain(self, str name, tuple note, object function, tuple arguments,
                                 object library, object result, object other, bint async_op,
                                 object source=None):
        """Enqueue NCCL's function, with a stream as last argument, under the group's lock.

        Args:
            note: None for a message.
            library: Whose current stream the call follows.
            result, other: The call's arrays; the first is written.
            source: The sender's global rank, of a receive.
        """
        self.lock.acquire()
        try:
            if not self.usable():
                return NOT_FAST
            self.gpu.use()
            current = library.current_stream(self.index)
            if self.gpu.is_captured(current) or (async_op and self.gpu.is_captured(self.stream)):
                return NOT_FAST
            return self.enqueue(name, note, function, arguments, library, result, other, async_op,
                                current, source)
        finally:
            self.lock.release()

    cdef object enqueue(self, str name, tuple note, object function, tuple arguments,
                        object library, object result, object other, bint async_op,
                        object current, object source):
        group, watch = self.group, self.watch
        cdef double deadline = now_ns() * 1e-9 + <double>group.timeout
        call = self.new_call(name, 0, deadline)
        stream = self.stream if async_op else current
        # A blocking call keeps no arrays: only later work on this stream reuses their memory.
        flight = self.new_flight(call, (result, other) if async_op else None, stream)
        try:    # a signal handler may raise in any Python code: no thread must wait for this then
            watch.add(flight)
            if note is not None:
                self.call_queue.number(call)
            if async_op:
                self.order_after(current)
            if note is not None and watch.call_check is not None:
                watch.call_check.note(call.seq, note)
            function(*arguments, stream)
            event = watch.spare_event()
            if event is None:
                event = self.lib.event(self.index)
            self.lib.record(event, self.index, stream)
        except BaseException as error:
            watch.discard(flight)
            group.on_refused(call, error)
            raise
        finally:
            call.over = True
        flight.event = event
        if async_op:
            return self.new_work(group, flight, [result], [current], library, False, source)
        return None

    cdef int order_after(self, object current) except -1:
        """Make the group's stream wait for the work on the current stream."""
        if self.order is None:
            self.order = self.lib.event(self.index)
        self.lib.record(self.order, self.index, current)
        self.lib.wait(self.index, self.stream, self.order)
        return 0

    def exchange(self, size_t given, size_t due, size_t nbytes, object stream):
        """Send block r at `given` to rank r and receive block r at `due` from rank r, together."""
        comm = self.comm
        cdef int rank
        if comm.all_to_all is not None:     # the same sends and receives, which NCCL groups
            comm.all_to_all(given, due, nbytes, NCCL_UINT8, stream)
            return
        self.binding.group_start()
        try:
            for rank in range(self.size):
                comm.send(given + rank * nbytes, nbytes, NCCL_UINT8, rank, stream)
            for rank in range(self.size):
                comm.recv(due + rank * nbytes, nbytes, NCCL_UINT8, rank, stream)
        finally:
            self.binding.group_end()


cdef object all_reduce(object tensor, object op, object group, bint async_op):
    cdef NdarrayView p
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(tensor, &p)
    if library is None:
        return NOT_FAST
    cdef tuple how = self.operation(op, p.dtype)
    if how is None:
        return NOT_FAST
    kind, operation, width, name = how
    address = <size_t>p.ptr
    return self.enqueue_if_plain(
        "all_reduce", ("all_reduce", (p.count, names[p.dtype]), name, None),
        self.comm.all_reduce, (address, address, p.count * <size_t>width, kind, operation),
        library, tensor, None, async_op)


cdef object reduce(object tensor, object dst, object op, object group, bint async_op):
    cdef NdarrayView p
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(tensor, &p)
    if library is None:
        return NOT_FAST
    cdef int root = self.root(dst)
    cdef tuple how = self.operation(op, p.dtype)
    if root < 0 or how is None:
        return NOT_FAST
    kind, operation, width, name = how
    address = <size_t>p.ptr
    return self.enqueue_if_plain(
        "reduce", ("reduce", (p.count, names[p.dtype]), name, root),
        self.comm.reduce, (address, address, p.count * <size_t>width, kind, operation, root),
        library, tensor, None, async_op)


cdef object broadcast(object tensor, object src, object group, bint async_op):
    cdef NdarrayView p
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(tensor, &p)
    if library is None:
        return NOT_FAST
    cdef int root = self.root(src)
    if root < 0:
        return NOT_FAST
    address = <size_t>p.ptr
    return self.enqueue_if_plain(
        "broadcast", ("broadcast", (p.count, names[p.dtype]), "", root),
        self.comm.broadcast, (address, address, p.nbytes, NCCL_UINT8, root), library, tensor, None,
        async_op)


cdef object all_gather_into_tensor(object output, object input, object group, bint async_op):
    cdef NdarrayView small, large
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(input, &small)
    if library is None or self.view_array(output, &large) is not library:
        return NOT_FAST
    if not is_multiple(&large, &small, self.size):
        return NOT_FAST
    if not disjoint(&small, &large) and small.ptr != large.ptr + self.rank * small.nbytes:
        return NOT_FAST
    return self.enqueue_if_plain(
        "all_gather_into_tensor",
        ("all_gather_into_tensor", (self.size, "*", small.count, names[small.dtype]), "", None),
        self.comm.all_gather, (<size_t>small.ptr, <size_t>large.ptr, small.nbytes, NCCL_UINT8),
        library, output, input, async_op)


cdef object reduce_scatter_tensor(object output, object input, object op, object group,
                                  bint async_op):
    cdef NdarrayView small, large
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(output, &small)
    if library is None or self.view_array(input, &large) is not library:
        return NOT_FAST
    cdef tuple how = self.operation(op, small.dtype)
    if how is None or not is_multiple(&large, &small, self.size) or not disjoint(&small, &large):
        return NOT_FAST
    kind, operation, width, name = how
    return self.enqueue_if_plain(
        "reduce_scatter_tensor",
        ("reduce_scatter_tensor", (self.size, "*", small.count, names[small.dtype]), name, None),
        self.comm.reduce_scatter,
        (<size_t>large.ptr, <size_t>small.ptr, small.count * <size_t>width, kind, operation),
        library, output, input, async_op)


cdef object all_to_all_single(object output, object input, object group, bint async_op):
    """Exchange vectors that all ranks cut evenly."""
    cdef NdarrayView given, due
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(input, &given)
    if library is None or self.view_array(output, &due) is not library:
        return NOT_FAST
    if (given.count != due.count or given.dtype != due.dtype or given.ndim != 1 or due.ndim != 1
            or given.count % self.size != 0 or not disjoint(&given, &due)):
        return NOT_FAST
    cdef size_t count = given.count // self.size
    return self.enqueue_if_plain(
        "all_to_all_single",
        ("all_to_all_single",
         (count, "for each,", given.nbytes // given.count, "bytes an element"), "", None),
        self.exchange, (<size_t>given.ptr, <size_t>due.ptr, given.nbytes // self.size),
        library, output, input, async_op)


cdef object send(object tensor, object dst, object group, object tag, bint async_op):
    return send_or_recv("isend" if async_op else "send", True, tensor, dst, group, tag, async_op)


cdef object recv(object tensor, object src, object group, object tag, bint async_op):
    """Return None once it is enqueued, or its Work."""
    return send_or_recv("irecv" if async_op else "recv", False, tensor, src, group, tag, async_op)


cdef object send_or_recv(str name, bint sends, object tensor, object given, object group,
                         object tag, bint async_op):
    """Enqueue one message, by itself: NCCL has no tags."""
    cdef NdarrayView p
    cdef Enqueuer self = enqueuer_of(group)
    library = None if self is None else self.view_array(tensor, &p)
    if library is None:
        return NOT_FAST
    cdef int peer = self.root(given)
    cdef long label = small_int(tag)
    if peer < 0 or peer == self.rank or not 0 <= label <= LARGEST_TAG:
        return NOT_FAST
    return self.enqueue_if_plain(
        name, None, self.comm.send if sends else self.comm.recv,
        (<size_t>p.ptr, p.nbytes, NCCL_UINT8, peer), library, tensor, None, async_op,
        None if sends else self.group.ranks[peer])

"""The public functions that try a fast path (fast_collectives.pyx, fast_nccl.pyx) before the
general path.

They are compiled, because a Python function between a caller and the fast path would cost as much
as the rest of the call. The general path defines what they do: see `fast_path`.
"""
from functools import update_wrapper

from cydist.errors import shorten

from cydist._native.fast_collectives cimport (
    DONE, FAILED, kept_failure,
    all_gather_into_tensor as fast_all_gather, all_reduce as fast_all_reduce,
    all_to_all_single as fast_all_to_all, barrier as fast_barrier,
    broadcast as fast_broadcast, exscan as fast_exscan, gather as fast_gather,
    reduce as fast_reduce, reduce_scatter_tensor as fast_reduce_scatter, scan as fast_scan,
    scatter as fast_scatter,
)
from cydist._native.fast_p2p cimport recv as fast_recv, send as fast_send
from cydist._native.fast_nccl cimport (
    NOT_FAST, all_gather_into_tensor as stream_all_gather, all_reduce as stream_all_reduce,
    all_to_all_single as stream_all_to_all, broadcast as stream_broadcast,
    recv as stream_recv, reduce as stream_reduce, reduce_scatter_tensor as stream_reduce_scatter,
    send as stream_send,
)

cdef dict general_paths = {}        # by name
cdef dict by_name = {}
cdef object USUAL = object()    # the `op` of a call that names none
cdef object usual_operation = None


def use_operation(object op) -> None:
    """Set the reduction of calls that name none."""
    global usual_operation
    usual_operation = op


def fast_path(object function not None):
    """Decorate a public function: calls try the fast path first, with the same arguments.

    The result has the function's signature and docstring.
    """
    name = function.__name__
    general_paths[name] = GeneralPath(function)
    return update_wrapper(by_name[name], function)


cdef class GeneralPath:
    """A function of the general path, whose errors show no frames below this one."""

    cdef object function

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments, **named):
        try:
            return self.function(*arguments, **named)
        except Exception as error:
            shorten(error, 0)
            # A mere raise would add the former traceback again.
            raise error


cdef inline bint succeeded(int status) except -1:
    """Return whether the fast path has run the call; raise the exception of a call that failed."""
    if status == DONE:
        return True
    if status == FAILED:
        raise kept_failure()
    return False


def all_reduce(tensor, op=USUAL, group=None, async_op=False, *, timeout=None):
    chosen = usual_operation if op is USUAL else op
    if timeout is None:
        if not async_op and succeeded(fast_all_reduce(tensor, chosen, group)):
            return None
        if (done := stream_all_reduce(tensor, chosen, group, async_op)) is not NOT_FAST:
            return done
    return general_paths["all_reduce"](tensor, chosen, group, async_op, timeout=timeout)


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None, *, timeout=None):
    if timeout is None and group_src is None:
        if not async_op and succeeded(fast_broadcast(tensor, src, group)):
            return None
        if (done := stream_broadcast(tensor, src, group, async_op)) is not NOT_FAST:
            return done
    return general_paths["broadcast"](tensor, src, group, async_op, group_src, timeout=timeout)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False, *,
                           timeout=None):
    if timeout is None:
        if not async_op and succeeded(fast_all_gather(output_tensor, input_tensor, group)):
            return None
        done = stream_all_gather(output_tensor, input_tensor, group, async_op)
        if done is not NOT_FAST:
            return done
    return general_paths["all_gather_into_tensor"](
        output_tensor, input_tensor, group, async_op, timeout=timeout)


def reduce_scatter_tensor(output, input, op=USUAL, group=None, async_op=False, *, timeout=None):
    chosen = usual_operation if op is USUAL else op
    if timeout is None:
        if not async_op and succeeded(fast_reduce_scatter(output, input, chosen, group)):
            return None
        if (done := stream_reduce_scatter(output, input, chosen, group, async_op)) is not NOT_FAST:
            return done
    return general_paths["reduce_scatter_tensor"](
        output, input, chosen, group, async_op, timeout=timeout)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                      async_op=False, *, timeout=None):
    if timeout is None and output_split_sizes is None and input_split_sizes is None:
        if not async_op and succeeded(fast_all_to_all(output, input, group)):
            return None
        if (done := stream_all_to_all(output, input, group, async_op)) is not NOT_FAST:
            return done
    return general_paths["all_to_all_single"](
        output, input, output_split_sizes, input_split_sizes, group, async_op, timeout=timeout)


def reduce(tensor, dst=None, op=USUAL, group=None, async_op=False, group_dst=None, *,
           timeout=None):
    chosen = usual_operation if op is USUAL else op
    if timeout is None and group_dst is None:
        if not async_op and succeeded(fast_reduce(tensor, dst, chosen, group)):
            return None
        if (done := stream_reduce(tensor, dst, chosen, group, async_op)) is not NOT_FAST:
            return done
    return general_paths["reduce"](tensor, dst, chosen, group, async_op, group_dst, timeout=timeout)


def scan(tensor, op=USUAL, group=None, async_op=False, *, timeout=None):
    chosen = usual_operation if op is USUAL else op
    if not async_op and timeout is None and succeeded(
            fast_scan(tensor, chosen, group)):
        return None
    return general_paths["scan"](tensor, chosen, group, async_op, timeout=timeout)


def exscan(tensor, op=USUAL, group=None, async_op=False, *, timeout=None):
    chosen = usual_operation if op is USUAL else op
    if not async_op and timeout is None and succeeded(
            fast_exscan(tensor, chosen, group)):
        return None
    return general_paths["exscan"](tensor, chosen, group, async_op, timeout=timeout)


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None, *,
           timeout=None):
    if (not async_op and timeout is None and group_dst is None
            and succeeded(fast_gather(tensor, gather_list, dst, group))):
        return None
    return general_paths["gather"](
        tensor, gather_list, dst, group, async_op, group_dst, timeout=timeout)


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None, *,
            timeout=None):
    if (not async_op and timeout is None and group_src is None
            and succeeded(fast_scatter(tensor, scatter_list, src, group))):
        return None
    return general_paths["scatter"](
        tensor, scatter_list, src, group, async_op, group_src, timeout=timeout)


def barrier(group=None, async_op=False, device_ids=None, timeout=None):
    if not async_op and timeout is None and succeeded(fast_barrier(group)):
        return None
    return general_paths["barrier"](group, async_op, device_ids, timeout)


def send(tensor, dst=None, group=None, tag=0, group_dst=None, *, timeout=None):
    if timeout is None and group_dst is None:
        if succeeded(fast_send(tensor, dst, group, tag)):
            return None
        if stream_send(tensor, dst, group, tag, False) is not NOT_FAST:
            return None
    return general_paths["send"](tensor, dst, group, tag, group_dst, timeout=timeout)


def recv(tensor, src=None, group=None, tag=0, group_src=None, *, timeout=None):
    if timeout is None and group_src is None:
        if succeeded(fast_recv(tensor, src, group, tag)):
            return src
        if stream_recv(tensor, src, group, tag, False) is not NOT_FAST:
            return src
    return general_paths["recv"](tensor, src, group, tag, group_src, timeout=timeout)


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    if group_dst is None and (done := stream_send(tensor, dst, group, tag, True)) is not NOT_FAST:
        return done
    return general_paths["isend"](tensor, dst, group, tag, group_dst)


def irecv(tensor, src=None, group=None, tag=0, group_src=None):
    if group_src is None and (done := stream_recv(tensor, src, group, tag, True)) is not NOT_FAST:
        return done
    return general_paths["irecv"](tensor, src, group, tag, group_src)


for public in (all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor,
               all_to_all_single, reduce, scan, exscan, gather, scatter, barrier, send, recv, isend,
               irecv):
    by_name[public.__name__] = public

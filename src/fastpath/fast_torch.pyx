"""Read torch's allreduce options directly from their memory.

torch.distributed passes a C++ object to its most frequent call. Reading that object's three
fields from Python takes longer than the call. So their offsets are found once, by setting each
field and looking for what changes. If the result is ambiguous (another layout, another binding)
nothing is ever read, and the caller asks the object.
"""
from datetime import timedelta

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from cydist._native.fast_collectives cimport (
    DONE, FAILED, all_reduce as fast_all_reduce, kept_failure,
)

cdef extern from "<malloc.h>" nogil:
    size_t malloc_usable_size(void *)

ctypedef struct BoundObject:    # pybind11's layout of an object of one C++ class
    PyObject head
    unsigned char *value


cdef object options_class = None    # the class whose field offsets follow
cdef size_t op_at, timeout_at, async_at
cdef list operations = [None] * 256     # cydist's operation, by the byte of torch's


cdef inline unsigned char *object_bytes(object options) noexcept:
    return (<BoundObject *><void *>options).value


cdef bytes snapshot(object options):
    cdef unsigned char *value = object_bytes(options)
    return PyBytes_FromStringAndSize(<char *>value, malloc_usable_size(value))


cdef list changed_offsets(bytes before, bytes after):
    return [i for i in range(len(before)) if before[i] != after[i]]


def learn_layout(object kind, dict reductions) -> bool:
    """Find the offsets of AllreduceOptions' fields; False if they cannot be found.

    Args:
        kind: The class.
        reductions: cydist's reduction for each of torch's.
    """
    try:
        return find_offsets(kind, reductions)
    except (AttributeError, TypeError, ValueError):     # another implementation of the class
        return False


cdef bint find_offsets(object kind, dict reductions) except -1:
    global options_class, op_at, timeout_at, async_at
    fields = ("asyncOp", "timeout", "reduceOp")
    if type(kind).__name__ != "pybind11_type" or not all(hasattr(kind, f) for f in fields):
        return False
    options = kind()
    options.asyncOp, options.timeout = True, timedelta(milliseconds=-1)     # that is, unset
    first = snapshot(options)
    options.asyncOp = False
    blocking = snapshot(options)
    options.timeout = timedelta(0)
    limited = snapshot(options)
    flag, limit = changed_offsets(first, blocking), changed_offsets(blocking, limited)
    if len(flag) != 1 or blocking[flag[0]] != 0:
        return False
    if len(limit) != 8 or limit[0] % 8 != 0 or limit[7] != limit[0] + 7:
        return False
    if blocking[limit[0]:limit[7] + 1] != b"\xff" * 8:
        return False
    looks = {}
    for theirs in reductions:
        options.reduceOp = theirs
        looks[theirs] = snapshot(options)
    places = {i for look in looks.values() for i in changed_offsets(limited, look)}
    if len(places) != 1 or len(set(looks.values())) != len(looks):
        return False
    op_at, timeout_at, async_at = places.pop(), limit[0], flag[0]
    for theirs, ours in reductions.items():
        operations[looks[theirs][op_at]] = ours
    options_class = kind
    return True


def all_reduce(object tensors, object options, object group) -> bool:
    """Run torch's allreduce of one tensor on the fast path, if it blocks and has no timeout of its
    own. False: nothing has happened."""
    if type(options) is not options_class or type(tensors) is not list or len(<list>tensors) != 1:
        return False
    cdef unsigned char *value = object_bytes(options)
    if value == NULL or value[async_at] != 0 or (<int64_t *>(value + timeout_at))[0] != -1:
        return False
    cdef int status = fast_all_reduce(
        (<list>tensors)[0], (<list>operations)[value[op_at]], group)
    if status == FAILED:
        raise kept_failure()
    return status == DONE

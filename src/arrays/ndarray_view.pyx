"""The fast view of plain arrays, which most calls pass, in a few nanoseconds.

numpy's arrays are read through the head of their structure. It has been the same since numpy 1.7
and is part of numpy's ABI. When the first array comes, an array of known contents verifies it.
torch's tensors are read through DLPack's C interface, cupy's arrays through their attributes.
All other objects are left to `asarray`.
"""
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyTypeObject
from libc.stdint cimport int64_t
from libc.string cimport strcmp

from cydist._native.dlpack cimport DL_COMPLEX, DL_CPU, DL_CUDA, DLPackExchangeAPI, DLTensor
from cydist._native.asarray cimport code_of_dlpack, code_of_kind, torch_exchange
from cydist._native.kernels cimport DT_OTHER

cdef extern from *:
    """
    typedef struct {
        PyObject_HEAD
        PyTypeObject *type;
        char kind, letter, byteorder, flags;
        int number;
    } cydist_numpy_dtype;

    typedef struct {
        PyObject_HEAD
        char *data;
        int ndim;
        Py_ssize_t *shape, *strides;
        PyObject *base;
        cydist_numpy_dtype *dtype;
        int flags;
    } cydist_numpy_array;
    """
    ctypedef struct NumpyDtype "cydist_numpy_dtype":
        char byteorder
        int number
    ctypedef struct NumpyArray "cydist_numpy_array":
        char *data
        int ndim
        Py_ssize_t *shape
        NumpyDtype *dtype
        int flags

cdef extern from "Python.h":
    PyTypeObject *type_of "Py_TYPE"(object)

cdef enum:
    NUMPY_CONTIGUOUS = 0x1      # NPY_ARRAY_C_CONTIGUOUS, _ALIGNED and _WRITEABLE
    NUMPY_ALIGNED = 0x100
    NUMPY_WRITEABLE = 0x400
    NUMPY_DTYPES = 24           # the numbers of numpy's own dtypes

# By numpy's number of the dtype.
cdef int dtypes[NUMPY_DTYPES]
cdef size_t itemsizes[NUMPY_DTYPES]
cdef PyTypeObject *numpy_array = NULL       # numpy.ndarray, if its structure is as declared
cdef object numpy_dtype = None              # numpy.dtype
cdef bint asked_numpy = False


cdef int learn_numpy() except -1:
    """Fill in the tables, unless the structure is not as declared. numpy is loaded already."""
    global numpy_array, numpy_dtype, asked_numpy
    import numpy

    asked_numpy = True
    numpy_dtype = numpy.dtype
    cdef object probe = numpy.zeros((3, 5), numpy.float32)
    cdef NumpyArray *head = <NumpyArray *>probe
    for number in range(NUMPY_DTYPES):
        dtypes[number] = DT_OTHER
    for letter in "?bBhHiIlLqQefdFD":
        dtype = numpy.dtype(letter)
        if 0 <= dtype.num < NUMPY_DTYPES:
            dtypes[dtype.num] = code_of_kind(<char>ord(dtype.kind), dtype.itemsize)
            itemsizes[dtype.num] = dtype.itemsize
    cdef int flags = NUMPY_CONTIGUOUS | NUMPY_ALIGNED | NUMPY_WRITEABLE
    cdef size_t address = probe.__array_interface__["data"][0]
    if (<size_t>head.data == address and head.ndim == 2 and head.shape[0] == 3
            and head.shape[1] == 5 and head.dtype.number == probe.dtype.num
            and head.flags & flags == flags and head.dtype.byteorder == c"="):
        numpy_array = <PyTypeObject *>numpy.ndarray
    return 0


cdef bint view_array(object obj, NdarrayView *out) except -1:
    cdef PyTypeObject *kind = type_of(obj)
    cdef DLTensor t
    if kind == numpy_array:
        return view_numpy(<NumpyArray *>obj, out)
    if not asked_numpy and strcmp(kind.tp_name, b"numpy.ndarray") == 0:
        learn_numpy()
        return view_array(obj, out)
    return show_torch(obj, &t) and t.device.device_type == DL_CPU and read_torch(obj, &t, out)


cdef inline bint view_numpy(const NumpyArray *array, NdarrayView *out) noexcept:
    cdef int number = array.dtype.number, i
    cdef size_t count = 1
    if not 0 <= number < NUMPY_DTYPES or dtypes[number] == DT_OTHER:
        return False
    if array.dtype.byteorder not in b"=|" or not array.flags & NUMPY_CONTIGUOUS:
        return False
    for i in range(array.ndim):
        count *= <size_t>array.shape[i]
    out.ptr = array.data
    out.count = count
    out.nbytes = count * itemsizes[number]
    out.dtype = dtypes[number]
    out.ndim = array.ndim
    out.writable = array.flags & NUMPY_WRITEABLE != 0
    return array.flags & NUMPY_ALIGNED != 0


cdef bint view_cupy(object obj, NdarrayView *out, int *device) except -1:
    if not asked_numpy:
        learn_numpy()
    try:
        if not obj.flags.c_contiguous:
            return False
        dtype, memory = obj.dtype, obj.data
        out.count = obj.size
        out.ndim = obj.ndim
        out.ptr = <char *><size_t>memory.ptr
        device[0] = memory.device_id
    except AttributeError:
        return False
    if numpy_array == NULL or not isinstance(dtype, numpy_dtype):
        return False
    cdef NumpyDtype *head = <NumpyDtype *>dtype
    if not 0 <= head.number < NUMPY_DTYPES or dtypes[head.number] == DT_OTHER:
        return False
    out.dtype = dtypes[head.number]
    out.nbytes = out.count * itemsizes[head.number]
    out.writable = True
    return head.byteorder in b"=|"


cdef bint view_torch(object obj, NdarrayView *out, int *device) except -1:
    cdef DLTensor t
    if not show_torch(obj, &t) or t.device.device_type != DL_CUDA:
        return False
    device[0] = t.device.device_id
    return read_torch(obj, &t, out)


cdef inline bint show_torch(object obj, DLTensor *t) except -1:
    """Fill in a tensor's memory through torch's interface; False for other objects."""
    cdef DLPackExchangeAPI *torch = torch_exchange(obj)
    if torch == NULL:
        return False
    if torch.tensor_from_object(<void *>obj, t) != 0:
        PyErr_Clear()
        return False
    return True


cdef inline bint read_torch(object tensor, const DLTensor *t, NdarrayView *out) except -1:
    cdef int64_t expected = 1
    cdef int i
    out.dtype = code_of_dlpack(t.dtype)
    # A lazily conjugated or negated view shows other values than its memory holds.
    if out.dtype == DT_OTHER or t.dtype.code == DL_COMPLEX or tensor.is_neg():
        return False
    if t.dtype.lanes != 1 or t.data == NULL:
        return False
    for i in range(t.ndim - 1, -1, -1):
        if t.strides != NULL and t.shape[i] != 1 and t.strides[i] != expected:
            return False
        expected *= t.shape[i]
    out.ptr = <char *>t.data + t.byte_offset
    out.count = <size_t>expected
    out.nbytes = out.count * (t.dtype.bits // 8)
    out.ndim = t.ndim
    out.writable = True
    return True

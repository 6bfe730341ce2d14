"""Find the memory of users' objects: numpy, torch, cupy, ml_dtypes, buffers, DLPack.

The order is: the buffer protocol (numpy and the standard library) of objects without CUDA memory,
torch's tensors, cupy's arrays, `__cuda_array_interface__` (numba), `__array_interface__`
(dtypes without a buffer format: ml_dtypes, datetime64), `__dlpack__` (all others). Nothing
is ever copied, and no library is imported: an object's own library is loaded already.
"""
import sys
from re import fullmatch, sub

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport (
    PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName,
)
from libc.stdint cimport INT64_MAX, int64_t, uintptr_t

from cydist._native.array cimport (
    Array, lay_out, name_dtype, set_contiguous_strides, set_dtype, derive_sizes,
)
from cydist._native.dlpack cimport (
    DL_BFLOAT, DL_BOOL, DL_COMPLEX, DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DL_FLOAT,
    DL_FLOAT8_E4M3FN, DL_FLOAT8_E5M2, DL_INT, DL_READ_ONLY, DL_UINT, DLDataType,
    DLManagedTensor, DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor,
)
from cydist._native.kernels cimport (
    DT_BF16, DT_BOOL, DT_C64, DT_C128, DT_F8E4M3FN, DT_F8E5M2, DT_F16, DT_F32, DT_F64, DT_I8,
    DT_I16, DT_I32, DT_I64, DT_OTHER, DT_U8, DT_U16, DT_U32, DT_U64,
)

cdef enum:
    MOST_DIMENSIONS = 64        # supported by the buffer protocol and numpy

cdef bint LITTLE = sys.byteorder == "little"

cdef str OBJECTS = (
    "an array of Python objects cannot be sent as memory: use broadcast_object_list, "
    "all_gather_object, send_object_list or another of the object calls"
)

cdef str CUDA = "__cuda_array_interface__"
cdef str MASKED = "a masked array is more than its memory: send its data and its mask apart"


cpdef Array asarray(object obj):
    """Return the memory of `obj` as an Array, without a copy.

    The memory stays alive as long as the Array does. A device array is taken as it is: its reader
    must order itself after the streams that write it.

    Args:
        obj: An Array, numpy array (ml_dtypes' dtypes included), torch tensor, cupy array,
            bytearray, memoryview, array.array, ctypes array, or anything with
            `__cuda_array_interface__`, `__array_interface__` or `__dlpack__`.

    Returns:
        An Array.

    Raises:
        TypeError: Anything else, arrays of objects, and memory without a plain layout (sparse,
            quantized, meta, sub-byte).
        ValueError: torch's lazily conjugated or negated views.

    Examples:
        >>> dist.asarray(bytearray(4)).size
        4
    """
    if isinstance(obj, Array):
        return <Array>obj
    if PyObject_CheckBuffer(obj) and not shows_cuda(obj):
        return from_buffer(obj)
    if is_torch(obj):
        return from_torch(obj)
    if is_cupy(obj):
        return from_cupy(obj)
    if (interface := getattr(obj, CUDA, None)) is not None:
        return from_interface(obj, interface, "cuda", cuda_index(obj))
    if (interface := getattr(obj, "__array_interface__", None)) is not None:
        return from_interface(obj, interface, "cpu", 0)
    if hasattr(obj, "__dlpack__"):
        return from_dlpack(obj)
    if hasattr(obj, "__array__") and not isinstance(obj, type) and not is_lazy(obj):
        return from_array_method(obj)
    raise TypeError(
        "expected an array (numpy, torch, cupy, or anything with the buffer protocol or DLPack), "
        f"not {type(obj).__qualname__}; {how_to_array(obj)}"
    )


cdef str how_to_array(object obj):
    """Return what a user of this object, which is no array, is to write."""
    for method in ("to_numpy", "compute", "toarray"):
        if callable(getattr(obj, method, None)) and (method != "compute" or is_lazy(obj)):
            return f"pass its .{method}()"
    return "pass numpy.asarray of it" if hasattr(obj, "__array__") else \
        "put the values into an array first"


cdef bint is_lazy(object obj) except -1:
    """Return whether numpy would compute this object, as dask's, for a call that shows nothing."""
    graph = getattr(obj, "__dask_graph__", None)
    return callable(graph) and graph() is not None


cdef Array from_array_method(object obj):
    """Take the memory that numpy sees in an object such as pandas' and xarray's, for reading: a
    write into numpy's view might not reach the object."""
    cdef Array self
    import numpy as np
    try:
        found = np.array(obj, copy=False)
    except Exception as error:      # numpy 2 refuses to copy; before it, a copy serves as well
        raise TypeError(
            f"{type(obj).__qualname__} shows numpy no memory of its own, only a copy; "
            f"{how_to_array(obj)}"
        ) from error
    self = from_buffer(found)       # it keeps numpy's view alive
    self.owner = obj
    self.writable = False
    return self


# The buffer protocol

# The last type without CUDA memory that is no masked array: a buffer has no mask.
cdef type plain_type = None


cdef bint shows_cuda(object obj):
    """Return whether this array, which has a buffer, is on a GPU. cupy's buffers raise, or show
    managed memory as the CPU's. Memory that the CPU sees as well (numba's mapped arrays, with
    numpy's class) is not, nor that of arrays whose class alone has the property (jax's on the CPU,
    whose property raises)."""
    if type(obj) is plain_type or not hasattr(type(obj), CUDA) \
            or hasattr(type(obj), "__array_interface__"):
        return False
    try:
        return is_cupy(obj) or getattr(obj, CUDA) is not None
    except Exception:
        return False


cdef Array from_buffer(object obj):
    global plain_type
    cdef Array self = Array.__new__(Array)
    cdef int i
    if type(obj) is not plain_type:
        if hasattr(obj, "mask") and hasattr(obj, "filled"):
            raise TypeError(MASKED)
        if not hasattr(type(obj), CUDA):    # another object of this type may be on a GPU
            plain_type = type(obj)
    try:
        PyObject_GetBuffer(obj, &self.buffer, PyBUF_FULL_RO)
    except (ValueError, BufferError):
        # numpy has no buffer format for ml_dtypes' dtypes, nor for datetime64, and jax none for
        # bfloat16.
        if (interface := getattr(obj, "__array_interface__", None)) is not None:
            return from_interface(obj, interface, "cpu", 0)
        if hasattr(obj, "__dlpack__"):
            return from_dlpack(obj)
        raise
    if self.buffer.suboffsets != NULL:
        for i in range(self.buffer.ndim):
            if self.buffer.suboffsets[i] >= 0:
                raise TypeError("a buffer of pointers to rows has no plain layout: copy it first")
    lay_out(self, self.buffer.ndim)
    for i in range(self.ndim):
        self.shape_[i] = self.buffer.shape[i]
    set_format(self, obj)
    if self.buffer.strides == NULL:     # ctypes leaves them out
        set_contiguous_strides(self)
    else:
        for i in range(self.ndim):
            self.strides_[i] = self.buffer.strides[i]
    self.ptr = <char *>self.buffer.buf
    self.writable = not self.buffer.readonly
    return finish_array(self, obj)


cdef int set_format(Array self, object obj) except -1:
    """Set the dtype from the buffer's format."""
    cdef const char *text = self.buffer.format
    cdef size_t itemsize = <size_t>self.buffer.itemsize
    cdef int code
    cdef bint native = True
    if text == NULL:
        return set_dtype(self, DT_U8, itemsize)
    if text[0] in b"@=<>!":
        native = itemsize == 1 or text[0] in b"@=" or (text[0] == c"<") == LITTLE
        text += 1
    code = DT_OTHER
    if native:
        if text[0] != 0 and text[1] == 0:
            code = code_of_format(text[0], itemsize)
        elif text[0] == c"Z" and text[1] != 0 and text[2] == 0:
            code = code_of_kind(c"c", itemsize) if text[1] in b"fd" else DT_OTHER
    if code != DT_OTHER:
        return set_dtype(self, code, itemsize)
    dtype = getattr(obj, "dtype", None)
    if dtype is not None and hasattr(dtype, "hasobject"):
        return set_numpy(self, dtype, itemsize)
    name = self.buffer.format.decode()
    # The names of a structure's fields stand between colons.
    if "O" in sub(":[^:]*:", "", name):
        raise TypeError(OBJECTS)
    return name_dtype(self, name, itemsize)


cdef int code_of_format(char letter, size_t itemsize) noexcept:
    cdef char kind = (
        c"f" if letter in b"fde" else c"i" if letter in b"bhilqn" else
        c"u" if letter in b"BHILQNc" else c"c" if letter in b"FD" else c"b" if letter == c"?" else 0
    )
    return code_of_kind(kind, itemsize)


cdef int code_of_kind(char kind, size_t itemsize) noexcept:
    """Return the dtype for numpy's kind letter and a size; DT_OTHER for any other."""
    if kind == c"f":
        return DT_F32 if itemsize == 4 else DT_F64 if itemsize == 8 else \
            DT_F16 if itemsize == 2 else DT_OTHER
    if kind == c"i":
        return DT_I64 if itemsize == 8 else DT_I32 if itemsize == 4 else \
            DT_I16 if itemsize == 2 else DT_I8 if itemsize == 1 else DT_OTHER
    if kind == c"u":
        return DT_U8 if itemsize == 1 else DT_U64 if itemsize == 8 else \
            DT_U32 if itemsize == 4 else DT_U16 if itemsize == 2 else DT_OTHER
    if kind == c"c":
        return DT_C64 if itemsize == 8 else DT_C128 if itemsize == 16 else DT_OTHER
    return DT_BOOL if kind == c"b" and itemsize == 1 else DT_OTHER


cdef Array finish_array(Array self, object obj):
    """Finish an Array, as every exporter does: check it, and keep `obj` alive."""
    self.owner = obj
    if self.device is None:
        self.device = "cpu"
    derive_sizes(self)
    if self.ptr == NULL and self.size != 0:
        raise TypeError(
            f"{type(obj).__qualname__} shows no memory: it is lazy, fake or a wrapper of others"
        )
    return self


# numpy's interfaces, on the CPU and on CUDA devices

cdef Array from_interface(object obj, dict interface, str device, int device_index):
    cdef Array self = Array.__new__(Array)
    cdef int i
    if interface.get("mask") is not None:
        raise TypeError(MASKED)
    data = interface.get("data")
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(f"{type(obj).__qualname__} shows no address of its memory")
    cdef tuple shape = tuple(interface.get("shape")), strides = shape
    if interface.get("strides") is not None:
        strides = tuple(interface["strides"])
    if len(strides) != len(shape):
        raise ValueError(f"strides {strides} do not fit shape {shape}")
    lay_out(self, len(shape))
    try:
        for i in range(self.ndim):
            self.shape_[i] = shape[i]
        set_typestr(self, obj, interface)
        if interface.get("strides") is None:
            set_contiguous_strides(self)
        else:
            for i in range(self.ndim):
                self.strides_[i] = strides[i]
        self.ptr = <char *><uintptr_t>(data[0] or 0)
    except OverflowError:
        raise ValueError(
            f"{type(obj).__qualname__} describes no memory that there is: {interface!r:.200}"
        ) from None
    self.writable = not data[1]
    self.device = device
    self.device_index = device_index
    # An exporter may have made the memory for this one interface.
    self.keep = interface
    return finish_array(self, obj)


cdef int set_typestr(Array self, object obj, dict interface) except -1:
    """Set the dtype from a typestr such as "<f4", or from numpy's dtype where there is one."""
    typestr = interface.get("typestr")
    dtype = getattr(obj, "dtype", None)
    if hasattr(dtype, "hasobject"):
        return set_numpy(self, dtype, dtype.itemsize)
    if not isinstance(typestr, str) or not fullmatch("[<>|=][A-Za-z][0-9]+", typestr):
        raise TypeError(f"{type(obj).__qualname__} has no dtype: typestr {typestr!r:.80}")
    if typestr[1] == "O":
        raise TypeError(OBJECTS)
    cdef size_t itemsize = int(typestr[2:])
    cdef int code = DT_OTHER
    if itemsize == 1 or typestr[0] == ("<" if LITTLE else ">"):
        code = code_of_kind(<char>ord(typestr[1]), itemsize)
    if code != DT_OTHER:
        return set_dtype(self, code, itemsize)
    return name_dtype(self, typestr, itemsize)


cdef int set_numpy(Array self, object dtype, size_t itemsize) except -1:
    """Set the dtype from numpy's, whose own `name` costs as much time as all the rest."""
    if dtype.hasobject:
        raise TypeError(OBJECTS)
    if dtype.isbuiltin == 2:        # of another package: all are typestr "<V2" or similar
        return name_dtype(self, dtype.type.__name__, itemsize)
    if dtype.names is not None:
        return name_dtype(self, str(dtype), itemsize)
    cdef int code = code_of_kind(<char>ord(dtype.kind), itemsize) if dtype.isnative else DT_OTHER
    return name_dtype(self, dtype.str, itemsize) if code == DT_OTHER else \
        set_dtype(self, code, itemsize)


cdef int cuda_index(object obj) except -1:
    """Return the number of a CUDA array's device, which the interface does not tell."""
    return obj.__dlpack_device__()[1] if hasattr(obj, "__dlpack_device__") else 0


# cupy, from attributes: its interfaces ask CUDA, and take several times as long.

cdef object cupy_type = None            # cupy.ndarray, once cupy has been imported


cdef bint is_cupy(object obj) except -1:
    global cupy_type
    if cupy_type is None:
        cupy_type = getattr(sys.modules.get("cupy"), "ndarray", None)
    return cupy_type is not None and isinstance(obj, cupy_type)


cdef Array from_cupy(object obj):
    memory = obj.data
    interface = {"shape": obj.shape, "strides": obj.strides, "data": (memory.ptr, False)}
    return from_interface(obj, interface, "cuda", memory.device_id)


# torch, through DLPack's C interface where torch has it (2.10 and later).

cdef object tensor_type = None          # torch.Tensor, once torch has been imported
cdef object parameter_type = None       # torch.nn.Parameter, once one was seen
cdef DLPackExchangeAPI *torch_api = NULL


cdef bint is_torch(object obj) except -1:
    global tensor_type, torch_api
    if tensor_type is None:
        found = getattr(sys.modules.get("torch"), "Tensor", None)
        if found is None:
            return False
        capsule = getattr(found, "__dlpack_c_exchange_api__", None)
        if PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
            torch_api = <DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
            if torch_api.version.major != 1:
                torch_api = NULL
        tensor_type = found
    return PyObject_TypeCheck(obj, <PyTypeObject *>tensor_type)


cdef DLPackExchangeAPI *torch_exchange(object obj) except? NULL:
    global parameter_type
    if not is_torch(obj) or torch_api == NULL or torch_api.tensor_from_object == NULL:
        return NULL
    if type(obj) is not tensor_type and type(obj) is not parameter_type:
        if parameter_type is not None or type(obj).__name__ != "Parameter":
            return NULL
        parameter_type = sys.modules["torch"].nn.Parameter
        return torch_exchange(obj)
    return torch_api


cdef Array from_torch(object obj):
    cdef Array self = Array.__new__(Array)
    cdef DLTensor tensor
    if torch_api != NULL and torch_api.tensor_from_object != NULL:
        if torch_api.tensor_from_object(<void *>obj, &tensor) != 0:
            PyErr_Clear()               # from_torch_attributes reports the cause more briefly
        elif set_tensor(self, &tensor):
            self.writable = True
            refuse_lazy(obj, tensor.dtype.code == DL_COMPLEX)
            return finish_array(self, obj)
    return from_torch_attributes(obj)


cdef int refuse_lazy(object obj, bint is_complex) except -1:
    """Refuse a lazy view: its memory does not hold the values that the tensor shows."""
    if is_complex and obj.is_conj():
        raise ValueError("a lazily conjugated tensor: pass tensor.resolve_conj()")
    if obj.is_neg():
        raise ValueError("a lazily negated tensor: pass tensor.resolve_neg()")
    return 0


cdef Array from_torch_attributes(object obj):
    """Read a tensor's attributes if DLPack cannot describe it, and find the error."""
    cdef Array self = Array.__new__(Array)
    cdef int i
    cdef str layout = str(obj.layout), device = obj.device.type
    if layout != "torch.strided" or obj.is_nested:
        raise TypeError(
            f"a {'nested' if obj.is_nested else layout} tensor has no plain layout: "
            "send its parts, or tensor.to_dense()"
        )
    if obj.is_quantized:
        raise TypeError("a quantized tensor is more than its memory: send tensor.int_repr()")
    if device not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on device {device!r}; only cpu and cuda have memory to send")
    refuse_lazy(obj, True)
    lay_out(self, obj.dim())
    name_dtype(self, str(obj.dtype).removeprefix("torch."), obj.element_size())
    shape = obj.shape
    strides = obj.stride()
    for i in range(self.ndim):
        self.shape_[i] = shape[i]
        self.strides_[i] = strides[i] * <int64_t>self.itemsize
    try:
        self.ptr = <char *><uintptr_t>obj.data_ptr()
    except RuntimeError:                # inside torch.func's transforms
        self.ptr = NULL
    self.writable = True
    self.device = device
    self.device_index = obj.device.index or 0
    return finish_array(self, obj)


# DLPack

@cython.final
cdef class Managed:
    """A DLPack tensor that this object owns."""
    cdef DLManagedTensorVersioned *versioned
    cdef DLManagedTensor *plain

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.plain != NULL and self.plain.deleter != NULL:
            self.plain.deleter(self.plain)


cdef Array from_dlpack(object obj):
    cdef Array self = Array.__new__(Array)
    cdef Managed managed = Managed.__new__(Managed)
    cdef DLTensor *tensor
    capsule = capsule_of(obj)
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        managed.versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(
            capsule, b"dltensor_versioned")
        PyCapsule_SetName(capsule, b"used_dltensor_versioned")
        if managed.versioned.version.major != 1:
            raise TypeError(f"DLPack {managed.versioned.version.major} is not understood; 1 is")
        tensor = &managed.versioned.tensor
        self.writable = not managed.versioned.flags & DL_READ_ONLY
    else:
        managed.plain = <DLManagedTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
        PyCapsule_SetName(capsule, b"used_dltensor")
        tensor = &managed.plain.tensor
        # An old capsule does not say whether it may be written, but a buffer does: jax's are not.
        self.writable = not PyObject_CheckBuffer(obj)
    self.keep = managed
    if not set_tensor(self, tensor):
        raise TypeError(
            f"{type(obj).__qualname__} is of DLPack type {tensor.dtype.code} with "
            f"{tensor.dtype.bits} bits x {tensor.dtype.lanes} on device type "
            f"{tensor.device.device_type}; only whole bytes on cpu and cuda can be sent"
        )
    return finish_array(self, obj)


cdef object capsule_of(object obj):
    """Return the capsule from `__dlpack__`, versioned if the exporter supports versions."""
    options = {}
    if hasattr(obj, "__dlpack_device__"):
        device, _ = obj.__dlpack_device__()
        if device in (DL_CUDA, DL_CUDA_MANAGED):
            options["stream"] = -1      # order nothing: the reader of the memory does
    try:
        try:
            return obj.__dlpack__(max_version=(1, 0), **options)
        except TypeError as error:      # it knows no versions, or has another reason
            refused = error
        try:
            return obj.__dlpack__(**options)
        except Exception:
            raise refused from None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{type(obj).__qualname__} does not show its memory: {error}; {how_to_array(obj)}"
        ) from error


cdef bint set_tensor(Array self, DLTensor *tensor) except -1:
    """Take over shape, dtype, device and pointer; False if the dtype or device is unknown."""
    cdef int i, code, device = tensor.device.device_type
    cdef size_t itemsize = tensor.dtype.bits // 8
    if device == DL_CUDA or device == DL_CUDA_MANAGED:
        self.device = "cuda"
        self.device_index = tensor.device.device_id
    elif device == DL_CPU or device == DL_CUDA_HOST:
        self.device = "cpu"
    else:
        return False
    cdef int64_t most = INT64_MAX // <int64_t>(itemsize if itemsize != 0 else 1)
    if tensor.dtype.lanes != 1 or itemsize * 8 != tensor.dtype.bits or itemsize == 0:
        return False
    code = code_of_dlpack(tensor.dtype)
    if code != DT_OTHER:
        set_dtype(self, code, itemsize)
    elif tensor.dtype.code in DLPACK_NAMES:
        name_dtype(self, DLPACK_NAMES[tensor.dtype.code].format(tensor.dtype.bits), itemsize)
    else:
        return False
    if not 0 <= tensor.ndim <= MOST_DIMENSIONS or (tensor.ndim > 0 and tensor.shape == NULL):
        raise ValueError(f"a DLPack tensor of {tensor.ndim} dimensions and no or no such shape")
    lay_out(self, tensor.ndim)
    for i in range(self.ndim):
        self.shape_[i] = tensor.shape[i]
    if tensor.strides == NULL:
        set_contiguous_strides(self)
    else:
        for i in range(self.ndim):
            if not -most <= tensor.strides[i] <= most:
                raise ValueError(f"strides that leave memory: {tensor.strides[i]} elements")
            self.strides_[i] = tensor.strides[i] * <int64_t>itemsize
    if tensor.data != NULL:
        self.ptr = <char *>(<uintptr_t>tensor.data + tensor.byte_offset)
    return True


# ml_dtypes' names of dtypes without a code.
cdef dict DLPACK_NAMES = {
    DL_FLOAT: "float{}", DL_COMPLEX: "complex{}", DL_INT: "int{}", DL_UINT: "uint{}",
    7: "float8_e3m4", 8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 11: "float8_e4m3fnuz",
    13: "float8_e5m2fnuz", 14: "float8_e8m0fnu",
}


cdef int code_of_dlpack(DLDataType dtype) noexcept:
    cdef size_t itemsize = dtype.bits // 8
    cdef char kind = (
        c"f" if dtype.code == DL_FLOAT else c"i" if dtype.code == DL_INT else
        c"u" if dtype.code == DL_UINT else c"c" if dtype.code == DL_COMPLEX else
        c"b" if dtype.code == DL_BOOL else 0
    )
    if kind:
        return code_of_kind(kind, itemsize)
    if dtype.code == DL_BFLOAT and itemsize == 2:
        return DT_BF16
    if dtype.code == DL_FLOAT8_E4M3FN:
        return DT_F8E4M3FN
    if dtype.code == DL_FLOAT8_E5M2:
        return DT_F8E5M2
    return DT_OTHER

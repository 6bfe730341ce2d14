"""DLPack 1.x: the interface through which array libraries share memory.

Only the structures of the specification at https://dmlc.github.io/dlpack that cydist reads.
They are declared again because the header is not a dependency of cydist.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef enum DeviceType:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3            # pinned: the CPU can access it
    DL_CUDA_MANAGED = 13


cdef enum TypeCode:
    DL_INT = 0
    DL_UINT = 1
    DL_FLOAT = 2
    DL_BFLOAT = 4
    DL_COMPLEX = 5
    DL_BOOL = 6
    DL_FLOAT8_E4M3FN = 10
    DL_FLOAT8_E5M2 = 12


cdef enum:
    DL_READ_ONLY = 1            # of DLManagedTensorVersioned.flags


ctypedef struct DLDevice:
    int32_t device_type
    int32_t device_id


ctypedef struct DLDataType:
    uint8_t code                # TypeCode
    uint8_t bits
    uint16_t lanes


ctypedef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides            # in elements; NULL: contiguous
    uint64_t byte_offset


ctypedef struct DLManagedTensor:                # in a capsule named "dltensor"
    DLTensor tensor
    void *context
    void (*deleter)(DLManagedTensor *self) noexcept


ctypedef struct DLPackVersion:
    uint32_t major
    uint32_t minor


ctypedef struct DLManagedTensorVersioned:       # in one named "dltensor_versioned"
    DLPackVersion version
    void *context
    void (*deleter)(DLManagedTensorVersioned *self) noexcept
    uint64_t flags
    DLTensor tensor


# The target of a type's `__dlpack_c_exchange_api__`: DLPack without a Python call.
ctypedef struct DLPackExchangeAPI:
    DLPackVersion version
    void *previous
    void *allocate
    void *managed_from_object
    void *managed_to_object
    # Show the memory of `object` for as long as `object` lives. -1 with a Python exception.
    int (*tensor_from_object)(void *object, DLTensor *out) noexcept
    void *current_stream

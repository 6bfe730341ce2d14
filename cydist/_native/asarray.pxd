"""Finding the memory of what users pass."""
from cydist._native.array cimport Array
from cydist._native.dlpack cimport DLDataType, DLPackExchangeAPI


# The memory of an array of any library, or of a buffer: never a copy. TypeError or
# ValueError, with a message that says what would be accepted, when it cannot be used.
cpdef Array asarray(object obj)


# For ndarray_view.pyx. The dtype of numpy's letter of a kind and a size, or DLPack's: DT_OTHER for
# any other.
cdef int code_of_kind(char kind, size_t itemsize) noexcept
cdef int code_of_dlpack(DLDataType dtype) noexcept
# torch's C interface, if `obj` is exactly a torch.Tensor or Parameter; else NULL.
cdef DLPackExchangeAPI *torch_exchange(object obj) except? NULL

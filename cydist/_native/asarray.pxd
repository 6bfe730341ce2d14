"""Find the memory of the objects that users pass."""
from cydist._native.array cimport Array
from cydist._native.dlpack cimport DLDataType, DLPackExchangeAPI


# Return the memory of an array of any library, or of a buffer, without a copy. Raises TypeError or
# ValueError, with a message that names what is accepted, when it cannot be used.
cpdef Array asarray(object obj)


# For ndarray_view.pyx. Return the dtype for numpy's kind letter and a size, or for DLPack's dtype;
# DT_OTHER for any other.
cdef int code_of_kind(char kind, size_t itemsize) noexcept
cdef int code_of_dlpack(DLDataType dtype) noexcept
# Return torch's C interface if `obj` is exactly a torch.Tensor or Parameter, else NULL.
cdef DLPackExchangeAPI *torch_exchange(object obj) except? NULL

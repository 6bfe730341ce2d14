"""Pack and unpack ranges of a strided array's elements, in C order; and hash array sizes."""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from cydist._native.array cimport Array
from cydist._native.kernels cimport pack, unpack


def hash_of_sizes(list arrays not None) -> int:
    """Return a hash of the sizes of arrays, in order; 32 bits, equal on all ranks."""
    cdef uint64_t odd = 0x9E3779B97F4A7C15ULL, mixed = odd ^ <size_t>len(arrays)
    cdef Array array
    for array in arrays:
        mixed = (mixed ^ array.size) * odd
        mixed ^= mixed >> 32
    return mixed & 0xffffffffU


def pack_part(Array dense not None, Array array not None, size_t start) -> None:
    """Copy elements of `array`, from number `start` on, into `dense` until it is full.

    Args:
        dense: Contiguous, of the same size of elements; both on the CPU.

    Raises ValueError if there are too few elements, or `dense` is not as described.
    """
    move(dense, array, start, True)


def unpack_part(Array array not None, Array dense not None, size_t start) -> None:
    """Copy `dense` over elements of `array`, from number `start` on; see pack_part."""
    move(dense, array, start, False)


cdef int move(Array dense, Array array, size_t start, bint packing) except -1:
    cdef Array written = dense if packing else array
    if dense.itemsize != array.itemsize or not dense.contiguous or not written.writable or \
            dense.device != "cpu" or array.device != "cpu":
        raise ValueError(f"cannot move elements between {array} and {dense}")
    if start > array.size or dense.size > array.size - start:
        raise ValueError(
            f"no range of size {dense.size} from {start} on in an array of size {array.size}"
        )
    cdef int64_t *shape = <int64_t *>malloc((array.ndim + 1) * sizeof(int64_t))
    if shape == NULL:
        raise MemoryError
    memcpy(shape, array.shape_, array.ndim * sizeof(int64_t))
    with nogil:
        move_range(packing, dense.ptr, array.ptr, array.ndim, shape, array.strides_,
                   array.itemsize, start, dense.size)
    free(shape)
    return 0


cdef void move_range(bint packing, char *dense, char *array, int ndim, int64_t *shape,
                     const int64_t *strides, size_t itemsize, size_t start,
                     size_t count) noexcept nogil:
    """Copy the rest of a row, whole rows, and the beginning of one; leaves `shape` unchanged."""
    cdef size_t row_size = 1, row, rows, some
    cdef int64_t length
    cdef int i
    if count == 0:
        return
    if ndim == 0:
        move_block(packing, dense, array, 0, shape, strides, itemsize)
        return
    for i in range(1, ndim):
        row_size *= <size_t>shape[i]
    row, start = start // row_size, start % row_size
    if start != 0:
        some = min(count, row_size - start)
        move_range(packing, dense, array + <int64_t>row * strides[0], ndim - 1, shape + 1,
                   strides + 1, itemsize, start, some)
        dense += some * itemsize
        count -= some
        row += 1
    rows = count // row_size
    if rows != 0:
        length = shape[0]
        shape[0] = <int64_t>rows
        move_block(packing, dense, array + <int64_t>row * strides[0], ndim, shape, strides,
                   itemsize)
        shape[0] = length
        dense += rows * row_size * itemsize
    move_range(packing, dense, array + <int64_t>(row + rows) * strides[0], ndim - 1, shape + 1,
               strides + 1, itemsize, 0, count - rows * row_size)


cdef inline void move_block(bint packing, char *dense, char *array, int ndim,
                            const int64_t *shape, const int64_t *strides,
                            size_t itemsize) noexcept nogil:
    if packing:
        pack(dense, array, ndim, shape, strides, itemsize)
    else:
        unpack(array, dense, ndim, shape, strides, itemsize)

"""One view of the memory of any library's array.

An Array says where memory is, in what layout, of what dtype, on which device, and whether it
may be written. asarray.pyx makes Arrays from the objects that users pass. This module knows
nothing of ranks, groups and reductions.
"""
from zlib import crc32

cimport cython
from cpython.buffer cimport Py_buffer, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.buffer cimport PyBuffer_Release
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memmove

from cydist._native.kernels cimport DT_OTHER, DT_U8, pack, unpack

from cydist._native.kernels import DTYPES


cdef extern from "kernels/alloc.h" nogil:
    void *cydist_room(size_t nbytes)

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        const char *tp_name

cdef enum:
    INLINE_DIMENSIONS = 4   # that fit into Array.inline_shape
    FEW_ARRAYS = 8          # up to this many are compared with each other directly

# Every library's own name of a dtype is mapped to one of these; the first is of DT_OTHER.
cdef tuple NAMES = ("", *DTYPES)
cdef dict CODES = DTYPES
cdef const char *BYTES = b"B"           # the buffer protocol's format of exported memory
cdef dict managers = {}                 # kind of device memory -> the manager of use_memory


def use_memory(str device, manager):
    """Let `manager` allocate and copy in the memory of `device` ("cuda"); None: no manager.

    manager.allocate(nbytes, like)  memory on the device of the Array `like`, as an Array of bytes
    manager.copy(into, source)      one Array's elements, in C order, into another; strided or not
    """
    managers[device] = manager


@cython.final
@cython.no_gc_clear     # or the collector could drop a buffer's owner without releasing the buffer
cdef class Array:
    """The memory of an array: pointer, dtype, shape, strides in bytes, device.

    `memoryview(array)` is the bytes of a contiguous CPU array.

    Attributes:
        dtype: Code of the dtype; 0 for one that can be moved but not reduced.
        dtype_name: "float32", "bfloat16", ...; for dtype 0 numpy's text of the dtype.
        owner: What was passed to `asarray`. It stays alive, and so does the memory.
        writable: Whether the memory may be written.
        contiguous: C order without gaps.
        device: "cpu" or "cuda".

    Examples:
        >>> array = dist.asarray(np.zeros((2, 3), "float32"))
        >>> array.shape, array.dtype_name, array.contiguous
        ((2, 3), 'float32', True)
    """

    def __init__(self):
        raise TypeError("an Array is made by asarray(...) or empty(...)")

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)      # nothing if there is no buffer
        if self.shape_ != NULL and self.shape_ != self.inline_shape:
            PyMem_Free(self.shape_)

    @property
    def shape(self):
        """Return the number of elements in each dimension."""
        return tuple([self.shape_[i] for i in range(self.ndim)])

    @property
    def strides(self):
        """Return the bytes from one element to the next in each dimension; may be <= 0."""
        return tuple([self.strides_[i] for i in range(self.ndim)])

    @property
    def address(self):
        """Return the first element's address as an integer; may be 0 if size is 0."""
        return <uintptr_t>self.ptr

    def __repr__(self):
        return (
            f"Array({self.dtype_name}, shape={self.shape}, strides={self.strides}, "
            f"device={self.device!r}{'' if self.writable else ', read-only'})"
        )

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.device != "cpu":
            raise BufferError(f"the memory is on {device_text(self)}, not the CPU")
        if not self.contiguous:
            raise BufferError(
                f"not contiguous: shape {self.shape}, strides {self.strides}; use dense()"
            )
        if flags & PyBUF_WRITABLE and not self.writable:
            raise BufferError("the memory is read-only")
        view.buf = self.ptr if self.ptr != NULL else <char *>self.inline_shape
        view.obj = self
        view.len = <Py_ssize_t>self.nbytes
        view.readonly = not self.writable
        view.itemsize = 1
        view.format = <char *>BYTES if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = &view.len if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def dense(self):
        """Return the array itself if contiguous, else a contiguous copy of its dtype and shape.

        Returns:
            An Array.

        Raises:
            ValueError: Device memory without a manager.
        """
        if self.contiguous:
            return self
        cdef Array copy = self.empty_like()
        if self.device != "cpu":
            manager_of(self).copy(copy, self)
            return copy
        with nogil:
            pack(copy.ptr, self.ptr, self.ndim, self.shape_, self.strides_, self.itemsize)
        return copy

    def empty_like(self):
        """Return new contiguous memory on the same device, of the same dtype and shape, with
        undefined content.

        Returns:
            An Array.

        Raises:
            ValueError: Device memory without a manager.
        """
        cdef Array new = Array.__new__(Array)
        cdef int i
        lay_out(new, self.ndim)
        for i in range(self.ndim):
            new.shape_[i] = self.shape_[i]
        allocate(new, self)
        return new

    def copy_from(self, Array dense not None):
        """Copy the elements of `dense` (C order) into this array's memory.

        On a device the copy is enqueued on its library's current stream.

        Args:
            dense: Contiguous, of the same dtype and number of elements. If it is this very array
                nothing happens.

        Raises:
            ValueError: They or their devices differ, this array is read-only, or it is device
                memory without a manager.
        """
        if dense is self:
            return
        if not same_device(self, dense):
            raise ValueError(f"{device_text(self)} cannot take what is on {device_text(dense)}")
        if dense.size != self.size or dense.itemsize != self.itemsize or \
                dense.dtype_name != self.dtype_name:
            raise ValueError(
                f"an array of size {self.size}, dtype {self.dtype_name}, cannot take one of size "
                f"{dense.size}, dtype {dense.dtype_name}"
            )
        if not dense.contiguous:
            raise ValueError(f"the source is not contiguous: strides {dense.strides}")
        if not self.writable:
            raise ValueError("the memory is read-only")
        if self.size == 0:
            return
        if self.device != "cpu":
            manager_of(self).copy(self, dense)
            return
        with nogil:
            if self.contiguous:
                memmove(self.ptr, dense.ptr, self.nbytes)
            else:
                unpack(self.ptr, dense.ptr, self.ndim, self.shape_, self.strides_, self.itemsize)

    def typed(self, Array like not None):
        """Return the first of these contiguous bytes as elements of the dtype and size of `like`.

        Args:
            like: Any Array.

        Returns:
            A view.

        Raises:
            ValueError: There are too few bytes.
        """
        need_contiguous(self)
        if like.nbytes > self.nbytes:
            raise ValueError(f"{self.nbytes} bytes cannot hold {like.nbytes}")
        cdef Array view = Array.__new__(Array)
        lay_out(view, 1)
        view.shape_[0] = <int64_t>like.size
        copy_dtype(view, like)
        set_contiguous_strides(view)
        derive_sizes(view)
        lie_in(view, self)
        return view

    cdef Array part(self, size_t start, size_t count):
        cdef Array view = Array.__new__(Array)
        lay_out(view, 1)
        view.shape_[0] = <int64_t>count
        view.strides_[0] = <int64_t>self.itemsize
        view.ptr = self.ptr + start * self.itemsize
        copy_dtype(view, self)
        view.size = count
        view.nbytes = count * self.itemsize
        view.contiguous = True
        view.writable = self.writable
        view.device = self.device
        view.device_index = self.device_index
        view.owner = self.owner
        view.keep = self
        return view

    def blocks(self, size_t p):
        """Return this contiguous array in p equal parts, as views of one dimension.

        Args:
            p: How many parts.

        Returns:
            A list of p views.

        Raises:
            ValueError: size is not a multiple of p.
        """
        if p == 0 or self.size % p != 0:
            raise ValueError(
                f"an array of size {self.size} cannot be divided into {p} equal blocks"
            )
        need_contiguous(self)
        cdef size_t i, count = self.size // p
        return [self.part(i * count, count) for i in range(p)]

    def split(self, sizes):
        """Return this contiguous array in parts of the given numbers of elements, as views.

        Args:
            sizes: Numbers that sum to size.

        Returns:
            A list of views.

        Raises:
            ValueError: The sizes do not add up to size.
        """
        need_contiguous(self)
        if min(sizes, default=0) < 0 or sum(sizes) != self.size:
            raise ValueError(f"parts of {list(sizes)} elements do not make up {self.size}")
        cdef size_t start = 0, count
        parts = []
        for count in sizes:
            parts.append(self.part(start, count))
            start += count
        return parts

    def same_memory(self, Array other not None):
        """Return whether every element is at the address of the same element of `other`.

        Args:
            other: An Array.

        Returns:
            True or False.
        """
        if self.ptr != other.ptr or not same_device(self, other) or self.nbytes != other.nbytes:
            return False
        if self.contiguous and other.contiguous:
            return True
        return (self.itemsize, self.shape, self.strides) == \
            (other.itemsize, other.shape, other.strides)

    def overlaps(self, Array other not None):
        """Return whether the arrays may share a byte.

        False is certain. True is certain if both are contiguous. For strided arrays it means that
        neither their extents nor their strides separate them. Interleaved slices (x[::2] and
        x[1::2]) and blocks of one matrix are told apart.

        Args:
            other: An Array.

        Returns:
            True or False.
        """
        return may_share(self, other)

    @property
    def extent(self):
        """Return the first address that belongs to an element, and the one after the last."""
        cdef int64_t start = 0, step = 0
        if self.size == 0:
            return self.address, self.address
        cdef int64_t nbytes = span_below(self, INT64_MAX, &start, &step)
        return self.address + start, self.address + start + nbytes

    @property
    def self_overlapping(self):
        """Return whether two elements may share memory, as in a broadcast or a sliding window.

        False is certain: in increasing order, each stride steps over what the smaller ones reach.
        """
        if self.contiguous or self.size == 0:
            return False
        cdef int64_t stride, count, reach = <int64_t>self.itemsize
        for stride, count in sorted(
            [(abs(self.strides_[i]), self.shape_[i])
             for i in range(self.ndim) if self.shape_[i] > 1]
        ):
            if stride < reach:
                return True
            reach += (count - 1) * stride
        return False


(<PyTypeObject *>Array).tp_name = b"cydist.Array"   # the public name, since its module may move


cpdef Array empty(size_t size, Array like=None):
    """Return new contiguous memory for `size` elements of the dtype and on the device of `like`, or
    for bytes on the CPU. It is aligned to 64 bytes, with undefined content. Raises MemoryError, and
    ValueError if the device has no manager."""
    cdef Array new = Array.__new__(Array)
    lay_out(new, 1)
    new.shape_[0] = <int64_t>size
    allocate(new, like)
    return new


@cython.final
cdef class Memory:
    """Memory that cydist allocated, freed with this object."""
    cdef void *ptr

    def __cinit__(self, size_t nbytes):
        self.ptr = cydist_room(nbytes)
        if self.ptr == NULL and nbytes > 0:
            raise MemoryError(f"no memory for {nbytes} bytes")

    def __dealloc__(self):
        free(self.ptr)


cdef int allocate(Array self, Array like) except -1:
    """Allocate memory for the shape of `self`, with the dtype of `like`."""
    cdef Memory memory
    if like is None:
        set_dtype(self, DT_U8, 1)
    else:
        copy_dtype(self, like)
    set_contiguous_strides(self)
    derive_sizes(self)
    if like is not None and like.device != "cpu":
        lie_in(self, manager_of(like).allocate(self.nbytes, like))
        return 0
    memory = Memory.__new__(Memory, self.nbytes)
    self.ptr = <char *>memory.ptr
    self.writable = True
    self.device = "cpu"
    self.owner = self.keep = memory
    return 0


cdef int lie_in(Array self, Array memory) except -1:
    self.ptr = memory.ptr
    self.writable = memory.writable
    self.device = memory.device
    self.device_index = memory.device_index
    self.owner = memory.owner
    self.keep = memory
    return 0


cdef int lay_out(Array self, int ndim) except -1:
    """Make room for the shape and strides of `ndim` dimensions."""
    if ndim <= INLINE_DIMENSIONS:
        self.shape_ = self.inline_shape
        self.strides_ = self.inline_shape + INLINE_DIMENSIONS
    else:
        self.shape_ = <int64_t *>PyMem_Malloc(2 * <size_t>ndim * sizeof(int64_t))
        if self.shape_ == NULL:
            raise MemoryError
        self.strides_ = self.shape_ + ndim
    self.ndim = ndim
    return 0


cdef int set_contiguous_strides(Array self) except -1:
    cdef int i
    cdef uint64_t step = self.itemsize      # may wrap: derive_sizes() refuses sizes that large
    for i in range(self.ndim - 1, -1, -1):
        self.strides_[i] = <int64_t>step
        step *= <uint64_t>max(self.shape_[i], 1)
    return 0


cdef int derive_sizes(Array self) except -1:
    """Compute size, nbytes and contiguous from shape, strides and itemsize."""
    cdef int i
    cdef bint contiguous = True
    cdef int64_t n, nbytes = <int64_t>self.itemsize
    if self.itemsize == 0:
        raise TypeError(f"elements of {self.dtype_name} have no bytes")
    if nbytes < 0:
        raise ValueError(f"more than 2**63 bytes: an element has {self.itemsize}")
    for i in range(self.ndim):
        if self.shape_[i] <= 0:
            if self.shape_[i] < 0:
                raise ValueError(f"a negative dimension in the shape {self.shape}")
            nbytes = 0
    for i in range(self.ndim - 1, -1, -1):
        n = self.shape_[i]
        if nbytes == 0 or n == 1:
            continue
        if self.strides_[i] != nbytes:
            contiguous = False
        if nbytes > INT64_MAX // n:
            raise ValueError(f"more than 2**63 bytes: shape {self.shape}")
        nbytes *= n
    self.nbytes = <size_t>nbytes
    self.size = self.nbytes // self.itemsize
    self.contiguous = contiguous
    if not contiguous and nbytes != 0:
        check_reach(self)
    return 0


cdef int check_reach(Array self) except -1:
    """Raise ValueError unless all elements are within 2**62 bytes: no sum of strides overflows."""
    cdef int64_t stride, left = INT64_MAX // 2 - <int64_t>self.itemsize
    cdef int i
    for i in range(self.ndim):
        stride = self.strides_[i]
        if self.shape_[i] == 1:
            continue
        if stride == INT64_MIN or abs(stride) > left // (self.shape_[i] - 1):
            raise ValueError(f"strides that leave memory: shape {self.shape}, {self.strides}")
        left -= (self.shape_[i] - 1) * abs(stride)
    return 0


cdef int set_dtype(Array self, int code, size_t itemsize) except -1:
    self.dtype = code
    self.dtype_name = NAMES[code]
    self.itemsize = itemsize
    return 0


cdef int name_dtype(Array self, str name, size_t itemsize) except -1:
    """Set the dtype by name; one without a code can only be moved."""
    self.dtype = CODES.get(name, DT_OTHER)
    self.dtype_name = name
    self.dtype_hash = crc32(name.encode()) if self.dtype == DT_OTHER else 0
    self.itemsize = itemsize
    return 0


cdef int copy_dtype(Array self, Array other) except -1:
    self.dtype = other.dtype
    self.dtype_name = other.dtype_name
    self.dtype_hash = other.dtype_hash
    self.itemsize = other.itemsize
    return 0


cdef object manager_of(Array self):
    if (manager := managers.get(self.device)) is None:
        raise ValueError(f"the memory is on {device_text(self)}, not the CPU")
    return manager


cdef int need_contiguous(Array self) except -1:
    if not self.contiguous:
        raise ValueError(f"not contiguous: shape {self.shape}, strides {self.strides}")
    return 0


cdef str device_text(Array self):
    return f"{self.device}:{self.device_index}"


cdef bint same_device(Array a, Array b):
    return a.device == b.device and a.device_index == b.device_index


cdef bint may_share(Array a, Array b):
    """Return whether the arrays may share a byte."""
    cdef Array of
    cdef int i
    if a.size == 0 or b.size == 0 or not same_device(a, b) or are_disjoint(a, b, INT64_MAX):
        return False
    if a.contiguous and b.contiguous:
        return True
    for of in (a, b):
        for i in range(of.ndim):
            if of.shape_[i] > 1 and are_disjoint(a, b, abs(of.strides_[i])):
                return False
    return True


def overlapping(arrays, size_t outputs):
    """Return the pairs (i, j) of arrays that may share memory (`Array.overlaps`), where i < j.

    Sweeps over the arrays by address, so that a thousand separate ones cost no million comparisons.

    Args:
        outputs: How many of the first arrays are outputs; i is one of them.
    """
    cdef list found = [], open_ = []
    cdef size_t i, j, count = len(arrays)
    if count <= FEW_ARRAYS:
        return [
            (i, j) for i in range(min(outputs, count)) for j in range(i + 1, count)
            if may_share(arrays[i], arrays[j])
        ]
    extents = [array.extent for array in arrays]
    for i in sorted(range(count), key=extents.__getitem__):
        start = extents[i][0]
        open_ = [j for j in open_ if extents[j][1] > start]
        for j in open_:
            if min(i, j) < outputs and may_share(arrays[i], arrays[j]):
                found.append((min(i, j), max(i, j)))
        open_.append(i)
    return found


def of_one_kind(list arrays not None) -> bool:
    """Return whether all arrays have one dtype and are on one device."""
    cdef Array first = arrays[0], each
    for each in arrays:
        if each.dtype_name != first.dtype_name or not same_device(each, first):
            return False
    return True


def totals(list blocks not None) -> tuple[int, int, bool]:
    """Return the elements and the bytes of all blocks together, and whether all blocks have the
    same number of elements."""
    cdef Array each
    cdef size_t size = 0, nbytes = 0, first = 0
    cdef bint even = True
    if blocks:
        first = (<Array?>blocks[0]).size
    for each in blocks:
        size += each.size
        nbytes += each.nbytes
        even = even and each.size == first
    return size, nbytes, even


cdef bint are_disjoint(Array a, Array b, int64_t threshold) noexcept nogil:
    """Return whether the strides of at least `threshold` bytes prove that no byte is shared.

    Dimensions with smaller strides form a run of bytes. The others move that run by
    multiples of the greatest common divisor of their strides. If no stride is that large,
    the runs are the extents of the arrays.
    """
    cdef int64_t a_start = 0, a_bytes, b_start = 0, b_bytes, step = 0, distance
    a_bytes = span_below(a, threshold, &a_start, &step)
    b_bytes = span_below(b, threshold, &b_start, &step)
    distance = <int64_t>(<uint64_t>b.ptr + <uint64_t>b_start
                         - (<uint64_t>a.ptr + <uint64_t>a_start))
    if step == 0:
        return distance >= a_bytes or -distance >= b_bytes
    distance %= step
    if distance < 0:
        distance += step
    return distance >= a_bytes and step - distance >= b_bytes


cdef int64_t span_below(Array self, int64_t threshold, int64_t *start,
                        int64_t *step) noexcept nogil:
    """Return the bytes that dimensions with strides below `threshold` span, from ptr + `start`."""
    cdef int64_t stride, span = <int64_t>self.itemsize
    cdef int i
    for i in range(self.ndim):
        stride = self.strides_[i]
        if self.shape_[i] == 1 or stride == 0:
            continue
        if stride >= threshold or -stride >= threshold:
            step[0] = gcd(step[0], stride if stride > 0 else -stride)
            continue
        span += (self.shape_[i] - 1) * (stride if stride > 0 else -stride)
        if stride < 0:
            start[0] += (self.shape_[i] - 1) * stride
    return span


cdef int64_t gcd(int64_t a, int64_t b) noexcept nogil:
    while b != 0:
        a, b = b, a % b
    return a

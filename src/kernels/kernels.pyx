"""The choice of loops: the instruction set, the plan of a strided copy, a Python interface.

The loops are in src/kernels. Nothing here depends on arrays, ranks or the environment: the
Python functions take any object with the buffer protocol and release the GIL in loops.
"""
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport floor
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

from cydist._native.abi cimport Reduction


cdef extern from "kernels/kernels.h" nogil:
    ctypedef void (*Combine)(const Reduction *, void *, const void *, const void *,
                             size_t) noexcept nogil
    ctypedef void (*CombineAll)(const Reduction *, void *, const void *const *, int,
                                size_t) noexcept nogil
    ctypedef void (*Prepare)(const Reduction *, void *, const void *, size_t) noexcept nogil
    ctypedef void (*Finish)(const Reduction *, void *, size_t) noexcept nogil
    ctypedef struct Kernels "cydist_kernels":
        const char *isa
        Combine combine[DT_COUNT][OP_COUNT]
        CombineAll combine_all[DT_COUNT][OP_COUNT]
        Prepare prepare[DT_COUNT]
        Finish finish[DT_COUNT]
    const Kernels *cydist_variant(int index)
    void cydist_pack_rows(char *packed, const char *array, size_t rows, size_t cols,
                          size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                          ptrdiff_t array_col)
    void cydist_unpack_rows(char *array, const char *packed, size_t rows, size_t cols,
                            size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                            ptrdiff_t array_col)
    void cydist_flatten(char *out, const char *const *blocks, const size_t *nbytes, size_t count)
    void cydist_unflatten(char *const *blocks, const char *flat, const size_t *nbytes,
                          size_t count)


# For each dtype of kernels.h, its name in numpy and ml_dtypes, and the bytes of an element.
ROWS = (
    ("bool", DT_BOOL, 1), ("int8", DT_I8, 1), ("uint8", DT_U8, 1), ("int16", DT_I16, 2),
    ("uint16", DT_U16, 2), ("int32", DT_I32, 4), ("uint32", DT_U32, 4), ("int64", DT_I64, 8),
    ("uint64", DT_U64, 8), ("float16", DT_F16, 2), ("bfloat16", DT_BF16, 2),
    ("float32", DT_F32, 4), ("float64", DT_F64, 8), ("complex64", DT_C64, 8),
    ("complex128", DT_C128, 16), ("float8_e4m3fn", DT_F8E4M3FN, 1), ("float8_e5m2", DT_F8E5M2, 1),
)
assert [row[1] for row in ROWS] == list(range(DT_OTHER + 1, DT_COUNT))
DTYPES = {name: code for name, code, _ in ROWS}
ITEMSIZES = {name: nbytes for name, _, nbytes in ROWS}
OPS = {
    "SUM": OP_SUM, "PRODUCT": OP_PRODUCT, "MIN": OP_MIN, "MAX": OP_MAX, "BAND": OP_BAND,
    "BOR": OP_BOR, "BXOR": OP_BXOR, "AVG": OP_AVG, "PREMUL_SUM": OP_PREMUL_SUM,
}
assert len(OPS) == OP_COUNT - 1

cdef const Kernels *kernels = cydist_variant(0)     # used by reduction()

cdef size_t itemsizes[DT_COUNT]
itemsizes[:] = [0, *ITEMSIZES.values()]


def isas() -> list[str]:
    """Return the variants that this machine can run, slowest first; "baseline" is always there."""
    names = []
    while cydist_variant(<int>len(names)) != NULL:
        names.append(cydist_variant(<int>len(names)).isa.decode())
    return names


def isa() -> str:
    """Return the variant in use: the last of isas(), unless use_isa() named another."""
    return kernels.isa.decode()


def use_isa(name: str | None = None) -> None:
    """Use this variant, or the best, for later reductions; all variants give the same bits.

    Raises ValueError, and changes nothing, if this machine cannot run it.
    """
    global kernels
    names = isas()
    if name is not None and name not in names:
        raise ValueError(f"this machine runs the kernels {', '.join(names)}, not {name!r}")
    kernels = cydist_variant(<int>(names.index(name) if name else len(names) - 1))


use_isa()


cdef int reduction(Reduction *r, int dtype, int op, void *factor, int ranks) noexcept nogil:
    memset(r, 0, sizeof(Reduction))
    if not (DT_OTHER < dtype < DT_COUNT and OP_NONE < op < OP_COUNT):
        return -1
    if kernels.combine[dtype][op] == NULL:
        return -1
    r.itemsize = itemsizes[dtype]
    r.commutative = True
    r.ranks = ranks
    r.combine = kernels.combine[dtype][op]
    r.combine_all = kernels.combine_all[dtype][op]
    if op == OP_AVG:
        if ranks < 1:
            return -1
        r.finish = kernels.finish[dtype]
    elif op == OP_PREMUL_SUM:
        if factor == NULL or not is_exact_factor(dtype, (<const double *>factor)[0]):
            return -1
        r.context = factor
        r.prepare = kernels.prepare[dtype]
    return 0


# Integers are multiplied by integers; a fraction would silently be lost.
cdef bint is_exact_factor(int dtype, double factor) noexcept nogil:
    if dtype > DT_U64:
        return True
    return factor == floor(factor) and -2.0 ** 63 <= factor < 2.0 ** 64


# A strided copy in the order of packed memory. Dimensions of length 1 are dropped, dimensions that
# follow each other in memory are merged, and a dense innermost one becomes part of `run`. Each
# remaining dimension has at least 2 entries, so 64 dimensions hold any possible array.
cdef struct StridedPlan:
    size_t run                  # bytes that are contiguous on both sides
    int ndim
    size_t shape[64]
    ptrdiff_t array[64]         # strides in bytes
    size_t packed[64]


cdef void make_plan(StridedPlan *p, int ndim, const int64_t *shape, const int64_t *strides,
                    size_t itemsize) noexcept nogil:
    cdef int d, last
    p.run = itemsize
    p.ndim = 0
    for d in range(ndim):
        if shape[d] == 1:
            continue
        last = p.ndim - 1
        if p.ndim > 0 and p.array[last] == <ptrdiff_t>(strides[d] * shape[d]):
            p.shape[last] *= <size_t>shape[d]
            p.array[last] = <ptrdiff_t>strides[d]
        else:
            p.shape[p.ndim] = <size_t>shape[d]
            p.array[p.ndim] = <ptrdiff_t>strides[d]
            p.ndim += 1
    if p.ndim > 0 and p.array[p.ndim - 1] == <ptrdiff_t>itemsize:
        p.ndim -= 1
        p.run = itemsize * p.shape[p.ndim]
    cdef size_t packed = p.run
    for d in range(p.ndim - 1, -1, -1):
        p.packed[d] = packed
        packed *= p.shape[d]


# Return the dimension outside the innermost in which the array is densest, so that a
# transposed array is copied in tiles.
cdef int tiled_dimension(const StridedPlan *p) noexcept nogil:
    cdef int d, best = p.ndim - 2
    for d in range(p.ndim - 3, -1, -1):
        if magnitude(p.array[d]) < magnitude(p.array[best]):
            best = d
    if magnitude(p.array[best]) < magnitude(p.array[p.ndim - 1]):
        return best
    return p.ndim - 2


cdef inline size_t magnitude(ptrdiff_t stride) noexcept nogil:
    return <size_t>(stride if stride >= 0 else -stride)


cdef void drop_dimension(StridedPlan *p, int dimension) noexcept nogil:
    cdef int d
    p.ndim -= 1
    for d in range(dimension, p.ndim):
        p.shape[d] = p.shape[d + 1]
        p.array[d] = p.array[d + 1]
        p.packed[d] = p.packed[d + 1]


cdef void move(bint packing, char *packed, char *array, int ndim, const int64_t *shape,
               const int64_t *strides, size_t itemsize) noexcept nogil:
    cdef StridedPlan p
    cdef size_t rows = 1, cols = 1, packed_row = 0
    cdef ptrdiff_t array_row = 0, array_col = 0
    cdef size_t index[64]
    cdef int d
    for d in range(ndim):
        if shape[d] == 0:
            return
    make_plan(&p, ndim, shape, strides, itemsize)
    if p.ndim > 1:
        d = tiled_dimension(&p)
        rows, packed_row, array_row = p.shape[d], p.packed[d], p.array[d]
        drop_dimension(&p, d)
    if p.ndim > 0:
        d = p.ndim - 1
        cols, array_col = p.shape[d], p.array[d]
        drop_dimension(&p, d)
    memset(index, 0, sizeof(index))
    while True:
        if packing:
            cydist_pack_rows(packed, array, rows, cols, p.run, packed_row, array_row, array_col)
        else:
            cydist_unpack_rows(array, packed, rows, cols, p.run, packed_row, array_row, array_col)
        d = p.ndim - 1
        while d >= 0 and index[d] == p.shape[d] - 1:
            packed -= index[d] * p.packed[d]
            array -= <ptrdiff_t>index[d] * p.array[d]
            index[d] = 0
            d -= 1
        if d < 0:
            return
        packed += p.packed[d]
        array += p.array[d]
        index[d] += 1


cdef void pack(char *out, const char *array, int ndim, const int64_t *shape,
               const int64_t *strides, size_t itemsize) noexcept nogil:
    move(True, out, <char *>array, ndim, shape, strides, itemsize)


cdef void unpack(char *array, const char *packed, int ndim, const int64_t *shape,
                 const int64_t *strides, size_t itemsize) noexcept nogil:
    move(False, <char *>packed, array, ndim, shape, strides, itemsize)


cdef void flatten(char *out, const char *const *blocks, const size_t *nbytes,
                  size_t count) noexcept nogil:
    cydist_flatten(out, blocks, nbytes, count)


cdef void unflatten(char *const *blocks, const char *flat, const size_t *nbytes,
                    size_t count) noexcept nogil:
    cydist_unflatten(blocks, flat, nbytes, count)


# ---- the Python interface ----


cdef class BufferView:
    """One object's buffer, held while this lives."""
    cdef Py_buffer view
    cdef bint held
    cdef char *ptr

    def __cinit__(self, owner, int flags):
        PyObject_GetBuffer(owner, &self.view, flags)
        self.held = True
        self.ptr = <char *>self.view.buf

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

cdef class BufferViews:
    """Many buffers, held while this lives, with their addresses and sizes as C arrays; with
    room for one more."""
    cdef Py_buffer *views
    cdef char **ptrs
    cdef size_t *nbytes
    cdef size_t count           # buffers held

    def __cinit__(self, owners, int flags):
        cdef tuple all_ = tuple(owners)
        cdef size_t n = <size_t>len(all_) + 1
        self.views = <Py_buffer *>malloc(
            n * (sizeof(Py_buffer) + sizeof(char *) + sizeof(size_t)))
        if self.views == NULL:
            raise MemoryError(f"no memory for a list of {n} buffers")
        self.ptrs = <char **>(self.views + n)
        self.nbytes = <size_t *>(self.ptrs + n)
        for owner in all_:
            self.hold(owner, flags)

    cdef int hold(self, owner, int flags) except -1:
        cdef Py_buffer *view = &self.views[self.count]
        PyObject_GetBuffer(owner, view, flags)
        self.ptrs[self.count] = <char *>view.buf
        self.nbytes[self.count] = <size_t>view.len
        self.count += 1
        return 0

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])
        free(self.views)


cdef int make_reduction(Reduction *r, double *parts, int op, int dtype, factor,
                        int ranks) except -1:
    if op != OP_PREMUL_SUM and reduction(r, dtype, op, NULL, ranks) == 0:
        return 0
    cdef str refusal = why_not(op, dtype, factor, ranks)
    if refusal:
        raise ValueError(refusal)
    if factor is not None:
        parts[0] = complex(factor).real
        parts[1] = complex(factor).imag
    reduction(r, dtype, op, parts, ranks)
    return 0


def why_not(op: int, dtype: int, factor=None, ranks: int = 1) -> str:
    """Return why there is no such reduction, in a sentence; an empty string if there is one."""
    cdef Reduction r
    cdef double parts[2]
    name = dict(zip(OPS.values(), OPS.keys())).get(op, f"op {op}")
    of = dict(zip(DTYPES.values(), DTYPES.keys())).get(dtype, f"dtype code {dtype}")
    if not supports(op, dtype):
        return f"{name} of {of} is not defined"
    if op == OP_AVG and ranks < 1:
        return f"AVG divides by the number of ranks, which cannot be {ranks}"
    if op != OP_PREMUL_SUM:
        return ""
    if factor is None:
        return f"{name} of {of} needs a factor"
    try:
        parts[0] = complex(factor).real
        parts[1] = complex(factor).imag
    except OverflowError:
        return f"{name} of {of} needs a factor that a float64 holds, not one beyond its range"
    if parts[1] != 0 and dtype not in (DT_C64, DT_C128):
        return f"{name} of {of} needs a real factor, not {factor!r}"
    if reduction(&r, dtype, op, parts, ranks) != 0:
        return f"{name} of {of} needs a whole factor that fits 64 bits, not {factor!r}"
    if dtype <= DT_U64 and parts[0] != factor:
        return f"{name} of {of} needs a factor that a float64 holds, not {factor!r}"
    return ""


def supports(op: int, dtype: int) -> bool:
    """Return whether there is such a reduction for this dtype. (Codes as in OPS and DTYPES.)"""
    cdef Reduction r
    cdef double one[2]
    one[:] = [1.0, 0.0]
    return reduction(&r, dtype, op, one, 1) == 0


def itemsize(dtype: int) -> int:
    """Return the bytes per element of the dtype with this code."""
    if not DT_OTHER < dtype < DT_COUNT:
        raise ValueError(f"dtype code {dtype} is not in DTYPES")
    return itemsizes[dtype]


cdef size_t count_of(BufferViews memories, size_t itemsize) except? <size_t>-1:
    cdef size_t i
    for i in range(memories.count):
        if memories.nbytes[i] != memories.nbytes[0]:
            raise ValueError(
                f"buffers must be of one size, not {memories.nbytes[0]} and "
                f"{memories.nbytes[i]} bytes")
    if memories.nbytes[0] % itemsize != 0:
        raise ValueError(f"{memories.nbytes[0]} bytes are not whole elements of {itemsize} bytes")
    return memories.nbytes[0] // itemsize


def combine(op: int, dtype: int, acc, low, high, factor=None, ranks: int = 1) -> None:
    """Compute acc = low op high, element by element, rounded to the dtype; acc may be low or high.

    All three are contiguous buffers of one size, and acc is writable. Neither prepares nor
    finishes: see prepare() and finish(). Raises ValueError if op is not defined for dtype.
    """
    cdef Reduction r
    cdef double parts[2]
    make_reduction(&r, parts, op, dtype, factor, ranks)
    cdef BufferViews all_ = BufferViews((low, high), PyBUF_SIMPLE)
    all_.hold(acc, PyBUF_WRITABLE)
    cdef size_t count = count_of(all_, r.itemsize)
    with nogil:
        r.combine(&r, all_.ptrs[2], all_.ptrs[0], all_.ptrs[1], count)


def combine_all(op: int, dtype: int, out, sources, factor=None, ranks=None) -> None:
    """Compute out = sources[0] op ... op sources[-1], finished, with one rounding.

    out       may be one of the sources
    sources   one or more contiguous buffers of out's size; for PREMUL_SUM prepared ones
    ranks     AVG's divisor: the number of sources unless given
    Raises ValueError if op is not defined for dtype.
    """
    cdef Reduction r
    cdef double parts[2]
    cdef BufferViews all_ = BufferViews(sources, PyBUF_SIMPLE)
    all_.hold(out, PyBUF_WRITABLE)
    cdef int n = <int>all_.count - 1
    if n < 1:
        raise ValueError("combine_all needs at least one source")
    make_reduction(&r, parts, op, dtype, factor, n if ranks is None else ranks)
    cdef size_t count = count_of(all_, r.itemsize)
    with nogil:
        r.combine_all(&r, all_.ptrs[n], <const void *const *>all_.ptrs, n, count)


def prepare(op: int, dtype: int, out, own, factor=None) -> None:
    """Prepare a rank's own contribution for the first combine.

    PREMUL_SUM multiplies by the factor; every other op copies. out may be own.
    """
    cdef Reduction r
    cdef double parts[2]
    make_reduction(&r, parts, op, dtype, factor, 1)
    cdef BufferViews both = BufferViews((own,), PyBUF_SIMPLE)
    both.hold(out, PyBUF_WRITABLE)
    cdef size_t count = count_of(both, r.itemsize)
    with nogil:
        if r.prepare != NULL:
            r.prepare(&r, both.ptrs[1], both.ptrs[0], count)
        elif count != 0:
            memmove(both.ptrs[1], both.ptrs[0], count * r.itemsize)


def finish(op: int, dtype: int, acc, ranks: int) -> None:
    """Turn the last combine's acc into the result, in place: AVG divides by ranks."""
    cdef Reduction r
    cdef double one[2]
    make_reduction(&r, one, op, dtype, 1, ranks)
    cdef BufferViews memory = BufferViews((acc,), PyBUF_WRITABLE)
    cdef size_t count = count_of(memory, r.itemsize)
    if r.finish != NULL:
        with nogil:
            r.finish(&r, memory.ptrs[0], count)


cdef int move_buffer(bint packing, packed, array) except -1:
    cdef BufferView strided = BufferView(array, PyBUF_STRIDES | (0 if packing else PyBUF_WRITABLE))
    cdef BufferView dense = BufferView(packed, PyBUF_WRITABLE if packing else PyBUF_SIMPLE)
    cdef Py_buffer *view = &strided.view
    if dense.view.len != view.len:
        raise ValueError(
            f"the packed side has {dense.view.len} bytes, the array {view.len}")
    cdef int64_t shape[64]
    cdef int64_t strides[64]
    cdef int d
    for d in range(view.ndim):
        shape[d], strides[d] = view.shape[d], view.strides[d]
    with nogil:
        move(packing, dense.ptr, strided.ptr, view.ndim, shape, strides,
             <size_t>view.itemsize)
    return 0


def pack_buffer(out, array) -> None:
    """Copy a strided buffer into a contiguous one of as many bytes, in C order."""
    move_buffer(True, out, array)


def unpack_buffer(array, packed) -> None:
    """Copy contiguous memory, in C order, into a strided buffer of as many bytes."""
    move_buffer(False, packed, array)


def flatten_buffers(out, blocks) -> None:
    """Copy contiguous buffers into one, in order; out has exactly their bytes."""
    cdef BufferViews inputs = BufferViews(blocks, PyBUF_SIMPLE)
    cdef BufferView into = BufferView(out, PyBUF_WRITABLE)
    fill(inputs, &into.view)
    with nogil:
        cydist_flatten(into.ptr, <const char *const *>inputs.ptrs, inputs.nbytes, inputs.count)


def unflatten_buffers(blocks, flat) -> None:
    """Copy one contiguous buffer into many, in order; they have exactly its bytes."""
    cdef BufferViews outputs = BufferViews(blocks, PyBUF_WRITABLE)
    cdef BufferView source = BufferView(flat, PyBUF_SIMPLE)
    fill(outputs, &source.view)
    with nogil:
        cydist_unflatten(outputs.ptrs, source.ptr, outputs.nbytes, outputs.count)


cdef int fill(BufferViews blocks, Py_buffer *flat) except -1:
    cdef size_t i, total = 0
    for i in range(blocks.count):
        total += blocks.nbytes[i]
    if total != <size_t>flat.len:
        raise ValueError(f"the blocks have {total} bytes, the flat buffer {flat.len}")
    return 0

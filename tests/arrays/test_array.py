"""What an Array does with memory: packing, cutting, comparing."""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from cydist._native import Array, asarray, empty, overlapping, pack_part, unpack_part


def items(array: Array) -> bytes:
    """The elements in C order."""
    return bytes(memoryview(array.dense()))


def index_of(length: int) -> st.SearchStrategy[Any]:
    """What may stand in brackets for one dimension: any slice, or one element."""
    ends = st.one_of(st.none(), st.integers(-length - 1, length + 1))
    steps = st.sampled_from([None, 1, 2, 3, -1, -2, -3])
    slices = st.builds(slice, ends, ends, steps)
    return st.one_of(slices, st.integers(0, length - 1)) if length else slices


@st.composite
def views(draw: st.DrawFn, dtype: str = "") -> np.ndarray:
    """A view of an array of distinct bytes: sliced, reversed, transposed, of any size or none."""
    kind = np.dtype(dtype or draw(st.sampled_from(["u1", "<i2", "<f4", "<c16", "S3", "V5"])))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    count = int(np.prod(shape)) * kind.itemsize
    base = np.random.default_rng(count).bytes(count)
    array = np.frombuffer(bytearray(base), kind).reshape(shape)
    array = array[(*(draw(index_of(length)) for length in shape), ...)]
    return array.transpose(draw(st.permutations(range(array.ndim))))


@given(views())
@settings(deadline=None)
def test_dense_is_c_order(x: np.ndarray) -> None:
    """dense() holds the elements in C order, whatever the strides."""
    assert bytes(memoryview(asarray(x).dense())) == x.tobytes()


@given(views(), st.data())
@settings(deadline=None)
def test_a_part_is_packed_and_unpacked(x: np.ndarray, data: st.DataObject) -> None:
    """Any run of elements in C order, and no byte of any other element."""
    start = data.draw(st.integers(0, x.size))
    dense = empty(data.draw(st.integers(0, x.size - start)), asarray(x))
    flat = x.copy().reshape(-1)
    pack_part(dense, asarray(x), start)
    assert bytes(memoryview(dense)) == flat[start : start + dense.size].tobytes()
    flat[start : start + dense.size] = flat[start : start + dense.size][::-1].copy()
    memoryview(dense)[:] = flat[start : start + dense.size].tobytes()
    unpack_part(asarray(x), dense, start)
    assert x.tobytes() == flat.tobytes()


BYTES = np.zeros(6, "u1")


@pytest.mark.parametrize(
    ("dense", "start"),
    [
        pytest.param(empty(4), 3, id="too many"),
        pytest.param(empty(0), 7, id="past the end"),
        pytest.param(empty(2, asarray(np.zeros(1))), 0, id="another size of elements"),
        pytest.param(asarray(BYTES[::2]), 0, id="gaps in the part"),
    ],
)
def test_no_part_of_that_kind(dense: Array, start: int) -> None:
    """ValueError, and nothing is copied."""
    with pytest.raises(ValueError, match=r"cannot move elements|no range of size"):
        pack_part(dense, asarray(BYTES), start)


@given(views())
@settings(deadline=None)
def test_contiguous_is_numpys_flag(x: np.ndarray) -> None:
    """`contiguous` says what numpy's C_CONTIGUOUS says."""
    assert asarray(x).contiguous == x.flags.c_contiguous


@given(views())
@settings(deadline=None)
def test_dense_of_dense_is_itself(x: np.ndarray) -> None:
    """What is contiguous is not copied."""
    dense = asarray(x).dense()
    assert dense.dense() is dense


@given(views())
@settings(deadline=None)
def test_dense_keeps_what_it_is(x: np.ndarray) -> None:
    """A packed copy has the dtype, the shape and the size of the original."""
    array = asarray(x)
    dense = array.dense()
    assert (dense.dtype_name, dense.shape, dense.nbytes) == (
        array.dtype_name,
        array.shape,
        array.nbytes,
    )


@given(views())
@settings(deadline=None)
def test_copy_from_writes_its_elements_and_no_others(x: np.ndarray) -> None:
    """take() equals numpy's assignment, in the whole buffer under the view."""
    new = np.frombuffer(np.random.default_rng(1).bytes(x.nbytes), x.dtype).reshape(x.shape)
    under = x
    while isinstance(under.base, np.ndarray):
        under = under.base
    before = under.copy()
    asarray(x).copy_from(asarray(new))
    written = under.copy()
    under[...] = before
    x[...] = new
    assert written.tobytes() == under.tobytes()


def test_copy_from_of_itself_is_nothing() -> None:
    """An array that was not packed is written back without a check or a copy."""
    x = np.arange(3)
    x.flags.writeable = False
    array = asarray(x)
    array.copy_from(array)


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        pytest.param(
            np.zeros(3),
            np.zeros(4),
            "size 3, dtype float64, cannot take one of size 4, dtype float64",
            id="size",
        ),
        pytest.param(
            np.zeros(3), np.zeros(3, "i8"), "cannot take one of size 3, dtype int64", id="dtype"
        ),
        pytest.param(np.zeros(3), np.zeros(6)[::2], "not contiguous", id="strided source"),
        pytest.param(np.broadcast_to(0.0, 3), np.zeros(3), "read-only", id="read-only"),
    ],
)
def test_copy_from_refuses(target: np.ndarray, source: np.ndarray, message: str) -> None:
    """take() raises ValueError when the source does not fit."""
    with pytest.raises(ValueError, match=message):
        asarray(target).copy_from(asarray(source))


def test_bytes_of_an_array() -> None:
    """memoryview(array) is the memory itself, as bytes."""
    x = np.arange(3, dtype="i4")
    view = memoryview(asarray(x))
    view[4] = 9
    assert (x.tolist(), view.format, view.itemsize, view.shape) == ([0, 9, 2], "B", 1, (12,))


def test_bytes_of_nothing() -> None:
    """An empty array has zero bytes."""
    assert bytes(memoryview(asarray(np.zeros((0, 3))))) == b""


def test_bytes_of_read_only_memory() -> None:
    """The bytes of a read-only array are read-only."""
    assert memoryview(asarray(b"abc")).readonly


def test_bytes_of_strided_memory() -> None:
    """A strided array has no bytes in order: BufferError says to use dense()."""
    with pytest.raises(BufferError, match=r"not contiguous.*dense\(\)"):
        memoryview(asarray(np.arange(6)[::2]))


def test_an_array_is_not_made_by_hand() -> None:
    """Array() raises; asarray and empty make them."""
    with pytest.raises(TypeError, match="asarray"):
        Array()


def test_empty_is_bytes() -> None:
    """empty(n) is n bytes of writable memory, aligned to a cache line."""
    array = empty(100)
    assert (array.dtype_name, array.shape, array.writable, array.address % 64) == (
        "uint8",
        (100,),
        True,
        0,
    )


def test_empty_like_another() -> None:
    """empty(n, like) is n elements of the dtype of `like`, of one dimension."""
    array = empty(5, asarray(np.zeros((2, 2), "<M8[s]")))
    assert (array.dtype_name, array.dtype_hash, array.shape, array.nbytes) == (
        "<M8[s]",
        asarray(np.zeros(1, "<M8[s]")).dtype_hash,
        (5,),
        40,
    )


def test_no_memory_is_an_error() -> None:
    """More memory than there is: MemoryError with the number of bytes."""
    with pytest.raises(MemoryError, match=str(2**62)):
        empty(2**62)


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_blocks_are_equal_parts(p: int) -> None:
    """blocks(p) are p views of size // p elements, in order."""
    x = np.arange(12, dtype="i2").reshape(3, 4)
    assert [items(block) for block in asarray(x).blocks(p)] == [
        part.tobytes() for part in np.split(x.ravel(), p)
    ]


@pytest.mark.parametrize("p", [0, 5])
def test_blocks_refuse_what_does_not_divide(p: int) -> None:
    """A size that is no multiple of p: ValueError."""
    with pytest.raises(ValueError, match=f"an array of size 12 cannot be divided into {p}"):
        asarray(np.zeros(12)).blocks(p)


def test_blocks_of_nothing() -> None:
    """An empty array has p empty blocks."""
    assert [block.size for block in asarray(np.zeros(0)).blocks(3)] == [0, 0, 0]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_split_cuts_where_told(sizes: list[int]) -> None:
    """split(sizes) are views of those numbers of elements, in order."""
    x = np.arange(sum(sizes), dtype="f4")
    assert [items(part) for part in asarray(x).split(sizes)] == [
        part.tobytes() for part in np.split(x, np.cumsum(sizes)[:-1])
    ][: len(sizes)]


@pytest.mark.parametrize("sizes", [[1, 2], [5, -1], [], [2**64 + 4]], ids=str)
def test_split_refuses_other_sums(sizes: list[int]) -> None:
    """Sizes that do not make up the array: ValueError."""
    with pytest.raises(ValueError, match="do not make up 4"):
        asarray(np.zeros(4)).split(sizes)


@pytest.mark.parametrize("cut", [lambda a: a.blocks(2), lambda a: a.split([1, 1])])
def test_strided_memory_is_not_cut(cut: Any) -> None:
    """A strided array has no contiguous parts: ValueError."""
    with pytest.raises(ValueError, match="not contiguous"):
        cut(asarray(np.zeros(4)[::2]))


def test_parts_write_to_the_whole() -> None:
    """A part is the memory of the whole, and as writable."""
    x = np.zeros(4, "i4")
    asarray(x).blocks(2)[1].copy_from(asarray(np.array([7, 8], "i4")))
    assert x.tolist() == [0, 0, 7, 8]


def test_parts_keep_the_memory_alive() -> None:
    """A part outlives the array that it was cut from."""
    part = asarray(bytearray(range(10))).blocks(2)[1].blocks(5)[4]
    gc.collect()
    assert items(part) == b"\x09"


def test_memory_outlives_an_array_that_the_collector_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Array in a circle of garbage releases its buffer; nothing is said of a lost export."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: said.append(error))
    circle: list[Any] = [asarray(bytearray(8))]
    circle.append(circle)
    del circle
    gc.collect()
    assert not said


def test_more_than_4_gib() -> None:
    """Sizes and offsets are 64 bits wide."""
    # Pages are given when they are touched, so this takes one of them.
    no_reserve = 0x4000
    x = mmap.mmap(-1, 5 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    x[-1] = 7
    last = asarray(x).blocks(5 * 2**15)[-1]
    assert (asarray(x).nbytes, last.address - asarray(x).address, items(last)[-1]) == (
        5 * 2**30,
        5 * 2**30 - 2**15,
        7,
    )


def test_owner_is_what_was_passed() -> None:
    """`owner` is the user's object; of a part it is the object that was cut."""
    x = np.zeros(4)
    array = asarray(x)
    assert array.owner is x
    assert array.blocks(2)[0].owner is x


# Sharing memory.

X = np.zeros((6, 8))
RECORDS = np.zeros(4, "f4,f8")
APART = {
    "halves": (X[:3], X[3:]),
    "even and odd rows": (X[::2], X[1::2]),
    "even and odd elements": (X.ravel()[::2], X.ravel()[1::2]),
    "every third": (X.ravel()[::3], X.ravel()[2::3]),
    "reversed": (X.ravel()[::-2], X.ravel()[::2]),
    "columns": (X[:, :3], X[:, 3:]),
    "transposed columns": (X[:, :3].T, X[:, 3:].T),
    "quadrants": (X[:3, 4:], X[3:, :4]),
    "fields": (RECORDS["f0"], RECORDS["f1"]),
    "planes of the middle": (X.reshape(3, 4, 4)[:, :2], X.reshape(3, 4, 4)[:, 2:]),
    "empty": (X[:0], X),
    "others": (X, np.zeros(4)),
}
SHARING = {
    "itself": (X, X),
    "inside": (X, X[2]),
    "shifted by a row": (X[:4], X[3:]),
    "shifted by a byte": (X.view("u1").ravel()[:9], X.view("u1").ravel()[8:]),
    "that cross": (X[2], X[:, 2]),
    "common columns": (X[:, :4], X[:, 3:]),
    "every second and third": (X.ravel()[::2], X.ravel()[::3]),
    "transposed": (X, X.T),
}


@pytest.mark.parametrize(("a", "b"), APART.values(), ids=APART.keys())
def test_apart(a: np.ndarray, b: np.ndarray) -> None:
    """Slices that share no byte do not overlap, interleaved or not."""
    assert not asarray(a).overlaps(asarray(b))
    assert not asarray(b).overlaps(asarray(a))


@pytest.mark.parametrize(("a", "b"), SHARING.values(), ids=SHARING.keys())
def test_overlapping(a: np.ndarray, b: np.ndarray) -> None:
    """Arrays with a common byte overlap."""
    assert asarray(a).overlaps(asarray(b))
    assert asarray(b).overlaps(asarray(a))


@pytest.mark.parametrize("count", [2, 5, 40], ids=lambda n: f"{n} arrays")
def test_overlapping_pairs(count: int) -> None:
    """overlapping finds exactly the pairs, of few arrays and of many."""
    x = np.zeros(count + 1)
    rows = [asarray(x[i : i + 2]) for i in range(count)][::-1]
    assert sorted(overlapping(rows, count)) == [(i, i + 1) for i in range(count - 1)]
    assert sorted(overlapping(rows, 1)) == [(0, 1)]


@st.composite
def windows(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray:
    """Any strides over a buffer of bytes, overlapping or not."""
    itemsize = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    strides = tuple(draw(st.integers(-12, 12)) for _ in shape)
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    start = -low + draw(st.integers(0, 20))
    point = np.ndarray((), f"V{itemsize}", buffer, start)
    return as_strided(point, shape, strides)


BUFFER = np.zeros(200, "u1")


@given(windows(BUFFER), windows(BUFFER))
@settings(deadline=None, max_examples=500)
def test_apart_is_certain(a: np.ndarray, b: np.ndarray) -> None:
    """Where no overlap is reported, numpy's exact solver finds none."""
    if not asarray(a).overlaps(asarray(b)):
        assert not np.shares_memory(a, b)


@given(windows(BUFFER))
@settings(deadline=None, max_examples=500)
def test_no_self_overlap_is_certain(x: np.ndarray) -> None:
    """Where self_overlapping is False, no byte belongs to two elements."""
    array = asarray(x)
    if not array.self_overlapping:
        starts = [
            sum(i * s for i, s in zip(at, array.strides, strict=True))
            for at in itertools.product(*map(range, array.shape))
        ]
        used = [start + byte for start in starts for byte in range(array.itemsize)]
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param(np.broadcast_to(np.zeros(3), (2, 3)), True, id="broadcast"),
        pytest.param(np.broadcast_to(np.zeros(3), (1, 3)), False, id="broadcast to one"),
        pytest.param(np.broadcast_to(np.zeros(3), (0, 3)), False, id="broadcast to none"),
        pytest.param(np.lib.stride_tricks.sliding_window_view(np.zeros(5), 2), True, id="sliding"),
        pytest.param(np.zeros((3, 4, 5)).T[::-1, ::2], False, id="transposed"),
        pytest.param(np.zeros(()), False, id="0-d"),
    ],
)
def test_self_overlapping(x: np.ndarray, expected: bool) -> None:
    """Broadcast and sliding views share memory among their own elements, slices do not."""
    assert asarray(x).self_overlapping == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param(X, X, True, id="itself"),
        pytest.param(X, X.ravel(), True, id="another shape"),
        pytest.param(X, X.view("i8"), True, id="another dtype"),
        pytest.param(X[:, 1], X[:, 1], True, id="strided"),
        pytest.param(X[:, 0], X[0, :6], False, id="other strides"),
        pytest.param(X, X[:3], False, id="a part"),
        pytest.param(X, X.copy(), False, id="a copy"),
        pytest.param(X[:6, :6], X[:6, :6].T, False, id="transposed"),
    ],
)
def test_same_memory(a: np.ndarray, b: np.ndarray, expected: bool) -> None:
    """same_memory is true when every element lies where the other's does."""
    assert asarray(a).same_memory(asarray(b)) == expected


def test_extent_of_reversed_memory() -> None:
    """The extent reaches from the lowest address to the end of the highest element."""
    x = np.zeros(10)[8:2:-2]
    low = x.__array_interface__["data"][0] - 4 * 8
    assert asarray(x).extent == (low, low + 5 * 8)

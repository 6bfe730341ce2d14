"""Strided packing and flattening, against numpy."""

import numpy as np
import pytest
from extra_values import more
from hypothesis import given, settings
from hypothesis import strategies as st

from cydist._native import kernels

ITEMSIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 33, 40, 64, 100)


def numbered(shape, itemsize):
    """A C-ordered array of opaque elements whose bytes differ from their neighbours'."""
    count = np.arange(np.prod(shape, dtype=np.int64) * itemsize)
    pattern = (count * 7 + count // 256).astype(np.uint8)
    return pattern.view(f"V{itemsize}").reshape(shape)


@st.composite
def views(draw):
    """A base array and a view of it: steps, reversals, transposes, new axes."""
    shape = draw(st.lists(st.integers(0, 9), max_size=5))
    base = numbered(shape, draw(st.sampled_from(ITEMSIZES)))
    index = []
    for _ in shape:
        start = draw(st.none() | st.integers(0, 3))
        step = draw(st.sampled_from((1, 1, 1, -1, 2, -2, 3)))
        index.append(slice(start, None, step))
        if draw(st.integers(0, 4)) == 0:
            index.append(np.newaxis)
    view = base[(*index, ...)]
    return base, view.transpose(draw(st.permutations(range(view.ndim))))


def packed(array):
    """What the kernel packs an array into."""
    out = np.empty(array.nbytes, np.uint8)
    kernels.pack_buffer(out, array)
    return out.tobytes()


@settings(max_examples=400, deadline=None)
@given(views())
def test_pack_is_c_order(made):
    """Any view is packed into the bytes of its C-ordered copy."""
    _, view = made
    assert view.tobytes() == packed(view)


@settings(max_examples=400, deadline=None)
@given(views())
def test_unpack_writes_the_view_and_nothing_else(made):
    """Unpacking sets the elements of the view; the rest of its memory stays as it was."""
    base, view = made
    expected = base.copy()
    news = (255 - np.frombuffer(view.tobytes(), np.uint8)).astype(np.uint8)
    if view.size:
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        twin = np.ndarray(view.shape, view.dtype, expected, offset, view.strides)
        twin[...] = news.view(view.dtype).reshape(view.shape)
    kernels.unpack_buffer(view, news)
    assert expected.tobytes() == base.tobytes()


@pytest.mark.parametrize("itemsize", [1, 4, 12])
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["rows", "columns", "both"])
def test_pack_broadcast(itemsize, axes):
    """Strides of zero repeat memory."""
    array = numbered((3, 5), itemsize)
    view = [
        np.broadcast_to(array[:1], (40, 5)),
        np.broadcast_to(array[:, :1], (3, 70)),
        np.broadcast_to(array[:1, :1], (40, 70)),
    ][axes]
    assert view.tobytes() == packed(view)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("shape", [(33, 65), (64, 64), (100, 3), (3, 100), (1, 70)], ids=str)
def test_pack_transposed(itemsize, shape):
    """Transposed arrays go through tiles, whole and cut ones."""
    view = numbered(shape, itemsize).T
    assert view.tobytes() == packed(view)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 0, 1, 2), (2, 1, 0, 3), (3, 2, 1, 0)], ids=str)
def test_round_trip_of_permuted_axes(order):
    """What was packed from a permuted array is unpacked into another."""
    view = numbered((5, 34, 6, 37), 4).transpose(order)
    flat = np.frombuffer(packed(view), np.uint8)
    back = np.zeros((5, 34, 6, 37), view.dtype).transpose(order)
    kernels.unpack_buffer(back, flat)
    assert view.tobytes() == back.tobytes()


def test_most_dimensions():
    """As many dimensions as numpy has, none of which can be merged."""
    view = numbered((4,) * 8, 1)[(slice(None, None, 2),) * 8]
    view = view.reshape((1,) * 24 + view.shape)
    assert view.tobytes() == packed(view)


def test_scalar():
    """An array of no dimensions is one element."""
    assert np.array(258, "<i4").tobytes() == packed(np.array(258, "<i4"))


def on_a_line(shape, rest):
    """A numbered array of bytes that begins `rest` bytes after the begin of a cache line."""
    flat = numbered((int(np.prod(shape)) + 128,), 1).view(np.uint8)
    first = (rest - flat.__array_interface__["data"][0]) % 64
    return flat[first : first + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("order", ["forward", "backward", "rows", "far apart"])
@pytest.mark.parametrize("rest", [0, 3], ids=["at a line", "within a line"])
@pytest.mark.parametrize("run", [64, 5000, *more(100, 192, 300, 1024)])
@pytest.mark.parametrize("total", [3 << 20, 5 << 20], ids=["in the cache", "past the cache"])
def test_long_runs_of_large_arrays(total, run, rest, order):
    """Megabytes in runs of a cache line or more, with gaps, go both ways."""
    count = (total // run | 1) * (2 if order == "rows" else 1)
    row = (4 if order == "far apart" else 2) * run + (0 if rest == 0 else 8)
    whole = on_a_line((count, row), rest)
    base = whole[::-1] if order == "backward" else whole
    view = base[:, :run]
    if order == "rows":
        view = base[: count // 4 * 4].reshape(4, count // 4, -1)[:, ::2, :run]
    data = packed(view)
    assert view.tobytes() == data
    expected = whole.copy()
    kernels.unpack_buffer(view, np.frombuffer(data, np.uint8))
    assert np.array_equal(whole.view(np.uint8), expected.view(np.uint8))
    news = 255 - np.frombuffer(data, np.uint8)
    kernels.unpack_buffer(view, news)
    assert view.tobytes() == news.tobytes()
    assert int((whole.view(np.uint8) != expected.view(np.uint8)).sum()) == view.size


def test_misaligned():
    """Elements may lie at odd addresses."""
    records = np.zeros(50, [("a", "u1"), ("b", "<f8")])
    records["b"] = np.arange(50)
    assert np.arange(50.0).tobytes() == packed(records["b"])


@pytest.mark.parametrize("behind", [-9, -1, 0, 1, 8, 15, 16, 4100], ids="{} behind".format)
@pytest.mark.parametrize("nbytes", [1023, 1024, 1025, 4096, 70_001])
def test_copies_wherever_they_begin(nbytes, behind):
    """All bytes are copied, and no other is written, however far within a page the target begins
    behind the source; so near, long copies are made in pieces."""
    page = 4096
    memory = np.zeros(nbytes + 4 * page, np.uint8)
    start = -memory.ctypes.data % page + page
    source = numbered((nbytes + 2 * page,), 1).view(np.uint8)
    begin = -source.ctypes.data % page
    blocks = [source[begin : begin + nbytes]]
    kernels.flatten_buffers(memory[start + behind : start + behind + nbytes], blocks)
    expected = np.zeros_like(memory)
    expected[start + behind : start + behind + nbytes] = blocks[0]
    assert np.array_equal(expected, memory)


SIZES = st.lists(st.integers(0, 200) | st.sampled_from((0, 1, 4, 16, 64, 65, 5000)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_flatten_and_back(sizes):
    """Blocks lie in the flat buffer in order, and come back whole."""
    blocks = [numbered((size,), 1).view(np.uint8) + number for number, size in enumerate(sizes)]
    blocks = [block.astype(np.uint8) for block in blocks]
    flat = np.empty(sum(sizes), np.uint8)
    kernels.flatten_buffers(flat, blocks)
    back = [np.zeros(size, np.uint8) for size in sizes]
    kernels.unflatten_buffers(back, flat)
    assert b"".join(block.tobytes() for block in blocks) == flat.tobytes()
    assert [block.tobytes() for block in blocks] == [block.tobytes() for block in back]


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.pack_buffer(bytearray(7), b"12345678"),
        lambda: kernels.unpack_buffer(bytearray(8), b"1234567"),
        lambda: kernels.flatten_buffers(bytearray(7), [b"1234", b"5678"]),
        lambda: kernels.unflatten_buffers([bytearray(4), bytearray(4)], b"1234567"),
    ],
    ids=["pack", "unpack", "flatten", "unflatten"],
)
def test_sizes_must_agree(call):
    """A side that is too short is refused, with both sizes in the message."""
    with pytest.raises(ValueError, match=r"(?=.*\b7\b)(?=.*\b8\b)"):
        call()


def test_read_only_outputs_are_refused():
    """bytes are not written to."""
    with pytest.raises(BufferError):
        kernels.pack_buffer(b"1234", b"5678")

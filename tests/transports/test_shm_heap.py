"""A rank's part of the shared memory: what is given out of it for arrays, and taken back."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist import _native

TOKEN = bytes(range(32))
PAGE = 4096
PART = 64 * PAGE


def two_parts() -> tuple[_native.SharedMemory, list[_native.Heap]]:
    """Memory of two ranks, and what gives arrays to each."""
    memory = _native.SharedMemory.create(2, 4 << 20, TOKEN, PART)
    return memory, [memory.heap(place) for place in range(2)]


def view(held: _native.HeapBuffer) -> np.ndarray:
    return np.frombuffer(held, np.uint8)


def committed(memory: _native.SharedMemory) -> int:
    """Bytes of the memory that have pages."""
    return os.fstat(memory.fd).st_blocks * 512


@given(st.lists(st.one_of(st.integers(0, 20 * PAGE), st.integers(-8, -1)), max_size=60))
def test_what_is_held_never_overlaps(steps: list[int]) -> None:
    """Whatever is made and dropped, arrays begin at pages, are zero, and touch no other's bytes.

    A number below zero drops one of those that are held.
    """
    _memory, heaps = two_parts()
    held: list[tuple[_native.HeapBuffer, int]] = []
    one: _native.HeapBuffer | None
    made: _native.HeapBuffer | None
    for number, step in enumerate(steps):
        if step < 0:
            if held:
                del held[step % len(held)]
            continue
        try:
            made = heaps[number % 2].allocate(step)
        except MemoryError:
            assert sum(one.nbytes for one, _ in held) + step > PART // 4
            continue
        assert view(made).ctypes.data % PAGE == 0
        assert not view(made).any()
        mark = number % 255 + 1
        view(made)[:] = mark
        held.append((made, mark))
    for one, mark in held:
        assert (view(one) == mark).all()
    one = made = None
    held.clear()
    assert [heap.left() for heap in heaps] == [PART, PART]


@given(st.permutations(range(8)))
def test_pieces_grow_together_again(order: list[int]) -> None:
    """Dropped in any order, neighbours become one piece, of the whole part in the end."""
    _memory, heaps = two_parts()
    held = {number: heaps[0].allocate(8 * PAGE) for number in range(8)}
    with pytest.raises(MemoryError):
        heaps[0].allocate(1)
    for number in order:
        del held[number]
    assert heaps[0].allocate(PART).nbytes == PART


def test_pages_go_back_to_the_host() -> None:
    """What an array took is free for every rank once nobody holds it."""
    memory, heaps = two_parts()
    before = committed(memory)
    made = heaps[1].allocate(16 * PAGE)
    assert committed(memory) == before + 16 * PAGE
    del made
    assert committed(memory) == before


def test_a_view_keeps_it() -> None:
    """The memory stays as long as anything looks at it."""
    _memory, heaps = two_parts()
    part = np.frombuffer(heaps[0].allocate(4 * PAGE), np.float32)[100:200:2]
    part[:] = 7
    assert heaps[0].left() == PART - 4 * PAGE
    assert (part == 7).all()
    del part
    assert heaps[0].left() == PART


def test_ranks_see_what_others_write() -> None:
    """It is one memory: another mapping of it shows the same bytes at the same place."""
    memory, heaps = two_parts()
    other = _native.SharedMemory.attach(os.dup(memory.fd), TOKEN).heap(1)
    mine, same = heaps[1].allocate(8), other.allocate(8)
    assert mine.offset == same.offset
    view(mine)[:] = range(8)
    assert view(same).tolist() == list(range(8))


@pytest.mark.parametrize("nbytes", [PART + 1, 1 << 63, (1 << 64) - 1])
def test_more_than_there_is(nbytes: int) -> None:
    """What no part could ever hold is refused, and the heap stays as it was."""
    _memory, heaps = two_parts()
    with pytest.raises(MemoryError, match=f"{nbytes} bytes are more than"):
        heaps[0].allocate(nbytes)
    assert heaps[0].left() == PART


def test_a_host_without_memory() -> None:
    """What the kernel refuses to fill with pages is an error at once, not a signal later."""
    memory = _native.SharedMemory.create(1, 4 << 20, TOKEN, PART)
    with open(os.devnull) as nothing:
        heap = _native.Heap(memory, nothing.fileno(), 0, 0, PART)
        with pytest.raises(MemoryError, match="no shared memory for an array of 8 bytes"):
            heap.allocate(8)
    assert heap.left() == PART


def test_a_forked_child_gives_nothing_back() -> None:
    """A child that drops what it inherited leaves its parent's memory alone."""
    memory, heaps = two_parts()
    made = heaps[0].allocate(PAGE)
    view(made)[:] = 9
    before = committed(memory)
    child = os.fork()
    if child == 0:
        del made
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert committed(memory) == before
    assert (view(made) == 9).all()


@pytest.mark.parametrize("part", [100, 1 << 46], ids=["no pages", "too large"])
def test_parts(part: int) -> None:
    """A part of no whole pages, or larger than there are addresses, is refused."""
    with pytest.raises(ValueError, match="no shared memory"):
        _native.SharedMemory.create(2, 4 << 20, TOKEN, part)

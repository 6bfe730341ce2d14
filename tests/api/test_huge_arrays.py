"""More than 2**32 elements and bytes. Deselected unless asked for: scripts/test-heavy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

COUNT = 2**32 + 3
PATTERN = np.arange(251 * 8192, dtype=np.uint64).astype("u1") % np.uint8(251)
DEADLINE = 800.0


@pytest.fixture(params=["inproc", "tcp", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    """Windows and sockets."""
    return str(request.param)


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in pieces of the pattern's length; the last is shorter."""
    return (array[at : at + PATTERN.size] for at in range(0, array.size, PATTERN.size))


def filled(times: int) -> np.ndarray:
    """4 GiB and 3 bytes: the pattern again and again, each byte multiplied, modulo 256."""
    array = np.empty(COUNT, "u1")
    pattern = PATTERN * np.uint8(times)
    for chunk in chunks(array):
        chunk[...] = pattern[: chunk.size]
    return array


def holds(array: np.ndarray, times: int) -> bool:
    """Is the array as `filled` makes it, to the last byte?"""
    pattern = PATTERN * np.uint8(times)
    return all(np.array_equal(chunk, pattern[: chunk.size]) for chunk in chunks(array))


def test_broadcast(backend: str) -> None:
    """Every byte of the root's array arrives."""

    def body(rank: int) -> bool:
        x = filled(1) if rank == 1 else np.zeros(COUNT, "u1")
        dist.broadcast(x, 1)
        return holds(x, 1)

    assert [True, True] == run_threads(body, 2, backend, DEADLINE)


def test_all_reduce(backend: str) -> None:
    """Every element is reduced once."""

    def body(rank: int) -> bool:
        x = filled(1 + 2 * rank)
        dist.all_reduce(x)
        return holds(x, 4)

    assert [True, True] == run_threads(body, 2, backend, DEADLINE)


def test_send_and_recv(backend: str) -> None:
    """One message is as long as memory allows."""

    def body(rank: int) -> bool:
        if rank == 0:
            dist.send(filled(3), 1)
            return True
        x = np.zeros(COUNT, "u1")
        dist.recv(x, 0)
        return holds(x, 3)

    assert [True, True] == run_threads(body, 2, backend, DEADLINE)


def test_gather_and_scatter_of_uneven_blocks(backend: str) -> None:
    """A block of 4 GiB beside one of a single byte."""

    def body(rank: int) -> bool:
        own = filled(5) if rank else np.full(1, 7, "u1")
        outputs = None if rank else [np.zeros(1, "u1"), np.zeros(COUNT, "u1")]
        dist.gather(own, outputs, 0)
        dist.scatter(own, outputs, 0)
        return holds(own, 5) if rank else own[0] == 7 and holds(outputs[1], 5)

    assert [True, True] == run_threads(body, 2, backend, DEADLINE)


def test_strided(backend: str) -> None:
    """Packing counts beyond 2**31 too: 2**31 + 1 elements, every second byte of 4 GiB."""

    def body(rank: int) -> bool:
        memory = np.zeros(COUNT - 1, "u1")
        x = memory[::2]
        x[...] = rank + 1
        dist.all_reduce(x)
        return bool((x == 3).all()) and not memory[1::2].any()

    assert [True, True] == run_threads(body, 2, backend, DEADLINE)

"""The arrays of a case: inputs whose sums are exact in any order, and the check of results."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

# Values repeat after a prime number of elements, so that no block looks like another.
PERIOD = 65521
# Sums of values below this are exact in every dtype for as many ranks as one host has.
BOUND = 4

# The ranks whose contributions a rank's array then holds.
SUMMED_IN_PLACE: Mapping[str, Callable[[int, int], range]] = {
    "all_reduce": lambda rank, ranks: range(ranks),
    "reduce": lambda rank, ranks: range(ranks),
    "scan": lambda rank, ranks: range(rank + 1),
    "exscan": lambda rank, ranks: range(rank or 1),
}
IN_PLACE = frozenset({"broadcast", *SUMMED_IN_PLACE})


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype by its name, those of ml_dtypes too.

    Raises ValueError if it cannot be summed.
    """
    module: Any = np
    if name.startswith(("bfloat", "float8")):
        try:
            module = importlib.import_module("ml_dtypes")
        except ImportError:
            raise ValueError(f"dtype {name!r} needs ml_dtypes: pip install ml_dtypes") from None
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or np.dtype(kind).kind not in "iufcV":
        raise ValueError(f"no dtype {name!r} whose sums could be checked")
    return np.dtype(kind)


Empty = Callable[[int, np.dtype[Any]], np.ndarray[Any, Any]]


class Buffers:
    """A rank's arrays for one op.

    Args:
        empty: Makes them; takes numpy.empty's arguments.

    Attributes:
        send: Its contribution; for in-place ops the same memory as `recv`.
        recv: Its result.
    """

    def __init__(
        self, op: str, count: int, dtype: str, rank: int, ranks: int, empty: Empty = np.empty
    ) -> None:
        self.op, self.rank, self.ranks = op, rank, ranks
        self.dtype = dtype_of(dtype)
        block = count // ranks
        self.send = empty(block if op in ("all_gather", "gather") else count, self.dtype)
        size = block if op in ("reduce_scatter", "scatter") else count
        self.recv = self.send if op in IN_PLACE else empty(size, self.dtype)
        self.send.fill(0)
        self.recv.fill(0)

    def fill(self, salt: int) -> None:
        """Write new inputs, equal on every run, and overwrite earlier results."""
        self.recv.fill(0)
        if self.op not in ("broadcast", "scatter") or self.rank == 0:
            _write(self.send, values(self.rank, salt).astype(self.dtype), 0)

    def fill_unchanging(self, salt: int) -> None:
        """Write inputs that a loop of calls does not change: in-place reductions add zeros."""
        if self.op in SUMMED_IN_PLACE:
            self.recv.fill(0)
        else:
            self.fill(salt)

    def wrong(self, salt: int, settled: bool = False) -> int:
        """Return how many elements of the result are wrong, after a fill and a call.

        A result for rank 0 only is not checked on other ranks, where libraries differ.
        """
        if self.rank > 0 and self.op in ("reduce", "gather"):
            return 0
        if self.op in SUMMED_IN_PLACE:
            total = self._sum(salt, SUMMED_IN_PLACE[self.op](self.rank, self.ranks))
            return _differing(self.recv, np.zeros_like(total) if settled else total, 0)
        if self.op == "reduce_scatter":
            total = self._sum(salt, range(self.ranks))
            return _differing(self.recv, total, self.rank * self.recv.size)
        if self.op == "scatter":
            expected = values(0, salt).astype(self.dtype)
            return _differing(self.recv, expected, self.rank * self.recv.size)
        if self.op in ("all_gather", "all_to_all", "gather"):
            start = self.rank * (self.recv.size // self.ranks) if self.op == "all_to_all" else 0
            blocks = np.split(self.recv, self.ranks)
            return sum(
                _differing(block, values(source, salt).astype(self.dtype), start)
                for source, block in enumerate(blocks)
            )
        if (self.op == "pingpong" and self.rank > 1) or (self.op == "one_way" and self.rank != 1):
            return 0
        return _differing(self.recv, values(0, salt).astype(self.dtype), 0)

    def _sum(self, salt: int, ranks: range) -> np.ndarray[Any, Any]:
        total = sum(values(rank, salt) for rank in ranks)
        return np.asarray(total).astype(self.dtype)


def values(rank: int, salt: int) -> np.ndarray[Any, Any]:
    """Return the (PERIOD,) values that `rank` contributes repeatedly."""
    return (np.arange(PERIOD) * (2 * rank + 3) // 7 + 5 * rank + salt) % BOUND


def _pieces(size: int, start: int) -> Iterator[tuple[slice, slice]]:
    """Return where elements 0..size of an array lie in the period, when the first is number
    `start`."""
    low = 0
    while low < size:
        offset = (start + low) % PERIOD
        length = min(size - low, PERIOD - offset)
        yield slice(low, low + length), slice(offset, offset + length)
        low += length


def _write(array: np.ndarray[Any, Any], period: np.ndarray[Any, Any], start: int) -> None:
    for here, there in _pieces(array.size, start):
        array[here] = period[there]


def _differing(array: np.ndarray[Any, Any], period: np.ndarray[Any, Any], start: int) -> int:
    return sum(
        int(np.count_nonzero(array[here] != period[there]))
        for here, there in _pieces(array.size, start)
    )

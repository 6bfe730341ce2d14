"""The measured cases (an op, a size, a dtype), and nccl-tests' bandwidths.

Bytes count as in nccl-tests' PERFORMANCE.md: the array of ops that reduce or broadcast one, and for
ops that move blocks the larger side, which is all ranks' blocks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPS = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "pingpong",
)  # fmt: skip
# Only on request.
MORE_OPS = ("reduce", "gather", "scatter", "scan", "exscan", "one_way")
IN_BLOCKS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})


@dataclass(frozen=True)
class Case:
    """One row of the table: `count` elements of `dtype`; a barrier has none."""

    op: str
    count: int
    dtype: str
    nbytes: int


def cases(
    ops: Sequence[str], sizes: Sequence[int], dtype: str, itemsize: int, ranks: int
) -> Iterator[Case]:
    """Return every op at every size (bytes), in whole elements and equal blocks of at least one
    element."""
    for op in ops:
        if op == "barrier":
            yield Case(op, 0, dtype, 0)
            continue
        unit = ranks if op in IN_BLOCKS else 1
        counts = [max(1, size // itemsize // unit) * unit for size in sizes]
        for count in dict.fromkeys(counts):
            yield Case(op, count, dtype, count * itemsize)


def algbw(case: Case, seconds: float) -> float:
    """Return bytes per second: the cell's bytes divided by the time of a call.

    A ping-pong's time is for both ways, so its bytes count twice.
    """
    return (2 if case.op == "pingpong" else 1) * case.nbytes / seconds


def busbw(case: Case, seconds: float, ranks: int) -> float:
    """Return the bytes per second on each rank's link, for the best possible algorithm."""
    share = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * share, **dict.fromkeys(IN_BLOCKS, share)}.get(case.op, 1.0)
    return factor * algbw(case, seconds)

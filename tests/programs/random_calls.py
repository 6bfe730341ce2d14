"""A rank that makes random calls back to back, and compares every result bit for bit.

    random_calls.py SEED CALLS [BACKEND]

All ranks draw the same calls from one seed: which collective, of which group, type, operation,
root and size, and whether others begin before it is waited for. Says `ok` at the end.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cydist as dist

COUNTS = (0, 1, 3, 100, 1000, 5000, 70_000)  # elements of an array or of a block
LONG_COUNT = 700_000  # of few calls: of most types so long that they go in stretches
LONG_SHARE = 0.03
DTYPES = ("int64", "float32", "float16", "uint8")
OPS = {"SUM": np.add.reduce, "MAX": np.maximum.reduce, "MIN": np.minimum.reduce}
MOST_AT_ONCE = 3


@dataclass
class Members:
    """A group, and this rank in it."""

    group: Any
    ranks: list[int]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Drawn:
    """One call, the same on all ranks."""

    number: int
    collective: str
    count: int
    dtype: str
    op: str
    root: int
    uneven: bool

    def values(self, rank: int, salt: int, count: int) -> np.ndarray[Any, Any]:
        """Return what a rank gives: small integers, whose sums are exact in every type."""
        base = self.number * 7 + rank * 13 + salt * 5
        return ((np.arange(count) * 3 + base) % 19).astype(self.dtype)

    def sizes(self, size: int) -> list[int]:
        """Return the elements of each rank's block."""
        if not self.uneven:
            return [self.count] * size
        return [self.count * ((7 * rank + self.number) % 3) // 2 for rank in range(size)]

    def pair(self, source: int, to: int) -> int:
        """Return the elements that a rank has for another."""
        return self.count * ((source + 2 * to + self.number) % 4) // 3 if self.uneven else (
            self.count
        )  # fmt: skip


Check = Callable[[], None]


def begin(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    """Begin a call; return its Work and what compares its results."""
    return globals()[f"begin_{drawn.collective}"](drawn, of)


def same(drawn: Drawn, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    assert got.tobytes() == want.tobytes(), f"{drawn}: {got[:8]} instead of {want[:8]}"


def same_blocks(
    drawn: Drawn, got: Sequence[np.ndarray[Any, Any]] | None,
    want: Sequence[np.ndarray[Any, Any]] | None,
) -> None:  # fmt: skip
    for pair in zip(got or (), want or (), strict=True):
        same(drawn, *pair)


def all_given(drawn: Drawn, of: Members, count: int, salt: int = 0) -> list[np.ndarray[Any, Any]]:
    return [drawn.values(rank, salt, count) for rank in range(of.size)]


def reduced(drawn: Drawn, arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return OPS[drawn.op](np.stack(arrays)).astype(drawn.dtype)


def operation(drawn: Drawn) -> Any:
    return getattr(dist.ReduceOp, drawn.op)


def begin_broadcast(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    want = drawn.values(drawn.root, 0, drawn.count)
    x = want.copy() if of.rank == drawn.root else np.full_like(want, 77)
    work = dist.broadcast(x, group=of.group, group_src=drawn.root, async_op=True)
    return work, lambda: same(drawn, x, want)


def begin_all_reduce(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    given = all_given(drawn, of, drawn.count)
    x = given[of.rank].copy()
    work = dist.all_reduce(x, operation(drawn), of.group, async_op=True)
    return work, lambda: same(drawn, x, reduced(drawn, given))


def begin_reduce(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    given = all_given(drawn, of, drawn.count)
    x = given[of.rank].copy()
    work = dist.reduce(x, op=operation(drawn), group=of.group, group_dst=drawn.root, async_op=True)
    want = reduced(drawn, given) if of.rank == drawn.root else given[of.rank]
    return work, lambda: same(drawn, x, want)


def begin_all_gather(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    sizes = drawn.sizes(of.size)
    want = [drawn.values(rank, 0, sizes[rank]) for rank in range(of.size)]
    into = [np.full_like(each, 77) for each in want]
    work = dist.all_gather(into, want[of.rank].copy(), of.group, async_op=True)
    return work, lambda: same_blocks(drawn, into, want)


def begin_gather(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    sizes = drawn.sizes(of.size)
    want = [drawn.values(rank, 0, sizes[rank]) for rank in range(of.size)]
    into = [np.full_like(each, 77) for each in want] if of.rank == drawn.root else None
    work = dist.gather(
        want[of.rank].copy(), into, group=of.group, group_dst=drawn.root, async_op=True
    )
    return work, lambda: same_blocks(drawn, into, want if into else None)


def begin_scatter(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    sizes = drawn.sizes(of.size)
    blocks = [drawn.values(drawn.root, to, sizes[to]) for to in range(of.size)]
    into = np.full_like(blocks[of.rank], 77)
    work = dist.scatter(
        into, blocks if of.rank == drawn.root else None, group=of.group, group_src=drawn.root,
        async_op=True,
    )  # fmt: skip
    return work, lambda: same(drawn, into, blocks[of.rank])


def begin_reduce_scatter(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    sizes = drawn.sizes(of.size)
    mine = [drawn.values(of.rank, to, sizes[to]) for to in range(of.size)]
    want = reduced(drawn, all_given(drawn, of, sizes[of.rank], of.rank))
    into = np.full_like(want, 77)
    work = dist.reduce_scatter(into, mine, operation(drawn), of.group, async_op=True)
    return work, lambda: same(drawn, into, want)


def begin_all_to_all(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    mine = [drawn.values(of.rank, to, drawn.pair(of.rank, to)) for to in range(of.size)]
    want = [drawn.values(source, of.rank, drawn.pair(source, of.rank))
            for source in range(of.size)]  # fmt: skip
    if drawn.uneven:
        into = np.full(sum(map(len, want)), 77, drawn.dtype)
        work = dist.all_to_all_single(
            into, np.concatenate(mine), list(map(len, want)), list(map(len, mine)), of.group,
            async_op=True,
        )  # fmt: skip
        return work, lambda: same(drawn, into, np.concatenate(want))
    blocks = [np.full_like(each, 77) for each in want]
    work = dist.all_to_all(blocks, mine, of.group, async_op=True)
    return work, lambda: same(drawn, np.concatenate(blocks), np.concatenate(want))


def begin_barrier(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    return dist.barrier(of.group, async_op=True), lambda: None


def begin_scan(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    given = all_given(drawn, of, drawn.count)
    x = given[of.rank].copy()
    work = dist.scan(x, operation(drawn), of.group, async_op=True)
    return work, lambda: same(drawn, x, reduced(drawn, given[: of.rank + 1]))


def begin_exscan(drawn: Drawn, of: Members) -> tuple[Any, Check]:
    given = all_given(drawn, of, drawn.count)
    x = given[of.rank].copy()
    work = dist.exscan(x, operation(drawn), of.group, async_op=True)
    want = reduced(drawn, given[: of.rank]) if of.rank else given[0]
    return work, lambda: same(drawn, x, want)


COLLECTIVES = [name.removeprefix("begin_") for name in list(globals())
               if name.startswith("begin_")]  # fmt: skip


def groups(rank: int, size: int) -> list[Members]:
    """Return the world, and those of some groups that cut hosts which have this rank."""
    world = list(range(size))
    found = [Members(None, world, rank)]
    for ranks in (world[1:], world[:-1], world[::-1]):
        made = dist.new_group(ranks)
        if rank in ranks:
            found.append(Members(made, ranks, dist.get_rank(made)))
        else:
            found.append(Members(made, ranks, -1))
    return found


def main(seed: int, calls: int, backend: str = "tcp") -> None:
    """Make the calls."""
    dist.init_process_group(backend, timeout=60)
    draw = random.Random(seed)
    known = groups(dist.get_rank(), dist.get_world_size())
    begun: list[tuple[Any, Check]] = []
    for number in range(calls):
        of = draw.choice(known)
        count = LONG_COUNT if draw.random() < LONG_SHARE else draw.choice(COUNTS)
        drawn = Drawn(
            number, draw.choice(COLLECTIVES), count, draw.choice(DTYPES),
            draw.choice(list(OPS)), draw.randrange(of.size), draw.random() < 0.3,
        )  # fmt: skip
        if of.rank >= 0:
            begun.append(begin(drawn, of))
        if draw.random() < 0.6 or len(begun) >= MOST_AT_ONCE:
            for work, check in begun:
                work.wait()
                check()
            begun.clear()
    for work, check in begun:
        work.wait()
        check()
    dist.barrier()
    dist.destroy_process_group()
    print("ok", flush=True)


main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

"""A rank that measures what its calls take beyond their arrays: the extra bytes of each, as JSON.

Usage: memory.py BYTES [CALL...], under a launcher; all calls unless some are named. Memory that is
given back is given to the system at once (the test sets malloc's thresholds), so that no call
lives on what another left behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np

import cydist as dist
from cydist.bench.rank_loop import resident

NBYTES = int(sys.argv[1])
COUNT = NBYTES // 4


def floats(count: int) -> np.ndarray:
    """(count,) elements in memory that is there."""
    return np.ones(count, np.float32)


def strided() -> np.ndarray:
    """(COUNT,) elements with gaps."""
    return np.ones((COUNT, 2), np.float32)[:, 0]


def many(count: int) -> list[np.ndarray]:
    """Eight arrays that make `count` elements."""
    return [floats(count // 8) for _ in range(8)]


def by_name(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """What makes each call's arrays and returns the call: NBYTES on the larger side."""
    part = COUNT // size
    # Rank 0 has most to send, and to receive.
    cuts = [COUNT - (size - 1) * (part // 2), *[part // 2] * (size - 1)]

    def root(make: Callable[[], object]) -> object:
        return make() if rank == 0 else None

    def parts() -> list[np.ndarray]:
        return [floats(part) for _ in range(size)]

    def uneven() -> list[np.ndarray]:
        return [floats(count) for count in cuts]

    def all_to_all() -> Callable[[], object]:
        into = [floats(cuts[rank]) for _ in range(size)]
        return bind(dist.all_to_all, into, uneven())

    def ping() -> Callable[[], object]:
        return bind(dist.send if rank == 0 else dist.recv, floats(COUNT), 1 - rank)

    return {
        "all_reduce": lambda: bind(dist.all_reduce, floats(COUNT)),
        "reduce": lambda: bind(dist.reduce, floats(COUNT), 0),
        "broadcast": lambda: bind(dist.broadcast, floats(COUNT), 0),
        "scan": lambda: bind(dist.scan, floats(COUNT)),
        "gather": lambda: bind(dist.gather, floats(part), root(parts), 0),
        "scatter": lambda: bind(dist.scatter, floats(part), root(parts), 0),
        "all_gather, uneven": lambda: bind(dist.all_gather, uneven(), floats(cuts[rank])),
        "reduce_scatter": lambda: bind(dist.reduce_scatter, floats(part), parts()),
        "all_to_all, uneven": all_to_all,
        "send and recv": ping,
        "all_reduce, strided": lambda: bind(dist.all_reduce, strided()),
        "broadcast, strided": lambda: bind(dist.broadcast, strided(), 0),
        "reduce, strided": lambda: bind(dist.reduce, strided(), 0),
        "scan, strided": lambda: bind(dist.scan, strided()),
        "all_to_all_single, strided": lambda: bind(
            dist.all_to_all_single, floats(COUNT), strided()
        ),
        "all_to_all_single, in place": lambda: exchanged(floats(COUNT)),
        "reduce_scatter_tensor, in place": lambda: reduced(floats(COUNT), rank, part),
        "all_reduce_coalesced": lambda: bind(dist.all_reduce_coalesced, many(COUNT)),
    }


def exchanged(x: np.ndarray) -> Callable[[], object]:
    """The call that exchanges the parts of an array in place."""
    return bind(dist.all_to_all_single, x, x)


def reduced(x: np.ndarray, rank: int, part: int) -> Callable[[], object]:
    """The call that reduces into this rank's part of the array."""
    return bind(dist.reduce_scatter_tensor, x[rank * part : (rank + 1) * part], x)


def bind(call: Callable[..., object], *given: object) -> Callable[[], object]:
    """The call, to be made later."""
    return lambda: call(*given)


def main() -> None:
    """Print {call: bytes} of the rank that took most, on rank 0."""
    dist.init_process_group()
    dist.barrier()
    found = {}
    known = by_name(dist.get_rank(), dist.get_world_size())
    for name in sys.argv[2:] or known:
        call = known[name]()
        before = resident("VmRSS", reset_peak=True)
        call()  # type: ignore[operator]
        extra = np.array([resident("VmHWM") - before])
        del call
        dist.all_reduce(extra, dist.ReduceOp.MAX)
        found[name] = int(extra[0])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

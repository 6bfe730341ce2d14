"""A rank of several hosts that makes calls in which one rank differs, each in a group of its own.

    differing_calls.py BYTES [BACKEND]

Prints a JSON object: for each case the class of this rank's error, or "none".
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cydist as dist

Call = Callable[[Any, np.ndarray[Any, Any], Any, int], None]


def reduce_scatter(group: Any, x: np.ndarray[Any, Any], op: Any, root: int) -> None:
    size = dist.get_world_size()
    dist.reduce_scatter_tensor(np.empty_like(x), np.concatenate([x] * size), op, group)


def all_gather(group: Any, x: np.ndarray[Any, Any], op: Any, root: int) -> None:
    dist.all_gather_into_tensor(np.concatenate([x] * dist.get_world_size()), x, group)


def all_to_all(group: Any, x: np.ndarray[Any, Any], op: Any, root: int) -> None:
    whole = np.concatenate([x] * dist.get_world_size())
    dist.all_to_all_single(np.empty_like(whole), whole, group=group)


def gather(group: Any, x: np.ndarray[Any, Any], op: Any, root: int) -> None:
    into = [np.empty_like(x) for _ in range(dist.get_world_size())]
    dist.gather(x, into if dist.get_rank() == root else None, root, group)


def scatter(group: Any, x: np.ndarray[Any, Any], op: Any, root: int) -> None:
    blocks = [x] * dist.get_world_size()
    dist.scatter(np.empty_like(x), blocks if dist.get_rank() == root else None, root, group)


CALLS: dict[str, Call] = {
    "broadcast": lambda group, x, op, root: dist.broadcast(x, root, group),
    "all_reduce": lambda group, x, op, root: dist.all_reduce(x, op, group),
    "reduce": lambda group, x, op, root: dist.reduce(x, root, op, group),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "scan": lambda group, x, op, root: dist.scan(x, op, group),
    "exscan": lambda group, x, op, root: dist.exscan(x, op, group),
    "barrier": lambda group, x, op, root: dist.barrier(group),
}  # fmt: skip
WITHOUT = {"op": ("broadcast", "all_gather", "all_to_all", "gather", "scatter", "barrier"),
           "root": [name for name in CALLS if name not in ("broadcast", "reduce", "gather",
                                                           "scatter")],
           "count": ("barrier",), "dtype": ("barrier",), "call": ()}  # fmt: skip


def outcome(name: str, kind: str, group: Any, odd: bool, root: int, nbytes: int) -> str:
    """Make the call, differently if this rank is the odd one; return how it ended."""
    dtype, op, count = np.int64, dist.ReduceOp.SUM, nbytes // 8
    if odd:
        match kind:
            case "count":
                count += 1
            case "dtype":
                dtype = np.float64
            case "op":
                op = dist.ReduceOp.MAX
            case "root":
                root = (root + 1) % dist.get_world_size()
            case "call":
                name = "barrier" if name != "barrier" else "all_reduce"
    try:
        CALLS[name](group, np.ones(count, dtype), op, root)
        # Ranks that only send learn it in the next call, or, if nothing had come when that began,
        # in the one after it. The end of a group waits a second for late ones.
        for _ in range(2):
            dist.barrier(group)
        dist.destroy_process_group(group)
    except dist.DistError as error:
        return type(error).__name__
    return "none"


def main(nbytes: int, backend: str = "tcp") -> None:
    """Make the calls, with another odd rank and another root in each."""
    faulthandler.dump_traceback_later(50, exit=True)  # before the test gives up
    dist.init_process_group(backend, timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [(name, kind) for name in CALLS for kind in WITHOUT if name not in WITHOUT[kind]]
    cases = [(*case, odd) for case in cases for odd in range(size)]
    groups = [dist.new_group() for _ in cases]
    found = {}
    for number, (name, kind, odd) in enumerate(cases):
        root = number % size
        found[f"{name} {kind} of {odd}, root {root}"] = outcome(
            name, kind, groups[number], rank == odd, root, nbytes
        )
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


main(int(sys.argv[1]), *sys.argv[2:])

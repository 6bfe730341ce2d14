"""Convert torch's other arguments to cydist's: options, reductions, time limits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cydist._native import fast_torch
from cydist.reduce_ops import Op, PremulSum, RedOpType

REDUCTIONS: dict[Any, Op] = {
    getattr(dist.ReduceOp, name): RedOpType[name]
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
# Looked up by hash, which is the operation's number: comparing ReduceOps takes ten times as long.
OPERATIONS = {hash(dist.ReduceOp(theirs)): ours for theirs, ours in REDUCTIONS.items()}
assert len(OPERATIONS) == 8
fast_torch.learn_layout(dist.AllreduceOptions, REDUCTIONS)


def op_of(op: Any) -> Op:
    """Return cydist's reduction for torch's.

    Raises ValueError for a reduction that cydist does not have.
    """
    found = OPERATIONS.get(hash(op))
    if found is not None:
        return found
    if op != dist.ReduceOp.PREMUL_SUM:
        raise ValueError(f"cydist has no reduction {op}")
    return PremulSum(op.__getstate__()[1])


def timeout_of(options: Any) -> timedelta | None:
    """Return the call's own time limit; None: the group's. torch marks that with -1 ms."""
    timeout: timedelta = options.timeout
    return None if timeout.days < 0 else timeout


def options_of(kind: Any, options: Any, timeout: timedelta | None, op: Any = None) -> Any:
    """Return options of `kind`: those passed, or new ones made of single fields.

    Args:
        options: An object of `kind`, a reduction in its place, or None.
    """
    if isinstance(options, kind):
        return options
    made = kind()
    if timeout is not None:
        made.timeout = timeout
    if options is not None or op is not None:
        made.reduceOp = op if options is None else options
    return made


def rooted_options(
    kind: Any, options: Any, timeout: timedelta | None, root: int, op: Any = None
) -> Any:
    """As `options_of`, for calls with a root: a rank of the group may replace the options."""
    if isinstance(options, kind):
        return options
    made = options_of(kind, None, timeout, op)
    made.rootRank = root if options is None else options
    return made


def single_entry(entries: Any, call: str) -> Any:
    """Return the single entry of a list; torch kept such lists for several devices per rank."""
    if isinstance(entries, torch.Tensor):
        return entries
    if len(entries) != 1:
        raise ValueError(f"{call}: expected a list of one entry, found {len(entries)}")
    return entries[0]

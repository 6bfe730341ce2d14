"""all_reduce of sparse tensors, such as the sparse gradients of DistributedDataParallel."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch

import cydist
from cydist.errors import MismatchError
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import Op, RedOpType, op_and_factor


def all_reduce(tensor: Any, op: Op, host: ProcessGroup, timeout: timedelta | None) -> None:
    """Sum sparse COO tensors of one shape and dtype, in place; ranks may hold other elements.

    Every rank gathers all ranks' elements, and adds them in rank order.
    Raises ValueError for any reduction but SUM. If shapes, sparse dimensions or dtypes differ,
    every rank raises MismatchError. The tensors are unchanged then, and the group stays usable.
    """
    if op is not RedOpType.SUM:
        name = op_and_factor(op)[0].name
        raise ValueError(f"all_reduce of a sparse tensor takes SUM only, not {name}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce takes sparse tensors in COO layout, not {tensor.layout}")
    own = tensor.coalesce()
    text = _describe(own)
    number = int.from_bytes(sha256(text.encode()).digest()[:8], "little", signed=True)
    rows = torch.empty((host.size(), 2), dtype=torch.int64)
    cydist.all_gather_into_tensor(rows, torch.tensor([own._nnz(), number]), host, timeout=timeout)
    counts, numbers = rows.unbind(1)
    if others := [rank for rank, other in enumerate(numbers.tolist()) if other != number]:
        raise _mismatch(others, text, host, timeout)
    indices = _gather(own.indices().t().contiguous(), counts, host, timeout)
    values = _gather(own.values().contiguous(), counts, host, timeout)
    everything = torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False
    )
    tensor.copy_(everything.coalesce())


def _describe(tensor: Any) -> str:
    """Describe the properties that must be equal on all ranks."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} with {tensor.sparse_dim()} sparse dimensions"


def _mismatch(
    others: list[int], text: str, host: ProcessGroup, timeout: timedelta | None
) -> MismatchError:
    """Return the error for tensors that differ from those of `others`, ranks of the group.

    All ranks call this, and each gets the descriptions of the others.
    """
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = torch.empty(host.size(), dtype=torch.int64)
    cydist.all_gather_into_tensor(lengths, torch.tensor([len(own)]), host, timeout=timeout)
    theirs = bytes(_gather(own, lengths, host, timeout)[others[0]].tolist()).decode()
    return MismatchError(
        f"all_reduce of sparse tensors on {host.title}: the ranks have different "
        f"ones. This rank ({host.ranks[host.rank()]}): {text}. "
        f"Rank {host.ranks[others[0]]}: {theirs}",
        op="all_reduce",
        group=host.group_name,
        ranks=tuple(host.ranks[rank] for rank in others),
    )


def _gather(rows: Any, counts: Any, host: ProcessGroup, timeout: timedelta | None) -> list[Any]:
    """Gather all ranks' rows; rank r has counts[r]."""
    found = [rows.new_empty((int(count), *rows.shape[1:])) for count in counts]
    cydist.all_gather(found, rows, host, timeout=timeout)
    return found

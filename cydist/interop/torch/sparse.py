"""all_reduce of sparse tensors, which DistributedDataParallel makes of sparse gradients."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

import cydist
from cydist.group import ProcessGroup
from cydist.types import Op, RedOpType


def all_reduce(tensor: Any, op: Op, host: ProcessGroup, timeout: timedelta | None) -> None:
    """Sum sparse COO tensors of one shape and dtype, in place; ranks may hold other elements.

    Everybody gathers everybody's elements, and adds them in rank order.
    Raises ValueError for any reduction but SUM.
    """
    if op is not RedOpType.SUM:
        raise ValueError(f"all_reduce of a sparse tensor takes SUM only, not {op}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce takes sparse tensors in COO layout, not {tensor.layout}")
    own = tensor.coalesce()
    counts = torch.empty(host.size(), dtype=torch.int64)
    cydist.all_gather_into_tensor(counts, torch.tensor([own._nnz()]), host, timeout=timeout)
    indices = _gather(own.indices().t().contiguous(), counts, host, timeout)
    values = _gather(own.values().contiguous(), counts, host, timeout)
    everything = torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False
    )
    tensor.copy_(everything.coalesce())


def _gather(rows: Any, counts: Any, host: ProcessGroup, timeout: timedelta | None) -> list[Any]:
    """Everybody's rows, of which rank r has counts[r]."""
    found = [rows.new_empty((int(count), *rows.shape[1:])) for count in counts]
    cydist.all_gather(found, rows, host, timeout=timeout)
    return found

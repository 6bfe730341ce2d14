"""`op=None` is an argument error, in every call that reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x, None),  # type: ignore[arg-type]
    "reduce": lambda x: dist.reduce(x, 0, None),  # type: ignore[arg-type]
    "scan": lambda x: dist.scan(x, None),  # type: ignore[arg-type]
    "exscan": lambda x: dist.exscan(x, None),  # type: ignore[arg-type]
    "reduce_scatter": lambda x: dist.reduce_scatter(x[:1], [x[:1]], None),  # type: ignore[arg-type]
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(
        np.empty_like(x),
        x,
        None,  # type: ignore[arg-type]
    ),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x], None),  # type: ignore[arg-type]
    "reduce_scatter_tensor_coalesced": lambda x: dist.reduce_scatter_tensor_coalesced(
        [np.empty_like(x)],
        [x],
        None,  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_operation(name: str) -> None:
    """TypeError before any traffic, as for other values that are no operation; the group goes
    on. (It crashed the process.)"""

    def body(rank: int) -> None:
        with pytest.raises(
            TypeError, match=r"op must be a ReduceOp such as ReduceOp\.SUM, not None"
        ):
            CALLS[name](np.ones(2))
        x = np.ones(1)
        dist.all_reduce(x)
        assert x == 1

    run_threads(body, 1, "tcp")

"""Any sequence of calls on arrays of a GPU gives what it gives on the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu_delayed import LateDevice, install
from hypothesis import given
from hypothesis import strategies as st

import cydist as dist
from cydist.testing import run_threads

calls = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "broadcast", "all_gather", "gather", "message", "strided"]),
        st.integers(0, 400),
        st.booleans(),
    ),
    max_size=8,
)


@pytest.mark.fuzz
@given(calls=calls, order=st.integers(0, 2**16), slot=st.sampled_from([8, 100, 1024]))
def test_sequences_of_calls(calls: list[tuple[str, int, bool]], order: int, slot: int) -> None:
    """Blocking or not, of any sizes, on one array or several, in any order that streams allow."""
    with pytest.MonkeyPatch.context() as patch:
        device = install(patch, order, slot)
        on_device = run_threads(lambda rank: run(rank, calls, device), 2)
    on_host = run_threads(lambda rank: run(rank, calls, None), 2)
    for found, wanted in zip(on_device, on_host, strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def run(rank: int, calls: list[tuple[str, int, bool]], device: LateDevice | None) -> list:
    def make(values):
        return np.array(values) if device is None else device.array(values, rank)

    results, works = [], []
    for i, (name, size, async_op) in enumerate(calls):
        x = make(np.arange(size) + 1000 * rank + i)
        outs = [make(np.zeros(size, int)) for _ in range(2)]
        work = None
        if name == "all_reduce":
            work = dist.all_reduce(x, async_op=async_op)
        elif name == "broadcast":
            work = dist.broadcast(x, i % 2, async_op=async_op)
        elif name == "all_gather":
            work = dist.all_gather(outs, x, async_op=async_op)
        elif name == "gather":
            work = dist.gather(x, outs if rank == i % 2 else None, i % 2, async_op=async_op)
        elif name == "strided":
            work = dist.all_reduce(x[::3], async_op=async_op)
        else:
            works.append(dist.isend(x, 1 - rank))
            dist.recv(outs[0], 1 - rank)
        works += [work] if work else []
        results += [x, *outs]
    for work in works:
        work.wait(30)
    return results if device is None else [array.get() for array in results]

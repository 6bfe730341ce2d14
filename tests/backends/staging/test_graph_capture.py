"""Arrays of a GPU on backends for the CPU, while a CUDA graph is captured."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu_delayed import LateDevice, install

import cydist as dist
from cydist.testing import run_threads


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return install(monkeypatch, "late", 1 << 10)


def test_a_capture_is_refused(device) -> None:
    """While a graph is captured the call raises, and the group goes on."""

    def body(rank):
        x = device.array(np.ones(3), rank)
        dist.barrier()
        device.capturing = True
        for call in (dist.all_reduce, lambda x: dist.send(x, 1 - rank)):
            with pytest.raises(dist.UnsupportedError, match="graph is being captured"):
                call(x)
        dist.barrier()
        device.capturing = False
        dist.all_reduce(x)
        assert x.get().tolist() == [2.0] * 3

    run_threads(body, 2)


def test_nothing_is_packed_into_a_graph_that_is_captured(device) -> None:
    """The call is refused before: what was packed would be again, whenever the graph is replayed,
    into memory that is another array's by then."""
    size = 2

    def body(rank):
        def strided(count=6):
            return device.array(np.ones(2 * count), rank)[::2]

        calls = {
            "broadcast": lambda: dist.broadcast(strided(), 0),
            "all_reduce": lambda: dist.all_reduce(strided()),
            "function": lambda: dist.all_reduce(strided(), dist.ReduceOp.create(np.add)),
            "reduce": lambda: dist.reduce(strided(), 0),
            "scan": lambda: dist.scan(strided()),
            "all_gather": lambda: dist.all_gather([strided(), strided()], strided()),
            "into": lambda: dist.all_gather_into_tensor(strided(12), strided()),
            "gather": lambda: dist.gather(strided(), None if rank else [strided(), strided()]),
            "scatter": lambda: dist.scatter(strided(), None if rank else [strided(), strided()]),
            "reduce_scatter": lambda: dist.reduce_scatter(strided(), [strided(), strided()]),
            "tensor": lambda: dist.reduce_scatter_tensor(strided(), strided(12)),
            "all_to_all": lambda: dist.all_to_all([strided(), strided()], [strided(), strided()]),
            "single": lambda: dist.all_to_all_single(strided(), strided()),
            "coalesced": lambda: dist.all_reduce_coalesced([strided(), strided()]),
            "gathered": lambda: dist.all_gather_into_tensor_coalesced([strided(12)], [strided()]),
            "scattered": lambda: dist.reduce_scatter_tensor_coalesced([strided()], [strided(12)]),
            "send": lambda: dist.isend(strided(), 1 - rank),
            "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, strided(), 1 - rank)]),
        }
        copied[rank].clear()
        for name, call in calls.items():
            with pytest.raises(dist.UnsupportedError, match="graph is being captured"):
                call()
            assert copied[rank] == [], name
        return len(calls)

    copied, copy = [[] for _ in range(size)], device.copy

    def noted(into, source):
        copied[into.device_index].append(into)
        copy(into, source)

    device.copy = noted
    device.capturing = True
    assert run_threads(body, size) == [18, 18]

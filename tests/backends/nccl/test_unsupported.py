"""Calls that NCCL cannot do are refused, and change nothing for those that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_gpu_threaded
import ml_dtypes
import numpy as np
import pytest
from fake_gpu_threaded import until

import cydist as dist

SMALL = ml_dtypes.float8_e5m2


def test_a_capture_without_scratch_memory_is_refused(
    gpu_jobs: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA may give none then: nothing has been enqueued, and the group goes on."""
    allocate = gpus.allocate

    def refuse(device: int, nbytes: int) -> Any:
        if (stream := gpus.current_stream(device)) in gpus.captured:
            broken.add(stream)
            raise MemoryError("operation not permitted when stream is capturing")
        return allocate(device, nbytes)

    def is_captured(gpu: Any, stream: int) -> bool:
        if stream in broken:
            raise RuntimeError("an error has invalidated the capture sequence")
        return asked(gpu, stream)

    broken: set[int] = set()  # where CUDA ended the capture, as it does for that
    asked = fake_gpu_threaded.Gpu.is_captured
    monkeypatch.setattr(fake_gpu_threaded.Gpu, "is_captured", is_captured)
    monkeypatch.setattr(gpus, "allocate", refuse)

    def body(rank: int) -> list[float]:
        array, captured = gpus.array(np.ones(3, "i2")), 7100 + rank
        gpus.captured.add(captured)
        refused = pytest.raises(dist.UnsupportedError, match=r"scratch memory.*not permitted when")
        with gpus.on_stream(rank, captured), refused:
            dist.all_reduce(array)
        gpus.captured.remove(captured)
        dist.all_reduce(array)
        return array.get().tolist()

    assert gpu_jobs.get(2).run(body) == [[2, 2, 2]] * 2


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize(
    "call",
    [
        lambda gpus, **how: dist.scan(gpus.array(np.ones(3)), **how),
        lambda gpus, **how: dist.exscan(gpus.array(np.ones(3)), **how),
        lambda gpus, **how: dist.all_reduce(gpus.array(np.ones(3, SMALL)), **how),
        lambda gpus, **how: dist.all_reduce_coalesced(
            [gpus.array(np.ones(3, SMALL)) for _ in range(2)], **how
        ),
    ],
    ids=["scan", "exscan", "fp8", "coalesced"],
)
def test_a_refused_call_does_not_count(
    gpu_jobs: Any, gpus: Any, call: Callable[..., Any], async_op: bool
) -> None:
    """One rank alone makes it, and is not ahead of the others then: their next calls are one.

    The GPUs know no floats of 8 bits, to it.
    """

    def body(rank: int) -> float:
        group: Any = dist.group.WORLD
        if rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group.comm, "capability", 80)
                with pytest.raises(dist.UnsupportedError, match=r"has none|reduces float8"):
                    call(gpus, async_op=async_op)
        for width in (1, 2):
            array = gpus.array(np.ones(width))
            dist.all_reduce(array)
        until(lambda: group.error or not group.failures.watch.call_check.pending)
        assert group.error is None
        return float(array.get()[0])

    assert gpu_jobs.get(2).run(body) == [2.0, 2.0]

"""What CUDA reports or refuses, as the errors of calls and futures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "long": lambda group, x: dist.all_reduce(x, dist.ReduceOp.BOR, group, True),
    "short": lambda group, x: dist.all_reduce(x, dist.ReduceOp.SUM, group, True),
    "message": lambda group, x: group.isend(dist.asarray(x), 0, 0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_without_an_event_fails_the_group(
    gpus: Any, call: Callable[[Any, Any], object]
) -> None:
    """Where CUDA records none nobody could ever see the call's end, nor that of later ones."""

    def body(rank: int) -> Any:
        group: Any = dist.new_group()
        x = gpus.array(np.ones(3, "i4"))
        record = gpus.record

        def refuse(event: Any, device: int, stream: int) -> None:
            if stream == group.streams.own:
                raise RuntimeError("no more memory")
            record(event, device, stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpus, "record", refuse)
            with pytest.raises(RuntimeError, match="no more memory"):
                call(group, x)
        return str(group.error), group.failures.watch.oldest

    assert run_threads(body, 1, "nccl") == [("no more memory", None)]


def test_a_future_has_the_error_that_its_thread_meets(gpus: Any) -> None:
    """Also before the watchdog: it has no result then."""

    def body(rank: int) -> None:
        group: Any = dist.group.WORLD
        with group.failures.watch._lock:  # the watchdog does not look
            gate = gpus.hold()
            future = dist.all_reduce(gpus.array(np.ones(3)), async_op=True).get_future()
            gpus.error = OSError("an illegal memory access was encountered")
            try:
                with pytest.raises(OSError, match="illegal memory access"):
                    future.result(fake_gpu_threaded.DEADLINE)
            finally:
                gpus.error = None
                gate.set()

    run_threads(body, 1, "nccl")

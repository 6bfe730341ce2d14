"""What plain calls that go wrong leave behind; see test_fast_path.py for how they are begun."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_gpu_threaded import until

import cydist as dist
from cydist.backends.nccl.binding import NcclError
from cydist.testing import run_threads

SIZE = 3
SUM = dist.ReduceOp.SUM


@pytest.fixture
def job(gpu_jobs: Any) -> Any:
    """Ranks with a GPU each."""
    return gpu_jobs.get(SIZE)


def test_ranks_in_different_calls_are_told_both(gpus: Any) -> None:
    """The notes of short calls are compared."""

    def body(rank: int) -> str:
        group: Any = dist.group.WORLD
        dist.all_reduce(gpus.array(np.ones(3 + rank)), SUM, group)
        until(lambda: group.error is not None)
        with pytest.raises(dist.GroupFailedError):
            dist.all_reduce(gpus.array(np.ones(3)), SUM, group)
        gpus.synchronize(gpus.current_stream(rank))
        assert isinstance(group.error, dist.MismatchError)
        return str(group.error)

    for text in run_threads(body, 2, "nccl"):
        assert "all_reduce of 3 float64, op SUM" in text
        assert "all_reduce of 4 float64, op SUM" in text


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_late_rank_is_a_timeout(gpus: Any, async_op: bool) -> None:
    """The group's timeout holds."""

    def body(rank: int) -> Any:
        group: Any = dist.new_group()  # which takes its time on a busy machine
        group.timeout = 0.3
        if rank == 1:
            return None
        dist.all_reduce(gpus.array(np.ones(3)), SUM, group, async_op)
        until(lambda: group.error is not None)
        return type(group.error), group.error.op, group.error.seq

    assert run_threads(body, 2, "nccl")[0] == (dist.DistTimeoutError, "all_reduce", 1)


def test_what_nccl_refuses_fails_the_group(gpus: Any) -> None:
    """DistBackendError with its words, which names the call; nothing is watched any more."""

    def body(rank: int) -> Any:
        group: Any = dist.new_group()

        def refuse(*arguments: int) -> None:
            raise NcclError("no such thing", 5)

        group.comm.all_reduce = refuse
        with pytest.raises(dist.DistBackendError, match=r"all_reduce #1 .*no such thing"):
            dist.all_reduce(gpus.array(np.ones(3)), SUM, group)
        return type(group.error), group.failures.watch.oldest

    assert run_threads(body, 1, "nccl") == [(dist.DistBackendError, None)]


def test_fp8_is_asked_about_first(job: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats of 8 bits, which not every GPU reduces: UnsupportedError, and the group goes on."""

    def body(rank: int) -> float:
        group: Any = dist.group.WORLD
        monkeypatch.setattr(group.comm, "capability", 80)
        with library.here():
            x = library.array(np.full(3, rank + 1, ml_dtypes.float8_e5m2))
            with pytest.raises(dist.UnsupportedError, match=r"9.0 or more"):
                dist.all_reduce(x, SUM, dist.group.WORLD)
            dist.broadcast(x, 1, dist.group.WORLD)
            return float(library.get(x)[0])

    assert job.run(body) == [2.0] * SIZE


def test_wait_is_a_matter_of_the_arrays_library(job: Any, library: Any, gpus: Any) -> None:
    """Its current stream waits; those of other libraries go on."""

    def body(rank: int) -> list[bool]:
        group: Any = dist.group.WORLD
        others = set(group.gpu.current_streams())
        side = 7700 + rank
        with library.here(), library.on_stream(rank, side):
            x = library.array(np.ones(3, "f4"))
            dist.all_reduce(x, SUM, group, async_op=True).wait()
            library.get(x)
        return [side in gpus.waits, bool(others & set(gpus.waits))]

    gpus.waits.clear()
    assert job.run(body) == [[True, False]] * SIZE


def test_a_handler_that_raises_before_a_call_is_enqueued(job: Any, library: Any) -> None:
    """The group fails with what it raised: nobody waits for a call that was never made."""

    def body(rank: int) -> int:
        group: Any = dist.new_group(timeout=20)
        watch = group.failures.watch
        add = watch.add
        with library.here():
            x = library.array(np.ones(3, "f4"))
            if rank == 0:

                def interrupted(flight: Any) -> None:
                    add(flight)
                    raise KeyboardInterrupt

                watch.add = interrupted
                with pytest.raises(KeyboardInterrupt):
                    dist.all_reduce(x, SUM, group)
            else:
                with pytest.raises(dist.GroupFailedError, match="KeyboardInterrupt"):
                    until(lambda: dist.all_reduce(x, SUM, group, timeout=20) is not None)
            with pytest.raises(dist.GroupFailedError):
                dist.all_reduce(x, SUM, group)
        return len(watch._flights)

    assert job.run(body)[0] == 0

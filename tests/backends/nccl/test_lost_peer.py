"""Who is lost, when NCCL says only that somebody is."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest
from fake_gpu_threaded import until

import cydist as dist
from cydist.backends.nccl import binding
from cydist.testing import run_threads


def kill_neighbour(group: Any) -> None:
    """The host group's connections say that rank 2 has died."""
    group.host.group_state.error = dist.PeerFailedError("rank 2 died", ranks=(2,))


def test_who_is_lost_is_named_though_nccl_does_not(gpus: Any, standin: Any) -> None:
    """NCCL says "remote process exited"; the host group, a moment later, which."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        dist.barrier()
        if rank == 2:
            return None
        dist.all_reduce(gpus.array(np.ones(3)), async_op=True)
        kill_neighbour(group)
        standin.lib.standin_fail(ctypes.c_void_p(group.comm._pointer), 6)
        until(lambda: group.error is not None)
        error: Any = group.error
        return type(error), error.ranks

    assert run_threads(body, 3, "nccl")[:2] == [(dist.PeerFailedError, (2,))] * 2


def refusing(group: Any, *, dead: bool = False) -> None:
    """From now on the group's NCCL answers that another rank is gone."""

    def refuse(*arguments: Any) -> None:
        if dead:
            kill_neighbour(group)
        raise binding.NcclError("remote process exited", binding.REMOTE)

    group.comm.all_reduce = refuse


def test_a_call_that_nccl_refuses_for_a_lost_rank_names_it(gpus: Any) -> None:
    """A program's next call learns it before the watchdog does: it is the same error."""

    def body(rank: int) -> Any:
        group: Any = dist.new_group([0, 1, 2])
        dist.barrier(group)
        if rank == 2:
            return None
        refusing(group, dead=True)
        with pytest.raises((dist.PeerFailedError, dist.GroupFailedError)):
            dist.all_reduce(gpus.array(np.ones(3)), group=group)
        return type(group.error), group.error.ranks

    assert run_threads(body, 3, "nccl")[:2] == [(dist.PeerFailedError, (2,))] * 2


def test_who_tells_of_an_error_is_not_taken_for_lost(gpus: Any) -> None:
    """Its words are what the group fails on, and they name whom it named: nobody."""
    told = threading.Event()

    def body(rank: int) -> Any:
        group: Any = dist.new_group([0, 1, 2])
        if rank == 1:
            group.failures._control.broadcast(
                dist.DistBackendError("NCCL says: unhandled system error")
            )
            told.set()
        if rank > 0:
            return None
        assert told.wait(fake_gpu_threaded.DEADLINE)
        refusing(group)
        with pytest.raises(dist.GroupFailedError):
            dist.all_reduce(gpus.array(np.ones(3)), group=group)
        return type(group.error), group.error.ranks, str(group.error)

    kind, ranks, text = run_threads(body, 3, "nccl")[0]
    assert (kind, ranks) == (dist.DistBackendError, ())
    assert text == "rank 1 says: NCCL says: unhandled system error"

"""Groups whose communicators are split off their parent's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest

import cydist as dist
from cydist.backends.nccl import binding, split, torch_nccl
from cydist.testing import run_threads


def on_gpus(group: Any) -> Any:
    """The part of a group that NCCL serves."""
    return group.for_device("cuda")


def sum_of_ranks(gpus: Any, group: Any) -> float:
    array = gpus.array(np.array([float(dist.get_rank())]))
    dist.all_reduce(array, group=group)
    return float(array.get()[0])


def made_by(log: list[str]) -> list[str]:
    """How communicators were made, as sorted lines "rank call"."""
    return sorted(line for line in log if line.split()[1] in ("init", "split"))


def forget_the_default_group(standin: Any) -> None:
    """On all ranks, what made it is no longer in the log."""
    dist.barrier()
    if dist.get_rank() == 0:
        standin.log()
    dist.barrier()


def test_a_group_of_all_ranks_is_split_off(gpus: Any, standin: Any) -> None:
    """In its own order, without another unique id."""

    def body(rank: int) -> tuple[float, float]:
        forget_the_default_group(standin)
        group: Any = dist.new_group([2, 0, 1], sort_ranks=False)
        array = gpus.array(np.full(2, float(rank)))
        dist.broadcast(array, group_src=0, group=group)
        return sum_of_ranks(gpus, group), float(array.get()[0])

    assert run_threads(body, 3, "nccl") == [(3.0, 2.0)] * 3
    assert made_by(standin.log()) == [f"{r} split color=0 key={(1, 2, 0)[r]}" for r in range(3)]


def test_a_group_of_some_ranks_waits_for_no_other(gpus: Any, standin: Any) -> None:
    """A split would need all ranks of the parent, and those that are not in it may be late."""
    made = threading.Event()

    def body(rank: int) -> float:
        forget_the_default_group(standin)
        if rank == 2:
            assert made.wait(fake_gpu_threaded.DEADLINE)
        group = dist.new_group([0, 1])
        if rank == 2:
            return -1.0
        dist.barrier(group)
        made.set()
        return sum_of_ranks(gpus, group)

    assert run_threads(body, 3, "nccl") == [1.0, 1.0, -1.0]
    assert made_by(standin.log()) == ["0 init", "1 init"]


@pytest.mark.parametrize("backend", ["nccl", "cpu:tcp,cuda:nccl"])
def test_parts_are_split_off_at_once(gpus: Any, standin: Any, backend: str) -> None:
    """By all ranks of the parent: one that is in no part takes part in the split."""

    def body(rank: int) -> tuple[float, int] | None:
        forget_the_default_group(standin)
        part = dist.split_group(None, [[2, 0], [3]], timeout=20)
        if part is None:
            return None
        assert part.timeout == 20
        return sum_of_ranks(gpus, part), part.rank()

    assert run_threads(body, 4, backend) == [(2.0, 1), None, (2.0, 0), (3.0, 0)]
    assert made_by(standin.log()) == [
        "0 split color=0 key=1", "1 split color=-1 key=0", "2 split color=0 key=0",
        "3 split color=1 key=0",
    ]  # fmt: skip


def test_a_part_of_a_part(gpus: Any, standin: Any) -> None:
    """Its parent is a group that was split off itself, twice with the same ranks."""

    def body(rank: int) -> list[float]:
        part = dist.split_group(None, [[0, 1, 2], [3]])
        sums = []
        for _ in range(2):
            left = dist.split_group(part, [[0, 2]] if rank < 3 else [[0]])
            sums.append(-1.0 if left is None else sum_of_ranks(gpus, left))
        return sums

    assert run_threads(body, 4, "nccl") == [[2.0] * 2, [-1.0] * 2, [2.0] * 2, [3.0] * 2]


def test_a_parent_with_calls_under_way_is_not_split(
    gpus: Any, standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank: all make communicators by unique ids. NCCL could wait for that call for ever."""
    monkeypatch.setattr(split, "IDLE_SECONDS", 0.1)

    def body(rank: int) -> tuple[float, float]:
        forget_the_default_group(standin)
        array = gpus.array(np.ones(1))
        gate = gpus.hold() if rank == 1 else threading.Event()
        dist.all_reduce(array)
        group = dist.new_group()
        gate.set()
        return sum_of_ranks(gpus, group), float(array.get()[0])

    assert run_threads(body, 2, "nccl") == [(1.0, 2.0)] * 2
    assert made_by(standin.log()) == ["0 init", "1 init"]


@pytest.mark.parametrize("why", ["busy thread", "no split", "failed", "another GPU"])
def test_all_ranks_do_as_one_that_cannot_split(
    gpus: Any, standin: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """They decide together: a thread of it is in a call, its NCCL has none, a call of it does not
    end, or another GPU is current."""
    monkeypatch.setattr(split, "IDLE_SECONDS", 0.1)

    def body(rank: int) -> float:
        forget_the_default_group(standin)
        world = on_gpus(dist.group.WORLD)
        if rank == 1 and why == "no split":
            world.comm.can_split = lambda: False
        if rank == 1 and why == "another GPU":
            world.gpu = SimpleNamespace(index=99)  # the current one is not
        if rank == 1 and why == "failed":
            world.failures.is_idle = lambda: False
        if rank == 1 and why == "busy thread":
            with dist._coalescing_manager(), world.coalesced():
                group = dist.new_group()
        else:
            group = dist.new_group()
        return sum_of_ranks(gpus, group)

    assert run_threads(body, 2, "nccl") == [1.0, 1.0]
    assert made_by(standin.log()) == ["0 init", "1 init"]


def test_a_rank_that_does_not_come_is_named(gpus: Any) -> None:
    """Before any rank is in NCCL, so the parent still works."""
    gave_up = threading.Event()

    def body(rank: int) -> float:
        if rank == 1:
            assert gave_up.wait(fake_gpu_threaded.DEADLINE)
        else:
            with pytest.raises(dist.RendezvousError, match="rank 1 did not come") as caught:
                dist.split_group(None, [[0, 1]], timeout=0.3)
            assert caught.value.ranks == (1,)
            gave_up.set()
        return sum_of_ranks(gpus, None)

    assert run_threads(body, 2, "nccl") == [1.0, 1.0]


def test_other_parts_on_a_rank_are_refused(gpus: Any) -> None:
    """NCCL would make communicators of other ranks than the groups have."""

    def body(rank: int) -> float:
        with pytest.raises(dist.MismatchError, match=r"split_group \[\[0, 1\]\]"):
            dist.split_group(None, [[0], [1]] if rank else [[0, 1]])
        return sum_of_ranks(gpus, None)

    assert run_threads(body, 2, "nccl") == [1.0, 1.0]


def test_a_split_that_hangs_ends_at_its_deadline(gpus: Any, standin: Any) -> None:
    """A rank that said it would come does not: the parent fails on all ranks, and its revoke ends
    the threads that are in NCCL."""
    ended = threading.Event()

    def body(rank: int) -> list[type[BaseException]]:
        forget_the_default_group(standin)
        world = on_gpus(dist.group.WORLD)
        if rank == 1:
            world.comm.split = lambda color, key: ended.wait(fake_gpu_threaded.DEADLINE)
        began = time.monotonic()
        with pytest.raises(dist.DistError) as caught:
            dist.split_group(None, [[0, 1]], timeout=1)
        assert time.monotonic() - began < 15
        assert world.error is not None
        if rank == 0:
            ended.set()
        with pytest.raises(dist.DistError):
            dist.all_reduce(gpus.array(np.ones(1)))
        return [type(caught.value)]

    assert [dist.DistTimeoutError] in run_threads(body, 2, "nccl")
    log = standin.log()
    assert "0 revoke" in log
    assert not any("beside a call" in line for line in log)
    left = [each for each in threading.enumerate() if each.name == "cydist-nccl-split"]
    for thread in left:
        thread.join(5)
    assert not any(each.is_alive() for each in left)


@pytest.mark.parametrize("after", [False, True], ids=["at once", "after the others"])
def test_an_error_of_nccl_fails_the_parent_on_all_ranks(gpus: Any, after: bool) -> None:
    """The other ranks would wait in the split, or in the part that it makes for them."""

    def body(rank: int) -> str:
        world = on_gpus(dist.group.WORLD)
        real = world.comm.split
        if rank == 1:

            def refuse(color: int, key: int) -> None:
                if after:
                    real(color, key).abort()
                raise binding.NcclError("unhandled system error", 2)

            world.comm.split = refuse
        with pytest.raises(dist.DistError) as caught:
            dist.new_group()
        assert rank == 0 or world.error is not None
        return str(caught.value)

    for said in run_threads(body, 2, "nccl"):
        assert "NCCL splits no communicator: unhandled system error" in said


@pytest.mark.parametrize("made", [binding.CupyNccl, torch_nccl.TorchNccl])
def test_every_binding_splits(gpus: Any, standin: Any, made: Any) -> None:
    """By color and key; a rank without a color gets nothing, and an aborted parent refuses."""
    if made is torch_nccl.TorchNccl:
        pytest.importorskip("torch")
    library = made()
    unique_id = library.unique_id()

    def body(rank: int) -> str:
        comm = library.init(3, unique_id, rank)
        assert comm.can_split()
        part = comm.split(-1 if rank == 1 else 7, -rank)
        comm.abort()
        with pytest.raises(Exception, match="ended"):
            comm.split(0, 0)
        if part is None:
            return ""
        assert part.async_error() == ""
        part.destroy()
        return type(part).__name__

    name = {"CupyNccl": "CupyCommunicator", "TorchNccl": "TorchCommunicator"}[made.__name__]
    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(body, range(3))) == [name, "", name]


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_a_part_outlives_its_parent(gpus: Any, end: str) -> None:
    """The end of the parent, or an abort, is not the part's: they share nothing."""

    def body(rank: int) -> list[float]:
        parent = dist.new_group()
        part = dist.split_group(parent, [[1, 0]])
        before = sum_of_ranks(gpus, part)
        dist.barrier()
        if end == "destroy":
            dist.destroy_process_group(parent)
        elif rank == 0:
            dist.abort(parent)
        dist.barrier()
        return [before, sum_of_ranks(gpus, part)]

    assert run_threads(body, 2, "nccl") == [[1.0, 1.0]] * 2


def test_an_abort_of_the_parent_ends_a_split(gpus: Any) -> None:
    """From another thread, while this rank waits in NCCL for one that does not come."""
    inside, ended = threading.Event(), threading.Event()

    def body(rank: int) -> bool:
        parent = dist.new_group()
        real = on_gpus(parent).comm.split

        def late(color: int, key: int) -> Any:
            if rank == 1:
                ended.wait(fake_gpu_threaded.DEADLINE)
            inside.set()
            return real(color, key)

        on_gpus(parent).comm.split = late
        if rank == 0:

            def abort() -> None:
                inside.wait(fake_gpu_threaded.DEADLINE)
                dist.abort(parent)

            aborter = threading.Thread(target=abort)
            aborter.start()
        with pytest.raises(dist.DistError):
            dist.split_group(parent, [[0, 1]], timeout=fake_gpu_threaded.DEADLINE)
        if rank == 0:
            aborter.join()
            ended.set()
        return on_gpus(parent).error is not None

    began = time.monotonic()
    assert run_threads(body, 2, "nccl") == [True, True]
    assert time.monotonic() - began < fake_gpu_threaded.DEADLINE / 2

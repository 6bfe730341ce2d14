"""What goes wrong is one typed error on every rank, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_gpu_threaded
import ml_dtypes
import numpy as np
import pytest
from fake_gpu_threaded import until

import cydist as dist
from cydist import config
from cydist.backends.nccl import binding, create, failure
from cydist.backends.nccl import group as nccl_group
from cydist.backends.nccl.host_group import ControlListener
from cydist.testing import run_threads

SIZE = 4


def failed() -> BaseException:
    """What the default group fails on, when it has."""
    group: Any = dist.group.WORLD
    until(lambda: group.error is not None)
    return group.error


CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "count": (
        lambda gpus: dist.all_reduce(gpus.array(np.ones(3))),
        lambda gpus: dist.all_reduce(gpus.array(np.ones(4))),
        "all_reduce of 3 float64, op SUM", "all_reduce of 4 float64, op SUM",
    ),
    "call": (
        lambda gpus: dist.all_reduce(gpus.array(np.ones(3))),
        lambda gpus: dist.broadcast(gpus.array(np.ones(3)), 0),
        "all_reduce of 3 float64", "broadcast of 3 float64, root 0",
    ),
    "dtype": (
        lambda gpus: dist.reduce(gpus.array(np.ones(4, "f4")), 0),
        lambda gpus: dist.reduce(gpus.array(np.ones(4, "i4")), 0),
        "float32", "int32",
    ),
    "op": (
        lambda gpus: dist.all_reduce(gpus.array(np.ones(3)), dist.ReduceOp.MAX),
        lambda gpus: dist.all_reduce(gpus.array(np.ones(3)), dist.ReduceOp.MIN),
        "op MAX", "op MIN",
    ),
    "root": (
        lambda gpus: dist.broadcast(gpus.array(np.ones(3)), 3),
        lambda gpus: dist.broadcast(gpus.array(np.ones(3)), 2),
        "root 3", "root 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_ranks_in_different_calls_are_told_both(gpus: Any, case: Any) -> None:
    """MismatchError on every rank, in which both calls stand; the kernels that hang are ended."""
    one, other, ours, theirs = case

    def body(rank: int) -> str:
        (one if rank < 2 else other)(gpus)
        error = failed()
        assert isinstance(error, dist.MismatchError)
        with pytest.raises(dist.GroupFailedError) as raised:
            dist.all_reduce(gpus.array(np.ones(3)))
        assert raised.value.__cause__ is error
        gpus.synchronize(gpus.current_stream(rank))
        return str(error)

    for text in run_threads(body, SIZE, "nccl"):
        assert ours in text
        assert theirs in text
        assert "#1 on the default group: the ranks " in text


def test_the_work_of_a_call_that_cannot_be_raises(gpus: Any) -> None:
    """synchronize() and result() raise what the watchdog found; is_success() is False."""

    def body(rank: int) -> bool:
        work = dist.all_reduce(gpus.array(np.ones(3 + rank)), async_op=True)
        with pytest.raises(dist.MismatchError):
            work.synchronize()
        with pytest.raises(dist.MismatchError):
            work.wait()
        assert isinstance(work.exception(), dist.MismatchError)
        return work.is_success()

    assert run_threads(body, 2, "nccl") == [False, False]


def test_an_error_inside_a_group_of_calls_closes_it(
    gpus: Any, standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's group ends though a call in it raised, or the thread would stay in it for good."""

    def body(rank: int) -> str:
        group: Any = dist.new_group([0, 1])
        refuse = OSError("no such peer")

        def raising(*arguments: Any) -> None:
            raise refuse

        group.comm.recv = raising
        arrays = [gpus.array(np.ones(2)) for _ in range(2)]
        with pytest.raises((OSError, dist.DistError)):
            dist.all_to_all(arrays, [gpus.array(np.ones(2)) for _ in range(2)], group=group)
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)  # by another communicator, on the same thread
        return x.get().tolist()

    standin.log()
    assert run_threads(body, 2, "nccl") == [[2.0] * 3] * 2
    lines = [line.split()[1] for line in standin.log()]
    assert lines.count("group_start") == lines.count("group_end") > 0


def test_a_group_outlives_its_timeout(gpus: Any) -> None:
    """The deadline is of a call: a group that is used for longer than that stays well."""

    old = threading.Event()
    together = threading.Barrier(2, timeout=fake_gpu_threaded.DEADLINE)

    def body(rank: int) -> float:
        group: Any = dist.new_group([0, 1], timeout=5)
        x, end = gpus.array(np.ones(3)), time.monotonic() + 6
        while not old.is_set():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
            dist.barrier(group)
            together.wait()
            if rank == 0 and time.monotonic() > end:
                old.set()
            together.wait()
        return x.get()[0]

    assert run_threads(body, 2, "nccl") == [1.0, 1.0]


def test_a_rank_that_does_not_come_is_a_timeout(gpus: Any) -> None:
    """DistTimeoutError that names the call, the rank, and what the late one is doing."""

    def body(rank: int) -> Any:
        if rank == 1:
            return str(failed())
        dist.all_reduce(gpus.array(np.ones(3)), timeout=0.3)
        error = failed()
        assert isinstance(error, dist.DistTimeoutError)
        assert (error.op, error.seq, error.ranks) == ("all_reduce", 1, (1,))
        return str(error)

    def late(rank: int) -> Any:
        if rank == 1:
            group: Any = dist.group.WORLD
            until(lambda: group.host.error is not None or polled(group))
            return None
        return body(rank)

    found = run_threads(late, 2, "nccl")[0]
    assert "all_reduce #1 on the default group (rank 0, " in found
    assert "timeout: the GPU has not come past it; rank 1 has reached call #0 only" in found


def test_one_message_is_late_and_the_others_are_ended(gpus: Any) -> None:
    """The error of the late one is not that of another one of the same kind: messages have no
    numbers."""

    def body(rank: int) -> tuple[list[str], bool]:
        group: Any = dist.new_group()
        group.timeout = 0.3
        arrays = [gpus.array(np.zeros(3)) for _ in range(2)]
        with group.failures.watch._lock:  # the watchdog waits until both are under way
            works = [] if rank else [dist.irecv(x, 1, group) for x in arrays]
        until(lambda: polled(group))
        found = []
        for work in works:
            with pytest.raises(dist.DistError) as raised:
                work.wait()
            found.append(raised.value)
        return [type(each).__name__ for each in found], found[1:] and found[1].__cause__ is found[0]

    late = run_threads(body, 2, "nccl")[0]
    assert late == (["DistTimeoutError", "GroupFailedError"], True)


def polled(group: Any) -> bool:
    """Look, as the watchdog would if this rank were in a call."""
    group.failures.watch.poll()
    return group.error is not None


def test_an_asynchronous_error_of_nccl_fails_the_group(gpus: Any, standin: Any) -> None:
    """What NCCL notices on its own is a DistBackendError with NCCL's words, or a lost peer."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        gate = gpus.hold()
        work = dist.all_reduce(gpus.array(np.ones(3)), async_op=True)
        if rank == 0:
            standin.lib.standin_fail(ctypes.c_void_p(group.comm._pointer), 6)
        error = failed()
        gate.set()
        with pytest.raises(dist.PeerFailedError):
            work.synchronize()
        return str(error)

    for text in run_threads(body, 2, "nccl"):
        assert "NCCL says: remote process exited or there was a network error" in text


def test_the_others_are_told_before_an_abort_that_hangs(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may never come back from it: every rank else hears at once, and the process can end."""
    stuck = threading.Event()
    monkeypatch.setattr(failure, "ABORT_SECONDS", 2 * fake_gpu_threaded.DEADLINE)
    monkeypatch.setattr(binding, "EXIT_SECONDS", 0.05)

    def body(rank: int) -> str:
        group: Any = dist.group.WORLD
        if rank == 0:
            group.comm.abort = lambda: stuck.wait(fake_gpu_threaded.DEADLINE)
            dist.abort()
            return str(failed())
        until(lambda: polled(group))
        stuck.set()
        return str(group.error)

    try:
        for text in run_threads(body, 2, "nccl"):
            assert "the default group was aborted" in text
        stuck.clear()
        with monkeypatch.context() as patch:
            hanging = binding.EndsOnce()
            vars(hanging)["abort"] = lambda: stuck.wait(fake_gpu_threaded.DEADLINE)
            patch.setattr(binding, "alive", [hanging])
            binding.end_all()  # comes back
    finally:
        stuck.set()


def test_a_communicator_ends_where_its_gpu_cannot_be_used(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs there would hang for good otherwise."""

    def body(rank: int) -> bool:
        group: Any = dist.new_group([0, 1])

        def unusable() -> None:
            raise OSError("no such device")

        monkeypatch.setattr(group.gpu, "use", unusable)
        group.failures.end_comm(abort=True)
        return group.comm in binding.alive

    assert run_threads(body, 2, "nccl") == [False, False]


def test_an_error_of_the_device_fails_the_group(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sticky error of CUDA is no "not ready": DistBackendError with its words."""

    def body(rank: int) -> str:
        gate = gpus.hold()
        dist.all_reduce(gpus.array(np.ones(3)), async_op=True)
        monkeypatch.setattr(gpus, "error", OSError("an illegal memory access was encountered"))
        error = failed()
        assert isinstance(error, dist.DistBackendError)
        gate.set()
        return str(error)

    try:
        for text in run_threads(body, 2, "nccl"):
            assert "the GPU says: an illegal memory access was encountered" in text
    finally:
        gpus.error = None


def test_abort_ends_calls_on_every_rank(gpus: Any) -> None:
    """A rank that waits for a call that hangs gets GroupFailedError; streams go on."""

    def body(rank: int) -> str:
        if rank == 0:
            dist.abort()
            return str(failed())
        x = gpus.array(np.ones(3))
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.GroupFailedError) as raised:
            work.synchronize()
        work = None
        x.get()
        return str(raised.value)

    for text in run_threads(body, 2, "nccl"):
        assert "the default group was aborted" in text


def test_the_last_rank_with_its_group_learns_why_it_failed(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another rank aborted it before, in that one's words. Of the default group all have
    their part before any goes on; not of those that share its connections."""
    aborted = threading.Event()

    def late(*arguments: Any) -> Any:
        if dist.is_initialized() and fake_gpu_threaded.here() == 1:
            assert aborted.wait(fake_gpu_threaded.DEADLINE)
        return made(*arguments)

    def body(rank: int) -> str:
        group = dist.new_group()
        if rank == 0:
            dist.abort(group)
            aborted.set()
        with pytest.raises(dist.GroupFailedError) as raised:
            dist.all_reduce(gpus.array(np.ones(3)), group=group, async_op=True).synchronize()
        return str(raised.value)

    made = nccl_group.NcclGroup
    monkeypatch.setattr(nccl_group, "NcclGroup", late)
    for text in run_threads(body, 2, "nccl"):
        assert "group '1' was aborted" in text


def test_who_leaves_a_failed_group_at_once_tells_the_others_before(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is another thread that found the failure, and is slow to tell."""
    left = threading.Event()

    def slowly(listener: ControlListener, error: BaseException) -> None:
        left.wait(1.0)  # it must not come before the others were told
        broadcast(listener, error)

    def body(rank: int) -> str:
        group: Any = dist.new_group([0, 1])
        if rank == 0:
            dist.all_reduce(gpus.array(np.ones(3)), group=group, timeout=0.2)
        until(lambda: group.error is not None or (rank == 1 and group.failures.watch.poll()))
        text = str(group.error)
        dist.destroy_process_group(group)
        if rank == 0:
            left.set()
        return text

    broadcast = ControlListener.broadcast
    monkeypatch.setattr(ControlListener, "broadcast", slowly)
    for text in run_threads(body, 2, "nccl"):
        assert "timeout: the GPU has not come past it" in text


def test_a_group_of_the_ranks_that_are_left(gpus: Any) -> None:
    """shrink_group after a rank left: the others go on, with a communicator of their own."""

    def body(rank: int) -> Any:
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)
        x.get()
        if rank == 1:
            dist.destroy_process_group()
            return None
        wanted = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group: Any = dist.shrink_group([1], pg_options=wanted)
        assert group.gpu.high_priority == [True]
        y = gpus.array(np.ones(3))
        dist.all_reduce(y)
        return group.size(), y.get()[0]

    assert run_threads(body, 3, "nccl") == [(2, 2.0), None, (2, 2.0)]


def test_a_routed_group_shrinks_and_waits_for_the_gpu(gpus: Any) -> None:
    """ "cpu:tcp,cuda:nccl": the ranks that are left have both again, and a barrier is of both."""

    def body(rank: int) -> Any:
        if rank == 1:
            dist.destroy_process_group()
            return None
        dist.shrink_group([1])
        x, y = gpus.array(np.ones(3)), np.ones(3)
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.barrier()
        return float(x.memory[0]), float(y[0]), dist.get_backend()

    expected = (2.0, 2.0, "cpu:tcp,cuda:nccl")
    assert run_threads(body, 3, "cpu:tcp,cuda:nccl") == [expected, None, expected]


def test_leaving_is_no_failure(gpus: Any) -> None:
    """A rank that destroys its group after its last call harms nobody who is still in that call."""

    def body(rank: int) -> Any:
        x = gpus.array(np.ones(3))
        gate = gpus.hold() if rank == 0 else None
        dist.all_reduce(x)
        if gate is not None:
            gate.set()
        found = x.get()[0]
        dist.destroy_process_group()
        return found

    assert run_threads(body, 3, "nccl") == [3.0] * 3


def test_every_thread_of_ours_is_on_the_groups_gpu(gpus: Any) -> None:
    """A thread is on GPU 0 at first, where its first question would make a context."""

    def body(rank: int) -> set[str]:
        options = dist.ProcessGroupNCCL.Options()  # so it is not split off the default group
        group: Any = dist.new_group([0, 1], pg_options=options)
        gate = gpus.hold()
        future = dist.all_reduce(gpus.array(np.ones(3)), group=group, async_op=True).get_future()
        gate.set()
        future.result(fake_gpu_threaded.DEADLINE)
        until(lambda: group.failures.watch.oldest is None)
        dist.destroy_process_group(group)
        return group.gpu.users

    ours = {"cydist-nccl-init", "cydist-nccl-query", "cydist-nccl-end", "cydist-future"}
    assert run_threads(body, 2, "nccl") == [ours] * 2


def test_ranks_on_one_gpu_are_refused(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RendezvousError that names both ranks and what to call, before NCCL hangs or fails."""
    monkeypatch.setattr(fake_gpu_threaded.Gpu, "identity", lambda gpu, version: "host/0000:1B:00.0")
    with pytest.raises(dist.RendezvousError, match=r"ranks 0 and 1 are both on GPU 0000:1B:00.0"):
        run_threads(lambda rank: None, 2, "nccl")


def test_a_failed_init_is_told_to_those_who_wait(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's NCCL refuses: DistBackendError on both, with NCCL's words, before a deadline."""
    monkeypatch.setenv("STANDIN_INIT_FAILS", "1")
    with pytest.raises(dist.DistBackendError, match=r"NCCL makes no communicator: .*system error"):
        run_threads(lambda rank: None, 2, "nccl", timeout=20)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, TypeError])
def test_any_error_of_one_ranks_init_is_told(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """CUDA's own errors too; who is through already, and waits for the last rank, hears it."""
    aborted = []

    def init(size: int, unique_id: bytes, rank: int) -> Any:
        if rank == 1:
            raise error("no memory on the GPU")
        return SimpleNamespace(abort=lambda: aborted.append(rank))

    def body(rank: int) -> str:
        options = dist.ProcessGroupNCCL.Options()  # so it is not split off the default group
        with pytest.raises((dist.DistBackendError, error)) as raised:
            dist.new_group([0, 1], timeout=20, pg_options=options)
        return f"{type(raised.value).__name__}: {raised.value}"

    def all_ranks(rank: int) -> str:
        dist.monitored_barrier()
        monkeypatch.setattr(create.binding(), "init", init)
        return body(rank)

    found = run_threads(all_ranks, 2, "nccl", timeout=30)
    assert found[1] == f"{error.__name__}: no memory on the GPU"
    assert found[0].endswith(f"rank 1: {error.__name__}: no memory on the GPU")
    assert aborted == [0]


@pytest.mark.parametrize("least", [0, 1])
def test_fp8_needs_gpus_that_reduce_it(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """UnsupportedError on all ranks before anything is sent, where one of them has an older GPU;
    moving such arrays works everywhere."""
    monkeypatch.setattr(
        fake_gpu_threaded.Gpu, "capability", lambda gpu: 90 - 10 * (gpu.index == least)
    )

    def body(rank: int) -> float:
        x = gpus.array(np.ones(3, ml_dtypes.float8_e5m2) * (rank + 1))
        with pytest.raises(dist.UnsupportedError, match=r"capability.*9.0 or more.*8.0"):
            dist.all_reduce(x)
        dist.broadcast(x, 1)
        return float(x.get()[0])

    assert run_threads(body, 2, "nccl") == [2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "7"}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCHELASTIC_RUN_ID": "7"}, True),
        (
            {
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "7",
                "CYDIST_NCCL_ASYNC_ERROR_HANDLING": "1",
            },
            True,
        ),
        (
            {
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "7",
                "CYDIST_RUN_ID": "7",
            },
            True,
        ),
    ],
    ids=["nothing", "the user", "torchrun", "the user of torchrun", "both", "cydistrun"],
)  # fmt: skip
def test_whose_choice_ends_a_process(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], ends: bool
) -> None:
    """torchrun sets torch's variable for every job: groups that fail raise there all the same."""
    for name in (*config.NCCL_ERROR_HANDLING.names, *config.RUN_ID.names, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert failure._ends_process() is ends


def test_a_shrunk_group_is_called_by_its_description(gpus: Any) -> None:
    """As the group whose place it takes, also by its host group."""

    def body(rank: int) -> list[str]:
        group: Any = dist.new_group([0, 1], group_desc="trainers")
        made: Any = dist.shrink_group([1], group) if rank == 0 else group
        if rank == 1:
            with contextlib.suppress(dist.DistError):
                dist.shrink_group([1], group)
        return [group.title, group.host.title, made.title, made.host.title]

    assert run_threads(body, 2, "nccl")[0] == ["group 'trainers'"] * 4

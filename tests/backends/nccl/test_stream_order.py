"""When calls run: behind what the caller's stream holds, and before what comes after `wait`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import fake_gpu_threaded
import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads


@pytest.fixture
def job(gpu_jobs: Any) -> Any:
    """Two ranks with a GPU each."""
    return gpu_jobs.get(2)


def test_a_blocking_call_runs_on_the_callers_stream(job: Any, gpus: Any) -> None:
    """It returns although the stream is held back, and runs when the stream goes on."""

    def body(rank: int) -> tuple[bool, float]:
        with gpus.on_stream(rank, 40 + rank):
            gate = gpus.hold()
            x = gpus.array(np.ones(3))
            dist.all_reduce(x)
            before = bool((x.memory == 2).any())
            gate.set()
            return before, x.get()[0]

    assert job.run(body) == [(False, 2.0)] * 2


def test_an_asynchronous_call_comes_after_the_callers_stream(job: Any, gpus: Any) -> None:
    """What the caller's stream still has to write is in the result."""

    def body(rank: int) -> tuple[bool, bool, float]:
        gate = gpus.hold()
        x = gpus.array(np.ones(3))
        work = dist.all_reduce(x, async_op=True)
        under_way = work.is_completed()
        gate.set()
        work.synchronize()
        return under_way, work.is_success(), x.memory[0]

    assert job.run(body) == [(False, True, 2.0)] * 2


def test_wait_orders_the_current_stream_and_does_not_block(job: Any, gpus: Any) -> None:
    """wait() returns while the call is under way; what is enqueued then sees its result."""

    def body(rank: int) -> tuple[bool, bool, float]:
        x = gpus.array(np.ones(3))
        gate = gpus.hold()
        work = dist.all_reduce(x, async_op=True)
        with gpus.on_stream(rank, 50 + rank):
            waited = work.wait()
            seen = np.zeros(3)
            gpus.enqueue(50 + rank, lambda: np.copyto(seen, x.memory))
            over = work.is_completed()
            gate.set()
            gpus.synchronize(50 + rank)
        return waited, over, seen[0]

    assert job.run(body) == [(True, False, 2.0)] * 2


def test_arrays_of_a_call_stay_until_it_is_over(job: Any, gpus: Any) -> None:
    """A caller may drop an array after an asynchronous call: its memory is not used again."""

    def body(rank: int) -> tuple[bool, bool]:
        gate = gpus.hold()
        x = gpus.array(np.ones(3, "i4"))
        kept = weakref.ref(x)
        work = dist.all_reduce(x, dist.ReduceOp.BOR, async_op=True)
        work._result = None
        del x
        stayed = kept() is not None
        gate.set()
        work.synchronize()
        fake_gpu_threaded.until(lambda: work.flight.over)
        return stayed, kept() is None

    assert job.run(body) == [(True, True)] * 2


def test_a_blocking_call_keeps_no_array(job: Any, gpus: Any) -> None:
    """It is on the stream that the array's memory belongs to, whose next user comes later: the
    memory is given up with the array, not at the watchdog's next look."""

    def body(rank: int) -> tuple[bool, float]:
        gate = gpus.hold()
        x = gpus.array(np.ones(3))
        kept, memory = weakref.ref(x.whole), x.memory
        dist.all_reduce(x)
        seen = np.zeros(3)
        gpus.enqueue(gpus.current_stream(rank), lambda: np.copyto(seen, memory))
        del x
        given_up = kept() is None
        gate.set()
        gpus.synchronize(gpus.current_stream(rank))
        return given_up, seen[0]

    assert job.run(body) == [(True, 2.0)] * 2


def test_a_strided_result_is_unpacked_in_its_turn(job: Any, gpus: Any) -> None:
    """After wait() the caller's own layout holds the result, not before."""

    def body(rank: int) -> tuple[np.ndarray, bool]:
        x = gpus.array(np.arange(6.0).reshape(2, 3))
        gate = gpus.hold()
        work = dist.all_reduce(x.view(x.memory.T), async_op=True)
        early = bool(work.is_completed())
        gate.set()
        work.wait()
        return x.get(), early

    for found, early in job.run(body):
        np.testing.assert_array_equal(found, 2 * np.arange(6.0).reshape(2, 3))
        assert not early


def test_a_barrier_waits_for_the_gpu(job: Any, gpus: Any) -> None:
    """It returns when every rank's streams have come so far, on all ranks."""

    def body(rank: int) -> bool:
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)
        dist.barrier()
        return bool((x.memory == 2).all())

    assert job.run(body) == [True, True]


def test_messages_of_a_batch_are_one_group(job: Any, gpus: Any, standin: Any) -> None:
    """Both ranks receive before they send; together nobody waits for the other."""
    standin.log()

    def body(rank: int) -> tuple[float, int]:
        out, into = gpus.array(np.full(3, rank + 1.0)), gpus.array(np.zeros(3))
        strided = gpus.array(np.zeros((3, 2)))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, into, 1 - rank),
                dist.P2POp(dist.irecv, strided[:, 1], 1 - rank),
                dist.P2POp(dist.isend, out, 1 - rank),
                dist.P2POp(dist.isend, out, 1 - rank),
            ]
        )
        for work in works:
            work.wait()
        return into.get()[0], strided.get()[2, 1], works[0].source_rank()

    assert job.run(body) == [(2.0, 2.0, 1), (1.0, 1.0, 0)]
    lines = [line.split()[1] for line in standin.log()]
    assert (lines.count("group_start"), lines.count("group_end")) == (2, 2)
    assert (lines.count("send"), lines.count("recv")) == (4, 4)


def test_send_and_recv(job: Any, gpus: Any) -> None:
    """A blocking message orders the current stream, as a blocking collective does."""

    def body(rank: int) -> Any:
        x = gpus.array(np.full(4, 7 * (1 - rank), "i2"))
        if rank == 0:
            return dist.send(x, 1)
        return dist.recv(x, 0), x.get().tolist()

    assert job.run(body) == [None, (0, [7] * 4)]


@pytest.mark.parametrize("how", ["wait", "synchronize", "future"])
def test_a_strided_message_is_unpacked_behind_the_receive(job: Any, gpus: Any, how: str) -> None:
    """On the group's stream: who waits for the GPU finds it, though the current stream is held."""

    def body(rank: int) -> Any:
        x = gpus.array(np.arange(6.0).reshape(2, 3) * (1 - rank))
        part = x.view(x.memory.T)
        if rank == 0:
            dist.isend(part, 1).synchronize()
            return None
        work = dist.irecv(part, 0)
        if how == "wait":
            work.wait()
            return x.get()
        gate = gpus.hold()
        if how == "synchronize":
            work.synchronize()
        else:
            work.get_future().result(fake_gpu_threaded.DEADLINE)
        found = x.memory.copy()
        gate.set()
        return found

    np.testing.assert_array_equal(job.run(body)[1], np.arange(6.0).reshape(2, 3))


def test_a_receive_from_anyone_is_refused(job: Any, gpus: Any) -> None:
    """UnsupportedError that names backends which can; the group stays usable."""

    def body(rank: int) -> float:
        x = gpus.array(np.ones(3))
        with pytest.raises(dist.UnsupportedError, match=r"irecv from anyone.*'tcp' or 'mpi'"):
            dist.irecv(x)
        dist.all_reduce(x)
        return x.get()[0]

    assert job.run(body) == [2.0, 2.0]


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_refused_function_does_not_count(job: Any, gpus: Any, async_op: bool) -> None:
    """The call itself raises, and the rank that tried is not ahead of the others."""

    def body(rank: int) -> float:
        x = gpus.array(np.ones(3))
        if rank == 0:
            op = dist.ReduceOp.create(np.maximum)
            with pytest.raises(dist.UnsupportedError, match="in CPU memory"):
                dist.all_reduce(x, op, async_op=async_op)
            with pytest.raises(dist.UnsupportedError, match="in CPU memory"):
                dist.all_reduce_coalesced([x], op, async_op=async_op)
        dist.all_reduce(x)
        return float(x.get()[0])

    assert job.run(body) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda gpus, rank: dist.all_reduce(np.ones(3)), "takes arrays on GPUs.*cpu:tcp,cuda:nccl"),
        (lambda gpus, rank: dist.scan(gpus.array(np.ones(3))), "scan: backend 'nccl' has none"),
        (lambda gpus, rank: dist.exscan(gpus.array(np.ones(3))), "exscan: backend 'nccl' has none"),
        (
            lambda gpus, rank: dist.all_reduce(
                gpus.array(np.ones(3)), dist.ReduceOp.create(np.maximum)
            ),
            r"maximum.* in CPU memory.*'nccl' does not bring it there.*'tcp' or 'mpi'",
        ),
    ],
    ids=["host array", "scan", "exscan", "function"],
)
def test_what_nccl_has_not_is_refused(job: Any, gpus: Any, call: Callable, message: str) -> None:
    """UnsupportedError that says what to use; the group stays usable."""

    def body(rank: int) -> float:
        with pytest.raises(dist.UnsupportedError, match=message):
            call(gpus, rank)
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)
        return x.get()[0]

    assert job.run(body) == [2.0, 2.0]


def test_arrays_of_another_gpu_are_refused(job: Any, gpus: Any) -> None:
    """ValueError that names both GPUs; the group stays usable."""

    def body(rank: int) -> float:
        x = gpus.array(np.ones(3))
        elsewhere = fake_gpu_threaded.GpuArray(gpus, x.memory, 7)
        with pytest.raises(
            ValueError, match=f"on GPU 7, and the default group was made on GPU {rank}"
        ):
            dist.all_reduce(elsewhere)
        dist.all_reduce(x)
        return x.get()[0]

    assert job.run(body) == [2.0, 2.0]


def test_objects_go_over_the_host_group(job: Any, gpus: Any) -> None:
    """Object collectives and monitored_barrier work on a group of GPUs alone."""

    def body(rank: int) -> Any:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, {"rank": rank})
        dist.monitored_barrier()
        said = [rank]
        dist.broadcast_object_list(said, 1)
        return gathered, said

    assert job.run(body) == [([{"rank": 0}, {"rank": 1}], [1])] * 2


def test_coalesced_calls_are_one_group(job: Any, gpus: Any, standin: Any) -> None:
    """Many arrays, each where it is, in one group of NCCL's; the steps of ours in between."""

    def body(rank: int) -> Any:
        arrays = [gpus.array(np.full(n, rank + 1.0)) for n in (3, 0, 5)]
        dist.all_reduce_coalesced(arrays)
        bits = [gpus.array(np.full(n, rank + 1, "u2")) for n in (3, 5)]
        dist.all_reduce_coalesced(bits, dist.ReduceOp.BOR, async_op=True).wait()
        return [x.get().tolist() for x in arrays + bits]

    expected = [[3.0] * 3, [], [3.0] * 5, [3] * 3, [3] * 5]
    standin.log()
    assert job.run(body) == [expected] * 2
    lines = [line.split()[1] for line in standin.log() if line[0] in "-0"]
    assert lines.count("group_start") == 2 * 3
    assert lines.count("all_reduce") == 2


def test_coalesced_gathers_and_scatters(job: Any, gpus: Any) -> None:
    """The other coalesced forms, strided outputs too."""

    def body(rank: int) -> Any:
        given = [gpus.array(np.full(n, 10 * rank + n, "i4")) for n in (2, 3)]
        lists = [[gpus.array(np.zeros(n, "i4")) for n in (2, 3)] for _ in range(2)]
        dist.all_gather_coalesced(lists, given)
        wide = [gpus.array(np.zeros((2 * n, 2), "i4")) for n in (2, 3)]
        dist.all_gather_into_tensor_coalesced([x[:, 0] for x in wide], given)
        parts = [gpus.array(np.zeros(n, "i4")) for n in (2, 3)]
        dist.reduce_scatter_tensor_coalesced(
            parts, [gpus.array(np.arange(2 * n, dtype="i4")) for n in (2, 3)]
        )
        return (
            [[x.get().tolist() for x in each] for each in lists],
            [x.get()[:, 0].tolist() for x in wide],
            [x.get().tolist() for x in parts],
        )

    for rank, (lists, wide, parts) in enumerate(job.run(body)):
        assert lists == [[[10 * r + n] * n for n in (2, 3)] for r in range(2)]
        assert wide == [[n] * n + [10 + n] * n for n in (2, 3)]
        assert parts == [[2 * (rank * n + i) for i in range(n)] for n in (2, 3)]


def test_devices_have_backends_of_their_own(gpus: Any) -> None:
    """ "cpu:tcp,cuda:nccl": an array's memory says which backend serves it."""

    def body(rank: int) -> Any:
        x, y = np.ones(2), gpus.array(np.ones(2))
        dist.all_reduce(x)
        dist.all_reduce(y)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank)
        dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, y, 1 - rank), dist.P2POp(dist.isend, gpus.array(x), 1 - rank)]
        )[0].wait()
        return x.tolist(), y.get().tolist(), gathered

    assert run_threads(body, 2, "cpu:tcp,cuda:nccl") == [([2.0, 2.0], [2.0, 2.0], [0, 1])] * 2


def test_a_future_has_its_result_when_the_gpu_is_done(job: Any, gpus: Any) -> None:
    """get_future waits for the GPU, unlike wait()."""

    def body(rank: int) -> Any:
        gate = gpus.hold()
        x = gpus.array(np.ones(3))
        future = dist.all_reduce(x, async_op=True).get_future()
        early = future.done()
        gate.set()
        (found,) = future.result(30)
        return early, found is x, x.memory[0]

    assert job.run(body) == [(False, True, 2.0)] * 2


def test_blocking_wait_blocks(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL_BLOCKING_WAIT a call that returns is over."""
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")

    def body(rank: int) -> Any:
        x = gpus.array(np.ones(3))
        dist.all_reduce(x)
        first = x.memory[0]
        dist.all_reduce(x, async_op=True).wait()
        y = gpus.array(np.full(3, rank + 1.0))
        (dist.isend if rank == 0 else dist.irecv)(y, 1 - rank).wait()
        return first, x.memory[0], y.memory[0]

    assert run_threads(body, 2, "nccl") == [(2.0, 4.0, 1.0)] * 2


@pytest.mark.parametrize("number", [1, 2], ids=["for-that-stream", "for-another"])
def test_the_collector_may_come_while_a_stream_is_made(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Memory that it gives up then goes to its stream, which exists once."""
    library = fake_gpu_threaded.Gpus()
    with library.on_stream(0, number):
        kept = [library.allocate(0, 1)]
    threads: list[threading.Thread] = []

    def collected() -> fake_gpu_threaded.Stream:
        monkeypatch.undo()
        kept.clear()
        library.enqueue(number, lambda: threads.append(threading.current_thread()))
        return original()

    def use() -> None:
        for stream in (1, number):
            library.enqueue(stream, lambda: threads.append(threading.current_thread()))
            library.synchronize(stream)

    original = fake_gpu_threaded.Stream
    monkeypatch.setattr(fake_gpu_threaded, "Stream", collected)
    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(fake_gpu_threaded.DEADLINE)
    assert not user.is_alive()
    assert len(set(threads)) == number


def test_a_shorter_message_leaves_the_end_as_it_is(job: Any, gpus: Any) -> None:
    """NCCL completes the receive, and nothing says so; docs/guide/gpu.md warns of it."""

    def body(rank: int) -> list[float]:
        x = gpus.array(np.full(5 - 2 * (rank == 0), float(rank)))
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        found: list[float] = x.get().tolist()
        return found

    assert job.run(body) == [[0.0] * 3, [0.0, 0.0, 0.0, 1.0, 1.0]]


def test_a_longer_message_is_an_error(gpus: Any) -> None:
    """NCCL's own, of the rank that receives."""

    def body(rank: int) -> str:
        x = gpus.array(np.full(3 + 2 * (rank == 0), float(rank)))
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        group: Any = dist.group.WORLD
        fake_gpu_threaded.until(lambda: group.error is not None or rank == 0)
        return f"{type(group.error).__name__}: {group.error}"

    found = run_threads(body, 2, "nccl")
    assert found[1].startswith("DistBackendError: irecv ")
    assert "NCCL says: invalid usage" in found[1]


def test_vectors_are_exchanged_by_nccls_own_all_to_all(
    job: Any, gpus: Any, standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From NCCL 2.28 on: one call in place of a group of 2 for each rank."""

    def body(rank: int) -> list[float]:
        x, y = gpus.array(np.arange(2.0) + 10 * rank), gpus.array(np.zeros(2))
        dist.all_to_all_single(y, x, None, None, dist.group.WORLD, False)
        found: list[float] = y.get().tolist()
        return found

    standin.log()
    assert job.run(body) == [[0.0, 10.0], [1.0, 11.0]]
    assert sum(line.endswith(" all_to_all") for line in standin.log()) == 2
    monkeypatch.setenv("STANDIN_VERSION", "22700")
    assert run_threads(body, 2, "nccl") == [[0.0, 10.0], [1.0, 11.0]]
    assert not [line for line in standin.log() if line.endswith(" all_to_all")]

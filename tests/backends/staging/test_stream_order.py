"""Arrays of a GPU on backends for the CPU: order among streams, failures, memory."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from fake_gpu_delayed import LateDevice, install

import cydist as dist
from cydist.backends.host import pinned_pipeline, staging_group, staging_p2p
from cydist.testing import run_threads

SLOT = 1 << 10


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return install(monkeypatch, "late", SLOT)


def pinned(device: LateDevice) -> int:
    """Bytes of pinned memory that nobody has let go of."""
    for _ in range(3):  # the stand-in says that a copy is over when it is asked twice
        pinned_pipeline.reclaim()
    gc.collect()
    return device.pinned_bytes


def test_reads_what_is_enqueued_before_and_is_read_by_what_comes_after(device) -> None:
    """A blocking call takes its place in the caller's stream, and waits for nothing behind it."""

    def body(rank):
        x = device.array(np.zeros(1000), rank)
        with device.on_stream(rank, 500 + rank):
            device.wait(rank, 500 + rank, _marked(device, rank, 10 + rank))
            device.fill(x, np.full(1000, rank + 1.0))
            dist.all_reduce(x)
            found = device.read_later(x)
            device.fill(x, np.zeros(1000))
            assert found().tolist() == [3.0] * 1000
        assert x.get().tolist() == [0.0] * 1000

    run_threads(body, 2)


def _marked(device: LateDevice, index: int, stream: int):
    event = device.event(index)
    device.record(event, index, stream)
    return event


def test_an_asynchronous_call_is_ordered_after_the_stream_at_the_call(device) -> None:
    """What is enqueued before the call is in it; its result is there after wait."""

    def body(rank):
        xs = [device.array(np.full(700, float(i)), rank) for i in range(4)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        for work in works:
            assert work.wait(60)
        assert all(work.is_success() for work in works)
        for i, x in enumerate(xs):
            assert x.memory.tolist() == [2.0 * i] * 700

    run_threads(body, 2)


def test_arrays_live_until_the_call_is_over(device) -> None:
    """An asynchronous call keeps its arrays while it runs, and not longer."""

    def body(rank):
        x = device.array(np.ones(5000), rank)
        found = weakref.ref(x)
        work = dist.all_reduce(x, async_op=True)
        del x
        if rank == 1:
            assert found() is not None
        dist.barrier()
        work.wait(60)
        del work
        device.synchronize(device.current_stream(rank))
        gc.collect()
        assert found() is None

    run_threads(body, 2)


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_pinned_memory_is_bounded(device, size) -> None:
    """A group pins a few slots, however large its arrays are, and none when it has ended."""

    def body(rank):
        x = device.array(np.ones(size), rank)
        for _ in range(5):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.all_gather_into_tensor(device.array(np.zeros(2 * size), rank), x)
        assert x.get()[0] == 2.0**5

    run_threads(body, 2)
    assert 0 < device.most_pinned_bytes <= 2 * staging_group.SLOTS * SLOT
    assert pinned(device) == 0


def test_a_slot_grows_when_nothing_copies_there(device) -> None:
    """A large call after a small one whose copy back is still to come."""

    def body(rank):
        small, large = device.array(np.ones(3), rank), device.array(np.ones(2000), rank)
        dist.all_reduce(small)
        dist.all_reduce(large)
        assert large.get().tolist() == [2.0] * 2000
        assert small.get().tolist() == [2.0] * 3

    run_threads(body, 2)


def test_pinned_memory_of_messages_is_bounded(device) -> None:
    """A message under way pins two pieces at most, and one that is over none in the end."""

    def body(rank):
        x = device.array(np.full(100_000, rank), rank)
        y = device.array(np.zeros(100_000, int), rank)
        for _ in range(4):
            work = dist.isend(x, 1 - rank)
            dist.recv(y, 1 - rank)
            work.wait(60)
        assert y.get().tolist() == [1 - rank] * 100_000

    run_threads(body, 2)
    assert 0 < device.most_pinned_bytes <= 4 * staging_p2p.SLOTS * SLOT
    assert pinned(device) == 0


def test_messages_with_one_tag_keep_their_order(device) -> None:
    """Long and short ones, to one peer: each receive takes the message that was sent then."""
    sizes = [1, 3000, 0, 5, 777, 10_000, 2]

    def body(rank):
        if rank == 0:
            works = [dist.isend(device.array(np.full(n, i), 0), 1) for i, n in enumerate(sizes)]
        else:
            outs = [device.array(np.zeros(n, int), 1) for n in sizes]
            works = [dist.irecv(out, 0 if i % 2 else None) for i, out in enumerate(outs)]
        for work in works:
            work.wait(60)
        if rank == 1:
            for i, (n, out) in enumerate(zip(sizes, outs, strict=True)):
                assert out.get().tolist() == [i] * n

    run_threads(body, 2)


@pytest.mark.parametrize("backend", ["tcp", "cpu:tcp,cuda:tcp", "cpu:inproc,cuda:tcp"])
def test_on_other_backends(device, backend) -> None:
    """Staging is for every backend that takes the CPU's memory; host arrays go as ever."""

    def body(rank):
        x, y = device.array(np.full(3000, rank + 1), rank), np.full(10, rank)
        dist.all_reduce(x)
        dist.all_reduce(y)
        z = device.array(np.zeros(3000, int), rank)
        work = dist.isend(x, (rank + 1) % 3)
        dist.recv(z, (rank - 1) % 3)
        work.wait(60)
        assert z.get().tolist() == [6] * 3000
        assert y.tolist() == [3] * 10

    run_threads(body, 3, backend)


def test_threads_of_ours_begin_on_the_arrays_gpu(device, monkeypatch) -> None:
    """And stay there: cupy leaves GPU 0 current, and a context on it, behind each step of a thread
    that has none. The caller's own thread is left where it is."""
    adopted = [], []

    def adopt(index):
        adopted[index].append(threading.current_thread().name)

    def body(rank):
        x, y = (device.array(np.ones(3000), rank) for _ in range(2))
        dist.all_reduce(x)
        assert adopted[rank] == []
        dist.all_reduce(x, async_op=True).wait()
        assert adopted[rank] == ["cydist"]
        works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
        for work in works:
            work.wait()
        assert adopted[rank] == ["cydist"] * 3

    monkeypatch.setattr(device, "adopt", adopt)
    run_threads(body, 2)


# What is refused before anything is sent.


def test_arrays_of_two_places_are_refused(device) -> None:
    """Host and device memory, or two devices, in one call: ValueError names them; nothing was
    sent."""

    def body(rank):
        here, there, elsewhere = np.zeros(2), device.array(np.zeros(1)), device.array([0.0], 1)
        with pytest.raises(ValueError, match="one device, found cpu:0, cuda:0"):
            dist.all_gather_into_tensor(here, there)
        with pytest.raises(ValueError, match="one device, found cuda:0, cuda:1"):
            dist.all_gather([there, elsewhere], there)
        with pytest.raises(ValueError, match="one device, found cpu:0, cuda:0"):
            dist.all_reduce_coalesced([here, there])
        dist.barrier()

    run_threads(body, 2)


# What goes wrong in the middle.


@pytest.mark.parametrize("sizes", [(1000, 1001), (1000, 128), (3, 5000)], ids=str)
def test_ranks_that_disagree_find_out(device, sizes) -> None:
    """Different sizes are a MismatchError on every rank, whatever the chunks; no slot is lost."""

    def body(rank):
        x = device.array(np.ones(sizes[rank], "i4"), rank)
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(x)
        dist.destroy_process_group()

    run_threads(body, 2)
    assert pinned(device) == 0


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_into_tensor"])
def test_the_other_kind_of_memory_is_a_mismatch(device, backend, name) -> None:
    """A rank whose array is on the CPU and one whose array goes in chunks: both are told."""

    def told(call, *arguments):
        call(*arguments)
        dist.barrier()  # a root may have been let go

    def body(rank):
        on = np.array if rank else device.array
        x, y = on(np.ones(300, "i4")), on(np.ones(600, "i4"))
        call, *arguments = {
            "all_reduce": (dist.all_reduce, x),
            "broadcast": (dist.broadcast, x, 0),
            "all_gather_into_tensor": (dist.all_gather_into_tensor, y, x),
        }[name]
        with pytest.raises(dist.MismatchError, match="in chunks, as arrays on a GPU go"):
            told(call, *arguments)
        dist.destroy_process_group()

    run_threads(body, 2, backend)


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
@pytest.mark.parametrize("on_gpu", [0, 1], ids=["gpu-sends", "gpu-receives"])
@pytest.mark.parametrize("count", [10 * SLOT, staging_p2p.HEADER.size], ids=["long", "short"])
def test_a_message_in_chunks_is_none_for_the_cpu(device, backend, on_gpu, count) -> None:
    """A long message of a GPU's array and one of the CPU's, of its size or its header's: both
    ranks are told, and nothing is received."""

    def told(call, x, peer):
        call(x, peer)
        dist.barrier()  # a send may have been let go

    def body(rank):
        on_host = np.full(count, 7, "u1")
        x = device.array(np.ones(10 * SLOT, "u1")) if rank == on_gpu else on_host
        with pytest.raises(dist.MismatchError, match="in chunks, as arrays on a GPU go"):
            told(dist.recv if rank else dist.send, x, 1 - rank)
        assert on_host.tolist() == [7] * count
        dist.destroy_process_group()

    run_threads(body, 2, backend)


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_a_long_message_of_another_dtype_is_a_mismatch(device, backend) -> None:
    """As many bytes, and both ranks are told."""

    def told(call, x, peer):
        call(x, peer)
        dist.barrier()

    def body(rank):
        x = device.array(np.ones(SLOT, "i4" if rank else "f4"))
        with pytest.raises(dist.MismatchError, match="1024 float32, in chunks"):
            told(dist.recv if rank else dist.send, x, 1 - rank)
        dist.destroy_process_group()

    run_threads(body, 2, backend)


def test_threads_that_come_first_share(device, monkeypatch) -> None:
    """Two threads' first arrays of a GPU at a time go the same way, with one count of messages."""
    made, make = [], staging_group.StagedGroup.__init__

    def body(rank):
        group, found = dist.group.WORLD, []
        other = threading.Thread(target=lambda: found.append(group.for_device("cuda")))

        def meanwhile(self, host):
            if not made:
                made.append(self)
                other.start()
                other.join(0.2)  # it has to wait
            make(self, host)

        monkeypatch.setattr(staging_group.StagedGroup, "__init__", meanwhile)
        found.append(group.for_device("cuda"))
        other.join(60)
        assert found[0] is found[1]

    run_threads(body, 1)


def test_sizes_that_only_pairs_know_are_compared(device) -> None:
    """gather: every rank names the two that do not fit together."""

    def body(rank):
        x = device.array(np.ones(10), rank)
        outs = [device.array(np.ones(n), rank) for n in (10, 10, 11)]
        with pytest.raises(dist.MismatchError, match=r"rank 2 sends 10 .* rank 0 expects 11"):
            dist.gather(x, None if rank else outs, 0)
        dist.destroy_process_group()

    run_threads(body, 3)
    assert pinned(device) == 0


@pytest.mark.long
@pytest.mark.parametrize("size", [10, 3000], ids=["whole", "pieces"])
def test_a_message_may_take_longer_than_its_group_says(device, size) -> None:
    """It has the time that it was given, though the group's second has passed."""

    def body(rank):
        group, silent = dist.new_group(), dist.new_group()
        group.timeout = 1.0  # once it is made, which takes its time on a busy machine
        x = device.array(np.full(size, rank + 1.0), rank)
        if rank == 0:
            dist.recv(x, 1, group, timeout=60)
            assert x.get().tolist() == [2.0] * size
        else:
            with pytest.raises(dist.DistTimeoutError):
                dist.recv(np.ones(1), 0, silent, timeout=1.5)
            dist.send(x, 0, group, timeout=60)
        dist.barrier()

    run_threads(body, 2)


def test_messages_of_different_sizes_are_a_mismatch(device) -> None:
    """Both are long, and their pieces would fit for a while: the receiver says what it expected."""

    def body(rank):
        x = device.array(np.ones(1000 + 1000 * rank), rank)
        if rank == 0:
            dist.isend(x, 1)
        else:
            with pytest.raises(dist.MismatchError, match=r"2000 float64, in chunks.* 1000 float64"):
                dist.recv(x, 0)

    run_threads(body, 2)


def test_a_stuck_device_is_a_timeout(device) -> None:
    """A copy that does not come ends at the deadline; what it may still touch, pinned memory and
    the user's, stays until it may be freed."""
    arrays = []

    def body(rank):
        x = device.array(np.ones(1000), rank)
        arrays.append(weakref.ref(x))
        dist.barrier()
        device.stuck = True
        error = None
        try:
            dist.all_reduce(x, timeout=0.5)
        except dist.DistTimeoutError as raised:
            error = str(raised)
        assert "device 0 has not come" in error
        with pytest.raises(dist.GroupFailedError):
            dist.barrier()

    run_threads(body, 1)
    assert pinned(device) > 0
    assert arrays[0]() is not None
    device.stuck = False
    assert pinned(device) == 0
    assert arrays[0]() is None


def test_an_error_of_the_device_is_raised(device) -> None:
    """What CUDA says reaches the caller, the group fails, and other ranks hear of it."""

    def body(rank):
        x = device.array(np.ones(1000), rank)
        dist.barrier()
        if rank == 0:
            device.error = RuntimeError("an illegal memory access")
        with pytest.raises((RuntimeError, dist.DistError)):
            dist.all_reduce(x)
        with pytest.raises(dist.GroupFailedError):
            dist.barrier()

    run_threads(body, 2)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_peer_that_gives_up_in_the_middle(device, chunks, monkeypatch) -> None:
    """A rank that fails after some chunks ends the call for the others; no slot is lost."""
    done = [0]

    def body(rank):
        x = device.array(np.ones(2000), rank)
        group = dist.group.WORLD
        if rank == 0:
            real = group.run_collective

            def failing(*arguments, **options):
                if done[0] == chunks:
                    raise RuntimeError("rank 0 stumbles")
                done[0] += 1
                real(*arguments, **options)

            group.run_collective = failing
        with pytest.raises((RuntimeError, dist.DistError)):
            dist.all_reduce(x)
        with pytest.raises(dist.GroupFailedError):
            dist.all_reduce(x)

    run_threads(body, 2)
    assert pinned(device) == 0


def test_abort_ends_a_staged_call(device) -> None:
    """A rank that waits for another in the middle of a call is set free by abort."""

    def body(rank):
        x = device.array(np.ones(2000), rank)
        dist.all_reduce(x)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            dist.abort()
            with pytest.raises(dist.DistError):
                work.wait(30)

    run_threads(body, 2)
    assert pinned(device) == 0


def test_a_subgroup_and_a_shrunk_world_stage_too(device) -> None:
    """Groups made of groups have slots of their own."""

    def body(rank):
        group = dist.new_group([0, 2])
        x = device.array(np.ones(500), rank)
        if rank != 1:
            dist.all_reduce(x, group=group)
            assert x.get()[0] == 2.0
        dist.all_reduce(x)
        return x.get()[0]

    assert run_threads(body, 3) == [5.0, 5.0, 5.0]
    assert pinned(device) == 0

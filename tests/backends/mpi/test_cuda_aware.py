"""Arrays of a GPU that MPI is told it may read; the GPU is one for tests, in host memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu_delayed import install

import cydist as dist
from cydist.backends.mpi import group as mpi_group
from cydist.backends.mpi import runtime
from cydist.tuning import table as tuning_table


@pytest.fixture
def device(monkeypatch):
    """A GPU on which all happens as late as it may; MPI does not say what it takes."""
    monkeypatch.setenv("CYDIST_MPI_CUDA_AWARE", "1")
    monkeypatch.setattr(mpi_group, "check_cuda_aware", lambda: None)
    return install(monkeypatch, "late", 1 << 16)


def apart(device, values):
    """Rows as arrays that do not lie one behind the other, in the order of the last first."""
    return [device.array(row) for row in values[::-1]][::-1]


def together(device, values):
    """Rows of one array."""
    whole = device.array(values)
    return [whole[i] for i in range(len(values))]


# From one array, and one for each rank, to one for each rank.
CALLS = {
    "broadcast": lambda x, xs, ys, how: dist.broadcast(x, 1, **how),
    "all_reduce": lambda x, xs, ys, how: dist.all_reduce(x, **how),
    "reduce": lambda x, xs, ys, how: dist.reduce(x, 1, **how),
    "all_gather": lambda x, xs, ys, how: dist.all_gather(ys, x, **how),
    "reduce_scatter": lambda x, xs, ys, how: dist.reduce_scatter(x, xs, **how),
}


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("rows", [apart, together])
@pytest.mark.parametrize("call", CALLS)
def test_mpi_reads_and_writes_the_device(device, group, rank, size, call, rows, async_op):
    """The numbers are right, before and after what is on the stream, and nothing is copied to the
    host; arrays on the CPU go in the same group."""
    x = device.array(np.full(5, rank + 1))
    xs = rows(device, np.repeat(np.arange(size) + 10 * rank, 5).reshape(size, 5))
    ys = rows(device, np.zeros((size, 5), int))
    work = CALLS[call](x, xs, ys, {"group": group, "async_op": async_op})
    if work is not None:
        work.wait()
    total = size * (size + 1) // 2
    one = {
        "broadcast": 2,
        "all_reduce": total,
        "reduce": total if rank == 1 else rank + 1,
        "reduce_scatter": 10 * (total - size) + size * rank,
    }.get(call, rank + 1)
    many = np.arange(size) + 1 if call == "all_gather" else np.zeros(size)
    found, later = device.read_later(x), [device.read_later(y) for y in ys]
    device.fill(x, np.zeros(5, int))
    assert found().tolist() == [one] * 5
    assert [each().tolist() for each in later] == [[n] * 5 for n in many.tolist()]
    assert device.moved == []
    on_host = np.ones(3)
    dist.all_reduce(on_host, group=group)
    assert on_host.tolist() == [size] * 3


def test_arrays_on_the_device_of_other_sizes_are_a_mismatch(device, group, rank, size):
    """A call on one array, too: what MPI itself reads no rank puts into a message of ours."""

    def calls():
        for _ in range(2):
            dist.all_reduce(device.array(np.ones(4 + (rank == size - 1))), group=group)

    with pytest.raises(dist.MismatchError, match=r"of [45] elements.*of [45] elements"):
        calls()


def test_mpi_swaps_blocks_of_the_device(device, group, rank, size):
    """all_to_all_single of as many elements for each, without a copy to the host."""
    given = device.array(np.repeat(np.arange(size) + 10 * rank, 5))
    taken = device.array(np.zeros(5 * size, int))
    dist.all_to_all_single(taken, given, group=group)
    assert taken.get().tolist() == np.repeat(10 * np.arange(size) + rank, 5).tolist()
    assert device.moved == []


@pytest.mark.parametrize("rows", [apart, together])
def test_mpi_reads_and_writes_long_blocks(device, group, rank, size, rows):
    """Blocks of more than 16 MiB in all, which the CPU's do not leave to MPI, are not staged."""
    count = (16 << 20) // 8 // size + 1
    xs = rows(device, np.zeros((size, count)))
    dist.all_gather(xs, device.array(np.full(count, float(rank))), group)
    assert [set(x.get().tolist()) for x in xs] == [{float(r)} for r in range(size)]
    total = device.array(np.zeros(count))
    dist.reduce_scatter(total, xs, group=group)
    assert set(total.get().tolist()) == {float(rank * size)}
    assert device.moved == []


@pytest.fixture
def small_calls(group):
    """One call of MPI moves 4 KiB at most, and not 1 GiB."""
    messages = group._endpoint.messages
    before, messages.piece_bytes = messages.piece_bytes, 1 << 12
    yield
    dist.barrier(group)
    messages.piece_bytes = before


def test_blocks_longer_than_a_call_of_mpi_are_staged(device, group, rank, size, small_calls):
    """As many elements arrive, by way of the host."""
    xs = [device.array(np.full(700, float(rank + r))) for r in range(size)]
    total = device.array(np.zeros(700))
    dist.reduce_scatter(total, xs, group=group)
    assert set(total.get().tolist()) == {float(size * (size - 1) // 2 + rank * size)}
    assert device.moved


def half(device, group, rank, size):
    x = device.array(np.ones(700, "f2"))
    dist.all_reduce(x, group=group)
    return x, size


def average(device, group, rank, size):
    x = device.array(np.full(700, float(2 * rank)))
    dist.all_reduce(x, dist.ReduceOp.AVG, group)
    return x, size - 1


def gathered(device, group, rank, size):
    xs = [device.array(np.zeros(100 * r)) for r in range(size)]
    dist.gather(device.array(np.full(100 * rank, 7.0)), xs if rank == 0 else None, 0, group)
    return (xs[-1], 7) if rank == 0 else (device.array(np.zeros(1)), 0)


def swapped(device, group, rank, size):
    x = device.array(np.zeros(700))
    work = dist.isend(device.array(np.full(700, float(rank))), (rank + 1) % size, group)
    dist.recv(x, (rank - 1) % size, group)
    work.wait()
    return x, (rank - 1) % size


def by_a_function(device, group, rank, size):
    x = device.array(np.full(700, rank + 1.0))
    dist.all_reduce(x, dist.ReduceOp.create(np.maximum), group)
    return x, size


@pytest.mark.parametrize("call", [half, average, by_a_function, gathered, swapped])
def test_what_mpi_has_not_is_staged(device, group, rank, size, call):
    """Dtypes and operations that MPI lacks, functions, lists of several sizes, and messages."""
    x, expected = call(device, group, rank, size)
    assert set(x.get().tolist()) == {expected}
    assert device.moved


def test_a_forced_algorithm_is_staged(device, group, size, monkeypatch):
    """CYDIST_ALGORITHM holds for the arrays of GPUs, too."""
    x = device.array(np.ones(700))
    with monkeypatch.context() as patch:
        patch.setenv("CYDIST_ALGORITHM", "all_reduce:ring")
        tuning_table.reload()
        dist.all_reduce(x, group=group)
    tuning_table.reload()
    assert x.get().tolist() == [size] * 700
    assert device.moved


def test_an_mpi_that_says_no_is_refused(device, group, size, monkeypatch):
    """UnsupportedError before anything is sent, and the group goes on."""
    monkeypatch.setattr(mpi_group, "check_cuda_aware", runtime.check_cuda_aware)
    said = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0)
    monkeypatch.setattr(runtime, "_library", lambda: said)
    with pytest.raises(dist.UnsupportedError, match=r"CYDIST_MPI_CUDA_AWARE is set.*no support"):
        dist.all_reduce(device.array(np.ones(3)), group=group)
    on_host = np.ones(3)
    dist.all_reduce(on_host, group=group)
    assert on_host.tolist() == [size] * 3

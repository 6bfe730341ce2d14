"""Every collective, on every backend whose ranks can be threads, against an oracle."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import cydist as dist

# tests/ is no package, so its modules are loaded by path.
_spec = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")


@pytest.fixture(params=oracle.DTYPES.values(), ids=oracle.DTYPES)
def dtype(request):
    """Every dtype that can be reduced."""
    return request.param


@pytest.fixture(params=[0, 1, 5, 1000], ids=lambda count: f"{count}elements")
def count(request):
    """Fewer elements than ranks, none, many."""
    return request.param


LAYOUTS = {
    "contiguous": lambda n, dtype: np.zeros(n, dtype),
    "every-second": lambda n, dtype: np.zeros(2 * n, dtype)[::2],
    "reversed": lambda n, dtype: np.zeros(n, dtype)[::-1],
    "column": lambda n, dtype: np.zeros((n, 3), dtype)[:, 1],
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    """Makes an array of n elements, laid out in some way."""
    return request.param


def filled(layout, values):
    """`values` in an array of some layout."""
    array = layout(values.size, values.dtype)
    array[...] = values
    return array


def everyone(size, count, dtype, each=1):
    """Contributions of all ranks; `each` arrays per rank."""
    return [
        [oracle.contribution(rank + 5 * i, count, dtype) for i in range(each)]
        for rank in range(size)
    ]


def same(expected, actual):
    """Assert bit equality, and show both when it does not hold."""
    assert oracle.same_bits(expected, actual), f"expected {expected!r}, got {actual!r}"


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_equals_the_oracle(jobs, backend, op, dtype):
    """Three ranks, every operation and dtype."""
    if not oracle.makes_sense(op, dtype):
        return refused(jobs.get(backend, 3), op, dtype)
    given = [oracle.contribution(rank, 17, dtype) for rank in range(3)]

    def body(rank):
        mine = given[rank].copy()
        dist.all_reduce(mine, getattr(dist.ReduceOp, op))
        return mine

    for mine in jobs.get(backend, 3).run(body):
        same(oracle.reduced(op, given), mine)
    return None


def refused(job, op, dtype):
    """An operation that is not defined raises before traffic; the group stays usable."""

    def body(rank):
        with pytest.raises(TypeError, match=rf"{op} of .* is not defined"):
            dist.all_reduce(np.zeros(3, dtype), getattr(dist.ReduceOp, op))
        one = np.ones(1)
        dist.all_reduce(one)
        return one[0]

    assert [3.0] * 3 == job.run(body)


def test_all_reduce_of_any_size_and_layout(job, size, count, layout):
    """World sizes, counts below and above the number of ranks, strided arrays."""
    given = [oracle.contribution(rank, count, np.dtype("f4")) for rank in range(size)]

    def body(rank):
        mine = filled(layout, given[rank])
        dist.all_reduce(mine)
        return mine

    for mine in job.run(body):
        same(oracle.reduced("SUM", given), mine)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_premul_sum_scales_each_rank_by_its_own_factor(jobs, backend, dtype):
    """PREMUL_SUM multiplies a rank's contribution by the factor that this rank gave."""
    given = [oracle.contribution(rank, 9, oracle.DTYPES[dtype]) for rank in range(3)]
    scaled = [array * array.dtype.type(2.0**rank) for rank, array in enumerate(given)]

    def body(rank):
        mine = given[rank].copy()
        dist.all_reduce(mine, dist.ReduceOp.PREMUL_SUM(2.0**rank))
        return mine

    for mine in jobs.get(backend, 3).run(body):
        same(oracle.reduced("SUM", scaled), mine)


def test_broadcast_copies_the_root(job, size, count, layout):
    """Every rank as root; strided arrays on all ranks."""
    given = oracle.contribution(1, count, np.dtype("i4"))

    def body(rank):
        results = []
        for root in range(size):
            mine = filled(layout, given * (root + 2) if rank == root else given * 0)
            dist.broadcast(mine, root)
            results.append(mine)
        return results

    for results in job.run(body):
        for root in range(size):
            same(given * (root + 2), results[root])


def test_reduce_writes_the_root_only(job, size, count, layout):
    """The root gets the result, the other ranks keep what they had."""
    given = [oracle.contribution(rank, count, np.dtype("f8")) for rank in range(size)]
    root = size - 1

    def body(rank):
        mine = filled(layout, given[rank])
        dist.reduce(mine, root)
        return mine

    for rank, mine in enumerate(job.run(body)):
        same(oracle.reduced("SUM", given) if rank == root else given[rank], mine)


def test_all_gather_into_lists(job, size, count, layout):
    """Entry r is rank r's array; strided outputs."""
    given = [oracle.contribution(rank, count, np.dtype("i2")) for rank in range(size)]

    def body(rank):
        outputs = [filled(layout, given[0] * 0) for _ in range(size)]
        dist.all_gather(outputs, filled(layout, given[rank]))
        return outputs

    for outputs in job.run(body):
        for expected, actual in zip(given, outputs, strict=True):
            same(expected, actual)


def test_all_gather_of_uneven_arrays(job, size):
    """Rank r gives r + 1 elements."""
    given = [oracle.contribution(rank, rank + 1, np.dtype("u8")) for rank in range(size)]

    def body(rank):
        outputs = [np.zeros_like(array) for array in given]
        dist.all_gather(outputs, given[rank])
        return outputs

    for outputs in job.run(body):
        for expected, actual in zip(given, outputs, strict=True):
            same(expected, actual)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in-place"])
def test_all_gather_into_tensor_concatenates(job, size, count, in_place):
    """Rows r*n:(r+1)*n come from rank r; the input may be the rank's own part of the output."""
    given = [oracle.contribution(rank, count, np.dtype("f4")) for rank in range(size)]

    def body(rank):
        output = np.zeros(size * count, "f4")
        mine = output[rank * count : (rank + 1) * count] if in_place else np.empty(count, "f4")
        mine[...] = given[rank]
        dist.all_gather_into_tensor(output, mine)
        return output

    for output in job.run(body):
        same(np.concatenate(given), output)


def test_gather_to_the_root(job, size, count, layout):
    """Uneven arrays arrive on the root in rank order."""
    given = [oracle.contribution(rank, count + rank, np.dtype("c8")) for rank in range(size)]
    root = size // 2

    def body(rank):
        outputs = [filled(layout, array * 0) for array in given] if rank == root else None
        dist.gather(filled(layout, given[rank]), outputs, dst=root)
        return outputs

    outputs = job.run(body)[root]
    for expected, actual in zip(given, outputs, strict=True):
        same(expected, actual)


def test_scatter_from_the_root(job, size, count, layout):
    """Every rank gets its entry of the root's list, uneven ones too."""
    given = [oracle.contribution(rank, count + rank, np.dtype("f2")) for rank in range(size)]
    root = size - 1

    def body(rank):
        mine = filled(layout, given[rank] * 0)
        inputs = [filled(layout, array) for array in given] if rank == root else None
        dist.scatter(mine, inputs, src=root)
        return mine

    for expected, actual in zip(given, job.run(body), strict=True):
        same(expected, actual)


def test_reduce_scatter_of_lists(job, size, count, layout):
    """Rank r gets the reduction of everybody's entry r; entries are uneven."""
    given = [
        [oracle.contribution(rank + 2 * i, count + i, np.dtype("i8")) for i in range(size)]
        for rank in range(size)
    ]

    def body(rank):
        output = filled(layout, given[0][rank] * 0)
        dist.reduce_scatter(output, [filled(layout, array) for array in given[rank]])
        return output

    for rank, output in enumerate(job.run(body)):
        same(oracle.reduced("SUM", [lists[rank] for lists in given]), output)


def test_reduce_scatter_tensor(job, size, count):
    """Rank r gets part r of the reduction."""
    given = [oracle.contribution(rank, size * count, np.dtype("f4")) for rank in range(size)]

    def body(rank):
        output = np.zeros(count, "f4")
        dist.reduce_scatter_tensor(output, given[rank], dist.ReduceOp.MAX)
        return output

    whole = oracle.reduced("MAX", given)
    for rank, output in enumerate(job.run(body)):
        same(whole[rank * count : (rank + 1) * count], output)


def test_all_to_all_of_uneven_lists(job, size, layout):
    """Entry r goes to rank r; rank s sends s + 2 r elements to rank r."""
    given = [
        [oracle.contribution(s + r, s + 2 * r, np.dtype("i4")) for r in range(size)]
        for s in range(size)
    ]

    def body(rank):
        outputs = [filled(layout, given[s][rank] * 0) for s in range(size)]
        dist.all_to_all(outputs, [filled(layout, array) for array in given[rank]])
        return outputs

    for rank, outputs in enumerate(job.run(body)):
        for s in range(size):
            same(given[s][rank], outputs[s])


def test_all_to_all_single_even(job, size, count):
    """Without split sizes the first dimension is cut evenly."""
    given = [
        oracle.contribution(rank, size * count * 2, np.dtype("f8")).reshape(size * count, 2)
        for rank in range(size)
    ]

    def body(rank):
        output = np.zeros_like(given[rank])
        dist.all_to_all_single(output, given[rank])
        return output

    for rank, output in enumerate(job.run(body)):
        rows = slice(rank * count, (rank + 1) * count)
        same(np.concatenate([array[rows] for array in given]), output)


def test_all_to_all_single_with_split_sizes(job, size):
    """Split sizes cut the first dimension; other dimensions travel along."""
    rows = [[(s + r) % 3 for r in range(size)] for s in range(size)]
    given = [
        oracle.contribution(s, sum(rows[s]) * 3, np.dtype("i4")).reshape(-1, 3) for s in range(size)
    ]

    def body(rank):
        taken = [rows[s][rank] for s in range(size)]
        output = np.zeros((sum(taken), 3), "i4")
        dist.all_to_all_single(output, given[rank], taken, rows[rank])
        return output

    for rank, output in enumerate(job.run(body)):
        parts = [np.split(given[s], np.cumsum(rows[s])[:-1])[rank] for s in range(size)]
        same(np.concatenate(parts), output)


def test_barrier_waits_for_everybody(job, size):
    """No rank leaves before the last has come."""
    arrived = []

    def body(rank):
        arrived.append(rank)
        dist.barrier()
        return len(arrived)

    assert [size] * size == job.run(body)


def test_moves_every_dtype(jobs, backend, dtype):
    """Data movement is blind to dtype: broadcast, all_gather and all_to_all."""
    given = [oracle.contribution(rank, 6, dtype) for rank in range(2)]

    def body(rank):
        copied = given[rank].copy()
        dist.broadcast(copied, 1)
        gathered = np.zeros(12, dtype)
        dist.all_gather_into_tensor(gathered, given[rank])
        swapped = np.zeros(6, dtype)
        dist.all_to_all_single(swapped, given[rank])
        return copied, gathered, swapped

    for rank, (copied, gathered, swapped) in enumerate(jobs.get(backend, 2).run(body)):
        half = slice(rank * 3, rank * 3 + 3)
        same(given[1], copied)
        same(np.concatenate(given), gathered)
        same(np.concatenate([array[half] for array in given]), swapped)


@pytest.mark.parametrize("name", ["M8[ns]", "S5", "i4,f8", ">f8", "longdouble"])
def test_moves_dtypes_that_cannot_be_reduced(jobs, backend, name):
    """Times, strings, structures, foreign byte order: moved; reductions raise."""
    given = np.frombuffer(bytes(range(1, 97)) * 4, np.uint8)[: 4 * np.dtype(name).itemsize]
    given = given.view(name)

    def body(rank):
        mine = given.copy() if rank == 0 else np.zeros_like(given)
        dist.broadcast(mine, 0)
        with pytest.raises(TypeError, match=r"SUM of .* is not defined"):
            dist.all_reduce(mine)
        return mine

    for mine in jobs.get(backend, 2).run(body):
        assert given.tobytes() == mine.tobytes()


def test_async_calls_run_in_the_order_they_were_issued(job, size):
    """Several calls outstanding; blocking ones take their turn behind them."""

    def body(rank):
        first, second, third = np.ones(3), np.full(4, 2.0), np.full(5, 3.0)
        works = [dist.all_reduce(first, async_op=True), dist.broadcast(second, 0, async_op=True)]
        dist.all_reduce(third)
        for work in works:
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
        assert works[0].result()[0] is first
        return first[0], second[0], third[0]

    assert [(size, 2.0, 3.0 * size)] * size == job.run(body)


def test_a_work_can_be_awaited_and_gives_a_future(jobs, backend):
    """`await work` and `work.get_future()` see the result."""
    import asyncio

    def body(rank):
        async def main():
            x = np.ones(2)
            await dist.all_reduce(x, async_op=True)
            return x[0]

        y = np.ones(2)
        future = dist.all_reduce(y, async_op=True).get_future()
        assert future.result(timeout=30)[0] is y
        return asyncio.run(main()), y[0]

    assert [(2.0, 2.0)] * 2 == jobs.get(backend, 2).run(body)


@pytest.mark.parametrize("ranks", [1, 5, 8, 13, 16])
def test_larger_worlds(jobs, ranks):
    """Up to 16 ranks as threads: reduce, gather and exchange."""
    given = [oracle.contribution(rank, 33, np.dtype("f4")) for rank in range(ranks)]

    def body(rank):
        total, gathered = given[rank].copy(), np.zeros(33 * ranks, "f4")
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, given[rank])
        swapped = np.zeros(ranks, "i4")
        dist.all_to_all_single(swapped, np.arange(ranks, dtype="i4") + 100 * rank)
        dist.barrier()
        return total, gathered, swapped

    for rank, (total, gathered, swapped) in enumerate(jobs.get("inproc", ranks).run(body)):
        same(oracle.reduced("SUM", given), total)
        same(np.concatenate(given), gathered)
        same(np.arange(ranks, dtype="i4") * 100 + rank, swapped)


@pytest.mark.parametrize("op", ["SUM", "MAX", "PRODUCT"])
def test_scan_and_exscan(job, size, op):
    """Rank r gets the reduction of ranks 0..r, or 0..r-1; rank 0 of exscan keeps its own."""
    given = [oracle.contribution(rank, 21, np.dtype("f4")) for rank in range(size)]

    def body(rank):
        inclusive, exclusive = given[rank].copy(), given[rank].copy()
        dist.scan(inclusive, getattr(dist.ReduceOp, op))
        dist.exscan(exclusive, getattr(dist.ReduceOp, op))
        return inclusive, exclusive

    for rank, (inclusive, exclusive) in enumerate(job.run(body)):
        same(oracle.reduced(op, given[: rank + 1]), inclusive)
        same(oracle.reduced(op, given[: rank or 1]), exclusive)

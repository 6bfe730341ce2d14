"""Every collective on every dtype, size and layout, against an oracle."""

# mypy: disable-error-code="union-attr"

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.api import process_groups
from cydist.testing import oracle
from cydist.testing.contract import Job, Jobs

Array = np.ndarray[Any, Any]
Layout = Callable[[int, Any], Array]
# A rank's calls, which return its resulting arrays; and the expected arrays.
Case = tuple[Callable[[int], list[Array]], Callable[[int], list[Array]]]

COUNTS = (0, 1, 5, 1000)  # fewer elements than ranks, none, many
LAYOUTS = {
    "contiguous": lambda n, dtype: np.zeros(n, dtype),
    "every-second": lambda n, dtype: np.zeros(2 * n, dtype)[::2],
    "reversed": lambda n, dtype: np.zeros(n, dtype)[::-1],
    "column": lambda n, dtype: np.zeros((n, 3), dtype)[:, 1],
}


@pytest.fixture(params=COUNTS, ids=lambda count: f"{count}elements")
def count(request: pytest.FixtureRequest) -> Any:
    """Provide the number of elements."""
    return request.param


def filled(layout: Layout, values: Array) -> Any:
    """`values` in an array of some layout."""
    array = layout(values.size, values.dtype)
    array[...] = values
    return array


def same(expected: Any, actual: Any) -> None:
    """Assert bit equality, and show both when it does not hold."""
    assert oracle.same_bits(expected, actual), f"expected {expected!r}, got {actual!r}"


def check(job: Job, case: Callable[[int, Layout], Case]) -> None:
    """Run `case(count, layout)` for every count and layout, one after the other."""
    names = [(count, name) for count in COUNTS for name in LAYOUTS]
    cases = [case(count, LAYOUTS[name]) for count, name in names]

    def body(rank: int) -> list[list[Array]]:
        return [act(rank) for act, _ in cases]

    for rank, results in enumerate(job.run(body)):
        for name, (_, expected), arrays in zip(names, cases, results, strict=True):
            for want, got in zip(expected(rank), arrays, strict=True):
                assert oracle.same_bits(want, got), f"{name}: expected {want!r}, got {got!r}"


@pytest.mark.parametrize("op", oracle.OPS)
def test_all_reduce_equals_the_oracle(jobs: Jobs, backend: str, op: str) -> None:
    """Three ranks, every operation and dtype. Where it is not defined it raises before traffic, and
    the group stays usable."""
    given = [
        [oracle.contribution(rank, 17, dtype) for dtype in oracle.DTYPES.values()]
        for rank in range(3)
    ]
    kind = getattr(dist.ReduceOp, op)

    def body(rank: int) -> Any:
        arrays = [array.copy() for array in given[rank]]
        for mine in arrays:
            if oracle.makes_sense(op, mine.dtype):
                dist.all_reduce(mine, kind)
            else:
                with pytest.raises(TypeError, match=rf"{op} of .* is not defined"):
                    dist.all_reduce(mine, kind)
        one = np.ones(1)
        dist.all_reduce(one)
        return arrays, one[0]

    for rank, (arrays, total) in enumerate(jobs.get(backend, 3).run(body)):
        for i, mine in enumerate(arrays):
            right = oracle.makes_sense(op, mine.dtype)
            same(
                oracle.reduced(op, [all_of[i] for all_of in given]) if right else given[rank][i],
                mine,
            )
        assert total == 3.0


def test_all_reduce_of_any_size_and_layout(job: Job, size: int) -> None:
    """World sizes, counts below and above the number of ranks, strided arrays."""

    def case(count: int, layout: Layout) -> Case:
        given = [oracle.contribution(rank, count, np.dtype("f4")) for rank in range(size)]

        def act(rank: int) -> list[Array]:
            mine = filled(layout, given[rank])
            dist.all_reduce(mine)
            return [mine]

        return act, lambda rank: [oracle.reduced("SUM", given)]

    check(job, case)


@pytest.mark.parametrize("name", ["float32", "complex64", "bfloat16"])
def test_premul_sum_scales_each_rank_by_its_own_factor(jobs: Jobs, backend: str, name: str) -> None:
    """PREMUL_SUM multiplies a rank's contribution by the factor that this rank gave."""
    given = [oracle.contribution(rank, 9, oracle.DTYPES[name]) for rank in range(3)]
    scaled = [array * array.dtype.type(2.0**rank) for rank, array in enumerate(given)]

    def body(rank: int) -> Any:
        mine = given[rank].copy()
        dist.all_reduce(mine, dist.ReduceOp.PREMUL_SUM(2.0**rank))
        return mine

    for mine in jobs.get(backend, 3).run(body):
        same(oracle.reduced("SUM", scaled), mine)


def concatenated(low: Any, high: Any) -> Any:
    """Digits behind digits: associative, and the order of the ranks shows."""
    out = np.empty_like(low)
    out["value"] = low["value"] * high["shift"] + high["value"]
    out["shift"] = low["shift"] * high["shift"]
    return out


DIGITS = np.dtype([("value", "u8"), ("shift", "u8")])


def digits(ranks: Iterable[int], count: int) -> Any:
    """Return the result of the ranks' digits, each repeated `count` times, in that order."""
    text = "".join(str(rank + 1) for rank in ranks)
    return np.array([(int(text), 10 ** len(text))] * count, DIGITS)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan", "exscan", "reduce_scatter"])
def test_a_function_of_the_users_reduces_in_rank_order(
    job: Job, size: int, count: int, name: str
) -> None:
    """Any dtype, here a structured one, and a function that does not commute."""
    op = dist.ReduceOp.create(concatenated, commutative=False)

    def body(rank: int) -> Any:
        mine = digits([rank], count)
        if name == "reduce":
            dist.reduce(mine, size - 1, op)
        elif name == "reduce_scatter":
            dist.reduce_scatter(mine, [digits([rank], count) for _ in range(size)], op)
        else:
            getattr(dist, name)(mine, op)
        return mine

    for rank, mine in enumerate(job.run(body)):
        ranks = range(size)
        if name == "scan":
            ranks = range(rank + 1)
        elif name == "exscan":
            ranks = range(rank) if rank else range(1)
        elif name == "reduce" and rank != size - 1:
            ranks = range(rank, rank + 1)
        same(digits(ranks, count), mine)


def test_broadcast_copies_the_root(job: Job, size: int) -> None:
    """Every rank as root; strided arrays on all ranks."""

    def case(count: int, layout: Layout) -> Case:
        given = oracle.contribution(1, count, np.dtype("i4"))

        def act(rank: int) -> list[Array]:
            results = []
            for root in range(size):
                mine = filled(layout, given * (root + 2) if rank == root else given * 0)
                dist.broadcast(mine, root)
                results.append(mine)
            return results

        return act, lambda rank: [given * (root + 2) for root in range(size)]

    check(job, case)


def test_reduce_writes_the_root_only(job: Job, size: int) -> None:
    """The root gets the result, the other ranks keep what they had."""
    root = size - 1

    def case(count: int, layout: Layout) -> Case:
        given = [oracle.contribution(rank, count, np.dtype("f8")) for rank in range(size)]

        def act(rank: int) -> list[Array]:
            mine = filled(layout, given[rank])
            dist.reduce(mine, root)
            return [mine]

        return act, lambda rank: [oracle.reduced("SUM", given) if rank == root else given[rank]]

    check(job, case)


def test_all_gather_into_lists(job: Job, size: int) -> None:
    """Entry r is rank r's array; strided outputs."""

    def case(count: int, layout: Layout) -> Case:
        given = [oracle.contribution(rank, count, np.dtype("i2")) for rank in range(size)]

        def act(rank: int) -> list[Array]:
            outputs = [filled(layout, given[0] * 0) for _ in range(size)]
            dist.all_gather(outputs, filled(layout, given[rank]))
            return outputs

        return act, lambda rank: given

    check(job, case)


def test_all_gather_of_uneven_arrays(job: Job, size: int) -> None:
    """Rank r gives r + 1 elements."""
    given = [oracle.contribution(rank, rank + 1, np.dtype("u8")) for rank in range(size)]

    def body(rank: int) -> Any:
        outputs = [np.zeros_like(array) for array in given]
        dist.all_gather(outputs, given[rank])
        return outputs

    for outputs in job.run(body):
        for expected, actual in zip(given, outputs, strict=True):
            same(expected, actual)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in-place"])
def test_all_gather_into_tensor_concatenates(
    job: Job, size: int, count: int, in_place: bool
) -> None:
    """Rows r*n:(r+1)*n come from rank r; the input may be the rank's own part of the output."""
    given = [oracle.contribution(rank, count, np.dtype("f4")) for rank in range(size)]

    def body(rank: int) -> Any:
        output = np.zeros(size * count, "f4")
        mine = output[rank * count : (rank + 1) * count] if in_place else np.empty(count, "f4")
        mine[...] = given[rank]
        dist.all_gather_into_tensor(output, mine)
        return output

    for output in job.run(body):
        same(np.concatenate(given), output)


def test_gather_to_the_root(job: Job, size: int) -> None:
    """Uneven arrays arrive on the root in rank order."""
    root = size // 2

    def case(count: int, layout: Layout) -> Case:
        given = [oracle.contribution(rank, count + rank, np.dtype("c8")) for rank in range(size)]

        def act(rank: int) -> list[Array]:
            outputs = [filled(layout, array * 0) for array in given] if rank == root else None
            dist.gather(filled(layout, given[rank]), outputs, dst=root)
            return outputs or []

        return act, lambda rank: given if rank == root else []

    check(job, case)


def test_scatter_from_the_root(job: Job, size: int) -> None:
    """Every rank gets its entry of the root's list, uneven ones too."""
    root = size - 1

    def case(count: int, layout: Layout) -> Case:
        given = [oracle.contribution(rank, count + rank, np.dtype("f2")) for rank in range(size)]

        def act(rank: int) -> list[Array]:
            mine = filled(layout, given[rank] * 0)
            inputs = [filled(layout, array) for array in given] if rank == root else None
            dist.scatter(mine, inputs, src=root)
            return [mine]

        return act, lambda rank: [given[rank]]

    check(job, case)


def test_reduce_scatter_of_lists(job: Job, size: int) -> None:
    """Rank r gets the reduction of all ranks' entries r; entries are uneven."""

    def case(count: int, layout: Layout) -> Case:
        given = [
            [oracle.contribution(rank + 2 * i, count + i, np.dtype("i8")) for i in range(size)]
            for rank in range(size)
        ]

        def act(rank: int) -> list[Array]:
            output = filled(layout, given[0][rank] * 0)
            dist.reduce_scatter(output, [filled(layout, array) for array in given[rank]])
            return [output]

        return act, lambda rank: [oracle.reduced("SUM", [lists[rank] for lists in given])]

    check(job, case)


def test_reduce_scatter_tensor(job: Job, size: int, count: int) -> None:
    """Rank r gets part r of the reduction."""
    given = [oracle.contribution(rank, size * count, np.dtype("f4")) for rank in range(size)]

    def body(rank: int) -> Any:
        output = np.zeros(count, "f4")
        dist.reduce_scatter_tensor(output, given[rank], dist.ReduceOp.MAX)
        return output

    whole = oracle.reduced("MAX", given)
    for rank, output in enumerate(job.run(body)):
        same(whole[rank * count : (rank + 1) * count], output)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_all_to_all_of_uneven_lists(job: Job, size: int, layout: Layout) -> None:
    """Entry r goes to rank r; rank s sends s + 2 r elements to rank r."""
    given = [
        [oracle.contribution(s + r, s + 2 * r, np.dtype("i4")) for r in range(size)]
        for s in range(size)
    ]

    def body(rank: int) -> Any:
        outputs = [filled(layout, given[s][rank] * 0) for s in range(size)]
        dist.all_to_all(outputs, [filled(layout, array) for array in given[rank]])
        return outputs

    for rank, outputs in enumerate(job.run(body)):
        for s in range(size):
            same(given[s][rank], outputs[s])


def test_all_to_all_single_even(job: Job, size: int, count: int) -> None:
    """Without split sizes the first dimension is cut evenly."""
    given = [
        oracle.contribution(rank, size * count * 2, np.dtype("f8")).reshape(size * count, 2)
        for rank in range(size)
    ]

    def body(rank: int) -> Any:
        output = np.zeros_like(given[rank])
        dist.all_to_all_single(output, given[rank])
        return output

    for rank, output in enumerate(job.run(body)):
        rows = slice(rank * count, (rank + 1) * count)
        same(np.concatenate([array[rows] for array in given]), output)


def test_all_to_all_single_with_split_sizes(job: Job, size: int) -> None:
    """Split sizes cut the first dimension; other dimensions travel along."""
    rows = [[(s + r) % 3 for r in range(size)] for s in range(size)]
    given = [
        oracle.contribution(s, sum(rows[s]) * 3, np.dtype("i4")).reshape(-1, 3) for s in range(size)
    ]

    def body(rank: int) -> Any:
        taken = [rows[s][rank] for s in range(size)]
        output = np.zeros((sum(taken), 3), "i4")
        dist.all_to_all_single(output, given[rank], taken, rows[rank])
        return output

    for rank, output in enumerate(job.run(body)):
        parts = [np.split(given[s], np.cumsum(rows[s])[:-1])[rank] for s in range(size)]
        same(np.concatenate(parts), output)


def test_barrier_waits_for_all_ranks(job: Job, size: int) -> None:
    """No rank leaves before the last has come."""

    def body(rank: int) -> Any:
        store = process_groups.current_world().store
        store.add("arrived", 1)
        dist.barrier()
        arrived = store.add("arrived", 0)
        dist.barrier()
        store.delete_key("arrived")
        return arrived

    assert [size] * size == job.run(body)


def test_monitored_barrier_lets_all_pass(job: Job, size: int) -> None:
    """It is a barrier when all come."""

    def body(rank: int) -> Any:
        dist.monitored_barrier(timeout=30)
        return True

    assert [True] * size == job.run(body)


def test_moves_every_dtype(jobs: Jobs, backend: str) -> None:
    """Data movement is blind to dtype: broadcast, all_gather and all_to_all."""
    dtypes = list(oracle.DTYPES.values())
    given = {d: [oracle.contribution(rank, 6, d) for rank in range(2)] for d in dtypes}

    def moved(rank: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        copied = given[dtype][rank].copy()
        dist.broadcast(copied, 1)
        gathered = np.zeros(12, dtype)
        dist.all_gather_into_tensor(gathered, given[dtype][rank])
        swapped = np.zeros(6, dtype)
        dist.all_to_all_single(swapped, given[dtype][rank])
        return copied, gathered, swapped

    results = jobs.get(backend, 2).run(lambda rank: [moved(rank, dtype) for dtype in dtypes])
    for rank, arrays in enumerate(results):
        half = slice(rank * 3, rank * 3 + 3)
        for dtype, (copied, gathered, swapped) in zip(dtypes, arrays, strict=True):
            same(given[dtype][1], copied)
            same(np.concatenate(given[dtype]), gathered)
            same(np.concatenate([array[half] for array in given[dtype]]), swapped)


@pytest.mark.parametrize("name", ["M8[ns]", "S5", "i4,f8", ">f8", "longdouble"])
def test_moves_dtypes_that_cannot_be_reduced(jobs: Jobs, backend: str, name: str) -> None:
    """Times, strings, structures, foreign byte order: moved; reductions raise."""
    given = np.frombuffer(bytes(range(1, 97)) * 4, np.uint8)[: 4 * np.dtype(name).itemsize]
    given = given.view(name)

    def body(rank: int) -> Any:
        mine = given.copy() if rank == 0 else np.zeros_like(given)
        dist.broadcast(mine, 0)
        with pytest.raises(TypeError, match=r"SUM of .* is not defined"):
            dist.all_reduce(mine)
        return mine.tobytes()

    for mine in jobs.get(backend, 2).run(body):
        assert given.tobytes() == mine


def test_async_calls_run_in_the_order_they_were_issued(job: Job, size: int) -> None:
    """Several calls outstanding; blocking ones take their turn after them."""

    def body(rank: int) -> Any:
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


def test_a_work_can_be_awaited_and_gives_a_future(jobs: Jobs, backend: str) -> None:
    """`await work` and `work.get_future()` see the result."""
    import asyncio

    def body(rank: int) -> Any:
        async def main() -> Any:
            x = np.ones(2)
            pending: Any = dist.all_reduce(x, async_op=True)
            await pending
            return x[0]

        y = np.ones(2)
        future = dist.all_reduce(y, async_op=True).get_future()
        assert future.result(timeout=30)[0] is y
        return asyncio.run(main()), y[0]

    assert [(2.0, 2.0)] * 2 == jobs.get(backend, 2).run(body)


@pytest.mark.parametrize("op", ["SUM", "MAX", "PRODUCT"])
def test_scan_and_exscan(job: Job, size: int, op: str) -> None:
    """Rank r gets the reduction of ranks 0..r, or 0..r-1; rank 0 of exscan keeps its own."""
    given = [oracle.contribution(rank, 21, np.dtype("f4")) for rank in range(size)]

    def body(rank: int) -> Any:
        inclusive, exclusive = given[rank].copy(), given[rank].copy()
        dist.scan(inclusive, getattr(dist.ReduceOp, op))
        dist.exscan(exclusive, getattr(dist.ReduceOp, op))
        return inclusive, exclusive

    for rank, (inclusive, exclusive) in enumerate(job.run(body)):
        same(oracle.reduced(op, given[: rank + 1]), inclusive)
        same(oracle.reduced(op, given[: rank or 1]), exclusive)

"""Every collective over MPI against an oracle, bit for bit: MPI's own and the derived ones."""

import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle
from cydist.tuning import table as tuning_table

DTYPES = oracle.DTYPES.values()
LAYOUTS = {
    "every-second": lambda n, dtype: np.zeros(2 * n, dtype)[::2],
    "reversed": lambda n, dtype: np.zeros(n, dtype)[::-1],
    "column": lambda n, dtype: np.zeros((n, 3), dtype)[:, 1],
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    """Makes an array of n elements whose memory has gaps, or runs backward."""
    return request.param


def same(expected, actual):
    """Assert bit equality, and show both when it does not hold."""
    assert oracle.same_bits(expected, actual), f"expected {expected!r}, got {actual!r}"


def everyone(size, count, dtype):
    """What every rank contributes, by rank."""
    return [oracle.contribution(rank, count, dtype) for rank in range(size)]


def uneven(size, dtype, salt=0):
    """Arrays of different lengths, one per rank; some are empty."""
    return [oracle.contribution(rank + salt, (3 * rank + salt) % 5, dtype) for rank in range(size)]


@pytest.mark.parametrize("op", oracle.OPS)
def test_all_reduce_equals_the_oracle(group, rank, size, op):
    """Every operation and dtype, by MPI's reductions or by ours."""
    for dtype in DTYPES:
        given = everyone(size, 17, dtype)
        mine = given[rank].copy()
        if not oracle.makes_sense(op, dtype):
            with pytest.raises(TypeError, match="not defined"):
                dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
            continue
        dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
        same(oracle.reduced(op, given), mine)


@pytest.mark.parametrize("count", [0, 1, 5, 100_000])
@pytest.mark.parametrize("name", ["int32", "float64", "float16"])
def test_all_reduce_of_any_count(group, rank, size, count, name):
    """No elements, fewer than ranks, many."""
    given = everyone(size, count, np.dtype(name))
    mine = given[rank].copy()
    dist.all_reduce(mine, group=group)
    same(oracle.reduced("SUM", given), mine)


@pytest.mark.parametrize("count", [3, 1000], ids=["short", "long"])
@pytest.mark.parametrize(
    "name", [f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)]
)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
def test_integers_wrap(group, size, op, name, count):
    """MPI's integers overflow as ours do, also where it reduces many at once."""
    limits = np.iinfo(name)
    given = [np.resize(np.array([limits.max, limits.min, 3], name), count) for _ in range(size)]
    mine = given[0].copy()
    dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
    with np.errstate(over="ignore"):
        same(oracle.reduced(op, given), mine)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_minimum_and_maximum_keep_nan(group, rank, size, op, name):
    """One rank's NaN is every rank's."""
    mine = np.array([1.0, np.nan if rank == size - 1 else 2.0], name)
    dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
    assert [False, True] == np.isnan(mine).tolist()


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_minus_zero_is_less_than_zero(group, rank, size, op, name):
    """MIN of -0 and +0 is -0 and MAX is +0, a rank that brings which."""
    mine = np.array([-0.0 if rank == 0 else 0.0, -0.0 if rank == size - 1 else 0.0], name)
    dist.all_reduce(mine, getattr(dist.ReduceOp, op), group)
    assert [op == "MIN" or size == 1] * 2 == np.signbit(mine).tolist()


def test_premul_sum_multiplies_before_it_adds(group, rank, size):
    """Each rank's contribution times that rank's factor."""
    mine = np.arange(6.0)
    dist.all_reduce(mine, dist.ReduceOp.PREMUL_SUM(2.0), group)
    same(np.arange(6.0) * 2 * size, mine)


def test_sums_of_rounded_floats_are_the_same_on_all_ranks(group, rank, size):
    """Inexact inputs: every rank has the bits of rank 0."""
    mine = np.random.default_rng(rank).standard_normal(10_000).astype("f4")
    dist.all_reduce(mine, group=group)
    first = mine.copy()
    dist.broadcast(first, 0, group)
    same(first, mine)


def test_deterministic_reduces_in_rank_order(group, rank, size, monkeypatch):
    """With CYDIST_DETERMINISTIC=1 the bits are those of a sum in rank order."""
    given = [np.random.default_rng(r).standard_normal(1000).astype("f4") for r in range(size)]
    mine = given[rank].copy()
    with monkeypatch.context() as patch:
        patch.setenv("CYDIST_DETERMINISTIC", "1")
        tuning_table.reload()
        dist.all_reduce(mine, group=group)
    tuning_table.reload()
    same(oracle.reduced("SUM", given), mine)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_broadcast_from_the_last_rank(group, rank, size, count):
    """Every dtype."""
    root = size - 1
    for dtype in DTYPES:
        expected = oracle.contribution(root, count, dtype)
        mine = expected.copy() if rank == root else np.zeros(count, dtype)
        dist.broadcast(mine, root, group)
        same(expected, mine)


def test_dtypes_that_are_only_moved(group, rank, size):
    """Dates, long doubles and structures travel as bytes."""
    for name in ("M8[s]", "g", "S7", [("a", "i4"), ("b", "f8")]):
        expected = np.arange(3).astype("i4").astype(name) if name != "S7" else np.array([b"abc"])
        mine = expected.copy() if rank == 0 else np.zeros_like(expected)
        dist.broadcast(mine, 0, group)
        same(expected, mine)


@pytest.mark.parametrize("op", ["SUM", "MAX", "AVG"])
def test_reduce_to_the_last_rank(group, rank, size, op):
    """The root has the result, the others what they had."""
    for dtype in DTYPES:
        given = everyone(size, 17, dtype)
        mine = given[rank].copy()
        if not oracle.makes_sense(op, dtype):
            with pytest.raises(TypeError, match="not defined"):
                dist.reduce(mine, size - 1, getattr(dist.ReduceOp, op), group)
            continue
        dist.reduce(mine, size - 1, getattr(dist.ReduceOp, op), group)
        same(oracle.reduced(op, given) if rank == size - 1 else given[rank], mine)


def test_all_gather_into_separate_arrays(group, rank, size):
    """Equal blocks, far apart in memory."""
    for dtype in DTYPES:
        given = everyone(size, 13, dtype)
        into = [np.zeros(13, dtype) for _ in given]
        dist.all_gather(into, given[rank], group)
        for expected, actual in zip(given, into, strict=True):
            same(expected, actual)


@pytest.mark.parametrize("count", [1000, 50_000], ids=["staged", "by-messages"])
def test_all_gather_of_uneven_blocks(group, rank, size, count):
    """Blocks of any sizes, on each way that an all_gather can take."""
    given = [np.full(r * count + 1, r, "i4") for r in range(size)]
    into = [np.zeros_like(block) for block in given]
    dist.all_gather(into, given[rank], group)
    for expected, actual in zip(given, into, strict=True):
        same(expected, actual)


def test_all_gather_of_uneven_blocks_of_one_array(group, rank, size):
    """Blocks that lie one behind the other are received in place."""
    sizes = [3 * r + 1 for r in range(size)]
    whole = np.zeros(sum(sizes), "i2")
    into = np.split(whole, np.cumsum(sizes)[:-1])
    dist.all_gather(into, np.full(sizes[rank], rank, "i2"), group)
    same(np.repeat(np.arange(size, dtype="i2"), sizes), whole)


def test_all_gather_into_tensor(group, rank, size):
    """Blocks behind each other, in rank order."""
    for dtype in DTYPES:
        given = everyone(size, 9, dtype)
        into = np.zeros(9 * size, dtype)
        dist.all_gather_into_tensor(into, given[rank], group)
        same(np.concatenate(given), into)


def test_all_gather_in_place(group, rank, size):
    """The input may be this rank's part of the output."""
    into = np.full((size, 4), -1.0)
    into[rank] = rank
    dist.all_gather_into_tensor(into, into[rank], group)
    same(np.repeat(np.arange(float(size)), 4).reshape(size, 4), into)


def test_gather_of_uneven_blocks(group, rank, size):
    """The root receives blocks of any sizes."""
    for dtype in DTYPES:
        given = uneven(size, dtype)
        root = size // 2
        into = [np.zeros_like(block) for block in given] if rank == root else None
        dist.gather(given[rank], into, root, group)
        for expected, actual in zip(given, into or given, strict=True):
            same(expected, actual)


def test_scatter_of_uneven_blocks(group, rank, size):
    """Every rank receives its block."""
    for dtype in DTYPES:
        given = uneven(size, dtype)
        into = np.zeros_like(given[rank])
        dist.scatter(into, given if rank == size - 1 else None, size - 1, group)
        same(given[rank], into)


def test_reduce_scatter_of_uneven_blocks(group, rank, size):
    """Rank r has the reduction of every rank's block r."""
    for dtype in DTYPES:
        lists = [uneven(size, dtype, salt) for salt in range(size)]
        lists = [
            [np.resize(block, (2 * r) % 5) for r, block in enumerate(blocks)] for blocks in lists
        ]
        into = np.zeros_like(lists[0][rank])
        op = "SUM" if dtype.kind == "c" else "MAX"
        dist.reduce_scatter(into, lists[rank], getattr(dist.ReduceOp, op), group)
        same(oracle.reduced(op, [blocks[rank] for blocks in lists]), into)


def test_reduce_scatter_tensor(group, rank, size):
    """One array, cut evenly."""
    given = [np.arange(3.0 * size) + r for r in range(size)]
    into = np.zeros(3)
    dist.reduce_scatter_tensor(into, given[rank], group=group)
    same(sum(given)[3 * rank : 3 * rank + 3], into)


def test_all_to_all_of_uneven_blocks(group, rank, size):
    """Block [r][s] goes from r to s."""
    for dtype in DTYPES:
        blocks = [uneven(size, dtype, salt) for salt in range(size)]
        into = [np.zeros_like(blocks[source][rank]) for source in range(size)]
        dist.all_to_all(into, blocks[rank], group)
        for source, actual in enumerate(into):
            same(blocks[source][rank], actual)


def test_all_to_all_single(group, rank, size):
    """An even exchange of rows."""
    into = np.zeros(2 * size, "i8")
    dist.all_to_all_single(into, np.arange(2 * size) + 100 * rank, group=group)
    same(np.concatenate([np.arange(2) + 2 * rank + 100 * r for r in range(size)]), into)


def test_strided_arrays(group, rank, size, layout):
    """Gaps in inputs and outputs stay as they were; what lies between is right."""
    mine = layout(11, "f4")
    mine[...] = np.arange(11) + rank
    dist.all_reduce(mine, group=group)
    same(np.float32(np.arange(11) * size + sum(range(size))), mine.copy())
    into = [layout(11, "f4") for _ in range(size)]
    dist.all_gather(into, mine, group)
    for actual in into:
        same(mine.copy(), actual.copy())


def test_coalesced_all_reduce(group, rank, size):
    """Arrays of many shapes in one call."""
    arrays = [np.full(shape, float(rank)) for shape in (3, (2, 5), 0, (4, 1, 2))]
    dist.all_reduce_coalesced(arrays, group=group)
    for array in arrays:
        same(np.full_like(array, sum(range(size))), array)


def test_objects(group, rank, size):
    """Object collectives are made of these."""
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank}, group)
    assert [{"rank": r, "text": "x" * r} for r in range(size)] == everything


def test_no_rank_leaves_a_barrier_before_all_have_come(group, rank, size):
    """What each rank sent before the barrier has been sent after it."""
    if size == 1:
        dist.barrier(group)
        return
    mine, into = np.array([rank]), np.zeros(1, int)
    receiving = dist.irecv(into, (rank - 1) % size, group)
    dist.isend(mine, (rank + 1) % size, group)
    dist.barrier(group)
    assert (rank - 1) % size == receiving.source_rank()
    assert [(rank - 1) % size] == into.tolist()


def test_asynchronous_calls_run_in_order(group, rank, size):
    """Many collectives outstanding, of several kinds; waited for in any order."""
    arrays = [np.full(n + 1, float(rank)) for n in range(8)]
    works = [dist.all_reduce(array, group=group, async_op=True) for array in arrays]
    half = np.ones(5, "f2")
    works.append(dist.all_reduce(half, group=group, async_op=True))
    works.append(dist.barrier(group, async_op=True))
    for work in reversed(works):
        assert work.wait()
    for array in arrays:
        same(np.full_like(array, sum(range(size))), array)
    same(np.full(5, size, "f2"), half)


def test_futures(group, rank, size):
    """get_future delivers the arrays."""
    mine = np.ones(3)
    future = dist.all_reduce(mine, group=group, async_op=True).get_future()
    assert future.result(timeout=20)[0] is mine
    same(np.full(3, float(size)), mine)


def test_groups_do_not_wait_for_each_other(rank, size):
    """Asynchronous calls on two groups, issued in opposite orders by different ranks."""
    one, two = dist.new_group(), dist.new_group()
    arrays = {one: np.ones(4), two: np.full(4, 2.0)}
    order = [one, two] if rank % 2 else [two, one]
    works = [dist.all_reduce(arrays[each], group=each, async_op=True) for each in order]
    for work in works:
        work.wait()
    same(np.full(4, float(size)), arrays[one])
    same(np.full(4, 2.0 * size), arrays[two])
    dist.destroy_process_group(one)
    dist.destroy_process_group(two)

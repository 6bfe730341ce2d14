"""Every collective on 1 to 8 ranks, against what it must give: through cupy's binding, over the
stand-in. Each rank's array is written late by its stream, and read by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle

COUNTS = [0, 1, 7, 24]
MOVED = ["bool", "int16", "float8_e5m2", "bfloat16", "float32", "complex128", "V3", "V40", "M8[s]"]


@pytest.fixture(params=range(1, 9), ids=lambda size: f"{size}ranks")
def job(gpu_jobs: Any, request: pytest.FixtureRequest) -> Any:
    """Ranks with a GPU each."""
    return gpu_jobs.get(request.param)


def moved(rank: int, count: int, dtype: str) -> np.ndarray:
    """Any bytes, other ones on each rank."""
    kind = oracle.DTYPES.get(dtype) or np.dtype(dtype)
    nbytes = np.arange(count * kind.itemsize) * 3 + 5 * rank
    return (nbytes % 2 if dtype == "bool" else nbytes).astype("u1").view(kind)


def contribution(rank: int, count: int, dtype: np.dtype, op: str, size: int) -> np.ndarray:
    """Values whose result is exact: averages of floats are whole, products stay small."""
    if op == "AVG" and dtype.kind != "b":
        values = (np.arange(count) % 2) * size + (rank == 0) * size
        return values.astype(dtype)
    if op == "PRODUCT" and dtype.name in oracle.SMALL_FLOATS:
        return (1 + (np.arange(count) + rank) % 8 // 7).astype(dtype)
    if op == "SUM" and dtype.name.startswith("float8"):
        return ((np.arange(count) + rank) % 2).astype(dtype)
    return oracle.contribution(rank, count, dtype)


def sensible(op: str) -> list[np.dtype]:
    return [dtype for dtype in oracle.DTYPES.values() if oracle.makes_sense(op, dtype)]


def check(expected: Any, found: Any, what: Any) -> None:
    assert oracle.same_bits(expected, found), (what, expected, found)


@pytest.mark.parametrize("op", oracle.OPS)
def test_all_reduce(job: Any, gpus: Any, op: str) -> None:
    """Every reduction of every dtype that it is defined for."""
    kind = getattr(dist.ReduceOp, op)
    cases = [(dtype, count) for dtype in sensible(op) for count in COUNTS]

    def body(rank: int) -> list[np.ndarray]:
        found = []
        for dtype, count in cases:
            x = gpus.array(contribution(rank, count, dtype, op, job.size))
            dist.all_reduce(x, kind)
            found.append(x)
        return [x.get() for x in found]

    for results in job.run(body):
        for (dtype, count), found in zip(cases, results, strict=True):
            given = [contribution(r, count, dtype, op, job.size) for r in range(job.size)]
            check(oracle.reduced(op, given), found, (dtype, count))


@pytest.mark.parametrize("op", ["SUM", "BXOR", "MAX"])
def test_reduce_leaves_the_others_alone(job: Any, gpus: Any, op: str) -> None:
    """The root gets the result, every rank else keeps what it had."""
    kind = getattr(dist.ReduceOp, op)
    root = job.size - 1
    cases = [(dtype, count) for dtype in sensible(op) for count in COUNTS]

    def body(rank: int) -> list[np.ndarray]:
        found = []
        for dtype, count in cases:
            x = gpus.array(contribution(rank, count, dtype, op, job.size))
            dist.reduce(x, root, kind)
            found.append(x)
        return [x.get() for x in found]

    for rank, results in enumerate(job.run(body)):
        for (dtype, count), found in zip(cases, results, strict=True):
            given = [contribution(r, count, dtype, op, job.size) for r in range(job.size)]
            expected = oracle.reduced(op, given) if rank == root else given[rank]
            check(expected, found, (rank, dtype, count))


@pytest.mark.parametrize("kind", ["i2", "u2"])
@pytest.mark.parametrize("way", ["all_reduce", "reduce", "reduce_scatter"])
def test_means_of_16_bits_wrap_first(job: Any, gpus: Any, kind: str, way: str) -> None:
    """As on every backend: the sum wraps in the dtype, and is divided then, toward zero."""
    given = np.array([30000, 7, 32767, 40000 - 65536 * (kind == "i2")]).astype(kind)
    p = job.size

    def body(rank: int) -> Any:
        x = gpus.array(given)
        if way == "all_reduce":
            dist.all_reduce(x, dist.ReduceOp.AVG)
        elif way == "reduce":
            dist.reduce(x, 0, dist.ReduceOp.AVG)
        else:
            dist.reduce_scatter(x, [gpus.array(given) for _ in range(p)], dist.ReduceOp.AVG)
        return x.get()

    total = np.zeros(4, kind)
    for _ in range(p):
        total += given
    expected = np.trunc(total / p).astype(kind)
    for found in job.run(body)[: 1 if way == "reduce" else p]:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op", ["SUM", "BAND", "PRODUCT", "AVG"])
@pytest.mark.parametrize("layout", ["adjacent", "apart", "uneven"])
def test_reduce_scatter(job: Any, gpus: Any, op: str, layout: str) -> None:
    """Blocks in one array, in many, and of several sizes, none among them."""
    kind = getattr(dist.ReduceOp, op)
    counts = [(3 * r + 1) % 5 if layout == "uneven" else 3 for r in range(job.size)]
    ends = np.cumsum(counts)

    def whole(rank: int, dtype: np.dtype) -> np.ndarray:
        return contribution(rank, sum(counts), dtype, op, job.size)

    def body(rank: int) -> list[np.ndarray]:
        found = []
        for dtype in sensible(op):
            given = whole(rank, dtype)
            output = gpus.array(np.zeros(counts[rank], dtype))
            if layout == "adjacent":
                dist.reduce_scatter_tensor(output, gpus.array(given), kind)
            else:
                blocks = [gpus.array(block) for block in np.split(given, ends[:-1])]
                dist.reduce_scatter(output, blocks, kind)
            found.append(output)
        return [x.get() for x in found]

    for rank, results in enumerate(job.run(body)):
        for dtype, found in zip(sensible(op), results, strict=True):
            expected = oracle.reduced(op, [whole(r, dtype) for r in range(job.size)])
            check(np.split(expected, ends[:-1])[rank], found, (rank, dtype))


@pytest.mark.parametrize("layout", ["adjacent", "in place", "apart", "uneven"])
def test_all_gather(job: Any, gpus: Any, layout: str) -> None:
    """Into one array, with the input inside it, into many, and of several sizes."""
    counts = [(2 * r + 1) % 5 if layout == "uneven" else 5 for r in range(job.size)]

    def body(rank: int) -> list[list[np.ndarray]]:
        found = []
        for dtype in MOVED:
            given = moved(rank, counts[rank], dtype)
            if layout in ("adjacent", "in place"):
                whole = gpus.array(np.zeros(sum(counts), given.dtype))
                own = gpus.array(given)
                if layout == "in place":
                    own = whole[5 * rank : 5 * rank + 5]
                    start = np.zeros(sum(counts), given.dtype)
                    start[5 * rank : 5 * rank + 5] = given
                    memory = whole.memory
                    gpus.enqueue(
                        gpus.current_stream(rank), lambda m=memory, s=start: np.copyto(m, s)
                    )
                dist.all_gather_into_tensor(whole, own)
                outputs = [whole[5 * r : 5 * r + 5] for r in range(job.size)]
            else:
                outputs = [gpus.array(np.zeros(n, given.dtype)) for n in counts]
                dist.all_gather(outputs, gpus.array(given))
            found.append(outputs)
        return [[x.get() for x in outputs] for outputs in found]

    for results in job.run(body):
        for dtype, outputs in zip(MOVED, results, strict=True):
            for r, found in enumerate(outputs):
                check(moved(r, counts[r], dtype), found, (dtype, r))


def test_broadcast(job: Any, gpus: Any) -> None:
    """From every root, of every dtype."""

    def body(rank: int) -> list[np.ndarray]:
        found = []
        for root in range(job.size):
            for dtype in MOVED:
                x = gpus.array(moved(rank, 5, dtype))
                dist.broadcast(x, root)
                found.append(x)
        return [x.get() for x in found]

    expected = [moved(root, 5, dtype) for root in range(job.size) for dtype in MOVED]
    for results in job.run(body):
        for one, other in zip(expected, results, strict=True):
            check(one, other, "")


def test_gather_and_scatter(job: Any, gpus: Any) -> None:
    """To and from every root, blocks of several sizes, none among them."""
    counts = [(2 * r + 3) % 4 for r in range(job.size)]

    def body(rank: int) -> list[Any]:
        found: list[Any] = []
        for root in range(job.size):
            own = gpus.array(moved(rank, counts[rank], "int16"))
            into = [gpus.array(np.zeros(n, "i2")) for n in counts] if rank == root else None
            dist.gather(own, into, root)
            back = gpus.array(np.zeros(counts[rank], "i2"))
            dist.scatter(back, into, root)
            found.append((into, back))
        return [([x.get() for x in into or ()], back.get()) for into, back in found]

    for rank, results in enumerate(job.run(body)):
        for root, (into, back) in enumerate(results):
            check(moved(rank, counts[rank], "int16"), back, (rank, root))
            assert len(into) == (job.size if rank == root else 0)
            for r, found in enumerate(into):
                check(moved(r, counts[r], "int16"), found, (root, r))


def test_reductions_and_exchanges_in_place(job: Any, gpus: Any) -> None:
    """The output is a block of the input, or the input: other blocks stay as they are."""
    p = job.size

    def body(rank: int) -> list[np.ndarray]:
        whole, many, exchanged = (gpus.array(moved(rank, 3 * p, "float32")) for _ in range(3))
        blocks = [gpus.array(moved(rank + r, 3, "float32")) for r in range(p)]
        first = gpus.array(moved(rank, 3 * p, "float32"))
        dist.reduce_scatter_tensor(whole[3 * rank : 3 * rank + 3], whole)
        dist.reduce_scatter_tensor(first[:3], first, dist.ReduceOp.AVG)
        dist.reduce_scatter(blocks[rank], blocks)
        dist.reduce_scatter_tensor_coalesced([many[:3]], [many])
        dist.all_to_all_single(exchanged, exchanged)
        listed = [gpus.array(moved(rank + r, 3, "float32")) for r in range(p)]
        dist.all_to_all(listed, listed)
        return [x.get() for x in (whole, first, many, exchanged, *blocks, *listed)]

    given = [moved(r, 3 * p, "float32") for r in range(p)]
    total, average = oracle.reduced("SUM", given), oracle.reduced("AVG", given)
    for rank, results in enumerate(job.run(body)):
        own = slice(3 * rank, 3 * rank + 3)
        whole, first, many = (given[rank].copy() for _ in range(3))
        whole[own], first[:3], many[:3] = total[own], average[own], total[own]
        entries = [moved(rank + r, 3, "float32") for r in range(p)]
        entries[rank] = oracle.reduced("SUM", [moved(r + rank, 3, "float32") for r in range(p)])
        expected = [
            whole, first, many, np.concatenate([x[own] for x in given]), *entries,
            *(moved(r + rank, 3, "float32") for r in range(p)),
        ]  # fmt: skip
        for i, (one, other) in enumerate(zip(expected, results, strict=True)):
            check(one, other, (rank, i))


def test_a_roots_own_block_may_be_its_array(job: Any, gpus: Any) -> None:
    """gather and scatter in place."""

    def body(rank: int) -> list[Any]:
        own = gpus.array(moved(rank, 3, "float32"))
        into = None
        if rank == 0:
            into = [own, *(gpus.array(np.zeros(3, "f4")) for _ in range(job.size - 1))]
        dist.gather(own, into, 0)
        dist.scatter(own, into, 0)
        return [x.get() for x in (own, *(into or ()))]

    results = job.run(body)
    for r in range(job.size):
        check(moved(r, 3, "float32"), results[0][1 + r], r)
        check(moved(r, 3, "float32"), results[r][0], r)


@pytest.mark.parametrize("layout", ["one array", "uneven", "list"])
def test_all_to_all(job: Any, gpus: Any, layout: str) -> None:
    """Even and uneven, some pairs with nothing for each other."""

    def count(source: int, to: int) -> int:
        return 2 if layout == "one array" else (source + 2 * to) % 3

    def block(source: int, to: int) -> np.ndarray:
        return moved(10 * source + to, count(source, to), "V3")

    def body(rank: int) -> list[np.ndarray]:
        ranks = range(job.size)
        given = [block(rank, r) for r in ranks]
        if layout == "list":
            outputs = [gpus.array(np.zeros(count(r, rank), "V3")) for r in ranks]
            dist.all_to_all(outputs, [gpus.array(each) for each in given])
            return [x.get() for x in outputs]
        taken = [count(r, rank) for r in ranks]
        output = gpus.array(np.zeros(sum(taken), "V3"))
        splits = (taken, [len(each) for each in given]) if layout == "uneven" else (None, None)
        dist.all_to_all_single(output, gpus.array(np.concatenate(given)), *splits)
        return np.split(output.get(), np.cumsum(taken)[:-1])

    for rank, results in enumerate(job.run(body)):
        for r, found in enumerate(results):
            check(block(r, rank), found, (rank, r))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float8_e5m2", "int32", "int16", "complex64"],
)
def test_premul_sum(job: Any, gpus: Any, dtype: str) -> None:
    """Each rank has its own factor, complex ones for complex arrays."""
    kind = oracle.DTYPES[dtype]

    def factor(rank: int) -> complex:
        whole = rank % 3 + 1
        return whole * 1j if kind.kind == "c" else whole if kind.kind == "i" else whole / 2

    def values(rank: int) -> np.ndarray:
        return ((np.arange(6) + rank) % 3).astype(kind)

    def body(rank: int) -> np.ndarray:
        x = gpus.array(values(rank))
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(factor(rank)))
        return x.get()

    wide = [
        values(r).astype("c16") * factor(r)
        if kind.kind == "c"
        else values(r).astype("f8") * factor(r)
        for r in range(job.size)
    ]
    if dtype.startswith("float8") and job.size == 1:  # see test_one_rank.py
        with pytest.raises(dist.UnsupportedError, match="is not supported in a group of one rank"):
            job.run(body)
        return
    for found in job.run(body):
        check(sum(wide).astype(kind), found, dtype)


def test_factors_do_not_pile_up(gpu_jobs: Any, gpus: Any, standin: Any) -> None:
    """A hundred of them, in single calls that have not run when the next comes and in groups of
    calls: NCCL's operations are let go of, and the last ones kept."""
    standin.log()

    def body(rank: int) -> list[float]:
        def summed(array: Any, factor: int) -> None:
            dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(factor), group)

        group = dist.new_group()
        arrays = [gpus.array(np.ones(1)) for _ in range(100)]
        gate = gpus.hold()
        for factor, array in enumerate(arrays[:60]):
            summed(array, factor)
        seven = dist.ReduceOp.PREMUL_SUM(7)
        work = dist.all_reduce_coalesced(arrays[60:], seven, group, async_op=True)
        gate.set()
        work.synchronize()
        for _ in range(3):
            summed(arrays[59], 59)
        return [float(array.get()[0]) for array in arrays]

    expected = [2.0 * factor for factor in range(59)] + [2.0 * 59 * 118**3] + [14.0] * 40
    assert gpu_jobs.get(2).run(body) == [expected] * 2
    log = [line.split(" ", 1)[1] for line in standin.log()]
    made, dropped = log.count("premul_create"), log.count("premul_destroy")
    assert made == 2 * 61
    assert made - dropped == 2 * 32


def test_strided_arrays_are_packed_and_unpacked(job: Any, gpus: Any) -> None:
    """Transposed inputs and outputs hold what contiguous ones would."""

    def body(rank: int) -> tuple[np.ndarray, np.ndarray]:
        x = gpus.array(np.arange(6, dtype="i8").reshape(2, 3) * (rank + 1))
        turned = x.view(x.memory.T)
        dist.all_reduce(turned)
        outputs = gpus.array(np.zeros((job.size, 4, 3), "i8"))
        work = dist.all_gather(
            [outputs[r, ::2].view(outputs.memory[r, ::2]) for r in range(job.size)],
            x,
            async_op=True,
        )
        work.wait()
        return x.get(), outputs.get()

    total = np.arange(6).reshape(2, 3) * (job.size * (job.size + 1) // 2)
    for reduced, gathered in job.run(body):
        np.testing.assert_array_equal(reduced, total)
        np.testing.assert_array_equal(gathered[:, ::2], np.stack([total] * job.size))
        np.testing.assert_array_equal(gathered[:, 1::2], 0)


def test_barrier_and_sub_groups(job: Any, gpus: Any) -> None:
    """Groups of some ranks have a communicator of their own."""

    def body(rank: int) -> Any:
        dist.barrier()
        half = range(0, job.size, 2)
        group = dist.new_group(half)
        if rank not in half:
            return None
        x = gpus.array(np.array([rank], "i4"))
        dist.all_reduce(x, group=group)
        dist.barrier(group)
        found = x.get()[0]
        dist.destroy_process_group(group)
        return found

    expected = sum(range(0, job.size, 2))
    for rank, found in enumerate(job.run(body)):
        assert found == (None if rank % 2 else expected)

"""Arrays of a GPU on backends for the CPU: every call gives what it gives for host arrays.

The GPU is a stand-in whose copies happen as late as they may (tests/support/fake_gpu_delayed.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu_delayed import LateArray, LateDevice, install

import cydist as dist
from cydist.testing import ThreadJob, oracle

SLOT = 1 << 10  # bytes, so that few elements make many chunks
SIZES = [0, 1, 128, 1024, 777]  # elements: none, one, a chunk, several, ragged
DTYPES = [oracle.DTYPES[name] for name in ("bool", "bfloat16", "complex128")]
long = pytest.mark.long
ORDERS = ["late", 1, *(pytest.param(order, marks=long) for order in ("eager", 2, 3))]
RANKS = [1, 2, 3, *(pytest.param(ranks, marks=long) for ranks in (4, 7))]


@pytest.fixture(params=ORDERS, ids=lambda order: f"order {order}")
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return install(monkeypatch, request.param, SLOT)


@pytest.fixture(params=RANKS, ids=lambda p: f"{p} ranks")
def job(request: pytest.FixtureRequest, device: LateDevice) -> Iterator[ThreadJob]:
    with ThreadJob(request.param) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["blocking", "async"])
def finish(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Makes a call, and waits if it is asynchronous."""

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        work = function(*arguments, **options, async_op=request.param)
        if request.param:
            work.wait(60)
        else:
            assert work is None

    return call


def given(rank: int, size: int, dtype: np.dtype) -> np.ndarray:
    return oracle.contribution(rank, size, dtype)


def check(
    job: ThreadJob, body: Callable[[int, int, np.dtype], tuple[Any, list[LateArray]]]
) -> None:
    """Run it on every rank with every size and dtype; it returns what should be in which arrays."""

    def run(rank: int) -> None:
        for size, dtype in itertools.product(SIZES, DTYPES):
            wanted, arrays = body(rank, size, dtype)
            for each, array in zip(wanted, arrays, strict=True):
                found = array.get()
                assert oracle.same_bits(each, found), (size, each, found)

    job.run(run)


def test_all_reduce(device, job, finish) -> None:
    """The sum of all ranks' arrays, in any number of chunks."""

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        finish(dist.all_reduce, x)
        return [oracle.reduced("SUM", [given(r, size, dtype) for r in range(job.size)])], [x]

    check(job, body)


def test_broadcast(device, job, finish) -> None:
    """The root's array, which is only read there."""
    root = job.size - 1

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        finish(dist.broadcast, x, root)
        return [given(root, size, dtype)], [x]

    check(job, body)


def test_reduce(device, job, finish) -> None:
    """The sum on one rank; the others keep what they had."""

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        finish(dist.reduce, x, 0)
        total = oracle.reduced("SUM", [given(r, size, dtype) for r in range(job.size)])
        return [given(rank, size, dtype) if rank else total], [x]

    check(job, body)


def test_scan(device, job, finish) -> None:
    """The sum over the ranks up to this one."""

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        finish(dist.scan, x)
        return [oracle.reduced("SUM", [given(r, size, dtype) for r in range(rank + 1)])], [x]

    check(job, body)


def test_all_gather_into_tensor(device, job, finish) -> None:
    """All ranks' arrays, one after the other."""

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        out = device.array(np.zeros(job.size * size, dtype), rank)
        finish(dist.all_gather_into_tensor, out, x)
        return [np.concatenate([given(r, size, dtype) for r in range(job.size)])], [out]

    check(job, body)


def uneven(rank: int, size: int) -> int:
    """How much a rank has where all have different amounts; some have nothing."""
    return size * rank // 2 + rank % 2


def test_all_gather_of_different_sizes(device, job, finish) -> None:
    """Lists of arrays whose sizes differ, in as many rounds as the largest takes."""

    def body(rank, size, dtype):
        x = device.array(given(rank, uneven(rank, size), dtype), rank)
        outs = [device.array(np.zeros(uneven(r, size), dtype), rank) for r in range(job.size)]
        finish(dist.all_gather, outs, x)
        return [given(r, uneven(r, size), dtype) for r in range(job.size)], outs

    check(job, body)


def test_reduce_scatter_tensor(device, job, finish) -> None:
    """Each rank's block of the sum of whole arrays."""

    def body(rank, size, dtype):
        x = device.array(given(rank, job.size * size, dtype), rank)
        out = device.array(np.zeros(size, dtype), rank)
        finish(dist.reduce_scatter_tensor, out, x)
        total = oracle.reduced("SUM", [given(r, job.size * size, dtype) for r in range(job.size)])
        return [total[rank * size : (rank + 1) * size]], [out]

    check(job, body)


def test_gather(device, job, finish) -> None:
    """Arrays of different sizes on the root."""

    def body(rank, size, dtype):
        x = device.array(given(rank, uneven(rank, size), dtype), rank)
        outs = [device.array(np.zeros(uneven(r, size), dtype), rank) for r in range(job.size)]
        finish(dist.gather, x, None if rank else outs, 0)
        return (
            ([], [])
            if rank
            else ([given(r, uneven(r, size), dtype) for r in range(job.size)], outs)
        )

    check(job, body)


def test_scatter(device, job, finish) -> None:
    """Arrays of different sizes from the root."""
    root = job.size - 1

    def body(rank, size, dtype):
        out = device.array(np.zeros(uneven(rank, size), dtype), rank)
        xs = [device.array(given(r, uneven(r, size), dtype), rank) for r in range(job.size)]
        finish(dist.scatter, out, xs if rank == root else None, root)
        return [given(rank, uneven(rank, size), dtype)], [out]

    check(job, body)


def test_all_to_all_single(device, job, finish) -> None:
    """Equal parts of an array to every rank."""

    def body(rank, size, dtype):
        x = device.array(given(rank, job.size * size, dtype), rank)
        out = device.array(np.zeros(job.size * size, dtype), rank)
        finish(dist.all_to_all_single, out, x)
        parts = [
            given(r, job.size * size, dtype)[rank * size : (rank + 1) * size]
            for r in range(job.size)
        ]
        return [np.concatenate(parts)], [out]

    check(job, body)


def test_all_to_all_of_different_sizes(device, job, finish) -> None:
    """A different amount from every rank to every other."""

    def body(rank, size, dtype):
        def part(source, target):
            return given(source + target, uneven((2 * source + target) % 5, size), dtype)

        xs = [device.array(part(rank, r), rank) for r in range(job.size)]
        outs = [device.array(np.zeros_like(part(r, rank)), rank) for r in range(job.size)]
        finish(dist.all_to_all, outs, xs)
        return [part(r, rank) for r in range(job.size)], outs

    check(job, body)


def first(low: Any, high: Any) -> Any:
    """The first element that is not zero: the order of the ranks matters, not their grouping."""
    return np.where(low == 0, high, low)


FIRST = dist.ReduceOp.create(first)


def with_gaps(rank: int, size: int, dtype: np.dtype) -> np.ndarray:
    """A rank's numbers, every third of which is zero, others on each rank."""
    x = given(rank, size, dtype)
    x[(np.arange(size) + rank) % 3 == 0] = 0
    return x


def folded(arrays: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(first, arrays)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan", "exscan"])
def test_reductions_by_functions(device, job, finish, name) -> None:
    """A function gets numpy arrays in rank order, and its result is on the device."""

    def body(rank, size, dtype):
        x = device.array(with_gaps(rank, size, dtype), rank)
        finish(getattr(dist, name), x, *([0] if name == "reduce" else []), op=FIRST)
        count = {"scan": rank + 1, "exscan": rank, "reduce": 0 if rank else job.size}
        ranks = range(count.get(name, job.size)) or [rank]  # which keeps what it had
        return [folded([with_gaps(r, size, dtype) for r in ranks])], [x]

    check(job, body)


@pytest.mark.parametrize(
    ("op", "made", "reduced"),
    [
        (dist.ReduceOp.SUM, given, functools.partial(oracle.reduced, "SUM")),
        (FIRST, with_gaps, folded),
    ],
    ids=["sum", "function"],
)
def test_reduce_scatter(device, job, finish, op, made, reduced) -> None:
    """Each rank's block of the sum, or of what a function makes, of different sizes."""

    def body(rank, size, dtype):
        def block(rank, r):
            return made(rank + r, uneven(r, size), dtype)

        xs = [device.array(block(rank, r), rank) for r in range(job.size)]
        out = device.array(np.zeros(uneven(rank, size), dtype), rank)
        finish(dist.reduce_scatter, out, xs, op=op)
        return [reduced([block(r, rank) for r in range(job.size)])], [out]

    check(job, body)


def test_functions_of_as_many_elements_everywhere(device) -> None:
    """MismatchError on every rank where they differ, though the first chunks are alike."""

    def body(rank: int) -> None:
        with pytest.raises(dist.MismatchError, match=r"256 elements.*512 elements|512.*256 elem"):
            dist.all_reduce(device.array(np.ones(256 << rank), rank), FIRST)

    with ThreadJob(2) as job:
        job.run(body)


def test_what_a_function_raises(device, finish) -> None:
    """Is raised on its rank, and ends the call on the other."""

    def broken(low: Any, high: Any) -> Any:
        raise KeyError("no such element")

    def body(rank: int) -> None:
        x = device.array(np.ones(9), rank)
        with pytest.raises((KeyError, dist.DistError), match="no such element"):
            finish(dist.all_reduce, x, dist.ReduceOp.create(broken))

    with ThreadJob(2) as job:
        job.run(body)


def test_coalesced(device, job, finish) -> None:
    """Several arrays in one call, flattened on the device."""

    def body(rank, size, dtype):
        xs = [device.array(given(rank, n, dtype), rank) for n in (size, 3)]
        finish(dist.all_reduce_coalesced, xs)
        return [
            oracle.reduced("SUM", [given(r, n, dtype) for r in range(job.size)]) for n in (size, 3)
        ], xs

    check(job, body)


def test_in_place(device, job, finish) -> None:
    """The output is this rank's block of the input, or the input."""

    def body(rank, size, dtype):
        all_given = [given(r, job.size * size, dtype) for r in range(job.size)]
        own = slice(rank * size, (rank + 1) * size)
        reduced = device.array(all_given[rank], rank)
        finish(dist.reduce_scatter_tensor, reduced[own], reduced)
        exchanged = device.array(all_given[rank], rank)
        finish(dist.all_to_all_single, exchanged, exchanged)
        expected = all_given[rank].copy()
        expected[own] = oracle.reduced("SUM", all_given)[own]
        return [expected, np.concatenate([x[own] for x in all_given])], [reduced, exchanged]

    check(job, body)


def test_strided(device, job, finish) -> None:
    """Strided arrays are packed on the device and unpacked there; gaps stay as they are."""

    def body(rank, size, dtype):
        values = np.stack([given(rank, size, dtype)] * 3, axis=1)
        whole = device.array(values, rank)
        finish(dist.all_reduce, whole[:, 1])
        values[:, 1] = oracle.reduced("SUM", [given(r, size, dtype) for r in range(job.size)])
        return [values], [whole]

    check(job, body)


def test_messages(device, job) -> None:
    """isend and irecv around a ring: several at once, one after the other with one tag."""

    def body(rank, size, dtype):
        above, below = (rank + 1) % job.size, (rank - 1) % job.size
        xs = [device.array(given(rank + i, size, dtype), rank) for i in range(3)]
        outs = [device.array(np.zeros(size, dtype), rank) for i in range(3)]
        if job.size == 1:
            return [], []
        works = [dist.irecv(out, below) for out in outs] + [dist.isend(x, above) for x in xs]
        for work in works:
            work.wait(60)
        assert [work.source_rank() for work in works[:3]] == [below] * 3
        return [given(below + i, size, dtype) for i in range(3)], outs

    check(job, body)


def test_blocking_messages(device, job) -> None:
    """send and recv, from anyone."""

    def body(rank, size, dtype):
        x = device.array(given(rank, size, dtype), rank)
        if rank == 0:
            outs = [device.array(np.zeros(size, dtype), rank) for _ in range(1, job.size)]
            sources = [dist.recv(out) for out in outs]
            assert sorted(sources) == list(range(1, job.size))
            dist.barrier()  # the next ones are of another size
            return [given(source, size, dtype) for source in sources], outs
        dist.send(x, 0)
        dist.barrier()
        return [], []

    check(job, body)

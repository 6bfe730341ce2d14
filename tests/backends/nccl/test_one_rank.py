"""Groups of one rank: what they give is what a group of one rank on the CPU gives, bit for bit.

NCCL has kernels of its own for one rank, which leave elements out and know no floats of 8 bits;
the stand-in does as NCCL 2.28.9. None of this has run on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import ThreadJob, oracle

OPS = [*oracle.OPS, "PREMUL_SUM"]
SMALL = ("float8_e4m3fn", "float8_e5m2")
OLD, MENDED = "22809", "22907"  # versions of NCCL: whose kernel leaves elements out, and not
LIBRARY_NAMES = ("float16", "bfloat16", "float32", "float64", "int32", "complex64")  # torch's too


def lengths(dtype: np.dtype) -> list[int]:
    """No element, one, more than one block of NCCL's kernel has, and more than all have."""
    block = (16 << 10) // dtype.itemsize
    return [0, 1, block + 1, 32 * block + 37]


def values(count: int, dtype: np.dtype) -> np.ndarray:
    """Numbers that every dtype holds, no two neighbours alike."""
    numbers = np.arange(count) * 7 % 23 - 11 * (dtype.kind not in "bu")
    return (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype)


def operation(op: str, dtype: np.dtype) -> Any:
    """Factors are no element of the dtype, where it is one that can be rounded once or twice."""
    if op != "PREMUL_SUM":
        return getattr(dist.ReduceOp, op)
    factor: complex = {"c": 0.5 - 2j, "i": -3, "u": 70000}.get(dtype.kind, 0.1)
    return dist.ReduceOp.PREMUL_SUM(factor)


def defined(op: str, dtype: np.dtype) -> bool:
    """Is there something to be given?"""
    if op == "PREMUL_SUM":
        return dtype.kind != "b" and dtype.name not in SMALL
    return oracle.makes_sense(op, dtype)


def all_reduce(array: Any, op: Any, group: Any, **how: Any) -> Any:
    x = array.start(0)
    return x, dist.all_reduce(x, op, group, **how)


def reduce(array: Any, op: Any, group: Any, **how: Any) -> Any:
    x = array.start(0)
    return x, dist.reduce(x, 0, op, group, **how)


def reduce_scatter_tensor(array: Any, op: Any, group: Any, **how: Any) -> Any:
    x = array.empty()
    return x, dist.reduce_scatter_tensor(x, array.start(0), op, group, **how)


def reduce_scatter(array: Any, op: Any, group: Any, **how: Any) -> Any:
    x = array.empty()
    return x, dist.reduce_scatter(x, [array.start(0)], op, group, **how)


def coalesced(array: Any, op: Any, group: Any, **how: Any) -> Any:
    x = array.start(0)
    return x, dist.all_reduce_coalesced([array.start(1), x], op, group, **how)


CALLS = [all_reduce, reduce, reduce_scatter_tensor, reduce_scatter, coalesced]


class Arrays:
    """Arrays of one length and dtype, of the library that `make` makes them of."""

    def __init__(self, make: Callable[[np.ndarray], Any], count: int, dtype: np.dtype) -> None:
        self._make, self._count, self._dtype = make, count, dtype

    def start(self, first: int) -> Any:
        return self._make(np.roll(values(self._count, self._dtype), first))

    def empty(self) -> Any:
        return self._make(np.zeros(self._count, self._dtype))


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[ThreadJob]:
    """One rank of a backend that NCCL has no part in."""
    job = ThreadJob(1, "tcp")
    yield job
    job.close()


@pytest.fixture
def job(gpu_jobs: Any) -> Any:
    """One rank with a GPU."""
    return gpu_jobs.get(1)


Case = tuple[np.dtype, int]


def expected(on_cpu: ThreadJob, call: Callable[..., Any], op: str, cases: list[Case]) -> Any:
    def body(rank: int) -> list[np.ndarray]:
        group = dist.group.WORLD
        return [
            call(Arrays(np.array, n, dtype), operation(op, dtype), group)[0] for dtype, n in cases
        ]

    return on_cpu.run(body)[0]


def found(gpus: Any, call: Callable[..., Any], op: str, cases: list[Case], group: Any) -> Any:
    """What a call leaves, blocking and asynchronous, on the short way and with a timeout."""
    results = []
    for how in ({}, {"async_op": True}, {"timeout": 20.0}):
        if "timeout" in how and call is coalesced:
            continue
        with gpus.here():
            given = [
                call(Arrays(gpus.array, n, dtype), operation(op, dtype), group, **how)
                for dtype, n in cases
            ]
            for _, work in given:
                if work is not None:
                    work.wait()
        results.append([gpus.get(x) for x, _ in given])
    return results


def check(cases: list[Case], right: list[np.ndarray], results: list[list[np.ndarray]]) -> None:
    assert results
    for result in results:
        for case, one, other in zip(cases, right, result, strict=True):
            assert oracle.same_bits(one, other), (case, np.flatnonzero(one != other)[:4])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("op", OPS)
def test_all_elements_are_right(job: Any, on_cpu: Any, gpus: Any, op: str, call: Any) -> None:
    """Every reduction of every dtype, of long arrays too."""
    dtypes = [dtype for dtype in oracle.DTYPES.values() if defined(op, dtype)]
    cases = [(dtype, n) for dtype in dtypes for n in lengths(dtype)]
    results = job.run(lambda rank: found(gpus, call, op, cases, dist.group.WORLD))[0]
    check(cases, expected(on_cpu, call, op, cases), results)


@pytest.mark.parametrize("op", ["AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("version", [OLD, MENDED])
def test_whatever_nccl_is_loaded(
    job: Any, on_cpu: Any, gpus: Any, op: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done about the old ones is right with the new ones, on arrays of torch's too."""
    monkeypatch.setenv("STANDIN_VERSION", version)
    cases = [(oracle.DTYPES[name], n) for name in LIBRARY_NAMES for n in (0, 4099, 70001)]
    for call in CALLS:
        results = job.run(lambda rank, call=call: found(gpus, call, op, cases, dist.group.WORLD))[0]
        check(cases, expected(on_cpu, call, op, cases), results)


@pytest.mark.parametrize("op", ["AVG", "PREMUL_SUM"])
def test_arrays_of_both_libraries(job: Any, on_cpu: Any, library: Any, op: str) -> None:
    """cupy's and torch's."""
    cases = [(oracle.DTYPES[name], n) for name in LIBRARY_NAMES for n in (1, 4099, 70001)]
    for call in CALLS:
        results = job.run(
            lambda rank, call=call: found(library, call, op, cases, dist.group.WORLD)
        )[0]
        check(cases, expected(on_cpu, call, op, cases), results)


@pytest.mark.parametrize("op", ["AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("way", ["new_group", "shrink_group"])
def test_groups_that_become_one_rank(gpus: Any, on_cpu: Any, op: str, way: str) -> None:
    """A group of one among several, and the one that is left."""
    cases = [(oracle.DTYPES[name], 4099) for name in LIBRARY_NAMES]

    def body(rank: int) -> Any:
        if way == "new_group":
            group: Any = [dist.new_group([r]) for r in range(2)][rank]
        else:
            if rank == 1:
                return None
            group = dist.shrink_group([1])
        assert group.size() == 1
        return found(gpus, reduce_alone, op, cases, group)

    def reduce_alone(array: Any, op: Any, group: Any, **how: Any) -> Any:
        x = array.empty()
        return x, dist.reduce_scatter_tensor(x, array.start(0), op, group, **how)

    job = ThreadJob(2, "nccl")
    try:
        results = job.run(body)
    finally:
        job.close()
    right = expected(on_cpu, reduce_scatter_tensor, op, cases)
    for each in results[: 1 if way == "shrink_group" else 2]:
        check(cases, right, each)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("setting", [("STANDIN_CAPABILITY", "80"), ("STANDIN_VERSION", "22304")])
def test_fp8_needs_nothing_of_the_gpu(
    gpus: Any, on_cpu: Any, op: str, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's array is its result, though this GPU or this NCCL reduces no such floats."""
    monkeypatch.setenv(*setting)
    cases = [(oracle.DTYPES[name], 20000) for name in SMALL]
    job = ThreadJob(1, "nccl")

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        monkeypatch.setattr(group.comm, "capability", 80)
        return [found(gpus, call, op, cases, group) for call in CALLS]

    try:
        results = job.run(body)[0]
    finally:
        job.close()
    for call, each in zip(CALLS, results, strict=True):
        check(cases, expected(on_cpu, call, op, cases), each)


@pytest.mark.parametrize("how", [{}, {"async_op": True}], ids=["blocking", "async"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", SMALL)
def test_what_cannot_be_multiplied_is_refused(
    job: Any, gpus: Any, standin: Any, name: str, call: Any, how: Any
) -> None:
    """PREMUL_SUM of 8-bit floats: before anything is enqueued, and the group goes on."""
    dtype = oracle.DTYPES[name]

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        standin.log()
        with pytest.raises(dist.UnsupportedError, match=f"PREMUL_SUM of {name} .* one rank"):
            call(Arrays(gpus.array, 3, dtype), dist.ReduceOp.PREMUL_SUM(2), group, **how)
        assert standin.log() == []
        x = gpus.array(np.ones(3))
        dist.all_reduce(x, group=group)
        return x.get().tolist(), group.error

    assert job.run(body) == [([1.0] * 3, None)]


def test_without_ml_dtypes_bfloat16_is_not_multiplied(
    job: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cupy knows it by that package: the call is refused, and the group goes on."""
    bfloat16 = oracle.DTYPES["bfloat16"]

    def body(rank: int) -> Any:
        x = gpus.array(np.ones(3, bfloat16))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "ml_dtypes", None)
            with pytest.raises(dist.UnsupportedError, match="pip install ml_dtypes"):
                dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2))
            dist.all_reduce(x, dist.ReduceOp.AVG)
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2))
        return x.get().astype(float).tolist()

    assert job.run(body) == [[2.0] * 3]


def test_a_factor_needs_no_scratch_memory(
    job: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a CUDA graph that is captured may hold the call."""
    allocate = gpus.allocate

    def refuse(device: int, nbytes: int) -> Any:
        if gpus.current_stream(device) in gpus.captured:
            raise MemoryError("operation not permitted when stream is capturing")
        return allocate(device, nbytes)

    monkeypatch.setattr(gpus, "allocate", refuse)

    def body(rank: int) -> list[list[float]]:
        names = ("int16", "float16", "bfloat16", "float32", "complex128")
        arrays = [gpus.array(np.ones(5, oracle.DTYPES[name])) for name in names]
        gpus.synchronize(gpus.current_stream(rank))
        captured = 7200
        gpus.captured.add(captured)
        try:
            with gpus.on_stream(rank, captured):
                for x in arrays:
                    dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2))
                    dist.all_reduce(x, dist.ReduceOp.AVG)
        finally:
            gpus.captured.remove(captured)
        gpus.synchronize(captured)
        return [x.get().real.astype(float).tolist() for x in arrays]

    assert job.run(body) == [[[2.0] * 5] * 5]


def test_strided_arrays(job: Any, gpus: Any) -> None:
    """Every second element of a long array is multiplied, the others stay."""

    def body(rank: int) -> np.ndarray:
        x = gpus.array(np.ones(9000, "f4"))
        dist.all_reduce(x[::2], dist.ReduceOp.PREMUL_SUM(3))
        return x.get()

    right = np.ones(9000, "f4")
    right[::2] = 3
    assert oracle.same_bits(right, job.run(body)[0])

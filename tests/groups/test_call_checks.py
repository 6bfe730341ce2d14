"""CYDIST_DEBUG=DETAIL and CYDIST_CHECK_NAN=1: errors before a call, on every rank, and no harm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cydist as dist
from cydist import config
from cydist._native import asarray
from cydist.groups.nonfinite import first_nonfinite
from cydist.testing import run_threads, test_mismatches

RANKS = 3


@pytest.fixture(params=["inproc", "tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the default group."""
    name: str = request.param
    return name


@pytest.fixture(params=["CYDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def detail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups made from now on compare their calls first."""
    monkeypatch.setenv(request.param, "DETAIL")


@pytest.fixture
def check_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups made from now on look for NaN and infinity."""
    monkeypatch.setenv("CYDIST_CHECK_NAN", "1")


def all_fail(backend: str, body: Callable[[int], object], error: type[Exception]) -> list[str]:
    """Make a call that fails on every rank, and then one that works; the messages."""

    def rank_body(rank: int) -> str:
        with pytest.raises(error) as caught:
            body(rank)
        x = np.array([rank + 1])
        dist.all_reduce(x)
        assert x == RANKS * (RANKS + 1) // 2
        return str(caught.value)

    return run_threads(rank_body, RANKS, backend)


def ones(*shape: int, dtype: str = "float32") -> Any:
    return np.ones(shape, dtype)


# Calls in which rank 1 differs, and words about both calls.
DIFFERENT: dict[str, tuple[Callable[[int], object], str, str]] = {
    "size": (
        lambda rank: dist.all_reduce(ones(5 if rank == 1 else 4)),
        "Ranks 0, 2: all_reduce #1 of (4,) at ",
        "Rank 1: all_reduce #1 of (5,) at ",
    ),
    "shape": (
        lambda rank: dist.all_reduce(ones(2, 3) if rank == 1 else ones(6)),
        "Ranks 0, 2: all_reduce #1 of (6,) at ",
        "Rank 1: all_reduce #1 of (2, 3) at ",
    ),
    "dtype": (
        lambda rank: dist.broadcast(ones(4, dtype="float64" if rank == 1 else "int64"), 0),
        "Ranks 0, 2: broadcast #1 of int64 on cpu at ",
        "Rank 1: broadcast #1 of float64 on cpu at ",
    ),
    "op": (
        lambda rank: dist.reduce(ones(4), 0, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM),
        "Ranks 0, 2: reduce #1, op SUM at ",
        "Rank 1: reduce #1, op MAX at ",
    ),
    "root": (
        lambda rank: dist.broadcast(ones(4), int(rank == 1)),
        "Ranks 0, 2: broadcast #1, root 0 at ",
        "Rank 1: broadcast #1, root 1 at ",
    ),
    "call": (
        lambda rank: dist.barrier() if rank == 1 else dist.all_reduce(ones(4)),
        "Ranks 0, 2: all_reduce #1 of (4,) float32 on cpu, op SUM at ",
        "Rank 1: barrier #1 at ",
    ),
    "asynchronous": (
        lambda rank: dist.all_reduce(ones(4 + (rank == 1)), async_op=True),
        "Ranks 0, 2: all_reduce #1 of (4,) at ",
        "Rank 1: all_reduce #1 of (5,) at ",
    ),
    "coalesced": (
        lambda rank: dist.all_reduce_coalesced([ones(3), ones(4 + (rank == 1))]),
        "Ranks 0, 2: all_reduce_coalesced #1 of (3,), (4,) at ",
        "Rank 1: all_reduce_coalesced #1 of (3,), (5,) at ",
    ),
    "a block": (
        lambda rank: dist.gather(
            ones(5 if rank == 1 else 4), [ones(4) for _ in range(RANKS)] if rank == 0 else None
        ),
        "gather #1 on the default group: rank 1 has 5 elements for rank 0, which expects 4",
        "Rank 1: gather #1 of (5,) float32 on cpu, root 0 at ",
    ),
    "a part": (
        lambda rank: dist.all_to_all_single(
            ones(6), ones(6), [2, 2, 2], [2, 1, 3] if rank == 0 else [2, 2, 2]
        ),
        "all_to_all_single #1 on the default group: rank 0 has 1 element for rank 1, which ",
        "all_to_all_single #1 of (6,) float32 on cpu at ",
    ),
}


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_are_compared_before_they_run(backend: str, name: str) -> None:
    """A difference is a MismatchError with both calls on every rank; the group goes on."""
    call, theirs, its = DIFFERENT[name]
    for message in all_fail(backend, call, dist.MismatchError):
        assert theirs in message
        assert its in message
        assert "test_call_checks.py:" in message
        assert "the group goes on (CYDIST_DEBUG=DETAIL)" in message


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize(("usual", "odd", "words"), test_mismatches.differences())
def test_every_difference_of_the_contract(
    backend: str,
    usual: test_mismatches.Named,
    odd: test_mismatches.Named,
    words: tuple[str, str] | None,
) -> None:
    """What a call without DETAIL finds while it runs is found before, and the group goes on."""

    def body(rank: int) -> None:
        name, given = odd if rank == 1 else usual
        test_mismatches.call(name, RANKS, **given)

    for message in all_fail(backend, body, dist.MismatchError):
        assert "Nothing was sent" in message
        for pattern in words or ():
            assert re.search(pattern, message)


@pytest.mark.usefixtures("detail")
def test_the_line_of_a_coalesced_call(backend: str) -> None:
    """Is the program's, not that of the library that ends the block."""

    def call(rank: int) -> None:
        with dist._coalescing_manager():
            dist.all_reduce(ones(2 + rank))
            dist.all_reduce(ones(3))

    for message in all_fail(backend, call, dist.MismatchError):
        assert re.findall(r"at (\w+\.py):\d+", message) == ["test_call_checks.py"] * RANKS


@pytest.mark.usefixtures("detail")
def test_the_others_of_a_mismatch(backend: str) -> None:
    """The error's `ranks` are those whose call is not this rank's."""

    def body(rank: int) -> tuple[int, ...]:
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(ones(4 + (rank == 1)))
        return caught.value.ranks

    assert run_threads(body, RANKS, backend) == [(1,), (0, 2), (1,)]


@pytest.mark.usefixtures("detail")
def test_devices_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's array is on a GPU: an error on every rank, where the call itself would run."""
    from fake_gpu_delayed import install

    gpu = install(monkeypatch, "late", 1 << 10)

    def call(rank: int) -> None:
        dist.all_reduce(gpu.array([1.0], 0) if rank == 1 else np.array([1.0]))

    for message in all_fail("tcp", call, dist.MismatchError):
        assert "Ranks 0, 2: all_reduce #1 of float64 on cpu at " in message
        assert "Rank 1: all_reduce #1 of float64 on cuda" in message


def before_a_mismatch(make: Callable[[int], object]) -> Callable[[int], Any]:
    """A body that makes calls, and then one in which rank 1 differs; the error."""

    def calls(rank: int) -> None:
        make(rank)
        dist.all_reduce(ones(4 + (rank == 1)))
        dist.barrier()

    def body(rank: int) -> Any:
        with pytest.raises(dist.MismatchError) as caught:
            calls(rank)
        return caught.value

    return body


# Calls, and how many there are of them in the counting of their group.
COUNTED: dict[str, tuple[Callable[[int], object], int]] = {
    "none": (lambda rank: None, 0),
    "monitored_barrier": (lambda rank: dist.monitored_barrier(), 1),
    "all_gather_object": (lambda rank: dist.all_gather_object([None] * RANKS, rank), 2),
    "coalesced": (lambda rank: dist.all_reduce_coalesced([ones(1), ones(2)]), 1),
    "messages": (lambda rank: dist.send(ones(1), 1) if rank == 0 else
                 dist.recv(ones(1), 0) if rank == 1 else None, 0),
}  # fmt: skip


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
@pytest.mark.parametrize("name", COUNTED)
def test_the_number_of_a_call(
    backend: str, monkeypatch: pytest.MonkeyPatch, level: str, name: str
) -> None:
    """Is the same in both modes: comparisons are not counted."""
    monkeypatch.setenv("CYDIST_DEBUG", level)
    calls, count = COUNTED[name]
    errors = run_threads(before_a_mismatch(calls), RANKS, backend)
    assert [error.seq for error in errors] == [count + 1] * RANKS
    assert all(f"all_reduce #{count + 1} on the default group: " in str(error) for error in errors)


@pytest.mark.usefixtures("detail")
def test_a_rank_that_does_not_come(backend: str) -> None:
    """The timeout names the call that waited, on all ranks that made it."""

    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 2:
            return None
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.all_reduce(ones(3), timeout=0.5)
        return caught.value

    *errors, _ = run_threads(body, RANKS, backend)
    assert [(error.op, error.seq) for error in errors] == [("all_reduce", 2)] * 2
    for error in errors:
        assert str(error).startswith("comparison before all_reduce #2: "), error


@pytest.mark.usefixtures("detail")
def test_nothing_was_written(backend: str) -> None:
    """A call that was refused has left its arrays alone."""

    def body(rank: int) -> None:
        x = np.full(4 + rank, float(rank))
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(x)
        assert (x == rank).all()

    run_threads(body, RANKS, backend)


def test_a_mismatch_without_detail_fails_the_group(backend: str) -> None:
    """Calls are compared while they run; afterwards the group takes no more."""

    def body(rank: int) -> None:
        with pytest.raises(dist.DistError):
            dist.all_reduce(ones(4 + rank))
        with pytest.raises(dist.GroupFailedError):
            dist.barrier()

    run_threads(body, 2, backend)


@pytest.mark.usefixtures("detail")
def test_long_descriptions(backend: str) -> None:
    """Calls on many arrays are compared in full, to the last."""

    def call(rank: int) -> None:
        arrays = [ones(2, 3, 4) for _ in range(200)]
        dist.all_reduce_coalesced([*arrays, ones(1 + (rank == 2))])

    assert len(set(all_fail(backend, call, dist.MismatchError))) == 1


@pytest.mark.parametrize("level", ["off", "Info", "DETAIL"])
def test_levels(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """torch's levels are known in any case."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert config.debug_level() == level.upper()


def test_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a ValueError that lists the levels, when a group is made."""
    monkeypatch.setenv("CYDIST_DEBUG", "LOTS")
    with pytest.raises(ValueError, match="must be OFF, INFO or DETAIL"):
        dist.ProcessGroup(0, 1)


def test_no_checks_by_default() -> None:
    """Groups have no checks unless they were asked for, so no call makes any."""
    assert dist.ProcessGroup(0, 1).checks is None


# NaN and infinity.

DTYPES = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2, "complex64": np.complex64,
    "complex128": np.complex128, "longdouble": np.longdouble, "big-endian": np.dtype(">f4"),
    "float8_e4m3": ml_dtypes.float8_e4m3, "float8_e3m4": ml_dtypes.float8_e3m4,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
}  # fmt: skip


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", DTYPES)
def test_values_that_are_found(name: str, value: str) -> None:
    """Of every float dtype, with their index; dtypes without infinity make NaN of it."""
    with np.errstate(all="ignore"):
        x = np.ones((3, 4), DTYPES[name])
        x[1, 2] = x[2, 0] = DTYPES[name](value) if name != "big-endian" else float(value)
        as_float = float(x[1, 2].real.astype(np.float64))
    found = first_nonfinite(asarray(x))
    if np.isfinite(as_float):
        assert found is None  # the dtype has no such value
    else:
        assert found == ((1, 2), str(as_float))


@pytest.mark.parametrize("name", DTYPES)
def test_finite_values(name: str) -> None:
    """No finite value of a dtype counts as NaN: all of 8 and 16 bits, extremes of others."""
    dtype = np.dtype(DTYPES[name])
    if dtype.itemsize <= 2:
        values = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
        with np.errstate(all="ignore"):
            x = values[np.isfinite(values.astype(np.float64))]
    else:
        limits = np.finfo(dtype)
        x = np.array([0, -0.0, limits.max, limits.min, limits.tiny], dtype)
    assert len(x) >= 5
    assert first_nonfinite(asarray(x)) is None


@pytest.mark.parametrize("dtype", [np.int64, bool, "M8[s]", np.dtype([("a", "f4")])])
def test_dtypes_without_nan(dtype: Any) -> None:
    """Integers, dates and records are not searched."""
    assert first_nonfinite(asarray(np.zeros(3, dtype).view(np.uint8).view(dtype))) is None


def test_the_imaginary_part() -> None:
    """NaN in the imaginary part counts, with the index of its element."""
    x = np.ones((2, 3), np.complex64)
    x.imag[1, 1] = np.nan
    assert first_nonfinite(asarray(x)) == ((1, 1), "nan")


def test_strided_and_empty_arrays() -> None:
    """Only the elements of an array count, and none of an empty one."""
    x = np.full((4, 6), np.nan)
    x[::2, 1::2] = 1
    assert first_nonfinite(asarray(x[::2, 1::2])) is None
    assert first_nonfinite(asarray(x[:0])) is None
    x[2, 3] = np.inf
    assert first_nonfinite(asarray(x[::2, 1::2])) == ((1, 1), "inf")


def with_nan(rank: int, bad: int = 1) -> Any:
    x = np.ones((2, 6), np.float32)
    if rank >= bad:
        x[1, 4] = np.nan
    return x


NAN_CALLS: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda rank: dist.all_reduce(with_nan(rank)),
    "all_reduce async": lambda rank: dist.all_reduce(with_nan(rank), async_op=True),
    "reduce": lambda rank: dist.reduce(with_nan(rank), 0),
    "broadcast": lambda rank: dist.broadcast(with_nan(rank), 1),
    "scan": lambda rank: dist.scan(with_nan(rank)),
    "exscan": lambda rank: dist.exscan(with_nan(rank)),
    "all_gather": lambda rank: dist.all_gather([ones(12) for _ in range(RANKS)], with_nan(rank)),
    "all_gather_into_tensor": lambda rank: dist.all_gather_into_tensor(
        ones(2 * RANKS, 6), with_nan(rank)
    ),
    "gather": lambda rank: dist.gather(
        with_nan(rank), None if rank else [ones(12) for _ in range(RANKS)]
    ),
    "reduce_scatter_tensor": lambda rank: dist.reduce_scatter_tensor(ones(4), with_nan(rank)),
    "all_to_all_single": lambda rank: dist.all_to_all_single(ones(12), with_nan(rank).ravel()),
    "all_reduce_coalesced": lambda rank: dist.all_reduce_coalesced([ones(3), with_nan(rank)]),
}


@pytest.mark.usefixtures("check_nan")
@pytest.mark.parametrize("call", NAN_CALLS)
def test_inputs_are_searched(backend: str, call: str) -> None:
    """The first rank with NaN, its array and the index are in the error of every rank."""
    for message in all_fail(backend, NAN_CALLS[call], dist.NonFiniteError):
        assert message.startswith(f"{call.split()[0]} #1 on the default group: rank 1's input")
        assert ("has nan at index (10,)" if "single" in call else "has nan at index (1, 4)") in (
            message
        )
        assert "test_call_checks.py:" in message


@pytest.mark.usefixtures("check_nan")
def test_arrays_of_a_list_have_numbers(backend: str) -> None:
    """The error says which array of a list it is."""

    def call(rank: int) -> None:
        arrays = [np.array([float("inf") if rank == i == 0 else 1.0]) for i in range(RANKS)]
        arrays.reverse()
        dist.reduce_scatter(np.empty(1), arrays)

    for message in all_fail(backend, call, dist.NonFiniteError):
        assert "rank 0's input 2 of 3 has inf at index (0,)" in message


@pytest.mark.usefixtures("check_nan")
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_outputs_are_searched(backend: str, async_op: bool) -> None:
    """A sum that overflows is an error of the rank that has it; the group goes on."""

    def call(rank: int) -> None:
        work = dist.all_reduce(np.full(3, 3e38, np.float32), async_op=async_op)
        if work is not None:
            work.wait()

    for rank, message in enumerate(all_fail(backend, call, dist.NonFiniteError)):
        assert f"rank {rank}'s output has inf at index (0,)" in message
        assert "overflow" in message


@pytest.mark.usefixtures("check_nan")
def test_polling_a_work_with_nan(backend: str) -> None:
    """is_completed raises nothing; exception() has the error, and so does the future."""

    def body(rank: int) -> None:
        work = dist.all_reduce(np.full(3, 3e38, np.float32), async_op=True)
        assert work is not None
        assert isinstance(work.get_future().exception(timeout=30), dist.NonFiniteError)
        assert work.is_completed()
        assert isinstance(work.exception(), dist.NonFiniteError)

    run_threads(body, RANKS, backend)


@pytest.mark.usefixtures("check_nan")
@pytest.mark.parametrize("how", ["send", "isend", "batch"])
def test_messages_are_searched(backend: str, how: str) -> None:
    """The sender's error names the receiver, which learns of it at once."""

    def body(rank: int) -> None:
        x = np.array([1.0, np.nan])
        if rank == 1:
            with pytest.raises(dist.DistError, match=r"rank 0 raised an error in i?send"):
                dist.recv(x, 0)
            return
        start = {
            "send": lambda: dist.send(x, 1),
            "isend": lambda: dist.isend(x, 1),
            "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]),
        }
        with pytest.raises(dist.NonFiniteError, match=r"nan at index \(1,\).*for rank 1"):
            start[how]()

    run_threads(body, 2, backend)


@pytest.mark.usefixtures("check_nan", "detail")
def test_both_checks_together(backend: str) -> None:
    """Calls that pass both give what they give without them, bit for bit."""

    def body(rank: int) -> None:
        x = np.arange(1000, dtype=np.float64) * (rank + 1)
        dist.all_reduce(x)
        assert (x == np.arange(1000) * 6.0).all()
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, {"rank": rank, "nan": float("nan")})
        assert [each["rank"] for each in objects] == [0, 1, 2]
        dist.monitored_barrier(timeout=30)
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.all_gather([np.empty(1 + r) for r in (0, 1)], np.ones(1 + rank // 2), pair)

    run_threads(body, RANKS, backend)


@pytest.mark.usefixtures("check_nan")
def test_gpu_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays on a GPU are searched, too, on their stream."""
    from fake_gpu_delayed import install

    gpu = install(monkeypatch, "late", 1 << 10)

    def call(rank: int) -> None:
        dist.all_reduce(gpu.array([1.0, float("nan") if rank == 2 else 0.0], 0))

    for message in all_fail("tcp", call, dist.NonFiniteError):
        assert "rank 2's input has nan at index (1,)" in message

"""Reductions by a function of the user's; what every backend does by them is in the contract."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_ranks import DEADLINE

import cydist as dist
from cydist.groups import derived
from cydist.testing import oracle, run_threads

SIZE = 3
PAIRS = np.dtype([("value", "f8"), ("index", "i8")])


@pytest.fixture(params=["inproc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ranks(transport: str, body: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """What `body` returns on each rank."""
    return run_threads(body, size, transport, DEADLINE)


def values(rank: int, count: int = 20) -> Any:
    return (np.arange(count) * 7 + rank * 5) % 11 - 4.0


def test_a_ufunc_is_a_function(transport: str) -> None:
    """numpy's own do, at their full speed."""

    def body(rank: int) -> Any:
        x = values(rank)
        dist.all_reduce(x, dist.ReduceOp.create(np.logaddexp))
        return x

    expected = np.logaddexp(np.logaddexp(values(0), values(1)), values(2))
    assert all(oracle.same_bits(expected, found) for found in ranks(transport, body))


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"])
def test_long_arrays_go_in_pieces(
    transport: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extra memory is bounded, and the result is that of one piece, with uneven blocks too."""
    counts, longest = [5, 1, 9], []

    def add(low: Any, high: Any) -> Any:
        longest.append(low.size)
        return low + high

    op = dist.ReduceOp.create(add)

    def body(rank: int) -> Any:
        if name == "reduce_scatter":
            x = np.zeros(counts[rank])
            dist.reduce_scatter(x, [values(rank, count) for count in counts], op)
            return x
        x = values(rank)
        if name == "reduce":
            dist.reduce(x, 1, op)
        else:
            getattr(dist, name)(x, op)
        return x

    whole = ranks(transport, body)
    longest.clear()
    monkeypatch.setattr(derived, "SPACE_BYTES", SIZE * 8 * 2)
    assert all(map(oracle.same_bits, whole, ranks(transport, body)))
    assert max(longest) == (1 if "scan" in name else 2)  # scans hold twice as much


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 100), st.integers(1, 4),
    st.sampled_from(["all_reduce", "scan", "exscan"]),
)  # fmt: skip
def test_any_count_and_piece_gives_the_sum(count: int, space: int, size: int, name: str) -> None:
    """The same bits as SUM's, whatever the cut."""

    def body(rank: int) -> Any:
        by_function, by_kernel = values(rank, count), values(rank, count)
        getattr(dist, name)(by_function, dist.ReduceOp.create(np.add))
        getattr(dist, name)(by_kernel)
        return by_function, by_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "SPACE_BYTES", space)
        for by_function, by_kernel in ranks("inproc", body, size):
            assert oracle.same_bits(by_kernel, by_function)


@pytest.mark.parametrize("into", [0, 1], ids=["into-low", "into-high"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan", "exscan"])
def test_a_function_may_write_into_what_it_is_given(name: str, into: int) -> None:
    """And nothing of the user's changes by it."""

    def add(low: Any, high: Any) -> Any:
        return np.add(low, high, out=(low, high)[into])

    def body(rank: int) -> Any:
        x, same = values(rank), values(rank)
        call = getattr(dist, name)
        args = (0,) if name == "reduce" else ()
        call(x, *args, dist.ReduceOp.create(add))
        call(same, *args, dist.ReduceOp.SUM)
        assert oracle.same_bits(same, x)
        inputs = [values(rank) for _ in range(SIZE)]
        dist.reduce_scatter(np.zeros(20), inputs, dist.ReduceOp.create(add))
        assert all(oracle.same_bits(values(rank), each) for each in inputs)

    ranks("inproc", body)


def test_strided_asynchronous_and_coalesced_calls_take_functions(transport: str) -> None:
    """All forms of the calls do."""
    op = dist.ReduceOp.create(np.maximum)

    def body(rank: int) -> Any:
        strided = np.zeros((20, 3))
        strided[:, 1] = values(rank)
        work = dist.all_reduce(strided[:, 1], op, async_op=True)
        assert work is not None
        work.wait()
        many = [values(rank, 3), values(rank, 8)]
        dist.all_reduce_coalesced(many, op)
        parts = [np.zeros(2), np.zeros(1)]
        dist.reduce_scatter_tensor_coalesced(parts, [values(rank, 6), values(rank, 3)], op)
        one = np.zeros(2)
        dist.reduce_scatter_tensor(one, values(rank, 6), op)
        assert oracle.same_bits(one, parts[0])
        return strided[:, 1].copy(), *many

    for found in ranks(transport, body):
        for each in found:
            expected = np.max([values(rank, each.size) for rank in range(SIZE)], axis=0)
            assert oracle.same_bits(expected, each)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e5m2"])
def test_tensors_reach_the_function_as_numpy_arrays(name: str) -> None:
    """Of the dtype of the same name, ml_dtypes' where numpy has none."""
    torch = pytest.importorskip("torch")
    seen = []

    def first(low: Any, high: Any) -> Any:
        seen.append(low.dtype.name)
        return low

    def body(rank: int) -> Any:
        x = torch.full((4,), rank).to(getattr(torch, name))
        dist.all_reduce(x, dist.ReduceOp.create(first))
        return x.float().tolist()

    assert [[0.0] * 4] * 2 == ranks("inproc", body, 2)
    assert {name} == set(seen)


def pairs(*rows: tuple[float, int]) -> Any:
    return np.array(list(rows), PAIRS)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.MAXLOC, pairs((5, 1), (7, 0), (np.nan, 4), (np.nan, 1))),
        (dist.ReduceOp.MINLOC, pairs((1, 0), (7, 0), (np.nan, 4), (np.nan, 1))),
    ],
    ids=["MAXLOC", "MINLOC"],
)
def test_the_extreme_comes_with_its_index(op: Any, expected: Any) -> None:
    """The lowest index of equal values; NaN wins, the one of the lowest index."""
    nan = np.nan
    given = [
        pairs((1, 0), (7, 2), (3, 0), (nan, 9)),
        pairs((5, 1), (7, 0), (nan, 4), (nan, 1)),
        pairs((5, 2), (7, 1), (9, 7), (1, 0)),
    ]

    def body(rank: int) -> Any:
        x = given[rank].copy()
        dist.all_reduce(x, op)
        return x

    for found in ranks("inproc", body):
        assert oracle.same_bits(expected["index"], found["index"])
        np.testing.assert_array_equal(expected["value"], found["value"])


def refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    """It raises that on every rank before any traffic: the group works on."""

    def body(rank: int) -> float:
        with pytest.raises(error, match=words):
            call()
        x = np.ones(1)
        dist.all_reduce(x)
        return float(x[0])

    assert [2.0] * 2 == ranks("inproc", body, 2)


def test_what_cannot_be_called_makes_no_reduction() -> None:
    """ReduceOp.create says so."""
    with pytest.raises(TypeError, match=r"needs a function of two arrays.*not 3"):
        dist.ReduceOp.create(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f8", [("a", "f8")], [("a", "c16"), ("b", "i8")]], ids=str)
def test_maxloc_needs_pairs(dtype: Any) -> None:
    """Two fields, both ordered."""
    refused(
        lambda: dist.all_reduce(np.zeros(2, dtype), dist.ReduceOp.MAXLOC),
        TypeError, r"all_reduce: MAXLOC is of pairs.*not ",
    )  # fmt: skip


WITHOUT_ML_DTYPES = """
import sys; sys.modules["ml_dtypes"] = None
import numpy as np, torch, cydist as dist
from cydist.testing import run_threads
def body(rank):
    x = torch.ones(2, dtype=torch.bfloat16)
    try:
        dist.all_reduce(x, dist.ReduceOp.create(np.add))
    except TypeError as error:
        print(error)
    dist.all_reduce(x)
    assert x[0] == 2
run_threads(body, 2, "inproc", 20)
"""


def test_a_tensor_without_numpy_dtype_is_refused() -> None:
    """bfloat16, where ml_dtypes is not installed; the group works on."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ML_DTYPES],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.count("bfloat16 has none: pip install ml_dtypes") == 2


def raising(body: Callable[[int], object], transport: str) -> list[BaseException]:
    """What the call raises on each rank; nobody leaves before all have heard."""
    heard = threading.Barrier(SIZE, timeout=DEADLINE)

    def caught(rank: int) -> BaseException:
        with pytest.raises(Exception) as info:  # noqa: PT011  # whatever it is
            body(rank)
        heard.wait()
        return info.value

    return ranks(transport, caught)


def test_what_the_function_raises_is_raised_there_and_ends_the_call_elsewhere(
    transport: str,
) -> None:
    """No rank gets a result that is not one."""

    def body(rank: int) -> None:
        def divide(low: Any, high: Any) -> Any:
            if rank == 1:
                raise ZeroDivisionError("one by none")
            return low + high

        dist.all_reduce(values(rank), dist.ReduceOp.create(divide))

    found = raising(body, transport)
    assert isinstance(found[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(found[rank], dist.DistError)
        assert "rank 1" in str(found[rank])


def test_an_unsupported_error_of_the_function_fails_the_group() -> None:
    """It is none of the call's own, after which a group goes on: the others are told."""

    def unsupported(low: Any, high: Any) -> Any:
        raise dist.UnsupportedError("not here")

    unsupported.__name__ = np.add.__name__

    def body(rank: int) -> None:
        dist.all_reduce(values(rank), dist.ReduceOp.create(unsupported if rank == 1 else np.add))

    found = raising(body, "inproc")
    assert "rank 1: the function raised: not here" in str(found[1])
    assert not isinstance(found[1], dist.UnsupportedError)
    assert all("rank 1" in str(found[rank]) for rank in (0, 2))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda low, high: None, r"returned object \(\)"),
        (lambda low, high: (low + high).sum(), r"returned float64 \(\)"),
        (lambda low, high: low + 1j * high, r"returned complex128 \(\d+,\)"),
    ],
    ids=["nothing", "one number", "another dtype"],
)
def test_what_is_no_array_like_them_is_an_error(function: Any, words: str) -> None:
    """It says what came, and what it was made of."""
    found = raising(
        lambda rank: dist.all_reduce(values(rank), dist.ReduceOp.create(function)), "inproc"
    )
    error = next(each for each in found if isinstance(each, TypeError))
    assert pytest.raises(TypeError, match=words).matches(error)
    assert "given two arrays (7,) of float64" in str(error) or "(6,)" in str(error)


def test_ranks_that_name_different_functions_are_told(transport: str) -> None:
    """MismatchError on all, with both names where it was found; nothing was reduced."""
    given = [values(rank) for rank in range(SIZE)]

    def body(rank: int) -> None:
        function = np.maximum if rank == 2 else np.minimum
        dist.all_reduce(given[rank], dist.ReduceOp.create(function))

    found = raising(body, transport)
    assert all(isinstance(error, dist.MismatchError) for error in found)
    assert any("op minimum" in str(error) and "op maximum" in str(error) for error in found)
    assert all(oracle.same_bits(values(rank), given[rank]) for rank in range(SIZE))


def test_different_functions_of_a_long_dtype_are_told() -> None:
    """A dtype whose text fills the message that is compared hides no difference."""
    dtype = np.dtype([(f"a field of some length {i}", "f8") for i in range(20)])

    def body(rank: int) -> None:
        function = np.maximum if rank == 2 else np.minimum
        dist.all_reduce(np.zeros(4, dtype), dist.ReduceOp.create(function))

    assert all(isinstance(error, dist.MismatchError) for error in raising(body, "inproc"))


@pytest.mark.parametrize("name", ["all_reduce", "scan"])
def test_a_function_on_one_rank_and_a_kernel_on_the_others(transport: str, name: str) -> None:
    """Is found, on all ranks, by a comparison and not by a deadline."""

    def body(rank: int) -> None:
        op = dist.ReduceOp.create(np.add) if rank == 0 else dist.ReduceOp.SUM
        getattr(dist, name)(values(rank), op)

    found = raising(body, transport)
    assert any(isinstance(error, dist.MismatchError) for error in found)
    assert not any(isinstance(error, dist.DistTimeoutError) for error in found)


FAILURES = ["raises", "is-slow", "differs", "is-absent"]


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan"])
def test_all_ranks_name_the_call_by_one_number(transport: str, name: str, how: str) -> None:
    """Also if a part of the call fails: the program knows the call, and not its parts."""
    over = threading.Event()

    def body(rank: int) -> str:
        def add(low: Any, high: Any) -> Any:
            if rank == 1 and how == "raises":
                raise ValueError("the function raised")
            if rank == 1 and how == "is-slow":
                over.wait(DEADLINE)
            return low + high

        op = dist.ReduceOp.create(np.logaddexp)
        dist.all_reduce(values(rank), op)  # calls of several parts, which count
        dist.all_reduce(values(rank))
        dist.barrier()
        group = dist.group.WORLD
        before = group.last_call().seq
        if rank == 1 and how == "is-absent":
            over.wait(DEADLINE)
            return ""
        x = values(rank, 21 if how == "differs" and rank == 1 else 20)
        arguments = (x, 0, dist.ReduceOp.create(add)) if name == "reduce" else (
            x, dist.ReduceOp.create(add))  # fmt: skip
        try:
            getattr(dist, name)(*arguments, timeout=1.0 if how.startswith("is") else DEADLINE)
        except dist.DistError as error:
            over.set()
            numbers.append((error.op, error.seq, before + 1))
            return f"{before + 1}: {error}"
        except ValueError:
            assert how == "raises"
        return ""

    numbers: list[tuple[str | None, int | None, int]] = []
    said = [text for text in ranks(transport, body) if text]
    # In reduce, a rank that is no root may have ended before.
    least = 1 if name == "reduce" else SIZE - (how in ("raises", "is-absent"))
    assert len(said) >= least, said
    assert all(each == (name, each[2], each[2]) for each in numbers), numbers
    for text in said:
        number, _, words = text.partition(": ")
        assert words.startswith(f"{name} #{number} on the default group: "), words
        about = words.partition("last calls")[0]
        last = {str(int(number) - 1)} if how == "is-absent" else set()
        assert set(re.findall(r"#(\d+)", about)) <= {number} | last, words

"""Arguments found wrong on one rank: the message names the call, the argument and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cydist._native import Array, asarray
from cydist.api import arguments

X = np.zeros((4, 6))


def arrays(*objs: Any) -> list[Array]:
    return [asarray(obj) for obj in objs]


class Cuda:
    """Memory on CUDA device 1, as far as anyone asks."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return X.__array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)


def test_input_may_be_read_only() -> None:
    """What is only read may be read-only, and may be a broadcast view."""
    x = np.broadcast_to(np.arange(3.0), (2, 3))
    assert arguments.input_array(x, "all_gather", "tensor").shape == (2, 3)


def test_input_is_the_users_memory() -> None:
    """The Array is a view of what was passed."""
    assert arguments.input_array(X, "all_gather", "tensor").owner is X


def test_output_may_be_strided() -> None:
    """What is written may be any slice."""
    assert arguments.output_array(X[::2, ::-1], "recv", "tensor").shape == (2, 6)


def read_only() -> np.ndarray:
    x = np.zeros(3)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("obj", "error", "message"),
    [
        pytest.param(read_only(), ValueError, "is read-only, and the call writes", id="read-only"),
        pytest.param(b"abc", ValueError, "is read-only", id="bytes"),
        pytest.param(
            np.lib.stride_tricks.as_strided(X, (2, 3), (0, 8)),
            ValueError,
            r"elements that share memory \(shape \(2, 3\), strides \(0, 8\) bytes\)",
            id="broadcast",
        ),
        pytest.param([1.0], TypeError, "not list", id="list"),
        pytest.param(np.array([None]), TypeError, "broadcast_object_list", id="objects"),
    ],
)
def test_output_refused(obj: Any, error: type[Exception], message: str) -> None:
    """What cannot be written to is refused by the call's and the argument's name."""
    with pytest.raises(error, match=rf"^all_reduce: tensor:? .*{message}"):
        arguments.output_array(obj, "all_reduce", "tensor")


def test_lazy_tensor_is_refused_by_name() -> None:
    """A ValueError of asarray gets the call's and the argument's name too."""
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"^send: tensor: a lazily conjugated tensor"):
        arguments.input_array(torch.ones(2, dtype=torch.complex64).conj(), "send", "tensor")


@pytest.fixture(params=[arguments.input_list, arguments.output_list], ids=["input", "output"])
def take(request: pytest.FixtureRequest) -> Callable[..., list[Array]]:
    """Both ways to take a list of arrays."""
    return request.param


def test_list_in_order(take: Callable[..., list[Array]]) -> None:
    """A list's Arrays are in the order of the list."""
    given = [np.zeros(n) for n in (3, 0, 2)]
    assert [array.owner for array in take(given, "gather", "gather_list", 3)] == given


@pytest.mark.parametrize(
    ("objs", "count", "error", "message"),
    [
        pytest.param([X], 2, ValueError, "gather_list has 1 entries, expected 2", id="short"),
        pytest.param([], None, ValueError, "gather_list is empty", id="empty"),
        pytest.param(None, 2, TypeError, "gather_list must be a list .* not NoneType", id="None"),
        pytest.param(X, 4, TypeError, "gather_list must be a list .* not ndarray", id="array"),
        pytest.param([X, "y"], 2, TypeError, r"gather_list\[1\]: .* not str", id="entry"),
    ],
)
def test_list_refused(
    take: Callable[..., list[Array]],
    objs: Any,
    count: int | None,
    error: type[Exception],
    message: str,
) -> None:
    """A list of the wrong length or with a wrong entry: the index is named."""
    with pytest.raises(error, match=f"^gather: {message}"):
        take(objs, "gather", "gather_list", count)


def test_output_list_names_the_entry() -> None:
    """A read-only entry is named by its index."""
    with pytest.raises(ValueError, match=r"^gather: gather_list\[1\] is read-only"):
        arguments.output_list([X, read_only()], "gather", "gather_list", 2)


@pytest.mark.parametrize("objs", [None, []], ids=["None", "empty"])
def test_absent(objs: Any) -> None:
    """None and an empty list are both no list."""
    arguments.check_absent(objs, "gather", "gather_list", "dst")


def test_present_where_it_should_be_absent() -> None:
    """A list that only one rank passes is refused on the others."""
    with pytest.raises(ValueError, match="gather: gather_list is for rank dst only"):
        arguments.check_absent([X], "gather", "gather_list", "dst")


def test_one_dtype() -> None:
    """Two dtypes in one call: TypeError names both."""
    with pytest.raises(TypeError, match=r"all_gather: .* one dtype, found float32, float64"):
        arguments.check_same_dtype(arrays(X, X, np.zeros(2, "f4")), "all_gather")


def test_one_dtype_of_those_without_a_code() -> None:
    """Dtypes that are only moved are told apart too."""
    with pytest.raises(TypeError, match=r"found <M8.s., >f8"):
        arguments.check_same_dtype(arrays(np.zeros(2, ">f8"), np.zeros(2, "<M8[s]")), "all_gather")


def test_one_device() -> None:
    """Host and device arrays in one call: ValueError names both devices."""
    with pytest.raises(ValueError, match=r"all_gather: .* one device, found cpu:0, cuda:1"):
        arguments.check_same_dtype(arrays(X, Cuda()), "all_gather")


def test_same_size_ignores_shape() -> None:
    """The number of elements counts, not the shape."""
    arguments.check_same_size(*arrays(X, X.T), "scatter", "tensor", "scatter_list[0]")


def test_same_size_refused() -> None:
    """Both arguments, sizes and shapes are named."""
    with pytest.raises(
        ValueError,
        match=r"scatter: tensor has 24 elements \(shape \(4, 6\)\), but scatter_list\[0\] has 6 "
        r"\(shape \(6,\)\)",
    ):
        arguments.check_same_size(*arrays(X, X[0]), "scatter", "tensor", "scatter_list[0]")


def test_times_size() -> None:
    """A block for each of p ranks fits."""
    arguments.check_times_size(*arrays(X, X[0]), 4, "reduce_scatter_tensor", "input", "output")


def test_times_size_refused() -> None:
    """The expected size is spelled out."""
    with pytest.raises(
        ValueError, match=r"input has 24 elements .* expected 18: 3 ranks times the 6 of output"
    ):
        arguments.check_times_size(*arrays(X, X[0]), 3, "reduce_scatter_tensor", "input", "output")


def check(outputs: list[Any], inputs: list[Any], allowed: set[tuple[int, int]]) -> set[int]:
    return arguments.check_disjoint(
        arrays(*outputs),
        arrays(*inputs),
        "all_gather",
        (lambda i, j: (i, j) in allowed) if allowed else None,
        *[arguments.OWN_BLOCK] * bool(allowed),
    )


V = np.zeros(12)
DISJOINT: dict[str, tuple[list[Any], list[Any], set[tuple[int, int]], set[int]]] = {
    "rows": ([X[0], X[1]], [X[2]], set(), set()),
    "interleaved": ([V[::2]], [V[1::2]], set(), set()),
    "columns": ([X[:, i] for i in range(6)], [V], set(), set()),
    "inputs overlap": ([V], [X, X], set(), set()),
    "empty": ([V[:0], V], [V[3:3]], set(), set()),
    "in place": ([X[0], X[1]], [X[1]], {(1, 0)}, {1}),
    "in place in several": ([X[0], X[1], X[2]], [X[1], X[0]], {(1, 0), (0, 1)}, {0, 1}),
    "in place strided": ([X[:, 0], X[:, 1]], [X[:, 1]], {(1, 0)}, {1}),
}


@pytest.mark.parametrize(
    ("outputs", "inputs", "allowed", "shared"), DISJOINT.values(), ids=DISJOINT.keys()
)
def test_disjoint(
    outputs: list[Any], inputs: list[Any], allowed: set[tuple[int, int]], shared: set[int]
) -> None:
    """Memory of its own for every output, or what the call allows; the outputs in place are
    named."""
    assert shared == check(outputs, inputs, allowed)


SHARED: dict[str, tuple[list[Any], list[Any], set[tuple[int, int]], str]] = {
    "outputs": ([X[0], X[1], X[0]], [], set(), "outputs 0 and 2 share memory"),
    "outputs shifted": ([V[:4], V[3:8]], [], set(), "outputs 0 and 1 share memory"),
    "outputs that cross": ([X[0], X[:, 0]], [], set(), "outputs 0 and 1 share memory"),
    "input": ([V[:6]], [V[5:]], set(), "the output and the input share memory .* never allows"),
    "third input": ([V[:6]], [X, X, V], set(), "the output and the input 2 share memory"),
    "in place where it cannot be": ([X], [X], set(), "never allows"),
    "another rank's block": ([X[0], X[1]], [X[0]], {(1, 0)}, "only for this rank's own block"),
}


@pytest.mark.parametrize(
    ("outputs", "inputs", "allowed", "message"), SHARED.values(), ids=SHARED.keys()
)
def test_shared(
    outputs: list[Any], inputs: list[Any], allowed: set[tuple[int, int]], message: str
) -> None:
    """Outputs that share memory, and inputs inside outputs, are refused and named."""
    with pytest.raises(ValueError, match=f"^all_gather: .*{message}"):
        check(outputs, inputs, allowed)


# A part of an array, the array, the number of ranks, and which of their parts it is.
WIDE = np.zeros((6, 8))
BLOCKS: dict[str, tuple[Any, Any, int, int | None]] = {
    "first rows": (X[:2], X, 2, 0),
    "last rows": (X[2:], X, 2, 1),
    "whole": (X, X, 1, 0),
    "one element": (V[:1], V[:1], 1, 0),
    "another shape": (X[2:].ravel(), X, 2, 1),
    "stacked": (X[3], X, 4, 3),
    "not along the first dimension": (X[0, :2], X, 12, 0),
    "strided": (V[6::2], V[::2], 2, 1),
    "reversed": (V[5::-1], V[::-1], 2, 1),
    "rows with gaps": (WIDE[2:4, :5], WIDE[:, :5], 3, 1),
    "one row with gaps": (WIDE[2, :5], WIDE[:, :5], 6, 2),
    "columns": (WIDE.T[4:], WIDE.T, 2, 1),
    "of one element each": (V[4:5], V[::2], 6, 2),
    "shifted": (X.ravel()[1:7], X, 4, None),
    "shifted within rows with gaps": (WIDE[2:4, 1:6], WIDE[:, :5], 3, None),
    "before": (V[:3], V[3:], 3, None),
    "after": (V[9:], V[:9], 3, None),
    "other strides": (V[:6:2], V[:6], 2, None),
    "other direction": (V[2::-1], V[:6], 2, None),
    "too large": (V[:6], V, 3, None),
    "rows that do not divide": (WIDE[0, :2], WIDE[:, :4], 12, None),
    "repeated elements": (V[:1], np.broadcast_to(V[:1], 4), 4, None),
    "empty": (V[:0], V[:0], 2, None),
}


@pytest.mark.parametrize(("part", "array", "p", "number"), BLOCKS.values(), ids=BLOCKS.keys())
def test_block_number(part: Any, array: Any, p: int, number: int | None) -> None:
    """A part is found by its memory, whatever its shape; what is beside every part is none."""
    assert number == arguments.block_number(*arrays(part, array), p)


@pytest.mark.parametrize(
    ("shape", "sizes", "p", "expected"),
    [
        pytest.param((6, 2), None, 3, [4, 4, 4], id="even"),
        pytest.param((6, 2), [], 3, [4, 4, 4], id="empty list"),
        pytest.param((6, 2), [1, 0, 5], 3, [2, 0, 10], id="uneven"),
        pytest.param((0, 2), None, 3, [0, 0, 0], id="no rows"),
        pytest.param((3, 0), [1, 2], 2, [0, 0], id="empty rows"),
        pytest.param((4,), np.array([3, 1]), 2, [3, 1], id="numpy sizes"),
    ],
)
def test_splits(shape: tuple[int, ...], sizes: Any, p: int, expected: list[int]) -> None:
    """Rows become elements."""
    array = asarray(np.zeros(shape))
    assert arguments.split_sizes(array, sizes, p, "a2a", "input", "input_split_sizes") == expected


@pytest.mark.parametrize(
    ("shape", "sizes", "error", "message"),
    [
        pytest.param((5,), None, ValueError, "5 rows, which cannot be divided among 2", id="odd"),
        pytest.param((), None, ValueError, "input has no dimension to cut", id="0-d"),
        pytest.param((5,), [5], ValueError, "has 1 entries, expected 2", id="count"),
        pytest.param((5,), [2, 2], ValueError, r"\[2, 2\] .* sum to the 5 rows", id="sum"),
        pytest.param((5,), [6, -1], ValueError, "none negative", id="negative"),
        pytest.param((5,), [2.5, 2.5], TypeError, "whole numbers", id="fractions"),
    ],
)
def test_splits_refused(
    shape: tuple[int, ...], sizes: Any, error: type[Exception], message: str
) -> None:
    """Sizes that do not cut the array in p: the numbers are named."""
    with pytest.raises(error, match=f"^a2a: .*{message}"):
        arguments.split_sizes(
            asarray(np.zeros(shape)), sizes, 2, "a2a", "input", "input_split_sizes"
        )

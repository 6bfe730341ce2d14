"""Wrong arguments to every public call: named at once, nothing sent, the group works afterwards."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from valid_calls import CALLS, OBJECT_CALLS, SIZE, Arguments, one

import cydist as dist

WRITTEN = {
    "tensor_list", "output_tensor", "gather_list", "output", "output_tensor_list", "tensors",
    "output_tensor_lists", "output_tensors", "outputs",
}  # fmt: skip
READ_TENSOR = {"all_gather", "gather", "send", "isend"}  # in which `tensor` is only read
ROOTED = ("src", "dst")
MANY = [name for name in CALLS if any(isinstance(v, list) for v in CALLS[name]().values())]


def is_written(call: str, name: str) -> bool:
    return name in WRITTEN or (name == "tensor" and call not in READ_TENSOR)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


# What no argument that is an array may be: (how to make it, exception, what the text says).
NO_ARRAYS = {
    "None": (lambda: None, TypeError, "not NoneType"),
    "list": (lambda: [0.0] * 4, TypeError, "not list"),
    "number": (lambda: 1.0, TypeError, "not float"),
    "text": (lambda: "abcd", TypeError, "not str"),
    "objects": (lambda: np.array([None] * 4), TypeError, "object"),
}
# What no argument that is written may be.
NO_OUTPUTS = {
    "read-only": (lambda: read_only(one()), ValueError, "read-only"),
    "bytes": (lambda: bytes(16), ValueError, "read-only"),
    "repeated": (
        lambda: np.lib.stride_tricks.as_strided(one(), (2, 2), (0, 4)),
        ValueError,
        "elements that share memory",
    ),
}

# What a message may begin with instead of the call's name: that of an argument that every call
# takes.
PLAIN = ("group ", "op ", "PREMUL_SUM ")


def wrong_arrays() -> Iterator[Any]:
    """Each array, and each entry of each list, replaced by what is no array or not writable."""
    for call, right in CALLS.items():
        for name, value in right().items():
            if name in ROOTED:
                continue
            bad = {**NO_ARRAYS, **(NO_OUTPUTS if is_written(call, name) else {})}
            for kind, (make, error, text) in bad.items():
                if isinstance(value, list):
                    entry = f"{name}[1]"
                    if isinstance(value[1], list):
                        entry, new = f"{name}[1][1]", [value[0], [value[1][0], make()]]
                    else:
                        new = [value[0], make()]
                else:
                    entry, new = name, make()
                message = f"{re.escape(entry)}.*{text}"
                yield pytest.param(
                    call, {**right(), name: new}, error, message, id=f"{call}-{entry}-{kind}"
                )


def wrong_lists() -> Iterator[Any]:
    """Lists that are none, too short, too long, empty."""
    for call in MANY:
        right = CALLS[call]()
        for name, value in right.items():
            if not isinstance(value, list):
                continue
            for kind, new, error in (
                ("array", np.zeros((SIZE, 4), "f4"), TypeError),
                ("None", None, TypeError),
                ("empty", [], ValueError),
                ("short", value[:1], ValueError),
                ("long", [*value, value[0].copy()], ValueError),
            ):
                if call == "all_reduce_coalesced" and kind in ("short", "long"):
                    continue  # any length will do
                text = rf"{name} |has \d entries, expected \d"  # of two lists, whichever is odd
                yield pytest.param(
                    call, {**CALLS[call](), name: new}, error, text, id=f"{call}-{name}-{kind}"
                )


def of_another_dtype(value: Any) -> Any:
    return [of_another_dtype(v) for v in value] if isinstance(value, list) else value.astype("f8")


def larger(value: Any) -> Any:
    return [larger(v) for v in value] if isinstance(value, list) else np.zeros(value.size + 1, "f4")


def pairs() -> Iterator[Any]:
    """Two arrays that do not fit together: other dtypes, other sizes, shared memory."""
    for call, right in CALLS.items():
        names = [name for name in right() if name not in ROOTED]
        if len(names) < 2:
            continue
        for name in names:
            new = {**right(), name: of_another_dtype(right()[name])}
            yield pytest.param(
                call, new, TypeError, "one dtype, found float32, float64", id=f"{call}-{name}-f8"
            )
            new = {**right(), name: larger(right()[name])}
            yield pytest.param(call, new, ValueError, name, id=f"{call}-{name}-larger")
        if call == "all_gather_coalesced":
            continue  # its inputs are copied before anything is written
        output, given = sorted(names, key=lambda name: not is_written(call, name))
        yield pytest.param(
            call, overlapping(right(), output, given), ValueError, "share memory",
            id=f"{call}-overlap",
        )  # fmt: skip
    for call in MANY:
        for name, value in CALLS[call]().items():
            if isinstance(value, list) and is_written(call, name):
                twice = [value[0], value[0]]
                yield pytest.param(
                    call, {**CALLS[call](), name: twice}, ValueError, "share memory",
                    id=f"{call}-{name}-twice",
                )  # fmt: skip


def overlapping(right: Arguments, output: str, given: str) -> Arguments:
    """The first input's last elements are the first output's first ones."""
    memory = np.zeros(64, "f4")

    def first(value: Any) -> np.ndarray:
        return first(value[0]) if isinstance(value, list) else value

    def replaced(value: Any, array: np.ndarray) -> Any:
        if not isinstance(value, list):
            return array
        return [replaced(value[0], array), *value[1:]]

    n, m = first(right[given]).size, first(right[output]).size
    right[given] = replaced(right[given], memory[1 : 1 + n])
    right[output] = replaced(right[output], memory[n : n + m])
    return right


def wrong_values() -> Iterator[Any]:
    """Roots, tags, operations, groups, timeouts and split sizes."""
    for call, right in {**CALLS, **OBJECT_CALLS}.items():
        known = inspect.signature(getattr(dist, call)).parameters
        bad: list[tuple[str, Any, type[Exception], str]] = [
            ("group", 3, TypeError, "group"),
            ("group", [0, 1], TypeError, "group"),
            ("timeout", "soon", TypeError, "timeout"),
            ("timeout", -1.0, ValueError, "timeout"),
            ("timeout", float("nan"), ValueError, "timeout"),
            ("op", "SUM", TypeError, "op must be"),
            ("op", max, TypeError, "op must be"),
            ("op", dist.ReduceOp.PREMUL_SUM, ValueError, "factor"),
            ("op", dist.ReduceOp.BAND, TypeError, "BAND of float32"),
            ("tag", -1, ValueError, "tag"),
            ("tag", 2**31, ValueError, "tag"),
            ("tag", 1.5, TypeError, "tag"),
        ]
        for root in filter(known.__contains__, ROOTED):
            bad += [
                (root, SIZE, ValueError, f"{root}={SIZE}"),
                (root, -1, ValueError, f"{root}=-1"),
                (root, "0", TypeError, root),
                (root, 0.0, TypeError, root),
                (f"group_{root}", 0, ValueError, root),
                (f"group_{root}", SIZE, ValueError, root),
            ]
        for name, value, error, text in bad:
            if name in known:
                arguments = {**right(), name: value}
                if name.startswith("group_") and value == SIZE:
                    arguments.pop(name.removeprefix("group_"))
                yield pytest.param(call, arguments, error, text, id=f"{call}-{name}-{value!r:.20}")
    for name in ("input_split_sizes", "output_split_sizes"):
        for value in ([8], [7, 2], [-1, 9], [4.0, 4.0], "44", [1, 2, 5]):
            yield pytest.param(
                "all_to_all_single",
                {**CALLS["all_to_all_single"](), name: value},
                TypeError if value in ([4.0, 4.0], "44") else ValueError,
                name,
                id=f"all_to_all_single-{name}-{value}",
            )


def wrong_objects() -> Iterator[Any]:
    """Lists of objects that are none, or of the wrong length."""
    for call, name in (
        ("all_gather_object", "object_list"),
        ("gather_object", "object_gather_list"),
        ("scatter_object_list", "scatter_object_input_list"),
        ("scatter_object_list", "scatter_object_output_list"),
    ):
        for value in (None, "ab", [], [1] * (SIZE + 1)):
            if name == "scatter_object_output_list" and value and len(value) > SIZE:
                continue  # at least one entry will do
            arguments = {**OBJECT_CALLS[call](), name: value}
            yield pytest.param(call, arguments, ValueError, name, id=f"{call}-{name}-{value!r}")
    for call in ("broadcast_object_list", "send_object_list", "recv_object_list"):
        for value in (None, "ab", 3):
            arguments = {**OBJECT_CALLS[call](), "object_list": value}
            yield pytest.param(call, arguments, TypeError, "object_list", id=f"{call}-{value!r}")


@pytest.fixture(params=["inproc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where a stray message would arrive."""
    return str(request.param)


@pytest.mark.parametrize(
    ("call", "arguments", "error", "text"),
    [*wrong_arrays(), *wrong_lists(), *pairs(), *wrong_values(), *wrong_objects()],
)
def test_is_refused_before_traffic(
    jobs: Any,
    transport: str,
    call: str,
    arguments: Arguments,
    error: type[Exception],
    text: str,
) -> None:
    """The exception names the call and the argument, and the next calls are right."""
    function = getattr(dist, call)

    def body(rank: int) -> tuple[float, float]:
        if rank == 0:
            with pytest.raises(error, match=text) as caught:
                function(**arguments)
            assert str(caught.value).startswith((f"{call}: ", *PLAIN))
        total, token = np.full(3, rank + 1.0), np.full(1, rank + 5.0)
        dist.all_reduce(total)
        if rank:
            dist.send(token, 0)
        else:
            dist.recv(token, 1)
        return total[0], token[0]

    assert [(3.0, 6.0)] * SIZE == jobs.get(transport, SIZE).run(body)


def test_no_limit_is_a_timeout(jobs: Any, transport: str) -> None:
    """timeout=math.inf waits as long as it takes."""

    def body(rank: int) -> float:
        total = np.ones(1)
        dist.all_reduce(total, timeout=math.inf)
        return total[0]

    assert [2.0] * SIZE == jobs.get(transport, SIZE).run(body)

"""Every way in which ranks can be in different calls: all raise MismatchError, which names both.

Every wait has a deadline of many seconds, so a rank that was not notified would end with another
error. Ranks that can finish early, such as a broadcast's root, go on and learn in a later call.

With CYDIST_DEBUG=DETAIL the calls are compared before they run, and the words are the same, but for
shapes in place of counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.contract import Jobs
from cydist.tuning.table import REDUCING

Named = tuple[str, dict[str, Any]]  # a collective, and arguments of `call`

LONG = 50.0
MANY = 20000  # later calls until a rank that finished early must have learned


def blocks(p: int, count: int = 3, dtype: str = "f4") -> list[np.ndarray]:
    return [np.zeros(count, dtype) for _ in range(p)]


def ones(count: int = 3, dtype: str = "f4") -> np.ndarray:
    return np.ones(count, dtype)


def rooted(rank: int, root: int, value: Any) -> Any:
    """Return arguments that only the root passes."""
    return value if rank == root else None


def call(
    name: str, p: int, *, count: int = 3, dtype: str = "f4", op: str = "SUM", root: int = 0
) -> None:
    """Each collective, with arguments that can be wrong on one rank."""
    rank = dist.get_rank()
    x, kind = ones(count, dtype), getattr(dist.ReduceOp, op)
    limit: dict[str, Any] = {"timeout": LONG}
    if name in ("all_reduce", "scan", "exscan"):
        getattr(dist, name)(x, kind, **limit)
    elif name == "reduce":
        dist.reduce(x, root, kind, **limit)
    elif name == "broadcast":
        dist.broadcast(x, root, **limit)
    elif name == "all_gather":
        dist.all_gather(blocks(p, count, dtype), x, **limit)
    elif name == "gather":
        dist.gather(x, rooted(rank, root, blocks(p, count, dtype)), root, **limit)
    elif name == "scatter":
        dist.scatter(x, rooted(rank, root, blocks(p, count, dtype)), root, **limit)
    elif name == "reduce_scatter":
        dist.reduce_scatter(x, blocks(p, count, dtype), kind, **limit)
    elif name == "all_to_all":
        dist.all_to_all_single(np.zeros(p * count, dtype), ones(p * count, dtype), **limit)
    elif name == "all_gather_object":
        dist.all_gather_object([None] * p, rank, **limit)
    else:
        assert name == "barrier"
        dist.barrier(timeout=LONG)


ROOTED = ("broadcast", "reduce", "gather", "scatter")
COUNTED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scan", "exscan")
TYPED = (*COUNTED, "gather", "scatter", "all_to_all")


def differences() -> list[Any]:
    """(the call of all ranks except one, that rank's call, patterns of both in the message)."""
    found: list[Any] = []
    for name in TYPED:
        given = {"dtype": "i4"}  # as many bytes, so that nothing but the dtype differs
        found.append((f"dtype-{name}", (name, {}), (name, given), ("float32", "int32")))
    for name in COUNTED:
        found.append((f"count-{name}", (name, {}), (name, {"count": 4}), None))
    for name in sorted(REDUCING):
        found.append((f"op-{name}", (name, {}), (name, {"op": "MAX"}), ("op SUM", "op MAX")))
    for name in ROOTED:
        found.append((f"root-{name}", (name, {}), (name, {"root": 1}), ("root 0", "root 1")))
    for name in (*TYPED, "barrier", "all_gather_object"):
        other = "barrier" if name == "all_reduce" else "all_reduce"
        seen = {"all_gather_object": "all_gather", "all_to_all": "all_to_all(_single)?"}
        said = f"{seen.get(name, name)} #1"
        found.append((f"collective-{name}", (name, {}), (other, {}), (said, f"{other} #1")))
    return [pytest.param(*case[1:], id=case[0]) for case in found]


def mismatch_text(call: Callable[[], None]) -> str:
    """The MismatchError of a call, or of the calls after it, in words; its first line.

    Calls are counted from the group's first. Over MPI alone the making of a communicator is #1.
    """

    def on_and_on() -> None:
        call()
        for _ in range(MANY):
            dist.barrier(timeout=LONG)

    with pytest.raises(dist.MismatchError) as caught:
        on_and_on()
    return renumbered(first_line(caught.value), calls_before())


def first_line(error: BaseException) -> str:
    """Return what differs, without the ranks' last calls."""
    return str(error).partition("\n")[0]


def calls_before() -> int:
    """Return how many calls the default group has made before a test's first one."""
    group = dist.group.WORLD
    if group is not None and group.checks is not None:
        return 0  # the user's calls are counted
    return group is not None and group.backend == "mpi" and not getattr(group, "windows", False)


def renumbered(text: str, before: int) -> str:
    """An error, in the numbers of the test's calls."""
    return re.sub(r"#(\d+)", lambda number: f"#{int(number[1]) - before}", text)


def at_the_end(name: str, given: dict[str, Any], p: int) -> str:
    """The MismatchError of a group's second call, which is its last, or of its end, in words."""
    dist.barrier(timeout=LONG)
    before = calls_before()
    try:
        call(name, p, **given)
        dist.destroy_process_group()
    except dist.MismatchError as error:
        return renumbered(first_line(error), before)
    return ""


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"{size}ranks")
def p(request: pytest.FixtureRequest) -> int:
    """Provide the number of ranks."""
    return int(request.param)


@pytest.fixture(params=["usual", "detail"], autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compare calls while they run, or also before."""
    found = str(request.param)
    monkeypatch.setenv("CYDIST_DEBUG", {"usual": "OFF", "detail": "DETAIL"}[found])
    return found


@pytest.mark.parametrize(("usual", "odd", "words"), differences())
def test_one_rank_differs(
    jobs: Jobs,
    backend: str,
    p: int,
    usual: tuple[str, dict[str, Any]],
    odd: tuple[str, dict[str, Any]],
    words: tuple[str, str] | None,
) -> None:
    """The last rank is in another call; every rank raises, and names both."""

    def body(rank: int) -> str:
        name, given = odd if rank == p - 1 else usual
        return mismatch_text(lambda: call(name, p, **given))

    for text in jobs.run_once(body, p, backend):
        if words is not None:
            assert re.search(words[0], text)
            assert re.search(words[1], text)
        else:
            assert text.count(f"{usual[0]} #1 of ") == 2


def test_another_order(jobs: Jobs, backend: str, p: int) -> None:
    """One rank skips a collective: the numbers say so, on every rank."""

    def body(rank: int) -> str:
        def calls() -> None:
            dist.all_reduce(ones(), timeout=LONG)
            if rank != p - 1:
                dist.all_gather(blocks(p), ones(), timeout=LONG)
            dist.all_reduce(ones(), timeout=LONG)

        return mismatch_text(calls)

    for text in jobs.run_once(body, p, backend):
        assert "all_gather #2" in text
        assert "all_reduce #2" in text


def coalesced(name: str, sizes: list[int]) -> None:
    """One of the calls on many arrays; `sizes` are of those that every rank must have alike."""
    p, rank = dist.get_world_size(), dist.get_rank()
    small = [np.full(size, rank + 1.0) for size in sizes]
    large = [np.full(p * size, rank + 1.0) for size in sizes]
    if name == "all_reduce_coalesced":
        dist.all_reduce_coalesced(small, timeout=LONG)
    elif name == "all_gather_coalesced":
        outputs = [[np.zeros(size) for size in sizes] for _ in range(p)]
        dist.all_gather_coalesced(outputs, small, timeout=LONG)
    elif name == "all_gather_into_tensor_coalesced":
        dist.all_gather_into_tensor_coalesced(large, small, timeout=LONG)
    else:
        assert name == "reduce_scatter_tensor_coalesced"
        dist.reduce_scatter_tensor_coalesced(small, large, timeout=LONG)


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce_coalesced",
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    ],
)
def test_arrays_of_one_call_have_other_sizes(
    jobs: Jobs, backend: str, name: str, level: str
) -> None:
    """The same number of elements in all, cut differently on one rank; every rank raises, and names
    the sizes."""

    def body(rank: int) -> str:
        return mismatch_text(lambda: coalesced(name, [2, 4] if rank else [4, 2]))

    for text in jobs.run_once(body, 2, backend):
        sizes = {"usual": "sizes of coalesced arrays", "detail": r"of \(\d,\), \(\d,\)"}
        assert re.search(sizes[level], text)


# A group's last calls: there is no later one in which a rank could learn.

# The last call of all ranks except one, that rank's call, and patterns of both in the message.
LAST: dict[str, tuple[Named, Named, tuple[str, str]]] = {
    "same": (("broadcast", {}), ("broadcast", {}), ("", "")),
    "root": (("broadcast", {}), ("broadcast", {"root": 1}), ("root 0", "root 1")),
    "root-reduce": (("reduce", {}), ("reduce", {"root": 1}), ("root 0", "root 1")),
    "root-gather": (("gather", {}), ("gather", {"root": 1}), ("root 0", "root 1")),
    "root-scatter": (("scatter", {}), ("scatter", {"root": 1}), ("root 0", "root 1")),
    "count": (("broadcast", {}), ("broadcast", {"count": 4}), (r"of \(?3", r"of \(?4")),
    "dtype": (("broadcast", {}), ("broadcast", {"dtype": "i4"}), ("float32", "int32")),
    "op": (("reduce", {}), ("reduce", {"op": "MAX"}), ("op SUM", "op MAX")),
    "op-scan": (("scan", {}), ("scan", {"op": "MAX"}), ("op SUM", "op MAX")),
    "collective": (("broadcast", {}), ("reduce", {}), ("broadcast #2", "reduce #2")),
    "barrier": (("broadcast", {}), ("barrier", {}), ("broadcast #2", "barrier #2")),
}


@pytest.mark.parametrize("way", LAST)
def test_ranks_differ_in_the_last_call(jobs: Jobs, backend: str, p: int, way: str) -> None:
    """All ranks raise, in it or when they destroy the group, and say how; if they agree, none."""
    usual, odd, words = LAST[way]

    def body(rank: int) -> str:
        return at_the_end(*(odd if rank == p - 1 else usual), p)

    for text in jobs.run_once(body, p, backend):
        assert re.search(words[0], text)
        assert re.search(words[1], text)
        assert bool(text) == (way != "same")


@pytest.mark.parametrize("way", [each for each in LAST if each[:4] in ("root", "coun", "dtyp")])
def test_only_what_differs_is_said(jobs: Jobs, backend: str, p: int, way: str) -> None:
    """Not the fields in which the calls agree, and no other call; every rank says the same call."""
    usual, odd, _ = LAST[way]
    equal = {"root": ("float32", " of 3"), "count": ("float32", "root"), "dtype": ("root",)}

    def body(rank: int) -> str:
        return at_the_end(*(odd if rank == p - 1 else usual), p)

    for text in jobs.run_once(body, p, backend):
        assert text.startswith(f"{usual[0]} #")
        assert text.count(f"{usual[0]} #2") >= 2
        assert not [words for words in equal[way.partition("-")[0]] if words in text]

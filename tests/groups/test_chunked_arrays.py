"""Long arrays with gaps: calls on one array, in pieces, a rank's array has the gaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cydist as dist
from cydist.testing import ThreadJob, oracle

WHOLE_BYTES, PIECE_BYTES = 4096, 512  # the tests' own: what is longer goes in pieces of so many
SHAPE = (3, WHOLE_BYTES // 3 + 99)  # int8; the last piece is a short one
ROOT = 1

Array = np.ndarray
Maker = Callable[[], Array]

# Arrays of SHAPE or as many elements in one row.
LAYOUTS: dict[str, Maker] = {
    "contiguous": lambda: np.empty(SHAPE, "i1"),
    "every second": lambda: np.empty((SHAPE[0], 2 * SHAPE[1]), "i1")[:, ::2],
    "one row": lambda: np.empty((SHAPE[0] * SHAPE[1], 2), "i1")[:, 1],
    "transposed": lambda: np.empty(SHAPE[::-1], "i1").T,
}


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few KiB are long ones."""
    for module in ("chunking", "group"):
        monkeypatch.setattr(f"cydist.backends.host.{module}.WHOLE_BYTES", WHOLE_BYTES)
    monkeypatch.setattr("cydist.backends.host.chunking.CHUNK_BYTES", PIECE_BYTES)


@pytest.fixture(
    params=[
        ("every second", "every second"),
        ("contiguous", "one row", "transposed"),
        ("contiguous", "contiguous"),
    ],
    ids="-".join,
)
def layouts(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Each rank's."""
    found: tuple[str, ...] = request.param
    return found


CALLS: dict[str, Callable[[Array], object]] = {
    "broadcast": lambda x: dist.broadcast(x, ROOT),
    "all_reduce": dist.all_reduce,
    "reduce": lambda x: dist.reduce(x, ROOT),
    "scan": dist.scan,
    "exscan": dist.exscan,
}


def given(rank: int) -> Array:
    """A rank's elements in C order; none of its pieces is like another."""
    count = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64)
    return ((count * (2 * rank + 3) + (count >> 7)) % 127).astype("i1")


def expected(name: str, rank: int, everyone: list[Array]) -> Array:
    """What a rank has after a call."""
    total = oracle.reduced("SUM", everyone)
    if name == "broadcast":
        return everyone[ROOT]
    if name == "all_reduce" or (name == "reduce" and rank == ROOT):
        return total
    if name == "scan" or (name == "exscan" and rank > 0):
        return oracle.reduced("SUM", everyone[: rank + (name == "scan")])
    return everyone[rank]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("name", CALLS)
def test_gaps_of_one_rank_are_all_ranks_affair(
    name: str, asynchronous: bool, layouts: tuple[str, ...]
) -> None:
    """Every rank has the call's result, wherever its elements and those of others lie."""
    everyone = [given(rank) for rank in range(len(layouts))]

    def rank_main(rank: int) -> bool:
        x = LAYOUTS[layouts[rank]]()
        x[...] = everyone[rank].reshape(x.shape)
        if asynchronous:
            called = {"broadcast": (dist.broadcast, (x, ROOT)), "reduce": (dist.reduce, (x, ROOT))}
            call, arguments = called.get(name, (getattr(dist, name), (x,)))
            call(*arguments, async_op=True).wait()
        else:
            CALLS[name](x)
        return np.array_equal(expected(name, rank, everyone), x.reshape(-1))

    with ThreadJob(len(layouts)) as job:
        assert job.run(rank_main) == [True] * len(layouts)


@pytest.mark.parametrize("name", CALLS)
def test_other_sizes_are_a_mismatch(name: str) -> None:
    """Ranks whose long arrays differ in size hear of it before anything moves, by the names of
    their calls, and not of what they ask each other."""

    def rank_main(rank: int) -> tuple[str, int]:
        x = np.full((WHOLE_BYTES + 1 + rank, 2), 1, "i1")[:, 0]
        with pytest.raises(dist.MismatchError) as caught:
            CALLS[name](x)
        return str(caught.value), int(x.max())

    with ThreadJob(2) as job:
        for message, most in job.run(rank_main):
            for size in (WHOLE_BYTES + 1, WHOLE_BYTES + 2):
                assert f"{name} #1 of {size} elements" in message
            for same in ("int8", "root", "SUM", "BAND", "to ask"):
                assert same not in message
            assert most == 1


OTHERS = {
    "dtype": lambda x: dist.all_reduce(x.view("u1")),
    "op": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "collective": dist.scan,
    "root": lambda x: dist.broadcast(x, 0),
}


DIFFERENCES = {
    "dtype": r"all_reduce #1 of u?int8. Rank \d: all_reduce #1 of u?int8",
    "op": r"all_reduce #1, op \w+. Rank \d: all_reduce #1, op \w+",
    "collective": r"(all_reduce|scan) #1 of .* (all_reduce|scan) #1 of ",
    "root": r"broadcast #1, root \d. Rank \d: broadcast #1, root \d",
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_are_a_mismatch_before_anything_moves(other: str) -> None:
    """What they ask each other is about the calls, and says in what these differ."""
    usual = CALLS["broadcast" if other == "root" else "all_reduce"]

    def rank_main(rank: int) -> bool:
        x = np.full((WHOLE_BYTES + 1, 2), 1, "i1")[:, 0]
        with pytest.raises(dist.MismatchError, match=DIFFERENCES[other]):
            (OTHERS[other] if rank else usual)(x)
        return bool((x == 1).all())

    with ThreadJob(2) as job:
        assert job.run(rank_main) == [True, True]

"""The other subjects of `python -m cydist.bench`: kernels, overlap, startup and memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cydist
import cydist.testing
from cydist.bench import inprocess, kernels, overlap, paths, rank_loop
from cydist.bench.__main__ import main
from cydist.bench.peers import Bound, TorchLike, same
from cydist.bench.rank_loop import Session


def figures(directory: Path, *arguments: str) -> tuple[int, Any]:
    """The exit code of a run in this process, and what it saved."""
    file = directory / "figures.json"
    code = main([*arguments, "--json", str(file)])
    return code, json.loads(file.read_text())


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is a call or two: what is tested is not how long it takes."""
    monkeypatch.setattr("cydist.bench.runner.ROUND_NS", 1)


# ---- kernels ----


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of kernel is right, and has numpy beside it."""
    code, found = figures(
        tmp_path, "kernels", "--sizes", "4Ki", "--rounds", "2", "--dtypes", "float32,float16,int8"
    )
    assert code == 0
    kinds = {"a += b", "packing", "unpacking", "flattening", "unflattening"}
    assert {row["kind"] for row in found["rows"]} == kinds
    for row in found["rows"]:
        assert (row["what"], row["wrong"]) == (row["what"], 0)
        assert [len(rounds) for rounds in row["rounds"].values()] == [2] * len(row["rounds"])
        assert "numpy" in row["ratios"]
    printed = capsys.readouterr().out
    assert [kind for kind in kinds if kind not in printed] == []


@pytest.mark.parametrize("missing", [{"ml_dtypes": None}, {}], ids=["without ml_dtypes", "with"])
def test_kernels_need_numpy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: dict[str, None]
) -> None:
    """Unless told otherwise, sums are those of the dtypes that can be had here."""
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    code, found = figures(tmp_path, "kernels", "--sizes", "64", "--rounds", "1")
    assert code == 0
    sums = {row["what"].split()[0] for row in found["rows"] if row["kind"] == "a += b"}
    assert {"float32", "float16", "int8"} <= sums
    assert ("bfloat16" in sums) == (not missing)


@pytest.mark.parametrize("kind", ["combine_all", "flatten_buffers", "unflatten_buffers"])
def test_wrong_kernels_are_counted(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A kernel that does nothing is found out."""

    class Idle:
        asarray = staticmethod(cydist.asarray)

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

    monkeypatch.setattr(kernels, "_native", Idle())
    found = {
        "combine_all": lambda: kernels.sums([np.dtype("float32")], [4096], None),
        "flatten_buffers": lambda: kernels.flattening(None),
        "unflatten_buffers": lambda: kernels.unflattening(None),
    }[kind]()
    assert all(each.wrong > each.nbytes // 8 for each in found)


def test_contests_are_interleaved() -> None:
    """After each has been tried, each round runs every rank once, somebody else first."""
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    row = inprocess.run_in_process(calls, 3)
    assert [measurements.iterations for measurements in row.values()] == [1, 1, 1]
    assert "".join(seen[3:]) == "abcbcacab"


# ---- paths ----


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    """Each op has a time by each path, and their difference."""
    monkeypatch.setattr("cydist.bench.paths.TURNS", 1)
    code, found = figures(tmp_path, "paths", "--sizes", "8", "--rounds", "1", "--ranks", ranks)
    assert code == 0
    assert [row["op"] for row in found["rows"]] == [*paths.OPS]
    printed = capsys.readouterr().out
    for row in found["rows"]:
        assert row["op"] in printed
        assert row["more"] == row["general"] - row["fast"]
        assert row["fast"] > 0


def test_the_paths_that_are_timed_are_two() -> None:
    """The general calls are those that the fast path refuses."""

    def body(rank: int) -> list[str]:
        called: list[str] = []
        library = TorchLike(cydist, same, {})
        session = Session(library)
        session.case("all_reduce", 2, "float32")
        queue: Any = cydist.group.WORLD.call_queue  # type: ignore[union-attr]
        bound = session._bound

        def noted(array: Any, **options: Any) -> None:
            cydist.all_reduce(array, group=cydist.group.WORLD, **options)
            # The fast path makes no record: each answer is a new one.
            fast = queue.last_call() is not queue.last_call()
            called.append("fast" if fast else "general")

        session._bound = (noted, bound[1])
        session.paths(iterations=1, turns=2)
        return called

    assert cydist.testing.run_threads(body, 1, "tcp") == [["fast", "general"] * 2]


# ---- overlap ----


@pytest.mark.parametrize(
    ("moving", "computing", "both", "expected"),
    [(2.0, 3.0, 3.0, 1.0), (2.0, 3.0, 5.0, 0.0), (2.0, 3.0, 4.0, 0.5), (2.0, 3.0, 2.5, 1.0),
     (2.0, 3.0, 9.0, 0.0)],
    ids=["all", "none", "half", "computing varies", "worse than in turn"],
)  # fmt: skip
def test_hidden_share(moving: float, computing: float, both: float, expected: float) -> None:
    """What the all_reduce adds to the computing is not hidden, the rest is."""
    assert overlap.hidden(moving, computing, both) == expected


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(120)
def test_overlap(tmp_path: Path) -> None:
    """The share that is hidden is printed for each size, with what it was made of."""
    code, found = figures(tmp_path, "overlap", "--sizes", "64Ki", "--rounds", "2")
    assert code == 0
    (row,) = found["rows"]
    assert (row["library"], row["bytes"]) == ("cydist", 65536)
    assert 0 <= row["hidden"] <= 1
    assert 0 <= row["hidden asleep"] <= 1
    assert min(row[part] for part in ("moving", "computing", "both", "asleep")) > 0


# ---- startup ----


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(120)
def test_startup(tmp_path: Path) -> None:
    """Imports, joining, a group, and a job as a whole are timed in every round."""
    code, found = figures(tmp_path, "startup", "--rounds", "1", "--processes", "2")
    assert code == 0
    assert {row["what"]: list(row["rounds"]) for row in found["rows"]} == {
        "importing": ["numpy and cydist", "numpy", "cydist", "nothing"],
        "init_process_group": ["cydist"],
        "new_group": ["cydist"],
        "processes": ["cydistrun", "numpy", "nothing"],
    }
    for row in found["rows"]:
        assert [len(rounds) for rounds in row["rounds"].values()] == [1] * len(row["rounds"])


# ---- memory ----

MOST = 32 << 20


class Greedy(TorchLike):
    """Takes and gives back MOST bytes in every call."""

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        def call(*given: Any) -> None:
            np.ones(MOST, np.uint8)

        return call, ()


@pytest.mark.parametrize(
    ("library", "least", "most"), [(TorchLike, 0, MOST // 4), (Greedy, MOST * 3 // 4, 2 * MOST)]
)
def test_memory_at_the_most(jobs: Any, library: type[TorchLike], least: int, most: int) -> None:
    """What a call gives back before it ends counts too; the arrays do not."""

    def body(rank: int) -> int:
        answer = Session(library(cydist, same, {})).memory("all_reduce", MOST // 4, "float32")
        return int(answer["extra"])

    (extra,) = jobs.get("inproc", 1).run(body)
    assert least <= extra <= most


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_memory(tmp_path: Path) -> None:
    """Each op has its extra memory, in bytes."""
    arguments = ("memory", "--ops", "all_reduce,all_to_all", "--sizes", "1Mi")
    code, found = figures(tmp_path, *arguments)
    assert code == 0
    assert [row["op"] for row in found["rows"]] == ["all_reduce", "all_to_all"]
    assert all(isinstance(row["extra"]["cydist"], int) for row in found["rows"])


def test_resident_is_in_bytes() -> None:
    """What a process takes is read in bytes, and at the most is not less than now."""
    array = np.ones(MOST, np.uint8)
    now = rank_loop.resident("VmRSS", reset_peak=True)
    assert now > array.nbytes
    assert rank_loop.resident("VmHWM") > array.nbytes

"""`python -m cydist.bench --tune`: what is decided from times, and that it ends in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist import crossings, tuning
from cydist.bench import deciding
from cydist.bench.__main__ import main
from cydist.bench.deciding import Size, better, decide, rules
from cydist.bench.tune import Tuned
from cydist.tuning import Rule

BYTES = [8 << 3 * power for power in range(8)]
NAMES = ("doubling", "halving_doubling", "ring")


def sizes(shipped: Sequence[str], **medians: Sequence[float]) -> list[Size]:
    """One size for each element; ratios that every round agrees on."""
    return [
        Size(nbytes, name, {each: [ratios[number]] * 5 for each, ratios in medians.items()})
        for number, (nbytes, name) in enumerate(zip(BYTES, shipped, strict=False))
    ]


# ---- decisions ----


def test_a_crossing_is_found() -> None:
    """The new algorithm is taken from where it begins to be faster."""
    found = sizes(["ring"] * 4, ring=[1] * 4, doubling=[0.5, 0.7, 2, 4])
    assert decide(found) == ["doubling", "doubling", "ring", "ring"]


def test_a_shipped_crossing_moves() -> None:
    """Between two algorithms that are both shipped the crossing goes where it was measured."""
    found = sizes(
        ["doubling", "ring", "ring", "ring"], doubling=[1, 0.7, 0.8, 2], ring=[2, 1, 1, 1]
    )
    assert decide(found) == ["doubling", "doubling", "doubling", "ring"]


def test_rounds_that_disagree_gain_nothing() -> None:
    """A median that a few lucky rounds have made is noise."""
    ratios = {"ring": [1.0] * 5, "doubling": [0.3, 0.4, 0.5, 1.1, 1.3]}
    assert decide([Size(8, "ring", ratios)]) == ["ring"]


def test_one_size_in_the_middle_must_gain_more() -> None:
    """Two changes cost twice the noise; what gains more than that is taken."""
    low, high = [1, 0.92, 1], [1, 0.8, 1]
    worse = [1.5, 1, 1.5]
    for ratios, expected in ((low, ["ring"] * 3), (high, ["ring", "tree", "ring"])):
        medians = [a * b for a, b in zip(ratios, worse, strict=True)]
        medians[1] = ratios[1]
        assert decide(sizes(["ring"] * 3, ring=[1] * 3, tree=medians)) == expected


def test_nothing_measured() -> None:
    """No sizes, no decisions."""
    assert decide([]) == []
    assert better({}, 4096) == 4096


ratio_rows = st.lists(
    st.tuples(st.sampled_from(NAMES), *[st.floats(0.2, 5.0)] * len(NAMES)), min_size=1, max_size=8
)


def measured(rows: Sequence[tuple[Any, ...]]) -> list[Size]:
    """Sizes from (shipped, time of each of NAMES)."""
    return [
        Size(nbytes, shipped, {
            name: [time / times[NAMES.index(shipped)]] * 5
            for name, time in zip(NAMES, times, strict=True)
        })
        for nbytes, (shipped, *times) in zip(BYTES, rows, strict=False)
    ]  # fmt: skip


@given(ratio_rows)
def test_never_worse_than_shipped(rows: list[tuple[Any, ...]]) -> None:
    """The product of the ratios of what is decided is at most 1, up to the noise of each size."""
    found = measured(rows)
    names = decide(found)
    assert sum(size.cost(name) for size, name in zip(found, names, strict=True)) <= 1e-9


@given(ratio_rows)
def test_every_change_pays(rows: list[tuple[Any, ...]]) -> None:
    """What is gained over what is shipped is more than the noise for each change that is new."""
    found = measured(rows)
    names = decide(found)
    shipped = [size.shipped for size in found]
    changes = 0
    for number, (size, name) in enumerate(zip(found, names, strict=True)):
        before = (
            (names[number - 1], shipped[number - 1]) if number else (size.shipped, size.shipped)
        )
        new = name != before[0] and not (name == size.shipped and before[0] == before[1])
        changes += new
    gained = -sum(size.cost(name) for size, name in zip(found, names, strict=True))
    assert gained >= changes * deciding.NOISE - 1e-9


@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8),
    st.lists(st.floats(-0.99, 0.99), min_size=24, max_size=24),
)
def test_noise_changes_nothing(shipped: list[str], wobble: list[float]) -> None:
    """Where all are equally fast within the noise, everything stays as shipped."""
    found = [
        Size(nbytes, name, {
            each: [1.0 if each == name
                   else math.exp(deciding.NOISE * wobble[3 * number + place])] * 5
            for place, each in enumerate(NAMES)
        })
        for number, (nbytes, name) in enumerate(zip(BYTES, shipped, strict=False))
    ]  # fmt: skip
    assert decide(found) == shipped


@given(
    st.integers(1, 7), st.lists(st.floats(0.98, 1.02), min_size=8, max_size=8),
    st.sampled_from(["doubling", "ring"]),
)  # fmt: skip
def test_one_clear_crossing_gives_two_rules(
    crossing: int, wobble: list[float], shipped: str
) -> None:
    """One algorithm is faster below, another above: whatever is shipped, one crossing is found,
    and choosing by the rules gives what was decided."""
    times = [
        {"doubling": 1.5**number * each, "ring": 1.5 ** (crossing - 0.5)}
        for number, each in enumerate(wobble)
    ]
    found = [
        Size(nbytes, shipped, {name: [time / each[shipped]] * 5 for name, time in each.items()})
        for nbytes, each in zip(BYTES, times, strict=True)
    ]
    names = decide(found)
    assert names == ["doubling"] * crossing + ["ring"] * (8 - crossing)
    rows = rules("all_reduce", found, names)
    assert [row.name for row in rows] == ["doubling", "ring"]
    for size, name in zip(found, names, strict=True):
        assert next(row.name for row in rows if row.fits(size.size_class, 2)) == name


def test_rules_end_halfway() -> None:
    """Between the sizes that were measured the crossing lies in the middle, as sizes double."""
    found = [Size(nbytes, "ring", {"ring": [1.0]}) for nbytes in (1024, 16384)]
    expected = (Rule("all_reduce", "doubling", 4096), Rule("all_reduce", "ring"))
    assert rules("all_reduce", found, ["doubling", "ring"]) == expected


@pytest.mark.parametrize(
    ("ratios", "expected"), [([0.7, 0.8], 65536), ([0.97, 0.96], 4096), ([1.5, 1.5], 4096)]
)
def test_segments(ratios: list[float], expected: int) -> None:
    """Another segment must gain more than the noise."""
    assert better({65536: ratios, 4096: [1.0, 1.0]}, 4096) == expected


# ---- the program ----


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every algorithm that can run is timed; what is found is printed, saved, and can be used."""
    monkeypatch.setattr("cydist.bench.rounds.ROUND_NS", 1)
    output, figures = tmp_path / "crossings.json", tmp_path / "figures.json"
    code = main([
        "--tune", "--ops", "all_reduce,barrier", "--sizes", "8,1Mi", "--rounds", "2",
        "--transport", "tcp", "--output", str(output), "--json", str(figures),
    ])  # fmt: skip
    assert code == 0
    (entry,) = crossings.parse(crossings.read(output))
    assert (entry.ranks, entry.windows) == (2, False)
    assert "--tune" in entry.about["command"]
    printed = capsys.readouterr().out
    (group,) = json.loads(figures.read_text())["groups"]
    assert [cell["bytes"] for cell in group["cells"]] == [8, 1 << 20]
    for cell in group["cells"]:
        names = tuning.candidates("all_reduce", 2, False)
        assert list(cell["ratios"]) == names
        assert cell["chosen"] in names
        assert [name for name in names if name not in printed] == []
    try:
        crossings.use([entry])
        found = [tuning.choose("all_reduce", cell["bytes"], 2, False, even=True, commutative=True)
                 for cell in group["cells"]]  # fmt: skip
    finally:
        crossings.use([])
    assert found == [cell["chosen"] for cell in group["cells"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2,1"], "--ranks 1"),
        (["--ops", "sort"], "no 'sort'"),
        (["--sizes", "0"], "is not a size"),
        ([], "CYDIST_TUNING=off"),
        (["--output", "/dev/null/x.json"], "/dev/null/x.json cannot be written"),
        (["--output", "/"], "/ cannot be written: it is a folder"),
    ],
    ids=["ranks", "ops", "sizes", "nowhere to save", "no folder", "a folder"],
)
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option ends the program before anything is started."""
    with pytest.raises(SystemExit):
        main([*arguments, "--tune"])
    assert said in capsys.readouterr().err


def test_forced_is_not_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a setting forces an algorithm there is nothing to find out."""
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:ring")
    with pytest.raises(SystemExit):
        main(["--tune"])
    assert "CYDIST_ALGORITHM is set" in capsys.readouterr().err


def test_help_says_how_many_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the number of rounds that this program has by default, not the others'."""
    with pytest.raises(SystemExit):
        main(["--tune", "--help"])
    assert "how often all is measured (5)" in capsys.readouterr().out


def test_figures_are_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the crossings cannot be written at the end, the figures are there all the same."""
    monkeypatch.setattr("cydist.bench.tune.started", lambda *_: nullcontext((None,)))
    monkeypatch.setattr("cydist.bench.tune.tune", lambda *_: Tuned(2, False, {}, {}, {}))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crossings, "save", full)
    figures = tmp_path / "figures.json"
    with pytest.raises(SystemExit):
        main(["--tune", "--json", str(figures), "--output", str(tmp_path / "crossings.json")])
    assert "No space left" in capsys.readouterr().err
    assert [group["ranks"] for group in json.loads(figures.read_text())["groups"]] == [2]

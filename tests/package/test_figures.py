"""Figures of the documentation come from their scripts, and from the measurements in the pages."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "docs/figures"
MEASUREMENTS = sorted((FIGURES / "measurements").glob("*.json"))
PAGE = (FIGURES.parent / "guide/performance.md").read_text()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions that draw, by the name of the figure."""
    monkeypatch.syspath_prepend(FIGURES)
    made = ("drawing", "diagrams", "plots")
    found: dict[str, Any] = runpy.run_path(str(FIGURES / "make.py"))["FIGURES"]
    for each in made:
        monkeypatch.delitem(sys.modules, each)
    return found


def test_the_figures_are_current(drawn: dict[str, Any]) -> None:
    """Every drawing is what `python docs/figures/make.py` writes, and there is no other."""
    assert {each.stem for each in FIGURES.glob("*.svg")} == set(drawn)
    old = [
        name
        for name, draw in drawn.items()
        if draw().written() != (FIGURES / f"{name}.svg").read_text()
    ]
    assert old == [], "run python docs/figures/make.py"


def test_every_figure_is_shown(drawn: dict[str, Any]) -> None:
    """And has a description, for readers who do not see it."""
    pages = [*FIGURES.parent.rglob("*.md"), FIGURES.parents[1] / "README.md"]
    shown = re.findall(
        r"!\[[^\]]{10,}\]\([./\w]*figures/(\w+)\.svg\)", "".join(p.read_text() for p in pages)
    )
    assert set(shown) == set(drawn)


@pytest.mark.parametrize("file", sorted(FIGURES.glob("*.svg")), ids=lambda file: file.stem)
def test_a_phone_shows_the_figures(file: Path) -> None:
    """Text has at least a 33rd of the width, no line begins left of the picture, and there are
    colours for dark pages."""
    text = file.read_text()
    box = re.search(r'viewBox="0 0 (\d+) \d+"', text)
    assert box is not None
    assert int(box[1]) <= 400
    assert min(map(int, re.findall(r'font-size="(\d+)"', text))) >= 12
    assert min(map(float, re.findall(r'<text [^>]* x="([-\d.]+)"', text))) >= 0
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("file", MEASUREMENTS, ids=lambda file: file.stem)
def test_measurements_say_where_they_come_from(file: Path) -> None:
    """Each file has the command, the commit and the machine."""
    data = json.loads(file.read_text())
    data = data.get("header", data)  # the benchmark has these there
    assert all(data[key] for key in ("command", "machine"))
    assert re.fullmatch("[0-9a-f]{7,40}", data["commit"])


@pytest.mark.parametrize("name", ["two_ranks", "four_ranks"])
def test_tables_have_the_measurements(name: str) -> None:
    """performance.md's tables have the medians of cydist in the plots, and in brackets their ratios
    to the fastest other library's."""
    data = json.loads((FIGURES / f"measurements/{name}.json").read_text())
    rows: dict[str, list[tuple[float, float]]] = {}
    for cell in data["cells"]:
        medians = {name: each["median"] * 1e6 for name, each in cell["participants"].items()}
        ours = medians.pop("cydist")
        if cell["bytes"]:
            rows.setdefault(cell["op"], []).append((ours, ours / min(medians.values())))
    assert len(rows) == 6
    for op, row in rows.items():
        lines = re.findall(rf"^\| {op} \|(.*)$", PAGE, re.M)
        tables = [re.findall(r"([\d.]+) (µs|ms) \(([\d.]+)\)", line) for line in lines]
        assert any(shows(table, row) for table in tables), op


def shows(found: list[tuple[str, str, str]], row: list[tuple[float, float]]) -> bool:
    """Return whether a table's row has these microseconds and ratios, as rounded there."""
    units = {"µs": 1.0, "ms": 1000.0}
    return len(found) == len(row) and all(
        float(value) == pytest.approx(time / units[unit], rel=0.005, abs=0.0051)
        and float(ratio) == pytest.approx(exact, abs=0.0051)
        for (value, unit, ratio), (time, exact) in zip(found, row, strict=True)
    )


def test_plots_take_what_the_benchmark_saves(drawn: dict[str, Any]) -> None:
    """Each library has its bar and its line, with the median of each cell."""
    medians = {"cydist": 0.3, "gloo": 90.0, "openmpi": 1.25, "mpich": 1.5}
    cells = [
        {
            "op": op,
            "bytes": nbytes,
            "participants": {
                name: {"median": value * nbytes / 8e6} for name, value in medians.items()
            },
        }
        for op in ("all_reduce", "barrier")
        for nbytes in ((8, 1024) if op == "all_reduce" else (0,))
    ]
    data = {"header": {"machine": "a machine", "commit": "0123456"}, "cells": cells}
    plots = runpy.run_path(str(FIGURES / "plots.py"))
    bars = plots["latency"](data, "two ranks").written()
    lines = plots["times"](data, "two ranks").written()
    assert [each for each in ("0.30 µs", "1.25 µs", "1.50 µs") if f">{each}<" not in bars] == []
    assert ">90.00 µs, bar cut<" in bars
    assert ">0.24 of the fastest<" in bars
    assert lines.count("<polyline") == 4
    assert "barrier" not in bars

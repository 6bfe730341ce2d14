"""Print and save a comparison."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cydist.bench.cases import Case, algbw, busbw
from cydist.bench.runner import Measurements, Row, ratio
from cydist.bench.workers import Worker

OURS = "cydist"
# These are not peers: cydist over another transport is not a competitor, and raw sockets are not a
# library.
OURSELVES = (OURS, "tcp", "plain", "windows", "raw")
Rows = Sequence[tuple[Case, Row]]


def header(about: Mapping[str, str]) -> str:
    """Return one line for each fact."""
    width = max(len(name) for name in about)
    return "\n".join(f"# {name:<{width}}  {said}" for name, said in about.items())


def workers(running: Sequence[Worker], ranks: int) -> dict[str, str]:
    """Return the facts about the workers."""
    threads = running[0].about.get("transport", "").startswith("inproc,")
    about = {"ranks": f"{ranks} {'threads of one process' if threads else 'processes'}"}
    about["ranks"] += " on this machine"
    return about | {each.name: ", ".join(each.about.values()) for each in running}


@dataclass(frozen=True)
class ResultTable:
    """Rows that are printed one after the other, so all widths are fixed before the first.

    Attributes:
        peers: The columns after cydist's own.
    """

    peers: Sequence[str]
    ranks: int

    def head(self) -> str:
        """Return the names of the columns, and their units."""
        peers = "".join(f" {name[:12] + ' us':>15} {'ratio':>6}" for name in self.peers)
        return (
            f"{'bytes':>10} {'count':>10} {'dtype':>8} {'op':<14} {'algorithm':<16}"
            f" {'median us':>11} {'p99 us':>11} {'algbw GB/s':>10} {'busbw GB/s':>10} {'#wrong':>6}"
            + peers
        )

    def line(self, case: Case, row: Row) -> str:
        """Return the line of one cell."""
        ours = row.get(OURS, Measurements(failure="lost"))
        text = f"{case.nbytes:>10} {case.count:>10} {case.dtype:>8} {case.op:<14} "
        if ours.failure:
            text += f"{'failed':<16} {'-':>11} {'-':>11} {'-':>10} {'-':>10} {'-':>6}"
        else:
            p99 = "-" if ours.p99 is None else micro(ours.p99)
            bandwidths = (algbw(case, ours.median), busbw(case, ours.median, self.ranks))
            text += f"{ours.algorithm:<16} {micro(ours.median):>11} {p99:>11}"
            text += "".join(f" {giga(each) if case.nbytes else '-':>10}" for each in bandwidths)
            text += f" {ours.wrong:>6}"
        for name in self.peers:
            theirs = row.get(name)
            if theirs is None or theirs.failure or ours.failure:
                text += f" {'-':>15} {'-':>6}"
            else:
                wrong = "!" if theirs.wrong else ""
                text += f" {micro(theirs.median) + wrong:>15} {ratio(ours, theirs):>6.2f}"
        return text


def micro(seconds: float) -> str:
    """Return microseconds, with four digits or as an integer."""
    us = seconds * 1e6
    return f"{us:.{max(0, 3 - max(0, math.floor(math.log10(us))))}f}" if us > 0 else "0"


def giga(rate: float) -> str:
    """Return units of 10^9 per second."""
    return f"{rate / 1e9:.3f}"


def failures(case: Case, row: Row) -> list[str]:
    """Return the failures of a row, for the user."""
    where = f"{case.op} of {case.nbytes} bytes"
    said = [
        f"{where}: {measurements.failure}" for measurements in row.values() if measurements.failure
    ]
    return said + [
        f"{where}: {name}: {measurements.wrong} wrong"
        for name, measurements in row.items()
        if measurements.wrong
    ]


def ratios(row: Row) -> dict[str, float]:
    """Return the ratio of cydist's time to each finished peer's."""
    ours = row.get(OURS)
    if ours is None or ours.failure:
        return {}
    return {
        name: ratio(ours, measurements)
        for name, measurements in row.items()
        if name != OURS and not measurements.failure
    }


def summary(rows: Rows) -> list[dict[str, Any]]:
    """Return, for each op and for all, geometric means of the ratios, and the worst cell.

    The best peer of a cell is the fastest, so the ratio to it is the largest.
    """
    found = []
    for op in [*dict.fromkeys(case.op for case, _ in rows), "all"]:
        mine = [(case, ratios(row)) for case, row in rows if op in (case.op, "all")]
        names = list(dict.fromkeys(name for _, each in mine for name in each))
        best = [
            (max(each[name] for name in each if name not in OURSELVES), case)
            for case, each in mine
            if each.keys() - set(OURSELVES)
        ]
        entry: dict[str, Any] = {"op": op}
        for name in names:
            entry[name] = geometric_mean([each[name] for _, each in mine if name in each])
        if best:
            worst, where = max(best, key=lambda pair: pair[0])
            entry["best peer"] = geometric_mean([value for value, _ in best])
            entry["worst"] = worst
            entry["worst cell"] = f"{where.op} {where.nbytes}"
        if names:
            found.append(entry)
    return found


def summary_lines(rows: Rows) -> list[str]:
    """Return the summary as a table; empty without peers."""
    entries = summary(rows)
    if not entries:
        return []
    names = [name for name in entries[-1] if name not in ("op", "worst", "worst cell")]
    lines = ["", "geometric means of cydist's time by the peer's (below 1: cydist is faster)"]
    lines.append(f"{'op':<14}" + "".join(f" {name:>12}" for name in names) + "  worst cell")
    for entry in entries:
        cases = [f"{entry[name]:.3f}" if name in entry else "-" for name in names]
        worst = f"  {entry['worst']:.2f} at {entry['worst cell']}" if "worst" in entry else ""
        lines.append(f"{entry['op']:<14}" + "".join(f" {each:>12}" for each in cases) + worst)
    return lines


def spread_lines(rows: Rows) -> list[str]:
    """Return the least, the median and the most of all rounds: of each participant's time, of its
    bytes per second, and of the ratio of cydist's time to its own."""
    lines = ["", "least, median and most of the rounds"]
    lines.append(f"{'op':<14} {'bytes':>10} {'':<12} {'us':^31} {'algbw GB/s':^23} {'ratio':^20}")
    for case, row in rows:
        ours = row.get(OURS)
        for name, theirs in row.items():
            if theirs.failure or not theirs.rounds:
                continue
            text = f"{case.op:<14} {case.nbytes:>10} {name[:12]:<12}"
            text += "".join(f" {micro(each):>10}" for each in least_to_most(theirs.rounds))
            rates = [algbw(case, each) for each in theirs.rounds if case.nbytes]
            text += "".join(f" {giga(each):>7}" for each in least_to_most(rates))
            if ours is not None and name != OURS and not ours.failure:
                found = [a / b for a, b in zip(ours.rounds, theirs.rounds, strict=True)]
                text += "".join(f" {each:>6.2f}" for each in least_to_most(found))
            lines.append(text)
    return lines


def least_to_most(values: Sequence[float]) -> tuple[float, ...]:
    """Return the least, the median and the most of some values; nothing if there are none."""
    return (min(values), statistics.median(values), max(values)) if values else ()


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def document(about: Mapping[str, Any], rows: Rows, ranks: int) -> dict[str, Any]:
    """Return all figures for JSON: seconds, bytes, bytes per second."""
    return {"header": dict(about), "cells": [_entry(*each, ranks) for each in rows],
            "summary": summary(rows)}  # fmt: skip


def _entry(case: Case, row: Row, ranks: int) -> dict[str, Any]:
    found = {}
    for name, measurements in row.items():
        entry: dict[str, Any] = {"wrong": measurements.wrong}
        if measurements.failure:
            entry["failure"] = measurements.failure
        if measurements.rounds:
            entry |= {
                "median": measurements.median,
                "p99": measurements.p99,
                "rounds": measurements.rounds,
                "iterations": measurements.iterations,
                "algorithm": measurements.algorithm,
                "algbw": algbw(case, measurements.median),
                "busbw": busbw(case, measurements.median, ranks),
            }
        found[name] = entry
    return {
        "op": case.op, "bytes": case.nbytes, "count": case.count, "dtype": case.dtype,
        "participants": found, "ratios": ratios(row),
    }  # fmt: skip


def save(figures: Mapping[str, Any], path: str | None) -> None:
    """Write JSON, if requested."""
    if path is not None:
        with open(path, "w") as file:
            json.dump(figures, file, indent=1)


class ProgressLine:
    """One line on stderr that is rewritten, if stderr is a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._seen = total, dict[Case, int]()
        self._on = sys.stderr.isatty()

    def __call__(self, case: Case, what: str) -> None:
        number = self._seen.setdefault(case, len(self._seen) + 1)
        if self._on:
            text = f"{number}/{self._total} {case.op} {case.nbytes} bytes, {what}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line before other output."""
        if self._on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

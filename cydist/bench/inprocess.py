"""Time functions of this process in turn, like workers, and print lines of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cydist.bench.rank_loop import loop
from cydist.bench.report import OURS, giga, micro
from cydist.bench.runner import Measurements, Row, calibrate, ratio

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class InProcessRun:
    """Functions with the same result.

    Attributes:
        what: Its description.
        nbytes: Nominal bytes that a call moves.
        calls: By library, "cydist" first.
        wrong: Number of cydist's wrong elements.
    """

    what: str
    nbytes: int
    calls: Calls
    wrong: int


def run_in_process(calls: Calls, rounds: int, iterations: int | None = None) -> Row:
    """Time each, round by round, with another one first in each round.

    Args:
        iterations: Calls in a round; None: as many as take long enough.
    """
    row: Row = {}
    for name, call in calls.items():
        row[name] = Measurements(iterations=iterations or calibrate(partial(loop, (call, ()))))
    names = list(calls)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            measurements = row[name]
            ns = loop((calls[name], ()), measurements.iterations)
            measurements.rounds.append(ns / measurements.iterations / 1e9)
    return row


def head(kind: str, names: list[str]) -> str:
    """Return the names of the columns."""
    others = "".join(f" {name + ' us':>14} {'ratio':>6}" for name in names if name != OURS)
    return f"\n{kind:<34} {'bytes':>10} {'cydist us':>10} {'GB/s':>8} {'#wrong':>6}" + others


def line(each: InProcessRun, row: Row, names: list[str]) -> str:
    """Return one comparison, with columns for `names`."""
    ours = row[OURS]
    text = f"{each.what:<34} {each.nbytes:>10} {micro(ours.median):>10}"
    text += f" {giga(each.nbytes / ours.median):>8} {each.wrong:>6}"
    for name in names:
        if name == OURS:
            continue
        if name in row:
            text += f" {micro(row[name].median):>14} {ratio(ours, row[name]):>6.2f}"
        else:
            text += f" {'-':>14} {'-':>6}"
    return text


def entry(kind: str, each: InProcessRun, row: Row) -> dict[str, Any]:
    """Return one comparison for JSON: seconds per call, by round."""
    return {
        "kind": kind, "what": each.what, "bytes": each.nbytes, "wrong": each.wrong,
        "rounds": {name: measurements.rounds for name, measurements in row.items()},
        "ratios": {name: ratio(row[OURS], row[name]) for name in row if name != OURS},
    }  # fmt: skip

"""Subject "tune": measure where algorithms cross on this machine, and save it for later jobs."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cydist import config, crossings, tuning
from cydist.bench import deciding, machine, report
from cydist.bench.cells import Cell, cells
from cydist.bench.deciding import Size
from cydist.bench.options import checked, cydist, local_parser, size
from cydist.bench.participants import Participant, ParticipantError, started
from cydist.bench.rounds import Row, compare

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
SIZES = "8,128,1Ki,4Ki,16Ki,64Ki,256Ki,1Mi,4Mi,16Mi,64Mi"
DTYPE, ITEMSIZE = "float32", 4
# Who takes longer than the fastest by this factor in a first round is not in the others.
HOPELESS = 2.0
SEGMENTS = tuple(1 << power for power in range(16, 21))  # 64 KiB to 1 MiB
SEGMENTED = 1 << 20  # calls of so many bytes are cut into several segments of any size
SEGMENT_ROUNDS = 3

ABOUT = """
Every algorithm that can run here is timed at every size, rounds interleaved, and beside what is
shipped. Another one is taken where it gains more than the noise (5 %), so that a few crossings
are left and no patchwork; then the segment is tuned that long messages are cut into.

What is found is saved for this user and this host, and counts from then on in every job whose
rank 0 runs here: init_process_group gives it to all ranks. It counts for groups of exactly as
many ranks as were measured. CYDIST_TUNING=off leaves it out, CYDIST_TUNING=FILE takes another
file, and CYDIST_ALGORITHM=all_reduce:ring forces one algorithm. What is shipped for the
collectives of --ops comes from the same program. With --transport tcp what is measured is this
machine's loopback.
"""


def main(arguments: Sequence[str]) -> int:
    """Print what was found, and save it. 1 when an algorithm failed or was wrong."""
    parser = local_parser("--tune", "Find the fastest algorithms for this machine.", ABOUT)
    parser.set_defaults(rounds=5)
    add = parser.add_argument
    add("--ranks", default="2", metavar="N,...", help="sizes of groups to tune for (2)")
    add("--transport", default="auto", choices=("auto", "shm", "tcp"), help="as CYDIST_TRANSPORT")
    add("--ops", default=",".join(OPS), help=f"which of {','.join(OPS)} (all)")
    add("--sizes", default=SIZES, help=f"bytes of a call ({SIZES})")
    add("--timeout", type=float, default=120, help="seconds for a start or a round (120)")
    add("--output", metavar="FILE", help="save there, not where jobs look for it")
    given = checked(parser, arguments)
    try:
        plan = _plan(given)
    except ValueError as error:
        parser.error(str(error))
    about = machine.describe(["--tune", *arguments])
    print(report.header(about), flush=True)
    facts = {name: said for name, said in about.items() if name not in ("load", "python")}
    found: list[Tuned] = []
    for ranks in plan.ranks:
        spec = cydist("tcp", "numpy", TRANSPORT=given.transport, TUNING="off")
        with started([spec], ranks, given.timeout) as (participant,):
            found.append(tune(participant, ranks, plan))
    report.save({"header": about, "groups": [each.entry() for each in found]}, given.json)
    old = _saved(plan.path)
    for each in found:
        old = crossings.merged(old, each.measured(facts))
    try:
        crossings.save(old, plan.path)
    except OSError as error:
        parser.error(f"{plan.path} cannot be written: {error}")
    print(f"\nsaved to {plan.path}")
    return 0


@dataclass(frozen=True)
class Plan:
    """What to measure, and where to save it."""

    ranks: list[int]
    ops: list[str]
    sizes: list[int]
    rounds: int
    path: Path


def _plan(given: argparse.Namespace) -> Plan:
    """The options, checked. Raises ValueError."""
    for setting in (config.ALGORITHM, config.DETERMINISTIC, config.SEGMENT_BYTES):
        if setting.get() != setting.default:
            raise ValueError(f"{setting.names[0]} is set: what it forces cannot be tuned")
    counts = given.ranks.split(",")
    if wrong := [text for text in counts if not text.strip().isdecimal() or int(text) < 2]:
        raise ValueError(f"--ranks {wrong[0]}: write numbers of ranks, from 2")
    ops = given.ops.split(",")
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"--ops: no {unknown[0]!r}; there are {', '.join(OPS)}")
    sizes = sorted({size(text) for text in given.sizes.split(",")})
    path = Path(given.output) if given.output else crossings.place()
    if path is None:
        raise ValueError(
            "jobs look nowhere for this (CYDIST_TUNING=off, or a user without a home): "
            "say --output FILE"
        )
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    return Plan([*dict.fromkeys(map(int, counts))], ops, sizes, given.rounds, path)


def _saved(path: Path) -> list[crossings.Measured]:
    """What the file to write has already; nothing where it cannot be used."""
    try:
        return crossings.parse(crossings.read(path))
    except (OSError, ValueError):
        return []


class Candidate:
    """The ranks of one participant with settings of their own: a participant of `compare`.

    Ranks that are shared have the same memory, whichever algorithm they run.
    """

    def __init__(self, name: str, participant: Participant, **settings: str) -> None:
        self.name = name
        self._participant, self._settings = participant, settings

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank answers, after it was told the settings."""
        self._participant.ask({"do": "configure", "settings": self._settings})
        return self._participant.ask(command)

    def close(self) -> None:
        """The participant is ended by who started it."""


@dataclass(frozen=True)
class Tuned:
    """What was found for groups of `ranks`.

    sizes       by collective, what was measured
    chosen      by collective, the algorithm for each of these sizes
    segments    by bytes, the ratios of times to those with the default
    """

    ranks: int
    windows: bool
    sizes: Mapping[str, list[Size]]
    chosen: Mapping[str, list[str]]
    segments: Mapping[int, list[float]]

    @property
    def segment_bytes(self) -> int:
        """The best segment."""
        return deciding.better(self.segments, tuning.DEFAULT_SEGMENT_BYTES)

    def measured(self, about: Mapping[str, str]) -> crossings.Measured:
        """For the file. A collective that stays as shipped has no rules."""
        rules: dict[str, tuple[tuning.Rule, ...]] = {}
        for op, sizes in self.sizes.items():
            same = self.chosen[op] == [each.shipped for each in sizes]
            rules[op] = () if same else deciding.rules(op, sizes, self.chosen[op])
        segment = self.segment_bytes if self.segments else None
        return crossings.Measured(self.ranks, self.windows, rules, segment, about)

    def entry(self) -> dict[str, Any]:
        """For --json: ratios are times by those of `shipped`."""
        return {
            "ranks": self.ranks, "windows": self.windows, "segment_bytes": self.segment_bytes,
            "segments": {str(each): ratios for each, ratios in self.segments.items()},
            "cells": [
                {"op": op, "bytes": each.nbytes, "shipped": each.shipped, "chosen": name,
                 "ratios": {who: list(ratios) for who, ratios in each.ratios.items()}}
                for op, sizes in self.sizes.items()
                for each, name in zip(sizes, self.chosen[op], strict=True)
            ],
        }  # fmt: skip


def tune(participant: Participant, ranks: int, plan: Plan) -> Tuned:
    """Measure everything for the groups of one size. Raises ParticipantError."""
    windows = participant.ask({"do": "configure", "settings": {}})[0]["windows"]
    print(f"\n{ranks} ranks, {participant.about['transport']}", flush=True)
    wanted = [
        cell
        for cell in cells(plan.ops, plan.sizes, DTYPE, ITEMSIZE, ranks)
        if len(tuning.candidates(cell.op, ranks, windows)) > 1
    ]
    progress = report.Progress(len(wanted))
    sizes: dict[str, list[Size]] = {}
    chosen: dict[str, list[str]] = {}
    for op in dict.fromkeys(cell.op for cell in wanted):
        sizes[op] = []
        for cell in wanted:
            if cell.op == op:
                sizes[op].append(_measure(cell, participant, ranks, windows, plan.rounds, progress))
        progress.clear()
        chosen[op] = deciding.decide(sizes[op])
        print("\n".join(lines(op, sizes[op], chosen[op])), flush=True)
    found = Tuned(ranks, windows, sizes, chosen, {})
    found = Tuned(ranks, windows, sizes, chosen, _segments(found, participant, progress))
    progress.clear()
    print("\n".join(segment_lines(found)), flush=True)
    return found


def _measure(
    cell: Cell, participant: Participant, ranks: int, windows: bool, rounds: int,
    progress: report.Progress,
) -> Size:  # fmt: skip
    """Every candidate in one round, those with hope in the others."""
    shipped = tuning.choose(cell.op, cell.nbytes, ranks, windows, even=True, commutative=True)
    names = tuning.candidates(cell.op, ranks, windows)
    running = [Candidate(name, participant, ALGORITHM=f"{cell.op}:{name}") for name in names]
    first = _row(cell, running, 1, progress)
    fastest = min(series.median for series in first.values())
    hopeful = [
        each
        for each in running
        if each.name == shipped or first[each.name].median < HOPELESS * fastest
    ]
    row = first if len(hopeful) == 1 else first | _row(cell, hopeful, rounds, progress)
    return Size(cell.nbytes, shipped, {
        name: _ratios(row if name in {each.name for each in hopeful} else first, name, shipped)
        for name in names
    })  # fmt: skip


def _row(cell: Cell, running: Sequence[Candidate], rounds: int, progress: report.Progress) -> Row:
    """One row of `compare`. Raises ParticipantError for a candidate that failed or was wrong."""
    ((_, row),) = compare([cell], running, rounds, progress)
    for said in report.failures(cell, row):
        raise ParticipantError(said, lost=True)
    return row


def _ratios(row: Row, name: str, shipped: str) -> list[float]:
    return [a / b for a, b in zip(row[name].rounds, row[shipped].rounds, strict=False)]


def _segments(
    found: Tuned, participant: Participant, progress: report.Progress
) -> dict[int, list[float]]:
    """By segment, the ratios of the long calls, each with the algorithm that was chosen for it."""
    default = tuning.DEFAULT_SEGMENT_BYTES
    medians: dict[int, list[float]] = {each: [] for each in SEGMENTS}
    for op, sizes in found.sizes.items():
        for each, name in zip(sizes, found.chosen[op], strict=True):
            if each.nbytes < SEGMENTED:
                continue
            cell = Cell(op, each.nbytes // ITEMSIZE, DTYPE, each.nbytes)
            running = [
                Candidate(f"{segment >> 10} KiB", participant, ALGORITHM=f"{op}:{name}",
                          SEGMENT_BYTES=str(segment))
                for segment in SEGMENTS
            ]  # fmt: skip
            row = _row(cell, running, SEGMENT_ROUNDS, progress)
            for segment in SEGMENTS:
                ratios = _ratios(row, f"{segment >> 10} KiB", f"{default >> 10} KiB")
                medians[segment].append(statistics.median(ratios))
    return {each: ratios for each, ratios in medians.items() if ratios}


def lines(op: str, sizes: Sequence[Size], chosen: Sequence[str]) -> list[str]:
    """The ratios of one collective, and the algorithms that were chosen."""
    names = list(dict.fromkeys(name for each in sizes for name in each.ratios))
    said = [f"\n{op}: time by that of the shipped choice"]
    said.append(f"{'bytes':>10} {'shipped':<18}" + "".join(f"{name:>18}" for name in names)
                + "  chosen")  # fmt: skip
    for each, name in zip(sizes, chosen, strict=True):
        ratios = "".join(f"{statistics.median(each.ratios[who]):>18.2f}" for who in names)
        mark = "" if name == each.shipped else name
        said.append(f"{each.nbytes:>10} {each.shipped:<18}{ratios}  {mark}".rstrip())
    changed = [
        statistics.median(each.ratios[name])
        for each, name in zip(sizes, chosen, strict=True)
        if name != each.shipped
    ]
    if not changed:
        return [*said, "as shipped"]
    rows = deciding.rules(op, sizes, chosen)
    parts = [
        row.name + ("" if row.most_bytes is None else f" up to {row.most_bytes} bytes")
        for row in rows
    ]
    gain = report.geometric_mean(changed)
    return [
        *said,
        f"{', then '.join(parts)}: {gain:.2f} of the shipped choices' time where changed",
    ]


def segment_lines(found: Tuned) -> list[str]:
    """The mean ratio of every segment, and which was chosen."""
    if not found.segments:
        return []
    default = tuning.DEFAULT_SEGMENT_BYTES
    said = [f"\nsegments: time by that with {default >> 10} KiB"]
    for each, ratios in found.segments.items():
        mark = "  chosen" if each == found.segment_bytes else ""
        said.append(f"{each >> 10:>6} KiB {report.geometric_mean(ratios):>6.2f}{mark}")
    return said

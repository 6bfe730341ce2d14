"""Subject "tune": measure the crossovers of algorithms on this machine, and save them.

With --job the ranks are those of a job that a launcher has started, on one host or several. Rank 0
drives them, as it does in the subject "job", and tells them what is in force.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cydist import config
from cydist.bench import fit, report, sysinfo
from cydist.bench.fit import Size
from cydist.bench.job import driven
from cydist.bench.measure import Measure, OutOfTime
from cydist.bench.options import checked, cydist, local_parser, size
from cydist.bench.peers import Cydist
from cydist.bench.runner import Participant
from cydist.bench.workers import started_workers
from cydist.errors import counted
from cydist.tuning import file as tuning_file
from cydist.tuning import table as tuning_table

COLLECTIVES = tuning_table.COLLECTIVES[1:]
SEGMENT = "segment"
OPS = (*COLLECTIVES, SEGMENT)
SIZES = "8,128,1Ki,4Ki,16Ki,64Ki,256Ki,1Mi,4Mi,16Mi"
MINUTES = 20.0
MANY_RANKS = 16
FEWEST_ROUNDS = 3  # with fewer rounds, a majority of them is not significant

ABOUT = """
Every algorithm that can run here is timed at every size, rounds interleaved, and beside what is
in force. Another one is taken where it gains more than the noise (5 %), in a second pass of new
processes too, so that a few crossovers are left and no patchwork. Differences within the noise
are reported as equal, and the current choice is kept. Then the segment is tuned that long messages
are cut into.

What is found is saved for this user and this host, each collective as soon as it is done, and
counts from then on in every job whose rank 0 runs here: init_process_group gives it to all ranks.
It counts for groups of exactly as many ranks as were measured. CYDIST_TUNING=off leaves it out,
CYDIST_TUNING=FILE takes another file, and CYDIST_ALGORITHM=all_reduce:ring forces one algorithm.
Run it again, with --ops for some, to go on or to look again; what was saved is in force then.
With --transport tcp what is measured is this machine's loopback.

With --job, run it as every rank of a job of torchrun, cydistrun, mpirun, srun or another launcher:
  torchrun --nnodes 2 --nproc-per-node 4 ... -m cydist.bench --tune --job
Its results, the segment among them, count for groups whose ranks are spread over hosts in the same
way, such as four on each of two hosts ("2x4"), and with the ranks of each host consecutive or not.
It is saved on rank 0's host. Both passes run in the job's processes.
"""
ONE_HOST = {"ranks": None, "transport": "auto", "timeout": 120.0}  # options that --job has not


def main(arguments: Sequence[str]) -> int:
    """Print the results, and save them. Return 1 if an algorithm failed or was wrong."""
    parser = local_parser("--tune", "Find the fastest algorithms for this machine.", ABOUT)
    parser.set_defaults(rounds=4)
    add = parser.add_argument
    add("--job", action="store_true", help="measure the ranks of the job that runs this")
    add("--ranks", metavar="N,...",
        help=f"sizes of groups ({usual_ranks()}: two, and more than there are cores)")  # fmt: skip
    add("--transport", default="auto", choices=("auto", "shm", "tcp"), help="as CYDIST_TRANSPORT")
    add("--ops", metavar="OP,...",
        help=f"of {', '.join(OPS)} (all)")  # fmt: skip
    add("--sizes", default=SIZES, help=f"bytes of a call ({SIZES})")
    add("--minutes", type=float, default=MINUTES,
        help=f"begin nothing more after so long; what is left is said ({MINUTES:g})")  # fmt: skip
    add(
        "--timeout",
        type=float,
        default=ONE_HOST["timeout"],
        help="seconds for a start or a round (120)",
    )
    add("--output", metavar="FILE", help="save there, not where jobs look for it")
    given = checked(parser, arguments)
    if given.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds {given.rounds}: at least {FEWEST_ROUNDS}, or chance decides")
    if given.job:
        for name, default in ONE_HOST.items():
            if getattr(given, name) != default:
                parser.error(f"--{name} is for one host; with --job the launcher decides")
        with driven({report.OURS: Cydist("tcp", "numpy")}) as (running, places):
            return _tune_job(parser, given, arguments, running[0], places) if running else 0
    plan = _checked_plan(parser, given)
    about = sysinfo.describe(["--tune", *arguments])
    print(report.header(about), flush=True)
    results = TuningResults(plan.path, given.json, about, tuning_file.use_measured)
    try:
        for ranks in plan.ranks:
            specs = [cydist("tcp", "numpy", name, TRANSPORT=given.transport, TUNING="off")
                     for name in ("first", "second")]  # fmt: skip
            with started_workers(specs, ranks, given.timeout) as workers:
                windows = workers[0].command({"do": "configure", "settings": {}})[0]["windows"]
                print(f"\n{counted(ranks, 'rank')}, {workers[0].about['transport']}", flush=True)
                progress = report.ProgressLine(0)
                tune(
                    Measure(workers, ranks, windows, plan.rounds, plan.deadline, progress),
                    plan, results,
                )  # fmt: skip
    except OSError as error:
        parser.error(f"{plan.path} cannot be written: {error}")
    finally:
        tuning_file.use_measured([])
    print(f"\nsaved to {plan.path}")
    for ranks, ops in results.left.items():
        print(f"no time was left for some: go on with --ranks {ranks} --ops {','.join(ops)}")
    return 0


def _tune_job(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    arguments: Sequence[str],
    ranks: Participant,
    places: Sequence[str],
) -> int:
    """Measure the job's ranks, on rank 0; a wrong option ends the program."""
    placement = tuning_table.placement_of(places)
    plan = _checked_plan(parser, given)
    if len(places) < 2:
        parser.error("a job of one rank has no crossovers")
    about = sysinfo.describe(["--tune", *arguments])
    about["ranks"] = f"{len(places)}, {f'{placement} on hosts' if placement else 'on one host'}"
    print(report.header(about), flush=True)

    def use(measured: list[tuning_file.Measured]) -> None:
        ranks.command({"do": "crossovers", "text": tuning_file.encode(measured)})

    results = TuningResults(plan.path, given.json, about, use)
    windows = ranks.command({"do": "configure", "settings": {}})[0]["windows"]
    measure = Measure(
        [ranks], len(places), windows, plan.rounds, plan.deadline, report.ProgressLine(0),
        hosts=1 < len(set(places)) < len(places),
        consecutive=tuning_table.SCATTERED not in placement,
        placement=placement,
    )  # fmt: skip
    try:
        tune(measure, plan, results)
    except OSError as error:
        parser.error(f"{plan.path} cannot be written: {error}")
    print(f"\nsaved to {plan.path}")
    for ops in results.left.values():
        print(f"no time was left for some: go on with --job --ops {','.join(ops)}")
    return 0


def usual_ranks() -> str:
    """Return two ranks and more than the number of cores, unless that is too many for a trial."""
    many = min(2 * len(os.sched_getaffinity(0)), MANY_RANKS)
    return f"2,{many}" if many > 2 else "2"


@dataclass(frozen=True)
class TuningPlan:
    """The measurements to make, their deadline (time.monotonic), and the file for the results."""

    ranks: list[int]
    ops: list[str]
    sizes: list[int]
    rounds: int
    deadline: float
    path: Path


def _checked_plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> TuningPlan:
    """Return the options, checked; a wrong one ends the program."""
    try:
        return _plan(given)
    except ValueError as error:
        parser.error(str(error))


def _plan(given: argparse.Namespace) -> TuningPlan:
    """Return the options, checked. Raises ValueError."""
    for setting in (config.ALGORITHM, config.DETERMINISTIC, config.SEGMENT_BYTES):
        if setting.get() != setting.default:
            raise ValueError(f"{setting.names[0]} is set: what it forces cannot be tuned")
    counts = (given.ranks or usual_ranks()).split(",")
    if wrong := [text for text in counts if not text.strip().isdecimal() or int(text) < 2]:
        raise ValueError(f"--ranks {wrong[0]}: write numbers of ranks, from 2")
    ops = given.ops.split(",") if given.ops else list(OPS)
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"--ops: no {unknown[0]!r}; there are {', '.join(OPS)}")
    sizes = sorted({size(text) for text in given.sizes.split(",")})
    if not given.minutes > 0:
        raise ValueError(f"--minutes {given.minutes:g}: at least a little")
    path = Path(given.output) if given.output else tuning_file.default_path()
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
    return TuningPlan(
        [*dict.fromkeys(map(int, counts))], [op for op in OPS if op in ops], sizes, given.rounds,
        time.monotonic() + 60 * given.minutes, path,
    )  # fmt: skip


@dataclass
class TuningResults:
    """The results so far, and their file.

    Attributes:
        groups: For --json: one entry for each number of ranks.
        left: Cases without time to run, by number of ranks.
        use_measured: Applies choices where the algorithms are chosen.
    """

    path: Path
    json: str | None
    about: Mapping[str, str]
    use_measured: Callable[[list[tuning_file.Measured]], None]
    groups: list[dict[str, Any]] = field(default_factory=list)
    left: dict[int, list[str]] = field(default_factory=dict)

    def read(self) -> list[tuning_file.Measured]:
        """Return the file's present contents; empty if it cannot be used."""
        try:
            return tuning_file.parse(tuning_file.read(self.path))
        except (OSError, ValueError):
            return []

    def use(self) -> None:
        """Apply the file's choices."""
        self.use_measured(self.read())

    def write(
        self, measure: Measure, rules: Mapping[str, tuple[tuning_table.Rule, ...]],
        segment_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Save all figures, and these crossovers with earlier ones. Raises OSError."""
        report.save({"header": self.about, "groups": self.groups}, self.json)
        facts = {name: said for name, said in self.about.items() if name not in ("load", "python")}
        new = tuning_file.Measured(
            measure.ranks, measure.windows, rules, segment_bytes, facts, measure.placement
        )
        tuning_file.save(tuning_file.merge(self.read(), new), self.path)
        self.use()


def tune(measure: Measure, plan: TuningPlan, results: TuningResults) -> None:
    """Measure and save everything for the groups of one kind. Raises WorkerError, OSError.

    Args:
        measure: Its progress is not used.
    """
    results.use()
    entry: dict[str, Any] = {
        "ranks": measure.ranks, "windows": measure.windows, "placement": measure.placement,
        "segments": [], "cells": [],
    }  # fmt: skip
    results.groups.append(entry)
    ops = [op for op in plan.ops if op != SEGMENT]
    progress = report.ProgressLine(sum(len(measure.cases(op, plan.sizes)) for op in ops))
    measure = replace(measure, progress=progress)
    for op in plan.ops:
        try:
            if op == SEGMENT:
                said = _segment(measure, plan, results, entry)
            else:
                said = _collective(op, measure, plan, results, entry)
        except OutOfTime:
            said = []
            results.left.setdefault(measure.ranks, []).append(op)
        progress.clear()
        print("\n".join(said), end="\n" if said else "", flush=True)


def _collective(
    op: str, measure: Measure, plan: TuningPlan, results: TuningResults, entry: dict[str, Any]
) -> list[str]:
    sizes = measure.sizes(op, plan.sizes)
    chosen = fit.decide(sizes)
    entry["cells"] += [
        {"op": op, "bytes": each.nbytes, "in_force": each.in_force, "chosen": name,
         "passes": [{who: list(rounds) for who, rounds in some.items()} for some in each.passes]}
        for each, name in zip(sizes, chosen, strict=True)
    ]  # fmt: skip
    changed = chosen != [each.in_force for each in sizes]
    rules = {op: fit.rules(op, sizes, chosen)} if changed else {}
    results.write(measure, rules)
    return lines(op, sizes, chosen)


def _segment(
    measure: Measure, plan: TuningPlan, results: TuningResults, entry: dict[str, Any]
) -> list[str]:
    in_force = measure.segment_in_force()
    passes = measure.segments(COLLECTIVES, plan.sizes)
    best = fit.better(passes, in_force)
    entry["segment_bytes"] = best
    entry["segments"] = [{str(each): some for each, some in found.items()} for found in passes]
    results.write(measure, {}, best if best != in_force else None)
    return segment_lines(passes, in_force, best)


def lines(op: str, sizes: Sequence[Size], chosen: Sequence[str]) -> list[str]:
    """Return the ratios of one collective, and the algorithms that were chosen."""
    if not sizes:
        return [f"\n{op}: only one algorithm can run"]
    names = list(dict.fromkeys(name for each in sizes for name in each.passes[0]))
    said = [f"\n{op}: time by that of the algorithm in force"]
    said.append(f"{'bytes':>10} {'in force':<18}" + "".join(f"{name:>18}" for name in names)
                + "  chosen")  # fmt: skip
    for each, name in zip(sizes, chosen, strict=True):
        ratios = "".join(f"{each.ratio(who):>18.2f}" for who in names)
        marks = [] if name == each.in_force else [name]
        if equal := [who for who in names if who != name and each.equals(who)]:
            marks.append(f"equal: {', '.join(equal)}")
        size = "any" if op in tuning_table.UNSIZED else str(each.nbytes)
        said.append(f"{size:>10} {each.in_force:<18}{ratios}  {'; '.join(marks)}".rstrip())
    changed = [
        each.ratio(name) for each, name in zip(sizes, chosen, strict=True) if name != each.in_force
    ]
    if not changed:
        return [*said, "stays as it is"]
    parts = [
        row.name + ("" if row.most_bytes is None else f" up to {row.most_bytes} bytes")
        for row in fit.rules(op, sizes, chosen)
    ]
    gain = report.geometric_mean(changed)
    return [*said, f"{', then '.join(parts)}: {gain:.2f} of the time where changed"]


def segment_lines(
    passes: Sequence[Mapping[int, Sequence[float]]], in_force: int, best: int
) -> list[str]:
    """Return the mean ratio of every segment, and which was chosen."""
    if not passes or not any(passes[0].values()):
        return ["\nsegment: no calls so long that they are cut"]
    said = [f"\nsegment: time by that with {in_force >> 10} KiB"]
    for each in passes[0]:
        means = [report.geometric_mean(some[each]) for some in passes if some.get(each)]
        mark = "  chosen" if each == best else ""
        said.append(f"{each >> 10:>6} KiB {statistics.fmean(means):>6.2f}{mark}")
    return said

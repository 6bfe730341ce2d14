"""Subject "overlap": the share of an asynchronous all_reduce that computing hides."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from cydist.bench import report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.cases import Case, cases
from cydist.bench.options import parse
from cydist.bench.workers import Worker, WorkerError, started_workers

# Computing takes this much longer than the all_reduce, so that it can hide all of it.
LONGER = 1.5
CALIBRATING = 1000  # units of computing


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if cydist failed, else 0."""
    options = parse(
        arguments, "overlap",
        "Begin an all_reduce, compute for half as long again as it takes, and wait for its end. "
        "Hidden is the share that adds nothing to the computing; asleep the same where a rank "
        "sleeps instead, as it does for a device, so that its core is free.",
        ("all_reduce",), "16Mi",
    )  # fmt: skip
    about = sysinfo.describe(["overlap", *arguments])
    itemsize = dtype_of(options.dtype).itemsize
    wanted = list(cases(options.ops, options.sizes, options.dtype, itemsize, options.ranks))
    entries = []
    with started_workers(options.workers, options.ranks, options.timeout) as workers:
        about |= report.workers(workers, options.ranks)
        spare = len(os.sched_getaffinity(0)) - options.ranks
        if spare < options.ranks:
            about["cores"] = f"{max(0, spare)} to spare: progress needs one for each rank"
        print(report.header(about))
        print(
            f"{'bytes':>10} {'library':<12} {'all_reduce us':>13} {'computing us':>13}"
            f" {'both us':>13} {'hidden':>7} {'asleep':>7}"
        )
        for case in wanted:
            for name, found in measure(case, workers, options.rounds).items():
                entries.append({"library": name, "bytes": case.nbytes, **found})
                if "failure" in found:
                    print(found["failure"], file=sys.stderr)
                    continue
                times = "".join(
                    f" {report.micro(found[part]):>13}" for part in ("moving", "computing", "both")
                )
                shares = "".join(f" {found[share]:>7.0%}" for share in ("hidden", "hidden asleep"))
                print(f"{case.nbytes:>10} {name:<12}{times}{shares}", flush=True)
    report.save({"header": about, "rows": entries}, options.json)
    return int(any("failure" in each for each in entries if each["library"] == report.OURS))


def measure(case: Case, workers: Sequence[Worker], rounds: int) -> dict[str, dict[str, Any]]:
    """Return, by worker, the medians of the seconds of each part, and of the hidden share."""
    found: dict[str, dict[str, Any]] = {each.name: {} for each in workers}
    units: dict[str, int] = {}
    for number in range(-1, rounds):
        for worker in workers:
            entry = found[worker.name]
            if "failure" in entry:
                continue
            try:
                if number < 0:
                    units[worker.name] = prepare(case, worker)
                else:
                    said = seconds_of(worker, units[worker.name])
                    for part, seconds in said.items():
                        entry.setdefault(part, []).append(seconds)
            except WorkerError as error:
                found[worker.name] = {"failure": str(error)}
    for entry in found.values():
        if "failure" not in entry:
            for share, together in (("hidden", "both"), ("hidden asleep", "asleep")):
                parts = zip(entry["moving"], entry["computing"], entry[together], strict=True)
                entry[share] = statistics.median(hidden(*each) for each in parts)
            for part in ("moving", "computing", "both", "asleep"):
                entry[part] = statistics.median(entry[part])
    return found


def prepare(case: Case, worker: Worker) -> int:
    """Make the arrays, and return the amount of computing that takes longer than the all_reduce."""
    worker.command({"do": "case", "op": case.op, "count": case.count, "dtype": case.dtype})
    said = seconds_of(worker, CALIBRATING)
    return max(1, round(LONGER * said["moving"] / said["computing"] * CALIBRATING))


def seconds_of(worker: Worker, units: int) -> dict[str, float]:
    """Return the seconds of each part on the slowest rank."""
    answers = worker.command({"do": "overlap", "units": units})
    return {part: max(answer[part] for answer in answers) / 1e9 for part in answers[0]}


def hidden(moving: float, computing: float, both: float) -> float:
    """Return the share of `moving` that did not add to the time, from 0 to 1."""
    return min(1.0, max(0.0, 1 - (both - computing) / moving))

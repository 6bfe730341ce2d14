"""Subject "paths": what a call on the general path takes beyond the fast path, on the same
arrays."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from cydist.bench import report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.cases import Case, cases
from cydist.bench.options import parse
from cydist.bench.rank_loop import PATHS
from cydist.bench.workers import Worker, WorkerError, started_workers

CALLS = 20  # of each path in a turn: few, so that some turns are free of other programs
TURNS = 200  # of each path in a round

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if a call failed, else 0."""
    options = parse(
        arguments, "paths",
        "Time the same calls on the same arrays by the fast path and by the general path, which a "
        "timeout of the call's own selects. Both take turns in every round. Medians of the rounds, "
        "each of which counts the least time of a call in a turn. With --ranks 1 no rank waits.",
        OPS, "8,1Ki", least_ranks=1,
    )  # fmt: skip
    about = sysinfo.describe(["paths", *arguments])
    itemsize = dtype_of(options.dtype).itemsize
    wanted = list(cases(options.ops, options.sizes, options.dtype, itemsize, options.ranks))
    entries = []
    with started_workers(options.workers, options.ranks, options.timeout) as workers:
        about |= report.workers(workers, options.ranks)
        print(report.header(about))
        print(
            f"{'op':<15} {'bytes':>10} {'library':<12} {'fast us':>9} {'general us':>11}"
            f" {'more us':>9}"
        )
        for case in wanted:
            for worker in workers:
                entry: dict[str, Any] = {
                    "library": worker.name,
                    "op": case.op,
                    "bytes": case.nbytes,
                }
                try:
                    entry |= measure(case, worker, options.rounds)
                except WorkerError as error:
                    entry["failure"] = str(error)
                    print(error, file=sys.stderr)
                else:
                    print(
                        f"{case.op:<15} {case.nbytes:>10} {worker.name:<12}"
                        f" {report.micro(entry['fast']):>9} {report.micro(entry['general']):>11}"
                        f" {report.micro(entry['more']):>9}",
                        flush=True,
                    )
                entries.append(entry)
    report.save({"header": about, "rows": entries}, options.json)
    return int(any("failure" in each for each in entries))


def measure(case: Case, worker: Worker, rounds: int) -> dict[str, Any]:
    """Return the medians of the seconds of a call by each path, and of their difference."""
    worker.command({"do": "case", "op": case.op, "count": case.count, "dtype": case.dtype})
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(rounds):
        answers = worker.command({"do": "paths", "iterations": CALLS, "turns": TURNS})
        for path in PATHS:
            found[path].append(max(min(answer[path]) for answer in answers) / CALLS / 1e9)
    more = [general - fast for fast, general in zip(found["fast"], found["general"], strict=True)]
    return {
        "fast": statistics.median(found["fast"]),
        "general": statistics.median(found["general"]),
        "more": statistics.median(more),
    }

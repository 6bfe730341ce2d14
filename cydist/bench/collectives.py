"""The default subject: collectives, compared with those of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cydist.bench import report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.cases import cases
from cydist.bench.options import parse
from cydist.bench.runner import run_cases
from cydist.bench.workers import started_workers


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if cydist failed or was wrong anywhere, else 0."""
    options = parse(arguments)
    about = sysinfo.describe(arguments)
    itemsize = dtype_of(options.dtype).itemsize
    wanted = list(cases(options.ops, options.sizes, options.dtype, itemsize, options.ranks))
    rows = []
    with started_workers(options.workers, options.ranks, options.timeout) as workers:
        about |= report.workers(workers, options.ranks)
        print(report.header(about), flush=True)
        table = report.ResultTable([each.name for each in workers[1:]], options.ranks)
        print(table.head(), flush=True)
        progress = report.ProgressLine(len(wanted))
        for case, row in run_cases(wanted, workers, options.rounds, progress):
            progress.clear()
            rows.append((case, row))
            print(table.line(case, row), flush=True)
            for said in report.failures(case, row):
                print(said, file=sys.stderr, flush=True)
    for line in (
        *(report.spread_lines(rows) if options.spread else ()),
        *report.summary_lines(rows),
    ):
        print(line)
    report.save(report.document(about, rows, options.ranks), options.json)
    if options.plot is not None:
        from cydist.bench.plot import draw

        draw(rows, ", ".join(about[fact] for fact in ("ranks", "machine", "date")), options.plot)
    ours = [row.get(report.OURS) for _, row in rows]
    return int(
        any(
            measurements is None or measurements.failure or measurements.wrong
            for measurements in ours
        )
    )

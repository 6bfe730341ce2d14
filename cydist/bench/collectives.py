"""The default subject: collectives, and their peers beside them."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence

from cydist.bench import machine, report
from cydist.bench.buffers import dtype_of
from cydist.bench.cells import cells
from cydist.bench.options import Options, parse
from cydist.bench.participants import Participant, ParticipantError
from cydist.bench.rounds import compare
from cydist.bench.starting import Spec


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when cydist failed or was wrong anywhere, else 0."""
    options = parse(arguments)
    about = machine.describe(arguments)
    itemsize = dtype_of(options.dtype).itemsize
    wanted = list(cells(options.ops, options.sizes, options.dtype, itemsize, options.ranks))
    with contextlib.ExitStack() as stack:
        running = [start(spec, options, stack) for spec in options.participants]
        participants = [each for each in running if each is not None]
        if running[0] is None:
            return 1
        about |= {"ranks": f"{options.ranks} processes on this machine"}
        about |= {each.name: ", ".join(each.about.values()) for each in participants}
        print(report.header(about), flush=True)
        table = report.Table([each.name for each in participants[1:]], options.ranks)
        print(table.head(), flush=True)
        progress = report.Progress(len(wanted))
        rows = []
        for cell, row in compare(wanted, participants, options.rounds, progress):
            progress.clear()
            rows.append((cell, row))
            print(table.line(cell, row), flush=True)
            for said in report.failures(cell, row):
                print(said, file=sys.stderr, flush=True)
    for line in report.summary_lines(rows):
        print(line)
    save(options, about, rows)
    ours = [row.get(report.OURS) for _, row in rows]
    return int(any(series is None or series.failure or series.wrong for series in ours))


def start(spec: Spec, options: Options, stack: contextlib.ExitStack) -> Participant | None:
    """Start a participant that `stack` ends; None, and a message, when it cannot be started."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="cydist-bench-", dir="/tmp"))
    try:
        participant = Participant(spec, options.ranks, directory, options.timeout)
    except ParticipantError as error:
        print(error, file=sys.stderr, flush=True)
        return None
    stack.callback(participant.close)
    return participant


def save(options: Options, about: dict[str, str], rows: report.Rows) -> None:
    """Write the files that were asked for."""
    if options.json is not None:
        with open(options.json, "w") as file:
            json.dump(report.document(about, rows, options.ranks), file, indent=1)
    if options.plot is not None:
        from cydist.bench.plot import draw

        title = ", ".join(about[fact] for fact in ("ranks", "machine", "date"))
        draw(rows, title, options.plot)

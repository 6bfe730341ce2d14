"""Subject "memory": the memory that a call takes besides its arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from cydist.bench import report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.cases import OPS, Case, cases
from cydist.bench.options import BenchOptions, parse
from cydist.bench.workers import WorkerError, started_workers


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if cydist failed anywhere, else 0."""
    options = parse(
        arguments, "memory",
        "What the memory of the fullest rank grows by at the most during its first three calls.",
        tuple(op for op in OPS if op != "barrier"), "64Ki,16Mi,128Mi",
    )  # fmt: skip
    about = sysinfo.describe(["memory", *arguments])
    about["ranks"] = f"{options.ranks} processes on this machine, new ones for every row"
    itemsize = dtype_of(options.dtype).itemsize
    names = [spec.name for spec in options.workers]
    print(report.header(about))
    print(f"{'bytes':>10} {'op':<14}" + "".join(f" {name + ' MiB':>16}" for name in names))
    entries: list[dict[str, Any]] = []
    for case in cases(options.ops, options.sizes, options.dtype, itemsize, options.ranks):
        extra = {spec: measure(case, options, number) for number, spec in enumerate(names)}
        entries.append({"op": case.op, "bytes": case.nbytes, "extra": extra})
        columns = ["-" if each is None else f"{each / 2**20:.2f}" for each in extra.values()]
        print(
            f"{case.nbytes:>10} {case.op:<14}" + "".join(f" {each:>16}" for each in columns),
            flush=True,
        )
    report.save({"header": about, "rows": entries}, options.json)
    return int(any(entry["extra"][report.OURS] is None for entry in entries))


def measure(case: Case, options: BenchOptions, number: int) -> int | None:
    """Return the bytes in new processes; None, after a message, if they fail."""
    command = {"do": "memory", "op": case.op, "count": case.count, "dtype": case.dtype}
    try:
        with started_workers([options.workers[number]], options.ranks, options.timeout) as running:
            return max(int(answer["extra"]) for answer in running[0].command(command))
    except WorkerError as error:
        print(f"{case.op} of {case.nbytes} bytes: {error}", file=sys.stderr, flush=True)
        return None

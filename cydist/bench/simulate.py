"""Subject "simulate": what collectives would take on many hosts, by a model of cores and links.

Schedules of up to RECORDED ranks are recorded and played (schedules.py). Larger worlds, in equal
blocks, have closed forms (closed_forms.py). The constants and the cells that were compared with
measurements come from a file that scripts/validate-model writes.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cydist.bench import report
from cydist.bench.closed_forms import (
    HIERARCHICAL,
    Key,
    NotPricedError,
    by_rounds,
    hierarchical,
    rounds,
)
from cydist.bench.job import rate
from cydist.bench.options import checked, local_parser, size
from cydist.bench.plot import size_text
from cydist.bench.schedules import WHOLE, Level, Line, Machine, play, play_in_a_row, record
from cydist.tuning import table as tuning_table

RECORDED = 1024
MOST_MESSAGES = 300_000  # of a recording; more take longer than a table is worth
TOLERANCE = 0.3
# How long waits keep a core that another rank wants: a 64th of what they spin at most, by
# src/transports/stream/stream_progress.pyx and cydist/_native/sync.pxd (spins_after_yield).
SPIN, SPIN_TOGETHER = 200e-6 / 64, 50e-6 / 64
NEAR = 8  # a size is validated by a cell of at most so many times its bytes, or by so many less
OPS = "all_reduce,broadcast,all_gather,reduce_scatter,barrier"
SIZES = "8,1Ki,64Ki,1Mi,16Mi,128Mi"
EPILOG = """
A call is priced if the file of constants has measured cells of the same collective, algorithm, kind
of link (with --rate or without) and about the same size, all within 30 % of the model, and some of
them served to fit nothing. "off by 2.3" stands in place of a price where measured and predicted
time of such a cell differ by up to that factor, "not measured" where there are none. --all prints
these prices too, in brackets. Without --constants nothing is measured, and the constants are those
of --latency, --overhead, --copying and --rate.
scripts/validate-model measures constants and cells on namespaces of this machine.
"""

# Seconds by number of bytes, of a collective of so many ranks through windows.
Local = Mapping[tuple[str, int], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Constants:
    """The contents of a file of constants; see `load`."""

    inside: Level
    between: Level  # without a limit
    local: Local
    cells: Sequence[Mapping[str, Any]]
    limit: float = 0.0  # bits per second of the link that some cells have
    limited: float = 0.0  # seconds of that link for each byte
    cached: float = math.inf  # bytes of arrays that the caches hold which their ranks share
    uncached: float = 0.0  # between.copying where the arrays are longer
    switch: float = 0.0
    cores: int = 0  # that all ranks shared where cells were measured
    header: Mapping[str, str] = field(default_factory=dict)  # of the measurement

    def together(self, collective: str, ranks: int, nbytes: int) -> float:
        """Return the seconds of a core that each of a host's ranks needs for a collective through
        windows. More ranks than cores took turns on these while they were measured.

        Raises KeyError if no group of that size was measured.
        """
        points = self.local[collective, ranks]  # its key says what is missing
        return _interpolated(points, nbytes) * min(1.0, (self.cores or ranks) / ranks)

    def machine(
        self, bits_per_second: float | None, cores: int = 0, *, touched: int = 0
    ) -> Machine:
        """Return the machine with these constants, with a link of this rate between hosts.
        `touched`: the bytes of all arrays of the ranks that share caches, in the calls it is for.
        """
        between = self.between
        if touched > self.cached:
            between = replace(between, copying=self.uncached)
        if bits_per_second is not None:
            wire = self.limited * self.limit / bits_per_second or 8 / bits_per_second
            # Both ends copy while bytes are on the wire: the slower of the two decides.
            between = replace(between, copying=max(0.0, between.copying - wire / 2), wire=wire)
        if not cores:
            return Machine(self.inside, between, self.together)
        return Machine(
            self.inside, between, self.together, cores, spin=SPIN, spin_together=SPIN_TOGETHER,
            switch=self.switch,
        )  # fmt: skip

    def doubt(self, key: Key, nbytes: int, limited: bool) -> str:
        """Return why a call has no price; "" if the model has predicted measured calls like it."""
        near = [
            cell
            for cell in self.cells
            if (cell["op"], cell["algorithm"]) == key
            and (cell["rate"] is not None) == limited
            and max(nbytes, 8) <= NEAR * max(cell["bytes"], 8)
            and max(cell["bytes"], 8) <= NEAR * max(nbytes, 8)
        ]
        if not any(cell["predicted"] for cell in near):
            return "not measured"
        if all(cell["within"] for cell in near):
            return "only fitted" if all(cell.get("fitted") for cell in near) else ""
        factors = [cell["measured"] / cell["predicted"] for cell in near if cell["predicted"]]
        return f"off by {max(max(each, 1 / each) for each in factors):.1f}"


def _interpolated(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    at = bisect.bisect_left([each for each, _ in points], nbytes)
    if at == 0:
        return points[0][1]
    if at == len(points):
        (low, before), (high, after) = points[-2:] if at > 1 else [(0, 0.0), points[-1]]
    else:
        (low, before), (high, after) = points[at - 1 : at + 1]
    return before + (after - before) * (nbytes - low) / (high - low)


def load(path: str) -> Constants:
    """Return the constants of a file that scripts/validate-model wrote. Raises ValueError."""
    try:
        found = json.loads(Path(path).read_text())
        local = {
            (each["op"], each["ranks"]): [(int(n), float(t)) for n, t in each["seconds"]]
            for each in found["local"]
        }
        return Constants(
            Level(**found["inside"]), Level(**found["between"]), local, found["cells"],
            found.get("limit", 0.0), found.get("limited", 0.0), found.get("cached", math.inf),
            found.get("uncached", 0.0), found.get("switch", 0.0), found.get("cores", 0),
            found.get("header", {}),
        )  # fmt: skip
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def price(
    key: Key, nbytes: int, hosts: int, ranks: int, machine: Machine, *, windows: bool,
    places: Sequence[int] | None = None, in_a_row: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of a call.

    Args:
        key: Collective and algorithm.
        nbytes: Of the whole array, or of all blocks.
        hosts: How many.
        ranks: How many.
        machine: What it runs on.
        windows: The ranks of a host share memory.
        in_a_row: Calls follow each other; with places.
        places: The host of each rank; None: equal blocks, of which there are too many to record.

    Raises NotPricedError.
    """
    on_hosts = bool(tuning_table.NEEDS[key] & tuning_table.HOSTS)
    each = ranks // hosts
    try:
        if places is not None:
            logs = _recorded(key, nbytes, tuple(places), on_hosts and windows)
            if sum(map(len, logs)) > MOST_MESSAGES:
                raise NotPricedError("too many messages to play")
            how = play_in_a_row if in_a_row else play
            return how(logs, places, machine)
        if key in HIERARCHICAL:
            return hierarchical(key, nbytes, hosts, each, machine, windows)
        many = None if on_hosts else rounds(key, ranks, nbytes)
        if many is not None:
            return by_rounds(many, each, machine)
    except KeyError as missing:
        raise NotPricedError(f"no constants of {missing} on a host") from None
    raise NotPricedError(f"no closed form for {ranks} ranks")


@functools.lru_cache(maxsize=1024)
def _recorded(
    key: Key, nbytes: int, places: tuple[int, ...], together: bool
) -> list[list[Line]]:  # fmt: skip
    return record(*key, places, nbytes, together=together)


def algorithms(collective: str) -> list[str]:
    """Return those that messages carry between hosts."""
    elsewhere = tuning_table.NATIVE | tuning_table.WINDOWS
    return sorted(
        name for (op, name), needs in tuning_table.NEEDS.items()
        if op == collective and not needs & elsewhere and name not in ("ordered", "ordered_scatter")
    )  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the program."""
    parser = local_parser(
        "--simulate", "Price collectives on many hosts by a model (LogGP).", EPILOG
    )
    add = parser.add_argument
    add("--ranks", type=int, default=64, help="of the job (64)")
    add("--hosts", type=int, default=8, help="in equal blocks (8)")
    ops = [op for op in tuning_table.COLLECTIVES if algorithms(op)]
    add("--ops", default=OPS, help=f"of {','.join(ops)}")
    add("--sizes", default=SIZES, help=f"bytes of a call ({SIZES})")
    add("--constants", metavar="FILE", help="written by scripts/validate-model")
    add("--rate", metavar="RATE", help="of a host's link, such as 1gbit")
    add("--latency", type=float, default=20.0, help="us between hosts, without --constants (20)")
    add("--overhead", type=float, default=2.0, help="us of a core for each message and end (2)")
    add("--copying", type=float, default=0.1, help="ns of a core for each byte and end (0.1)")
    add(
        "--inside",
        choices=("windows", "messages"),
        default="messages",
        help="how the ranks of a host exchange data: windows needs --constants with as many",
    )
    add("--all", action="store_true", help="print prices that are not validated, in brackets")
    add("--plot", metavar="FILE", help="draw time against size")
    given = checked(parser, arguments)
    try:
        given.sizes = [size(text) for text in given.sizes.split(",")]
        given.rate = None if given.rate is None else rate(given.rate)
        given.constants = constants_of(given)
    except ValueError as error:
        parser.error(str(error))
    given.ops = given.ops.split(",")
    if unknown := [op for op in given.ops if op not in ops]:
        parser.error(f"--ops: no {unknown[0]!r}; there are {', '.join(ops)}")
    if given.hosts < 2 or given.ranks % given.hosts or given.ranks == given.hosts:
        parser.error("--ranks must be a multiple of --hosts, which are 2 at least, and more")
    return given


def constants_of(given: argparse.Namespace) -> Constants:
    """Return the constants of the file or of the options. Raises ValueError."""
    if given.constants is not None:
        return load(given.constants)
    overhead = given.overhead * 1e-6
    level = Level(given.latency * 1e-6, overhead, overhead, given.copying * 1e-9)
    return Constants(replace(level, latency=level.latency / 20), level, {}, [])


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 0."""
    given = parse(arguments)
    each = given.ranks // given.hosts
    places = [rank // each for rank in range(given.ranks)] if given.ranks <= RECORDED else None
    print(
        f"{given.ranks} ranks on {given.hosts} hosts, in blocks; "
        + ("recorded schedules" if places else "composed of recorded schedules and of rounds")
        + ", by the model, not measured"
    )
    rows: list[dict[str, Any]] = []
    print(f"{'us':<28}" + "".join(f"{size_text(nbytes):>16}" for nbytes in given.sizes))
    for op in given.ops:
        for name in algorithms(op):
            cells = [
                cell_of((op, name), nbytes, places, given)
                for nbytes in ([0] if op == "barrier" else given.sizes)
            ]
            rows += cells
            print(f"{op + ' ' + name:<28}" + "".join(f"{text(c, given.all):>16}" for c in cells),
                  flush=True)  # fmt: skip
    if any(row["doubt"].startswith("off") for row in rows):
        print("not priced: off by x, the model's error for measured calls like these")
    for reason in sorted({row["why"] for row in rows if row["why"]}):
        print(f"not priced: {reason}")
    report.save({"ranks": given.ranks, "hosts": given.hosts, "rows": rows}, given.json)
    if given.plot:
        draw(rows, given)
    return 0


def cell_of(
    key: Key, nbytes: int, places: Sequence[int] | None, given: argparse.Namespace
) -> dict[str, Any]:
    """Return a price, with why it does not count, or why there is none."""
    seconds, why = None, ""
    doubt = given.constants.doubt(key, nbytes, given.rate is not None)
    if doubt and not given.all:
        return _row(key, nbytes, None, doubt, "")
    # Blocks have at least one element of 8 bytes each.
    whole = nbytes if key[0] in WHOLE else max(nbytes, 8 * given.ranks)
    machine = given.constants.machine(given.rate, touched=given.ranks // given.hosts * whole)
    try:
        seconds = price(
            key, whole, given.hosts, given.ranks, machine, windows=given.inside == "windows",
            places=places,
        )  # fmt: skip
    except NotPricedError as error:
        why = str(error)
    return _row(key, nbytes, seconds, doubt, why)


def _row(key: Key, nbytes: int, seconds: float | None, doubt: str, why: str) -> dict[str, Any]:
    return {
        "op": key[0], "algorithm": key[1], "bytes": nbytes, "seconds": seconds,
        "validated": not doubt, "doubt": doubt, "why": why,
    }  # fmt: skip


def text(cell: Mapping[str, Any], everything: bool) -> str:
    """Return a cell of the table."""
    if cell["doubt"] and not everything:
        return str(cell["doubt"])
    if cell["seconds"] is None:
        return "-"
    number = f"{cell['seconds'] * 1e6:.4g}"
    return number if cell["validated"] else f"({number})"


def draw(rows: Sequence[Mapping[str, Any]], given: argparse.Namespace) -> None:
    """Write the plot: time against size, a line for each algorithm."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    ops = [op for op in given.ops if op != "barrier"] or given.ops
    columns = min(3, len(ops))
    lines = math.ceil(len(ops) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 3.4 * lines), squeeze=False)
    for picture, op in zip(axes.flat, ops, strict=False):
        for name in algorithms(op):
            points = [
                (max(1, row["bytes"]), row["seconds"] * 1e6) for row in rows
                if (row["op"], row["algorithm"]) == (op, name) and row["seconds"] is not None
                and (row["validated"] or given.all)
            ]  # fmt: skip
            if points:
                picture.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
        picture.set_title(op, fontsize=10)
        picture.set_xscale("log", base=2)
        picture.set_yscale("log")
        picture.set_xlabel("bytes")
        picture.grid(True, alpha=0.3)
        if picture.has_data():
            picture.legend(fontsize=7)
    for unused in axes.flat[len(ops) :]:
        unused.remove()
    for line in axes:
        line[0].set_ylabel("us, by the model")
    figure.suptitle(f"{given.ranks} ranks on {given.hosts} hosts, not measured", fontsize=10)
    figure.tight_layout()
    figure.savefig(given.plot, dpi=150)
    plt.close(figure)

"""Show how busy the ranks of a running job are: `cydist top`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cydist.launch import all_hosts
from cydist.launch.all_hosts import Counted, View
from cydist.launch.hang_report import Activity, named, table_of, where
from cydist.launch.job_counters import JobCounters, RankTotals
from cydist.launch.rank_records import describe_job
from cydist.launch.run_files import JobFile

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("rank", "host", "calls/s", "bytes/s", "waits", "awaited", "call", "what it does")
_NOTED = 0.2  # of the other ranks' time: a rank that is awaited for so long is named
INSTALL = 'the refreshed table needs rich: pip install "cydist[live]", or use --once'


class Rates(NamedTuple):
    """The calls of a rank in a span of time.

    Attributes:
        calls, nbytes: Per second.
        waits: Share of the time in which it waited for another rank; calls that wait at the same
            time on several threads add up.
        awaited: Share of the time in which the other ranks waited for it, on average.
    """

    calls: float
    nbytes: float
    waits: float
    awaited: float


def rates(
    before: dict[int, RankTotals], after: dict[int, RankTotals], seconds: Mapping[int, float]
) -> dict[int, Rates]:
    """Return what each rank has done between two moments, which were `seconds[rank]` apart."""
    awaited = awaited_shares(before, after, seconds)
    found = {}
    for rank, now in after.items():
        then = before.get(rank)
        calls, nbytes, waited = now.counts.calls, now.counts.nbytes, now.counts.waited_ns
        if then is not None:
            calls -= then.counts.calls
            nbytes -= then.counts.nbytes
            waited -= then.counts.waited_ns
        found[rank] = Rates(
            calls / seconds[rank], nbytes / seconds[rank], waited / seconds[rank] / 1e9,
            awaited.get(rank, 0.0),
        )  # fmt: skip
    return found


def awaited_shares(
    before: dict[int, RankTotals], after: dict[int, RankTotals], seconds: Mapping[int, float]
) -> dict[int, float]:
    """Return for which share of the time the other ranks waited for a rank, on average: for each
    rank, also one that is not counted, for which one waited."""
    found: dict[int, float] = {}
    for peer in {peer for each in after.values() for peer in each.awaited_ns}:
        others = [each for each in after if each != peer]
        shares = (
            (
                after[each].awaited_ns.get(peer, 0)
                - (before[each].awaited_ns.get(peer, 0) if each in before else 0)
            )
            / (seconds[each] * 1e9)
            for each in others
        )
        if others:
            found[peer] = sum(shares) / len(others)
    return found


def _between(
    before: dict[int, Counted], after: dict[int, Counted]
) -> tuple[dict[int, RankTotals], dict[int, RankTotals], dict[int, float]]:
    """Return the sums of all ranks at two moments, and the seconds between, of the hosts whose sums
    can be compared."""
    then: dict[int, RankTotals] = {}
    now: dict[int, RankTotals] = {}
    seconds: dict[int, float] = {}
    for node, counted in after.items():
        former = before.get(node)
        if former is not None and former.since_ns == counted.since_ns < counted.at_ns:
            then |= former.totals
            now |= counted.totals
            past = max(1, counted.at_ns - former.at_ns) / 1e9
            seconds |= dict.fromkeys(counted.totals, past)
    return then, now, seconds


class Screen(NamedTuple):
    """One state of the table.

    Attributes:
        title: The job, in a line.
        rows: A line for each rank, one for each host, and of several hosts one for all.
        note: What is missing, and the rank that the others wait for, in lines; "": nothing.
    """

    title: str
    rows: list[tuple[str, ...]]
    note: str


def screens(job: JobFile, seconds: float) -> Iterator[Screen]:
    """Yield a state of the table each `seconds`, until the job has ended."""
    counters = JobCounters(job.directory)

    def look() -> tuple[View, dict[int, Counted]]:
        view = all_hosts.look(job, counts=seconds)
        return view, {**view.counted, job.node: all_hosts.count(counters)}

    try:
        _, before = look()
        while True:
            counters.watch(seconds)
            view, after = look()
            if not any(each.process for each in view.activities if not each.remote):
                return
            yield _screen(job, view, *_between(before, after))
            before = after
    except OSError:  # its files are gone
        return


def _screen(
    job: JobFile,
    view: View,
    before: dict[int, RankTotals],
    after: dict[int, RankTotals],
    seconds: dict[int, float],
) -> Screen:
    found = rates(before, after, seconds)
    now_ns = time.monotonic_ns()
    here = socket.gethostname()
    rows: list[tuple[str, ...]] = []
    hosts: dict[str, list[Rates]] = {}
    for each in view.activities:
        rank, host = each.record.rank, each.host or here
        rows.append((str(rank), host, *_shown(found.get(rank)), *where(each, now_ns)))
        hosts.setdefault(host, []).extend([found[rank]] if rank in found else [])
    for host, theirs in hosts.items():
        rows.append(("all", host, *_shown(_whole(theirs))[:3], "", "", ""))
    if len(hosts) > 1:
        rows.append(("all", "all hosts", *_shown(_whole(list(found.values())))[:3], "", "", ""))
    awaited = awaited_shares(before, after, seconds)
    return Screen(describe_job(job), rows, view.note + _note(awaited, view.activities))


def _whole(each: Sequence[Rates]) -> Rates | None:
    """Return what some ranks do together; of shares, the mean."""
    if not each:
        return None
    return Rates(
        sum(one.calls for one in each), sum(one.nbytes for one in each),
        sum(one.waits for one in each) / len(each), 0.0,
    )  # fmt: skip


def _shown(found: Rates | None) -> tuple[str, str, str, str]:
    if found is None:
        return "-", "-", "-", "-"
    return _short(found.calls), _short(found.nbytes), f"{found.waits:.0%}", f"{found.awaited:.0%}"


def _short(number: float) -> str:
    """Return a number with three digits and a letter for its thousands: "1.23 M"."""
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.3g}"


def _note(awaited: dict[int, float], activities: Sequence[Activity]) -> str:
    """Return which rank the others wait for, in a line; "": none."""
    most = max(awaited, key=lambda rank: awaited[rank], default=None)
    if most is None or awaited[most] < _NOTED:
        return ""
    share = f"{awaited[most]:.0%} of the time.\n"
    for each in activities:
        if each.record.rank == most:
            return f"{named(each, 'Rank')} is late: the other ranks waited for it {share}"
    return f"Rank {most}, not in the table, is late: the ranks of the table waited for it {share}"


def print_once(job: JobFile, seconds: float) -> str:
    """Return one table, of the next `seconds`; "": the job has ended."""
    for screen in screens(job, seconds):
        return f"job {screen.title}\n{table_of([HEAD, *screen.rows])}{screen.note}"
    return ""


def show(job: JobFile, seconds: float) -> None:
    """Show the table until the job has ended, or Ctrl-C.

    Raises:
        ValueError: rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise ValueError(INSTALL) from None

    def drawn(screen: Screen) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for name in HEAD:
            right = name in ("rank", "calls/s", "bytes/s", "waits", "awaited")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for row in screen.rows:
            table.add_row(*(Text(cell) for cell in row), style="dim" if row[0] == "all" else "")
        return Group(Text(f"job {screen.title}"), table, Text(screen.note, style="bold red"))

    with contextlib.suppress(KeyboardInterrupt):
        with Live(Text("looks at the ranks"), auto_refresh=False, screen=os.isatty(1)) as live:
            for screen in screens(job, seconds):
                live.update(drawn(screen), refresh=True)
        print("the job has ended")

"""One timeline of the dumps of all ranks: clocks aligned, as a Chrome trace and as a summary."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cydist.errors import listed
from cydist.group_names import group_title

# Collectives that no rank completes before all members have begun them.
MEETINGS = {
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor",
}  # fmt: skip
MOST_LISTED = 10
# Of threads in a trace: a thread with the number of its process would be its main thread.
_FIRST_TID = 1_000_000


class Clock(NamedTuple):
    """The difference of a host's clock from that of rank 0's host.

    Attributes:
        shift: Nanoseconds to add to the host's times.
        error: How far that may be off, in nanoseconds; None: not known.
        calls: How many calls bound it; 0: the hosts' time of day was compared.
    """

    shift: int
    error: int | None
    calls: int


class Span(NamedTuple):
    """A call on the common clock, which begins with the run's first call.

    Attributes:
        rank: The rank that made it.
        entered, began, ended: Nanoseconds; a call whose end was not recorded ends when it began.
        call: As the recorder writes it.
        group: The group, as the recorder writes it; None: not known.
    """

    rank: int
    entered: int
    began: int
    ended: int
    call: dict[str, Any]
    group: dict[str, Any] | None


class Timeline(NamedTuple):
    """The calls of all ranks.

    Attributes:
        hosts: Name of each rank's host.
        clocks: Of each boot id.
        spans: All calls, by their begin.
        sent: Bytes from a rank to another through sockets, since the begin of the job.
        uncounted: Ranks of which that is not known.
    """

    hosts: dict[int, str]
    clocks: dict[str, Clock]
    spans: list[Span]
    sent: dict[tuple[int, int], int]
    uncounted: list[int]


def merge(dumps: Sequence[dict[str, Any]]) -> Timeline:
    """Return the calls of all ranks on one clock.

    Args:
        dumps: Of all ranks, in the order of the ranks.
    """
    clocks = align(dumps)
    spans = []
    for dump in dumps:
        groups = {group["group"]: group for group in dump["groups"]}
        shift = clocks[dump["boot_id"]].shift
        for call in dump["calls"]:
            ended = call["ended_ns"]
            if ended is None:
                running = call["state"] == "running"
                ended = dump["written_ns"] if running else call["began_ns"]
            spans.append(
                Span(
                    dump["rank"],
                    call["entered_ns"] + shift,
                    call["began_ns"] + shift,
                    ended + shift,
                    call,
                    groups.get(call["group"]),
                )
            )
    start = min((span.entered for span in spans), default=0)
    moved = [
        span._replace(
            entered=span.entered - start, began=span.began - start, ended=span.ended - start
        )
        for span in spans
    ]
    moved.sort(key=lambda span: (span.began, span.rank))
    sent = {
        (dump["rank"], each["rank"]): each["bytes"]
        for dump in dumps
        for each in dump.get("sent_bytes") or ()
    }
    uncounted = [dump["rank"] for dump in dumps if dump.get("sent_bytes") is None]
    hosts = {dump["rank"]: dump["host"] for dump in dumps}
    return Timeline(hosts, clocks, moved, sent, uncounted)


# Clocks


def align(dumps: Sequence[dict[str, Any]]) -> dict[str, Clock]:
    """Return the clock of each boot id, relative to the first dump's.

    No rank leaves a collective that all must enter before the last has entered it. Each such call
    bounds the difference of two clocks from both sides.
    """
    first = dumps[0]["boot_id"]
    clocks = {first: Clock(0, 0, 0)}
    meetings: dict[str, list[dict[tuple[str, int], dict[str, Any]]]] = defaultdict(list)
    for dump in dumps:
        meetings[dump["boot_id"]].append(_meetings(dump))
    for boot, theirs in meetings.items():
        if boot == first:
            continue
        least, most, count = None, None, 0
        for ours in meetings[first]:
            for those in theirs:
                for key in ours.keys() & those.keys():
                    here, there = ours[key], those[key]
                    low = here["began_ns"] - there["ended_ns"]
                    high = here["ended_ns"] - there["began_ns"]
                    least = low if least is None else max(least, low)
                    most = high if most is None else min(most, high)
                    count += 1
        if least is None or most is None:
            clocks[boot] = Clock(_time_of_day(dumps, first) - _time_of_day(dumps, boot), None, 0)
        else:
            clocks[boot] = Clock((least + most) // 2, max(0, (most - least) // 2), count)
    return clocks


def _meetings(dump: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return a rank's meetings whose end is known, by the group's name and number."""
    names = {group["group"]: group["name"] for group in dump["groups"]}
    return {
        (names[call["group"]], call["seq"]): call
        for call in dump["calls"]
        if call["call"] in MEETINGS
        and call["state"] == "over"
        and call["ended_ns"] is not None
        and call["group"] in names
    }


def _time_of_day(dumps: Iterable[Mapping[str, Any]], boot: str) -> int:
    """Return the begin of a host's monotonic clock since 1970, negated."""
    dump = next(each for each in dumps if each["boot_id"] == boot)
    return int(dump["written_ns"] - dump["written_unix_ns"])


# Chrome trace


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as Perfetto and Chrome read it: a process for each rank, in it a thread
    for each group. Times are in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, host in timeline.hosts.items():
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "args": {"name": f"rank {rank} on {host}"},
            }
        )
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        )
    named: set[tuple[int, int]] = set()
    for span in timeline.spans:
        number = span.call["group"]
        if (span.rank, number) not in named:
            named.add((span.rank, number))
            name = "?" if span.group is None else span.group["name"]
            events.append(
                {"ph": "M", "name": "thread_name", "pid": span.rank, "tid": _FIRST_TID + number,
                 "args": {"name": f"group {name}"}}
            )  # fmt: skip
        shown = ("seq", "tag", "peer", "root", "bytes", "dtype", "op", "algorithm", "state",
                 "longest_wait_for")  # fmt: skip
        events.append(
            {
                "ph": "X",
                "name": span.call["call"],
                "cat": "message" if span.call["seq"] is None else "collective",
                "pid": span.rank,
                "tid": _FIRST_TID + number,
                "ts": span.began / 1000,
                "dur": (span.ended - span.began) / 1000,
                "args": {key: span.call[key] for key in shown if span.call[key] is not None}
                | {"waited_us": span.call["waited_ns"] / 1000},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


# Summary


def summary(timeline: Timeline) -> str:
    """Return what the timeline shows, as text: clocks, each rank's share of communication and
    overlap, the ranks that came late, bytes per link and of arrays, and the slowest calls."""
    parts = [_clock_lines(timeline), _rank_lines(timeline), _late_lines(timeline)]
    parts += [_link_lines(timeline), _byte_lines(timeline), _slow_lines(timeline)]
    return "\n".join(part for part in parts if part)


def _clock_lines(timeline: Timeline) -> str:
    if len(timeline.clocks) == 1:
        return "clocks: one host, one clock\n"
    text = "clocks, relative to rank 0's host:\n"
    for boot, clock in timeline.clocks.items():
        if clock.calls:
            how = f"error at most {_time(clock.error or 0)}, from {clock.calls} pairs of calls"
        elif clock.error is None:
            how = "from the time of day, error not known: no call bounds it"
        else:
            how = "the reference"
        text += f"  {boot[:8] or '?'}  {clock.shift / 1e9:+.6f} s  {how}\n"
    return text


def _rank_lines(timeline: Timeline) -> str:
    """Return for each rank how long it was in calls, and waited there."""
    length = max((span.ended for span in timeline.spans), default=0)
    text = f"ranks, in {_time(length)}:\n"
    outside = []
    for rank, host in timeline.hosts.items():
        of_rank = shares(timeline, rank)
        outside.append(of_rank.length - of_rank.inside)
        share = of_rank.inside / of_rank.length if of_rank.length else 0.0
        text += (
            f"  rank {rank} on {host}: {of_rank.calls} calls, {_time(of_rank.inside)} in calls "
            f"({share:.0%}), of which it waited {_time(of_rank.waited)}{_overlap(of_rank)}\n"
        )
    most = max(outside, default=0)
    if most > 0:
        mean = sum(outside) / len(outside)
        text += (
            f"imbalance of the time outside calls, (most - mean) / most: {1 - mean / most:.0%}\n"
        )
    return text


class Shares(NamedTuple):
    """The time of one rank.

    Attributes:
        calls: How many it made.
        length: Nanoseconds from its first call to its last.
        inside: Of these, nanoseconds in at least one call.
        waited: Nanoseconds in which calls waited, those at the same time added up.
        behind: Nanoseconds in which asynchronous collectives ran, added up.
        blocked: Of these, nanoseconds in which the program waited for them.
    """

    calls: int
    length: int
    inside: int
    waited: int
    behind: int
    blocked: int


def shares(timeline: Timeline, rank: int) -> Shares:
    """Return how one rank spent its time."""
    spans = [span for span in timeline.spans if span.rank == rank]
    began = min((span.began for span in spans), default=0)
    return Shares(
        len(spans),
        max((span.ended for span in spans), default=0) - began,
        _covered((span.began, span.ended) for span in spans),
        sum(span.call["waited_ns"] for span in spans),
        sum(_ran_behind(span) for span in spans),
        # Several threads may wait for one collective.
        sum(min(span.call.get("caller_waited_ns", 0), _ran_behind(span)) for span in spans),
    )


def _ran_behind(span: Span) -> int:
    """Return how long an asynchronous collective ran; 0: the call is another one."""
    return span.ended - span.began if span.call.get("asynchronous") else 0


def _overlap(found: Shares) -> str:
    """Return the share of the time of a rank's asynchronous collectives in which the program did
    not wait for them, in words; "": there were none."""
    if not found.behind:
        return ""
    return f", overlap {1 - found.blocked / found.behind:.0%}"


def lateness(timeline: Timeline) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return how late ranks came to calls that all must enter: the number of these calls; by rank,
    how often it came last; by rank, nanoseconds after the median rank, of all these calls."""
    last: dict[int, int] = defaultdict(int)
    behind: dict[int, int] = defaultdict(int)
    count = 0
    for spans in meetings(timeline):
        count += 1
        times = sorted((span.began, span.rank) for span in spans)
        median = statistics.median(began for began, _ in times)
        last[times[-1][1]] += 1
        for began, rank in times:
            behind[rank] += max(0, int(began - median))
    return count, last, behind


def _late_lines(timeline: Timeline) -> str:
    """Return which ranks, and hosts, came late to calls that all must enter."""
    count, last, behind = lateness(timeline)
    if not count:
        return "no collective that all ranks must enter is in the records of all its ranks\n"
    text = f"late, in {count} collectives that all ranks must enter:\n"
    for rank in sorted(last, key=lambda rank: -behind[rank])[:MOST_LISTED]:
        text += (
            f"  rank {rank} on {timeline.hosts[rank]} came last {last[rank]} times, in all "
            f"{_time(behind[rank])} after the median rank\n"
        )
    if len(set(timeline.hosts.values())) > 1:
        by_host: dict[str, int] = defaultdict(int)
        for rank, late in behind.items():
            by_host[timeline.hosts[rank]] += late
        for host in sorted(by_host, key=lambda host: -by_host[host]):
            text += f"  host {host}: {_time(by_host[host])}\n"
    return text


def meetings(timeline: Timeline) -> Iterator[list[Span]]:
    """Yield the calls of each collective that all members must enter, if all are recorded."""
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.group is not None and span.call["call"] in MEETINGS:
            found[span.group["name"], span.call["seq"]].append(span)
    for spans in found.values():
        if spans[0].group is not None and len(spans) == spans[0].group["size"] > 1:
            yield spans


def _link_lines(timeline: Timeline) -> str:
    """Return the bytes that went from a rank to another, and from a host to another."""
    text = ""
    if timeline.sent:
        text = "bytes through sockets, from the begin of the job:\n"
        hosts: dict[tuple[str, str], int] = defaultdict(int)
        for (sender, receiver), count in timeline.sent.items():
            hosts[timeline.hosts[sender], timeline.hosts.get(receiver, "?")] += count
        if any(here != there for here, there in hosts):
            for (here, there), count in sorted(hosts.items(), key=lambda each: -each[1]):
                if here != there:
                    text += f"  host {here} to host {there}: {_bytes(count)}\n"
        most = sorted(timeline.sent, key=lambda link: -timeline.sent[link])
        for link in most[:MOST_LISTED]:
            text += f"  rank {link[0]} to rank {link[1]}: {_bytes(timeline.sent[link])}\n"
        if len(most) > MOST_LISTED:
            rest = sum(timeline.sent[link] for link in most[MOST_LISTED:])
            text += f"  {len(most) - MOST_LISTED} more pairs of ranks: {_bytes(rest)}\n"
    if timeline.uncounted and len(timeline.uncounted) < len(timeline.hosts):
        text += f"  not known of {listed('rank', timeline.uncounted)}\n"
    return text


def _byte_lines(timeline: Timeline) -> str:
    """Return the bytes of messages for each pair of ranks, and of collectives for each group."""
    links: dict[tuple[int, int], list[int]] = defaultdict(list)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for span in timeline.spans:
        call = span.call
        if call["seq"] is not None:
            kind = ("?" if span.group is None else span.group["name"], call["call"])
            groups[kind].append(call["bytes"])
            members[kind].add(span.rank)
        elif call["call"] == "send" and call["peer"] is not None:
            links[span.rank, call["peer"]].append(call["bytes"])
    text = "bytes of the arrays of these calls:\n"
    most = sorted(links, key=lambda link: -sum(links[link]))
    for sender, receiver in most[:MOST_LISTED]:
        sizes = links[sender, receiver]
        text += f"  rank {sender} to rank {receiver}: {_bytes(sum(sizes))} in {len(sizes)} messages"
        hosts = timeline.hosts.get(sender), timeline.hosts.get(receiver)
        across = None not in hosts and hosts[0] != hosts[1]
        text += f", from {hosts[0]} to {hosts[1]}\n" if across else "\n"
    if len(most) > MOST_LISTED:
        rest = sum(sum(links[link]) for link in most[MOST_LISTED:])
        text += f"  {len(most) - MOST_LISTED} more pairs of ranks: {_bytes(rest)}\n"
    kinds = sorted(groups, key=lambda kind: -sum(groups[kind]))
    for kind in kinds[:MOST_LISTED]:
        ranks = len(members[kind])
        text += (
            f"  {kind[1]} of {group_title(kind[0])}: {_bytes(sum(groups[kind]) / ranks)} in "
            f"{len(groups[kind]) / ranks:.0f} calls, on each of {ranks} ranks\n"
        )
    return text if links or groups else ""


def _bytes(number: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} bytes"


def _slow_lines(timeline: Timeline) -> str:
    text = "slowest calls:\n"
    slow = sorted(timeline.spans, key=lambda span: span.began - span.ended)[:MOST_LISTED]
    for span in slow:
        call = span.call
        name = f"{call['call']} #{call['seq']}" if call["seq"] is not None else call["call"]
        why = ""
        if (awaited := call["longest_wait_for"]) is not None:
            why = f", longest wait {_time(call['longest_wait_ns'])} for rank {awaited}"
        text += (
            f"  {_time(span.ended - span.began)}: {name} of {call['bytes']} bytes on rank "
            f"{span.rank}, {_time(span.began)} after the begin{why}\n"
        )
    return text


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how much time is in at least one span."""
    total, until = 0, 0
    for began, ended in sorted(spans):
        total += max(0, ended - max(began, until))
        until = max(until, ended)
    return total


def _time(ns: float) -> str:
    """Return a time with its unit."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= scale:
            return f"{ns / scale:.2f} {unit}"
    return f"{ns:.0f} ns"

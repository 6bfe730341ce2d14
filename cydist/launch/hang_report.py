"""Tell what each rank of a job does, and which are late: `python -m cydist ps` and `hang`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cydist.errors import listed
from cydist.group_names import group_title
from cydist.launch.rank_records import RankRecord, describe_job, pids, read_ranks, running_calls
from cydist.launch.run_files import JobFile
from cydist.recorder.snapshot import describe_call

LOOK_SECONDS = 0.2  # over which a process's use of the processor is measured
LEAST_BUSY = 0.2  # of a processor: a rank that uses less, and waits now, sleeps
STACK_SECONDS = 1.0  # in which a process must have written its stacks
PY_SPY_SECONDS = 10.0
MOST_STACK_LINES = 40
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Activity(NamedTuple):
    """A rank, observed for a moment.

    Attributes:
        record: Of the rank.
        process: A letter of /proc/PID/stat; "": it has ended.
        busy: Share of one processor that it used while it was observed.
        call: The call that it is in, as the recorder writes calls; None: in none.
        last: Its last call of any kind; None: it made none.
        host: Number and name of its host, in a job on several hosts; "": this one.
        remote: Whether it is on another host.
    """

    record: RankRecord
    process: str
    busy: float
    call: dict[str, Any] | None
    last: dict[str, Any] | None
    host: str = ""
    remote: bool = False


# Looking


def observe(job: JobFile, seconds: float = LOOK_SECONDS) -> list[Activity]:
    """Return what the ranks of this host do now. Takes `seconds`."""
    before = {pid: _spent(pid) for pid in pids(job)}
    began = time.monotonic()
    time.sleep(seconds)
    ranks = read_ranks(job)
    past = max(time.monotonic() - began, 1e-3)
    return [
        _activity(each, (_spent(each.pid) - before.get(each.pid, 0.0)) / past) for each in ranks
    ]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; []: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _spent(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _activity(record: RankRecord, busy: float) -> Activity:
    fields = _stat(record.pid)
    state = "" if not fields or fields[0] in "ZX" else fields[0]
    calls = [] if record.dump is None else record.dump["calls"]
    running = [call for call in calls if call["state"] == "running"] if state else []
    return Activity(
        record, state, busy, running[-1] if running else None, calls[-1] if calls else None
    )


# Telling


def does(activity: Activity, now_ns: int) -> str:
    """Return what a rank does, in a few words."""
    call = activity.call
    if not activity.process:
        return "has ended"
    if activity.process in "Tt":
        how = "is stopped (SIGSTOP)" if activity.process == "T" else "is held by a debugger"
        return how if call is None else f"{how} in the call"
    if call is not None and call["waits_for"] is not None:
        return f"waits for rank {call['waits_for']}"
    if activity.record.dump is None:
        return f"has made no group; {_usage(activity)}"
    if call is not None:
        return f"is in the call; {_usage(activity)}"
    return f"is in the program; {_usage(activity)}"


def _usage(activity: Activity) -> str:
    if activity.process == "D":
        return "waits for a device or a file system"
    if activity.process == "R" or activity.busy > LEAST_BUSY:
        return f"computes ({activity.busy:.0%} of a processor)"
    return "sleeps"


def table(activities: Sequence[Activity], now_ns: int) -> str:
    """Return a line for each rank."""
    several = any(each.host for each in activities)
    place = ("host",) if several else ()
    rows = [("rank", *place, "pid", "call", "since", "what it does")]
    for each in activities:
        place = (each.host,) if several else ()
        words, does_now = where(each, now_ns)
        since = _since(each)
        past = f"{max(0, now_ns - since) / 1e9:.1f} s" if since else "-"
        rows.append((str(each.record.rank), *place, str(each.record.pid), words, past, does_now))
    return table_of(rows)


def where(activity: Activity, now_ns: int) -> tuple[str, str]:
    """Return the call that a rank is in, or after which it is, and what it does."""
    if activity.call is not None:
        words = describe_call(activity.call)
    elif activity.last is not None:
        words = f"after {describe_call(activity.last)}"
    else:
        words = "no call yet"
    return words, does(activity, now_ns)


def _since(activity: Activity) -> int:
    """Return since when a rank is in its call, or after it; 0: it has made none."""
    if activity.call is not None:
        return int(activity.call["began_ns"])
    if activity.last is not None:
        return int(activity.last["ended_ns"] or activity.last["began_ns"])
    return 0


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, with their columns below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "".join(
        "  ".join([*(row[i].ljust(width) for i, width in enumerate(widths)), row[-1]]).rstrip()
        + "\n"
        for row in rows
    )


def report(
    job: JobFile,
    activities: Sequence[Activity],
    stacks: Callable[[Activity], str] | None = None,
    note: str = "",
) -> str:
    """Return the table, which ranks are late, and their stacks.

    Args:
        stacks: Returns a late rank's stacks; None: none are shown.
        note: What is missing in the table, in lines.
    """
    now_ns = time.monotonic_ns()
    text = f"job {describe_job(job)}\n{table(activities, now_ns)}{note}"
    found = late(activities)
    for reason in found.values():
        text += f"{reason}\n"
    waiting = [each for each in activities if each.call is not None]
    if not found and waiting:
        text += "No rank of the table is late in a call that another of its ranks is in.\n"
    for each in activities if stacks is not None else ():
        if each.record.rank in found and stacks is not None:
            text += f"stacks of {named(each)} (pid {each.record.pid}):\n"
            text += "".join(f"    {line}\n" for line in stacks(each).splitlines())
    return text


def named(activity: Activity, begin: str = "rank") -> str:
    """Return a rank, with its host in a job on several: "rank 2 on host 1 (vm-b)"."""
    number, _, name = activity.host.partition(" ")
    return f"{begin} {activity.record.rank}" + (f" on host {number} ({name})" if number else "")


# Judging


def late(activities: Sequence[Activity]) -> dict[int, str]:
    """Return the ranks for which others wait, and why each is late.

    A rank is late if another member of a group is in a later call than it has reached, or waits
    for it, while it waits for no rank itself.
    """
    known = {each.record.rank: each for each in activities}
    found: dict[int, str] = {}
    for (name, seq), members in _newest(activities).items():
        behind = {
            rank: reached
            for rank in members.ranks
            if rank in known
            and (reached := _reached(known[rank], name)) < seq
            and not _is_served(known[rank], known)
        }
        for rank, reached in behind.items():
            # In a collective of the group it may wait for a rank that is late, too.
            end = _end_of_waits(known[rank], known) if _is_inside(known[rank], name) else None
            if end is None or end == rank or end not in behind:
                found[rank] = _why_behind(known[rank], name, seq, reached, members)
    for each in activities:
        end = _end_of_waits(each, known)
        if end is not None and end not in found:
            found[end] = _why_awaited(each, end, known.get(end))
    return dict(sorted(found.items()))


def _is_served(activity: Activity, known: dict[int, Activity]) -> bool:
    """Return whether a rank was seen in a call for which it need not wait any more: the rank that
    it waited for has left that call, a little later, or is served itself. Such a job runs."""
    seen = set()
    while activity.record.rank not in seen:
        seen.add(activity.record.rank)
        call, dump = activity.call, activity.record.dump
        if call is None or dump is None or not call["seq"] or call["waits_for"] not in known:
            return False
        group = _group(dump, call["group"])
        if group is None:
            return False
        activity = known[call["waits_for"]]
        reached = _reached(activity, group["name"])
        inside = activity.call is not None and activity.call["seq"] == reached
        if reached > int(call["seq"]) or (reached == int(call["seq"]) and not inside):
            return True
    return False


def _is_inside(activity: Activity, name: str) -> bool:
    """Return whether a rank is in a collective of a group."""
    call, dump = activity.call, activity.record.dump
    if call is None or dump is None or not call["seq"]:
        return False
    group = _group(dump, call["group"])
    return group is not None and group["name"] == name


class _Members(NamedTuple):
    ranks: list[int]
    inside: list[int]  # ranks that are in the newest call
    call: dict[str, Any]


def _newest(activities: Sequence[Activity]) -> dict[tuple[str, int], _Members]:
    """Return each group's newest call that ranks are in, by the group's name and its number."""
    newest: dict[str, _Members] = {}
    for each in activities:
        if each.call is None or each.call["seq"] is None or each.record.dump is None:
            continue
        group = _group(each.record.dump, each.call["group"])
        if group is None:
            continue
        so_far = newest.get(group["name"])
        if so_far is None or so_far.call["seq"] < each.call["seq"]:
            newest[group["name"]] = _Members(group["ranks"], [each.record.rank], each.call)
        elif so_far.call["seq"] == each.call["seq"]:
            so_far.inside.append(each.record.rank)
    return {(name, members.call["seq"]): members for name, members in newest.items()}


def _group(dump: dict[str, Any], number: int) -> dict[str, Any] | None:
    return next((group for group in dump["groups"] if group["group"] == number), None)


def _reached(activity: Activity, name: str) -> int:
    """Return the number of the group's last collective that a rank has begun; 0: none."""
    dump = activity.record.dump
    if dump is None:
        return 0
    numbers = {group["group"] for group in dump["groups"] if group["name"] == name}
    return max(
        (call["seq"] for call in dump["calls"] if call["group"] in numbers and call["seq"]),
        default=0,
    )


def _why_behind(activity: Activity, name: str, seq: int, reached: int, members: _Members) -> str:
    where = "has made no call" if not reached else f"has come to call #{reached}"
    others = listed("rank", members.inside)
    are = "is" if len(members.inside) == 1 else "are"
    return (
        f"{named(activity, 'Rank')} is late: {others} {are} in {describe_call(members.call)} of "
        f"{group_title(name)}, and rank {activity.record.rank} {where} of it. "
        f"It {does(activity, time.monotonic_ns())}."
    )


def _end_of_waits(activity: Activity, known: dict[int, Activity]) -> int | None:
    """Return the rank at the end of the waits that begin with a rank; None: it waits for none.

    A circle of waits ends at its lowest rank.
    """
    path = [activity.record.rank]
    while True:
        here = known.get(path[-1])
        awaited = None if here is None or here.call is None else here.call["waits_for"]
        stopped = here is not None and here.process in ("T", "t", "")
        if awaited is None or stopped:
            return path[-1] if len(path) > 1 else None
        if awaited in path:
            return min(path[path.index(awaited) :])
        path.append(awaited)


def _why_awaited(waiting: Activity, rank: int, late_one: Activity | None) -> str:
    assert waiting.call is not None
    told = f"rank {waiting.record.rank} is in {describe_call(waiting.call)}"
    if late_one is None:
        return f"Rank {rank} is awaited: {told} and waits for it. It is not in the table."
    if late_one.call is not None and late_one.call["waits_for"] is not None:
        return (
            f"Ranks wait for each other in a circle: {told}, and rank {rank} is in "
            f"{describe_call(late_one.call)} and waits for rank {late_one.call['waits_for']}."
        )
    name = named(late_one, "Rank")
    return f"{name} is late: {told} and waits for it. It {does(late_one, time.monotonic_ns())}."


# Stacks


def stacks_of(activity: Activity, directory: str) -> str:
    """Return the stacks of a rank, or why there are none. Takes at most STACK_SECONDS, and some
    seconds more where py-spy is installed."""
    record = activity.record
    if not activity.process:
        return "its process has ended"
    spied = _by_py_spy(record.pid, activity.process in "Tt")
    if spied:
        return spied
    if activity.process in "Tt":
        return f"none: the process is stopped; kill -CONT {record.pid} lets it go on"
    if record.stack_signal == 0 or not _catches(record.pid, record.stack_signal):
        return (
            "none: it has made no group yet, or has another use for the signal that asks for them"
        )
    found = _by_signal(
        record.pid, record.stack_signal, os.path.join(directory, f"stacks-{record.pid}")
    )
    return found or f"none: it has not written them within {STACK_SECONDS:g} s"


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _by_signal(pid: int, number: int, path: str) -> str:
    """Let a process write its stacks into its file, and return them."""
    until = time.monotonic() + STACK_SECONDS
    try:
        os.truncate(path, 0)
        os.kill(pid, number)
        size, steady = 0, 0
        while steady < 3 and time.monotonic() < until:
            time.sleep(0.02)
            grown = os.stat(path).st_size
            steady = steady + 1 if grown == size > 0 else 0
            size = grown
        with open(path, errors="replace") as file:
            return _shown(file.read())
    except OSError:
        return ""


def _shown(text: str) -> str:
    """Return the threads of the program, without cydist's own, innermost call first."""
    threads = text.strip().split("\n\n")
    own = [each for each in threads if not _is_cydists(each)]
    lines = "\n".join(own or threads).splitlines()
    more = [f"... {len(lines) - MOST_STACK_LINES} more lines"]
    return "\n".join(lines[:MOST_STACK_LINES] + (more if len(lines) > MOST_STACK_LINES else []))


def _is_cydists(thread: str) -> bool:
    """Return whether a thread runs nothing but cydist and Python's library."""
    files = [line for line in thread.splitlines() if line.lstrip().startswith("File ")]
    outer = [line for line in files if '/threading.py"' not in line]
    return bool(outer) and _PACKAGE in outer[-1] and "/launch/" not in outer[-1]


def _by_py_spy(pid: int, stopped: bool) -> str:
    """Return stacks with native frames, if py-spy is installed and may look. Those of a stopped
    process have none, since py-spy would wait for it."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    for way in ["--nonblocking"] if stopped else ["--native", "--nonblocking"]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [program, "dump", way, "--pid", str(pid)], capture_output=True, text=True,
                timeout=PY_SPY_SECONDS, check=True,
            )  # fmt: skip
            return done.stdout.strip()
    return ""


# Watching, for the launcher


class HangWatch:
    """Finds calls that take longer than a limit, each once.

    Args:
        seconds: The limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._told: set[tuple[int, int]] = set()

    def hung(self, directory: str) -> bool:
        """Return whether a rank is in a call for longer than the limit, unless that was told."""
        running = running_calls(directory)
        new = {
            (pid, number)
            for pid, number, age in running
            if age > self.seconds and (pid, number) not in self._told
        }
        if new:  # the waits of the other ranks become old a little later
            self._told |= {(pid, number) for pid, number, _ in running}
        return bool(new)

    def pass_over(self, directory: str) -> None:
        """Take the calls that the ranks are in as told."""
        self._told |= {(pid, number) for pid, number, _ in running_calls(directory)}

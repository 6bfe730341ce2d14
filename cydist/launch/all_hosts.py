"""Look at the ranks of all hosts of a job: `cydist ps`, `hang` and `top` ask through the launchers.

    command -> a line in the fifo `questions` of this host's launcher -> host 0's launcher -> all
    launchers look at their ranks -> host 0's -> this host's -> the files `answer-KEY-NODE`

So the command needs no port, no secret and no way to other hosts: the launchers' authenticated
connections (hosts.py) carry question and answers. Who may write into the launcher's directory is
the job's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from cydist.launch import hang_report
from cydist.launch.hang_report import Activity
from cydist.launch.job_counters import JobCounters, RankTotals
from cydist.launch.rank_records import RankRecord, read_job
from cydist.launch.run_files import QUESTIONS, JobFile
from cydist.recorder import snapshot, spans_of
from cydist.recorder.counters import Counts

ANSWER_SECONDS = 3.0  # in which the launchers of other hosts must answer
STACK_SECONDS = 10.0  # the same, if they ask their ranks for stacks
_COUNT_LONGER = 10.0  # seconds after the time in which the next question is expected
_LAUNCHER_LOOKS = 0.1  # seconds in which a launcher looks, while its ranks' output waits
_AT_ONCE = 0.2  # an answer within so many seconds is of the same moment
_LOOK_AGAIN = 0.02
_MOST_QUESTION_BYTES = 4096  # which a pipe takes in one piece
_KEY = re.compile(r"[0-9a-f]{16}")


class Counted(NamedTuple):
    """Sums over the calls of the ranks of one host, since these are counted.

    Attributes:
        since_ns: When that began: sums with another begin cannot be compared.
        at_ns: When the calls were counted, on the same clock of that host.
        totals: By global rank.
    """

    since_ns: int
    at_ns: int
    totals: dict[int, RankTotals]


class View(NamedTuple):
    """The ranks of all hosts at one moment.

    Attributes:
        activities: What they do, by rank.
        counted: Of other hosts, by host, if sums of calls were asked for.
        note: What is missing, in lines.
    """

    activities: list[Activity]
    counted: dict[int, Counted]
    note: str


# The command's side


def ps_report(job: JobFile) -> str:
    """Return what the ranks of all hosts do, and which are late."""
    activities, _, note = look(job)
    return hang_report.report(job, activities, note=note)


def hang_report_of_all(job: JobFile) -> str:
    """Return the same, and the stacks of the late ranks."""
    activities, _, note = look(job)
    late = hang_report.late(activities)
    far = [each.record.rank for each in activities if each.remote and each.record.rank in late]
    texts: dict[int, str] = {}
    if far:
        for answer in _ask(job, STACK_SECONDS, stacks=far).values():
            texts |= {int(rank): str(text) for rank, text in answer.get("stacks", {}).items()}

    def stacks(one: Activity) -> str:
        if not one.remote:
            return hang_report.stacks_of(one, job.directory)
        return texts.get(one.record.rank) or f"none: host {one.host} has not sent them"

    return hang_report.report(job, activities, stacks, note=note)


def look(job: JobFile, counts: float = 0.0) -> View:
    """Return what the ranks of all hosts do.

    Args:
        counts: Seconds until the next call that wants sums of calls, too; 0: none are wanted.

    Raises:
        OSError: The job has ended.
    """
    if job.nodes == 1:
        return View(hang_report.observe(job), {}, "")
    # All look at the same moment: ranks that run would be seen in different calls otherwise.
    for _attempt in range(2):
        with ThreadPoolExecutor(1) as pool:
            near = pool.submit(hang_report.observe, job, _LAUNCHER_LOOKS)
            began = time.monotonic()
            answers = _ask(job, ANSWER_SECONDS, counts=counts and counts + _COUNT_LONGER)
        # The first look of a launcher loads code.
        if len(answers) < job.nodes - 1 or time.monotonic() - began < _AT_ONCE:
            break
    here = f"{job.node} {socket.gethostname()}"
    found = [each._replace(host=here) for each in near.result()]
    missing, counted = [], {}
    for node in sorted(set(range(job.nodes)) - {job.node}):
        answer = answers.get(node, {"error": f"no answer within {ANSWER_SECONDS:g} s"})
        if "error" in answer:
            missing.append(f"The ranks of host {node} are missing: {answer['error']}.\n")
        else:
            found += decode(node, answer)
            if "counted" in answer:
                counted[node] = _decoded_counts(answer["counted"])
    found.sort(key=lambda each: each.record.rank)
    return View(found, counted, "".join(missing))


def _ask(
    job: JobFile, seconds: float, *, stacks: Collection[int] = (), counts: float = 0.0
) -> dict[int, dict[str, Any]]:
    """Return the answers of the other hosts' launchers, by host.

    Args:
        seconds: How long to wait.
        stacks: Ranks whose stacks are wanted, in place of what all ranks do.
        counts: Seconds for which the calls of all ranks are counted from now on; 0: sums of them
            are not wanted.
    """
    key = os.urandom(8).hex()
    asked = {"key": key, "stacks": sorted(stacks), "counts": counts}
    question = json.dumps(asked).encode() + b"\n"
    if len(question) > _MOST_QUESTION_BYTES:
        return {}
    try:
        fd = os.open(os.path.join(job.directory, QUESTIONS), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # the launcher has ended
        return {}
    try:
        os.write(fd, question)
    except BlockingIOError:  # no process reads: the launcher is stopped
        return {}
    finally:
        os.close(fd)
    names = {node: _answer_file(job.directory, key, node) for node in range(job.nodes)}
    del names[job.node]
    found: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + seconds
    while names and time.monotonic() < until:
        for node, path in list(names.items()):
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                found[node] = json.load(file) | {"came_ns": time.monotonic_ns()}
            if node in found:
                del names[node]
                os.unlink(path)
        if names:
            time.sleep(_LOOK_AGAIN)
    return found


def _answer_file(directory: str, key: str, node: int) -> str:
    return os.path.join(directory, f"answer-{key}-{node}")


# The launchers' side


def questions_in(data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the content of each question that has come through the fifo."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            asked = json.loads(line)
            if is_key(asked["key"]):
                stacks = [int(rank) for rank in asked["stacks"]]
                yield asked["key"], {"stacks": stacks, "counts": float(asked["counts"])}


def is_key(key: object) -> bool:
    """Return whether this can be a question's key, which becomes part of a file's name."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def answer_of(
    directory: str,
    question: dict[str, Any],
    most_bytes: int,
    counters: JobCounters | None = None,
) -> dict[str, Any]:
    """Return what the ranks of this host do, or the stacks of some of them.

    Args:
        directory: Of this launcher; "": it has none.
        question: `stacks` names ranks whose stacks are wanted; those of other hosts are passed
            over. `counts` is not 0 if sums of calls are wanted, too.
        most_bytes: Of the answer, as JSON.
        counters: Have just counted the calls of the ranks; None: nothing is counted.
    """
    stacks = question["stacks"]
    if not directory:
        return {"error": "its launcher has no place to write"}
    try:
        job = read_job(directory)
        found = hang_report.observe(job, _LAUNCHER_LOOKS)
        if stacks:
            texts = {
                each.record.rank: hang_report.stacks_of(each, directory)
                for each in found
                if each.record.rank in stacks
            }
            return {"stacks": texts}
        answer = encode(found)
        if question["counts"] and counters is not None:
            answer["counted"] = _encoded_counts(count(counters))
        if len(json.dumps(answer)) > most_bytes:
            return {"error": "it has too many ranks and groups for one answer"}
        return answer
    except (OSError, ValueError) as error:
        return {"error": f"its launcher cannot look: {error}"}


def take_answer(directory: str, key: str, node: int, answer: dict[str, Any]) -> None:
    """Give the answer of another host's launcher to the command that has asked."""
    if directory and is_key(key):
        path = _answer_file(directory, key, int(node))
        with contextlib.suppress(OSError):
            with open(f"{path}.new", "w") as file:
                json.dump(answer, file)
            os.replace(f"{path}.new", path)


# Observations as JSON


def encode(activities: Collection[Activity]) -> dict[str, Any]:
    """Return what is known of ranks, without most of their calls: those of a rank take some
    hundred kilobytes."""
    return {
        "host": socket.gethostname(),
        "now_ns": time.monotonic_ns(),
        "ranks": [
            {
                "rank": each.record.rank,
                "pid": each.record.pid,
                "process": each.process,
                "busy": each.busy,
                "call": each.call,
                "last": each.last,
                "dump": None if each.record.dump is None else _shortened(each.record.dump),
            }
            for each in activities
        ],
    }


def _shortened(dump: dict[str, Any]) -> dict[str, Any]:
    """Return each group, with its members if a rank is in one of its calls, and the number of its
    last collective."""
    last: dict[int, int] = {}
    inside = set()
    for call in dump["calls"]:
        if call["seq"]:
            last[call["group"]] = max(call["seq"], last.get(call["group"], 0))
        if call["state"] == "running":
            inside.add(call["group"])
    return {
        "groups": [
            {
                "group": group["group"],
                "name": group["name"],
                "ranks": spans_of(group["ranks"]) if group["group"] in inside else "",
            }
            for group in dump["groups"]
            if group["group"] in last
        ],
        "calls": [{"group": group, "seq": seq} for group, seq in last.items()],
    }


def decode(node: int, answer: dict[str, Any]) -> list[Activity]:
    """Return what another host's launcher has told, with times on this host's clock.

    Args:
        node: The host's number.
    """
    shift = answer["came_ns"] - answer["now_ns"]
    found = []
    for each in answer["ranks"]:
        dump = each["dump"]
        if dump is not None:
            for group in dump["groups"]:
                group["ranks"] = snapshot.ranks_of(group["ranks"]) if group["ranks"] else []
        found.append(
            Activity(
                RankRecord(each["rank"], each["pid"], dump, 0),
                each["process"],
                each["busy"],
                _shifted(each["call"], shift),
                _shifted(each["last"], shift),
                f"{node} {answer['host']}",
                True,
            )
        )
    return found


def _shifted(call: dict[str, Any] | None, shift: int) -> dict[str, Any] | None:
    if call is None:
        return None
    times = ("entered_ns", "began_ns", "ended_ns", "waits_since_ns")
    return call | {name: call[name] + shift for name in times if call[name] is not None}


# Sums of calls as JSON


def count(counters: JobCounters) -> Counted:
    """Count the calls of this host's ranks once more, and return their sums."""
    counters.look()
    return Counted(counters.since_ns, time.monotonic_ns(), counters.totals())


def _encoded_counts(counted: Counted) -> dict[str, Any]:
    return {
        "since_ns": counted.since_ns,
        "at_ns": counted.at_ns,
        "totals": [
            [rank, *(getattr(total.counts, name) for name in Counts.__slots__),
             list(total.awaited_ns.items())]
            for rank, total in counted.totals.items()
        ],
    }  # fmt: skip


def _decoded_counts(told: dict[str, Any]) -> Counted:
    totals = {}
    for rank, calls, nbytes, spent_ns, waited_ns, awaited in told["totals"]:
        counts = Counts()
        counts.add(calls, nbytes, spent_ns, waited_ns)
        totals[int(rank)] = RankTotals(counts, {int(peer): int(ns) for peer, ns in awaited})
    return Counted(int(told["since_ns"]), int(told["at_ns"]), totals)

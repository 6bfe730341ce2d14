"""Rings of calls as dictionaries, and as files."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from cydist import _native

FORMAT = "cydist-recorder"
VERSION = 1
NO_RANK = -1

# The fields of the tuples of `_native.read_ring`.
(NUMBER, BEGAN, SEQ, BYTES, GROUP, NAME, ALGORITHM, DTYPE, OP, ROOT, STATE, AWAITED, SINCE, ENDED,
 WAITED, LONGEST, LONGEST_FOR, QUEUED_NS, BLOCKED, ASYNCHRONOUS) = range(20)  # fmt: skip


def of_memory(memory: Any, sent: dict[int, int] | None = None) -> dict[str, Any]:
    """Return what a ring holds.

    Args:
        memory: Of a process of this host, which may be running.
        sent: Bytes that it has sent to each global rank; None: not known.

    Raises ValueError if it is no ring, or one of another version of cydist.
    """
    return of_ring(*_native.read_ring(memory), sent)


def of_ring(
    head: dict[str, int],
    text: str,
    calls: list[tuple[int, ...]],
    sent: dict[int, int] | None = None,
) -> dict[str, Any]:
    """Return what `_native.read_ring` has read, as JSON holds it."""
    groups, names = _explained(text)
    to_ns = clock(head)
    # The world is the first group that a process makes.
    world = groups.get(1)
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": NO_RANK if world is None else world["ranks"][world["rank"]],
        "world_size": 0 if world is None else world["size"],
        "pid": head["pid"],
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "written_ns": time.monotonic_ns(),
        "written_unix_ns": time.time_ns(),
        "calls_made": head["calls"],
        "sent_bytes": None
        if sent is None
        else [{"rank": rank, "bytes": count} for rank, count in sent.items()],
        "groups": list(groups.values()),
        "calls": [_call(each, groups, names, to_ns) for each in calls],
    }


def clock(head: dict[str, int]) -> Callable[[int], int]:
    """Return a function from a ring's ticks to nanoseconds of this host's CLOCK_MONOTONIC."""
    if not head["clock"]:
        return lambda ticks: ticks
    ticks, now = _native.clock_now()
    rate = (now - head["monotonic_ns"]) / max(1, ticks - head["ticks"])
    # Times lie between the two readings, so an error of either does not grow.
    return lambda then: head["monotonic_ns"] + round((then - head["ticks"]) * rate)


def _explained(text: str) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Return the groups and the names of calls that a ring's text explains."""
    names = dict(enumerate(_native.COLLECTIVE_NAMES))
    names |= {_native.SEND_NAME: "send", _native.RECV_NAME: "recv"}
    groups: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "name":
            number, _, name = rest.partition(" ")
            names[int(number)] = name
        elif kind == "group":
            number, rank, size, backend, spans, *named = rest.split(" ", 5)
            groups[int(number)] = {
                "group": int(number),
                "name": named[0] if named else "",
                "backend": backend,
                "rank": int(rank),
                "size": int(size),
                "ranks": ranks_of(spans),
            }
    return groups, names


def ranks_of(spans: str) -> list[int]:
    """Return the ranks in "0-3,7"."""
    found: list[int] = []
    for span in spans.split(","):
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@cache
def _tables() -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    """Return the names of algorithms, dtypes and operations, by number."""
    return (
        {row[0]: row[1] for row in _native.algorithms()},
        {code: name for name, code in _native.DTYPES.items()},
        {code: name for name, code in _native.OPS.items()},
    )


def _call(
    record: tuple[int, ...],
    groups: dict[int, dict[str, Any]],
    names: dict[int, str],
    to_ns: Callable[[int], int],
) -> dict[str, Any]:
    """Return one call as JSON holds it."""
    algorithms, dtypes, ops = _tables()
    group = groups.get(record[GROUP])
    ranks = [] if group is None else group["ranks"]

    def rank(number: int) -> int | None:
        return ranks[number] if 0 <= number < len(ranks) else None

    state = record[STATE]
    message = record[NAME] in (_native.SEND_NAME, _native.RECV_NAME)
    began = to_ns(record[BEGAN])
    timed = record[ENDED] != 0
    waits = state == _native.RUNNING and record[AWAITED] >= 0
    span = to_ns(record[ENDED]) - began if timed else 0
    rate = span / max(1, record[ENDED] - record[BEGAN]) if timed else _rate(to_ns, record[BEGAN])
    return {
        "number": record[NUMBER],
        "group": record[GROUP],
        "call": names.get(record[NAME], "?"),
        "seq": None if message else record[SEQ],
        "tag": record[SEQ] if message else None,
        "peer": rank(record[ROOT]) if message else None,
        "root": None if message else rank(record[ROOT]),
        "bytes": record[BYTES],
        "dtype": dtypes.get(record[DTYPE]) if record[BYTES] else None,
        "op": ops.get(record[OP]) if record[OP] else None,
        "algorithm": algorithms.get(record[ALGORITHM]) if record[ALGORITHM] else None,
        "state": "failed" if state < 0 else _native.STATES.get(state, "?"),
        "status": _native.STATUS_NAMES.get(state, str(state)) if state < 0 else None,
        "entered_ns": began - record[QUEUED_NS],
        "began_ns": began,
        "ended_ns": to_ns(record[ENDED]) if timed else None,
        "waits_for": rank(record[AWAITED]) if waits else None,
        "waits_since_ns": to_ns(record[SINCE]) if waits else None,
        "waited_ns": round(record[WAITED] * rate),
        "longest_wait_ns": round(record[LONGEST] * rate),
        "longest_wait_for": rank(record[LONGEST_FOR]),
        "asynchronous": bool(record[ASYNCHRONOUS]),
        "caller_waited_ns": round(record[BLOCKED] * rate),
    }


def describe_call(call: dict[str, Any]) -> str:
    """Return a call in a few words: "all_reduce #12 of 4096 bytes, float32"."""
    if call["tag"] is not None:
        way = "to" if call["call"] == "send" else "from"
        peer = "any rank" if call["peer"] is None else f"rank {call['peer']}"
        words = f"{call['call']} {way} {peer}"
    else:
        words = f"{call['call']} #{call['seq']}"
    size = f" of {call['bytes']} bytes, {call['dtype']}" if call["bytes"] else ""
    return words + size


def _rate(to_ns: Callable[[int], int], tick: int) -> float:
    """Return nanoseconds per tick."""
    return (to_ns(tick + 1_000_000) - to_ns(tick)) / 1_000_000


@cache
def _boot_id() -> str:
    """Return what distinguishes this start of this host, whose processes share clocks; "": not
    known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


# Files


def path_in(directory: str, found: dict[str, Any]) -> str:
    """Return the name of a rank's file; of a process that is no rank it has the pid."""
    rank = found["rank"]
    name = f"rank-{rank}.json" if rank != NO_RANK else f"process-{found['pid']}.json"
    return os.path.join(directory, name)


def write(found: dict[str, Any], path: str, format: str) -> None:
    """Write a dump, readable by its owner only. A reader finds the former file or the whole new
    one. Raises OSError."""
    if format == "torch":
        from cydist.recorder.torch_format import encode

        data = encode(found)
    else:
        data = json.dumps(found).encode()
    fd, partial = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".recorder-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def read(path: str) -> dict[str, Any]:
    """Return the dump in a JSON file. Raises OSError, and ValueError if it is none."""
    with open(path, "rb") as file:
        found = json.loads(file.read())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no dump of cydist's recorder")
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')} of the recorder's format, and this cydist "
            f"reads version {VERSION}"
        )
    return found


def read_directory(directory: str) -> list[dict[str, Any]]:
    """Return the dumps of all ranks in a directory, by rank. Raises OSError, and ValueError if
    there is none, or one that is not a dump."""
    names = [name for name in os.listdir(directory) if name.endswith(".json")]
    found = [read(os.path.join(directory, name)) for name in sorted(names) if name[:5] == "rank-"]
    if not found:
        raise ValueError(f"{directory} has no dump of a rank (rank-0.json and so on)")
    return sorted(found, key=lambda dump: dump["rank"])


def export_to_torch(dumps: list[dict[str, Any]], directory: str) -> list[str]:
    """Write the dumps of all ranks into a directory that torch's analyser reads; return the files.
    Raises OSError."""
    os.makedirs(directory, exist_ok=True)
    paths = []
    for found in dumps:
        paths.append(os.path.join(directory, f"rank_{found['rank']}"))
        write(found, paths[-1], "torch")
    return paths

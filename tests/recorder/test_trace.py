"""One timeline of a job: clocks that differ are aligned, and the rank that came late is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cydist.recorder import timeline

DEADLINE = 55.0
MS = 1_000_000


def call(name: str, seq: int, began: int, ended: int | None, **more: Any) -> dict[str, Any]:
    """One call as the recorder writes it; times in nanoseconds."""
    return {
        "number": seq, "group": 1, "call": name, "seq": seq, "tag": None, "peer": None,
        "root": None, "bytes": 8, "dtype": "float64", "op": None, "algorithm": "flat",
        "state": "over", "status": None, "entered_ns": began, "began_ns": began,
        "ended_ns": ended, "waits_for": None, "waits_since_ns": None, "waited_ns": 0,
        "longest_wait_ns": 0, "longest_wait_for": None, **more,
    }  # fmt: skip


def dump(rank: int, calls: list[dict[str, Any]], host: str = "a", **more: Any) -> dict[str, Any]:
    """What a rank of two leaves."""
    group = {"group": 1, "name": "0", "backend": "tcp", "rank": rank, "size": 2, "ranks": [0, 1]}
    return {
        "rank": rank, "host": host, "boot_id": host, "written_ns": 1000 * MS,
        "written_unix_ns": 5000 * MS, "groups": [group], "calls": calls, **more,
    }  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 7_000_000_000, -3_000_000_000])
def test_clocks_are_aligned(ahead: int) -> None:
    """Host b's clock is ahead by so much: the calls of both say so, within the error printed."""
    here = [call("all_reduce", 1, 100, 900), call("barrier", 2, 1000, 1500)]
    there = [call("all_reduce", 1, ahead + 300, ahead + 800),
             call("barrier", 2, ahead + 1200, ahead + 1450)]  # fmt: skip
    clock = timeline.align([dump(0, here), dump(1, there, "b")])["b"]
    assert clock.calls == 2
    assert clock.error is not None
    assert abs(clock.shift + ahead) <= clock.error
    # The second call bounds both sides: 1000 - 1450 and 1500 - 1200.
    assert (clock.shift + ahead, clock.error) == (-75, 375)


def test_without_a_common_call() -> None:
    """The hosts' time of day is all that there is, and the error is not known."""
    other = dump(1, [], "b", written_ns=400 * MS)
    clock = timeline.align([dump(0, [call("broadcast", 1, 0, 5)]), other])["b"]
    assert clock == timeline.Clock(600 * MS, None, 0)


def test_a_call_that_not_all_enter_bounds_nothing() -> None:
    """A root may leave a broadcast before the others come."""
    dumps = [dump(0, [call("broadcast", 1, 0, 5)]), dump(1, [call("broadcast", 1, 9, 10)], "b")]
    assert timeline.align(dumps)["b"].calls == 0


def test_the_late_rank_is_named() -> None:
    """It came last each time, and the others waited for it."""
    early = [call("all_reduce", n, n * 100 * MS, (n * 100 + 60) * MS, waited_ns=50 * MS,
                  longest_wait_ns=50 * MS, longest_wait_for=1) for n in range(1, 5)]  # fmt: skip
    late = [call("all_reduce", n, (n * 100 + 50) * MS, (n * 100 + 60) * MS) for n in range(1, 5)]
    text = timeline.summary(timeline.merge([dump(0, early), dump(1, late)]))
    assert "late, in 4 collectives that all ranks must enter:" in text
    assert "rank 1 on a came last 4 times, in all 100.00 ms after the median rank" in text
    assert "60.00 ms: all_reduce #1 of 8 bytes on rank 0" in text
    assert "longest wait 50.00 ms for rank 1" in text
    assert "rank 0 on a: 4 calls, 240.00 ms in calls (67%), of which it waited 200.00 ms" in text


def test_events_of_the_trace() -> None:
    """Processes are ranks, threads are groups, times are microseconds from the first call on."""
    found = timeline.chrome_trace(
        timeline.merge(
            [
                dump(0, [call("all_reduce", 1, 5000, 9000)]),
                dump(1, [call("barrier", 2, 7000, None)]),
            ]
        )
    )["traceEvents"]
    shown = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert shown == [(0, "all_reduce", 0.0, 4.0), (1, "barrier", 2.0, 0.0)]
    names = {(e["pid"], e["args"].get("name")) for e in found if e["ph"] == "M"}
    assert names >= {(0, "rank 0 on a"), (1, "rank 1 on a"), (0, "group 0"), (1, "group 0")}


STRAGGLER = """import os, time, numpy as np, cydist as dist
dist.init_process_group()
for _ in range(5):
    if os.environ['RANK'] == '1':
        time.sleep(0.05)
    dist.all_reduce(np.ones(4))
dist.destroy_process_group()
"""


def test_the_trace_of_a_job(tmp_path: Path) -> None:
    """From the job with a planted straggler to its name in the summary."""
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(STRAGGLER)

    def python(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE,
            env={**os.environ, "CYDIST_RECORDER": str(run)}, check=True,
        ).stdout  # fmt: skip

    python("-m", "cydist.run", "-n", "3", str(program))
    text = python("-m", "cydist.trace", str(run))
    first = re.search(r"late, in 5 collectives.*\n  rank (\d) on \S+ came last (\d) times", text)
    assert first is not None, text
    assert (first[1], int(first[2]) >= 4) == ("1", True), text
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "all_reduce"} == {0, 1, 2}
    assert len([e for e in events if e["name"] == "all_reduce"]) == 15


def test_a_run_without_dumps(tmp_path: Path) -> None:
    """Said in one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "cydist.trace", str(tmp_path)],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has no dump of a rank" in done.stderr

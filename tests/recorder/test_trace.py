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

from cydist.recorder import snapshot, timeline, timeline_plot

DEADLINE = 55.0
MS = 1_000_000


def call(name: str, seq: int, began: int, ended: int | None, **more: Any) -> dict[str, Any]:
    """One call as the recorder writes it; times in nanoseconds."""
    return {
        "number": seq, "group": 1, "call": name, "seq": seq, "tag": None, "peer": None,
        "root": None, "bytes": 8, "dtype": "float64", "op": None, "algorithm": "flat",
        "state": "over", "status": None, "entered_ns": began, "began_ns": began,
        "ended_ns": ended, "waits_for": None, "waits_since_ns": None, "waited_ns": 0,
        "longest_wait_ns": 0, "longest_wait_for": None, "asynchronous": False,
        "caller_waited_ns": 0, **more,
    }  # fmt: skip


def message(name: str, number: int, peer: int, nbytes: int) -> dict[str, Any]:
    """One message as the recorder writes it."""
    of_call = call(name, number, number, number + 1)
    return {**of_call, "seq": None, "tag": 0, "peer": peer, "bytes": nbytes}


def dump(rank: int, calls: list[dict[str, Any]], host: str = "a", **more: Any) -> dict[str, Any]:
    """What a rank of two leaves."""
    group = {"group": 1, "name": "0", "backend": "tcp", "rank": rank, "size": 2, "ranks": [0, 1]}
    return {
        "rank": rank, "host": host, "boot_id": host, "written_ns": 1000 * MS,
        "written_unix_ns": 5000 * MS, "sent_bytes": [], "groups": [group], "calls": calls, **more,
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


def test_overlap_is_the_share_without_waits_of_the_caller() -> None:
    """A share of the time of asynchronous collectives. Waits of the thread that runs them do not
    count, nor do other calls. Several threads that wait for one count once."""
    calls = [call("all_reduce", 1, 0, 60 * MS, asynchronous=True, waited_ns=50 * MS,
                  caller_waited_ns=10 * MS),
             call("all_reduce", 2, 60 * MS, 80 * MS, asynchronous=True, caller_waited_ns=90 * MS),
             call("broadcast", 3, 90 * MS, 100 * MS, waited_ns=5 * MS)]  # fmt: skip
    text = timeline.summary(
        timeline.merge([dump(0, calls), dump(1, [call("barrier", 9, 0, 5 * MS)])])
    )
    assert "rank 0 on a: 3 calls, 90.00 ms in calls (90%), of which it waited 55.00 ms, " in text
    assert ", overlap 62%\n" in text  # of 80 ms, 10 and 20 were waited for
    assert re.search(r"rank 1 on a: 1 calls.* waited 0 ns\n", text), text


def test_bytes_through_sockets() -> None:
    """By pair of hosts and of ranks, as the ranks have counted them; a killed rank counts none."""
    dumps = [
        dump(0, [], "a", sent_bytes=[{"rank": 1, "bytes": 10}, {"rank": 2, "bytes": 2_000_000}]),
        dump(1, [], "a", sent_bytes=[{"rank": 2, "bytes": 500_000}]),
        dump(2, [], "b", sent_bytes=None),
    ]
    text = timeline.summary(timeline.merge(dumps))
    lines = text.partition("bytes through sockets, from the begin of the job:\n")[2].splitlines()
    assert lines[:5] == [
        "  host a to host b: 2.50 MB",
        "  rank 0 to rank 2: 2.00 MB",
        "  rank 1 to rank 2: 500.00 kB",
        "  rank 0 to rank 1: 10 bytes",
        "  not known of rank 2",
    ]


def test_bytes_of_messages_and_collectives() -> None:
    """Messages by sender and receiver, with their hosts where these differ; collectives by group,
    on each rank."""
    sent = [message("send", n, 1, 1500) for n in range(4)]
    received = [message("recv", n, 0, 1500) for n in range(4)]
    both = [call("all_reduce", n, n, n + 1, bytes=2_000_000) for n in (1, 2)]
    text = timeline.summary(
        timeline.merge([dump(0, [*sent, *both]), dump(1, [*received, *both], "b")])
    )
    lines = text.partition("bytes of the arrays of these calls:\n")[2].splitlines()
    assert lines[:2] == [
        "  rank 0 to rank 1: 6.00 kB in 4 messages, from a to b",
        "  all_reduce of the default group: 4.00 MB in 2 calls, on each of 2 ranks",
    ]


def test_many_links_are_summed_up() -> None:
    """The ten with the most bytes are listed."""
    sent = [message("send", n, n, 100 + n) for n in range(1, 15)]
    text = timeline.summary(timeline.merge([dump(0, sent)]))
    assert "rank 0 to rank 14: 114 bytes in 1 messages" in text
    assert f"  4 more pairs of ranks: {101 + 102 + 103 + 104} bytes" in text


def late_job() -> timeline.Timeline:
    """Rank 1 comes 50 ms late to each of four calls."""
    early = [call("all_reduce", n, n * 100 * MS, (n * 100 + 60) * MS, waited_ns=50 * MS)
             for n in range(1, 5)]  # fmt: skip
    late = [call("all_reduce", n, (n * 100 + 50) * MS, (n * 100 + 60) * MS) for n in range(1, 5)]
    return timeline.merge([dump(0, early), dump(1, late)])


def test_the_plot_shows_the_late_rank() -> None:
    """Bars of calls, of the time, and of the time after the median rank."""
    pytest.importorskip("matplotlib")
    calls, time, late = timeline_plot.figure(late_job()).axes
    assert [bar.get_width() for bar in late.patches] == [0.0, 100.0]
    shown = [[round(bar.get_width(), 1) for bar in group] for group in time.containers]
    # Rank 0: 200 of 360 ms waiting, 40 more in calls; rank 1: 40 of 310 ms in calls.
    assert shown == [[55.6, 0.0], [11.1, 12.9], [33.3, 87.1]]
    widths = [
        [round(path.get_extents().width, 3) for path in bars.get_paths()]
        for bars in calls.collections
    ]
    assert widths == [[0.06] * 4, [0.01] * 4]
    assert [label.get_text() for label in calls.get_yticklabels()] == ["0 on a", "1 on a"]


FORMATS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("ending", FORMATS)
def test_formats_of_plots(tmp_path: Path, ending: str) -> None:
    """By the file's name."""
    pytest.importorskip("matplotlib")
    timeline_plot.draw(late_job(), str(tmp_path / f"plot.{ending}"))
    assert (tmp_path / f"plot.{ending}").read_bytes().startswith(FORMATS[ending])


def test_an_unknown_format_of_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="xyz"):
        timeline_plot.draw(late_job(), str(tmp_path / "plot.xyz"))


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'pip install "cydist\[trace\]"'):
        timeline_plot.draw(late_job(), "plot.png")


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
    text = python("-m", "cydist.trace", str(run), "--plot", str(run / "plot.png"))
    assert (run / "plot.png").stat().st_size > 10_000
    first = re.search(r"late, in 5 collectives.*\n  rank (\d) on \S+ came last (\d) times", text)
    assert first is not None, text
    assert (first[1], int(first[2]) >= 4) == ("1", True), text
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "all_reduce"} == {0, 1, 2}
    assert len([e for e in events if e["name"] == "all_reduce"]) == 15


COUNTED = """import os, signal, numpy as np, cydist as dist
dist.init_process_group()
dist.all_reduce(np.ones(100_000))
dist.barrier()
if os.environ['RANK'] == '1' and 'KILL' in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["well", "killed"])
def test_bytes_through_sockets_of_a_job(tmp_path: Path, end: str) -> None:
    """Those of all ranks, also of one that was killed, and of those that had to end with it."""
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(COUNTED)
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "-n", "3", str(program)], capture_output=True,
        timeout=DEADLINE, check=False,
        env={**os.environ, "CYDIST_RECORDER": str(run), "CYDIST_TRANSPORT": "tcp",
             **({"KILL": "1"} if end == "killed" else {})},
    )  # fmt: skip
    assert (done.returncode == 0) == (end == "well")
    text = timeline.summary(timeline.merge(snapshot.read_directory(str(run))))
    sent = text.partition("bytes through sockets, from the begin of the job:\n")[2]
    pairs = re.findall(r"  rank (\d) to rank \d: [\d.]+ [kM]B", sent.partition("\n\n")[0])
    assert set(pairs) == {"0", "1", "2"}
    assert "not known of" not in text


def test_a_run_without_dumps(tmp_path: Path) -> None:
    """Said in one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "cydist.trace", str(tmp_path)],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has no dump of a rank" in done.stderr

"""`cydist ps`, `hang` and `top`, and reports of hangs, show the ranks of all hosts of a job.

All launchers are on this machine, each with a directory of its own for its files.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launched_hosts import DEADLINE, HostLaunchers

from cydist.launch import all_hosts, hang_report, rank_records, run_files

if TYPE_CHECKING:
    from conftest import Launcher

HERE = os.uname().nodename
# The rank `late` is late with call 3, in a function of its own.
STRAGGLER = (
    "import numpy as np, cydist as dist",
    "def busy_elsewhere():",
    "    pause()",
    "dist.init_process_group()",
    "for _ in range(2):",
    "    dist.all_reduce(np.ones(4))",
    "ready()",
    "if rank == late:",
    "    busy_elsewhere()",
    "dist.all_reduce(np.ones(4))",
)


class Job:
    """A job on hosts, of which one rank is late.

    Args:
        options: Of the launchers, by host.
    """

    def __init__(
        self,
        launcher: Launcher,
        late: int,
        sizes: tuple[int, ...],
        options: Mapping[int, Sequence[str]] = {},
    ) -> None:
        start = HostLaunchers(launcher)
        script = launcher.script(f"late = {late}", *STRAGGLER)
        self.places, self.launchers = [], []
        for node, size in enumerate(sizes):
            place = launcher.directory / f"tmp{node}"
            place.mkdir()
            self.places.append(place)
            self.launchers.append(
                start(node, script, f"-n{size}", *options.get(node, ()), nodes=len(sizes),
                      env={"TMPDIR": str(place)})
            )  # fmt: skip
        for process, size in zip(self.launchers, sizes, strict=True):
            launcher.wait_ready(process, size)

    def ask(self, node: int, command: str) -> str:
        """What the command prints on a host."""
        done = subprocess.run(
            [sys.executable, "-m", "cydist", *command.split()],
            capture_output=True, text=True, timeout=DEADLINE, check=False,
            env={**os.environ, "TMPDIR": str(self.places[node])},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def await_report(self, node: int, command: str, pattern: str) -> str:
        """Ask until the report shows what is expected, since ranks take time to arrive."""
        until = time.monotonic() + DEADLINE
        while not re.search(pattern, text := self.ask(node, command)):
            assert time.monotonic() < until, text
        return text


@contextmanager
def stopped_launcher(launcher: Launcher, job: Job, node: int) -> Iterator[None]:
    """A host's launcher gives no answer."""
    parents = {
        pid: int(re.findall(r"(?m)^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
        for pid in launcher.alive()
    }
    # The user's process is the outer one. Below its child is the inner one, which answers.
    (inner,) = (pid for pid in parents if parents.get(parents[pid]) == job.launchers[node].pid)
    os.kill(inner, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(inner, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1, 2], ids=["on-host-0", "on-host-1", "on-host-2"])
@pytest.mark.parametrize("late", [0, 2], ids=["late-on-host-0", "late-on-host-1"])
def test_one_table_of_all_hosts(launcher: Launcher, late: int, asked: int) -> None:
    """Wherever one asks, and wherever the late rank is: with its stacks."""
    job = Job(launcher, late, (1, 2, 1))
    others = [rank for rank in range(4) if rank != late]
    inside = "".join(
        rf"(?=(?s:.*)^{rank} +\d {HERE} +\d+ +all_reduce #3 of 32 bytes)" for rank in others
    )
    text = job.await_report(asked, "hang", rf"(?m){inside}")
    rows = [line.split() for line in text.splitlines()[2:6]]
    assert [row[:3] for row in rows] == [
        ["0", "0", HERE], ["1", "1", HERE], ["2", "1", HERE], ["3", "2", HERE],
    ]  # fmt: skip
    assert "missing" not in text
    ranks = ", ".join(map(str, others))
    host = rows[late][1]
    named = f"Rank {late} on host {host} ({HERE})"
    assert f"{named} is late: ranks {ranks} are in all_reduce #3 of 32 bytes" in text
    assert f"rank {late} has come to call #2 of it" in text
    assert re.search(
        rf"(?s)stacks of rank {late} on host {host} \({HERE}\) \(pid \d+\):\n.*in busy_elsewhere",
        text,
    ), text
    assert text.count("stacks of rank") == 1
    # Questions leave nothing behind.
    (directory,) = job.places[asked].glob("cydistrun-*")
    assert list(directory.glob("answer-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1], ids=["on-host-0", "on-host-1"])
def test_a_host_that_gives_no_answer(launcher: Launcher, asked: int) -> None:
    """Its launcher is stopped: the table says so, and has the others."""
    job = Job(launcher, 1, (1, 1, 1))
    with stopped_launcher(launcher, job, 2):
        text = job.ask(asked, "ps")
    assert re.findall(r"(?m)^\d", text) == ["0", "1"], text
    assert "The ranks of host 2 are missing: no answer within 3 s.\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1], ids=["on-host-0", "on-host-1"])
def test_top_has_the_ranks_of_all_hosts(launcher: Launcher, asked: int) -> None:
    """Also the share of the time in which ranks of any host waited for the late one."""
    job = Job(launcher, 2, (1, 2))
    late = rf"Rank 2 on host 1 \({HERE}\) is late: the other ranks waited for it \d+% of the time\."
    text = job.await_report(asked, "top --once --interval 0.2", late)
    rows = [" ".join(line.split()) for line in text.splitlines()[1:]]
    waits = r"0 0 \d+% 0% all_reduce #3 of 32 bytes, float64 waits for rank \d"
    expected = [
        "rank host calls/s bytes/s waits awaited call what it does",
        rf"0 0 {HERE} {waits}",
        rf"1 1 {HERE} {waits}",
        rf"2 1 {HERE} 0 0 0% \d+% after all_reduce #2 of 32 bytes, float64 is in the program; .*",
        rf"all 0 {HERE} 0 0 \d+%",
        rf"all 1 {HERE} 0 0 \d+%",
        r"all all hosts 0 0 \d+%",
        late,
    ]
    assert len(rows) == len(expected), text
    for row, pattern in zip(rows, expected, strict=True):
        assert re.fullmatch(pattern, row), (row, pattern)


@pytest.mark.slow
def test_top_names_the_host_that_gives_no_answer(launcher: Launcher) -> None:
    """Its launcher is stopped."""
    job = Job(launcher, 0, (1, 1))
    with stopped_launcher(launcher, job, 1):
        text = job.ask(0, "top --once --interval 0.2")
    assert "The ranks of host 1 are missing: no answer within 3 s.\n" in text


LIMITS = {
    "all-hosts": dict.fromkeys(range(3), ("--report-hangs=0.5",)),
    "host-0": {0: ("--report-hangs=0.5",)},
    "host-2": {2: ("--report-hangs=0.5",)},
}


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("late", [0, 2], ids=["late-on-host-0", "late-on-host-1"])
def test_a_hang_is_reported_once(launcher: Launcher, limits: str, late: int) -> None:
    """By host 0's launcher, with the ranks and stacks of all hosts, whichever launchers were told
    to report."""
    job = Job(launcher, late, (1, 2, 1), LIMITS[limits])
    said = read_until(job.launchers[0], b"in busy_elsewhere")
    for process in job.launchers:
        process.terminate()
    texts = [process.communicate(timeout=DEADLINE)[1] for process in job.launchers]
    text = (said + texts[0]).decode()
    head = "cydistrun: a call takes longer than 0.5 s (--report-hangs):\n"
    assert text.count(head) == 1, text
    assert not any(b"--report-hangs" in each for each in texts[1:]), texts
    host = (0, 1, 1, 2)[late]
    others = ", ".join(str(rank) for rank in range(4) if rank != late)
    assert f"Rank {late} on host {host} ({HERE}) is late: ranks {others} are in all_reduce" in text


def read_until(process: subprocess.Popen[bytes], words: bytes) -> bytes:
    """A launcher's lines on stderr until these words come."""
    assert process.stderr is not None
    seen, until = b"", time.monotonic() + DEADLINE
    while words not in seen:
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, until - time.monotonic()))
        assert ready, seen
        seen += os.read(process.stderr.fileno(), 1 << 16)
    return seen


@pytest.mark.slow
def test_many_ask_at_once(launcher: Launcher) -> None:
    """Questions from all hosts at once are all answered, and the job goes on."""
    job = Job(launcher, 1, (1, 1))
    asking = [
        subprocess.Popen(
            [sys.executable, "-m", "cydist", "ps"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(job.places[number % 2])},
        )
        for number in range(6)
    ]  # fmt: skip
    for each in asking:
        text, _ = each.communicate(timeout=DEADLINE)
        assert re.findall(r"(?m)^\d", text) == ["0", "1"], text
        assert "missing" not in text
    assert [each.poll() for each in job.launchers] == [None, None]


def activity(rank: int, calls: list[dict[str, Any]]) -> hang_report.Activity:
    groups = [{"group": 1, "name": "g", "ranks": [0, 1]}, {"group": 2, "name": "h", "ranks": [0]}]
    record = rank_records.RankRecord(rank, 100, {"groups": groups, "calls": calls}, 9)
    running = [call for call in calls if call["state"] == "running"]
    return hang_report.Activity(record, "S", 0.5, running[-1] if running else None, calls[-1])


def call(group: int, seq: int, state: str) -> dict[str, Any]:
    return {
        "group": group, "call": "all_reduce", "seq": seq, "tag": None, "bytes": 8, "state": state,
        "dtype": "float64", "entered_ns": 5, "began_ns": 7, "ended_ns": None,
        "waits_for": None, "waits_since_ns": 9,
    }  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 10**15, -(10**12)])
def test_what_is_told_is_what_was_seen(ahead: int) -> None:
    """As far as the judgement of who is late needs it: the same ranks, groups and numbers. Times
    are on this host's clock, however far that of the other host is ahead."""
    seen = [
        activity(0, [call(2, 7, "over"), call(1, 4, "over"), call(1, 5, "running")]),
        activity(1, [call(1, 3, "over"), call(1, 4, "over")]),
    ]
    answer = json.loads(json.dumps(all_hosts.encode(seen)))
    answer["now_ns"] += ahead
    answer["came_ns"] = answer["now_ns"] - ahead + 11
    told = all_hosts.decode(3, answer)
    assert hang_report.late(told).keys() == hang_report.late(seen).keys() == {1}
    assert [each.host.split()[0] for each in told] == ["3", "3"]
    assert all(each.remote for each in told)
    shift = told[0].call["began_ns"] - 7  # type: ignore[index]
    assert shift == 11 - ahead
    for there, here in zip(told, seen, strict=True):
        assert (there.process, there.busy, there.record.pid) == ("S", 0.5, 100)
        assert there.last is not None
        assert here.last is not None
        assert there.last["waits_since_ns"] == here.last["waits_since_ns"] + shift
        assert there.last["ended_ns"] is None
    for group in ("g", "h"):
        assert [hang_report._reached(each, group) for each in told] == [
            hang_report._reached(each, group) for each in seen
        ]


def test_an_answer_may_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced by the reason."""
    (tmp_path / run_files.JOB_FILE).write_text(
        json.dumps({"run_id": "x", "launcher": 1, "started": 1, "manager": 1, "manager_started": 1,
                    "world_size": 2, "node": 1,
                    "nodes": 2, "command": [], "pids": {"0": os.getpid()}})
    )  # fmt: skip
    question = {"stacks": [], "counts": 0.0}
    answer = all_hosts.answer_of(str(tmp_path), question, 1 << 19)
    assert [each["rank"] for each in answer["ranks"]] == [0]
    too_long = all_hosts.answer_of(str(tmp_path), question, 20)
    assert too_long == {"error": "it has too many ranks and groups for one answer"}
    assert "error" in all_hosts.answer_of("", question, 1 << 19)


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"[]", b'{"key": "../../etc", "stacks": []}', b'{"key": 7, "stacks": []}',
     b'{"key": "0123456789abcdef"}',
     b'{"key": "0123456789abcdef", "stacks": ["x"], "counts": 0}',
     b'{"key": "0123456789abcdef", "stacks": [], "counts": "x"}'],
)  # fmt: skip
def test_what_is_no_question(line: bytes) -> None:
    """It is passed over, and the question after it is not."""
    good = b'{"key": "00112233445566ff", "stacks": [3], "counts": 2}'
    content = {"stacks": [3], "counts": 2.0}
    assert list(all_hosts.questions_in(line + b"\n" + good)) == [("00112233445566ff", content)]


def test_an_answer_with_a_strange_key_is_dropped(tmp_path: Path) -> None:
    """It would become part of a file's name."""
    (tmp_path / "files").mkdir()
    all_hosts.take_answer(str(tmp_path / "files"), "/../../x", 1, {})
    assert [each.name for each in tmp_path.rglob("*")] == ["files"]
    all_hosts.take_answer(str(tmp_path / "files"), "00112233445566ff", 1, {"a": 1})
    (path,) = (tmp_path / "files").iterdir()
    assert json.loads(path.read_text()) == {"a": 1}

"""How busy the ranks of a running job are: `cydist top`, and metrics for Prometheus."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attacks import free_port

from cydist.launch import live_table, metrics
from cydist.launch.all_hosts import Counted
from cydist.launch.job_counters import RankTotals
from cydist.recorder.counters import Counts

if TYPE_CHECKING:
    from conftest import Launcher

DEADLINE = 50.0
MS = 1_000_000
HERE = socket.gethostname()
CALLS = 40  # of 80 bytes by each rank, before rank 1 stays away from the next
WAITS = f"""import numpy as np, cydist as dist
dist.init_process_group()
for _ in range({CALLS}):
    dist.all_reduce(np.ones(10))
ready()
if rank == 1:
    pause()
dist.all_reduce(np.ones(10))
"""


@pytest.fixture
def place(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where launchers put their files: only those of this test are there."""
    return {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}


def cydist(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command from another terminal."""
    return subprocess.run(
        [sys.executable, "-m", "cydist", *arguments],
        capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **env}, check=False,
    )  # fmt: skip


def start(launcher: Launcher, ranks: int = 2, **env: str) -> subprocess.Popen[bytes]:
    """Start a job whose rank 1 is awaited, and wait until all have made their calls."""
    process = launcher.start("-n", str(ranks), launcher.script(WAITS), env=env)
    launcher.wait_ready(process, ranks)
    return process


def without(library: str, directory: Path) -> str:
    """A PYTHONPATH on which a library is missing."""
    (directory / f"{library}.py").write_text(f"raise ImportError('no {library}')\n")
    return f"{directory}:{Path(__file__).resolve().parents[2]}"


@pytest.mark.parametrize("library", ["with-rich", "without-rich"])
def test_top_names_the_awaited_rank(
    launcher: Launcher, place: dict[str, str], tmp_path_factory: pytest.TempPathFactory,
    library: str,
) -> None:  # fmt: skip
    """In one table for scripts, which needs no library."""
    if library == "without-rich":
        place["PYTHONPATH"] = without("rich", tmp_path_factory.mktemp("path"))
    start(launcher, 3, **place)
    waits = rf"\d 0 0 \d+% 0% all_reduce #{CALLS + 1} of 80 bytes, float64 waits for rank 1"
    late = (
        rf"1 0 0 0% \d+% after all_reduce #{CALLS} of 80 bytes, float64 is in the program; sleeps"
    )
    head = "rank calls/s bytes/s waits awaited call what it does"
    expected = [head, waits, late, waits, r"all 0 0 \d+%", r"Rank 1 is late: .* \d+% of the time\."]
    until = time.monotonic() + DEADLINE
    while True:
        done = cydist("top", "--once", **place)
        # Without the host's name, and with one space between columns.
        _, *lines = (
            " ".join(line.replace(f" {HERE} ", " ").replace(" host ", " ").split())
            for line in done.stdout.splitlines()
        )
        if len(lines) == len(expected) and all(map(re.fullmatch, expected, lines)):
            return
        assert time.monotonic() < until, (done.stdout, done.stderr)


def test_top_refreshes_on_a_terminal(launcher: Launcher, place: dict[str, str]) -> None:
    """Until the job ends. Ctrl-C would end it, too."""
    pytest.importorskip("rich")
    process = start(launcher, **place)
    own, other = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cydist", "top", "--interval", "0.1"], stdout=other, stderr=other,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **place, "COLUMNS": "160", "LINES": "20", "TERM": "xterm"},
    ) as top:  # fmt: skip
        os.close(other)
        until = time.monotonic() + DEADLINE
        seen = b""

        def read_until(pattern: bytes, times: int) -> None:
            nonlocal seen
            while len(re.findall(pattern, seen)) < times:
                ready, _, _ = select.select([own], [], [], max(0.0, until - time.monotonic()))
                assert ready, seen
                seen += os.read(own, 1 << 16)

        read_until(b"Rank 1 is late", 3)
        process.terminate()
        process.communicate(timeout=DEADLINE)
        read_until(b"the job has ended", 1)
        assert top.wait(DEADLINE) == 0
    os.close(own)


def test_top_without_rich(
    launcher: Launcher, place: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The refreshed table says what to install."""
    start(launcher, **place)
    path = without("rich", tmp_path_factory.mktemp("path"))
    done = cydist("top", **place, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'pip install "cydist[live]"' in done.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan"])
def test_an_impossible_interval(interval: str) -> None:
    done = cydist("top", "--interval", interval)
    assert done.returncode == 2
    assert "--interval" in done.stderr


def totals(calls: int, waited: int, awaited: dict[int, int]) -> RankTotals:
    counts = Counts()
    counts.add(calls, 100 * calls, waited, waited)
    return RankTotals(counts, awaited)


def test_rates_are_of_the_time_between() -> None:
    """Not of the time before; a rank that is new has done all in it."""
    before = {0: totals(10, 50 * MS, {1: 50 * MS})}
    after = {0: totals(30, 450 * MS, {1: 450 * MS}), 1: totals(20, 100 * MS, {0: 100 * MS})}
    assert live_table.rates(before, after, {0: 2.0, 1: 2.0}) == {
        0: live_table.Rates(10.0, 1000.0, 0.2, 0.05),
        1: live_table.Rates(10.0, 1000.0, 0.05, 0.2),
    }


def test_a_rank_that_is_not_in_the_table_is_named() -> None:
    """For which those of the table wait, on average."""
    before = {0: totals(0, 0, {}), 1: totals(0, 0, {})}
    after = {0: totals(0, 0, {7: 1000 * MS}), 1: totals(0, 0, {7: 600 * MS, 0: 40 * MS})}
    shares = live_table.awaited_shares(before, after, {0: 1.0, 1: 1.0})
    assert shares == {7: pytest.approx(0.8), 0: pytest.approx(0.04)}
    assert live_table._note(shares, []) == (
        "Rank 7, not in the table, is late: the ranks of the table waited for it 80% of the time.\n"
    )


def test_sums_of_two_countings_are_not_compared() -> None:
    """A launcher that was not asked for long counts from 0: no rate of its ranks is shown."""
    then = {0: Counted(1, 5, {0: totals(9, 0, {})}), 1: Counted(1, 5, {1: totals(9, 0, {})})}
    now = {
        0: Counted(1, 9, {0: totals(10, 0, {})}), 1: Counted(7, 9, {1: totals(1, 0, {})}),
        2: Counted(1, 9, {2: totals(1, 0, {})}),
    }  # fmt: skip
    before, after, seconds = live_table._between(then, now)
    assert (set(before), set(after), seconds) == ({0}, {0}, {0: 4e-9})


ADDRESSES = {
    ":9400": ("127.0.0.1", 9400), "9400": ("127.0.0.1", 9400), "0.0.0.0:1": ("0.0.0.0", 1),
    "[::1]:65535": ("::1", 65535), "node7:0": ("node7", 0),
}  # fmt: skip


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses_of_metrics(text: str) -> None:
    """This host only, unless one is named."""
    assert metrics.address(text) == ADDRESSES[text]


@pytest.mark.parametrize("text", ["", ":", "node7", ":65536", ":-1", ":9400x", "1.5"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no address for metrics: give :9400"):
        metrics.address(text)


def scrape(port: int) -> dict[str, float]:
    """The metrics at a port: values by name and labels, without the job's name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub(r',?run_id="[^"]*"', "", name)] = float(value)
    return found


def await_metrics(port: int, key: str, least: float) -> dict[str, float]:
    """Scrape until a value is reached, since the server starts beside the ranks."""
    until = time.monotonic() + DEADLINE
    while True:
        found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            found = scrape(port)
        if found.get(key, -1.0) >= least:
            return found
        assert time.monotonic() < until, found


@pytest.mark.parametrize("by", ["cydistrun", "command"])
def test_metrics(launcher: Launcher, place: dict[str, str], by: str) -> None:
    """Served by cydistrun, or by a command, while rank 1 is stuck; exact numbers of calls."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    if by == "cydistrun":
        place["CYDIST_METRICS"] = f":{port}"
    process = start(launcher, **place)
    if by == "command":
        command = [sys.executable, "-m", "cydist", "metrics", "--listen", f":{port}"]
        launcher.start_command(*command, env=place)
    labels = 'backend="tcp",call="all_reduce",group="0",rank="0"'
    found = await_metrics(port, f"cydist_calls_total{{{labels}}}", CALLS + 1)
    assert found[f"cydist_calls_total{{{labels}}}"] == CALLS + 1
    assert found[f"cydist_bytes_total{{{labels}}}"] == 80 * (CALLS + 1)
    late = labels.replace('rank="0"', 'rank="1"')
    assert found[f"cydist_calls_total{{{late}}}"] == CALLS
    waited = found[f"cydist_wait_seconds_total{{{labels}}}"]
    assert 0 < waited <= found[f"cydist_call_seconds_total{{{labels}}}"]
    assert found['cydist_running_call_seconds{rank="0"}'] > 0
    assert found['cydist_running_call_seconds{rank="1"}'] == 0
    key = 'cydist_awaited_seconds_total{peer="1"}'
    more = await_metrics(port, key, found[key] + 1e-3)
    assert more[f"cydist_wait_seconds_total{{{labels}}}"] > waited
    assert more['cydist_calls_estimated_total{rank="0"}'] == 0
    process.terminate()
    process.communicate(timeout=DEADLINE)
    until = time.monotonic() + DEADLINE
    while True:
        try:
            scrape(port)
        except OSError:
            break
        assert time.monotonic() < until


@pytest.mark.slow
def test_metrics_after_a_restart(launcher: Launcher, place: dict[str, str]) -> None:
    """On the same port, of the new ranks, which made one call."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    script = launcher.script(
        "import numpy as np, cydist as dist", "dist.init_process_group()",
        "again = os.environ['CYDIST_RESTART_COUNT'] == '1'",
        "for _ in range(1 if again else 3): dist.all_reduce(np.ones(10))",
        "if not again: sys.exit(3)",
        "ready()", "pause()",
    )  # fmt: skip
    process = launcher.start(
        "-n", "1", "--max-restarts=1", "--restart-delay=0", script,
        env={**place, "CYDIST_METRICS": f":{port}"},
    )  # fmt: skip
    launcher.wait_ready(process, 1)
    key = 'cydist_calls_total{backend="tcp",call="all_reduce",group="0",rank="0"}'
    until = time.monotonic() + DEADLINE
    while await_metrics(port, key, 1)[key] != 1:
        assert time.monotonic() < until


TROUBLES = ["no-library", "no-address", "port-in-use"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_job_goes_on_without_metrics(
    launcher: Launcher, place: dict[str, str], tmp_path_factory: pytest.TempPathFactory,
    trouble: str,
) -> None:  # fmt: skip
    """A line says why there are none."""
    if trouble != "no-library":
        pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {**place, "CYDIST_METRICS": f"127.0.0.1:{taken.getsockname()[1]}"}
        if trouble == "no-library":
            env["PYTHONPATH"] = without("prometheus_client", tmp_path_factory.mktemp("path"))
        elif trouble == "no-address":
            env["CYDIST_METRICS"] = "everywhere"
        process = start(launcher, **env)
        expected = {
            "no-library": b'metrics need prometheus_client: pip install "cydist[live]"',
            "no-address": b"'everywhere' is no address for metrics",
            "port-in-use": b"Address already in use",
        }[trouble]
        assert process.stderr is not None
        seen, until = b"", time.monotonic() + DEADLINE
        while expected not in seen:
            ready, _, _ = select.select([process.stderr], [], [], until - time.monotonic())
            assert ready, seen
            seen += os.read(process.stderr.fileno(), 1 << 16)
        assert process.poll() is None


def test_metrics_are_for_this_host_only(launcher: Launcher, place: dict[str, str]) -> None:
    """Unless a host is named."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    start(launcher, **place, CYDIST_METRICS=f":{port}")
    await_metrics(port, 'cydist_running_call_seconds{rank="0"}', 0.0)
    wanted = f"{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{wanted}")}
    assert listening == {f"0100007F:{wanted}"}

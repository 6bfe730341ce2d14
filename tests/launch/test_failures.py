"""When a worker fails: who is named, with what exit code, and what a restart is."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import TYPE_CHECKING

import pytest
from launched_hosts import CAUSE_ENDS_LAST, DEADLINE, FIFOS

if TYPE_CHECKING:
    from conftest import Launcher


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        pytest.param("sys.exit(3)", 3, "exit code 3", id="exit"),
        pytest.param("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL (9)", id="killed"),
        pytest.param("os.abort()", 134, "killed by SIGABRT (6)", id="abort"),
        pytest.param("raise ValueError('why')", 1, "exit code 1", id="exception"),
    ],
)
def test_first_failure(launcher: Launcher, end: str, code: int, words: str) -> None:
    """The launcher ends the others, names rank, host, pid and how, and exits with its code."""
    script = launcher.script("ready()", f"if rank == 1: {end}", "pause()")
    result = launcher.run("-n", "3", script)
    assert result.returncode == code
    pid = re.search(r"\[1\] ready (\d+)", result.stdout)
    who = f"rank 1 (local rank 1, pid {pid and pid[1]}, host {socket.gethostname()})"
    assert f"cydistrun: {who} failed first: {words}\n" in result.stderr
    assert launcher.settles() == 0


def test_traceback_is_repeated(launcher: Launcher) -> None:
    """The summary at the end holds the traceback of the rank that failed first."""
    script = launcher.script("if rank == 1: raise ValueError('why')", "pause()")
    summary = launcher.run("-n", "2", script).stderr.partition("the last words of rank 1:\n")[2]
    assert summary.startswith("    Traceback (most recent call last):\n")
    assert "    ValueError: why\n" in summary


RAISES = (
    "import cydist, numpy as np",
    "cydist.init_process_group('tcp')",
    "cydist.all_reduce(np.zeros(3))",
    "if rank == 1:",
    "    try: raise KeyError('cause')",
    "    except KeyError as error: raise ValueError('why') from error",
    "cydist.all_reduce(np.zeros(3))",
)


def test_a_rank_that_raised_is_not_said_not_to_have_failed(launcher: Launcher) -> None:
    """Although the launcher ended it, since its end took long."""
    os.mkfifo(launcher.directory / "raised")
    script = launcher.script(
        "import atexit",
        "if rank == 0:",
        "    def slow_end():",
        "        open('raised', 'w').close()",
        "        pause()",
        "    atexit.register(slow_end)",
        "    raise ValueError('one of two')",
        "if rank == 1:",
        "    open('raised').close()",
        "    raise ValueError('the other')",
        "pause()",
    )
    err = launcher.run("-n", "3", script).stderr
    assert err.count("ValueError: one of two") == 1
    assert re.findall("cydistrun: (.*) did not fail and had to end with it", err) == ["rank 2"]


def holding_for(seconds: float) -> tuple[str, ...]:
    """The launcher's command, with another limit on how long a traceback is held."""
    return (
        sys.executable,
        "-c",
        "from cydist.launch import __main__, failures, output\n"
        f"output.RECENT_SECONDS = output.WRITES_ON_SECONDS = {seconds}\n"
        "raise SystemExit(__main__.main())",
    )


def test_a_failure_is_shown_once(launcher: Launcher) -> None:
    """With the exception that caused it; ranks that only learn of it show no traceback."""
    script = launcher.script(*RAISES)
    process = launcher.start_command(*holding_for(DEADLINE), "-n", "3", script)
    err = process.communicate(timeout=DEADLINE)[1].decode()
    assert err.count("ValueError: why") == 1
    assert err.count("KeyError: 'cause'") == 1
    assert err.count("Traceback") == 2
    assert "failed first: exit code 1\ncydistrun: the last words of rank 1:\n    Traceback" in err


def test_a_traceback_that_was_shown_is_not_repeated(launcher: Launcher) -> None:
    """The rank seemed to go on after its traceback, and ended by it after all."""
    os.mkfifo(launcher.directory / "shown")
    script = launcher.script(
        "import atexit",
        "atexit.register(lambda: open('shown').close())",
        "raise ValueError('why')",
    )
    process = launcher.start_command(*holding_for(0), "-n", "1", script)
    assert process.stderr is not None
    shown = [process.stderr.readline()]
    while shown[-1] not in (b"[0] ValueError: why\n", b""):
        shown.append(process.stderr.readline())
    assert shown[0] == b"[0] Traceback (most recent call last):\n"
    assert shown[-1] == b"[0] ValueError: why\n"
    (launcher.directory / "shown").open("w").close()
    err = process.communicate(timeout=DEADLINE)[1].decode()
    assert err.endswith(
        "failed first: exit code 1\n"
        "cydistrun: the last words of rank 0, whose traceback is above:\n"
        "    ValueError: why\n"
    )


def test_ranks_with_the_same_error_have_a_line_each(launcher: Launcher) -> None:
    """One traceback, and the message of each other rank."""
    script = launcher.script(
        "import cydist, numpy as np",
        "cydist.init_process_group('tcp')",
        "cydist.all_reduce(np.zeros(3 + (rank == 1)))",
    )
    err = launcher.run("-n", "3", script).stderr
    assert err.count("Traceback") == 1
    first = re.search(r"rank (\d) \(local rank .* failed first", err)
    assert first is not None
    others = re.findall(r"^cydistrun: rank (\d): cydist.MismatchError: all_reduce #1 ", err, re.M)
    assert sorted([first[1], *others]) == ["0", "1", "2"]


def test_another_error_is_shown_whole(launcher: Launcher) -> None:
    """Of a rank that fails for a reason of its own."""
    for name in FIFOS:
        os.mkfifo(launcher.directory / name)
    script = launcher.script(
        "import atexit",
        "@atexit.register",
        "def await_the_other():  # which has printed its traceback, too",
        f"    open('{FIFOS[0]}', 'rw'[rank]).close()",
        f"    open('{FIFOS[1]}', 'wr'[rank]).close()",
        "if rank == 0: raise IndexError('another')",
        "raise ValueError('why')",
    )
    err = launcher.run("-n", "2", script).stderr
    assert err.count("Traceback") == 2
    assert err.count("ValueError: why") == err.count("IndexError: another") == 1


def test_a_traceback_of_a_rank_that_goes_on_is_shown(launcher: Launcher) -> None:
    """In its place, with the rank's later lines after it, while the rank runs."""
    os.mkfifo(launcher.directory / "shown")
    script = launcher.script(
        "import traceback",
        "try: raise ValueError('caught')",
        "except ValueError: traceback.print_exc()",
        "print('later', file=sys.stderr)",
        "open('shown').close()",
    )
    process = launcher.start("-n", "1", script)
    assert process.stderr is not None
    lines = [process.stderr.readline().decode()]
    while lines[-1] not in ("[0] later\n", ""):
        lines.append(process.stderr.readline().decode())
    assert lines[0] == "[0] Traceback (most recent call last):\n"
    assert lines[-2:] == ["[0] ValueError: caught\n", "[0] later\n"]
    (launcher.directory / "shown").open("w").close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_a_logged_traceback_at_the_end_is_shown(launcher: Launcher, code: int) -> None:
    """Of a rank that ends by itself, well or not."""
    script = launcher.script(
        "import traceback",
        "try: raise ValueError('caught')",
        "except ValueError: traceback.print_exc()",
        f"sys.exit({code})",
    )
    result = launcher.run("-n", "1", script)
    assert result.returncode == code
    assert result.stderr.count("ValueError: caught") == 1


def test_full_tracebacks(launcher: Launcher) -> None:
    """With CYDIST_TRACEBACK=full every rank's output is shown as it comes."""
    env = {"CYDIST_TRACEBACK": "full"}
    err = launcher.run("-n", "3", launcher.script(*RAISES), env=env).stderr
    assert "\n[1] ValueError: why\n" in err
    assert "\n    ValueError: why\n" in err


def test_cause_comes_before_its_consequence(launcher: Launcher) -> None:
    """A rank that raised first but took longer to end than the rank that noticed is the cause."""
    for name in FIFOS:
        os.mkfifo(launcher.directory / name)
    script = launcher.script(*CAUSE_ENDS_LAST)
    result = launcher.run("-n", "2", script)
    assert "rank 1 (local rank 1" in result.stderr.partition(" failed first")[0].splitlines()[-1]
    assert result.returncode == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("end", "words"),
    [
        pytest.param("pass", "ended without destroy_process_group", id="without a goodbye"),
        pytest.param("cydist.destroy_process_group()", "and left", id="with a goodbye"),
    ],
)
def test_a_rank_that_left_early_with_exit_code_0(
    launcher: Launcher, transport: str, end: str, words: str
) -> None:
    """It has not failed, so another is named; the launcher says that it had ended before that."""
    script = launcher.script(
        "import cydist, numpy as np, select",
        "cydist.init_process_group()",
        "pids = [None] * 3",
        "cydist.all_gather_object(pids, os.getpid())",
        "if rank == 1:",
        f"    {end}",
        "    sys.exit(0)",
        "try:",  # otherwise the launcher may have to end it
        "    select.select([os.pidfd_open(pids[1])], [], [], 60)",
        "except ProcessLookupError: pass",
        "cydist.all_reduce(np.zeros(3))",
    )
    result = launcher.run("-n", "3", script, env={"CYDIST_TRANSPORT": transport})
    assert result.returncode == 1
    assert words in result.stderr
    assert "it died" not in result.stderr
    assert (
        "cydistrun: rank 1 had ended before it, with exit code 0, and others still needed it\n"
    ) in result.stderr


def test_error_file(launcher: Launcher) -> None:
    """What a worker leaves in its error file is shown instead of the end of its stderr."""
    script = launcher.script(
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:",
        "    inner = {'message': 'm', 'extraInfo': {'py_callstack': 'what it left'}}",
        "    json.dump({'message': inner}, file)",
        "print('noise', file=sys.stderr)",
        "sys.exit(4)",
    )
    result = launcher.run(script)
    assert result.returncode == 4
    assert "last words of rank 0:\n    what it left\n" in result.stderr


def test_restarts(launcher: Launcher) -> None:
    """A failure restarts all ranks with a new secret and the next number, to the limit."""
    script = launcher.script(
        "secret = os.read(int(os.environ['CYDIST_SECRET_FD'].split(':')[0]), 100).hex()",
        "print(os.environ['CYDIST_RESTART_COUNT'], secret)",
        "sys.exit(rank and 7)",
    )
    result = launcher.run("-n", "2", "--max-restarts=2", "--restart-delay=0", script)
    assert result.returncode == 7
    attempts = re.findall(r"\[1\] (\d) (\w+)", result.stdout)
    assert [number for number, _ in attempts] == ["0", "1", "2"]
    assert len({secret for _, secret in attempts}) == 3
    assert result.stderr.count("failed first: exit code 7") == 3


def test_deaf_ranks_do_not_hide_a_failure(launcher: Launcher) -> None:
    """Where a rank fails and the others ignore SIGTERM, they are killed after the grace period,
    what they started too, and the exit code is that of the rank that failed."""
    os.mkfifo(launcher.directory / "deaf")
    script = launcher.script(
        "if rank == 1:",
        "    open('deaf').close()",
        "    sys.exit(5)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    pause()",
        "open('deaf', 'w').close()",
        "pause()",
    )
    result = launcher.run("-n", "2", "--shutdown-timeout", "0.2", script)
    assert result.returncode == 5
    assert "rank 1 (local rank 1" in result.stderr
    assert "cydistrun: rank 0 did not end within 0.2 s: killed" in result.stderr
    assert launcher.settles() == 0


@pytest.mark.parametrize(
    "restarts", [10, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_restarts_leak_nothing(launcher: Launcher, restarts: int) -> None:
    """After many restarts the launcher's processes have as many descriptors as after the first
    ones, and no zombies, though every worker leaves orphans, living and dead."""
    script = launcher.script(
        "if os.fork() == 0:",
        "    if os.fork() == 0: os._exit(0)",
        "    os.fork()",
        "    pause()",
        "inner = os.getppid()",
        "def parent(pid):",
        "    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])",
        "three = (parent(parent(inner)), parent(inner), inner)",
        "held = [len(os.listdir(f'/proc/{pid}/fd')) for pid in three]",
        "below = [open(f'/proc/{pid}/task/{pid}/children').read().split() for pid in three]",
        "print('held', *held, 'below', *map(len, below))",
        "sys.exit(1)",
    )
    options = (f"--max-restarts={restarts}", "--restart-delay=0")
    process = launcher.start(*options, script)
    out, _ = process.communicate(timeout=500)
    seen = re.findall(r"held (.*) below (.*)", out.decode())
    assert len(seen) == restarts + 1
    assert {below for _, below in seen} == {"1 1 1"}
    for held in zip(*(map(int, held.split()) for held, _ in seen), strict=True):
        # A connection of the ranks before may not be closed yet.
        assert min(held[restarts // 2 :]) <= min(held[: restarts // 2])
    assert launcher.settles() == 0


def test_success_after_restart(launcher: Launcher) -> None:
    """A job whose second attempt ends well ends well."""
    script = launcher.script("sys.exit(os.environ['CYDIST_RESTART_COUNT'] == '0')")
    assert launcher.run("-n", "2", "--max-restarts=3", script).returncode == 0


def test_redirected_traceback(launcher: Launcher) -> None:
    """The traceback of a rank whose stderr went to a file is in the summary all the same."""
    script = launcher.script("raise ValueError('why')")
    result = launcher.run("--redirects=2", "--log-dir", str(launcher.directory / "logs"), script)
    assert "    ValueError: why\n" in result.stderr

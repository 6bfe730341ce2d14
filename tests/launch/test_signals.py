"""However a job ends, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Launcher


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signals_are_forwarded(launcher: Launcher, number: signal.Signals, code: int) -> None:
    """Workers get the signal that the launcher got; the exit code tells it."""
    script = launcher.script(
        f"signal.signal({int(number)}, lambda *_: sys.exit(print('got it')))", "ready()", "pause()"
    )
    process = launcher.start("-n", "2", script)
    launcher.wait_ready(process, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [b"[0] got it", b"[1] got it"]
    assert (process.returncode, err.decode()) == (
        code, f"cydistrun: {number.name}: ending all ranks\n",
    )  # fmt: skip
    assert launcher.settles() == 0


def test_hangup_under_nohup(launcher: Launcher) -> None:
    """A launcher that was started with SIGHUP ignored goes on when the terminal hangs up."""
    script = launcher.script("ready()", "sys.stdin.readline()", "print('end')")
    process = launcher.start(
        script,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.wait_ready(process, 1)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(b"\n", timeout=60)[0] == b"[0] end\n"
    assert process.returncode == 0


def test_grace_is_bounded(launcher: Launcher) -> None:
    """Workers that ignore SIGTERM are killed after the grace period, their children too."""
    script = launcher.script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "os.fork()", "ready()", "pause()"
    )
    process = launcher.start("-n", "2", "--shutdown-timeout", "0.2", script)
    launcher.wait_ready(process, 4)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"ranks 0, 1 did not end within 0.2 s: killed" in err
    assert launcher.settles() == 0


def test_second_interrupt_kills(launcher: Launcher) -> None:
    """Ctrl-C a second time does not wait for the grace period."""
    script = launcher.script(
        "signal.signal(signal.SIGINT, ready)",
        "ready()", "pause()",
    )  # fmt: skip
    process = launcher.start("-n", "2", "--shutdown-timeout", "1000", script)
    launcher.wait_ready(process, 2)
    process.send_signal(signal.SIGINT)
    launcher.wait_ready(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert launcher.settles() == 0


def state(pid: int) -> str:
    """T for a stopped process, S for one that sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_suspend_and_resume(launcher: Launcher) -> None:
    """Ctrl-Z stops the workers with the launcher, and they go on with it."""
    process = launcher.start("-n", "2", launcher.script("ready()", "pause()"))
    pids = [*launcher.wait_ready(process, 2), process.pid]
    for number, expected in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
        process.send_signal(number)
        launcher.until(lambda expected=expected: {state(pid) for pid in pids} == {expected})
        assert [state(pid) for pid in pids] == [expected] * 3


@pytest.mark.parametrize(
    "end", ["pass", "os.kill(os.getppid(), signal.SIGKILL)"], ids=["success", "inner process dies"]
)
def test_unauthenticated_clients_are_left_alone(launcher: Launcher, end: str) -> None:
    """Children of a shell that became cydistrun by exec are none of the job's."""
    command = f"sleep 1000 >&- 2>&- & echo ready $!; exec {sys.executable} -m cydist.run"
    process = launcher.start_shell(f"{command} {launcher.script(end)}")
    launcher.wait_ready(process, 1)
    process.communicate(timeout=60)
    assert launcher.settles(1) == 1


# A worker with a child, and a grandchild that left its session and its parent.
FAMILY = (
    "if os.fork() == 0:",
    "    if os.fork() == 0:",
    "        os.setsid()",
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "ready()",
    "pause()",
)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def halves(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """The pids of the launcher's processes."""
    guard = child_of(process.pid)
    return {"outer": process.pid, "guard": guard, "inner": child_of(guard)}


def kill_at_once(pids: list[int]) -> None:
    """End them so that none sees the end of another: stop all before the first is killed."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.fixture
def family(launcher: Launcher, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job of two ranks, each with a child and a daemon. Nothing of it is left in the end."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ("-n", "2", "--shutdown-timeout", "0.1", launcher.script(*FAMILY))
    process = launcher.start(*options, env={"TMPDIR": str(temporary)})
    launcher.wait_ready(process, 6)
    assert launcher.settles(9) == 9
    assert len(list(temporary.iterdir())) == 1
    yield process
    process.communicate(timeout=60)
    assert launcher.settles() == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("victim", ["outer", "guard", "inner", "job", "worker"])
def test_sigkill_leaves_nothing(family: subprocess.Popen[bytes], victim: str) -> None:
    """A process that is killed with SIGKILL, no process of the job is left, daemons included, and
    no file."""
    found = halves(family)
    leaders = Path(f"/proc/{found['inner']}/task/{found['inner']}/children").read_text().split()
    match victim:
        case "job":
            os.killpg(family.pid, signal.SIGKILL)
        case "worker":
            os.kill(int(leaders[0]), signal.SIGKILL)
        case _:
            os.kill(found[victim], signal.SIGKILL)
    family.wait(60)
    assert family.returncode == (-9 if victim in ("outer", "job") else 137)


@pytest.mark.parametrize(
    "victims", [("outer", "inner"), ("outer", "guard"), ("guard", "inner")], ids=" and ".join
)
def test_two_of_the_launchers_processes_are_killed_at_once(
    family: subprocess.Popen[bytes], victims: tuple[str, str]
) -> None:
    """The third ends the job, daemons included, and removes its files."""
    found = halves(family)
    kill_at_once([found[victim] for victim in victims])


@pytest.mark.parametrize("pattern", [b"cydist", b"launch"])
def test_a_launcher_that_is_killed_by_pattern_leaves_nothing(
    launcher: Launcher, family: subprocess.Popen[bytes], pattern: bytes
) -> None:
    """As `pkill -KILL -f cydist` does it, which looks at command lines."""
    # The ranks' own command lines name a file in the test's directory.
    ours = [pid for pid in launcher.alive() if pid in halves(family).values()]
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ours}
    matching = [pid for pid, line in lines.items() if pattern in line]
    assert len(ours) == 3
    assert len(matching) == 2
    kill_at_once(matching)


def test_the_guard_says_whose_it_is(family: subprocess.Popen[bytes]) -> None:
    """In `ps`: its name and command line, in which no word is the launcher's."""
    guard = halves(family)["guard"]
    shown = Path(f"/proc/{guard}/cmdline").read_bytes().rstrip(b"\0").decode()
    assert shown == f"guard of process {family.pid}"
    assert Path(f"/proc/{guard}/comm").read_text() == "job-guard\n"
    family.kill()


def test_sigterm_ends_the_whole_family(launcher: Launcher) -> None:
    """SIGTERM of the launcher ends what workers started too, also what ignores it or left the
    session, and the launcher ends with 143."""
    process = launcher.start("-n", "2", "--shutdown-timeout", "5", launcher.script(*FAMILY))
    launcher.wait_ready(process, 6)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert launcher.settles() == 0


def test_nothing_outlives_success(launcher: Launcher) -> None:
    """A background process that workers left behind ends with the job."""
    script = launcher.script("if os.fork() == 0: os.setsid(); signal.pause()")
    assert launcher.run("-n", "2", script).returncode == 0
    assert launcher.settles() == 0


def test_no_files_are_left(launcher: Launcher, tmp_path: Path) -> None:
    """Temporary files are gone after success, failure and SIGKILL alike."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    launcher.run("-n", "2", launcher.script("pass"), env=env)
    launcher.run(
        "-n", "2", launcher.script("open(os.environ['CYDIST_ERROR_FILE'], 'w'); 1/0"), env=env
    )
    process = launcher.start("-n", "2", launcher.script("ready()", "pause()"), env=env)
    launcher.wait_ready(process, 2)
    process.kill()
    assert launcher.settles() == 0
    assert list(temporary.iterdir()) == []

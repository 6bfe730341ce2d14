"""However a job ends, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    command = f"sleep 1000 >&- 2>&- & echo ready $!; exec {sys.executable} -m cydist.launch"
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


@pytest.mark.parametrize("victim", ["launcher", "inner process", "job", "worker"])
def test_sigkill_leaves_nothing(launcher: Launcher, victim: str) -> None:
    """A rank that is killed with SIGKILL, no process of the job is left, daemons included."""
    process = launcher.start("-n", "2", "--shutdown-timeout", "0.1", launcher.script(*FAMILY))
    workers = launcher.wait_ready(process, 6)
    inner = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    leaders = Path(f"/proc/{inner}/task/{inner}/children").read_text().split()
    assert launcher.settles(8) == 8
    match victim:
        case "launcher":
            process.kill()
        case "inner process":
            os.kill(inner, signal.SIGKILL)
        case "job":
            os.killpg(process.pid, signal.SIGKILL)
        case "worker":
            assert int(leaders[0]) in workers
            os.kill(int(leaders[0]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert launcher.settles() == 0
    assert process.returncode == (137 if victim in ("inner process", "worker") else -9)


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

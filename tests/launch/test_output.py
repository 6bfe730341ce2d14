"""What becomes of the workers' output: lines, prefixes, log files, readers of every kind."""

from __future__ import annotations

import os
import re
import select
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cydist.launch import output

if TYPE_CHECKING:
    from conftest import Launcher


def test_streams_stay_apart(launcher: Launcher) -> None:
    """Workers' stdout goes to stdout, their stderr to stderr, each line with its rank."""
    script = launcher.script("print('out')", "print('err', file=sys.stderr)")
    result = launcher.run("-n", "2", script)
    assert sorted(result.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(result.stderr.splitlines()) == ["[0] err", "[1] err"]


def test_lines_stay_whole(launcher: Launcher) -> None:
    """Lines that are written in pieces, by all ranks at once, come out whole."""
    script = launcher.script(
        "for _ in range(200):",
        "    for _ in range(7):",
        "        os.write(1, b'%d' % rank * 100)",
        r"    os.write(1, b'\n')",
    )
    lines = launcher.run("-n", "3", script).stdout.splitlines()
    assert sorted(lines) == [f"[{rank}] {str(rank) * 700}" for rank in range(3) for _ in range(200)]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        pytest.param(rb"a\nlast", b"[0] a\n[0] last\n", id="no line end"),
        pytest.param(rb"\r 10%\r 20%\r100%\ndone\n", b"[0] 100%\n[0] done\n", id="progress bar"),
        pytest.param(rb"dos\r\n", b"[0] dos\n", id="crlf"),
        pytest.param(rb"\n\n", b"[0] \n[0] \n", id="empty lines"),
        pytest.param(rb"\xff\x00\xfe\n\x80", b"[0] \xff\x00\xfe\n[0] \x80\n", id="binary"),
    ],
)
def test_odd_output(launcher: Launcher, written: bytes, shown: bytes) -> None:
    """Output of any kind arrives, byte for byte; a bar that redraws itself as its last state."""
    script = launcher.script(f"os.write(1, b'{written.decode()}')")
    assert launcher.start(script).communicate(timeout=60) == (shown, b"")


def test_much_output(launcher: Launcher) -> None:
    """A slow reader of much output loses none of it."""
    script = launcher.script("for i in range(100000): os.write(1, b'%099d\\n' % i)")
    process = launcher.start("-n", "1", "--no-prefix", script)
    # Bigger than every buffer on the way, and nobody reads yet while it is written.
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    out, _ = process.communicate(timeout=60)
    assert out.splitlines() == [b"%099d" % i for i in range(100000)]


def test_reader_that_goes_away(launcher: Launcher) -> None:
    """`cydistrun ... | head -1` ends: the workers see the closed pipe, as without a launcher."""
    script = launcher.script("while True: print('x' * 1000)")
    process = launcher.start(script)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    process.stdout = None
    assert process.wait(60) != 0
    assert launcher.settles() == 0


def logs_of(directory: Path) -> dict[str, str]:
    """{path below the run's directory: text} of all log files; checks that all are private."""
    (run,) = directory.iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    return {str(path.relative_to(run)): path.read_text() for path in files}


@pytest.mark.parametrize(
    ("options", "console", "logged"),
    [
        pytest.param(
            ["--redirects", "3"], [], ["0/stderr", "0/stdout", "1/stderr", "1/stdout"],
            id="redirect all",
        ),
        pytest.param(
            ["-r", "0:1"], ["[0] err", "[1] err", "[1] out"], ["0/stdout"], id="redirect one",
        ),
        pytest.param(
            ["--tee=0:3,1:2"], ["[0] err", "[0] out", "[1] err", "[1] out"],
            ["0/stderr", "0/stdout", "1/stderr"], id="tee",
        ),
        pytest.param(
            ["-r", "3", "-t", "1"], ["[0] out", "[1] out"],
            ["0/stderr", "0/stdout", "1/stderr", "1/stdout"], id="tee of what is redirected",
        ),
        pytest.param(
            ["--local-ranks-filter", "1"], ["[1] err", "[1] out"],
            ["0/stderr", "0/stdout", "1/stderr", "1/stdout"], id="filter and logs",
        ),
    ],
)  # fmt: skip
def test_log_files(
    launcher: Launcher, options: list[str], console: list[str], logged: list[str]
) -> None:
    """Streams go to the console, to private log files, or to both, as asked for."""
    logs = launcher.directory / "logs"
    script = launcher.script("print('out')", "print('err', file=sys.stderr)")
    result = launcher.run("-n", "2", "--log-dir", str(logs), *options, script)
    assert sorted((result.stdout + result.stderr).splitlines()) == console
    texts = {"stdout": "out\n", "stderr": "err\n"}
    assert logs_of(logs) == {
        f"attempt_0/{path}.log": texts[path.removeprefix("0/").removeprefix("1/")]
        for path in logged
    }


def test_terminal_is_coloured_and_live(launcher: Launcher) -> None:
    """On a terminal prefixes have colours, and a prompt without line end shows at once."""
    ours, theirs = os.openpty()
    script = launcher.script("print('line')", "print('prompt> ', end='', flush=True)", "pause()")
    process = launcher.start(
        script, stdout=theirs, stderr=theirs, stdin=theirs, env={"TERM": "xterm", "NO_COLOR": ""}
    )
    os.close(theirs)
    seen = b""
    end = time.monotonic() + 60
    while b"prompt> " not in seen:
        assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(ours, 4096)
    process.terminate()
    process.wait(60)
    os.close(ours)
    assert b"\x1b[36m[0]\x1b[0m line\r\n" in seen


def test_standing_reader_does_not_stop_the_job(launcher: Launcher) -> None:
    """Workers run on, after a while, when nobody reads the launcher's output any more."""
    done = launcher.directory / "done"
    script = launcher.script(
        "for _ in range(250): os.write(1, (b'x' * 99 + b'\\n') * 655)", f"open({str(done)!r}, 'w')"
    )
    process = launcher.start(script)
    end = time.monotonic() + 60
    while not done.exists() and time.monotonic() < end:
        select.select([], [], [], 0.05)
    assert done.exists()
    out, _ = process.communicate(timeout=60)
    lines = out.splitlines()
    (notice,) = [line for line in lines if line.startswith(b"cydistrun: ")]
    dropped = re.match(rb"cydistrun: dropped (\d+) lines here, which had no reader", notice)
    assert dropped is not None
    assert len(lines) - 1 + int(dropped[1]) == 250 * 655


class Held:
    """The stderr of a worker that began a traceback at time 0, and what the console shows of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.shown: list[bytes] = []
        console: Any = SimpleNamespace(write=self.shown.append, draft=lambda *_: None)
        monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.lines = output.Lines(b"", console, holds=True)
        self.lines.add(output.TRACEBACK + b":\n  ...\nValueError: why\n")


def test_a_traceback_waits_for_the_end_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take almost RECENT_SECONDS. From then on no time shows it."""
    held = Held(monkeypatch)
    held.now = output.RECENT_SECONDS * 0.99
    held.lines.release_if_due()
    held.lines.process_ended()
    held.now *= 1000
    held.lines.release_if_due()
    held.lines.add(b"last\n")
    assert held.shown == []


def test_a_traceback_of_a_silent_process_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is too old to be what ends the process."""
    held = Held(monkeypatch)
    held.now = held.lines.release_if_due()
    held.lines.release_if_due()
    assert b"ValueError: why\n" in b"".join(held.shown)


def test_a_process_that_writes_on_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second after its traceback, which comes first."""
    held = Held(monkeypatch)
    held.now = output.WRITES_ON_SECONDS
    held.lines.add(b"later\n")
    assert b"".join(held.shown).endswith(b"ValueError: why\nlater\n")

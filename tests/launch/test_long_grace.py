"""Grace periods and delays of weeks and without end, and a launcher that outlives an exception."""

from __future__ import annotations

import math
import signal
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Launcher

LONG = [25 * 86400, 180_000_000, 1e9, sys.float_info.max, math.inf]
long = pytest.mark.parametrize("seconds", LONG, ids=str)


@long
def test_a_long_grace_is_one(launcher: Launcher, seconds: float) -> None:
    """A worker that takes its time to end is not killed: it says its last word."""
    script = launcher.script(
        "signal.signal(signal.SIGTERM, lambda *_: (print('said'), sys.exit(0)))",
        "ready()", "pause()",
    )  # fmt: skip
    process = launcher.start("-n", "1", "--shutdown-timeout", str(seconds), script)
    launcher.wait_ready(process, 1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, b"[0] said\n")
    assert err == b"cydistrun: SIGTERM: ending all ranks\n"


@long
def test_a_long_delay_of_a_restart_is_one(launcher: Launcher, seconds: float) -> None:
    """The ranks are not started again before it is over, and a signal ends it."""
    arguments = ("-n", "1", "--max-restarts", "1", "--restart-delay", str(seconds))
    process = launcher.start(*arguments, launcher.script("sys.exit(3)"))
    assert process.stderr is not None
    while b"starting 1 rank again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, b"", b"")


@pytest.mark.parametrize("option", ["--shutdown-timeout", "--restart-delay"])
@pytest.mark.parametrize("value", ["nan", "-1", "-inf"])
def test_what_is_no_time_is_refused(launcher: Launcher, option: str, value: str) -> None:
    """By the option's name."""
    done = launcher.run("-n", "1", f"{option}={value}", launcher.script("pass"))
    assert done.returncode == 2
    assert f"{option} must not be negative, nor NaN" in done.stderr


# cydistrun in which one method raises once.
BROKEN = """
import sys
from cydist.launch import job, output, ssh
from cydist.launch.__main__ import main

def once(real, raised=[]):
    def call(*args):
        if not raised:
            raised.append(True)
            raise ZeroDivisionError("injected")
        return real(*args)
    return call

{name} = once({name})
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("output.OutputStreams.hold_back", "-n1"),
        ("output.OutputStreams.read", "-n1"),
        ("job.Job._advance", "-n1"),
        ("job.Job._reap", "-n1"),
        ("output.OutputStreams.read", "--hosts=localhost:1"),
        ("ssh._Starter._round", "--hosts=localhost:1"),
    ],
)
def test_the_launcher_survives_a_round(launcher: Launcher, name: str, options: str) -> None:
    """The workers' output and exit codes arrive, and it says what happened, once."""
    broken = launcher.directory / "broken.py"
    broken.write_text(BROKEN.format(name=name))
    script = launcher.script("print('here', flush=True)", "sys.exit(7)")
    process = launcher._start([sys.executable, str(broken), options, script])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, b"[0] here\n")
    assert err.count(b"cydist: cydistrun goes on after an exception") == 1
    assert b"ZeroDivisionError: injected" in err

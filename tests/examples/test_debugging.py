"""docs/guide/debugging.md finds the planted faults of docs/examples/faulty.py: its commands print
what it shows, but for numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cydist.launch.live_table import HEAD

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guide/debugging.md").read_text()
DEADLINE = 50.0
# Commands of the page, as this Python runs them.
PROGRAMS = {
    "cydistrun": [sys.executable, "-m", "cydist.run"],
    "cydist": [sys.executable, "-m", "cydist"],
    "python": [sys.executable],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to work in, from which the page's commands find the program. Launchers put their
    files into it, so that they are alone there."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def shown(command: str) -> tuple[str, str]:
    """A whole command of the page that begins so, and what the page shows below it."""
    found = re.search(rf"```console\n(?:\$ .*\n)*?\$ ({re.escape(command)}.*)\n([^$`]*)", PAGE)
    assert found is not None, command
    return found[1], found[2]


def start(command: str, place: Path) -> subprocess.Popen[str]:
    """Start a command of the page."""
    words = command.split()
    more = {"TMPDIR": str(place / "tmp"), "PYTHONPATH": str(ROOT)}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        more[name] = value
    return subprocess.Popen(
        [*PROGRAMS[words[0]], *words[1:]], cwd=place, env={**os.environ, **more},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(command: str, place: Path) -> str:
    """All that a command of the page prints."""
    with start(command, place) as process:
        out, err = process.communicate(timeout=DEADLINE)
    return out + err


@contextmanager
def running(command: str, place: Path) -> Iterator[None]:
    """Keep a command running meanwhile."""
    with start(command, place) as process:
        try:
            yield
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE)


def without_numbers(text: str) -> list[str]:
    """The lines of a text, each once, sorted: without what differs from run to run.

    Rank 2 stays, for it has the fault; other ranks may change places.
    """
    lines = set()
    for line in text.replace(f"{os.uname().nodename} ", "vm ").splitlines():
        line = re.sub(r"(?<=^job )\w+|0x\w+", "ID", line)
        line = re.sub(r'"[^"]*(?=/docs/examples)', '"...', line)
        line = re.sub(r"[\d.]+ (s|ms|us|ns)\b", "T", line)
        line = re.sub(r"(?<![Rr]ank )(?<!^)\b[\d.]+( [kMG])?%?(?=\W|$)", "N", line)
        line = re.sub(r"([Rr]anks?) (?!2\b)\d+", r"\1 N", line)
        lines.add(" ".join(line.split()))
    return sorted(lines - {"...", ""})


def await_shown(command: str, place: Path) -> str:
    """Repeat a command until it prints what the page shows; return it."""
    whole, expected = shown(command)
    until = time.monotonic() + DEADLINE
    while without_numbers(said := run(whole, place)) != without_numbers(expected):
        assert time.monotonic() < until, (without_numbers(said), without_numbers(expected))
    return said


def test_a_job_hangs(place: Path) -> None:
    """`cydist hang` names rank 2, the place in its program, and the ranks that wait."""
    command, _ = shown("cydistrun --nproc-per-node 4 docs/examples/faulty.py hang")
    with running(command, place):
        said = await_shown("cydist hang", place)
    (line,) = re.findall(r'faulty\.py", line (\d+) in load_batch', said)
    source = (ROOT / "docs/examples/faulty.py").read_text().splitlines()
    assert source[int(line) - 1].strip() == "time.sleep(600)"


def test_the_page_s_lines_are_those_of_the_program() -> None:
    """Of the stacks and of the error, which the page shows with numbers."""
    source = (ROOT / "docs/examples/faulty.py").read_text().splitlines()
    places = re.findall(r'faulty\.py", line (\d+) in (\w+|<module>)', PAGE)
    calls = [source[int(line) - 1].strip() for line, _ in places]
    assert calls[0] == "time.sleep(600)"
    assert [call.partition("(")[0].split()[-1] for call in calls[1:]] == [
        "load_batch", "train", "main",
    ]  # fmt: skip
    (line,) = re.findall(r"in its call at faulty\.py:(\d+);", PAGE)
    assert "dist.all_reduce(gradient" in source[int(line) - 1]


def test_a_rank_is_slow_while_it_runs(place: Path) -> None:
    """`cydist top` names rank 2, for which the others wait."""
    command, _ = shown("cydistrun --nproc-per-node 4 docs/examples/faulty.py slow --steps")
    whole, expected = shown("cydist top --once")
    assert re.search(r"(?m)^Rank 2 is late: the other ranks waited for it \d+% of the", expected)
    assert expected.splitlines()[1].split() == " ".join(HEAD).split()
    until = time.monotonic() + DEADLINE
    with running(command, place):
        while "Rank 2 is late: " not in (said := run(whole, place)):
            assert time.monotonic() < until, said
    waits = {rank: int(share) for rank, share in re.findall(r"(?m)^(\d) .*?(\d+)%", said)}
    assert min(waits, key=lambda rank: waits[rank]) == "2", said


def test_a_rank_was_slow(place: Path) -> None:
    """The summary of the trace names rank 2, and the page shows what it looks like."""
    command, _ = shown("CYDIST_RECORDER=calls cydistrun --nproc-per-node 4 docs/examples/faulty.py")
    run(command, place)
    whole, expected = shown("python -m cydist.trace calls")
    said = run(whole, place)
    late = re.search(r"late, in 50 collectives.*\n  rank (\d) on \S+ came last (\d+) times", said)
    assert late is not None, said
    assert (late[1], int(late[2]) > 25) == ("2", True), said
    # Others may be last at times, and wait longest for others.
    optional = r".*( on rank .*longest wait|rank N on vm came last).*"
    lines = {line for line in without_numbers(said) if not re.fullmatch(optional, line)}
    on_page = {line for line in without_numbers(expected) if not re.fullmatch(optional, line)}
    assert lines == on_page
    waits = {int(rank): float(share) for rank, share in
             re.findall(r"rank (\d) on .* in calls \((\d+)%\)", said)}  # fmt: skip
    assert min(waits, key=lambda rank: waits[rank]) == 2, said


def test_ranks_differ(place: Path) -> None:
    """The check names rank 2, from the first step on."""
    command, expected = shown("cydistrun --nproc-per-node 4 docs/examples/faulty.py start")
    said = run(command, place)
    assert sorted(said.splitlines()) == sorted(expected.splitlines())


def test_a_nan_is_named(place: Path) -> None:
    """With rank, index and line."""
    command, expected = shown("CYDIST_CHECK_NAN=1 cydistrun --nproc-per-node 4")
    said = run(command, place)
    (error,) = [line for line in expected.splitlines() if line != "..."]
    assert error in said.splitlines()


@pytest.mark.parametrize("fault", ["none", "nan"])
def test_without_the_setting_the_loop_goes_on(place: Path, fault: str) -> None:
    """Without a fault it finds the weights; a NaN spreads to all ranks."""
    said = run(f"cydistrun --nproc-per-node 4 docs/examples/faulty.py {fault}", place)
    errors = re.findall(r"rank \d: error (\S+)", said)
    assert len(errors) == 4, said
    assert len(set(errors)) == 1
    assert (errors[0] == "nan") == (fault == "nan")
    assert fault == "nan" or float(errors[0]) < 0.1

"""Debug levels that a program sets, and dist.breakpoint: pdb on one rank, while the others wait."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

LIMIT = 100  # seconds for a job that takes two


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment says nothing, and nothing stays chosen."""
    for name in ("CYDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    dist.set_debug_level_from_env()
    yield
    monkeypatch.undo()
    dist.set_debug_level_from_env()


def is_compared() -> list[bool]:
    """Make a call whose shapes differ, of one size; whether it is an error on each rank."""

    def body(rank: int) -> bool:
        try:
            dist.all_reduce(np.ones((2, 3) if rank else (3, 2)))
        except dist.MismatchError:
            return True
        return False

    return run_threads(body, 2)


def test_it_is_off_by_default() -> None:
    assert dist.get_debug_level() is dist.DebugLevel.OFF
    assert is_compared() == [False, False]


@pytest.mark.parametrize("level", dist.DebugLevel, ids=lambda level: level.name)
def test_later_groups_get_the_level(level: dist.DebugLevel) -> None:
    """Only DETAIL compares calls before they run."""
    dist.set_debug_level(level)
    assert dist.get_debug_level() is level
    assert is_compared() == [level is dist.DebugLevel.DETAIL] * 2


@pytest.mark.parametrize("variable", ["CYDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def test_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """It counts at all times, but after set_debug_level, and again after
    set_debug_level_from_env."""
    monkeypatch.setenv(variable, "detail")
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert is_compared() == [False, False]
    dist.set_debug_level_from_env()
    assert is_compared() == [True, True]


def test_groups_keep_their_level() -> None:
    """One group compares its calls, and the next does not."""

    def body(rank: int) -> list[bool]:
        groups = []
        for level in (dist.DebugLevel.DETAIL, dist.DebugLevel.OFF):
            dist.barrier()
            dist.set_debug_level(level)
            dist.barrier()
            groups.append(dist.new_group())
        return [group.checks is not None for group in groups]

    assert run_threads(body, 2) == [[True, False]] * 2


def test_torchs_levels_are_taken() -> None:
    torch = pytest.importorskip("torch.distributed")
    dist.set_debug_level(torch.DebugLevel.DETAIL)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL


@pytest.mark.parametrize("wrong", [2, "DETAIL", None, "x"])
def test_what_is_no_level(wrong: object) -> None:
    """As torch's call; the level stays."""
    with pytest.raises(TypeError, match="is no level"):
        dist.set_debug_level(wrong)  # type: ignore[arg-type]
    assert dist.get_debug_level() is dist.DebugLevel.OFF


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYDIST_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="LOUD"):
        dist.set_debug_level_from_env()


PROGRAM = """
import numpy as np
import cydist as dist
dist.init_process_group("tcp")
rank = dist.get_rank()
x = np.array([rank + 1])
{stop}
y = x + 1
dist.all_reduce(y)
print("sum", y, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that stops on rank 0."""
    path = tmp_path / "stops.py"
    path.write_text(PROGRAM.format(stop="dist.breakpoint()"))
    return path


def start(program: Path) -> subprocess.Popen[str]:
    """Start two ranks."""
    return subprocess.Popen(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", str(program)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_commands_are_taken_at_the_users_line(program: Path) -> None:
    """Its variables are there, and can be changed; `continue` lets all ranks go on."""
    job = start(program)
    output, _ = job.communicate("p 'x is', x\nx[:] = 40\ncontinue\n", timeout=LIMIT)
    assert job.returncode == 0, output
    assert "stops.py(7)" in output
    assert "('x is', array([1]))" in output
    assert output.count("sum [44]") == 2


def test_other_ranks_wait_longer_than_the_groups_timeout(program: Path) -> None:
    """That is 10 ms here, and rank 0 imports pdb meanwhile."""
    stop = "world.set_timeout(0.01)\ndist.breakpoint()\nworld.set_timeout(60)"
    program.write_text(PROGRAM.format(stop=f"world = dist.group.WORLD\n{stop}"))
    job = start(program)
    output, _ = job.communicate("import sqlite3\ncontinue\n", timeout=LIMIT)
    assert job.returncode == 0, output
    assert output.count("sum [5]") == 2


def test_steps_go_on_at_the_next_line(program: Path) -> None:
    """`next` stops at the following lines of the program, once the other ranks have gone on."""
    job = start(program)
    output, _ = job.communicate("next\nnext\np 'y is', y\ncontinue\n", timeout=LIMIT)
    assert job.returncode == 0, output
    assert "-> y = x + 1" in output
    assert "-> dist.all_reduce(y)" in output
    assert "('y is', array([2]))" in output
    assert output.count("sum [5]") == 2


def test_quit_ends_the_job(program: Path) -> None:
    """The rank ends by BdbQuit, and the launcher ends the other."""
    job = start(program)
    output, _ = job.communicate("quit\n", timeout=LIMIT)
    assert job.returncode != 0
    assert "BdbQuit" in output


def test_the_builtin_may_stand_for_it(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONBREAKPOINT=cydist.breakpoint."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "cydist.breakpoint")
    program.write_text(PROGRAM.format(stop="breakpoint()"))
    job = start(program)
    output, _ = job.communicate("p 'x is', x\ncontinue\n", timeout=LIMIT)
    assert job.returncode == 0, output
    assert "('x is', array([1]))" in output


def test_calls_can_be_skipped(program: Path) -> None:
    """The first calls of one line pass, and need no input."""
    program.write_text(
        PROGRAM.format(stop="for i in range(3):\n    dist.breakpoint(rank=0, skip=2)")
    )
    job = start(program)
    output, _ = job.communicate("p 'i is', i\ncontinue\n", timeout=LIMIT)
    assert job.returncode == 0, output
    assert "('i is', 2)" in output
    assert output.count("sum [5]") == 2


def test_a_rank_without_input(program: Path) -> None:
    """cydistrun gives its own to rank 0: an error that says so, and the job ends."""
    program.write_text(PROGRAM.format(stop="dist.breakpoint(1)"))
    job = start(program)
    output, _ = job.communicate("continue\n", timeout=LIMIT)
    assert job.returncode != 0
    assert "breakpoint: rank 1 has no input to take commands from" in output
    assert "start that launcher on a terminal" in output


def test_there_is_no_such_rank() -> None:
    """On every rank, and the group goes on."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="breakpoint: rank must be from 0 to 1, not 2"):
            dist.breakpoint(2)
        dist.barrier()

    run_threads(body, 2)

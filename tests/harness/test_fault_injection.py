"""ThreadJob's faults: ranks that are slow or die, each time in the same way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import Faults, Killed, ThreadJob, Weather, faults, run_threads

ROOT = Path(__file__).resolve().parents[2]
Jobs = Callable[..., ThreadJob]


def total(group: Any = None) -> float:
    """The number of ranks."""
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    return float(x[0])


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm", "derived"])
def test_others_learn_of_a_rank_that_is_killed(thread_job: Jobs, backend: str) -> None:
    """They get PeerFailedError in the call in which it dies; it has its end as a result."""

    def body(rank: int) -> Any:
        for turn in range(10):
            try:
                assert total() == 2
            except dist.PeerFailedError as error:
                return turn, error.ranks
        return None

    job = thread_job(2, backend, faults=Faults(kill={1: 4}))
    survivor, end = job.run(body)
    assert survivor == (3, (1,))
    assert isinstance(end, Killed)
    assert (end.rank, end.call, end.name) == (1, 4, "all_reduce")
    assert str(end) == "rank 1 was killed in its call 4, all_reduce"


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm"])
def test_survivors_go_on(thread_job: Jobs, backend: str) -> None:
    """shrink_group makes a world of those that are left, also for the next body."""

    def body(rank: int) -> Any:
        try:
            for _ in range(10):
                total()
        except dist.PeerFailedError:
            dist.shrink_group()
        return total()

    job = thread_job(3, backend, faults=Faults(kill={1: 3}))
    first, end, last = job.run(body)
    assert (first, last) == (2.0, 2.0)
    assert [2.0, end, 2.0] == job.run(lambda rank: total())


def objects() -> None:
    dist.all_gather_object([None] * 2, 1)


def send_or_receive() -> None:
    me = dist.get_rank()
    (dist.send if me else dist.recv)(np.ones(1), 1 - me)


def asynchronous() -> None:
    work: Any = dist.all_reduce(np.ones(1), async_op=True)
    work.wait()


CALLS: dict[str, tuple[Callable[[], object], int, str]] = {
    "collective": (total, 3, "all_reduce"),
    "collective of a named group": (lambda: total(dist.group.WORLD), 3, "all_reduce"),
    "collective of another group": (lambda: total(dist.new_group()), 3, "all_reduce"),
    "message": (send_or_receive, 3, "send"),
    "asynchronous": (asynchronous, 3, "all_reduce"),
    "objects": (objects, 5, "all_gather_object"),
}


@pytest.mark.parametrize("backend", ["inproc", "derived"])
@pytest.mark.parametrize(("call", "number", "name"), CALLS.values(), ids=CALLS)
def test_every_kind_of_call_counts(
    thread_job: Jobs, backend: str, call: Callable[[], object], number: int, name: str
) -> None:
    """Rank 1 dies in the third call, of which one on objects has two parts."""
    made = [0, 0]

    def body(rank: int) -> None:
        for _ in range(5):
            call()
            made[rank] += 1

    with pytest.raises(dist.PeerFailedError):
        thread_job(2, backend, faults=Faults(kill={1: number})).run(body)
    assert made == [2, 2]


def test_the_seed_decides(thread_job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays, and a death within a range, are the same for the same seed, and of the length
    that was asked for."""

    def life(seed: int) -> tuple[list[float], int]:
        slept: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(faults.time, "sleep", slept.append)
            job = thread_job(1, faults=Faults(seed, delay=3.0, kill={0: range(100, 200)}))
            (end,) = job.run(lambda rank: [total() for _ in range(200)])
        return slept, end.call

    first, again, other = life(1), life(1), life(2)
    assert first == again
    assert first[0][:100] != other[0][:100]
    assert 100 <= first[1] < 200
    assert first[1] == len(first[0])
    assert 0 <= min(first[0]) < 0.5
    assert 2.5 < max(first[0]) <= 3.0


def test_ranks_have_their_own_delays() -> None:
    """Not all are late at the same time."""
    storm = Faults(3, kill={0: range(1, 10**6), 1: range(1, 10**6)})
    assert storm.on(0)._last != storm.on(1)._last


def test_results_are_right_under_faults(thread_job: Jobs) -> None:
    """Delays change when things happen, and nothing else."""

    def body(rank: int) -> list[float]:
        return [total() for _ in range(20)]

    assert [[3.0] * 20] * 3 == thread_job(3, faults=Faults(7, delay=0.002)).run(body)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"delay": -1.0}, "delay must be"),
        ({"delay": float("nan")}, "delay must be"),
        ({"kill": {0: 0}}, r"kill\[0\] must be"),
        ({"kill": {0: range(0)}}, r"kill\[0\] must be"),
        ({"kill": {2: 1}}, r"kills ranks \[2\], and there are 0 to 1"),
    ],
    ids=str,
)
def test_faults_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    """ValueError, before any rank starts."""
    with pytest.raises(ValueError, match=words):
        ThreadJob(2, faults=Faults(**arguments))


def test_the_former_names_work() -> None:
    """`Weather` is the class, and the argument `faults` is taken for `faults`, not beside it."""
    assert Weather is Faults

    def body(rank: int) -> None:
        with pytest.raises(dist.PeerFailedError):
            dist.barrier()

    _, end = run_threads(body, 2, weather=Weather(kill={1: 1}))
    assert isinstance(end, Killed)
    with pytest.raises(TypeError, match="weather is the former name of faults"):
        ThreadJob(2, faults=Faults(), weather=Faults())


def test_the_page_shows_it(tmp_path: Path) -> None:
    """docs/guide/testing.md's test passes where cydist is installed, and needs nothing else."""
    page = (ROOT / "docs/guide/testing.md").read_text()
    program = re.search(r"`(test_\w+\.py)`:\n\n```python\n(.*?)```", page, re.S)
    assert program is not None
    (tmp_path / program[1]).write_text(program[2])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "_cydist_pytest", "-q", program[1]],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "10 passed" in ended.stdout


def test_pytest_starts_without_cydist() -> None:
    """The plugin that pytest loads wherever cydist is installed imports neither it nor numpy."""
    program = "import sys, _cydist_pytest; print({'cydist', 'numpy'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
        timeout=50, check=True,
    )  # fmt: skip
    assert said.stdout == "set()\n"

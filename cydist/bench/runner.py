"""The driver: every worker in turn, round by round, case by case."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cydist.bench.cases import Case
from cydist.bench.workers import WorkerError

ROUND_NS = 30_000_000  # seconds of a round, unless one call takes longer
MOST_ITERATIONS = 1_000_000
SAMPLED_NS = 20_000  # calls that take longer are timed one by one


class Participant(Protocol):
    """The driver's interface to a participant."""

    name: str

    def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's answer."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass
class Measurements:
    """The measurements of one participant in one cell.

    Attributes:
        rounds: Seconds per call of the slowest rank, by round.
        calls: Seconds of each call on the slowest rank; empty for short calls.
        wrong: Number of wrong elements on all ranks.
        failure: Why there are no measurements, or no further ones.
    """

    algorithm: str = ""
    iterations: int = 0
    rounds: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    wrong: int = 0
    failure: str = ""

    @property
    def median(self) -> float:
        """Return the median of the seconds per call."""
        return statistics.median(self.rounds)

    @property
    def p99(self) -> float | None:
        """Return the seconds that 99 % of the calls stay below; None if calls are too short to
        time."""
        if not self.calls:
            return None
        return sorted(self.calls)[min(len(self.calls) - 1, int(len(self.calls) * 0.99))]


Row = dict[str, Measurements]  # by participant
ProgressCallback = Callable[[Case, str], None]


def run_cases(
    cases: Iterable[Case],
    workers: Sequence[Participant],
    rounds: int,
    progress: ProgressCallback = lambda case, what: None,
) -> Iterator[tuple[Case, Row]]:
    """Run every cell in every participant, and yield each cell's row as soon as it is done.

    A participant that fails leaves its reason in the row. A lost one is left out of later cells.
    """
    lost: set[str] = set()
    for case in cases:
        row: Row = {}
        for worker in workers:
            if worker.name in lost:
                continue
            progress(case, f"{worker.name}: preparing")
            measurements = row[worker.name] = Measurements()
            with _noting(worker, measurements, lost):
                _prepare(worker, case, measurements)
        for number in range(rounds):
            running = [each for each in workers if each.name in row]
            # Each is first in turn, because one after a quiet moment is faster.
            shift = number % max(1, len(running))
            for worker in running[shift:] + running[:shift]:
                measurements = row[worker.name]
                if measurements.failure:
                    continue
                progress(case, f"{worker.name}: round {number + 1} of {rounds}")
                with _noting(worker, measurements, lost):
                    _round(worker, measurements, checked=number == 0)
        yield case, row


@contextlib.contextmanager
def _noting(worker: Participant, measurements: Measurements, lost: set[str]) -> Iterator[None]:
    """Record a participant's failure in its measurements, and in `lost` if it is gone."""
    try:
        yield
    except WorkerError as error:
        measurements.failure = str(error)
        if error.lost:
            lost.add(worker.name)
            worker.close()


def _prepare(worker: Participant, case: Case, measurements: Measurements) -> None:
    """Make the arrays, check single calls, and find the number of calls in a round."""
    answers = worker.command(
        {"do": "case", "op": case.op, "count": case.count, "dtype": case.dtype}
    )
    measurements.algorithm = answers[0]["algorithm"]
    measurements.wrong = sum(answer["wrong"] for answer in answers) + _passed(answers)

    def slowest(iterations: int) -> int:
        command = {"do": "round", "iterations": iterations, "sampled": False, "checked": False}
        return max(int(answer["ns"]) for answer in worker.command(command))

    measurements.iterations = calibrate(slowest)


def calibrate(time_of: Callable[[int], int]) -> int:
    """Return the number of calls in a round. `time_of` gives the nanoseconds of a number of
    calls."""
    iterations = 1
    while True:
        ns = time_of(iterations)
        if ns >= ROUND_NS // 4 or iterations >= MOST_ITERATIONS:
            return max(1, min(round(iterations * ROUND_NS / max(1, ns)), MOST_ITERATIONS))
        iterations = min(10 * iterations, MOST_ITERATIONS)


def _passed(answers: Sequence[dict[str, Any]]) -> int:
    """Return the number of barriers that some rank left before another had entered."""
    if "entered" not in answers[0]:
        return 0
    entered = zip(*(answer["entered"] for answer in answers), strict=True)
    left = zip(*(answer["left"] for answer in answers), strict=True)
    return sum(max(came) > min(went) for came, went in zip(entered, left, strict=True))


def _round(worker: Participant, measurements: Measurements, checked: bool) -> None:
    sampled = measurements.iterations * SAMPLED_NS < ROUND_NS
    answers = worker.command(
        {
            "do": "round",
            "iterations": measurements.iterations,
            "sampled": sampled,
            "checked": checked,
        }
    )
    measurements.wrong += sum(answer["wrong"] for answer in answers)
    if sampled:
        slowest = max(sum(answer["each_ns"]) for answer in answers)
        each = zip(*(answer["each_ns"] for answer in answers), strict=True)
        measurements.calls += [max(call) / 1e9 for call in each]
    else:
        slowest = max(answer["ns"] for answer in answers)
    measurements.rounds.append(slowest / measurements.iterations / 1e9)


def ratio(ours: Measurements, theirs: Measurements) -> float:
    """Return the median over the rounds of cydist's time divided by the peer's."""
    pairs = zip(ours.rounds, theirs.rounds, strict=False)
    return statistics.median(our / their for our, their in pairs)

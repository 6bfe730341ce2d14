"""Measure for --tune: every algorithm at every size, and segments, each in up to two passes.

The second pass measures only what the first would change. It runs in processes of its own, because
the placement of a process's cores and pages decides some races, unless a launcher started the job.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cydist.bench import fit
from cydist.bench.cases import Case, cases
from cydist.bench.fit import Ratios, Size
from cydist.bench.report import geometric_mean
from cydist.bench.runner import Participant, ProgressCallback, Row, run_cases
from cydist.bench.workers import WorkerError
from cydist.tuning import table as tuning_table

DTYPE, ITEMSIZE = "float32", 4
# Algorithms slower than the fastest by this factor in the first round are left out afterwards.
TOO_SLOW = 2.0
SEGMENTS = tuple(1 << power for power in range(14, 21))  # 16 KiB to 1 MiB
SEGMENTED = 1 << 20  # calls of this many bytes have several segments of any size


class OutOfTime(Exception):
    """The time limit has passed."""


class Candidate:
    """The ranks of one worker with separate settings: a participant of `compare`.

    Shared ranks have the same memory for every algorithm.
    """

    def __init__(self, name: str, worker: Participant, **settings: str) -> None:
        self.name = name
        self._participant, self._settings = worker, settings

    def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the settings, then return every rank's answer."""
        self._participant.command({"do": "configure", "settings": self._settings})
        return self._participant.command(command)

    def reset(self) -> None:
        """End the settings: a driver that is one of the ranks chooses by them, too."""
        self._participant.command({"do": "configure", "settings": {}})

    def close(self) -> None:
        """Do nothing: the worker is ended by the code that started it."""


@dataclass(frozen=True)
class Measure:
    """Groups of `ranks` ranks to measure with.

    Attributes:
        passes: The workers of the first and the second pass; may be the same.
        deadline: On time.monotonic's clock; no measurement starts after it.
        hosts, consecutive, placement: As table.choose takes them.
    """

    passes: Sequence[Participant]
    ranks: int
    windows: bool
    rounds: int
    deadline: float
    progress: ProgressCallback
    hosts: bool = False
    consecutive: bool = False
    placement: str = ""

    def names(self, op: str) -> list[str]:
        """Return all algorithms that can run."""
        even = op not in tuning_table.UNSIZED
        return tuning_table.candidates(
            op, self.ranks, self.windows, even=even, hosts=self.hosts,
            consecutive=self.consecutive,
        )  # fmt: skip

    def rivals(self, op: str, nbytes: int, in_force: str) -> list[str]:
        """Return the algorithm in force and those to compare with it.

        If it is an algorithm that chooses during the job, those it chooses between are left out:
        which one is faster changes within the hour, with the host's placement of cores.
        """
        known: list[str] = []
        if (op, in_force) in tuning_table.ADAPTIVE:
            fallback = tuning_table.fallback(
                op, in_force, nbytes, self.ranks, even=True, commutative=True
            )
            known = ["direct", fallback]
        return [name for name in self.names(op) if name not in known]

    def in_force(self, op: str, nbytes: int) -> str:
        """Return the present algorithm."""
        return tuning_table.choose_for_equal_blocks(
            op, nbytes, self.ranks, self.windows, hosts=self.hosts,
            consecutive=self.consecutive, placement=self.placement,
        )  # fmt: skip

    def segment_in_force(self) -> int:
        """Return the present unit of pipelining."""
        return tuning_table.segment_bytes(
            self.ranks, self.windows, hosts=self.hosts, placement=self.placement
        )

    def cases(self, op: str, sizes: Sequence[int]) -> list[Case]:
        """Return the cases to measure of a collective; none if there is no choice."""
        found = list(cases([op], sizes, DTYPE, ITEMSIZE, self.ranks))
        return found if len(self.names(op)) > 1 else []

    def sizes(self, op: str, sizes: Sequence[int]) -> list[Size]:
        """Return a Size for each size, or one for all if table.py does not know a call's size.

        Raises OutOfTime, and WorkerError if an algorithm failed or was wrong.
        """
        wanted = self.cases(op, sizes)
        in_force = [self.in_force(op, case.nbytes) for case in wanted]
        first = [self._measure_all(case) for case in wanted]
        found = as_counted(op, wanted, in_force, [first])
        chosen = fit.decide(found)
        if chosen == [size.in_force for size in found]:
            return found
        second = [self._measure_again(case, set(chosen), ratios)
                  for case, ratios in zip(wanted, first, strict=True)]  # fmt: skip
        return as_counted(op, wanted, in_force, [first, second])

    def _measure_all(self, case: Case) -> Ratios:
        """Measure every algorithm in one round, and the promising ones in the others."""
        in_force = self.in_force(case.op, case.nbytes)
        running = self._candidates(
            case.op, self.rivals(case.op, case.nbytes, in_force), self.passes[0]
        )
        first = self._row(case, running, 1)
        fastest = min(measurements.median for measurements in first.values())
        hopeful = [
            each for each in running
            if each.name == in_force or first[each.name].median < TOO_SLOW * fastest
            or case.op in tuning_table.UNSIZED
        ]  # fmt: skip
        row = first if len(hopeful) == 1 else first | self._row(case, hopeful, self.rounds)
        slow = {each.name for each in running} - {each.name for each in hopeful}
        return {name: ratios(first if name in slow else row, name, in_force) for name in first}

    def _measure_again(self, case: Case, chosen: set[str], before: Ratios) -> Ratios:
        """Measure those of `chosen` that were not clearly slower."""
        in_force = self.in_force(case.op, case.nbytes)
        size = Size(case.nbytes, in_force, [before])
        names = [
            name for name in before
            if name == in_force or (name in chosen and (
                size.cost(name) <= 0 or case.op in tuning_table.UNSIZED))
        ]  # fmt: skip
        if len(names) < 2:
            return {}
        row = self._row(case, self._candidates(case.op, names, self.passes[-1]), self.rounds)
        return {name: ratios(row, name, in_force) for name in names}

    def _candidates(self, op: str, names: Sequence[str], worker: Participant) -> list[Candidate]:
        return [Candidate(name, worker, ALGORITHM=f"{op}:{name}") for name in names]

    def segments(self, ops: Sequence[str], sizes: Sequence[int]) -> list[dict[int, list[float]]]:
        """Return, for each pass that was needed and by segment, the ratios to the segment in force.
        They are of the shortest and the longest calls with several segments, with the algorithm in
        force. Calls whose messages are not cut tell nothing where there are no windows.

        Raises as `sizes` does.
        """
        in_force = self.segment_in_force()
        long = [size for size in sizes if size >= SEGMENTED]
        cut = [op for op in ops if self.windows or op not in tuning_table.UNCUT]
        wanted = [
            case
            for case in cases(cut, sorted({*long[:1], *long[-1:]}), DTYPE, ITEMSIZE, self.ranks)
            if case.nbytes
        ]
        tried = sorted({*SEGMENTS, in_force})
        found = [self._segments(wanted, tried, in_force, self.passes[0])]
        best = fit.better(found, in_force)
        if best != in_force:
            found.append(self._segments(wanted, [best, in_force], in_force, self.passes[-1]))
        return found

    def _segments(
        self, wanted: Sequence[Case], tried: Sequence[int], in_force: int, worker: Participant
    ) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {each: [] for each in tried}
        for case in wanted:
            algorithm = f"{case.op}:{self.in_force(case.op, case.nbytes)}"
            # The one in force is not forced, since parts of a group may have another.
            running = [
                Candidate(str(each), worker, ALGORITHM=algorithm,
                          SEGMENT_BYTES=str(each) if each != in_force else "")
                for each in tried
            ]  # fmt: skip
            row = self._row(case, running, self.rounds)
            for each in tried:
                found[each].append(statistics.median(ratios(row, str(each), str(in_force))))
        return found

    def _row(self, case: Case, running: Sequence[Candidate], rounds: int) -> Row:
        """Run a row of cells. Raises WorkerError if an algorithm failed or was wrong."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        ((_, row),) = run_cases([case], running, rounds, self.progress)
        running[0].reset()
        for name, measurements in row.items():
            if measurements.failure or measurements.wrong:
                why = measurements.failure or f"{measurements.wrong} wrong elements"
                raise WorkerError(f"{case.op}:{name} of {case.nbytes} bytes: {why}", lost=True)
        return row


def ratios(row: Row, name: str, in_force: str) -> list[float]:
    """Return the ratio of the two times, by round."""
    return [a / b for a, b in zip(row[name].rounds, row[in_force].rounds, strict=False)]


def as_counted(
    op: str, wanted: Sequence[Case], in_force: Sequence[str],
    passes: Sequence[Sequence[Ratios]],
) -> list[Size]:  # fmt: skip
    """Return the measurements by the sizes that table.py distinguishes.

    UNSIZED collectives have one size, whose ratios are the geometric means, round by round.
    """
    if op not in tuning_table.UNSIZED or not wanted:
        return [
            Size(case.nbytes, name, [some for some in each if some])
            for case, name, each in zip(wanted, in_force, zip(*passes, strict=True), strict=True)
        ]
    return [Size(0, in_force[0], [_mean(each) for each in passes])]


def _mean(found: Sequence[Ratios]) -> Ratios:
    return {
        name: [geometric_mean(each) for each in zip(*(some[name] for some in found), strict=False)]
        for name in found[0]
    }

"""Find crossovers from times: the best algorithm for each size, without following noise.

Ratios within rounds tell which algorithm is faster. A gain or loss below NOISE does not count, nor
does one on which the rounds disagree, or that a second pass in other processes does not find. The
sizes are then cut into runs of one algorithm each, so that the product of all ratios is least.
Leaving the algorithm in force, and every other change of algorithm, costs as much as NOISE, so the
gain must be larger. Sizes that cannot be told apart keep their algorithm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cydist.tuning.table import Rule

NOISE = math.log(1.05)

# By algorithm, for each round its time by that of the algorithm in force.
Ratios = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Size:
    """The measurements of one collective at one size.

    Attributes:
        nbytes: As table.py counts them.
        in_force: The algorithm that ran so far.
        passes: The first has all algorithms; later ones only candidates.
    """

    nbytes: int
    in_force: str
    passes: Sequence[Ratios]

    @property
    def size_class(self) -> int:
        """Return the size's class: sizes up to 2**size_class and above the next smaller power of
        two."""
        return (self.nbytes - 1).bit_length() if self.nbytes > 1 else 0

    def ratio(self, name: str) -> float:
        """Return the median over the rounds of all passes."""
        rounds = [ratio for each in self.passes for ratio in each.get(name, ())]
        return statistics.median(rounds) if rounds else math.inf

    def cost(self, name: str) -> float:
        """Return the logarithm of the ratio, from the pass where it is nearest to 0. It is 0 within
        the noise or if passes disagree, and infinite if it was not measured."""
        costs = [_cost(each.get(name, ())) for each in self.passes]
        if costs[0] == math.inf or min(costs) >= 0:
            return costs[0] if math.inf in costs else min(costs)
        return max(costs) if max(costs) < 0 else 0.0

    def equals(self, name: str) -> bool:
        """Return whether it cannot be distinguished from the choice in force."""
        return name != self.in_force and self.cost(name) == 0


def _cost(rounds: Sequence[float]) -> float:
    if not rounds:
        return math.inf
    median = math.log(statistics.median(rounds))
    gained = [ratio for ratio in rounds if ratio < 1]
    if abs(median) <= NOISE or (median < 0 and 4 * len(gained) < 3 * len(rounds)):
        return 0.0
    return median


def decide(sizes: Sequence[Size]) -> list[str]:
    """Return the algorithm for each of some sizes of one collective, in ascending order."""
    # By the algorithm of the last size: (cost so far, sizes not with the one in force, path).
    best: dict[str, tuple[float, int, list[str]]] = {}
    for number, size in enumerate(sizes):
        before = sizes[number - 1] if number else None
        best = {
            name: min(
                (cost + _change(before, last, size, name) + size.cost(name),
                 left + (name != size.in_force), [*path, name])
                for last, (cost, left, path) in (best or {size.in_force: (0.0, 0, [])}).items()
            )
            for name in size.passes[0]
        }  # fmt: skip
    return min(best.values())[2] if best else []


def _change(before: Size | None, last: str, size: Size, name: str) -> float:
    """Return the cost of changing from the algorithm `last` to `name`: zero if both are in
    force."""
    stays = last == name
    follows = name == size.in_force and (before is None or last == before.in_force)
    return 0.0 if stays or follows else NOISE


def rules(collective: str, sizes: Sequence[Size], names: Sequence[str]) -> tuple[Rule, ...]:
    """Return rows for the decisions: an algorithm ends halfway to the first size of the next."""
    runs = [list(run) for _, run in groupby(zip(sizes, names, strict=True), lambda each: each[1])]
    rows = []
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        (last, name) = run[-1]
        if following is None:
            rows.append(Rule(collective, name))
        else:
            between = (last.size_class + following[0][0].size_class) // 2
            rows.append(Rule(collective, name, 1 << between))
    return tuple(rows)


def better(passes: Sequence[Mapping[int, Sequence[float]]], in_force: int) -> int:
    """Return the segment, by its bytes, whose ratios to `in_force` have the least mean beyond the
    noise, in every pass."""
    means = [
        {each: statistics.fmean(map(math.log, some)) for each, some in ratios.items() if some}
        for ratios in passes
    ]
    if not means or not all(means):
        return in_force
    best = min(means[0], key=lambda each: means[0][each])
    return best if all(found.get(best, 0.0) < -NOISE for found in means) else in_force

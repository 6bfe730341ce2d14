"""From times to crossings: which algorithm for which sizes, without following every wobble.

Who is faster is told by ratios inside rounds. A gain or loss below NOISE is none, and so is a
gain on which the rounds do not agree. The sizes are then cut into runs of one algorithm each,
so that the product of all ratios is least, where to leave what is shipped, and every other
change of the algorithm, costs as much as NOISE: what is gained must be more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cydist.tuning import Rule

NOISE = math.log(1.05)


@dataclass(frozen=True)
class Size:
    """What was measured of one collective at one size.

    nbytes      as tuning.py counts them
    shipped     the algorithm that runs by default
    ratios      by algorithm, for each round its time by that of `shipped`
    """

    nbytes: int
    shipped: str
    ratios: Mapping[str, Sequence[float]]

    @property
    def size_class(self) -> int:
        """All sizes up to 2**size_class that are above the next smaller power of two."""
        return (self.nbytes - 1).bit_length() if self.nbytes > 1 else 0

    def cost(self, name: str) -> float:
        """The logarithm of the ratio, 0 within the noise; infinite if it was not measured."""
        rounds = self.ratios.get(name)
        if not rounds:
            return math.inf
        median = math.log(statistics.median(rounds))
        gained = [ratio for ratio in rounds if ratio < 1]
        if abs(median) <= NOISE or (median < 0 and 4 * len(gained) < 3 * len(rounds)):
            return 0.0
        return median


def decide(sizes: Sequence[Size]) -> list[str]:
    """The algorithm for each of some sizes of one collective, in ascending order."""
    # By the algorithm of the last size: (cost so far, sizes that leave what is shipped, path).
    best: dict[str, tuple[float, int, list[str]]] = {}
    for number, size in enumerate(sizes):
        before = sizes[number - 1] if number else None
        best = {
            name: min(
                (cost + _change(before, last, size, name) + size.cost(name),
                 left + (name != size.shipped), [*path, name])
                for last, (cost, left, path) in (best or {size.shipped: (0.0, 0, [])}).items()
            )
            for name in size.ratios
        }  # fmt: skip
    return min(best.values())[2] if best else []


def _change(before: Size | None, last: str, size: Size, name: str) -> float:
    """What it costs to go from the algorithm `last` to `name`: nothing where both are shipped."""
    stays = last == name
    follows = name == size.shipped and (before is None or last == before.shipped)
    return 0.0 if stays or follows else NOISE


def rules(collective: str, sizes: Sequence[Size], names: Sequence[str]) -> tuple[Rule, ...]:
    """Rows for what was decided: an algorithm ends halfway to the first size of the next."""
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


def better(ratios: Mapping[int, Sequence[float]], shipped: int) -> int:
    """The segment, by its bytes, whose ratios to `shipped` have the least mean beyond the noise."""
    found = {each: statistics.fmean(map(math.log, some)) for each, some in ratios.items() if some}
    if not found:
        return shipped
    best = min(found, key=lambda each: found[each])
    return best if found[best] < -NOISE else shipped

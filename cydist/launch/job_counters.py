"""Sums of the calls of all ranks of this host, from looks at their rings."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import defaultdict
from typing import NamedTuple

from cydist.recorder.counters import CallCounters, Counts, Kind
from cydist.recorder.snapshot import NO_RANK

# Looks use at most this share of a processor, which the ranks may need.
_MOST_BUSY = 0.05
_SHORTEST_PAUSE = 0.05  # seconds


class RankTotals(NamedTuple):
    """Sums over the calls of one rank.

    Attributes:
        counts: Of all its calls.
        awaited_ns: By global rank: nanoseconds in which this rank's calls waited for it.
    """

    counts: Counts
    awaited_ns: dict[int, int]


class JobCounters:
    """Adds up the calls of the ranks of this host.

    Args:
        directory: Of the job's files.

    Attributes:
        since_ns: When that began, on CLOCK_MONOTONIC.
    """

    def __init__(self, directory: str) -> None:
        self.since_ns = time.monotonic_ns()
        self._directory = directory
        self._maps: dict[int, mmap.mmap] = {}
        self._processes: dict[int, CallCounters] = {}

    def look(self) -> float:
        """Count what the ranks have done since the last look. Return the seconds until the next one
        should be."""
        began = time.monotonic()
        self._map_new()
        for pid, memory in self._maps.items():
            with contextlib.suppress(ValueError):  # it has just begun its ring
                self._processes[pid].look(memory)
        return max(_SHORTEST_PAUSE, (time.monotonic() - began) / _MOST_BUSY)

    def watch(self, seconds: float) -> None:
        """Look again and again for so long, since busy ranks soon overwrite what they keep."""
        until = time.monotonic() + seconds
        while True:
            pause = self.look()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause, left))

    def totals(self) -> dict[int, RankTotals]:
        """Return what each rank has done so far. Restarted ranks go on from where they were."""
        found: dict[int, RankTotals] = {}
        for each in self._ranked():
            at = found.setdefault(each.rank, RankTotals(Counts(), defaultdict(int)))
            total = each.total()
            at.counts.add(total.calls, total.nbytes, total.spent_ns, total.waited_ns)
            for rank, waited in each.awaited_ns.items():
                at.awaited_ns[rank] += waited
        return found

    def by_kind(self) -> dict[tuple[int, Kind], Counts]:
        """Return what the calls of each kind add up to, of each rank."""
        found: dict[tuple[int, Kind], Counts] = defaultdict(Counts)
        for each in self._ranked():
            for kind, counts in each.counts.items():
                found[each.rank, kind].add(
                    counts.calls, counts.nbytes, counts.spent_ns, counts.waited_ns
                )
        return found

    def estimated(self) -> dict[int, int]:
        """Return how many calls of each rank had been overwritten before a look."""
        found: dict[int, int] = defaultdict(int)
        for each in self._ranked():
            found[each.rank] += each.estimated
        return found

    def running_ns(self) -> dict[int, int]:
        """Return how long each rank has been in its present call; 0: it is in none."""
        now = time.monotonic_ns()
        found: dict[int, int] = {}
        for pid, each in self._processes.items():
            if each.rank == NO_RANK:
                continue
            inside = each.running is not None and os.path.exists(f"/proc/{pid}")
            since = each.running["began_ns"] if inside and each.running is not None else now
            found[each.rank] = max(found.get(each.rank, 0), now - since)
        return found

    def _ranked(self) -> list[CallCounters]:
        return [each for each in self._processes.values() if each.rank != NO_RANK]

    def _map_new(self) -> None:
        """Map the rings of processes that have begun one, and drop those that are gone."""
        try:
            names = [name for name in os.listdir(self._directory) if name.startswith("ring-")]
        except FileNotFoundError:  # the job has ended
            names = []
        pids = {int(name[5:]) for name in names}
        for pid in self._maps.keys() - pids:
            self._maps.pop(pid).close()
        for pid in pids - self._maps.keys():
            path = os.path.join(self._directory, f"ring-{pid}")
            with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                self._maps[pid] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._processes.setdefault(pid, CallCounters())

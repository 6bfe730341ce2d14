"""Sums of the calls of a process, from looks at its ring: for tables and metrics.

The ranks count nothing for it. Each look takes the calls since the one before out of the ring.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

from cydist import _native
from cydist.recorder import snapshot

MOST_GROUPS = 100  # that are counted each for itself, since a program may make very many
OTHER_GROUPS = "other groups"
_LATE_ENTRIES = 2  # that the process may be writing while they are read


class Kind(NamedTuple):
    """Common to the calls that are counted together."""

    group: str
    backend: str
    call: str


class Counts:
    """Sums over calls.

    Attributes:
        calls: How many there were.
        nbytes: Bytes of this rank's arrays.
        spent_ns: Nanoseconds in them; calls on the fast path that did not wait add nothing.
        waited_ns: Nanoseconds of that in which the rank waited for another one.
    """

    __slots__ = ("calls", "nbytes", "spent_ns", "waited_ns")

    def __init__(self) -> None:
        self.calls = self.nbytes = self.spent_ns = self.waited_ns = 0

    def add(self, calls: int, nbytes: int, spent_ns: int, waited_ns: int) -> None:
        """Add what further calls add up to."""
        self.calls += calls
        self.nbytes += nbytes
        self.spent_ns += spent_ns
        self.waited_ns += waited_ns


class _Counted(NamedTuple):
    """The part of a call that is not over which has been added so far."""

    nbytes: int = 0
    spent_ns: int = 0
    waited_ns: int = 0
    longest_ns: int = 0


class CallCounters:
    """Adds up the calls of one process, which may be another one.

    Attributes:
        counts: By kind of call.
        awaited_ns: By global rank: nanoseconds in which calls waited for it. A call that waited for
            several counts for the one of its longest wait.
        estimated: Calls that had left the ring before a look. They count as large as those that
            the look found, and the time in them as much as around those. Calls that had left it
            before the first look do not count.
        running: The newest call that the process is in, as the recorder writes calls; None: in
            none.
        last: Its newest call; None: it has made none.
        rank: Its global rank; -1: it has made no group.
    """

    def __init__(self) -> None:
        self.counts: dict[Kind, Counts] = defaultdict(Counts)
        self.awaited_ns: dict[int, int] = defaultdict(int)
        self.estimated = 0
        self.running: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.rank = snapshot.NO_RANK
        self._next = 0  # the first call that no look has seen
        self._looked_ns = 0  # when the last look was; 0: there was none
        self._open: dict[int, _Counted] = {}  # calls that were not over
        self._unread: set[int] = set()  # calls that were being written
        self._groups: dict[int, dict[str, Any]] = {}
        self._named: set[str] = set()

    def look(self, memory: Any) -> None:
        """Count what the process has done since the last look. Takes some milliseconds.

        Args:
            memory: Its ring.

        Raises:
            ValueError: It is no ring, or one of another version of cydist.
        """
        first = min([self._next, *self._open, *self._unread])
        head, text, records = _native.read_ring(memory, first)
        dump = snapshot.of_ring(head, text, records)
        self.rank = dump["rank"]
        self._groups |= {group["group"]: group for group in dump["groups"]}
        calls = dump["calls"]
        now = time.monotonic_ns()
        fresh: dict[Kind, Counts] = defaultdict(Counts)
        awaited: dict[int, int] = defaultdict(int)
        numbers = set()
        for call in calls:
            numbers.add(call["number"])
            kind = self._kind(call)
            if call["number"] >= self._next or call["number"] in self._unread:
                fresh[kind].add(1, *self._progress(call, now, awaited))
            elif call["number"] in self._open:
                self.counts[kind].add(0, *self._progress(call, now, self.awaited_ns))
        lost = self._missing(numbers, head["calls"])
        if lost and self._looked_ns and fresh:
            began = min(call["began_ns"] for call in calls if call["number"] >= self._next)
            window = max(1, now - max(began, self._looked_ns))
            self._estimate(fresh, awaited, lost, max(0.0, (now - self._looked_ns) / window - 1))
        self._looked_ns = now
        for kind, new in fresh.items():
            self.counts[kind].add(new.calls, new.nbytes, new.spent_ns, new.waited_ns)
        for rank, waited in awaited.items():
            self.awaited_ns[rank] += waited
        # The others have left the ring.
        self._open = {number: so_far for number, so_far in self._open.items() if number in numbers}
        running = [call for call in calls if call["state"] == "running"]
        self.running = running[-1] if running else None
        self.last = calls[-1] if calls else self.last
        self._next = max(self._next, head["calls"])

    def total(self) -> Counts:
        """Return what all calls add up to."""
        found = Counts()
        for each in self.counts.values():
            found.add(each.calls, each.nbytes, each.spent_ns, each.waited_ns)
        return found

    def _kind(self, call: dict[str, Any]) -> Kind:
        group = self._groups.get(call["group"])
        if group is None:
            return Kind("", "", call["call"])
        name = group["name"]
        if name not in self._named:
            if len(self._named) >= MOST_GROUPS:
                return Kind(OTHER_GROUPS, group["backend"], call["call"])
            self._named.add(name)
        return Kind(name, group["backend"], call["call"])

    def _progress(
        self, call: dict[str, Any], now: int, awaited_ns: dict[int, int]
    ) -> tuple[int, int, int]:
        """Return the bytes, time and waits that a call has added since it was last counted. Add its
        longest wait to that for the awaited rank."""
        number = call["number"]
        old = self._open.pop(number, _Counted())
        runs = call["state"] in ("running", "posted")
        ended = now if runs else call["ended_ns"] or call["began_ns"]
        since = call["waits_since_ns"]
        wait = max(0, now - since) if since is not None else 0  # the one that goes on
        longest, awaited = call["longest_wait_ns"], call["longest_wait_for"]
        if wait > longest:
            longest, awaited = wait, call["waits_for"]
        new = _Counted(
            call["bytes"],
            max(old.spent_ns, ended - call["began_ns"]),
            max(old.waited_ns, call["waited_ns"] + wait),
            max(old.longest_ns, longest),
        )
        if awaited is not None:
            awaited_ns[awaited] += new.longest_ns - old.longest_ns
        if runs:
            self._open[number] = new
        return (
            max(0, new.nbytes - old.nbytes), new.spent_ns - old.spent_ns,
            new.waited_ns - old.waited_ns,
        )  # fmt: skip

    def _missing(self, numbers: set[int], until: int) -> int:
        """Return how many calls since the last look were not found. A few that may be half written
        are left to the next look."""
        missing = set(range(max(self._next, until - _LATE_ENTRIES), until)) - numbers
        found = sum(number >= self._next for number in numbers)
        lost = max(0, until - self._next) - found - len(missing)
        # One that was missing twice is a number that the process has passed over.
        self._unread = missing
        return max(0, lost)

    def _estimate(
        self, fresh: dict[Kind, Counts], awaited: dict[int, int], lost: int, more: float
    ) -> None:
        """Let the calls that were found stand for those that were not, too.

        Args:
            lost: How many were not found.
            more: The time of those, relative to the time of the calls that were found. The times of
                calls cannot be used: those around a look are often longer.
        """
        self.estimated += lost
        share, rest = lost / sum(each.calls for each in fresh.values()), 0.0
        for each in fresh.values():
            exact = each.calls * share + rest
            calls = round(exact)
            rest = exact - calls
            each.add(
                calls, round(each.nbytes * share), round(each.spent_ns * more),
                round(each.waited_ns * more),
            )  # fmt: skip
        for rank in awaited:
            awaited[rank] += round(awaited[rank] * more)

"""Schedules of collectives: recorded without peers, and played on a model of cores and links.

An algorithm's messages do not depend on its data, so the recorder (schedule_recorder.pyx) runs the
algorithms themselves, one rank after another, and notes what each posts and waits for. `play` lets
all ranks run these notes at once. It is an extended LogGP model (A. Alexandrov, M. Ionescu,
K. Schauser and C. Scheiman, 1995): a message costs its sender and its receiver time of their cores,
then latency, then time on the link of each host, on which the messages of all its ranks queue.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cydist._native import schedule_recorder
from cydist.backends.host.group import choose_for_part
from cydist.tuning import table as tuning_table

CODES = {name: code for code, name in enumerate(tuning_table.COLLECTIVES)}
UNIT = 16  # bytes of an element
SEGMENT_BYTES = 256 * 1024  # of long messages, as by default
EAGER_BYTES = 65536  # longer messages wait for their receive, inside a host without a cell
WHOLE = ("broadcast", "all_reduce", "reduce", "scan", "exscan")
# A local collective after which some ranks go on before the others have come.
FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")

Line = tuple[str, int, int, int, int]


class DeadlockError(RuntimeError):
    """Ranks wait for each other for ever."""


@dataclass(frozen=True)
class Level:
    """The costs of a message at one level, in seconds.

    Attributes:
        latency: From the sender to the receiver.
        sending: Of the sender's core.
        receiving: Of the receiver's core.
        copying: Of a core, for each byte at each end.
        wire: Of the link of a host, for each byte.
    """

    latency: float
    sending: float
    receiving: float
    copying: float = 0.0
    wire: float = 0.0

    def post(self, nbytes: int) -> float:
        """Return what a message takes of its sender's core."""
        return self.sending + nbytes * self.copying

    def take(self, nbytes: int) -> float:
        """Return what a message takes of its receiver's core."""
        return self.receiving + nbytes * self.copying


@dataclass(frozen=True)
class Machine:
    """The machine that schedules are played on.

    Attributes:
        inside: Messages between ranks of one host.
        between: Messages between hosts.
        together: together(collective, ranks, nbytes): seconds of a core that each rank needs for
            a collective through windows.
        cores: That all ranks share; 0: each rank has one of its own.
        spin: Seconds for which a rank that waits for a message keeps its core, on a host with at
            most as many ranks as `cores`. On others it yields at once.
        spin_together: The same for a rank that waits for others in a collective through windows.
        switch: Seconds until a core runs another rank.
        buffered: Whether a short send ends before its receive is posted.
    """

    inside: Level
    between: Level
    together: Callable[[str, int, int], float] = lambda collective, ranks, nbytes: 0.0
    cores: int = 0
    buffered: bool = True
    spin: float = 0.0
    spin_together: float = 0.0
    switch: float = 0.0


# Every message takes a unit of time and nothing else does; no send ends before its receive.
STEPS = Machine(Level(1.0, 0.0, 0.0), Level(1.0, 0.0, 0.0), buffered=False)


def blocks(
    collective: str, ranks: int, rank: int, root: int, block: object
) -> tuple[list[object], list[object]]:
    """Return the inputs and outputs of a rank, all of one block."""
    one, many = [block], [block] * ranks
    at_root = rank == root
    return {
        "broadcast": (one, one),
        "all_reduce": (one, one),
        "reduce": (one, one if at_root else []),
        "all_gather": (one, many),
        "gather": (one, many if at_root else []),
        "scatter": (many if at_root else [], one),
        "reduce_scatter": (many, one),
        "all_to_all": (many, many),
        "barrier": ([], []),
        "scan": (one, one),
        "exscan": (one, one),
    }[collective]


def record(
    collective: str,
    name: str,
    hosts: Sequence[int],
    nbytes: int,
    root: int = 0,
    *,
    together: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> list[list[Line]]:
    """Return what each rank posts and waits for in one call.

    Args:
        collective: Such as "all_reduce".
        name: Of the algorithm, on messages or on hosts.
        hosts: The host of each rank.
        nbytes: Of the whole array, or of all blocks of a collective that moves blocks.
        root: Rank, where the call has one.
        together: The ranks of a host share memory.
        segment_bytes: The unit of pipelining.
    """
    p = len(hosts)
    placed = bool(tuning_table.NEEDS[collective, name] & tuning_table.HOSTS)
    if placed and not 1 < len(set(hosts)) < p:
        raise ValueError(f"{collective} {name} needs several hosts, one with several ranks")
    count = (nbytes if collective in WHOLE else nbytes // p) // UNIT
    scratch = bytearray(UNIT * count)
    logs = []
    for rank in range(p):
        link = schedule_recorder.Recording(rank, p)
        recorder = (
            schedule_recorder.ScheduleRecorder(
                link, list(hosts), choose_for_part, lambda ranks, windows: segment_bytes, together
            )
            if placed
            else schedule_recorder.ScheduleRecorder(link)
        )
        inputs, outputs = blocks(collective, p, rank, root, scratch)
        status = recorder.run(
            CODES[collective], name.encode(), inputs, outputs, root=root, commutative=True,
            even=True, segment_bytes=segment_bytes, seq=1, deadline_ns=0,
        )  # fmt: skip
        if status != 0:
            raise ValueError(f"{collective} {name} on {p} ranks ended with status {status}")
        logs.append(link.lines())
    return logs


@dataclass
class _Message:
    """A message of which one end or both were posted."""

    nbytes: int = 0
    sent_at: float | None = None
    posted_at: float | None = None
    arrival: float | None = None  # when the receiver can take it
    sent: tuple[int, int] = (-1, -1)  # rank and number of the line
    received: tuple[int, int] = (-1, -1)


class Player:
    """One call, played on a machine.

    Args:
        logs: As `record` returns them.
        hosts: The host of each rank.
        machine: What it runs on.
    """

    def __init__(self, logs: Sequence[Sequence[Line]], hosts: Sequence[int], machine: Machine):
        self._logs, self._hosts, self._machine = logs, hosts, machine
        self._clock = [0.0] * len(logs)
        self._at = [0] * len(logs)
        self._ends: list[dict[int, tuple[float, float]]] = [{} for _ in logs]
        self._waiting: dict[tuple[int, int], bool] = {}
        self._open: dict[tuple[int, int, int], tuple[deque[_Message], deque[_Message]]] = {}
        self._egress = dict.fromkeys(hosts, 0.0)
        self._ingress = dict.fromkeys(hosts, 0.0)
        self._members: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            self._members.setdefault(host, []).append(rank)
        self._met = [0] * len(logs)  # collectives inside its host that a rank has come to
        self._meetings: dict[tuple[int, int], dict[int, tuple[float, int]]] = {}
        self._ready: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(logs))]

    def play(self) -> float:
        """Return when the last rank is done, in seconds. Raises DeadlockError."""
        heapq.heapify(self._ready)
        while self._ready:
            _, rank = heapq.heappop(self._ready)
            if self._at[rank] < len(self._logs[rank]) and self._step(rank):
                heapq.heappush(self._ready, (self._clock[rank], rank))
        self._check_end()
        return max(self._clock, default=0.0)

    def _check_end(self) -> None:
        """Raise DeadlockError if a rank has not ended."""
        stuck = [rank for rank, log in enumerate(self._logs) if self._at[rank] < len(log)]
        if stuck:
            line = self._logs[stuck[0]][self._at[stuck[0]]]
            raise DeadlockError(f"{len(stuck)} ranks wait for ever; rank {stuck[0]} in {line}")

    def _work(self, rank: int, seconds: float) -> None:
        """Let a rank compute."""
        self._clock[rank] += seconds

    def _is_early(self, rank: int, at: float) -> bool:
        """Return whether a rank that waits for something that ends `at` has to wait now."""
        return False

    def _level(self, one: int, other: int) -> Level:
        same = self._hosts[one] == self._hosts[other]
        return self._machine.inside if same else self._machine.between

    def _step(self, rank: int) -> bool:
        """Do a rank's next line; return whether it goes on."""
        what, peer, step, nbytes, request = self._logs[rank][self._at[rank]]
        if what == "together":
            return self._meet(rank, peer, tuning_table.COLLECTIVES[step], nbytes)
        if what == "wait":
            if request not in self._ends[rank]:
                self._waiting[rank, request] = True
                return False
            if self._is_early(rank, self._ends[rank][request][0]):
                return False
            at, work = self._ends[rank].pop(request)
            self._clock[rank] = max(self._clock[rank], at)
            self._work(rank, work)
        else:
            self._post(rank, peer, step, nbytes, what == "send")
        self._at[rank] += 1
        return True

    def _post(self, rank: int, peer: int, step: int, nbytes: int, sending: bool) -> None:
        key = (rank, peer, step) if sending else (peer, rank, step)
        sends, receives = self._open.setdefault(key, (deque(), deque()))
        mine, others = (sends, receives) if sending else (receives, sends)
        message = others.popleft() if others else _Message()
        line = (rank, self._at[rank])
        if sending:
            self._work(rank, self._level(rank, peer).post(nbytes))
            message.nbytes, message.sent, message.sent_at = nbytes, line, self._clock[rank]
        else:
            message.received, message.posted_at = line, self._clock[rank]
        eager = self._machine.buffered and message.nbytes <= EAGER_BYTES
        if message.sent_at is None or (message.posted_at is None and not eager):
            mine.append(message)
            return
        if message.arrival is None:
            self._transfer(message, key[0], key[1], eager)
        if message.posted_at is None:
            mine.append(message)
        else:
            assert message.arrival is not None
            end = max(message.arrival, message.posted_at)
            self._finish(message.received, end, self._level(*key[:2]).take(message.nbytes))

    def _transfer(self, message: _Message, source: int, target: int, eager: bool) -> None:
        """Send a message over the links of its hosts, and end its send."""
        level = self._level(source, target)
        assert message.sent_at is not None
        start = message.sent_at
        if not eager:
            assert message.posted_at is not None
            asked = level.latency if self._machine.buffered else 0.0
            start = max(start + asked, message.posted_at) + asked
        if self._hosts[source] != self._hosts[target]:
            here, there = self._hosts[source], self._hosts[target]
            start = max(start, self._egress[here])
            busy = message.nbytes * level.wire
            self._egress[here] = start + busy
            first = max(start + level.latency, self._ingress[there])
            self._ingress[there] = message.arrival = first + busy
        else:
            message.arrival = start + level.latency + message.nbytes * level.wire
        self._finish(message.sent, message.sent_at if eager else message.arrival, 0.0)

    def _finish(self, line: tuple[int, int], at: float, work: float) -> None:
        rank, request = line
        self._ends[rank][request] = at, work
        if self._waiting.pop(line, False):
            heapq.heappush(self._ready, (max(at, self._clock[rank]), rank))

    def _meet(self, rank: int, root: int, collective: str, nbytes: int) -> bool:
        """Come to a collective of the ranks of a host."""
        members = self._members[self._hosts[rank]]
        key = self._hosts[rank], self._met[rank]
        met = self._meetings.setdefault(key, {})
        if rank not in met:
            met[rank] = self._clock[rank], nbytes
            if len(met) == len(members) or (collective in FROM_ROOT and rank == root):
                for other in met:  # those that wait may go on
                    if other != rank:
                        heapq.heappush(self._ready, (self._clock[rank], other))
        needed = members
        if collective in FROM_ROOT:
            needed = [root]
        elif collective in TO_ROOT and rank != root:
            needed = [rank]
        if any(other not in met for other in needed):
            return False
        most = max(size for _, size in met.values())
        self._clock[rank] = max(self._clock[rank], *(met[other][0] for other in needed))
        self._work(rank, self._machine.together(collective, len(members), most))
        self._met[rank] += 1
        self._at[rank] += 1
        return True


class SharingPlayer(Player):
    """One call on a machine whose ranks share cores.

    A rank needs a core to do anything. It keeps it while it works, and for `spin` while it waits.
    Then the rank that has waited longest for a core gets it.
    """

    def __init__(self, logs: Sequence[Sequence[Line]], hosts: Sequence[int], machine: Machine):
        super().__init__(logs, hosts, machine)
        counts = Counter(hosts)
        self._spins = [counts[host] <= machine.cores for host in hosts]
        self._core = [-1] * len(logs)  # of each rank
        self._owner = [-1] * machine.cores
        self._kept_until = [0.0] * machine.cores  # by an owner that waits; inf: it works
        self._queue: deque[int] = deque()  # ranks that need a core

    def play(self) -> float:
        """As Player.play. Numbers below 0 on the heap are cores whose owners end their spin."""
        heapq.heapify(self._ready)
        while self._ready:
            now, rank = heapq.heappop(self._ready)
            if rank < 0:
                if self._queue and self._kept_until[-1 - rank] <= now:
                    self._give(-1 - rank, self._queue.popleft(), now)
            elif self._at[rank] < len(self._logs[rank]) and self._has_core(rank, now):
                self._clock[rank] = max(self._clock[rank], now)
                self._kept_until[self._core[rank]] = math.inf
                if self._step(rank) and self._at[rank] < len(self._logs[rank]):
                    heapq.heappush(self._ready, (self._clock[rank], rank))
                else:
                    self._keep(rank)
        self._check_end()
        return max(self._clock, default=0.0)

    def _is_early(self, rank: int, at: float) -> bool:
        if at <= self._clock[rank]:
            return False
        heapq.heappush(self._ready, (at, rank))
        return True

    def _keep(self, rank: int) -> None:
        """Let a rank that waits, or has ended, keep its core for as long as it spins."""
        core, log, spin = self._core[rank], self._logs[rank], 0.0
        if self._spins[rank] and self._at[rank] < len(log):
            together = log[self._at[rank]][0] == "together"
            spin = self._machine.spin_together if together else self._machine.spin
        until = self._clock[rank] + spin
        self._kept_until[core] = until
        heapq.heappush(self._ready, (until, -1 - core))

    def _has_core(self, rank: int, now: float) -> bool:
        """Return whether a rank has a core; else it gets one now, or waits for one."""
        if self._core[rank] >= 0:
            return True
        for core, until in enumerate(self._kept_until):
            if until <= now:
                self._give(core, rank, now)
                return False
        if rank not in self._queue:
            self._queue.append(rank)
        return False

    def _give(self, core: int, rank: int, now: float) -> None:
        former = self._owner[core]
        if former >= 0:
            self._core[former] = -1
        self._owner[core], self._core[rank], self._kept_until[core] = rank, core, math.inf
        start = max(self._clock[rank], now) + (self._machine.switch if former >= 0 else 0.0)
        heapq.heappush(self._ready, (start, rank))


def play(logs: Sequence[Sequence[Line]], hosts: Sequence[int], machine: Machine = STEPS) -> float:
    """Return the seconds that a recorded call takes on a machine. Raises DeadlockError.

    With the default, the number of messages on the longest chain.
    """
    return (SharingPlayer if machine.cores else Player)(logs, hosts, machine).play()


CALLS = 4  # in a row


def repeated(logs: Sequence[Sequence[Line]], calls: int = CALLS) -> list[list[Line]]:
    """Return the same call several times in a row."""
    return [
        [
            (what, peer, step if what == "together" else step + (call << 24), nbytes,
             request + call * len(log))
            for call in range(calls)
            for what, peer, step, nbytes, request in log
        ]
        for log in logs
    ]  # fmt: skip


def play_in_a_row(logs: Sequence[Sequence[Line]], hosts: Sequence[int], machine: Machine) -> float:
    """Return the seconds of each further call where one follows another, as a benchmark has it.

    A rank that waits for no other, such as a broadcast's root, is ahead of the others then.
    """
    one = play(logs, hosts, machine)
    return (play(repeated(logs), hosts, machine) - one) / (CALLS - 1)

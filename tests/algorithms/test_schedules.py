"""Who sends what to whom, checked on paper; and who is combined with whom."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from extra_values import more
from recorded_calls import CODES, UNIT, blocks, unfinished_requests

from cydist import _native
from cydist._native import schedule_recorder
from cydist.tuning import table as tuning_table

# What a library does is not on paper. test_hierarchical_schedules.py has what takes several hosts.
ELSEWHERE = tuning_table.NATIVE | tuning_table.HOSTS
ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if not needs & ELSEWHERE)
MESSAGES = [row for row in ROWS if not tuning_table.NEEDS[row] & tuning_table.WINDOWS]
REDUCING = [row for row in ROWS if row[0] in tuning_table.REDUCING]
EVERYTHING = 1 << 30  # a segment that nothing exceeds
# These send to all ranks, which takes long to check.
QUADRATIC = [
    row for row in MESSAGES if row[1] in ("ring", "pairwise", "ordered", "ordered_scatter")
]


def row_id(row):
    return "-".join(row)


class Schedule:
    """The logs of all ranks of one call."""

    def __init__(self, row, p, count, segment, root, fallback=""):
        collective, name = row
        scratch = np.zeros(UNIT * count, np.uint8)  # nobody looks at the data
        self.p = p
        self.logs = []
        for rank in range(p):
            link = schedule_recorder.Recording(rank, p)
            inputs, outputs = blocks(collective, p, rank, count, root, lambda n: scratch)
            status = schedule_recorder.ScheduleRecorder(link).run(
                CODES[collective], name.encode(), inputs, outputs,
                root=root, commutative=True, even=True, segment_bytes=segment, seq=1,
                deadline_ns=0, fallback=fallback.encode(),
            )  # fmt: skip
            assert status == 0
            self.logs.append(link.lines())

    def posted(self, what):
        """(from, to, step) -> [bytes] of everything that was sent, or received."""
        found = {}
        for rank, log in enumerate(self.logs):
            for kind, peer, step, nbytes, _ in log:
                if kind == what:
                    key = (rank, peer, step) if what == "send" else (peer, rank, step)
                    found.setdefault(key, []).append(nbytes)
        return found

    def play(self):
        """Let all ranks run at once, with sends that wait for their receives.

        Returns how many messages the longest chain has: each takes a unit of time, nothing else
        does. Raises AssertionError when they wait for each other for ever.
        """
        at = [0] * self.p  # next line of each rank
        clock = [0] * self.p
        posts, done, waiting = {}, {}, {}
        runnable = list(range(self.p))
        while runnable:
            rank = runnable.pop()
            while at[rank] < len(self.logs[rank]):
                kind, peer, step, _, request = self.logs[rank][at[rank]]
                if kind == "wait":
                    if (rank, request) not in done:
                        waiting[rank, request] = rank
                        break
                    clock[rank] = max(clock[rank], done[rank, request])
                else:
                    key = (rank, peer, step) if kind == "send" else (peer, rank, step)
                    if key in posts:
                        other, other_request, then = posts.pop(key)
                        end = max(then, clock[rank]) + 1
                        done[rank, at[rank]] = done[other, other_request] = end
                        if (other, other_request) in waiting:
                            runnable.append(waiting.pop((other, other_request)))
                    else:
                        posts[key] = (rank, at[rank], clock[rank])
                at[rank] += 1
        stuck = [rank for rank in range(self.p) if at[rank] < len(self.logs[rank])]
        assert stuck == []
        return max(clock)

    def sent(self):
        """Bytes that each rank sends."""
        return [sum(line[3] for line in log if line[0] == "send") for log in self.logs]


@pytest.mark.parametrize("collective", sorted({collective for collective, _ in MESSAGES}))
def test_collectives_whose_messages_are_cut(collective):
    """--tune compares segments in these, and leaves out those whose messages are the same."""
    cut = any(
        Schedule((each, name), 4, 64, UNIT, 0).logs
        != Schedule((each, name), 4, 64, EVERYTHING, 0).logs
        for each, name in MESSAGES
        if each == collective
    )
    assert cut == (collective not in tuning_table.UNCUT)


# Powers of two, their neighbours, primes; large sizes only where it is quick.
SIZES = (1, 2, 3, 4, 5, 8, 16, 31, 64)
LARGE = (1000, 1024)
CASES = {
    f"{row_id(row)}-{p}ranks": (row, p)
    for row in MESSAGES
    for p in (SIZES if row in QUADRATIC else SIZES + LARGE)
}


@pytest.fixture(scope="class", params=CASES.values(), ids=CASES)
def schedules(request):
    """The logs of every algorithm on messages, in one segment and, where quick, in several."""
    row, p = request.param
    segments = (EVERYTHING, 2 * UNIT) if p not in LARGE else (EVERYTHING,)
    return [Schedule(row, p, 7, segment, p // 2) for segment in segments]


class TestEverySchedule:
    """What holds for every algorithm, whatever the number of ranks."""

    def test_every_send_has_its_receive(self, schedules):
        """One receive of the same size, from that rank, in that step; none is to oneself."""
        for schedule in schedules:
            sends = schedule.posted("send")
            assert sends == schedule.posted("recv")
            assert {len(sizes) for sizes in sends.values()} <= {1}
            assert [key for key in sends if key[0] == key[1]] == []

    def test_every_request_is_waited_for(self, schedules):
        """A request that is posted ends in complete(), once, before the call returns."""
        for log in [log for schedule in schedules for log in schedule.logs]:
            assert unfinished_requests(log) == []

    def test_no_rank_waits_for_ever(self, schedules):
        """Even if no send ends before its receive is posted."""
        for schedule in schedules:
            schedule.play()


def log2(p):
    return math.ceil(math.log2(p))


def fold(p):
    """Steps to fold ranks away and back."""
    return 2 if p & (p - 1) else 0


def depth(p):
    """Levels of a binomial tree: a rank passes on to all its children in one unit of time here."""
    return max(v.bit_count() for v in range(p))


# The columns of docs/dev/algorithms.md: the longest chain of messages, and the most bytes that a
# rank sends of n = p blocks of b bytes.
CARDS = {
    ("all_gather", "bruck"): (log2, lambda p, b: (p - 1) * b),
    ("all_gather", "ring"): (lambda p: p - 1, lambda p, b: (p - 1) * b),
    ("all_reduce", "doubling"): (
        lambda p: int(math.log2(p)) + fold(p), lambda p, b: int(math.log2(p)) * p * b
        + (p * b if fold(p) else 0)),
    ("all_reduce", "halving_doubling"): (
        lambda p: 2 * int(math.log2(p)) + fold(p),
        lambda p, b: 2 * p * b + (p * b if fold(p) else 0)),
    ("all_reduce", "ordered"): (lambda p: 1, lambda p, b: (p - 1) * p * b),
    ("all_reduce", "ordered_scatter"): (None, lambda p, b: 2 * (p - 1) * b),
    ("all_reduce", "ring"): (lambda p: 2 * (p - 1), lambda p, b: 2 * (p - 1) * b),
    ("all_to_all", "bruck"): (log2, lambda p, b: log2(p) * ((p + 1) // 2) * b),
    ("all_to_all", "pairwise"): (None, lambda p, b: (p - 1) * b),
    ("barrier", "dissemination"): (log2, lambda p, b: 0),
    ("broadcast", "ring"): (lambda p: p - 1, lambda p, b: p * b),
    ("broadcast", "tree"): (depth, lambda p, b: log2(p) * p * b),
    ("exscan", "chain"): (lambda p: p - 1, lambda p, b: p * b),
    ("exscan", "dissemination"): (log2, lambda p, b: log2(p) * p * b),
    ("exscan", "ordered"): (lambda p: 1, lambda p, b: (p - 1) * p * b),
    ("gather", "linear"): (lambda p: 1, lambda p, b: b),
    ("reduce", "ordered"): (lambda p: 1, lambda p, b: p * b),
    ("reduce", "tree"): (depth, lambda p, b: p * b),
    ("reduce_scatter", "bruck"): (log2, lambda p, b: (p - 1) * b),
    ("reduce_scatter", "ordered"): (lambda p: 1, lambda p, b: (p - 1) * b),
    ("reduce_scatter", "pairwise"): (None, lambda p, b: (p - 1) * b),
    ("reduce_scatter", "ring"): (lambda p: p - 1, lambda p, b: (p - 1) * b),
    ("scan", "chain"): (lambda p: p - 1, lambda p, b: p * b),
    ("scan", "dissemination"): (log2, lambda p, b: log2(p) * p * b),
    ("scan", "ordered"): (lambda p: 1, lambda p, b: (p - 1) * p * b),
    ("scatter", "linear"): (lambda p: 1, lambda p, b: (p - 1) * b),
}  # fmt: skip
WHOLE = ("broadcast", "all_reduce", "reduce", "scan", "exscan")  # their block is all p blocks


@pytest.mark.parametrize("p", [2, 3, 7, 8, *more(4, 16, 31, 64)], ids=lambda p: f"{p}ranks")
@pytest.mark.parametrize("row", MESSAGES, ids=row_id)
def test_the_card_tells_the_truth(row, p):
    """Steps and bytes are those of the module's card and of docs/dev/algorithms.md."""
    steps, most_bytes = CARDS[row]
    schedule = Schedule(row, p, 3 * p if row[0] in WHOLE else 3, EVERYTHING, root=0)
    if steps is not None:
        assert schedule.play() == steps(p)
    assert max(schedule.sent()) <= most_bytes(p, 3 * UNIT)


# These have a message for each rank.
TO_ALL = ("gather", "scatter", "all_to_all")


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 17, 1 << 21])
@pytest.mark.parametrize("p", [24, *more(13, 64, 100)], ids=lambda p: f"{p}ranks")
@pytest.mark.parametrize("collective", sorted({row[0] for row in MESSAGES} - {*TO_ALL}))
def test_a_rank_needs_few_connections(collective, p, nbytes):
    """By the algorithm that it takes where no ranks share a host, a call needs 2 log2(p) of them
    at most."""
    name = tuning_table.choose(collective, nbytes, p, False, even=True, commutative=True)
    count = nbytes // UNIT if collective in WHOLE else nbytes // UNIT // p
    schedule = Schedule((collective, name), p, count, EVERYTHING, p // 2)
    for log in schedule.logs:
        assert len({peer for kind, peer, *_ in log if kind in ("send", "recv")}) <= 2 * log2(p)


def test_steps_fit_into_a_tag():
    """A long array in tiny segments has longer segments, not more steps than a tag can number."""
    link = schedule_recorder.Recording(0, 2)
    whole = np.zeros(UNIT << 20, np.uint8)
    schedule_recorder.ScheduleRecorder(link).run(
        CODES["all_reduce"], b"halving_doubling", [whole], [whole],
        root=-1, commutative=True, even=True, segment_bytes=UNIT, seq=1, deadline_ns=0,
    )  # fmt: skip
    steps = [line[2] for line in link.lines() if line[0] == "send"]
    assert len(steps) == len(set(steps)) > 1 << 16
    assert max(steps) < 1 << 24


@pytest.mark.parametrize("name", ["doubling", "ring"])
def test_a_call_that_its_algorithm_cannot_run_takes_the_fallback(name):
    """Without a library below, "native" sends the messages of the algorithm that the call names."""
    found = Schedule(("all_reduce", "native"), 4, 100, UNIT, -1, fallback=name)
    assert found.logs == Schedule(("all_reduce", name), 4, 100, UNIT, -1).logs


@pytest.mark.parametrize("fallback", ["", "native", "rings"])
def test_a_fallback_is_needed(fallback):
    """Before anything is sent, the engine refuses an algorithm that might not run the call and has
    no fallback that always runs."""
    with pytest.raises(ValueError, match="needs a fallback"):
        Schedule(("all_reduce", "native"), 2, 4, UNIT, -1, fallback=fallback)


class Group:
    """Threads that are ranks, with elements that know who took part."""

    def __init__(self, p):
        hub = _native.hub(f"schedules {id(self)}", p, slots=4, slot_bytes=1024)
        self.p, self.seq = p, 0
        self.links = [_native.InprocLink(hub, rank) for rank in range(p)]
        self.ranks = [schedule_recorder.ScheduleRecorder(link) for link in self.links]
        self.pool = ThreadPoolExecutor(p)

    def run(self, row, commutative, root, count=11):
        """What every rank has at the end: a block of (first, end, prepared, finished)."""
        self.seq += 1

        def body(rank):
            collective, name = row
            inputs, outputs = blocks(
                collective, self.p, rank, count, root, lambda n: np.zeros((n, 4), np.int32)
            )
            for block in inputs:
                block[:, 0] = rank
                block[:, 1] = 1 if commutative else rank + 1
            status = self.ranks[rank].run(
                CODES[collective], name.encode(),
                [block.reshape(-1).view(np.uint8) for block in inputs],
                [block.reshape(-1).view(np.uint8) for block in outputs],
                root=root, commutative=commutative, even=True, segment_bytes=4 * UNIT,
                seq=self.seq, deadline_ns=time.monotonic_ns() + 30 * 10**9,
                fallback=tuning_table.fallback(
                    collective, name, count * UNIT, self.p, even=True, commutative=commutative
                ).encode(),
            )  # fmt: skip
            assert status == 0
            return [tuple(map(int, part)) for block in outputs for part in block]

        return [future.result(60) for future in [self.pool.submit(body, r) for r in range(self.p)]]

    def close(self):
        """End the ranks."""
        self.pool.shutdown()
        for link in self.links:
            link.close()


@pytest.fixture(scope="module")
def group():
    """group(p): p ranks, made once."""
    made = {}
    yield lambda p: made.setdefault(p, None) or made.__setitem__(p, Group(p)) or made[p]
    for ranks in made.values():
        ranks.close()


def parts_of(collective, rank, p, root):
    """Which ranks a result is made of, or None if this rank has none."""
    match collective:
        case "scan":
            return range(rank + 1)
        case "exscan":
            return range(rank) if rank else None
        case "reduce":
            return range(p) if rank == root else None
    return range(p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 13, *more(5, 7, 16)], ids=lambda p: f"{p}ranks")
@pytest.mark.parametrize(
    "row", [r for r in REDUCING if not tuning_table.NEEDS[r] & tuning_table.COMMUTATIVE], ids=row_id
)
def test_only_neighbours_are_combined_lower_on_the_left(group, row, p):
    """So reductions need not commute; contributions are prepared, results finished, once."""
    root = p // 2
    for rank, parts in enumerate(group(p).run(row, commutative=False, root=root)):
        ranks = parts_of(row[0], rank, p, root)
        if ranks is not None:
            assert set(parts) == {(0, len(ranks), len(ranks), 1)}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 13, *more(5, 7, 16)], ids=lambda p: f"{p}ranks")
@pytest.mark.parametrize("row", REDUCING, ids=row_id)
def test_every_rank_takes_part_once(group, row, p):
    """Nobody is counted twice or left out, prepared or finished more than once."""
    root = p // 2
    for rank, parts in enumerate(group(p).run(row, commutative=True, root=root)):
        ranks = parts_of(row[0], rank, p, root)
        if ranks is not None:
            assert set(parts) == {(sum(ranks), len(ranks), len(ranks), 1)}

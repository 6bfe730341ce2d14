"""Closed forms of the model: what calls take in worlds of which no schedule is recorded.

Ranks are in equal blocks. A flat call is a sum of its rounds. A hierarchical call is composed of
parts: those inside a host, and those between hosts, which are recorded or sums of rounds. Tests
compare both with recordings of small worlds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cydist.backends.host.group import choose_for_part
from cydist.bench.schedules import EAGER_BYTES, SEGMENT_BYTES, Level, Line, Machine, play, record

MOST_RECORDED_ACROSS = 256
MOST_SEGMENTS = 1 << 14  # times hosts, of a part that is recorded
LEAST_SEGMENT_BYTES = 32768  # of cydist/_native/pipeline.pxd

Key = tuple[str, str]
# What a hierarchical call is made of, for `n` bytes and `each` ranks on a host: (where, collective,
# bytes, how many ranks of a host do it at once). "across" is between hosts, and "onward" from the
# first host to the last, each of which hands on what it has received.
Part = tuple[str, str, int, int]
COMPOSED: dict[Key, Callable[[int, int, int], list[Part]]] = {
    ("barrier", "leaders"): lambda n, hosts, each: [
        ("local", "barrier", 0, each), ("across", "barrier", 0, 1), ("local", "barrier", 0, each)],
    ("broadcast", "leaders"): lambda n, hosts, each: [
        ("across", "broadcast", n, 1), ("local", "broadcast", n, each)],
    ("broadcast", "lanes"): lambda n, hosts, each: [
        ("local", "broadcast", n, each), ("across", "broadcast", n // each, each),
        ("local", "all_gather", n, each)],
    ("reduce", "leaders"): lambda n, hosts, each: [
        ("local", "reduce", n, each), ("across", "reduce", n, 1)],
    ("reduce", "lanes"): lambda n, hosts, each: [
        ("local", "reduce_scatter", n, each), ("across", "reduce", n // each, each),
        ("local", "gather", n, each)],
    ("all_reduce", "leaders"): lambda n, hosts, each: [
        ("local", "reduce", n, each), ("across", "all_reduce", n, 1),
        ("local", "broadcast", n, each)],
    ("all_reduce", "lanes"): lambda n, hosts, each: [
        ("local", "reduce_scatter", n, each), ("across", "all_reduce", n // each, each),
        ("local", "all_gather", n, each)],
    ("all_gather", "leaders"): lambda n, hosts, each: [
        ("local", "all_gather", n // hosts, each), ("across", "all_gather", n, 1),
        ("local", "broadcast", n, each)],
    ("reduce_scatter", "leaders"): lambda n, hosts, each: [
        ("local", "reduce", n, each), ("across", "reduce_scatter", n, 1),
        ("local", "broadcast", n // hosts, each)],
} | {
    (op, "leaders"): lambda n, hosts, each, op=op: [
        ("local", op, n, each), ("across", "exscan", n, 1), ("local", "broadcast", n, each)]
    for op in ("scan", "exscan")
} | {
    (op, "lanes"): lambda n, hosts, each, op=op: [
        ("local", "reduce_scatter", n, each), ("local", op, n, each),
        ("onward", "scan", n // each, each), ("local", "all_gather", n, each)]
    for op in ("scan", "exscan")
}  # fmt: skip
# Those whose blocks go round a ring of hosts, and what the ranks of a host do with them meanwhile.
RINGS_OF_HOSTS = {
    ("all_gather", "lanes"): "all_gather",
    ("reduce_scatter", "lanes"): "reduce_scatter",
}
HIERARCHICAL = frozenset({*COMPOSED, *RINGS_OF_HOSTS})
# An all_reduce by lanes of more than one of them goes in stretches: of lane_stretches.pyx.
STRETCH_BYTES = 1 << 20
PART_BYTES = 65536


class NotPricedError(ValueError):
    """The model has no price for a call; the text says why."""


@dataclass(frozen=True)
class Rounds:
    """Rounds in which each rank sends one message and receives one, or passes one on.

    Attributes:
        pattern: "exchange": with rank xor distance; "shift": to rank + distance, which doubles;
            "ring": to the next rank, what came from the one before; "tree": ranks that have the
            data, one of each host, to rank + distance; "chain": from the first rank to the last.
        count: How many rounds; of a chain and a tree, how many messages follow each other.
        distance: In ranks; of a chain, how many ranks it passes.
        nbytes: Of each message.
    """

    pattern: str
    count: int
    distance: int
    nbytes: int

    def seconds(self, each: int, machine: Machine) -> float:
        """Return what they take in blocks of `each` ranks on a host."""
        inner = _one_way(machine.inside, self.nbytes, 1)
        if self.pattern == "tree":
            outer = _one_way(machine.between, self.nbytes, 1)
            return outer if self.distance >= each else inner
        if self.pattern == "chain":
            return self._chain(each, machine)
        outer = _one_way(machine.between, self.nbytes, min(self.distance, each))
        if self.pattern == "ring":  # the longest chain goes round, and enters each host once
            entries = math.ceil(self.count / each)
            chain = entries * outer + (self.count - entries) * inner
            # And each host's wire carries a message of every round.
            wire = self.nbytes * machine.between.wire
            return max(chain, self.count * wire + outer)
        return self.count * (outer if self.distance >= each else inner)

    def _chain(self, each: int, machine: Machine) -> float:
        """Return how long the first message takes, and how long the others come after it."""
        level, more = machine.between, self.count - 1
        entries = (self.distance - 1) // each
        outer = _one_way(level, self.nbytes, 1)
        inner = _one_way(machine.inside, self.nbytes, 1)
        busy = max(_ends(level, self.nbytes), self.nbytes * level.wire)
        return entries * outer + (self.distance - 1 - entries) * inner + more * busy


def _one_way(level: Level, nbytes: int, at_once: int) -> float:
    """Return the seconds of a message, one of `at_once` that share a wire."""
    asked = 2 * level.latency if nbytes > EAGER_BYTES else 0.0
    return _ends(level, nbytes) + asked + level.latency + at_once * nbytes * level.wire


def _ends(level: Level, nbytes: int) -> float:
    """Return the seconds that a rank needs to send a message and to take one."""
    return level.post(nbytes) + level.take(nbytes)


def rounds(key: Key, p: int, n: int) -> list[Rounds] | None:
    """Return the rounds of a flat algorithm on 2**k ranks.

    None if it has no such rounds: then a larger world is not priced.
    """
    if p & (p - 1):
        return None
    doubling = [1 << i for i in range((p - 1).bit_length())]
    segments, segment = _segments(n)
    if key == ("barrier", "dissemination"):
        return [Rounds("shift", 1, d, 0) for d in doubling]
    if key == ("all_reduce", "doubling"):
        return [Rounds("exchange", 1, d, n) for d in doubling]
    if key == ("all_reduce", "halving_doubling"):
        return [Rounds("exchange", 2, d, n // (2 * d)) for d in doubling]
    if key in (("all_gather", "bruck"), ("reduce_scatter", "bruck")):
        return [Rounds("shift", 1, d, d * (n // p)) for d in doubling]
    if key == ("all_to_all", "bruck"):
        return [Rounds("shift", 1, d, n // 2) for d in doubling]
    if key == ("broadcast", "ring"):
        segments, segment = _segments_of_broadcast(n)
        return [Rounds("chain", segments, p, segment)]
    if key == ("broadcast", "tree") or (key == ("reduce", "tree") and segments == 1):
        return [Rounds("tree", segments, d, segment) for d in doubling]
    if n // p <= SEGMENT_BYTES:
        if key == ("all_reduce", "ring"):
            return [Rounds("ring", 2 * (p - 1), 1, n // p)]
        if key in (("all_gather", "ring"), ("reduce_scatter", "ring")):
            return [Rounds("ring", p - 1, 1, n // p)]
    return None


def _segments(nbytes: int, most: int = SEGMENT_BYTES) -> tuple[int, int]:
    """Return how many messages carry an array one after another, and the bytes of each."""
    return max(1, math.ceil(nbytes / most)), min(nbytes, most)


def _segments_of_broadcast(nbytes: int) -> tuple[int, int]:
    """Return the same of a broadcast along a chain, whose ranks wait for the first."""
    return _segments(nbytes, min(SEGMENT_BYTES // 2, max(nbytes // 8, LEAST_SEGMENT_BYTES)))


def by_rounds(many: Sequence[Rounds], each: int, machine: Machine) -> float:
    """Return the seconds of all rounds."""
    seconds = sum(some.seconds(each, machine) for some in many)
    if many[-1:] and many[-1].pattern == "tree" and many[-1].count > 1:
        seconds += (many[-1].count - 1) * _tree_period(many, each, machine)
    if inside := [some for some in many if some.pattern == "shift" and some.distance < each]:
        # A chain of messages leaves its host once in the rounds that are mostly inside hosts.
        some = inside[-1]
        seconds += _one_way(machine.between, some.nbytes, some.distance)
        seconds -= _one_way(machine.inside, some.nbytes, 1)
    return seconds


def _tree_period(many: Sequence[Rounds], each: int, machine: Machine) -> float:
    """Return after how many seconds the root of a tree, which is busiest, sends another message."""
    level, nbytes = machine.between, many[-1].nbytes
    across = sum(some.distance >= each for some in many)
    asked = 2 * level.latency if nbytes > EAGER_BYTES else 0.0
    return across * nbytes * level.wire + level.post(nbytes) + asked + level.latency


@functools.lru_cache(maxsize=64)
def _alone(collective: str, ranks: int, nbytes: int, between_hosts: bool) -> list[list[Line]]:
    """Return the recorded call of ranks that share no memory, by the algorithm that it takes."""
    name = _name_alone(collective, ranks, nbytes, between_hosts)
    return record(collective, name, range(ranks), nbytes)


def _name_alone(collective: str, ranks: int, nbytes: int, between_hosts: bool) -> str:
    return choose_for_part(collective, nbytes, ranks, False, between_hosts)[0].decode()


def hierarchical(
    key: Key, nbytes: int, hosts: int, each: int, machine: Machine, windows: bool
) -> float:
    """Return the seconds of a hierarchical call in equal blocks, which is one of HIERARCHICAL."""
    if key in RINGS_OF_HOSTS:
        return _ring_of_hosts(key, nbytes, hosts, each, machine, windows)
    stretch = max(STRETCH_BYTES, hosts * each * PART_BYTES)
    if key == ("all_reduce", "lanes") and nbytes > stretch:
        count = math.ceil(nbytes / stretch)
        return _stretches(count, nbytes // count, hosts, each, machine, windows)
    seconds = 0.0
    for where, collective, part, at_once in COMPOSED[key](nbytes, hosts, each):
        if where == "local":
            seconds += _local(collective, each, part, machine, windows)
            continue
        if where == "onward" or (at_once > 1 and _is_chain(collective, hosts, part)):
            # One lane has the wire while another waits.
            cut = _segments if where == "onward" else _segments_of_broadcast
            segments, segment = cut(part)
            seconds += Rounds("chain", segments, hosts, segment).seconds(1, machine)
            seconds += (at_once - 1) * segments * segment * machine.between.wire
        else:
            shared = replace(machine.between, wire=at_once * machine.between.wire)
            seconds += _across(collective, hosts, part, replace(machine, between=shared))
    return seconds


def _local(collective: str, each: int, nbytes: int, machine: Machine, windows: bool) -> float:
    """Return the seconds of a call of the ranks of a host."""
    if windows:
        return machine.together(collective, each, nbytes)
    return play(_alone(collective, each, nbytes, False), [0] * each, machine)


def _is_chain(collective: str, hosts: int, nbytes: int) -> bool:
    return collective == "broadcast" and _name_alone(collective, hosts, nbytes, True) == "ring"


def _across(collective: str, hosts: int, nbytes: int, machine: Machine) -> float:
    """Return the seconds of a call of one rank on each host: recorded, or of many hosts by its
    rounds, of which a ring has millions."""
    name = _name_alone(collective, hosts, nbytes, True)
    many = rounds((collective, name), hosts, nbytes) if hosts > MOST_RECORDED_ACROSS else None
    if many is not None:
        return by_rounds(many, 1, machine)
    if hosts > MOST_RECORDED_ACROSS and hosts * _segments(nbytes)[0] > MOST_SEGMENTS:
        raise NotPricedError(f"too many messages between {hosts} hosts to play")
    return play(_alone(collective, hosts, nbytes, True), range(hosts), machine)


def _ring_of_hosts(
    key: Key, nbytes: int, hosts: int, each: int, machine: Machine, windows: bool
) -> float:
    """Return the seconds of blocks that go round the hosts while each host's ranks exchange them.

    A rank takes a block of each other host in turn. An all_gather begins with the exchange of this
    host's blocks and ends with that of the last host's; a reduce_scatter reduces before each send.
    """
    level, block = machine.between, nbytes // (hosts * each)
    meanwhile = _local(RINGS_OF_HOSTS[key], each, nbytes // hosts, machine, windows)
    segments, segment = _segments(block, max(SEGMENT_BYTES // each, LEAST_SEGMENT_BYTES))
    one, all_lanes = _one_way(level, segment, 1), _one_way(level, segment, each * segments)
    ends = segments * _ends(level, segment)
    step = max(
        each * segments * segment * level.wire,  # the wire is busy
        one,  # or a lane passes on what has just come
        ends + meanwhile,  # or the cores are busy
        # or a host's lanes start together, after a block that the slowest of them had to wait for
        (all_lanes + meanwhile) / 2,
    )
    return meanwhile + max(all_lanes, ends + meanwhile) + (hosts - 2) * step


def _stretches(
    count: int, nbytes: int, hosts: int, each: int, machine: Machine, windows: bool
) -> float:
    """Return the seconds of an all_reduce whose stretches go round the hosts one after another.
    The last one, which may be shorter, makes all of them a little shorter here.

    In each step the hosts' ranks reduce one stretch and share another, while some are between the
    hosts, each in another hop.
    """
    level, hops = machine.between, 2 * (hosts - 1)
    reduce = _local("reduce_scatter", each, nbytes, machine, windows)
    share = _local("all_gather", each, nbytes, machine, windows)
    segments, segment = _segments(nbytes // (hosts * each))
    ends = segments * _ends(level, segment)
    one = _one_way(level, segment, segments)
    wire = each * segments * segment * level.wire
    seconds = 0.0
    for i in range(count + hops):
        active = min(i, hops, count, count + hops - i)
        here = reduce * (i < count) + share * (i >= hops) + active * ends
        seconds += max(here, active * wire, one if active else 0.0)
    return seconds

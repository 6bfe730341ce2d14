"""Describe what connections to late ranks have carried, for the messages of errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

RECENT = 5.0  # seconds: idle connections are probed more often than that
LEAST_SECONDS = 0.05  # for which bytes are counted


class Traffic(NamedTuple):
    """The traffic with one rank through sockets, as this host's kernel counts it.

    Attributes:
        got, taken: Bytes that have come, and bytes that the other kernel has acknowledged.
        since_got: Seconds since bytes came.
        since_heard: Seconds since bytes or an acknowledgement came.
    """

    got: int
    taken: int
    since_got: float
    since_heard: float

    @property
    def is_heard(self) -> bool:
        """Return whether the other host has answered lately."""
        return self.since_heard < RECENT


Snapshot = tuple[float, dict[int, Traffic], Callable[[int], Traffic | None]]


def snapshot(with_rank: Callable[[int], Traffic | None], ranks: Sequence[int]) -> Snapshot:
    """Note the traffic with these ranks, from which `describe` begins."""
    found = {rank: with_rank(rank) for rank in ranks}
    known = {rank: each for rank, each in found.items() if each is not None}
    return time.monotonic(), known, with_rank


def describe(before: Snapshot, named: Callable[[int], str]) -> str:
    """Return a line for each rank with which bytes still move: how many have, how fast, and when
    the last came. Takes LEAST_SECONDS at least if there is traffic."""
    began, ranks, with_rank = before
    if not any(each.is_heard for each in ranks.values()):
        return ""
    time.sleep(max(0.0, began + LEAST_SECONDS - time.monotonic()))
    lines = []
    for rank, then in ranks.items():
        now = with_rank(rank)
        if now is None or (now.got, now.taken) == (then.got, then.taken):
            continue
        seconds = time.monotonic() - began
        lines.append(
            f"\nbytes move to and from {named(rank)}: {in_bytes(now.got)} have come, the last "
            f"{now.since_got:.2g} s ago ({in_bytes((now.got - then.got) / seconds)}/s); "
            f"{in_bytes(now.taken)} have arrived there "
            f"({in_bytes((now.taken - then.taken) / seconds)}/s)"
        )
    return "".join(lines)


def in_bytes(count: float) -> str:
    """Return a number of bytes for messages."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"

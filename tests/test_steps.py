"""Steps through windows: how far ranks run ahead, and what is raised lazily."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cydist import _native
from transports import Group, Ranks, run, soon

SUM = 1
FLAT = b"flat"


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda slots: f"{slots}slots")
def slots(request: pytest.FixtureRequest) -> int:
    """How many steps a window holds."""
    return int(request.param)


@pytest.fixture(params=[2, 3], ids=lambda size: f"{size}ranks")
def groups(request: pytest.FixtureRequest, slots: int) -> Iterator[list[Group]]:
    world = Ranks("inproc", request.param, slots=slots, slot_bytes=1024)
    yield world.group()
    world.close()


def broadcast(group: Group, x: np.ndarray, root: int, seq: int, limit: float = 20) -> None:
    array = _native.asarray(x)
    group.run(
        "broadcast", [array], [array], algorithm=FLAT, root=root, count=x.size, seq=seq,
        deadline_ns=soon(limit),
    )  # fmt: skip


def all_reduce(group: Group, x: np.ndarray, seq: int) -> None:
    array = _native.asarray(x)
    group.run(
        "all_reduce", [array], [array], algorithm=FLAT, op=SUM, count=x.size, seq=seq,
        deadline_ns=soon(),
    )  # fmt: skip


# Elements of int64: in the head's line, at its limit, past it, some lines, several steps.
COUNTS = (1, 2, 3, 40, 300)


@pytest.mark.parametrize("root", [0, 1, None], ids=["root0", "root1", "roots change"])
def test_data_of_all_sizes_pass_through_the_same_slots(
    groups: list[Group], root: int | None
) -> None:
    """While roots run ahead, tiny data and long data take turns in the slots, and none is lost."""
    wrong: list[tuple[int, int]] = []

    def body(rank: int) -> None:
        for seq in range(1, 400):
            source = seq % len(groups) if root is None else root
            sent = np.arange(COUNTS[seq % len(COUNTS)]) + seq
            x = sent.copy() if rank == source else np.zeros_like(sent)
            broadcast(groups[rank], x, source, seq)
            if not np.array_equal(x, sent):
                wrong.append((rank, seq))

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])
    assert wrong == []


def test_calls_that_hear_all_follow_calls_that_hear_few(groups: list[Group]) -> None:
    """An all_reduce catches up with what broadcasts before it left for later."""
    wrong: list[tuple[int, int]] = []

    def body(rank: int) -> None:
        for seq in range(1, 400):
            x = np.full(COUNTS[seq % len(COUNTS)], rank + seq)
            if seq % 7 < 5:
                broadcast(groups[rank], x, 0, seq)
                right = seq
            else:
                all_reduce(groups[rank], x, seq)
                right = sum(other + seq for other in range(len(groups)))
            if not (x == right).all():
                wrong.append((rank, seq))

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])
    assert wrong == []


def test_a_root_runs_ahead_as_far_as_there_are_slots(groups: list[Group], slots: int) -> None:
    """It fills every slot without anybody, and then waits for the others, with a deadline."""
    for seq in range(1, slots + 1):
        broadcast(groups[0], np.ones(1), 0, seq)
    with pytest.raises(_native.Failure, match="timeout"):
        broadcast(groups[0], np.ones(1), 0, slots + 1, limit=0.1)


def test_who_ran_ahead_learns_of_a_mismatch(groups: list[Group], slots: int) -> None:
    """Two roots of one broadcast, who hear nobody, both find the other's call in the end."""
    last = len(groups) - 1

    def body(rank: int) -> None:
        with pytest.raises(_native.Failure, match="mismatch") as caught:  # noqa: PT012
            broadcast(groups[rank], np.ones(1), rank if rank in (0, last) else 0, 1)
            for seq in range(2, slots + 3):
                broadcast(groups[rank], np.ones(1), rank, seq)
        assert "root" in caught.value.ours
        assert "root" in caught.value.theirs

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])

"""Steps through windows: how far ranks run ahead, and what is raised lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transport_ranks import Group, Ranks, eventually, run, soon

from cydist import _native
from cydist.errors import counted

SUM = 1
FLAT = b"flat"


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda slots: f"{slots}slots")
def slots(request: pytest.FixtureRequest) -> int:
    """How many long steps a window holds."""
    return int(request.param)


@pytest.fixture
def heads(slots: int) -> int:
    """How many steps a window holds."""
    return 8 * slots


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


# Elements of int64: in the head's line, at its limit, past it, all that fits behind it, one more,
# some lines, several steps.
COUNTS = (1, 2, 3, 24, 25, 40, 300)
SHORT, LONG = 24, 25


@pytest.mark.parametrize("run_length", [1, 20, 70], ids=lambda n: f"runs of {n}")
@pytest.mark.parametrize("root", [0, 1, None], ids=["root0", "root1", "roots change"])
def test_data_of_all_sizes_pass_through_the_same_slots(
    groups: list[Group], root: int | None, run_length: int
) -> None:
    """While roots run ahead, tiny, short and long data take turns in a window; none is lost."""
    wrong: list[tuple[int, int]] = []

    def body(rank: int) -> None:
        for seq in range(1, 400):
            source = seq % len(groups) if root is None else root
            sent = np.arange(COUNTS[seq // run_length % len(COUNTS)]) + seq
            x = sent.copy() if rank == source else np.zeros_like(sent)
            broadcast(groups[rank], x, source, seq)
            if not np.array_equal(x, sent):
                wrong.append((rank, seq))

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])
    assert wrong == []


def test_calls_that_wait_for_all_follow_calls_that_wait_for_few(groups: list[Group]) -> None:
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


@pytest.mark.parametrize("count", [1, SHORT, LONG])
def test_a_root_runs_ahead_as_far_as_there_is_room(
    groups: list[Group], slots: int, heads: int, count: int
) -> None:
    """It fills its window without anybody, and then waits for the others, with a deadline."""
    room = slots if count == LONG else heads
    for seq in range(1, room + 1):
        broadcast(groups[0], np.ones(count), 0, seq)
    with pytest.raises(_native.CallError, match="timeout"):
        broadcast(groups[0], np.ones(count), 0, room + 1, limit=0.1)


def test_long_data_wait_for_a_slot_whatever_was_short(groups: list[Group], slots: int) -> None:
    """Short steps are steps, too: after as many as there are slots, a long one waits."""
    for seq in range(1, slots + 1):
        broadcast(groups[0], np.ones(1), 0, seq)
    with pytest.raises(_native.CallError, match="timeout"):
        broadcast(groups[0], np.ones(LONG), 0, slots + 1, limit=0.1)


def test_abort_ends_a_root_whose_window_is_full(groups: list[Group], heads: int) -> None:
    """Another thread's abort ends its wait for the others, long before the deadline."""
    begun: list[int] = []

    def root() -> None:
        with pytest.raises(_native.CallError, match="aborted"):  # noqa: PT012
            for seq in range(1, heads + 2):
                begun.append(seq)
                broadcast(groups[0], np.ones(1), 0, seq)

    def abort() -> None:
        eventually(lambda: len(begun) > heads)
        groups[0].abort()

    run(root, abort)


@pytest.mark.parametrize("before", [0, 2, 6], ids=lambda n: f"after {n} of 8")
@pytest.mark.parametrize("odd", [0, 1, -1], ids=["the root", "rank 1", "the last rank"])
@pytest.mark.parametrize("counts", [(SHORT, LONG), (LONG, SHORT), (1, 300)], ids=str)
@pytest.mark.parametrize("call", [broadcast, all_reduce], ids=lambda call: str(call.__name__))
def test_ranks_that_disagree_about_long_data(
    groups: list[Group], heads: int, call: Callable[..., None], counts: tuple[int, int],
    odd: int, before: int,
) -> None:  # fmt: skip
    """One's data are short, another's long: a mismatch on all ranks, whatever the window holds."""
    usual, others = counts
    first = before * heads // 8 + 1

    def body(rank: int) -> None:
        count = others if rank == odd % len(groups) else usual
        root = {"root": 0} if call is broadcast else {}
        with pytest.raises(_native.CallError, match="mismatch") as caught:  # noqa: PT012
            for seq in range(1, first):  # who comes late may be told in one of these
                broadcast(groups[rank], np.ones(1), 0, seq)
            call(groups[rank], np.ones(count), seq=first, **root)
            for seq in range(first + 1, first + heads + 2):
                broadcast(groups[rank], np.ones(1), 0, seq)
        assert {caught.value.ours.split(",")[0], caught.value.theirs.split(",")[0]} == {
            f"{call.__name__} #{first} of {counted(count, 'element')}" for count in counts
        }

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])


def test_who_waits_for_a_slot_finds_a_mismatch_by_itself(groups: list[Group], heads: int) -> None:
    """The root ran ahead, ended with a call that is short there, and looks at nothing any more.
    For another rank the call is long, and it waits until the root has read what came before."""
    for seq in range(1, heads // 2 + 2):
        broadcast(groups[0], np.ones(1), 0, seq)

    def body(rank: int) -> None:
        for seq in range(1, heads // 2 + 1):
            broadcast(groups[rank], np.ones(1), 0, seq)
        with pytest.raises(_native.CallError, match="mismatch"):
            broadcast(groups[rank], np.ones(LONG), 0, heads // 2 + 1)

    run(*[lambda rank=rank: body(rank) for rank in range(1, len(groups))])


def test_who_ran_ahead_remembers_its_calls(groups: list[Group], heads: int) -> None:
    """Told of a mismatch in its first call after a window full of others, it says which it was."""
    for seq in range(1, heads + 1):
        broadcast(groups[0], np.ones(1), 0, seq)
    with pytest.raises(_native.CallError, match="mismatch"):
        broadcast(groups[1], np.ones(2), 0, 1)
    with pytest.raises(_native.CallError, match="mismatch") as caught:
        broadcast(groups[0], np.ones(1), 0, heads + 1)
    assert caught.value.ours.split(",")[0] == "broadcast #1 of 1 element"
    assert caught.value.theirs.startswith("broadcast #1 of 2 elements")


def test_a_root_with_room_left_notices_who_has_gone(slots: int) -> None:
    """It waits for nobody yet, and looks now and then at whom it would wait for."""
    world = Ranks("inproc", 3, slots=slots, slot_bytes=1024)
    try:
        root = world.group()[0]
        world.leave(1)
        with pytest.raises(_native.CallError, match="peer_lost") as caught:  # noqa: PT012
            for seq in range(1, slots + 2):
                broadcast(root, np.ones(1), 0, seq)
        assert caught.value.peer == 1
    finally:
        world.close()


def test_those_who_wait_for_another_find_a_mismatch(slots: int, heads: int) -> None:
    """Rank 1 never comes, and both others wait for it in the oldest of many steps: they compare the
    later ones too."""
    world = Ranks("inproc", 3, slots=slots, slot_bytes=1024)
    groups = world.group()

    def body(rank: int) -> None:
        with pytest.raises(_native.CallError, match="mismatch"):  # noqa: PT012
            for seq in range(1, heads + 2):
                broadcast(groups[rank], np.ones(1), 0 if seq == 1 or rank == 0 else rank, seq)

    try:
        run(lambda: body(0), lambda: body(2))
    finally:
        world.close()


def test_who_ran_ahead_learns_of_a_mismatch(groups: list[Group], heads: int) -> None:
    """Two roots of one broadcast, who hear nobody, both find the other's call in the end."""
    last = len(groups) - 1

    def body(rank: int) -> None:
        with pytest.raises(_native.CallError, match="mismatch") as caught:  # noqa: PT012
            broadcast(groups[rank], np.ones(1), rank if rank in (0, last) else 0, 1)
            for seq in range(2, heads + 3):
                broadcast(groups[rank], np.ones(1), rank, seq)
        assert "root" in caught.value.ours
        assert "root" in caught.value.theirs

    run(*[lambda rank=rank: body(rank) for rank in range(len(groups))])

"""Ranks that are in different calls, or have failed, tell each other: nobody waits in vain.

Every call here has a deadline of many seconds; a test that had to wait for one would fail by
the status it sees ("timeout").
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transport_ranks import Group, Ranks, done, run, soon, status_of
from wire_peer import (
    CONTROL_MESSAGE,
    CONTROL_TAG,
    EAGER,
    FINGERPRINT,
    HEADER,
    HELD_LIMIT,
    KEYS,
    MAGIC,
    FrameSealer,
)

from cydist import _native
from cydist.errors import MismatchError, from_call_error

SUM = 1
PROBE, FAILED = 1, 2  # kinds of control messages
PEER_LOST = -2


@pytest.fixture(params=["inproc", "tcp", "shm"])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks."""
    ranks = Ranks(request.param, 4)
    yield ranks
    ranks.close()


class Calls:
    """Collectives of one rank's group, numbered; messages only, so that asking is needed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.seq = 0

    def broadcast(self, root: int, limit: float = 20) -> np.ndarray:
        x = np.full(3, float(root))
        array = _native.asarray(x)
        self._run("broadcast", [array], [array], b"tree", limit, root=root, count=3)
        return x

    def all_reduce(self, dtype: str, limit: float = 20, algorithm: bytes = b"ring") -> np.ndarray:
        x = np.ones(100, dtype)
        array = _native.asarray(x)
        self._run("all_reduce", [array], [array], algorithm, limit, op=SUM, count=100)
        return x

    def _run(
        self,
        name: str,
        inputs: list[_native.Array],
        outputs: list[_native.Array],
        algorithm: bytes,
        limit: float,
        **what: int,
    ) -> None:
        self.seq += 1
        self.group.run(
            name,
            inputs,
            outputs,
            algorithm=algorithm,
            deadline_ns=soon(limit),
            seq=self.seq,
            **what,
        )


def outcomes(*bodies: Callable[[], object]) -> list[_native.CallError | None]:
    """Run all at once; the CallError of each, or None."""
    ended: list[_native.CallError | None] = [None] * len(bodies)

    def guarded(i: int) -> None:
        try:
            bodies[i]()
        except _native.CallError as failure:
            ended[i] = failure

    run(*[lambda i=i: guarded(i) for i in range(len(bodies))])
    return ended


def statuses(failures: list[_native.CallError | None]) -> list[str]:
    """How each ended."""
    return ["ok" if failure is None else failure.status for failure in failures]


def test_all_ranks_receive(world: Ranks) -> None:
    """Two who take different ranks for the root, and receive from each other, find out."""
    calls = [Calls(group) for group in world.group(members=[0, 1])]
    failures = outcomes(lambda: calls[0].broadcast(1), lambda: calls[1].broadcast(0))
    assert statuses(failures) == ["mismatch", "mismatch"]
    for failure in failures:
        assert failure is not None
        assert {"root 0" in failure.ours, "root 1" in failure.ours} == {True, False}
        assert ("root 0" in failure.ours) == ("root 1" in failure.theirs)


def test_a_mismatch_reaches_all_ranks(world: Ranks) -> None:
    """One rank with another dtype ends the call on all four, not on its neighbours alone."""
    calls = [Calls(group) for group in world.group()]
    failures = outcomes(
        *[lambda r=r: calls[r].all_reduce("f4" if r == 1 else "f8") for r in range(4)]
    )
    assert statuses(failures) == ["mismatch"] * 4
    for failure in failures:
        assert failure is not None
        assert {"float32" in failure.ours, "float32" in failure.theirs} == {True, False}


def test_who_returned_early_learns_at_the_next_call(world: Ranks) -> None:
    """A root that has sent and gone raises at its next call, with the call that differed."""
    calls = [Calls(group) for group in world.group(members=[0, 1])]
    calls[0].broadcast(0)

    def go_on() -> None:
        for _ in range(2000):
            calls[0].broadcast(0)
            threading.Event().wait(0.005)

    late = outcomes(lambda: calls[1].all_reduce("f8"), go_on)
    assert statuses(late) == ["mismatch", "mismatch"]
    assert late[1] is not None
    texts = late[1].ours + late[1].theirs
    assert "broadcast #1" in texts
    assert "all_reduce #1" in texts


def test_slow_rank_is_no_mismatch(world: Ranks) -> None:
    """Those who wait ask; a rank that comes late finds the questions, and the call is right."""
    groups = world.group()
    calls = [Calls(group) for group in groups]
    late = threading.Event()

    def slow() -> np.ndarray:
        late.wait(0.3)
        return calls[2].all_reduce("f8")

    bodies = [lambda r=r: calls[r].all_reduce("f8") for r in range(4)]
    bodies[2] = slow
    assert outcomes(*bodies) == [None] * 4
    assert outcomes(*[lambda r=r: calls[r].broadcast(3) for r in range(4)]) == [None] * 4


def test_one_timeout_ends_all(world: Ranks) -> None:
    """When one rank gives up, so do those who wait for it, and they say who did."""
    calls = [Calls(group) for group in world.group()]
    failures = outcomes(
        lambda: calls[0].all_reduce("f8", limit=0.2),
        lambda: calls[1].all_reduce("f8", limit=100),
        lambda: calls[2].all_reduce("f8", limit=100),
    )
    assert statuses(failures) == ["timeout"] * 3
    assert [failure.teller for failure in failures if failure] == [-1, 0, 0]


def test_a_death_reaches_all_ranks(world: Ranks) -> None:
    """All who are left learn of a rank that left, though one of them alone waited for it."""
    calls = [Calls(group) for group in world.group()]
    world.leave(3)
    failures = outcomes(*[lambda r=r: calls[r].all_reduce("f8", limit=100) for r in range(3)])
    assert statuses(failures) == ["peer_lost"] * 3
    assert [failure.peer for failure in failures if failure] == [3] * 3


def test_abort_reaches_all_ranks(world: Ranks) -> None:
    """A group that is aborted on one rank, inside a call, ends on all."""
    groups = world.group()
    calls = [Calls(group) for group in groups]
    failures = outcomes(
        *[lambda r=r: calls[r].all_reduce("f8", limit=100) for r in range(3)], groups[0].abort
    )
    assert statuses(failures) == ["aborted"] * 3 + ["ok"]


def test_point_to_point_ends_with_the_group(world: Ranks) -> None:
    """A receive in a group that failed elsewhere ends, and new ones are not posted."""
    groups = world.group()
    calls = [Calls(group) for group in groups]
    receive = groups[2].irecv(np.zeros(1), 3, 5)
    failures = outcomes(
        lambda: calls[0].broadcast(1), lambda: calls[1].broadcast(0), lambda: receive.wait(soon())
    )
    assert statuses(failures) == ["mismatch", "mismatch", "ok"]
    assert status_of(receive) == "mismatch"
    assert status_of(groups[2].irecv(np.zeros(1), 3, 5)) == "mismatch"


def test_other_groups_go_on(world: Ranks) -> None:
    """A group that failed takes no other group of the same ranks with it."""
    broken = [Calls(group) for group in world.group(context=1)]
    whole = world.group(context=2)
    outcomes(lambda: broken[0].broadcast(1), lambda: broken[1].broadcast(0))
    calls = [Calls(group) for group in whole]
    assert outcomes(*[lambda r=r: calls[r].all_reduce("f8") for r in range(4)]) == [None] * 4
    got = np.zeros(1)
    run(lambda: done(whole[0].isend(np.ones(1), 1, 0)), lambda: done(whole[1].irecv(got, 0, 0)))
    assert got[0] == 1


def test_failed_group_stays_failed(world: Ranks) -> None:
    """Every later call of the group ends at once with the first failure."""
    calls = [Calls(group) for group in world.group(members=[0, 1])]
    outcomes(lambda: calls[0].broadcast(1), lambda: calls[1].broadcast(0))
    again = outcomes(lambda: calls[0].broadcast(0), lambda: calls[1].broadcast(0))
    assert statuses(again) == ["mismatch", "mismatch"]


@pytest.mark.parametrize("part", [0, 1, CONTROL_MESSAGE.size - 1])
def test_a_death_within_a_control_message(part: int) -> None:
    """A member dies while its message arrives; what another one reports after it is heard."""
    link = _native.TcpLink(0, 3, 1, HELD_LIMIT)
    peers = []
    for rank in (1, 2):
        ours, peer = socket.socketpair()
        ours.setblocking(False)
        assert link.adopt(rank, 0, ours.detach(), *KEYS, None)
        peers.append(peer)
    group = Group(_native.Group(link, [0, 1, 2], 0, 1))
    aside = Group(_native.Group(link, [0, 1, 2], 0, 2))
    progress = aside.irecv(np.zeros(1), 2, 99)

    def said(teller: int, kind: int, status: int) -> bytes:
        call = bytes(FINGERPRINT.size)
        message = CONTROL_MESSAGE.pack(kind, status, teller, 1, 0, 0, 0, 0, call, call, b"")
        head = HEADER.pack(MAGIC, EAGER, 0, 0, 1, CONTROL_TAG, len(message), 0, 0, 0, call, 0)
        return FrameSealer()(head + message)

    with peers[0], peers[1]:
        whole = said(1, PROBE, 0)
        peers[0].sendall(whole[: len(whole) - CONTROL_MESSAGE.size + part])
        peers[0].close()
        while not link.lost(1):
            progress.test()
        group.native.poll_control()
        peers[1].sendall(said(2, FAILED, PEER_LOST))
        receive = group.irecv(np.zeros(1), 2, 5)
        assert receive.wait(soon(10))
        with pytest.raises(_native.CallError) as caught:
            receive.check()
        assert (caught.value.status, caught.value.teller) == ("peer_lost", 2)
        group.close()
        aside.close()
        link.close()


def test_message_of_a_failure_on_another_rank() -> None:
    """The exception says who found it, and what both were doing, by global rank."""
    failure = _native.CallError("mismatch", 1, -1, "broadcast #1", "barrier #1", 0)
    error = from_call_error(failure, "broadcast", "g", [4, 7, 9], 1)
    assert isinstance(error, MismatchError)
    assert error.ranks == (7, 4)
    assert "Rank 4 (group rank 0): broadcast #1. Rank 7 (group rank 1): barrier #1" in str(error)

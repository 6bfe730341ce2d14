"""Windows: memory of the other ranks, in one process and between several."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sleeps import sleeps
from transport_ranks import Group, Ranks, eventually, run, soon

import cydist as dist
from cydist import _native
from cydist.testing import run_threads


@pytest.mark.parametrize("algorithm", [b"flat"])
class TestWindows:
    """Windows, through an algorithm that uses nothing else."""

    def barrier(self, group: _native.Group, algorithm: bytes, seq: int, limit: float = 20) -> None:
        group.run("barrier", [], [], algorithm=algorithm, deadline_ns=soon(limit), seq=seq)

    @pytest.fixture(params=["inproc", "shm"])
    def world(self, request: pytest.FixtureRequest) -> Iterator[Ranks]:
        world = Ranks(request.param, 3)
        yield world
        world.close()

    def test_flags_publish_what_was_written(self, world: Ranks, algorithm: bytes) -> None:
        """Who sees the flag sees the data: no sum is ever wrong."""
        groups = world.group()
        wrong = []

        def sum_up(rank: int) -> None:
            for seq in range(1, 300):
                x = np.full(500, rank + seq, np.int64)
                array = _native.asarray(x)
                groups[rank].run(
                    "all_reduce", [array], [array], algorithm=algorithm, op=1, count=500,
                    deadline_ns=soon(), seq=seq,
                )  # fmt: skip
                if not (x == 3 * seq + 3).all():
                    wrong.append((rank, seq))

        run(*[lambda rank=rank: sum_up(rank) for rank in range(3)])
        assert wrong == []

    def test_a_late_rank_wakes_the_sleeping_ones(self, world: Ranks, algorithm: bytes) -> None:
        """A barrier that has gone to sleep ends soon after the last rank comes."""
        groups = world.group()
        slept = threading.Event()

        def late() -> None:
            slept.wait(0.2)
            self.barrier(groups[2], algorithm, 1)

        run(
            lambda: self.barrier(groups[0], algorithm, 1),
            lambda: self.barrier(groups[1], algorithm, 1),
            late,
        )

    def test_deadline(self, world: Ranks, algorithm: bytes) -> None:
        """A barrier that one rank never enters ends at its deadline."""
        groups = world.group()
        with pytest.raises(_native.CallError, match="timeout"):
            self.barrier(groups[0], algorithm, 1, limit=0.1)

    def test_leaver(self, world: Ranks, algorithm: bytes) -> None:
        """A barrier ends with "peer_lost" when a rank leaves instead of coming."""
        groups = world.group()
        world.leave(2)

        def enter(rank: int) -> None:
            with pytest.raises(_native.CallError, match="peer_lost"):
                self.barrier(groups[rank], algorithm, 1)

        run(lambda: enter(0), lambda: enter(1))

    def test_windows_of_groups_are_apart(self, world: Ranks, algorithm: bytes) -> None:
        """A barrier in one group does not let another group's barrier pass."""
        one, other = world.group(context=1), world.group(context=2)
        run(*[lambda r=r: self.barrier(one[r], algorithm, 1) for r in range(3)])
        with pytest.raises(_native.CallError, match="timeout"):
            self.barrier(other[0], algorithm, 1, limit=0.05)


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_queued_calls_of_all_sizes(backend: str) -> None:
    """Short and long calls pass through the same windows, queued or not, in the order of issue."""

    def body(rank: int) -> list[int]:
        calls = []
        for seq in range(300):
            sent = np.arange((1, 24, 25, 5000, 40000)[seq // 11 % 5]) + seq
            x = sent.copy() if rank == seq // 40 % 3 else np.zeros_like(sent)
            work = dist.broadcast(x, seq // 40 % 3, async_op=seq % 30 < 20)
            calls.append((x, sent, work))
        for _, _, work in calls:
            if work is not None:
                work.wait()
        return [seq for seq, (x, sent, _) in enumerate(calls) if not np.array_equal(x, sent)]

    assert run_threads(body, 3, backend) == [[], [], []]


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_windows_stay_while_a_message_is_posted(transport: str) -> None:
    """A thread that posts a message looks at the group's windows; another closes the group."""
    with closing(Ranks(transport, 2)) as world:
        groups = world.group()
        calls = [
            lambda group=group: group.run(
                "barrier", [], [], algorithm=b"flat", deadline_ns=soon(), seq=1
            )
            for group in groups
        ]
        run(*calls)
        native = groups[0].native
        assert native.windows
        x = np.ones(1)
        _native.arm_failpoint("post:hold")
        posting = threading.Thread(target=lambda: _native.irecv(native, _native.asarray(x), 1, 0))
        try:
            posting.start()
            deadline = time.monotonic() + 20
            while not _native.failpoint_holds():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            native.close()
            assert native.windows
        finally:
            _native.arm_failpoint("")
            posting.join(20)
        assert not native.windows


def test_a_wait_for_a_flag_does_not_queue_behind_a_thread_that_moves_messages() -> None:
    """That thread keeps the link's lock; the waiting one goes on with its slices."""
    with closing(Ranks("shm", 2)) as world:
        by_flags, by_messages = world.group(1), world.group(2)

        def barrier(group: Group, algorithm: bytes, seq: int) -> None:
            group.native.run("barrier", [], [], algorithm=algorithm, deadline_ns=soon(30), seq=seq)

        run(*[lambda group=group: barrier(group, b"flat", 1) for group in by_flags])
        holding = threading.Thread(target=barrier, args=(by_messages[0], b"dissemination", 1))
        waiting = threading.Thread(target=barrier, args=(by_flags[0], b"flat", 2))
        _native.arm_failpoint("wait:hold")
        try:
            holding.start()
            eventually(_native.failpoint_holds)
            waiting.start()
            eventually(lambda: sleeps(waiting) >= 5)
            barrier(by_flags[1], b"flat", 2)
            waiting.join(20)
            assert not waiting.is_alive()
        finally:
            _native.arm_failpoint("")
            barrier(by_messages[1], b"dissemination", 1)
            holding.join(20)


def test_hub_of_another_shape() -> None:
    """Ranks that disagree on a hub's shape are told at once."""
    hub = _native.hub("shape", 2)
    assert _native.hub("shape", 2) is hub
    with pytest.raises(ValueError, match="2 ranks"):
        _native.hub("shape", 3)


def test_rank_of_a_hub_is_taken_once() -> None:
    """Two links for one rank of a hub are refused."""
    hub = _native.hub("taken", 2)
    link = _native.InprocLink(hub, 0)
    with pytest.raises(ValueError, match="has a link already"):
        _native.InprocLink(hub, 0)
    link.close()


@pytest.mark.parametrize("first", [0, 1], ids=["who asked leaves first", "who asked leaves last"])
def test_windows_go_when_all_have_left(first: int) -> None:
    """A group whose other member never had a collective keeps no memory: 256 KiB a rank."""

    def mapped_kb() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmSize:")[1].split()[0])

    with closing(Ranks("inproc", 2)) as world:
        before = mapped_kb()
        for context in range(1, 401):
            groups = world.group(context)
            assert groups[0].native.windows
            groups[first].close()
            groups[1 - first].close()
        assert mapped_kb() - before < 400 * 512 / 4


def test_a_group_that_was_closed_meanwhile_ends_the_call() -> None:
    """A call whose algorithm was chosen while the group had windows is closed like any other."""
    with closing(Ranks("inproc", 2)) as world:
        group = world.group()[0]
        assert group.native.windows
        group.close()
        with pytest.raises(_native.CallError) as caught:
            group.run("barrier", [], [], algorithm=b"flat", deadline_ns=soon(), seq=1)
        assert caught.value.status == "closed"

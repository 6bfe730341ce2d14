"""A large message that nobody asks for: it is not taken for sent, on our own transports."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from transport_ranks import DEADLINE, Ranks, done, eventually, run, soon

import cydist as dist
from cydist import _native
from cydist.testing.test_timeouts import TIMEOUT, late, waited_for

LONG = 300_000  # elements: too many to be sent before they are asked for


def isend(group: Any) -> Any:
    return dist.isend(np.ones(LONG), 1, group)


CASES = {
    "timeout of the call": (
        lambda group: dist.send(np.ones(LONG), 1, group, timeout=TIMEOUT),
        None,
    ),
    "timeout of the group": (lambda group: dist.send(np.ones(LONG), 1, group), TIMEOUT),
    "timeout of the wait": (lambda group: waited_for(isend(group)), None),
    "group's, once started": (lambda group: isend(group).wait(), TIMEOUT),
}


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm", "derived"])
@pytest.mark.parametrize(("call", "limit"), CASES.values(), ids=CASES)
def test_an_unreceived_message_times_out(
    jobs: Any, transport: str, call: Any, limit: float | None
) -> None:
    """Sending ends when its timeout has passed, wherever that comes from."""
    late(jobs, transport, call, limit)


def test_a_message_that_came_early_is_read_where_it_belongs() -> None:
    """A call looks for control messages before it posts its receive, and leaves data alone."""
    calls, nbytes = 3, 40_000  # the connection holds them all
    sent = threading.Event()
    with closing(Ranks("tcp", 2)) as ranks:
        groups = ranks.group()

        def broadcasts(rank: int) -> None:
            groups[rank].run(
                "barrier", [], [], algorithm=b"dissemination", deadline_ns=soon(), seq=1
            )
            if rank == 1:
                assert sent.wait(DEADLINE)
            for call in range(calls):
                x = np.full(nbytes, call if rank == 0 else 99, np.uint8)
                array = _native.asarray(x)
                groups[rank].run(
                    "broadcast", [array], [array], root=0, algorithm=b"tree", count=nbytes,
                    deadline_ns=soon(), seq=2 + call, segment_bytes=nbytes,
                )  # fmt: skip
                assert (x == call).all()
            sent.set()

        run(lambda: broadcasts(0), lambda: broadcasts(1))
        link = ranks.links[1]
        assert isinstance(link, _native.TcpLink)
        assert link.statistics()["copied"] < calls * nbytes // 2


def test_a_control_message_behind_one_that_came_early_is_found() -> None:
    """A rank that looks for control messages again reads what it has left in the socket once."""
    with closing(Ranks("tcp", 2)) as ranks:
        sender, receiver = ranks.group()

        def send() -> None:
            done(sender.isend(np.ones(40_000, np.uint8), 1, 0))
            sender.native.fail("timeout")

        def told() -> bool:
            try:
                receiver.native.poll_control()
            except _native.CallError:
                return True
            return False

        run(send, lambda: eventually(told))


def test_early_messages_do_not_each_delay_a_control_message() -> None:
    """Looks leave the first in the socket, and read several of the others at once."""
    messages, looks, told = 12, 0, False
    with closing(Ranks("tcp", 2)) as ranks:
        sender, receiver = ranks.group()
        for _ in range(messages):
            done(sender.isend(np.ones(40_000, np.uint8), 1, 0))
        sender.native.fail("timeout")  # all is in the receiver's socket now
        while not told and looks < 100:
            looks += 1
            try:
                receiver.native.poll_control()
            except _native.CallError:
                told = True
    assert told
    assert looks <= messages // 2

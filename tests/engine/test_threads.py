"""Several threads of a rank use the same groups at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist._native import CallQueue, CallRecord
from cydist.api import process_groups
from cydist.executor import Serial
from cydist.testing import run_threads

THREADS = 8
SIZE = 2
TRANSPORTS = ["inproc", "tcp", "shm"]


def one_or_all(thread: int, group: Any, turn: int) -> None:
    """A collective of every kind; whose call meets whose does not matter to the result."""
    x = np.ones(16)
    if (thread + turn) % 3 == 0:
        dist.all_reduce(x, group=group, async_op=True).wait()
    else:
        dist.all_reduce(x, group=group)
    assert [float(SIZE)] * 16 == x.tolist()


def own_messages(thread: int, group: Any, turn: int) -> None:
    """Messages with a tag for each thread, beside collectives."""
    peer = 1 - dist.get_rank(group)
    x, into = np.array([thread, turn, peer]), np.zeros(3, int)
    work = dist.isend(x, group=group, group_dst=peer, tag=thread)
    if turn % 2:
        dist.recv(into, group=group, group_src=peer, tag=thread)
    else:
        dist.irecv(into, group=group, group_src=peer, tag=thread).wait()
    work.wait()
    assert [thread, turn, 1 - peer] == into.tolist()
    if turn % 5 == 0:
        one_or_all(thread, group, turn)


def at_once(
    use: Callable[[int, Any, int], None], turns: int, transport: str, timeout: float
) -> None:
    """On each rank 8 threads, half of them on each of two groups."""

    def body(rank: int) -> None:
        groups = [dist.new_group(range(SIZE)) for _ in range(2)]
        mine, errors = process_groups.current_world(), []

        def work(thread: int) -> None:
            process_groups._thread.world = mine
            try:
                for turn in range(turns):
                    use(thread, groups[thread % 2], turn)
            except BaseException as error:
                errors.append(error)
                for group in groups:
                    dist.abort(group)

        threads = [
            threading.Thread(target=work, args=(each,), daemon=True) for each in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in threads), "a deadlock"
        if errors:
            raise errors[0]

    run_threads(body, SIZE, transport, timeout + 5)


USES = {"collectives": one_or_all, "messages": own_messages}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("use", USES)
def test_threads_take_turns(use: str, transport: str) -> None:
    """No deadlock, and every result is right: a group runs one collective after the other."""
    at_once(USES[use], 40, transport, 45)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("use", USES)
def test_threads_take_turns_in_the_long_run(use: str, transport: str) -> None:
    """Ten thousand operations of each thread."""
    at_once(USES[use], 10_000, transport, 1700)


class Contested(CallQueue):
    """Whenever a queued call has ended, a blocking one of another thread begins at once."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        threading.Thread(target=self._block, daemon=True).start()
        assert self.begun.wait(10)

    def _block(self) -> None:
        def body(call: CallRecord) -> None:
            self.begun.set()
            self.free.wait(30)

        self.run_call_now(self, CallRecord("barrier", 0, 0.0), body)


def test_an_empty_queue_keeps_no_thread() -> None:
    """Who served the queue of a group leaves it though a blocking call goes on for long."""
    serial = Serial()
    serial.call_queue = contested = Contested()
    serial._served = True  # by a thread that the test can see
    work = serial.start("call", lambda: None, None)
    thread = threading.Thread(target=serial._drain, daemon=True)
    thread.start()
    work.wait()
    thread.join(10)
    waits = thread.is_alive()
    contested.free.set()
    assert not waits

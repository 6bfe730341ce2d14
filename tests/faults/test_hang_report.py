"""A timeout says who was late, in which call that rank is, and where its program is."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from two_process_job import TwoProcessJob

import cydist as dist
from cydist.backends.host import peer_report
from cydist.backends.host.connections import Connections
from cydist.testing import run_threads

LONG = 50.0
SECRET = bytes(range(32))


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where ranks can be threads."""
    return str(request.param)


def timeout_of(call: Callable[[], Any]) -> str:
    """The text of a call's timeout."""
    with pytest.raises(dist.DistTimeoutError) as caught:
        call()
    return str(caught.value)


GIVE_UP: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(np.zeros(3), timeout=0.2),
    "recv": lambda: dist.recv(np.zeros(3), 1, timeout=0.2),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=0.2),
    "async": lambda: dist.all_reduce(np.zeros(3), async_op=True, timeout=0.2).wait(),
}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks that do answer as long as a busy machine needs."""
    monkeypatch.setattr(peer_report, "PATIENCE", 20.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", GIVE_UP)
def test_a_rank_that_computes_is_shown(transport: str, call: str) -> None:
    """In no call; its last one, and the function that it is in."""
    over = threading.Event()

    def computing_for_long() -> None:
        over.wait(LONG)

    def body(rank: int) -> str:
        dist.barrier()
        if rank == 1:
            computing_for_long()
            return ""
        try:
            return timeout_of(GIVE_UP[call])
        finally:
            over.set()

    text = run_threads(body, 2, transport)[0]
    assert "rank 1" in text
    assert "in no call of the group; its last was barrier #1" in text
    assert "last calls: barrier #1\n" in text
    assert "in computing_for_long" in text


@pytest.mark.usefixtures("patient")
def test_a_rank_in_another_call_is_shown(transport: str) -> None:
    """Rank 1 waits in a recv: so says the error, and where the program called it."""

    def receiving() -> None:
        with pytest.raises(dist.DistError, match="rank 0 gave up"):
            dist.recv(np.zeros(1), 2, timeout=LONG)

    def body(rank: int) -> str:
        if rank == 1:
            receiving()
        if rank == 0:
            return timeout_of(lambda: dist.recv(np.zeros(3), 1, timeout=0.5))
        return ""

    text = run_threads(body, 3, transport)[0]
    assert "is in recv from rank 2" in text
    assert "in receiving" in text
    assert "cydist.recv" in text


@pytest.mark.usefixtures("patient")
def test_who_waits_in_the_same_call_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for its neighbour in the ring, which waits for rank 2: rank 2 is named."""
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:ring")
    dist.tuning.table.reload()
    over = threading.Event()

    def body(rank: int) -> str:
        if rank == 2:
            over.wait(LONG)
            return ""
        if rank == 0:
            try:
                return timeout_of(lambda: dist.all_reduce(np.zeros(64), timeout=0.5))
            finally:
                over.set()
        with pytest.raises(dist.DistTimeoutError, match="rank 0 gave up"):
            dist.all_reduce(np.zeros(64), timeout=LONG)
        return ""

    text = run_threads(body, 4, "tcp")[0]
    assert "waiting for rank 3" in text
    assert "rank 2 on " in text
    assert "is in no call of the group, and has made none" in text
    assert "rank 1 on " not in text


# The connection that reports travel on


@pytest.fixture
def pair() -> Iterator[tuple[Connections, Connections]]:
    """Two ranks whose reports are the comm id that was asked about."""
    made = [Connections(rank, 2, host="127.0.0.1", job="test", secret=SECRET) for rank in range(2)]
    for each in made:
        each.report_of = lambda comm_id: peer_report.PeerReport(f"in {comm_id}", "a stack")
        each.connect([other.address() for other in made])
    yield made[0], made[1]
    for each in made:
        each.close()


def soon() -> float:
    return time.monotonic() + LONG


def test_asking_makes_no_connection_of_the_link(pair: tuple[Connections, Connections]) -> None:
    """It has one of its own, which is gone afterwards."""
    assert pair[0].query(1, 2**63, soon()) == peer_report.PeerReport(f"in {2**63}", "a stack")
    assert pair[0].query(1, 7, soon()) == peer_report.PeerReport("in 7", "a stack")
    assert [each.link.statistics()["made"] for each in pair] == [0, 0]
    assert [each.pending_peers() for each in pair] == [0, 0]


def test_an_unauthenticated_client_is_told_nothing(pair: tuple[Connections, Connections]) -> None:
    """Who does not know the secret is refused, and so is who asks for another rank."""
    places = [place for lane in pair[1]._lanes for place in lane]
    claim = peer_report.CLAIM.pack(0, 1, 7)
    with pytest.raises(dist.AuthenticationError):
        peer_report.query(places, secret=bytes(32), job="test", claim=claim, deadline=soon())
    with pytest.raises(dist.AuthenticationError):
        peer_report.query(places, secret=SECRET, job="other", claim=claim, deadline=soon())
    for wrong in (peer_report.CLAIM.pack(0, 0, 7), b"", claim + b"x"):
        with pytest.raises((dist.DistError, OSError)):
            peer_report.query(places, secret=SECRET, job="test", claim=wrong, deadline=soon())


def test_without_authentication_no_status_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_INSECURE: a rank that can connect could ask, so the channel is refused."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    made = [Connections(rank, 2, host="127.0.0.1", job="test", secret=SECRET) for rank in range(2)]
    try:
        for each in made:
            each.report_of = lambda comm_id: peer_report.PeerReport("in a call", "a stack")
            each.connect([other.address() for other in made])
        with pytest.raises(dist.AuthenticationError, match="different services"):
            made[0].query(1, 7, soon())
    finally:
        for each in made:
            each.close()


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    """As a stopped process does, it takes the connection, and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = silent.getsockname()

        def ask(rank: int, deadline: float) -> peer_report.PeerReport:
            return peer_report.query(
                [place], secret=SECRET, job="test", claim=b"", deadline=deadline
            )

        assert peer_report.gather(ask, [3, 4]) == {3: peer_report.SILENT, 4: peer_report.SILENT}


LISTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "another list": (
        lambda rank: dist.new_group([0, 1] if rank == 0 else [1, 2]),
        "there group '1' is of ranks 1, 2, and here of ranks 0, 1",
    ),
    "a list without it": (
        lambda rank: dist.new_group([0, 1] if rank == 0 else [2]),
        "there group '1' is of other ranks, and here of ranks 0, 1",
    ),
    "another order": (
        lambda rank: dist.new_group([0, 1] if rank == 0 else [1, 0], sort_ranks=False),
        "there group '1' is of ranks 1, 0, and here of ranks 0, 1",
    ),
    "another part": (
        lambda rank: dist.split_group(None, [[0, 1]] if rank == 0 else [[1, 2]]),
        "not in the group of ranks 0, 1: it has not made it, was given other ranks for it",
    ),
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("lists", LISTS)
def test_ranks_that_gave_other_lists_for_a_group(transport: str, lists: str) -> None:
    """The timeout says which ranks the group has here, and, as far as it can be known, there."""
    make, words = LISTS[lists]
    made, over = (threading.Barrier(3, timeout=LONG) for _ in range(2))

    def body(rank: int) -> str:
        dist.barrier()
        group = make(rank)
        made.wait()
        said = ""
        if rank == 0:
            said = timeout_of(lambda: dist.all_reduce(np.zeros(3), group=group, timeout=0.3))
        over.wait()
        return said

    assert words in run_threads(body, 3, transport)[0]


STOP = """
dist.barrier()
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_rank_of_this_host(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host cannot be cut off; where its process is known, so is its state."""
    monkeypatch.setenv("CYDIST_TRANSPORT", transport)
    with TwoProcessJob(tmp_path, STOP) as job:

        def body() -> str:
            dist.barrier()
            os.waitid(os.P_PID, job.process.pid, os.WSTOPPED | os.WNOWAIT)
            return timeout_of(GIVE_UP["all_reduce"])

        said = job.rank_0(body)
    if transport == "shm":
        state = f"its process {job.process.pid} is stopped (SIGSTOP, Ctrl-Z)"
    else:
        state = "it is stopped, or in code that holds Python's lock"
    assert f"is giving no answer: {state}" in said
    assert "cut off" not in said


def test_a_report_is_bounded() -> None:
    """A deep stack is shown by its innermost frames, and a long report is cut."""

    def deep(n: int) -> str:
        return deep(n - 1) if n else peer_report.stacks([threading.get_ident()], others=False)

    text = deep(200)
    assert text.count("in deep") == peer_report.MOST_FRAMES
    long = peer_report.encode(peer_report.PeerReport("in a call", "é" * 10_000))
    assert len(long) == peer_report.MOST_REPORT_BYTES
    assert peer_report.decode(long).state == "in a call"


@pytest.mark.parametrize(
    ("state", "late"),
    [
        ("in all_reduce #3", False),
        ("in no call of the group; its last was all_reduce #3", False),
        ("in no call of the group; its last was all_reduce #3; the group has failed on it", False),
        ("in no call of the group; its last was all_reduce #2", True),
        ("in all_reduce #31", True),
        ("in all_gather #3", True),
        (peer_report.SILENT.state, True),
    ],
)
def test_who_is_late(state: str, late: bool) -> None:
    """Who has not come to the call, not who has left it, or given up on it too."""
    assert peer_report.is_late(peer_report.PeerReport(state, ""), "in all_reduce #3") is late
    assert peer_report.is_late(peer_report.PeerReport(state, ""), "")


def test_nothing_is_collected_while_stacks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that gives up the GIL then would stop the process; later all is as it was."""
    real, collected = sys._current_frames, []

    def looked() -> dict[int, Any]:
        collected.append(gc.isenabled())
        return real()

    monkeypatch.setattr(sys, "_current_frames", looked)
    assert peer_report.stacks((), others=True)
    assert (collected, gc.isenabled()) == ([False], True)

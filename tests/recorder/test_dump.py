"""What a rank remembers of its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_schema import violations

import cydist as dist
from cydist import executor, recorder
from cydist._native import fast_collectives
from cydist.testing import run_threads

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/recorder.schema.json").read_text())
KEPT = 2048
LONG = 30.0
CLOCKS_NS = 50_000  # between the recorder's clock and Python's
HEADERS = 100_000  # bytes of frames, acknowledgements and control messages, at most


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where ranks can be threads."""
    return str(request.param)


def calls_of(group: Any) -> list[dict[str, Any]]:
    """The calls of one group that the process remembers, oldest first."""
    number = group.call_queue.group_number
    return [call for call in dist.recorder.dump()["calls"] if call["group"] == number]


def await_call(group: Any, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for such a call in the group's records."""
    until = time.monotonic() + LONG
    while True:
        for call in calls_of(group):
            if is_it(call):
                return call
        assert time.monotonic() < until, calls_of(group)


def test_the_newest_of_many_groups_is_explained() -> None:
    """However many a process makes, and the first one."""

    def body(rank: int) -> Any:
        for number in range(2000):
            recorder.add_group(f"one of many, with a long name: {number}", "tcp", rank, range(2))
        dist.barrier()  # both ranks' groups are explained in one process
        group = dist.new_group([0, 1])
        dist.broadcast(np.ones(1), 1, group=group)
        return calls_of(group)

    for calls in run_threads(body, 2, "inproc"):
        assert [(call["call"], call["root"]) for call in calls[-1:]] == [("broadcast", 1)]
    assert min(group["group"] for group in dist.recorder.dump()["groups"]) == 1


def test_a_call_of_the_general_path(transport: str) -> None:
    """Number, bytes, dtype, operation, algorithm and times."""

    def body(rank: int) -> list[dict[str, Any]]:
        dist.all_reduce(np.ones(5, "f4"), dist.ReduceOp.MAX)
        return calls_of(dist.group.WORLD)

    for call in [calls[-1] for calls in run_threads(body, 2, transport)]:
        assert (call["call"], call["seq"], call["bytes"], call["dtype"], call["op"]) == (
            "all_reduce", 1, 20, "float32", "MAX",
        )  # fmt: skip
        assert call["algorithm"] in {"flat", "doubling", "staged", "direct", "ring"}
        assert call["state"] == "over"
        assert call["entered_ns"] <= call["began_ns"] <= call["ended_ns"] <= time.monotonic_ns()


def test_a_call_of_the_fast_path(transport: str) -> None:
    """The same, but for the end of a call that did not wait."""

    def body(rank: int) -> dict[str, Any]:
        dist.all_reduce(np.ones(7))
        began = time.monotonic_ns()
        assert fast_collectives.all_reduce(np.ones(7), dist.ReduceOp.SUM, dist.group.WORLD)
        call = calls_of(dist.group.WORLD)[-1]
        # The processor's counter is scaled to the clock.
        assert began - 1_000_000 < call["began_ns"] < time.monotonic_ns() + 1_000_000
        return call

    for call in run_threads(body, 2, transport):
        assert (call["call"], call["seq"], call["bytes"], call["dtype"], call["op"]) == (
            "all_reduce", 2, 56, "float64", "SUM",
        )  # fmt: skip
        assert call["state"] == "over"


MESSAGES: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any, int], Any]]] = {
    "blocking": (
        lambda x, peer: dist.send(x, peer, tag=7), lambda x, peer: dist.recv(x, peer, tag=7)
    ),
    "asynchronous": (
        lambda x, peer: dist.isend(x, peer, tag=7).wait(),
        lambda x, peer: dist.irecv(x, peer, tag=7).wait(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", MESSAGES)
def test_messages(transport: str, way: str) -> None:
    """Tag, peer and bytes of each."""
    send, recv = MESSAGES[way]

    def body(rank: int) -> dict[str, Any]:
        (send, recv)[rank](np.ones(3, "i2"), 1 - rank)
        return calls_of(dist.group.WORLD)[-1]

    for rank, call in enumerate(run_threads(body, 2, transport)):
        assert (call["call"], call["tag"], call["peer"], call["bytes"], call["dtype"]) == (
            ("send", "recv")[rank], 7, 1 - rank, 6, "int16",
        )  # fmt: skip
        assert (call["seq"], call["state"]) == (None, "over")


WAITS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "all_reduce": (lambda: dist.all_reduce(np.ones(2)), lambda: dist.all_reduce(np.ones(2))),
    "async": (
        lambda: dist.all_reduce(np.ones(2), async_op=True).wait(),
        lambda: dist.all_reduce(np.ones(2)),
    ),
    "recv": (lambda: dist.recv(np.ones(2), 1), lambda: dist.send(np.ones(2), 0)),
    "irecv": (lambda: dist.irecv(np.ones(2), 1).wait(), lambda: dist.send(np.ones(2), 0)),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("earlier", [0, 3], ids=["first", "later"])
def test_a_call_that_waits(transport: str, wait: str, earlier: int) -> None:
    """It names the rank that it waits for, and afterwards how long."""
    first, second = WAITS[wait]
    groups: dict[int, Any] = {}
    ready = threading.Event()

    def body(rank: int) -> None:
        groups[rank] = dist.group.WORLD
        for _ in range(earlier):
            dist.all_reduce(np.ones(2))
        dist.barrier()
        if rank == 0:
            ready.set()
            first()
            call = calls_of(groups[0])[-1]
            assert (call["state"], call["waits_for"]) == ("over", None)
            assert 0 < call["longest_wait_ns"] <= call["waited_ns"]
            assert call["longest_wait_for"] == 1
            assert call["waited_ns"] <= call["ended_ns"] - call["began_ns"] + 1000
        else:
            assert ready.wait(LONG)
            call = await_call(
                groups[0], lambda call: call["state"] == "running" and call["waits_for"] == 1
            )
            assert call["began_ns"] <= call["waits_since_ns"] + 1000
            second()

    run_threads(body, 2, transport)


def test_a_failed_call(transport: str) -> None:
    """The reason is in its record."""

    def body(rank: int) -> dict[str, Any]:
        group = dist.group.WORLD
        dist.barrier()
        if rank == 0:
            with pytest.raises(dist.DistTimeoutError):
                dist.all_reduce(np.ones(2), timeout=0.1)
        return calls_of(group)[-1]

    call = run_threads(body, 2, transport)[0]
    assert (call["call"], call["state"], call["status"]) == ("all_reduce", "failed", "timeout")


def test_the_last_calls_are_kept() -> None:
    """Those of the last 2,000, without a gap."""

    def body(rank: int) -> list[int]:
        group = dist.group.WORLD
        for _ in range(KEPT // 2 + 100):
            dist.all_reduce(np.ones(1))
        return [call["seq"] for call in calls_of(group)]

    for seqs in run_threads(body, 2, "inproc"):
        assert 900 < len(seqs) <= KEPT
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_a_call_that_runs_is_kept() -> None:
    """However many calls others make meanwhile."""
    ready = threading.Event()

    def body(rank: int) -> None:
        waiting, busy = dist.group.WORLD, dist.new_group([1, 2])
        if rank == 0:
            ready.set()
            dist.recv(np.ones(1), 1)
            return
        assert ready.wait(LONG)
        if rank == 1:
            await_call(groups[0], lambda call: call["state"] == "running")
        for _ in range(KEPT):
            dist.all_reduce(np.ones(1), group=busy)
        if rank == 1:
            (call,) = [call for call in calls_of(groups[0]) if call["state"] == "running"]
            assert (call["call"], call["peer"]) == ("recv", 1)
            dist.send(np.ones(1), 0, group=waiting)

    groups: dict[int, Any] = {}

    def noting(rank: int) -> None:
        groups[rank] = dist.group.WORLD
        body(rank)

    run_threads(noting, 3, "inproc")


def test_dumps_keep_to_the_schema(tmp_path: Path) -> None:
    """What is returned is what is written, and what docs/recorder.schema.json says."""
    path = tmp_path / "dump.json"

    def body(rank: int) -> None:
        dist.all_reduce(np.ones(2))
        works = [dist.isend(np.ones(1), 1 - rank), dist.irecv(np.ones(1), 1 - rank)]
        if rank == 0:
            found = dist.recorder.dump(path)
            assert violations(found, SCHEMA) == []
            assert json.loads(path.read_text()) == found
            assert path.stat().st_mode & 0o777 == 0o600
        for work in works:
            work.wait()

    run_threads(body, 2, "tcp")


@pytest.mark.parametrize("change", [{"rank": "0"}, {"calls": None}, {"more": 1}, {"version": 2}])
def test_the_schema_refuses_other_things(change: dict[str, Any]) -> None:
    """So that the test above can fail."""
    assert violations(dist.recorder.dump() | change, SCHEMA) != []


def test_an_unknown_format(tmp_path: Path) -> None:
    """It is refused, and no file is made."""
    with pytest.raises(ValueError, match=r'format must be "json" or "torch", not "csv"|csv'):
        dist.recorder.dump(tmp_path / "x", format="csv")
    assert list(tmp_path.iterdir()) == []


def test_a_caller_that_computes_waits_for_nothing(transport: str) -> None:
    """Its asynchronous collective waits for the other rank meanwhile, on another thread."""
    issued = threading.Event()

    def body(rank: int) -> list[dict[str, Any]]:
        if rank == 1:
            assert issued.wait(LONG)
            dist.all_reduce(np.ones(5))
            return []
        work = dist.all_reduce(np.ones(5), async_op=True)
        await_call(dist.group.WORLD, lambda call: call["call"] == "all_reduce")
        issued.set()
        until = time.monotonic() + LONG
        while not work.is_completed():
            assert time.monotonic() < until
        assert work.wait()
        return calls_of(dist.group.WORLD)

    call = run_threads(body, 2, transport)[0][-1]
    assert call["asynchronous"]
    assert call["ended_ns"] > call["began_ns"]
    assert call["caller_waited_ns"] == 0


def test_a_caller_that_waits_at_once_waits_to_the_end(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least from when the other rank enters, which does so after the wait has begun."""
    waits = threading.Event()
    real = executor.TaskWork._wait_for_end

    def told(work: executor.TaskWork, timeout: float | None) -> None:
        waits.set()
        real(work, timeout)

    monkeypatch.setattr(executor.TaskWork, "_wait_for_end", told)

    def body(rank: int) -> tuple[int, list[dict[str, Any]]]:
        if rank == 1:
            assert waits.wait(LONG)
            entered = time.monotonic_ns()
            dist.all_reduce(np.ones(5))
            return entered, []
        dist.all_reduce(np.ones(5), async_op=True).wait()
        return 0, calls_of(dist.group.WORLD)

    (_, calls), (entered, _) = run_threads(body, 2, transport)
    call = calls[-1]
    assert entered < call["ended_ns"]
    least = call["ended_ns"] - max(entered, call["began_ns"])
    most = call["ended_ns"] - call["began_ns"]
    assert least - CLOCKS_NS <= call["caller_waited_ns"] <= most + CLOCKS_NS


def test_a_blocking_call_has_no_other_caller() -> None:
    """It is not asynchronous."""

    def body(rank: int) -> list[dict[str, Any]]:
        dist.all_reduce(np.ones(5))
        return calls_of(dist.group.WORLD)

    for calls in run_threads(body, 2, "inproc"):
        assert [(call["asynchronous"], call["caller_waited_ns"]) for call in calls] == [(False, 0)]


def test_bytes_through_sockets_are_counted_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of messages and their headers, also after the link has been closed."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    sizes = {(0, 1): 3_000_000, (1, 2): 1_000_000, (2, 0): 10}
    before = recorder.sent_bytes()

    def body(rank: int) -> None:
        if rank != 0:
            dist.recv(np.ones(sizes[rank - 1, rank], "u1"), rank - 1)
        if (rank, rank + 1) in sizes:
            dist.send(np.ones(sizes[rank, rank + 1], "u1"), rank + 1)

    run_threads(body, 3, "tcp")
    after = recorder.sent_bytes()
    # The ranks are threads of one process, and each rank here has one sender.
    sent = {rank: after[rank] - before.get(rank, 0) for rank in (1, 2)}
    assert 3_000_000 < sent[1] < 3_000_000 + HEADERS
    assert 1_000_000 < sent[2] < 1_000_000 + HEADERS
    found = {each["rank"]: each["bytes"] for each in dist.recorder.dump()["sent_bytes"]}
    assert found == after


def test_counts_of_closed_links_take_no_room(tmp_path: Path) -> None:
    """However many there were: one file for all of them, and no descriptor."""
    environ = {**os.environ, "CYDIST_TRANSPORT": "tcp", "CYDIST_RUN_FILES": str(tmp_path)}
    # In a process of its own: its descriptors and links are not those of other tests.
    found = subprocess.run(
        [sys.executable, "-c", CLOSED_LINKS], env=environ, capture_output=True, timeout=60
    )
    assert found.returncode == 0, found.stderr.decode()


CLOSED_LINKS = """
import os
import numpy as np
import cydist as dist
from cydist import recorder
from cydist.recorder import sent_counts
from cydist.testing import run_threads

directory = os.environ["CYDIST_RUN_FILES"]

def body(rank):
    dist.all_reduce(np.ones(1000))

run_threads(body, 2, "tcp")
before, descriptors = recorder.sent_bytes(), len(os.listdir("/proc/self/fd"))
for _ in range(5):
    run_threads(body, 2, "tcp")
names = [name for name in os.listdir(directory) if name.startswith("sent-")]
assert names == [f"sent-{os.getpid()}-0"], names
now = os.listdir("/proc/self/fd")
assert len(now) <= descriptors, (now, descriptors)
after = recorder.sent_bytes()
assert all(after[rank] >= before[rank] + 5 * 8000 for rank in range(2)), (before, after)
in_files = sent_counts.of_process(directory, os.getpid())
assert in_files == after, (in_files, after)
"""

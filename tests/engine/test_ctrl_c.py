"""Ctrl-C: in every wait, and between any two steps of one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupted_calls import DEADLINE, MOST_POINTS, CtrlC, interrupted_at
from two_process_job import TwoProcessJob

import cydist as dist
from cydist._native import CallRecord
from cydist.api import process_groups
from cydist.executor import Serial
from cydist.testing import run_threads


def every_point(attempt: Callable[[int], bool], step: int = 1) -> int:
    """Call attempt(1), attempt(2), ... until one is not interrupted; how many were."""
    for point in range(1, MOST_POINTS, step):
        if not attempt(point):
            return point - 1
    raise AssertionError("it never ends")


class Unharmed:
    """A group that no exception fails."""

    def call_failed(self, call: CallRecord, error: BaseException) -> None:
        """Do nothing."""


def run(serial: Serial, body: Callable[[], None]) -> bool:
    """Run a blocking call as a group does: now, or behind those that were issued before."""
    call = CallRecord("call", 0, time.monotonic() + 20)
    if serial.call_queue.run_call_now(Unharmed(), call, lambda call: body()):
        return True
    return serial.run("call", body, call.deadline, print)


def works(serial: Serial) -> bool:
    """Does a call run, on the caller's thread and behind another?"""
    ran: list[int] = []
    first = run(serial, lambda: ran.append(1))
    queued = serial.start("queued", lambda: ran.append(2), None)
    second = run(serial, lambda: ran.append(3))
    queued.wait(20)
    return first and second and [1, 2, 3] == ran


def test_an_interrupt_at_any_point_of_a_blocking_call_leaves_the_queue_working() -> None:
    """The turn is given back, whether or not the call ran."""

    def attempt(point: int) -> bool:
        serial = Serial()
        ended = interrupted_at(point, lambda: run(serial, lambda: None))
        assert works(serial), point
        return ended

    assert every_point(attempt) > 2


def test_an_interrupt_at_any_point_of_starting_a_call_leaves_the_queue_working() -> None:
    """Later calls find a thread, though it is not known whether this one did."""

    def attempt(point: int) -> bool:
        serial = Serial()
        ended = interrupted_at(point, lambda: serial.start("x", lambda: None, None))
        assert works(serial), point
        return ended

    assert every_point(attempt) > 10


def test_an_interrupt_at_any_point_leaves_the_group_usable_or_failed() -> None:
    """Never busy for ever: the next call runs, or raises GroupFailedError, at once."""

    def body(rank: int) -> tuple[int, int]:
        outcomes = []

        def attempt(point: int) -> bool:
            group = dist.new_group([0])
            array = np.ones(3)
            ended = interrupted_at(point, lambda: dist.all_reduce(array, group=group))
            with contextlib.suppress(dist.GroupFailedError):
                dist.all_reduce(array, group=group, timeout=30)
                outcomes.append("usable")
            dist.destroy_process_group(group)
            return ended

        return every_point(attempt), len(outcomes)

    ((points, usable),) = run_threads(body, 1)
    assert 10 < usable < points - 5  # before anything began, and when it was over


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_an_interrupted_call_behind_an_asynchronous_one_writes_nothing_more(transport: str) -> None:
    """It had begun on another thread; when the caller gets the exception it has ended."""
    begun = threading.Event()

    def body(rank: int) -> None:
        group = dist.new_group([0, 1])
        array = np.full(1000, 1.0)
        dist.barrier()
        if rank == 1:
            first = dist.all_reduce(np.ones(1), group=group, async_op=True)
            first.wait(30)
            assert begun.wait(30)
            dist.barrier()  # rank 0 has been interrupted
            with pytest.raises(dist.DistError):
                dist.all_reduce(np.full(1000, 2.0), group=group, timeout=20)
            dist.barrier()
            return
        first = dist.all_reduce(np.ones(1), group=group, async_op=True)
        # The wait that an interrupt ends: for a call that is at work on another thread.
        work_class = type(first)
        original = work_class.wait_until

        def wait_until(work: Any, deadline: float) -> bool:
            work_class.wait_until = original  # type: ignore[method-assign]
            assert first.wait(30)
            while group.native.seq < 2:
                first.wait_until(0)
            begun.set()
            raise CtrlC

        work_class.wait_until = wait_until  # type: ignore[method-assign]
        with pytest.raises(CtrlC):
            dist.all_reduce(array, group=group)
        before = array.tobytes()
        dist.barrier()
        dist.barrier()  # rank 1 has tried
        assert before == array.tobytes()
        with pytest.raises(dist.GroupFailedError):
            dist.barrier(group)

    run_threads(body, 2, transport)


# Every wait


def ctrl_c(call: Callable[[], Any], first: Callable[[], Any] = lambda: None) -> None:
    """Run `call`, which waits; SIGINT comes in a moment, and must end it.

    Args:
        first: What the handler does before it raises.
    """

    def handler(number: int, frame: Any) -> None:
        first()
        raise CtrlC

    before = signal.signal(signal.SIGINT, handler)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        call()
    except CtrlC:
        return
    finally:
        timer.join(DEADLINE)
        signal.signal(signal.SIGINT, before)
    raise AssertionError("it ended by itself")


class Pair:
    """A job of which the main thread is rank 0; rank 1 does what it is given, on a thread."""

    def __init__(self, transport: str) -> None:
        store = dist.HashStore()
        self._pool = ThreadPoolExecutor(1, initializer=process_groups.thread_is_rank)
        joins = self._pool.submit(
            dist.init_process_group, transport, store=store, rank=1, world_size=2, timeout=60
        )
        dist.init_process_group(transport, store=store, rank=0, world_size=2, timeout=60)
        joins.result(DEADLINE)

    def both(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        """Run `body` on both ranks."""
        other = self.other(body)
        return body(), other.result(DEADLINE)

    def other(self, body: Callable[[], Any]) -> Future[Any]:
        """Run `body` on rank 1."""
        return self._pool.submit(body)

    def close(self) -> None:
        self.both(dist.destroy_process_group)
        self._pool.shutdown()


@pytest.fixture(params=["inproc", "tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two ranks of each transport."""
    made = Pair(request.param)
    yield made
    made.close()


def behind(group: Any, array: Any) -> None:
    """A blocking call whose turn does not come."""
    dist.all_reduce(array, group=group, async_op=True)
    dist.all_reduce(array, group=group)


# Rank 1 takes part in none of them.
BLOCKING: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda group, array: dist.all_reduce(array, group=group),
    "broadcast": lambda group, array: dist.broadcast(array, 1, group=group),
    "all_gather": lambda group, array: dist.all_gather(np.split(array, 2), array[:4], group=group),
    "barrier": lambda group, array: dist.barrier(group),
    "monitored_barrier": lambda group, array: dist.monitored_barrier(group),
    "recv": lambda group, array: dist.recv(array, 1, group),
    "recv from anyone": lambda group, array: dist.recv(array, None, group),
    "send": lambda group, array: dist.send(np.ones(1_000_000), 1, group),
    "strided": lambda group, array: dist.all_reduce(array[::2], group=group),
    "all_gather_object": lambda group, array: dist.all_gather_object([None] * 2, {}, group),
    "recv_object_list": lambda group, array: dist.recv_object_list([None], 1, group),
    "behind an asynchronous call": behind,
}


@pytest.mark.parametrize("call", BLOCKING)
def test_ctrl_c_ends_a_blocking_call(pair: Pair, call: str) -> None:
    """It fails its group on both ranks, its array is let go of, and other groups go on."""
    group, theirs = pair.both(lambda: dist.new_group([0, 1]))
    array = np.full(8, 7.0)
    ctrl_c(lambda: BLOCKING[call](group, array))
    before = array.tobytes()
    with pytest.raises(dist.GroupFailedError, match="CtrlC"):
        dist.barrier(group)

    def other() -> None:
        with pytest.raises(dist.DistError) as caught:
            dist.all_reduce(np.ones(8), group=theirs)
        assert not isinstance(caught.value, dist.DistTimeoutError)

    pair.other(other).result(DEADLINE)

    def total() -> float:
        ones = np.ones(1)
        dist.all_reduce(ones)
        return float(ones[0])

    assert (2.0, 2.0) == pair.both(total)
    assert before == array.tobytes()


STARTED: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda group, array: dist.all_reduce(array, group=group, async_op=True),
    "irecv": lambda group, array: dist.irecv(array, 1, group),
}


@pytest.mark.parametrize("call", STARTED)
def test_ctrl_c_ends_only_the_wait_for_a_work(pair: Pair, call: str) -> None:
    """The call goes on, and can be waited for again."""
    group, theirs = pair.both(lambda: dist.new_group([0, 1]))
    array = np.zeros(8)
    work = STARTED[call](group, array)
    ctrl_c(work.wait)
    answer = {"all_reduce": dist.all_reduce, "irecv": lambda a, group: dist.send(a, 0, group)}
    done = pair.other(lambda: answer[call](np.full(8, 5.0), group=theirs))
    work.wait(DEADLINE)
    done.result(DEADLINE)
    assert [5.0] * 8 == array.tolist()


LATE: dict[str, Callable[[Any, Any], Any]] = {
    "recv": lambda group, array: dist.recv(array, 1, group),
    "recv from anyone": lambda group, array: dist.recv(array, None, group),
    "work": lambda group, array: dist.irecv(array, 1, group).wait(),
}


@pytest.mark.parametrize("call", LATE)
@pytest.mark.parametrize("default", [False, True], ids=["group", "default group"])
def test_ctrl_c_is_not_lost_when_the_message_comes(pair: Pair, call: str, default: bool) -> None:
    """What the handler raised is raised, though the wait is over when it returns."""
    group, theirs = (None, None) if default else pair.both(lambda: dist.new_group([0, 1]))
    array, other = np.zeros(8), np.zeros(1)
    spare = dist.irecv(other, 1, tag=9)
    assert spare is not None

    def arrives() -> None:
        sent = pair.other(lambda: dist.send(np.full(8, 5.0), 0, theirs))
        limit = time.monotonic() + DEADLINE
        while array[-1] != 5.0:
            assert time.monotonic() < limit
            spare.is_completed()  # moves messages on
        sent.result(DEADLINE)

    ctrl_c(lambda: LATE[call](group, array), arrives)
    assert [5.0] * 8 == array.tolist()


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path / "store"), 1),
    "tcp": lambda path: dist.TCPStore("127.0.0.1", 0, 1, True),
}
STORE_WAITS: dict[str, Callable[[dist.Store], Any]] = {
    "get": lambda store: store.get("never"),
    "wait": lambda store: store.wait(["never"]),
    "queue_pop": lambda store: store.queue_pop("never"),
}


@pytest.mark.parametrize("call", STORE_WAITS)
@pytest.mark.parametrize("kind", STORES)
def test_ctrl_c_ends_a_wait_for_a_store(tmp_path: Path, kind: str, call: str) -> None:
    """The store works afterwards."""
    store = STORES[kind](tmp_path)
    ctrl_c(lambda: STORE_WAITS[call](store))
    store.set("key", "value")
    assert b"value" == store.get("key")


CHECK_INS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "store, rank 0": lambda path, port: {"store": dist.HashStore(), "rank": 0},
    "store, rank 1": lambda path, port: {"store": dist.HashStore(), "rank": 1},
    "tcp, rank 0": lambda path, port: {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0},
    "tcp, rank 1": lambda path, port: {"init_method": f"tcp://127.0.0.1:{port}", "rank": 1},
    "file": lambda path, port: {"init_method": f"file://{path}/meeting"},
}


@pytest.mark.parametrize("way", CHECK_INS)
def test_ctrl_c_ends_the_wait_for_other_ranks(tmp_path: Path, way: str) -> None:
    """init_process_group can be called again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = CHECK_INS[way](tmp_path, port)
    ctrl_c(lambda: dist.init_process_group("tcp", world_size=2, timeout=60, **arguments))
    assert not dist.is_initialized()
    dist.init_process_group("tcp", world_size=1, rank=0, store=dist.HashStore())
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("call", ["all_gather_object", "broadcast_object_list", "gather_object"])
def test_an_interrupt_between_two_steps_of_a_call_is_told(transport: str, call: str) -> None:
    """Wherever it comes, no rank waits for the rest: the other's call works or raises at once."""
    calls: dict[str, Callable[[Any, int], Any]] = {
        "all_gather_object": lambda group, rank: dist.all_gather_object([0, 0], rank, group),
        "broadcast_object_list": lambda group, rank: dist.broadcast_object_list([rank], 0, group),
        "gather_object": lambda group, rank: dist.gather_object(
            rank, None if rank else [0, 0], 0, group
        ),
    }

    def body(rank: int) -> int:
        ended = []
        for point in range(1, MOST_POINTS, 41):
            group = dist.new_group([0, 1])
            if rank == 0:
                more = interrupted_at(point, lambda g=group: calls[call](g, 0))
                with contextlib.suppress(dist.DistError):
                    dist.barrier(group)
            else:
                with contextlib.suppress(dist.DistError):
                    calls[call](group, 1)
                    dist.barrier(group)
                more = True
            flag = np.array([more], "u1")
            dist.broadcast(flag, 0)
            dist.destroy_process_group(group)
            if not flag[0]:
                break
            ended.append(point)
        return len(ended)

    counts = run_threads(body, 2, transport)
    assert counts[0] == counts[1] > 2


def test_ctrl_c_ends_the_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves waits a second at most for its last bytes to arrive at a rank that is
    stopped; an interrupt ends that wait too, with no connection left open."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    stops = "dist.barrier()\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    with TwoProcessJob(tmp_path, stops) as other:
        dist.init_process_group(
            "tcp",
            init_method=other.init_method,
            rank=0,
            world_size=2,
            timeout=60,
            group_name="beside",
        )
        dist.barrier()
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED)
        link = dist.group.WORLD._endpoint.link
        for _ in range(600):
            dist.isend(np.ones(4000), 1)  # more than sockets hold
        ctrl_c(dist.destroy_process_group)
        assert 0 == link.statistics()["connections"]
        assert not dist.is_initialized()  # the world went with its last group

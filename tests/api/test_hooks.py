"""Hooks: what they get of each call, when, and what they cost when there are none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import valid_calls
from entered_functions import entered_functions

import cydist as dist
from cydist import CallInfo, _native
from cydist.testing import run_threads

Seen = list[tuple[str, CallInfo, Any]]


@pytest.fixture(params=["inproc", "tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the default group."""
    name: str = request.param
    return name


@pytest.fixture
def seen() -> Iterator[Seen]:
    """What a hook sees: ("before", call, None) and ("after", call, error). The state is the place
    of the former."""
    found: Seen = []

    def before(call: CallInfo) -> int:
        found.append(("before", call, None))
        return len(found)

    def after(call: CallInfo, state: int, error: BaseException | None) -> None:
        began = found[state - 1]
        assert began == ("before", call._replace(seq=0), None)
        found.append(("after", call, error))

    handle = dist.add_hook(before, after)
    yield found
    handle.remove()


def alone(body: Callable[[], Any]) -> Any:
    """The result of `body` on the one rank of a job."""
    return run_threads(lambda rank: body(), 1)[0]


COLLECTIVES = [name for name in valid_calls.CALLS if not name.endswith(("send", "recv"))]


def test_a_blocking_collective(seen: Seen, backend: str) -> None:
    """Has its group, number, bytes, dtype and members; `after` comes before it returns."""

    def body(rank: int) -> None:
        pair = dist.new_group([1, 2])
        if rank == 1:
            dist.all_reduce(np.ones(6, "float32"), group=pair)
            dist.barrier(pair)
            seen.append(("end", seen[-1][1], None))
        elif rank == 2:
            dist.all_reduce(np.ones(6, "float32"), group=pair)
            dist.barrier(pair)

    run_threads(body, 3, backend)
    calls = [(call.name, call.seq, call.nbytes, call.dtype) for what, call, _ in seen
             if what == "after"]  # fmt: skip
    assert sorted(calls) == 2 * [("all_reduce", 1, 24, "float32")] + 2 * [("barrier", 2, 0, "")]
    assert {(call.peers, call.async_op, call.backend) for _, call, _ in seen} == {
        ((1, 2), False, backend)
    }
    assert {call.group for _, call, _ in seen} == {"1"}
    end = next(i for i, (what, _, _) in enumerate(seen) if what == "end")
    assert [what for what, _, _ in seen[:end]].count("after") >= 2


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_is_seen(name: str, async_op: bool, seen: Seen) -> None:
    """Once before and once after, under its own name, without an error."""

    def body() -> None:
        work = getattr(dist, name)(**valid_calls.of_one_rank(name), async_op=async_op)
        if async_op:
            work.wait()

    alone(body)
    wait_for(lambda: len(ends_of(seen, name)) == 1)
    assert [(what, call.name, error) for what, call, error in seen] == [
        ("before", name, None), ("after", name, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "peer"), [("send", 1), ("recv", 0), ("isend", 1), ("irecv", 0)])
def test_a_message(name: str, peer: int, seen: Seen, backend: str) -> None:
    """Has the global rank of its other side, and no number; an asynchronous one ends later."""

    def body(rank: int) -> None:
        call = getattr(dist, name)
        if rank != peer:
            work = call(np.ones(3), peer)
            if name.startswith("i"):
                work.wait()
        elif name.endswith("send"):
            dist.recv(np.ones(3), 1 - rank)
        else:
            dist.send(np.ones(3), 1 - rank)

    run_threads(body, 2, backend)
    wait_for(lambda: len(ends_of(seen, name)) == 1)
    (call,) = ends_of(seen, name)
    assert call == CallInfo(name, "0", backend, 0, 24, "float64", (peer,), name.startswith("i"))


def test_a_receive_from_anyone(seen: Seen) -> None:
    """Has no peers."""

    def body(rank: int) -> None:
        if rank:
            dist.send(np.ones(3), 0)
        else:
            dist.recv(np.ones(3))

    run_threads(body, 2)
    assert [call.peers for call in ends_of(seen, "recv")] == [()]


def ends_of(seen: Seen, name: str) -> list[CallInfo]:
    """The calls of this name that have completed."""
    return [call for what, call, _ in seen if what == "after" and call.name == name]


def wait_for(done: Callable[[], bool]) -> None:
    """Wait until `done()`, at most a minute."""
    moment = threading.Event()
    for _ in range(6000):
        if done():
            return
        moment.wait(0.01)
    raise AssertionError("it was not done within a minute")


def test_messages_of_a_batch(seen: Seen) -> None:
    """Are seen one by one."""

    def body(rank: int) -> None:
        out, into = np.ones(3), np.ones(3)
        ops = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    run_threads(body, 2)
    wait_for(lambda: len(ends_of(seen, "isend")) == len(ends_of(seen, "irecv")) == 2)


def test_an_asynchronous_collective_ends_at_its_completion(seen: Seen, backend: str) -> None:
    """Not when it returns: `after` comes once the other rank has taken part."""
    go = threading.Event()

    def body(rank: int) -> None:
        if rank:
            assert go.wait(60)
        work = dist.all_reduce(np.ones(3), async_op=True)
        if rank == 0:
            assert ends_of(seen, "all_reduce") == []
            go.set()
        work.wait()

    run_threads(body, 2, backend)
    wait_for(lambda: len(ends_of(seen, "all_reduce")) == 2)
    assert {(call.seq, call.async_op) for call in ends_of(seen, "all_reduce")} == {(1, True)}


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_errors(async_op: bool, seen: Seen, backend: str) -> None:
    """`after` gets the exception that the call raises."""

    def body(rank: int) -> BaseException:
        def call() -> None:
            work = dist.all_reduce(np.ones(3 + rank), async_op=async_op)
            work.wait()

        with pytest.raises(dist.MismatchError) as caught:
            call()
        return caught.value

    raised = run_threads(body, 2, backend)
    wait_for(lambda: len(ends_of(seen, "all_reduce")) == 2)
    assert {error for what, _, error in seen if what == "after"} == set(raised)


def test_a_call_whose_turn_does_not_come_ends(seen: Seen) -> None:
    """With the error of its group."""

    def body(rank: int) -> None:
        works = [dist.all_reduce(np.ones(3 + rank), async_op=True) for _ in range(2)]
        for work in works:
            with pytest.raises(dist.DistError):
                work.wait()

    run_threads(body, 2)
    wait_for(lambda: len(ends_of(seen, "all_reduce")) == 4)
    assert all(error is not None for what, _, error in seen if what == "after")


def test_wrong_arguments_are_not_seen(seen: Seen) -> None:
    """Nothing began."""
    with pytest.raises(ValueError, match="a rank does not send to itself"):
        alone(lambda: dist.send(np.ones(1), 0))
    assert seen == []


def test_an_exception_of_a_hook_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes on, since other ranks wait for it."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def wrong(*arguments: object) -> None:
        raise KeyError("wrong")

    handle = dist.add_hook(wrong, wrong)
    try:
        x = np.ones(3)
        alone(lambda: dist.all_reduce(x))
    finally:
        handle.remove()
    assert [each.exc_type for each in reported] == [KeyError, KeyError]
    assert {each.object for each in reported} == {wrong}


def test_hooks_are_nested() -> None:
    """`after` of the last one comes first."""
    order: list[str] = []
    handles = [
        dist.add_hook(
            lambda call, name=name: order.append(f"before {name}"),
            lambda call, state, error, name=name: order.append(f"after {name}"),
        )
        for name in "ab"
    ]
    try:
        alone(dist.barrier)
    finally:
        for handle in handles:
            handle.remove()
    assert order == ["before a", "before b", "after b", "after a"]


@pytest.mark.parametrize("wrong", [3, "before"])
def test_wrong_hooks(wrong: Any) -> None:
    """Are refused, and nothing is added."""
    with pytest.raises(TypeError, match="cannot be called"):
        dist.add_hook(wrong)
    assert not _native.is_observed()


def test_calls_take_the_fast_path_again(seen: Seen) -> None:
    """After the last hook was removed, once for each handle."""
    handle = dist.add_hook()
    handle.remove()
    handle.remove()
    assert _native.is_observed()

    def body() -> list[str]:
        x, group = np.ones(4), dist.group.WORLD
        for _ in range(2):
            dist.all_reduce(x, group=group)
        return entered_functions(lambda: dist.all_reduce(x, group=group))

    assert alone(body) != []
    for each in list(_handles()):
        each.remove()
    assert not _native.is_observed()
    assert alone(body) == []


def _handles() -> tuple[dist.HookHandle, ...]:
    from cydist.groups import hooks

    return hooks._installed

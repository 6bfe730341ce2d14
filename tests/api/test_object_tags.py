"""Objects that a third party changes on their way: refused before anything is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.api import object_tags, objects
from cydist.testing import ThreadJob

Bytes = np.ndarray[Any, Any]
Replay = Callable[[Callable[[int], object]], None]
RAN: list[object] = []


class Ran:
    """An object that tells when it is unpickled, which is code that runs."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, (self.value,)


# Each call between ranks 0 and 1, in which rank 1 receives two objects of rank 0, or one.


def all_gather(rank: int, value: object) -> list[object]:
    found: list[object] = [None, None]
    dist.all_gather_object(found, value)
    return found[:1]


def broadcast(rank: int, value: object) -> list[object]:
    found = [value, value] if rank == 0 else [None, None]
    dist.broadcast_object_list(found, 0)
    return found


def gather(rank: int, value: object) -> list[object]:
    found: list[object] = [None, None]
    dist.gather_object(value, found if rank == 1 else None, 1)
    return found[:1]


def scatter(rank: int, value: object) -> list[object]:
    found: list[object] = [None]
    dist.scatter_object_list(found, [None, value] if rank == 0 else None, 0)
    return found


def message(rank: int, value: object) -> list[object]:
    found = [value, value] if rank == 0 else [None, None]
    dist.send_object_list(found, 1) if rank == 0 else dist.recv_object_list(found, 0)
    return found


CALLS = {call.__name__: call for call in (all_gather, broadcast, gather, scatter, message)}


@pytest.fixture(params=CALLS.values(), ids=list(CALLS))
def call(request: pytest.FixtureRequest) -> Callable[[int, object], list[object]]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["tcp", "shm"])
def job(request: pytest.FixtureRequest, secret: bytes) -> Iterator[ThreadJob]:
    with ThreadJob(2, request.param) as made:
        yield made


@pytest.fixture
def on_the_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Sets what happens to the bytes of an object that rank 1 has received: a function of them."""
    change: list[Callable[[Bytes], None]] = []
    original = objects._decode
    RAN.clear()

    def decode(name: str, data: Bytes, *args: Any) -> list[Any]:
        if change and dist.get_rank() == 1:
            change[0](data)
        return original(name, data, *args)

    def set_change(function: Callable[[Bytes], None] | None) -> None:
        change[:] = [] if function is None else [function]

    monkeypatch.setattr(objects, "_decode", decode)
    yield set_change
    RAN.clear()


@pytest.fixture
def replay(job: ThreadJob, on_the_way: Callable[[Any], None]) -> Replay:
    """Runs a body, and from then on rank 1 receives the bytes that it received there first."""

    def run(body: Callable[[int], object]) -> None:
        seen: list[Bytes] = []
        on_the_way(lambda data: seen.append(data.copy()))
        job.run(body)

        def replace(data: Bytes) -> None:
            data[:] = seen[0]

        on_the_way(replace)

    return run


def refused(rank: int, call: Callable[[int, object], list[object]], value: object) -> str:
    """What rank 1 is told, which gets no object."""
    if rank == 0:
        call(rank, value)
        return ""
    with pytest.raises(dist.AuthenticationError, match="the object from rank 0") as caught:
        call(rank, value)
    assert caught.value.ranks == (0,)
    return str(caught.value)


@pytest.mark.parametrize("at", [0, 5, -1], ids=["first byte", "inside", "tag"])
def test_changed_objects_are_not_decoded(
    job: ThreadJob, call: Any, on_the_way: Callable[[Any], None], at: int
) -> None:
    """A bit that was changed is an AuthenticationError on the receiver, no code runs, and the group
    stays usable."""

    def flip(data: Bytes) -> None:
        data[at] ^= 1

    on_the_way(flip)
    job.run(lambda rank: refused(rank, call, Ran("changed")))
    assert RAN == []
    on_the_way(None)
    value = {"a": 1}
    _, found = job.run(lambda rank: call(rank, value))
    assert found == [value] * len(found)


def test_earlier_objects_are_not_taken_again(job: ThreadJob, call: Any, replay: Replay) -> None:
    """The bytes of the same call before this one, from the same rank, are refused."""
    replay(lambda rank: call(rank, "first"))
    job.run(lambda rank: refused(rank, call, "other"))


def test_objects_of_another_call_are_refused(job: ThreadJob, replay: Replay) -> None:
    """What was broadcast is no message, though sender and number are the same."""
    replay(lambda rank: broadcast(rank, "first"))
    job.run(lambda rank: refused(rank, message, "other"))


def test_objects_change_no_places(job: ThreadJob, on_the_way: Callable[[Any], None]) -> None:
    """Two objects of one list, of one length, that were swapped are refused."""

    def swap(data: Bytes) -> None:
        half = len(data) // 2
        data[:] = np.concatenate([data[half:], data[:half]])

    def body(rank: int) -> None:
        found = ["ab", "cd"] if rank == 0 else [None, None]
        if rank == 0:
            dist.broadcast_object_list(found, 0)
            return
        with pytest.raises(dist.AuthenticationError):
            dist.broadcast_object_list(found, 0)
        assert found == [None, None]

    on_the_way(swap)
    job.run(body)


def test_objects_of_another_group_are_refused(job: ThreadJob, replay: Replay) -> None:
    """Of the same ranks, in its call of the same number."""
    replay(lambda rank: broadcast(rank, "first"))

    def body(rank: int) -> None:
        group = dist.new_group([0, 1])
        found: list[object] = ["other", "other"] if rank == 0 else [None, None]
        if rank == 0:
            dist.broadcast_object_list(found, 0, group)
            return
        with pytest.raises(dist.AuthenticationError):
            dist.broadcast_object_list(found, 0, group)

    job.run(body)


def test_another_start_has_another_key(secret: bytes) -> None:
    """With the same secret, ranks and calls."""
    keys = []
    for _ in range(2):
        with ThreadJob(2, "tcp") as job:
            of_ranks = job.run(lambda rank: objects.current_world().object_key)
        assert of_ranks[0] == of_ranks[1]
        keys.append(of_ranks[0])
    assert keys[0] != keys[1]


def test_threads_of_one_process_have_no_tags() -> None:
    """Nothing leaves the process."""

    def body(rank: int) -> int:
        group = dist.group.WORLD
        assert group is not None
        return object_tags.ObjectTags(group, "any").tag_bytes

    with ThreadJob(2) as job:
        assert job.run(body) == [0, 0]

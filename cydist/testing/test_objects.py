"""Object collectives."""

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.api import object_codec
from cydist.api.object_tags import TO_ALL, ObjectTags
from cydist.testing.contract import Job, Jobs


class Custom:
    """Something that only pickle can say."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return complex, (self.value, 1)


def values(rank: int) -> Any:
    """Objects of one rank, of a size that depends on the rank."""
    return {"rank": rank, "list": list(range(rank * 10)), "array": np.arange(rank, dtype="f4")}


def check(expected: Any, actual: Any) -> None:
    """Compare two of `values`."""
    np.testing.assert_array_equal(expected["array"], actual["array"], strict=True)
    assert {**expected, "array": None} == {**actual, "array": None}


def test_all_gather_object(job: Job, size: int) -> None:
    """Every rank gets every rank's object."""

    def body(rank: int) -> Any:
        gathered = [None] * size
        dist.all_gather_object(gathered, values(rank))
        return gathered

    for gathered in job.run(body):
        for rank, value in enumerate(gathered):
            check(values(rank), value)


def test_asynchronous_objects(job: Job, size: int) -> None:
    """Calls under way do not meet the group's other calls, and end in the order of the program."""

    def body(rank: int) -> Any:
        x, works = np.ones(10), []
        for step in range(3):
            mine: list[Any] = [None] * size
            works.append(dist.all_gather_object(mine, values(rank + step), async_op=True))
            last = [step] if rank == 0 else [None]
            works.append(dist.broadcast_object_list(last, 0, async_op=True))
            dist.all_reduce(x)
        assert (x == size**3).all()
        return [work.result() for work in works if work is not None]

    for results in job.run(body):
        for step in range(3):
            for rank, value in enumerate(results[2 * step]):
                check(values(rank + step), value)
            assert results[2 * step + 1] == [step]


def test_broadcast_object_list(job: Job, size: int) -> None:
    """The root's list replaces every rank's, pickled objects too where they may be."""

    def body(rank: int) -> Any:
        assert dist.group.WORLD is not None
        other = Custom(5) if dist.group.WORLD.as_host_group().authenticated else complex(5, 1)
        objects = [values(3), other, None] if rank == size - 1 else [0, 0, 0]
        dist.broadcast_object_list(objects, src=size - 1)
        return objects

    for rank, objects in enumerate(job.run(body)):
        check(values(3), objects[0])
        assert None is objects[2]
        if rank != size - 1:
            assert complex(5, 1) == objects[1]


def test_gather_object(job: Job, size: int) -> None:
    """The root gets every rank's object, the others nothing."""

    def body(rank: int) -> Any:
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(values(rank), gathered, dst=0)
        return gathered

    gathered, *rest = job.run(body)
    assert [None] * (size - 1) == rest
    for rank, value in enumerate(gathered):
        check(values(rank), value)


def test_scatter_object_list(job: Job, size: int) -> None:
    """Every rank gets its entry of the root's list."""

    def body(rank: int) -> Any:
        output = [None]
        dist.scatter_object_list(output, [values(r) for r in range(size)] if rank == 0 else None)
        return output[0]

    for rank, value in enumerate(job.run(body)):
        check(values(rank), value)


def test_send_and_recv_object_list(jobs: Jobs, backend: str) -> None:
    """A list of objects from one rank to another; the receiver learns the sender."""

    def body(rank: int) -> Any:
        if rank == 0:
            return dist.send_object_list([values(2), "x"], dst=1)
        objects = [None, None]
        source = dist.recv_object_list(objects, src=0)
        check(values(2), objects[0])
        return source, objects[1]

    assert [None, (0, "x")] == jobs.get(backend, 2).run(body)


def test_an_object_that_cannot_be_encoded_raises_on_every_rank(jobs: Jobs, backend: str) -> None:
    """Its own rank sees pickle's error, the others which rank it was; the group lives on."""

    def body(rank: int) -> Any:
        kind = dist.DistBackendError if rank == 0 else Exception
        with pytest.raises(kind, match="rank 1 could not encode" if rank == 0 else None):
            dist.all_gather_object([None, None], (lambda: 0) if rank == 1 else 0)
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == jobs.get(backend, 2).run(body)


def test_lists_of_different_length_raise_where_they_differ(jobs: Jobs, backend: str) -> None:
    """A rank whose list differs in length from the root's raises."""

    def body(rank: int) -> Any:
        objects = [1, 2] if rank == 0 else [0]
        if rank == 0:
            return dist.broadcast_object_list(objects, 0)
        with pytest.raises(ValueError, match="1 entries here and 2 on rank 0"):
            dist.broadcast_object_list(objects, 0)
        return None

    jobs.get(backend, 2).run(body)


def test_bytes_that_are_no_object_name_their_sender(jobs: Jobs, backend: str) -> None:
    """A rank that sends something else is named, and the group stays usable."""

    def body(rank: int) -> Any:
        if rank == 1:
            group = dist.group.WORLD
            assert group is not None
            tags = ObjectTags(group.as_host_group(), "all_gather_object")
            tags.count()
            ours = np.frombuffer(bytearray(tags.seal(b"\x00xx", 1, TO_ALL, 0)), np.uint8)
            theirs = len(object_codec.encode(0, allow_pickle=False)) + tags.tag_bytes
            dist.all_gather([np.zeros(1, np.int64) for _ in range(2)], np.array([len(ours)]))
            dist.all_gather([np.zeros(theirs, np.uint8), np.zeros_like(ours)], ours)
        else:
            with pytest.raises(dist.DistBackendError, match="rank 1 sent is no object: unknown"):
                dist.all_gather_object([None] * 2, 0)
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == jobs.get(backend, 2).run(body)

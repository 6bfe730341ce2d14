"""Object collectives, on every backend whose ranks can be threads."""

import pickle

import numpy as np
import pytest

import cydist as dist
from cydist import codec


class Custom:
    """Something that only pickle can say."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return complex, (self.value, 1)


def values(rank):
    """Objects of one rank, of a size that depends on the rank."""
    return {"rank": rank, "list": list(range(rank * 10)), "array": np.arange(rank, dtype="f4")}


def check(expected, actual):
    """Compare two of `values`."""
    np.testing.assert_array_equal(expected["array"], actual["array"], strict=True)
    assert {**expected, "array": None} == {**actual, "array": None}


def test_all_gather_object(job, size):
    """Everybody gets everybody's object."""

    def body(rank):
        gathered = [None] * size
        dist.all_gather_object(gathered, values(rank))
        return gathered

    for gathered in job.run(body):
        for rank, value in enumerate(gathered):
            check(values(rank), value)


def test_broadcast_object_list(job, size):
    """The root's list replaces everybody's, pickled objects too."""

    def body(rank):
        objects = [values(3), Custom(5), None] if rank == size - 1 else [0, 0, 0]
        dist.broadcast_object_list(objects, src=size - 1)
        return objects

    for rank, objects in enumerate(job.run(body)):
        check(values(3), objects[0])
        assert None is objects[2]
        if rank != size - 1:
            assert complex(5, 1) == objects[1]


def test_gather_object(job, size):
    """The root gets everybody's object, the others nothing."""

    def body(rank):
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(values(rank), gathered, dst=0)
        return gathered

    gathered, *rest = job.run(body)
    assert [None] * (size - 1) == rest
    for rank, value in enumerate(gathered):
        check(values(rank), value)


def test_scatter_object_list(job, size):
    """Every rank gets its entry of the root's list."""

    def body(rank):
        output = [None]
        dist.scatter_object_list(output, [values(r) for r in range(size)] if rank == 0 else None)
        return output[0]

    for rank, value in enumerate(job.run(body)):
        check(values(rank), value)


def test_send_and_recv_object_list(jobs, backend):
    """A list of objects from one rank to another; the receiver learns the sender."""

    def body(rank):
        if rank == 0:
            return dist.send_object_list([values(2), "x"], dst=1)
        objects = [None, None]
        source = dist.recv_object_list(objects, src=0)
        check(values(2), objects[0])
        return source, objects[1]

    assert [None, (0, "x")] == jobs.get(backend, 2).run(body)


def test_an_object_that_cannot_be_encoded_raises_on_every_rank(jobs, backend):
    """Its own rank sees pickle's error, the others which rank it was; the group lives on."""

    def body(rank):
        kind = dist.DistBackendError if rank == 0 else Exception
        with pytest.raises(kind, match="rank 1 could not encode" if rank == 0 else None):
            dist.all_gather_object([None, None], (lambda: 0) if rank == 1 else 0)
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == jobs.get(backend, 2).run(body)


def test_lists_of_different_length_raise_where_they_differ(jobs):
    """The rank whose list has another length than the root's is told so."""

    def body(rank):
        objects = [1, 2] if rank == 0 else [0]
        if rank == 0:
            return dist.broadcast_object_list(objects, 0)
        with pytest.raises(ValueError, match="1 entries here and 2 on rank 0"):
            dist.broadcast_object_list(objects, 0)
        return None

    jobs.get("inproc", 2).run(body)


HUGE = 1 << 60


def announce(*words):
    """What a broken rank 1 says in a group in place of the sizes of its objects."""

    def say(group):
        for word in words:
            dist.broadcast(np.array(word, np.int64), 1, group)

    return say


def gather_sizes(size):
    """A broken rank 1 that gives its object this size."""

    def say(group):
        dist.all_gather([np.zeros(1, np.int64) for _ in range(2)], np.array([size]), group)

    return say


def send_words(*words):
    """A broken rank 1 that sends these."""

    def say(group):
        for word in words:
            dist.send(np.array(word, np.int64), 0, group)

    return say


OBJECT_CALLS = {
    "all_gather": lambda group: dist.all_gather_object([None] * 2, 0, group),
    "gather": lambda group: dist.gather_object(0, [None] * 2, 0, group),
    "broadcast": lambda group: dist.broadcast_object_list([None], 1, group),
    "scatter": lambda group: dist.scatter_object_list([None], None, 1, group),
    "recv": lambda group: dist.recv_object_list([None], 1, group),
}
BROKEN = {
    "all_gather": ("all_gather", gather_sizes(HUGE), HUGE),
    "gather": ("gather", gather_sizes(HUGE), HUGE),
    "broadcast of many": ("broadcast", announce([HUGE // 8]), HUGE),
    "broadcast of less than none": ("broadcast", announce([-1]), -8),
    "broadcast of large": ("broadcast", announce([1], [HUGE]), HUGE),
    "broadcast that overflows": ("broadcast", announce([2], [2**63 - 1, 2**63 - 1]), 2**64 - 2),
    "scatter": ("scatter", announce([HUGE, HUGE]), HUGE),
    "receive of many": ("recv", send_words([HUGE // 8]), HUGE),
    "receive of large": ("recv", send_words([1], [HUGE]), HUGE),
}


@pytest.mark.parametrize("on", ["inproc", "tcp"])
@pytest.mark.parametrize(("call", "say", "size"), BROKEN.values(), ids=BROKEN)
def test_sizes_are_checked_before_memory_is_taken(jobs, on, call, say, size):
    """A rank that announces more than there is memory for is named with its number; the group
    has failed on every rank, and other groups go on."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=f"rank 1 announces {size} ") as caught:
                OBJECT_CALLS[call](group)
            assert (1,) == caught.value.ranks
        else:
            say(group)
        with pytest.raises(dist.DistError):
            dist.barrier(group)
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == jobs.get(on, 2).run(body)


def test_bytes_that_are_no_object_name_their_sender(jobs, backend):
    """A rank that sends something else is named, and the group stays usable."""

    def body(rank):
        if rank == 1:
            gather_sizes(3)(None)
            theirs = len(codec.encode(0, allow_pickle=False))
            outputs = [np.zeros(theirs, np.uint8), np.zeros(3, np.uint8)]
            dist.all_gather(outputs, np.frombuffer(b"\x00xx", np.uint8).copy())
        else:
            with pytest.raises(dist.DistBackendError, match="rank 1 sent is no object: unknown"):
                dist.all_gather_object([None] * 2, 0)
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == jobs.get(backend, 2).run(body)


@pytest.mark.parametrize("reason", ["insecure", "switched off"])
def test_pickle_is_refused_by_both_sides(jobs, monkeypatch, reason):
    """Without authentication, or with allow_pickle=False, nobody sends pickle, nobody takes it,
    plain values travel, and the group goes on."""

    def allow(rank):
        dist.world.current().allow_pickle = True

    def body(rank):
        if reason == "switched off":
            dist.world.current().allow_pickle = False
        kind, why = (TypeError, "needs pickle") if rank else (dist.DistBackendError, "rank 1 could")
        with pytest.raises(kind, match=why):
            dist.all_gather_object([None] * 2, Custom(1) if rank else 0)
        if rank:
            pickled = b"\x01" + pickle.dumps(Custom(1))
            with monkeypatch.context() as patch:
                patch.setattr(codec, "encode", lambda value, allow_pickle: pickled)
                dist.send_object_list([Custom(1)], 0)
        else:
            with pytest.raises(TypeError, match="pickle is switched off here"):
                dist.recv_object_list([None], 1)
        gathered = [None] * 2
        dist.all_gather_object(gathered, values(rank)["list"])
        return gathered

    job = jobs.get("inproc", 2)
    if reason == "insecure":
        monkeypatch.setenv("CYDIST_INSECURE", "1")
    assert [[[], list(range(10))]] * 2 == job.run(body)
    job.run(allow)

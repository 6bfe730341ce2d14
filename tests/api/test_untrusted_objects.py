"""Object collectives among ranks that lie, and among those that may not pickle."""

import itertools
import pickle

import numpy as np
import pytest

import cydist as dist
from cydist.api import object_codec, objects


class Custom:
    """Something that only pickle can say."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return complex, (self.value, 1)


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


LIMIT = 1000
CALLS_OF_STEPS = {
    "all_gather": lambda rank: dist.all_gather_object([None] * 2, 0, timeout=LIMIT),
    "gather": lambda rank: dist.gather_object(0, None if rank else [None] * 2, 0, timeout=LIMIT),
    "broadcast": lambda rank: dist.broadcast_object_list([0], 0, timeout=LIMIT),
    "scatter": lambda rank: dist.scatter_object_list([None], [0, 1], 0, timeout=LIMIT),
    "messages": lambda rank: (
        dist.recv_object_list([None], 0, timeout=LIMIT)
        if rank
        else dist.send_object_list([0], 1, timeout=LIMIT)
    ),
}


@pytest.mark.parametrize("call", CALLS_OF_STEPS.values(), ids=CALLS_OF_STEPS)
def test_a_timeout_is_the_whole_calls(jobs, monkeypatch, call):
    """Each step has what the steps before it left of the timeout, not all of it again."""
    given = {0: [], 1: []}

    def timed(step):
        def call_step(*args, timeout, **kwargs):
            given[dist.get_rank()].append(timeout)
            return step(*args, timeout=timeout, **kwargs)

        return call_step

    for name in ("all_gather", "broadcast", "gather", "scatter", "send", "recv"):
        monkeypatch.setattr(objects, name, timed(getattr(objects, name)))
    clock = itertools.count()  # a second passes whenever somebody looks
    monkeypatch.setattr(objects, "monotonic", lambda: next(clock))
    jobs.get("inproc", 2).run(call)
    for steps in given.values():
        assert len(steps) > 1
        assert sorted(set(steps), reverse=True) == steps
        assert steps[0] < LIMIT


def test_a_class_that_is_missing_here_names_the_sender(jobs, monkeypatch):
    """pickle's own error is the cause; the group goes on."""

    def body(rank):
        if rank:
            with monkeypatch.context() as patch:
                patch.setattr(
                    object_codec, "encode", lambda *_, **__: b"\x01cnosuchmodule\nThing\n."
                )
                dist.send_object_list([0], 0)
        else:
            with pytest.raises(
                dist.DistBackendError,
                match=r"recv_object_list: what rank 1 sent is no object: .*'nosuchmodule'",
            ) as caught:
                dist.recv_object_list([None], 1)
            assert isinstance(caught.value.__cause__, ModuleNotFoundError)
            assert caught.value.ranks == (1,)
        dist.barrier()

    jobs.get("inproc", 2).run(body)


@pytest.mark.parametrize("way", ["send", "recv"])
def test_object_lists_to_oneself_are_refused_by_their_name(jobs, way):
    """The call that was made, not the one it is made of."""

    def body(rank):
        call = getattr(dist, f"{way}_object_list")
        with pytest.raises(ValueError, match=f"^{way}_object_list: .* is this rank itself"):
            call([0], rank)
        dist.barrier()

    jobs.get("inproc", 2).run(body)


@pytest.mark.parametrize("reason", ["insecure", "switched off"])
def test_pickle_is_refused_by_both_sides(jobs, monkeypatch, reason):
    """Without authentication, or with allow_pickle=False, nobody sends pickle, nobody takes it,
    plain values travel, and the group goes on."""

    def allow(rank):
        dist.api.process_groups.current_world().allow_pickle = True

    def body(rank):
        if reason == "switched off":
            dist.api.process_groups.current_world().allow_pickle = False
        kind, why = (TypeError, "needs pickle") if rank else (dist.DistBackendError, "rank 1 could")
        with pytest.raises(kind, match=why):
            dist.all_gather_object([None] * 2, Custom(1) if rank else 0)
        if rank:
            pickled = b"\x01" + pickle.dumps(Custom(1))
            with monkeypatch.context() as patch:
                patch.setattr(object_codec, "encode", lambda value, allow_pickle: pickled)
                dist.send_object_list([Custom(1)], 0)
        else:
            with pytest.raises(TypeError, match="pickle is switched off here"):
                dist.recv_object_list([None], 1)
        gathered = [None] * 2
        dist.all_gather_object(gathered, list(range(10 * rank)))
        return gathered

    job = jobs.get("inproc", 2)
    if reason == "insecure":
        monkeypatch.setenv("CYDIST_INSECURE", "1")
    assert [[[], list(range(10))]] * 2 == job.run(body)
    job.run(allow)

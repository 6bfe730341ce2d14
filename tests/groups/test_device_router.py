"""Backends by kind of memory: "cpu:tcp,cuda:other", and one backend for several kinds."""

import numpy as np
import pytest

import cydist as dist
from cydist.backends.host import create as host_backend
from cydist.groups import registry
from cydist.testing import run_threads

made = []


def _create(options, pg_options):
    made.append(options.group_id)
    return host_backend.create_inproc(options)


@pytest.fixture(scope="module")
def both():
    """A backend that takes memory of two kinds (it is only ever given CPU arrays here)."""
    registry.register_backend("both", _create, extended_api=True)
    yield "both"
    del registry._plugins["both"], dist.Backend.BOTH


def test_one_group_serves_all_kinds_of_memory_of_a_backend(both):
    """Its creator is called once for a group, not once for a kind."""
    made.clear()
    run_threads(lambda rank: dist.barrier(), 1, both)
    assert ["0"] == made


@pytest.mark.parametrize("call", [dist.barrier, dist.monitored_barrier], ids=lambda f: f.__name__)
def test_calls_without_an_array_work_where_kinds_have_backends_of_their_own(both, call):
    """A barrier runs on each of them."""

    def body(rank):
        assert "cpu:inproc,cuda:both" == dist.get_backend()
        call()
        x = np.ones(2)
        dist.all_reduce(x)
        group = dist.new_group([0, 1])
        call(group)
        return x[0]

    assert [2.0, 2.0] == run_threads(body, 2, "cpu:inproc,cuda:both")


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_is_of_every_backend(both, monkeypatch, async_op):
    """Each part has one, also a blocking one that a rank comes late to."""

    def body(rank):
        calls = []
        group = dist.group.WORLD
        for device, part in group.by_device.items():
            monkeypatch.setattr(part, "run_barrier", _noted(calls, device, part.run_barrier))
        work = dist.barrier(async_op=async_op)
        if work is not None:
            work.wait(30)
            assert work.is_success()
        return sorted(calls)  # asynchronous ones run at once

    assert [["cpu", "cuda"]] * 2 == run_threads(body, 2, "cpu:inproc,cuda:both")


@pytest.mark.parametrize("given", [True, False], ids=["given", "the group's"])
def test_a_barrier_of_several_backends_has_one_timeout(both, monkeypatch, given):
    """What the first one takes, the second one has no more."""

    def body(rank):
        group = dist.new_group([0], timeout=0.1)
        first, second = group.by_device.values()
        begun, left = [], []

        def take_all(call):
            begun.append(call)
            while call.remaining():
                pass

        monkeypatch.setattr(first, "run_barrier", take_all)
        monkeypatch.setattr(second, "run_barrier", lambda call: left.append(call.remaining()))
        dist.barrier(group, timeout=0.1 if given else None)
        return len(begun), left

    assert [(1, [0])] == run_threads(body, 1, "cpu:inproc,cuda:both")


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_that_one_backend_refuses_does_not_begin(both, monkeypatch, async_op):
    """Nobody would hear of the first backend's part of it, which has one call here: ours."""

    def body(rank):
        group, calls = dist.new_group([0]), []
        first, second = group.by_device.values()
        monkeypatch.setattr(first, "run_barrier", _noted(calls, "first", first.run_barrier))
        second.abort()
        with pytest.raises(dist.GroupFailedError, match="was aborted"):
            dist.barrier(group, async_op=async_op)
        first.execute("barrier", first.run_barrier)
        return calls

    assert [["first"]] == run_threads(body, 1, "cpu:inproc,cuda:both")


def _noted(calls, device, barrier):
    def run(call):
        calls.append(device)
        barrier(call)

    return run


def test_the_ranks_that_are_left_have_every_backend(both):
    """shrink_group goes part by part; the new group routes as the old one."""

    def body(rank):
        dist.barrier()
        if rank == 1:
            return None
        group = dist.shrink_group([1])
        x = np.ones(2)
        dist.all_reduce(x)
        dist.barrier()
        sizes = [part.size() for part in group.by_device.values()]
        return x[0], sizes, [part.ranks for part in group.by_device.values()], dist.get_backend()

    found = run_threads(body, 3, "cpu:tcp,cuda:both")
    assert [found[0], found[2]] == [
        (2.0, [2, 2], [(0, 1), (0, 1)], "cpu:tcp,cuda:both"),
    ] * 2


def test_groups_share_what_the_parts_of_the_default_group_hold():
    """One link for each backend, and not for each group."""

    def body(rank):
        default, made = dist.group.WORLD, dist.new_group()
        x = np.ones(2)
        dist.all_reduce(x, group=made)
        pairs = zip(default.by_device.values(), made.by_device.values(), strict=True)
        return x[0], [one._endpoint is other._endpoint for one, other in pairs]

    assert [(2.0, [True, True])] * 2 == run_threads(body, 2, "cpu:tcp,cuda:gloo")
